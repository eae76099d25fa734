"""What loaders and trainers did since the last look, as ``scaling/scaler.py`` is told of it, and
what it answered: on every runtime.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from overlord.messages.control import SetReadAhead
from overlord.planning.planner import Planner
from overlord.scaling.scaler import (
    CannotKeepUp,
    Decision,
    Limits,
    Observation,
    ReadAhead,
    Scale,
    Scaler,
    SourceSample,
    in_force,
)
from overlord.setup.options import Options, n_cores

log = logging.getLogger("overlord")

KEPT_DECISIONS = 200
POINTS = 4  # of a schedule's future that are looked at

Row = tuple[
    int, bool, float, float, int, float, float
]  # loader, whether a shadow, busy and all seconds, samples, a usual and a slow read


def onlooker(options: Options, read_ahead: int) -> Scaler | None:
    """Who looks where nothing is moved; None: nobody is to."""
    if not options.watch_s:
        return None
    limits = Limits(
        cores=options.hosts or n_cores(), interval_s=options.watch_s, patience=4, idle_patience=4
    )
    return Scaler(limits, read_ahead, fixed=True)


class Watching:
    """The part of an engine that looks. In the pump."""

    planner: Planner
    _scaler: Scaler | None = None  # None: nobody looks

    def _watch(self, scaler: Scaler | None) -> None:
        self._scaler = scaler
        self._decided: deque[tuple[float, int, Decision]] = deque(
            maxlen=KEPT_DECISIONS
        )  # when, behind which step, what
        self._last: dict[tuple[int, int], Row] = {}  # by host and loader, of the look before
        self._before: tuple[float, int, int, float, np.ndarray] | None = (
            None  # time, planned, taken, waited, drawn
        )

    def run(self, commands: Sequence[Any] = ()) -> None:
        raise NotImplementedError

    def _numbers(self, source: int) -> range:
        """Of its loaders."""
        raise NotImplementedError

    def _places(self, source: int) -> tuple[int, ...]:
        """Where a source is read: in which hosts, or, where nothing is moved, by which loaders."""
        return tuple(self._numbers(source))

    def _n_processes(self, source: int) -> int:
        """Return the number of processes that a source's code runs in."""
        return 1

    def _able(self, source: int) -> tuple[int, ...]:
        """Return the hosts that do not read a source and could."""
        return ()

    def _free_s(self, source: int) -> float:
        """Return the seconds of a core, for a sample of a source, that are known to release the
        interpreter lock.
        """
        return math.inf

    # looking

    def _observed(
        self,
        now: float,
        gauges: Mapping[int, Iterable[Row]],
        taken: int,
        waited_s: float,
        **more: Any,
    ) -> Observation | None:
        """What happened since the last look; None: there was none. ``gauges``: what loaders have
        done in all, by host; ``taken``: the last step that all trainers took; ``waited_s``: how
        long they have waited, on average.
        """
        drawn, planned = self.planner.ledger.samples.astype(float), self.planner.next_step
        was, self._before = self._before, (now, planned, taken, waited_s, drawn)
        rows = self._rows(gauges)
        if was is None or now <= was[0] or len(drawn) != len(was[4]):
            return None
        return Observation(
            seconds=now - was[0],
            planned=max(0, planned - was[1]),
            taken=max(0, taken - was[2]),
            waited_s=max(0.0, waited_s - was[3]),
            sources=self._sources_seen(rows, np.maximum(drawn - was[4], 0.0)),
            **more,
        )

    def _rows(self, gauges: Mapping[int, Iterable[Row]]) -> dict[int, Row]:
        """What every loader did since the last look, where it is read; shadows are known, so that
        one of them that takes over is.
        """
        found, last = dict[int, Row](), dict[tuple[int, int], Row]()
        for h, rows in gauges.items():
            for row in rows:
                loader, shadow, busy_s, took_s, samples, usual_s, slow_s = row
                last[h, loader] = row
                had = self._last.get((h, loader), row)
                if samples < had[4]:  # it was opened again, and counts from nothing
                    had = (loader, shadow, 0.0, 0.0, 0, 0.0, 0.0)
                if not shadow:
                    found[loader] = (
                        loader,
                        shadow,
                        busy_s - had[2],
                        took_s - had[3],
                        samples - had[4],
                        usual_s,
                        slow_s,
                    )
        self._last = last
        return found

    def _sources_seen(self, rows: Mapping[int, Row], drawn: np.ndarray) -> tuple[SourceSample, ...]:
        assert self._scaler is not None
        shares, future = self.planner.shares(), list[np.ndarray]()
        if (
            not self._scaler.fixed
        ):  # else nothing could be done for it, and schedules of users need not be asked
            span = max(1, math.ceil(self._scaler.pace * self._scaler.limits.foresight_s))
            future = [
                self.planner.shares(self.planner.next_step + span * k // POINTS)
                for k in range(1, POINTS + 1)
            ]
        seen, waited_for = [], self.planner.waits_for()
        for i, name in enumerate(self.planner.spec.names):
            mine = [rows[k] for k in self._numbers(i) if k in rows]
            seen.append(
                SourceSample(
                    name=name,
                    share=float(shares[i]),
                    ahead=float(max([shares[i], *(f[i] for f in future)])),
                    drawn=float(drawn[i]),
                    read=float(sum(r[4] for r in mine)),
                    busy_s=math.fsum(r[2] for r in mine),
                    took_s=math.fsum(r[3] for r in mine),
                    waited_for=name in waited_for,
                    hosts=self._places(i),
                    most=len(self._numbers(i)),
                    free_s=self._free_s(i),
                    processes=self._n_processes(i),
                    able=self._able(i),
                    read_s=float(np.median([r[5] for r in mine])) if mine else 0.0,
                    slow_read_s=max((r[6] for r in mine), default=0.0),
                )
            )
        return tuple(seen)

    # deciding

    def _conclude(self, observed: Observation | None, now: float) -> None:
        """Ask what follows from it, and have it done."""
        if observed is not None and self._scaler is not None:
            for decision in self._scaler.handle(observed, now):
                self._decide(decision, now)

    def _decide(self, decision: Decision, now: float) -> None:
        match decision:
            case Scale(source=source, hosts=hosts, on=on):
                if not self._spread(self.planner.spec.names.index(source), hosts, on):
                    return
                log.info("%s", decision)
            case ReadAhead(source=source, steps=steps):
                log.info("%s", decision)
                self.run(
                    self.planner.handle(SetReadAhead(self.planner.spec.names.index(source), steps))
                )
            case CannotKeepUp():
                log.warning("%s", decision)
        self._decided.append((now, self.planner.next_step - 1, decision))

    def _spread(self, source: int, hosts: int, on: Sequence[int]) -> bool:
        return False

    def _watch_figures(self, now: float) -> dict[str, Any]:
        """For people: what was decided and why, who cannot keep up, and what is known of every
        source.
        """
        scaler = self._scaler
        if scaler is None:
            return {}
        short = {
            d.source: {"needs": d.wanted, "has": d.hosts, "what": d.what, "reason": d.reason}
            for d in in_force([d for _, _, d in self._decided])
        }
        told = [
            {"what": type(d).__name__, "ago_s": now - t, "step": step, "words": str(d), **_plain(d)}
            for t, step, d in self._decided
        ]
        places = {name: len(self._places(i)) for i, name in enumerate(self.planner.spec.names)}
        where = "loaders" if scaler.fixed else "hosts"
        return {
            "moves": not scaler.fixed,
            "steps_per_s": scaler.pace,
            "waited": scaler.waited,
            "decisions": told,
            "cannot_keep_up": short,
            "sources": {
                name: {where: places.get(name, 0), **known}
                for name, known in scaler.figures().items()
            },
        }


def _plain(decision: Decision) -> dict[str, Any]:
    """``what`` of a decision is its kind."""
    return {name: value for name, value in asdict(decision).items() if name != "what"}
