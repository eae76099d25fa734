"""What a planner can be asked: where it stands, what it sees, what it waits for. Nothing here
changes it. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.messages.control import Cursor, EndOfJob, Refill, Report, StreamState
from overlord.planning.buffer import Joined, gather
from overlord.planning.demand import Demand
from overlord.planning.look_ahead import ExtendedFront, LookAheadPool
from overlord.planning.mixture import Mixture
from overlord.planning.rank_progress import RankProgress
from overlord.planning.spec import Ledger, PlannerSpec
from overlord.planning.stream import SourceStream
from overlord.sample import Buffer


class Answers:
    """The half of ``Planner`` that only looks."""

    spec: PlannerSpec
    ledger: Ledger
    floor: int
    _begun: int
    _consumed: RankProgress
    _finished: EndOfJob | None
    _demand: Demand
    _ended: EndOfJob | None
    _generations: list[int]
    _mixture: Mixture
    _outstanding: list[int]
    _reserve: LookAheadPool | None
    _state: StreamState
    _streams: list[SourceStream]
    _waiting: dict[int, int]
    _weights: list[float]

    def _open(self, i: int) -> int:
        """Samples of a source that are pulled and not drawn."""
        return 0 if self._reserve is None else self._reserve.open(i)

    def _fronts(self) -> Sequence[ExtendedFront | SourceStream]:
        return (
            self._streams
            if self._reserve is None
            else [ExtendedFront(s, self._reserve.open(i)) for i, s in enumerate(self._streams)]
        )

    def _satisfied(self) -> bool:
        return all(
            self._streams[i].ready >= n or self._streams[i].ended or self._streams[i].error
            for i, n in self._waiting.items()
        )

    def _gather(self, pieces: Joined, order: np.ndarray, substep: np.ndarray | None) -> Buffer:
        return gather(
            pieces, order, substep, spec=self.spec, state=self._state, weights=self._weights
        )

    def state(self) -> StreamState:
        return self._state

    def summary_buffer(self) -> Buffer:
        """All samples that are ready and not drawn, source by source in stream order: candidates
        for what-if, never for a plan.
        """
        opened = [self._open(i) for i in range(len(self._streams))]
        held = (
            self._reserve.candidates(opened) if self._reserve is not None and any(opened) else None
        )
        pieces = list(held.pieces) if held else []
        first = sum(p.stop - p.start for _, p in pieces)
        pieces += [(i, piece) for i, stream in enumerate(self._streams) for piece in stream.ahead()]
        if not pieces or not self._weights:
            nothing: dict[str, dict[str, Any]] = {name: {"tokens": []} for name in self.spec.names}
            return Buffer.from_columns(nothing, batch=self.spec.batch, step=self._state.step)
        source = np.repeat([i for i, _ in pieces], [p.stop - p.start for _, p in pieces])
        rows = np.concatenate(
            [held.rows if held else np.zeros(0, np.int64), np.arange(first, len(source))]
        )
        buffer = self._gather(Joined(pieces), rows[np.argsort(source[rows], kind="stable")], None)
        return replace(buffer, drawn=False)

    @property
    def next_step(self) -> int:
        return self._state.step

    @property
    def finished(self) -> EndOfJob | None:
        """Where the job ends, once that is known."""
        return self._finished

    @property
    def ended(self) -> EndOfJob | None:
        """The same; also while steps before it are planned again."""
        return self._finished or self._ended

    @property
    def holds_over(self) -> bool:
        """Whether loaders may hold payload across steps."""
        return self._reserve is not None

    @property
    def open_step(self) -> int:
        """The first step that an event can still change."""
        return max(self._state.step + (self._begun == self._state.step), self.floor)

    def opening(self, loader: int) -> tuple[Cursor, int, Refill]:
        """Where the plans stand in a loader's source, its generation, and what the loader was told:
        for one that is to follow it.
        """
        source = self._demand.source_of[loader]
        return (
            Cursor(*self._state.cursors[source].tolist()),
            self._generations[source],
            self._demand.told(loader),
        )

    def took(self, rank: int) -> int:
        """The last step that a rank has taken."""
        return self._consumed.get(rank, -1)

    def refuse_planned(self, step: int) -> None:
        if step < self.open_step:
            raise PlanError(
                f"step {step} is planned already",
                remedy=f"the first step that can still change is {self.open_step}",
            )

    @property
    def taken(self) -> int | None:
        """The last step that every rank has taken; None: nobody takes part."""
        return self._consumed.slowest if self._consumed else None

    @property
    def weights(self) -> list[float]:
        return list(self._weights)

    def shares(self, step: int | None = None) -> np.ndarray:
        """What every source weighs among those that take part: in the step planned last, or, as far
        as is known, in a later one.
        """
        own = {s.name: s.weight for s in self.spec.sources}
        weights = (
            (None if step is None else self._mixture.foreseen(self._state, step, own))
            or self._weights
            or [0.0] * len(own)
        )
        wanted = np.where(self._state.active, weights, 0.0)
        return wanted / (wanted.sum() or 1.0)

    @property
    def feedback(self) -> dict[str, int]:
        """What became of reports, since this planner began."""
        return self._mixture.feedback.counts()

    def in_time(self, report: Report) -> bool:
        """Whether a plan will use a report; one that comes too late is dropped."""
        return self._mixture.in_time(report)

    @property
    def totals(self) -> Ledger:
        """Return the ledger with all that the streams have passed, also at the end of a source
        after its last step.
        """
        self.ledger.see_passed([s.passed for s in self._streams])
        return self.ledger

    def waits_for(self) -> list[str]:
        """Sources that the next step is waiting for."""
        short = (
            i
            for i, n in sorted(self._waiting.items())
            if self._streams[i].ready < n and not self._streams[i].ended
        )
        return [self.spec.sources[i].name for i in short]

    def waiting_for(self) -> str:
        """What the next plan waits for, in words."""
        if self._finished:
            return f"nothing: the job ends before step {self._finished.step}"
        if self._waiting:
            rows = [
                f"{n - self._streams[i].ready} more of source {self.spec.sources[i].name!r}"
                for i, n in sorted(self._waiting.items())
                if self._streams[i].ready < n and not self._streams[i].ended
            ]
            return (
                f"samples that step {self._state.step} draws: "
                + ", ".join(rows[:5])
                + (", ..." if len(rows) > 5 else "")
            )
        slow = min(self._consumed, key=lambda r: self._consumed[r]) if self._consumed else -1
        if slow >= 0 and len(self._outstanding) >= self.spec.prefetch:
            return (
                f"rank {slow}, which holds {self.spec.prefetch} steps it has not taken (it "
                f"took step {self._consumed[slow]} last)"
            )
        return f"the plan of step {self._state.step}"

    def check(self) -> None:
        """Invariants, for tests."""
        for stream in self._streams:
            stream.check()
        # What is deferred is owed, and weights that move leave more than a sample open.
        constant = (
            isinstance(self.spec.schedule, Mapping)
            and not self._state.events
            and self.spec.overflow == "grow"
        )
        if (
            self.spec.batch.samples
            and self.spec.draw == "exact"
            and constant
            and all(self._state.active)
        ):
            assert all(abs(o) < 2**40 for o in self._state.owed), "an account is a whole sample off"
