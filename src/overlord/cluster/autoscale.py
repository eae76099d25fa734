"""Autoscaling: polls of loaders and trainers, and the decisions of ``scaling/scaler.py``."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any, Protocol

import numpy as np

from overlord.cluster.current_job import CurrentJob, JobWorkers
from overlord.cluster.placement import AttachedRanks
from overlord.cluster.plan_router import PlanHistory
from overlord.cluster.rebalance import Rebalancer
from overlord.cluster.worker_factory import loader_threads
from overlord.cluster.worker_pool import ProcessContext
from overlord.messages.control import SetReadAhead
from overlord.messages.data import LoaderWork
from overlord.planning.planner import Planner
from overlord.scaling.core_demand import cores_of_threads
from overlord.scaling.decisions import CannotKeepUp, Decision, ReadAhead, Scale, current_shortages
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.scaling.scaler import Observation, Scaler, ScalingLimits, SourceSample
from overlord.setup.options import Options, n_cores
from overlord.setup.partition import loads_of, scales
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# The load observer: it compares two polls of loaders and trainers for ``scaling/scaler.py``.
#
# Every runtime can have an observer; only the cluster runtime can move loaders.

KEPT_DECISIONS = 200  # latest decisions that ``metrics()["scaling"]`` lists
POINTS = 4  # number of future steps at which a schedule is evaluated


def observing_scaler(options: Options, read_ahead: int) -> Scaler | None:
    """Return a scaler that moves no loaders; None if ``watch_s`` is 0, which turns polls off."""
    if not options.watch_s:
        return None
    limits = ScalingLimits(
        cores=options.hosts or n_cores(), interval_s=options.watch_s, patience=4, idle_patience=4
    )
    return Scaler(limits, read_ahead, fixed=True)


class SourceReaders(Protocol):
    """The placement of sources in a runtime: their loaders, workers and processes."""

    def loaders_of(self, source: int) -> range:
        """Return the loader numbers of a source."""
        ...

    def places_of(self, source: int) -> tuple[int, ...]:
        """Return the workers that read a source; its loaders if they cannot be moved."""
        ...

    def n_processes(self, source: int) -> int:
        """Return the number of processes that run the code of a source."""
        ...

    def available_workers(self, source: int) -> tuple[int, ...]:
        """Return the workers that can read a source but do not read it now."""
        ...

    def free_s(self, source: int) -> float:
        """Return the CPU seconds per sample in code that is known to release the interpreter lock.

        Infinity: all code of the source releases it.
        """
        ...


class LoadObserver:
    """The link between polls and a scaler: it passes changes on, and executes the decisions.

    ``scale(source, n, on)`` starts to read a source in ``n`` workers, and returns whether it does
    so. ``set_read_ahead`` receives the command for the planner. Runs on: event loop.
    """

    def __init__(
        self,
        scaler: Scaler,
        planner: Callable[[], Planner],
        readers: SourceReaders,
        *,
        set_read_ahead: Callable[[SetReadAhead], None],
        scale: Callable[[int, int, Sequence[int]], bool] = lambda source, n, on: False,
    ):
        self.scaler, self._planner, self._readers = scaler, planner, readers
        self._set_read_ahead, self._scale = set_read_ahead, scale
        # time of the decision, last planned step, decision
        self.decided: deque[tuple[float, int, Decision]] = deque(maxlen=KEPT_DECISIONS)
        # totals at the previous poll, by worker and loader
        self._last: dict[tuple[int, int], LoaderWork] = {}
        # the previous poll: time, next step to plan, last taken step, mean seconds waited, and
        # samples drawn by source
        self._before: tuple[float, int, int, float, np.ndarray] | None = None

    def restart(self) -> None:
        """Discard the previous poll, so that the next one is not compared with it."""
        self._before = None

    def observe(
        self,
        now: float,
        stats: Mapping[int, Iterable[LoaderWork]],
        taken: int,
        waited_s: float,
        **more: Any,
    ) -> Observation | None:
        """Record a poll; return the changes since the previous one, or None if there are none.

        There are none at the first poll, after ``restart``, and when a source was added. ``stats``
        has the totals of loaders by worker. ``taken`` is the last step that all trainers took.
        ``waited_s`` is the mean of the seconds that trainers have waited since the start. ``more``
        has further fields of ``Observation``.
        """
        planner = self._planner()
        drawn, planned = planner.ledger.samples.astype(float), planner.next_step
        was, self._before = self._before, (now, planned, taken, waited_s, drawn)
        rows = self._rows(stats)
        if was is None or now <= was[0] or len(drawn) != len(was[4]):
            return None
        return Observation(
            seconds=now - was[0],
            planned=max(0, planned - was[1]),
            taken=max(0, taken - was[2]),
            waited_s=max(0.0, waited_s - was[3]),
            sources=self._samples(planner, rows, np.maximum(drawn - was[4], 0.0)),
            **more,
        )

    def _rows(self, stats: Mapping[int, Iterable[LoaderWork]]) -> dict[int, LoaderWork]:
        """Return the change of every loader's totals since the previous poll, without standbys.

        The change is zero at the first poll of a loader. The totals of standbys are kept too, for
        the first poll after a promotion.
        """
        found, last = dict[int, LoaderWork](), dict[tuple[int, int], LoaderWork]()
        for worker, rows in stats.items():
            for row in rows:
                last[worker, row.loader] = row
                had = self._last.get((worker, row.loader), row)
                if row.samples < had.samples:  # the loader was reopened and counts from zero
                    had = replace(row, busy_s=0.0, took_s=0.0, samples=0)
                if not row.standby:
                    found[row.loader] = replace(
                        row,
                        busy_s=row.busy_s - had.busy_s,
                        took_s=row.took_s - had.took_s,
                        samples=row.samples - had.samples,
                    )
        self._last = last
        return found

    def _samples(
        self, planner: Planner, rows: Mapping[int, LoaderWork], drawn: np.ndarray
    ) -> tuple[SourceSample, ...]:
        shares, future = planner.shares(), list[np.ndarray]()
        if not self.scaler.fixed:  # a fixed scaler ignores the future, so schedules are not called
            span = max(1, math.ceil(self.scaler.pace * self.scaler.limits.foresight_s))
            first, spec = planner.next_step, planner.spec
            steps = [first + span * k // POINTS for k in range(1, POINTS + 1)]
            future = [planner.shares(step) * spec.growth(first, step) for step in steps]
        samples, waited_for, readers = [], planner.lacking_sources(), self._readers
        for i, name in enumerate(planner.spec.names):
            mine = [rows[k] for k in readers.loaders_of(i) if k in rows]
            samples.append(
                SourceSample(
                    name=name,
                    share=float(shares[i]),
                    ahead=float(max([shares[i], *(f[i] for f in future)])),
                    drawn=float(drawn[i]),
                    read=float(sum(r.samples for r in mine)),
                    busy_s=math.fsum(r.busy_s for r in mine),
                    took_s=math.fsum(r.took_s for r in mine),
                    waited_for=name in waited_for,
                    hosts=readers.places_of(i),
                    most=len(readers.loaders_of(i)),
                    free_s=readers.free_s(i),
                    processes=readers.n_processes(i),
                    able=readers.available_workers(i),
                    read_s=median(r.usual_read_s for r in mine) if mine else 0.0,
                    slow_read_s=max((r.slow_read_s for r in mine), default=0.0),
                )
            )
        return tuple(samples)

    def conclude(self, observed: Observation | None, now: float) -> None:
        """Pass an observation to the scaler and execute its decisions."""
        if observed is not None:
            for decision in self.scaler.handle(observed, now):
                self._decide(decision, now)

    def _decide(self, decision: Decision, now: float) -> None:
        names = self._planner().spec.names
        match decision:
            case Scale(source=source, hosts=n, on=on):
                if not self._scale(names.index(source), n, on):
                    return
                log.info(
                    "scaling of source %r started, from %d to %d loader workers: %s",
                    source,
                    decision.had,
                    n,
                    decision.reason,
                )
            case ReadAhead(source=source, steps=steps):
                reason = decision.reason
                log.info("read-ahead of source %r set to %d steps: %s", source, steps, reason)
                self._set_read_ahead(SetReadAhead(names.index(source), steps))
            case CannotKeepUp(source=source):
                log.warning(
                    "source %r cannot keep up: it needs %d %s and has %d: %s",
                    source,
                    decision.wanted,
                    decision.what,
                    decision.hosts,
                    decision.reason,
                )
        self.decided.append((now, self._planner().next_step - 1, decision))

    def metrics(self, now: float) -> dict[str, Any]:
        """Return the pace of trainers, recent decisions, and shortages and estimates by source."""
        scaler, names = self.scaler, self._planner().spec.names
        short = {
            d.source: {"needs": d.wanted, "has": d.hosts, "what": d.what, "reason": d.reason}
            for d in current_shortages([d for _, _, d in self.decided])
        }
        decisions = [
            {"what": type(d).__name__, "ago_s": now - t, "step": step, "words": str(d), **_plain(d)}
            for t, step, d in self.decided
        ]
        places = {name: len(self._readers.places_of(i)) for i, name in enumerate(names)}
        where = "loaders" if scaler.fixed else "hosts"
        return {
            "moves": not scaler.fixed,
            "steps_per_s": scaler.pace,
            "waited": scaler.waited,
            "decisions": decisions,
            "cannot_keep_up": short,
            "sources": {
                name: {where: places.get(name, 0), **known}
                for name, known in scaler.estimates().items()
            },
        }


def _plain(decision: Decision) -> dict[str, Any]:
    """Return the fields of a decision without ``what``.

    In the metrics this key holds the name of the decision's class.
    """
    return {name: value for name, value in asdict(decision).items() if name != "what"}


# ----------------------------------------------------------------------------
# The autoscaler of a cluster: it polls workers and passes the answers to a load observer.


def scaler_of(
    prepared: PreparedJob, loader_placement: LoaderPlacement, read_ahead: int
) -> Scaler | None:
    """Return a scaler that moves loaders, if the job may scale, else ``observing_scaler``."""
    options = prepared.options
    if not scales(prepared):
        return observing_scaler(options, read_ahead)
    cores = max(loader_placement.n_hosts, options.hosts or n_cores())
    given = dict(options.autoscale) if isinstance(options.autoscale, Mapping) else {}
    limits = ScalingLimits(
        **{
            "cores": cores,
            "lanes": cores_of_threads(loader_threads(options, loader_placement)),
            **given,
        }
    )
    return Scaler(limits, options.read_ahead or 1)


class Autoscaler:
    """The autoscaler of a cluster: it polls workers and executes the decisions of a scaler.

    ``set_read_ahead`` receives a command for the planner. Workers are polled only while a rank is
    attached. Runs on: event loop.
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
        self._answers: dict[str, Any] = {}  # to the current poll, by worker; None: it failed
        self._n_polled = 0
        self._polling = False
        self._free_seconds: list[float] = []  # by source, see ``free_s``
        # living workers that could read more sources at the last poll
        self._with_room: set[int] = set()
        self._rss: dict[str, int] = {}  # PSS of loader workers; measured if memory is bounded
        self._stop: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start to poll periodically. All workers must have started."""
        interval_s = self._scaler.limits.interval_s
        self._stop = self._platform.every(interval_s, self._tick, "overlord scaling")

    def close(self) -> None:
        self._stop()

    # polling

    def _tick(self) -> None:
        """Post a poll unless one is in progress. Runs on: timer thread."""
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
        if any(a is None for a in self._answers.values()):  # a call failed: a worker may be lost
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
        self._with_room = living - self._full_workers()
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
        """Return the workers that read ``sources_per_host`` sources; none without that option."""
        if not (bound := self._current.prepared.options.sources_per_host):
            return set()
        sources = range(len(self._placement.loaders))
        reads = Counter(h for i in sources for h in self._placement.workers_of(i))
        return {h for h, n in reads.items() if n >= bound}

    # ``SourceReaders``

    def loaders_of(self, source: int) -> range:
        return self._placement.loaders_of(source)

    def places_of(self, source: int) -> tuple[int, ...]:
        """Return the workers that read a source; with a fixed scaler, its loaders."""
        if self._scaler.fixed:
            return tuple(self._placement.loaders_of(source))
        return tuple(self._placement.workers_of(source))

    def n_processes(self, source: int) -> int:
        return len(self._placement.workers_of(source))

    def available_workers(self, source: int) -> tuple[int, ...]:
        """Return the living workers that could read a source but do not read it now.

        Each has the code of the source, and read fewer than ``sources_per_host`` at the last poll.
        """
        readers = set(self._placement.workers_of(source))
        workers = sorted(self._with_room - readers)
        return tuple(h for h in workers if self._placement.can_open(h, source))

    def free_s(self, source: int) -> float:
        """Return the CPU seconds per sample in code that is known to release the interpreter lock.

        A coordinator does not have the code of added sources. It assumes that
        this code holds the lock, and returns 0.
        """
        n = len(self._current.planner.spec.sources)
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
