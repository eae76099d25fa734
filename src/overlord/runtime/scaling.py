"""The part of ``ProcessHost`` that looks at what loaders and trainers do, asks ``scaling/scaler.py`` what follows, and has it done."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import numpy as np

from overlord.messages import Hold
from overlord.runtime.options import n_cores
from overlord.runtime.spreading import Spreading
from overlord.runtime.starting import lanes_of, scales
from overlord.scaling.scaler import CannotKeepUp, Decision, Limits, Observed, ReadAhead, Scale, Scaler, SourceSeen, in_force

log = logging.getLogger("overlord")

KEPT_DECISIONS = 200
POINTS = 4  # of a schedule's future that are looked at

Row = tuple[int, bool, float, float, int, float, float]  # loader, whether a shadow, busy and all seconds, samples, a usual and a slow read


class Scaling(Spreading):
    """In the pump, but for the clock."""

    def _plan_scaling(self) -> None:
        self._scaler: Scaler | None = None
        self._decided: deque[tuple[float, int, Decision]] = deque(maxlen=KEPT_DECISIONS)  # when, behind which step, what
        self._gauges: dict[str, Any] = {}  # answers of this look, by host
        self._asked_hosts = self._looking = 0
        self._weights: dict[str, int] = {}  # bytes that loader hosts hold, where that is bounded
        self._last: dict[tuple[int, int], Row] = {}  # by host and loader, of the look before
        self._before: tuple[float, int, int, float, np.ndarray] | None = None  # time, planned, taken, waited, drawn
        self._stop_looking: Callable[[], None] = lambda: None
        if not scales(self.blueprint):
            return
        options, lanes = self.blueprint.options, lanes_of(self.blueprint.options, self.hosting)
        cores = max(self.hosting.n_hosts, (options.hosts or n_cores()) // lanes)
        said = dict(options.autoscale) if isinstance(options.autoscale, Mapping) else {}
        self._scaler = Scaler(Limits(**{"cores": cores, "lanes": float(lanes), **said}), options.read_ahead or 1)

    def _start_scaling(self) -> None:
        """All parts are there."""
        if self._scaler is not None:
            self._stop_looking = self._machine.every(self._scaler.limits.interval_s, self._look, "overlord scaling")

    # looking

    def _look(self) -> None:
        """Beside the pump, which may be busy for longer than an interval: then one look is enough."""
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
            remote.call(self._control, "gauge").add_done_callback(lambda f, name=name: self._told_gauge(name, f))  # type: ignore[misc]
            if name.startswith("loader") and self._scaler is not None and self._scaler.limits.memory_bytes is not None:
                remote.call(self._control, "weighs").add_done_callback(lambda f, name=name: self._told_weight(name, f))  # type: ignore[misc]

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
        if any(a is None for a in self._gauges.values()):  # some part is being lost: what is seen now is no measure
            self._before = None
        elif (observed := self._observed()) is not None and self._scaler is not None:
            for decision in self._scaler.handle(observed, self._machine.now()):
                self._decide(decision)

    def _observed(self) -> Observed | None:
        """What happened since the last look; None: there was none."""
        waits = [row[1] for name, rows in self._gauges.items() if name.startswith("constructor") for row in rows]
        waited = math.fsum(waits) / len(waits) if waits else 0.0
        drawn, now = self.planner.ledger.samples.astype(float), self._machine.now()
        was, self._before = self._before, (now, self.planner.next_step, self.past.acked, waited, drawn)
        rows = self._rows()
        if was is None or now <= was[0] or len(drawn) != len(was[4]):
            return None
        hosts = [h for h in self._loaders if h in self._living()]
        weights = [self._weights.get(self._loaders[h].handle.name, 0) for h in hosts]
        sources = self._sources_seen(rows, np.maximum(drawn - was[4], 0.0))
        return Observed(
            seconds=now - was[0], planned=max(0, self.planner.next_step - was[1]), taken=max(0, self.past.acked - was[2]),
            waited_s=max(0.0, waited - was[3]), hosts=len(hosts), sources=sources, changing=self.changing,
            host_bytes=max(weights, default=0),
        )  # fmt: skip

    def _rows(self) -> dict[int, Row]:
        """What every loader did since the last look, where it is read; shadows are known, so that one of them that takes over is."""
        found, last = dict[int, Row](), dict[tuple[int, int], Row]()
        for name, rows in self._gauges.items():
            if not name.startswith("loader"):
                continue
            h = int(name.rpartition("/")[2])
            for loader, shadow, busy_s, took_s, samples, *reads in rows:
                last[h, loader] = (loader, shadow, busy_s, took_s, samples, *reads)
                _, _, *had = self._last.get((h, loader), last[h, loader])
                if samples < had[2]:  # it was opened again, and counts from nothing
                    had = [0.0, 0.0, 0, *reads]
                if not shadow:
                    found[loader] = (loader, shadow, busy_s - had[0], took_s - had[1], samples - int(had[2]), *reads)
        self._last = last
        return found

    def _sources_seen(self, rows: Mapping[int, Row], drawn: np.ndarray) -> tuple[SourceSeen, ...]:
        assert self._scaler is not None
        shares = self.planner.shares()
        span = max(1, math.ceil(self._scaler.pace * self._scaler.limits.foresight_s))
        future = [self.planner.shares(self.planner.next_step + span * k // POINTS) for k in range(1, POINTS + 1)]
        seen, waited_for = [], self.planner.waits_for()
        for i, name in enumerate(self.planner.spec.names):
            mine = [rows[k] for k in self._numbers(i) if k in rows]
            seen.append(
                SourceSeen(
                    name=name, share=float(shares[i]), ahead=float(max(shares[i], *(f[i] for f in future))), drawn=float(drawn[i]),
                    read=float(sum(r[4] for r in mine)), busy_s=math.fsum(r[2] for r in mine), took_s=math.fsum(r[3] for r in mine),
                    waited_for=name in waited_for, hosts=tuple(self.hosts_of(i)),
                    most=self.hosting.loaders[i], read_s=float(np.median([r[5] for r in mine])) if mine else 0.0,
                    slow_read_s=max((r[6] for r in mine), default=0.0),
                )
            )  # fmt: skip
        return tuple(seen)

    # deciding

    def _decide(self, decision: Decision) -> None:
        source = self.planner.spec.names.index(decision.source)
        match decision:
            case Scale(hosts=hosts):
                if not self.spread(source, hosts):
                    return
                log.info("%s", decision)
            case ReadAhead(steps=steps):
                log.info("%s", decision)
                self.run(self.planner.handle(Hold(source, steps)))
            case CannotKeepUp():
                log.warning("%s", decision)
        self._decided.append((self._machine.now(), self.planner.next_step - 1, decision))

    def _scaling_figures(self) -> dict[str, Any]:
        """For people: what was decided and why, who cannot keep up, and what is known of every source."""
        scaler, now = self._scaler, self._machine.now()
        if scaler is None:
            return {}
        short = {d.source: {"needs": d.wanted, "has": d.hosts, "reason": d.reason} for d in in_force([d for _, _, d in self._decided])}
        told = [
            {"what": type(d).__name__, "ago_s": now - t, "step": step, "words": str(d), **asdict(d)} for t, step, d in self._decided
        ]  # fmt: skip
        hosts = {name: len(self.hosts_of(i)) for i, name in enumerate(self.planner.spec.names)}
        return {
            "hosts": len(self._living()), "host_bytes": max(self._weights.values(), default=0), "most_hosts": scaler.limits.cores,
            "changing": self.changing, "steps_per_s": scaler.pace,
            "waited": scaler.waited, "decisions": told, "cannot_keep_up": short,
            "sources": {name: {"hosts": hosts.get(name, 0), **known} for name, known in scaler.figures().items()},
        }  # fmt: skip
