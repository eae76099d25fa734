"""Polls loaders and trainers, asks ``scaling/scaler.py`` for decisions, and executes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from overlord.cluster.attached_ranks import AttachedRanks
from overlord.cluster.current_job import CurrentJob, JobWorkers
from overlord.cluster.loader_stats import LoadObserver, observing_scaler
from overlord.cluster.plan_history import PlanHistory
from overlord.cluster.rebalance import Rebalancer
from overlord.cluster.worker_factory import lanes_of
from overlord.cluster.worker_pool import ProcessContext
from overlord.messages.control import SetReadAhead
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.scaling.scaler import Limits, Observation, Scaler
from overlord.scaling.threads import worth
from overlord.setup.options import n_cores
from overlord.setup.partition import loads_of, scales
from overlord.setup.prepared_job import PreparedJob


def scaler_of(
    prepared: PreparedJob, loader_placement: LoaderPlacement, read_ahead: int
) -> Scaler | None:
    """Return the scaler of a job: one that moves loaders, one that observes, or None."""
    options = prepared.options
    if not scales(prepared):
        return observing_scaler(options, read_ahead)
    cores = max(loader_placement.n_hosts, options.hosts or n_cores())
    given = dict(options.autoscale) if isinstance(options.autoscale, Mapping) else {}
    limits = Limits(
        **{"cores": cores, "lanes": worth(lanes_of(options, loader_placement)), **given}
    )
    return Scaler(limits, options.read_ahead or 1)


class Autoscaler:
    """Polls the workers and executes the decisions of a scaler. Runs on: event loop.

    ``set_read_ahead`` receives a command for the planner. Nothing is polled while ``attached`` is
    empty.
    """

    def __init__(
        self,
        scaler: Scaler,
        current: CurrentJob,
        context: ProcessContext,
        *,
        workers: JobWorkers,
        rebalancer: Rebalancer,
        history: PlanHistory,
        attached: AttachedRanks,
        set_read_ahead: Callable[[SetReadAhead], None],
    ):
        self._placement, self._pool = workers.placement, workers.pool
        self._rebalancer, self._history, self._attached = rebalancer, history, attached
        self._event_loop, self._platform = context.event_loop, context.platform
        self._current = current
        self._observer = LoadObserver(
            scaler,
            lambda: current.planner,
            self,
            set_read_ahead=set_read_ahead,
            scale=rebalancer.scale,
        )
        self._scaler = scaler
        self._answers: dict[str, Any] = {}  # of this poll, by worker
        self._n_polled = 0
        self._polling = False
        self._free_seconds: list[float] = []  # by source, see ``free_s``
        self._full: set[int] = set()  # workers that may read no other source, at the last poll
        self._rss: dict[str, int] = {}  # bytes of loader workers, where that is bounded
        self._stop: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Poll from now on, once all workers have started."""
        interval_s = self._scaler.limits.interval_s
        self._stop = self._platform.every(interval_s, self._tick, "overlord scaling")

    def close(self) -> None:
        self._stop()

    # polling

    def _tick(self) -> None:
        """Post a poll unless one is under way. Runs on: timer thread."""
        if not self._polling:
            self._polling = True
            self._event_loop.post(self._poll)

    def _poll(self) -> None:
        workers = [w for w in self._pool.workers() if w.joined and not w.lost]
        finished = self._current.planner.finished is not None
        if self._pool.closed or finished or not self._attached or not workers:
            self._polling = False
            self._observer.restart()
            return
        self._answers, self._n_polled = {}, len(workers)
        self._pool.poll(workers, "work", self._polled)
        if self._scaler.limits.memory_bytes is not None:
            loaders = [worker for worker in workers if worker.is_loader]
            self._pool.poll(loaders, "pss_bytes", self._measured)

    def _measured(self, name: str, nbytes: Any) -> None:
        if nbytes is not None:
            self._rss[name] = int(nbytes)

    def _polled(self, name: str, answer: Any) -> None:
        self._answers[name] = answer
        if len(self._answers) < self._n_polled or self._pool.closed:
            return
        self._polling = False
        if any(a is None for a in self._answers.values()):  # a worker is being lost
            self._observer.restart()
        else:
            self._observer.conclude(self._observe(), self._platform.now())

    def _observe(self) -> Observation | None:
        """Return the observation of a poll that all workers have answered."""
        waits = [
            row.waited_s
            for name, rows in self._answers.items()
            if name.startswith("constructor")
            for row in rows
        ]
        stats = {
            int(name.rpartition("/")[2]): rows
            for name, rows in self._answers.items()
            if name.startswith("loader")
        }
        living = self._pool.living()
        loaders = [self._pool.loaders[h] for h in list(self._pool.loaders) if h in living]
        self._full = self._full_workers()
        return self._observer.observe(
            self._platform.now(),
            stats,
            self._history.acked,
            math.fsum(waits) / len(waits) if waits else 0.0,
            hosts=len(loaders),
            changing=self._rebalancer.changing,
            host_bytes=max((self._rss.get(worker.name, 0) for worker in loaders), default=0),
        )

    def _full_workers(self) -> set[int]:
        """Return the workers that may read no other source."""
        if not (bound := self._current.prepared.options.sources_per_host):
            return set()
        sources = range(len(self._placement.loaders))
        reads = Counter(h for i in sources for h in self._placement.workers_of(i))
        return {h for h, n in reads.items() if n >= bound}

    # where sources are read

    def loaders_of(self, source: int) -> range:
        return self._placement.loaders_of(source)

    def places_of(self, source: int) -> tuple[int, ...]:
        """Return a source's workers; where nothing is moved, its loaders."""
        if self._scaler.fixed:
            return tuple(self._placement.loaders_of(source))
        return tuple(self._placement.workers_of(source))

    def n_processes(self, source: int) -> int:
        return len(self._placement.workers_of(source))

    def able(self, source: int) -> tuple[int, ...]:
        """Return the workers that have a source's code, within ``sources_per_host``."""
        readers = set(self._placement.workers_of(source))
        workers = sorted(self._pool.living() - self._full - readers)
        return tuple(h for h in workers if self._placement.can_open(h, source))

    def free_s(self, source: int) -> float:
        """Return core seconds per sample that are known to release the interpreter lock.

        A coordinator in its own process does not have the code of added sources, and assumes that
        it holds the lock.
        """
        n = len(self._current.planner.spec.names)
        if len(self._free_seconds) != n:
            known = [load.free_s for load in loads_of(self._current.prepared)][:n]
            self._free_seconds = known + [0.0] * (n - len(known))
        return self._free_seconds[source]

    def metrics(self) -> dict[str, Any]:
        found = self._observer.metrics(self._platform.now())
        if self._scaler.fixed:
            return found
        return {
            "hosts": len(self._pool.living()),
            "host_bytes": max(self._rss.values(), default=0),
            "most_hosts": self._scaler.limits.cores,
            "changing": self._rebalancer.changing,
            **found,
        }
