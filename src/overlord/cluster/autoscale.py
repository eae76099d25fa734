"""The part of ``ProcessHost`` that looks at what loaders and trainers do, asks
``scaling/scaler.py`` what follows, and has it done.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from overlord.cluster.loader_stats import Watching, onlooker
from overlord.cluster.rebalance import Spreading
from overlord.cluster.worker_factory import lanes_of
from overlord.scaling.scaler import Limits, Observation, Scaler
from overlord.scaling.threads import worth
from overlord.setup.options import n_cores
from overlord.setup.partition import loads_of, scales


class Scaling(Spreading, Watching):
    """In the pump, but for the clock."""

    def _plan_scaling(self) -> None:
        self._gauges: dict[str, Any] = {}  # answers of this look, by host
        self._asked_hosts = self._looking = 0
        self._free_seconds: list[
            float
        ] = []  # by source: of a sample, known to release the interpreter lock
        self._full: set[int] = set()  # hosts that may read no other source, at the last look
        self._weights: dict[str, int] = {}  # bytes that loader hosts hold, where that is bounded
        self._stop_looking: Callable[[], None] = lambda: None
        options, threads = self.blueprint.options, lanes_of(self.blueprint.options, self.hosting)
        if scales(self.blueprint):
            cores = max(self.hosting.n_hosts, options.hosts or n_cores())
            said = dict(options.autoscale) if isinstance(options.autoscale, Mapping) else {}
            self._watch(
                Scaler(
                    Limits(**{"cores": cores, "lanes": worth(threads), **said}),
                    options.read_ahead or 1,
                )
            )
        elif options.watch_s:
            self._watch(onlooker(options, self.planner.spec.read_ahead))
        else:
            self._watch(None)

    def _start_scaling(self) -> None:
        """All parts are there."""
        if self._scaler is not None:
            self._stop_looking = self._machine.every(
                self._scaler.limits.interval_s, self._look, "overlord scaling"
            )

    # looking

    def _look(self) -> None:
        """Beside the pump, which may be busy for longer than an interval: then one look is
        enough.
        """
        if not self._looking:
            self._looking = 1
            self._pump.post(self._ask_all)

    def _ask_all(self) -> None:
        remotes = [r for r in self._remotes() if r.joined and not r.lost]
        if self._closed or self.planner.finished is not None or not self._attached or not remotes:
            self._looking, self._before = 0, None
            return
        self._gauges, self._asked_hosts = {}, len(remotes)
        for remote in remotes:
            name = remote.handle.name
            remote.call(self._control, "gauge").add_done_callback(
                lambda f, name=name: self._told_gauge(name, f)  # type: ignore[misc]
            )
            if (
                name.startswith("loader")
                and self._scaler is not None
                and self._scaler.limits.memory_bytes is not None
            ):
                remote.call(self._control, "weighs").add_done_callback(
                    lambda f, name=name: self._told_weight(name, f)  # type: ignore[misc]
                )

    def _told_weight(self, name: str, future: Future[Any]) -> None:
        if future.exception() is None:
            nbytes = int(future.result())
            self._pump.post(lambda: self._weights.update({name: nbytes}))

    def _told_gauge(self, name: str, future: Future[Any]) -> None:
        answer = future.result() if future.exception() is None else None
        self._pump.post(lambda: self._gauged(name, answer))

    def _gauged(self, name: str, answer: Any) -> None:
        self._gauges[name] = answer
        if len(self._gauges) < self._asked_hosts or self._closed:
            return
        self._looking = 0
        if any(
            a is None for a in self._gauges.values()
        ):  # some part is being lost: what is seen now is no measure
            self._before = None
        else:
            self._conclude(self._looked(), self._machine.now())

    def _looked(self) -> Observation | None:
        """All have answered."""
        waits = [
            row[1]
            for name, rows in self._gauges.items()
            if name.startswith("constructor")
            for row in rows
        ]
        loaders = {
            int(name.rpartition("/")[2]): rows
            for name, rows in self._gauges.items()
            if name.startswith("loader")
        }
        hosts = [h for h in self._loaders if h in self._living()]
        weights = [self._weights.get(self._loaders[h].handle.name, 0) for h in hosts]
        self._full = self._full_hosts()
        return self._observed(
            self._machine.now(),
            loaders,
            self.past.acked,
            math.fsum(waits) / len(waits) if waits else 0.0,
            hosts=len(hosts),
            changing=self.changing,
            host_bytes=max(weights, default=0),
        )

    def _places(self, source: int) -> tuple[int, ...]:
        return (
            super()._places(source)
            if self._scaler is None or self._scaler.fixed
            else tuple(self.hosts_of(source))
        )

    def _n_processes(self, source: int) -> int:
        return len(self.hosts_of(source))

    def _free_s(self, source: int) -> float:
        """Return what its load says; a planner apart is not told of code in sources that joined,
        and assumes that it holds the lock.
        """
        n = len(self.planner.spec.names)
        if len(self._free_seconds) != n:
            known = [load.free_s for load in loads_of(self.blueprint)][:n]
            self._free_seconds = known + [0.0] * (n - len(known))
        return self._free_seconds[source]

    def _able(self, source: int) -> tuple[int, ...]:
        """Return the hosts that have its code, and no more sources than ``sources_per_host``
        allows.
        """
        hosts = sorted(self._living() - self._full - set(self.hosts_of(source)))
        return tuple(h for h in hosts if source in self._kits.get(h, ()))

    def _full_hosts(self) -> set[int]:
        """Return the hosts that may read no other source."""
        if not (bound := self.blueprint.options.sources_per_host):
            return set()
        reads = Counter(h for i in range(len(self.hosting.loaders)) for h in self.hosts_of(i))
        return {h for h, n in reads.items() if n >= bound}

    def _spread(self, source: int, hosts: int, on: Sequence[int]) -> bool:
        return self.spread(source, hosts, on)

    def _scaling_figures(self) -> dict[str, Any]:
        told = self._watch_figures(self._machine.now())
        if self._scaler is None or self._scaler.fixed:
            return told
        most, weighs = self._scaler.limits.cores, max(self._weights.values(), default=0)
        return {
            "hosts": len(self._living()),
            "host_bytes": weighs,
            "most_hosts": most,
            "changing": self.changing,
            **told,
        }
