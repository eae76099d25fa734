"""The job from the planner's view, and its records: running counts and quarantined rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from overlord.batch import Batch
from overlord.mesh import Mesh
from overlord.messages.constructor import DecodeFailures
from overlord.messages.control import AddSource, Cursor, StreamState
from overlord.plan.plan import LoadingPlan
from overlord.planning.mixture import Schedule
from overlord.planning.stream import BadRow
from overlord.sample import Buffer

KEPT_BAD = 200_000  # latest quarantined rows that are listed; all are counted. About 60 MB.
KEPT_MIX = 64  # steps whose target and actual mixture are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The fields of a source that the planner needs."""

    name: str
    n_groups: int
    epochs: int | None
    max_bad: int
    loaders: int = 1
    files: tuple[str, ...] = ()  # paths, for errors
    meta: tuple[str, ...] = ()  # names of its own metadata
    # if its storage fails for good, it leaves the mixture and the job continues
    leaves: bool = False
    # used if the source was added in mid-run and the mixture does not name it
    weight: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSpec:
    """The fields of a job that the planner needs."""

    sources: tuple[SourceSpec, ...]
    batch: Batch
    place: Mesh
    strategy: Callable[[Buffer, Mesh], LoadingPlan]
    schedule: Schedule | Mapping[str, float]  # used by this planner only: it may learn
    seed: int = 0
    until: str | int = "all"
    draw: str = "exact"
    mix_every: str = "step"
    feedback_lag: int = 8
    takes_feedback: bool = False
    prefetch: int = 4
    # number of steps for which loaders hold samples beyond the step being drawn
    read_ahead: int = 2
    # steps to read ahead for sources whose reads are sometimes slow
    ahead_of: Mapping[int, int] = field(default_factory=dict)
    look_ahead: int = 1  # a step chooses each source's n samples among its first look_ahead * n
    max_age: int = 8  # steps a sample may be passed over
    # the schedule's choice among candidates
    prefer: Callable[[int, Buffer], np.ndarray] | None = None
    # "defer": what does not fit a step's microbatches is left for a later one
    overflow: str = "grow"
    sync: str = "microbatch"  # when ranks wait for each other
    images: bool = False  # some source has images: every plan must assign them to encoders

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.sources)

    def ends_at(self, step: int) -> bool:
        """Return whether the job has no step of this number.

        A state may be past the end of a job that was shortened.
        """
        return isinstance(self.until, int) and step >= self.until

    @property
    def leaves_holes(self) -> bool:
        """Whether a step may take other samples than the first ones of each source."""
        return self.look_ahead > 1 or self.overflow == "defer"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row without a sample, or a sample with a broken image, and the reason."""

    source: int
    epoch: int
    file: int
    row: int
    reason: str
    part: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSource:
    """A source that joins: the event of the log, and the source's fields for the planner."""

    event: AddSource
    source: SourceSpec


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """The mixture of one step, per source: target shares, samples and tokens drawn."""

    step: int
    wanted: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray


COUNTS = ("samples", "tokens", "quarantined", "dropped", "long", "lost_tokens")
# counted by streams when the draw passes them: rows, documents, tokens
PASSED = ("dropped", "long", "lost_tokens")


class Ledger:
    """Running counts per source, the last mixtures and the failed rows.

    The counts are in the state, so that they survive a restart.
    """

    def __init__(self, state: StreamState, n_sources: int):
        self.samples, self.tokens, self.quarantined, self.dropped, self.long, self.lost_tokens = (
            np.array(state.counts.get(name, np.zeros(n_sources)), np.int64) for name in COUNTS
        )
        self.mixed: deque[Mixed] = deque(maxlen=KEPT_MIX)
        self.quarantine: deque[Quarantined] = deque(maxlen=KEPT_BAD)
        # decode failures with their step; they arrive late, so no state counts them
        self.spoiled: dict[tuple[int, Quarantined], None] = {}
        self.listed = int(self.quarantined.sum())  # total number of rows up to the last one listed
        # counts of streams start at 0
        self._before = np.stack([self.dropped, self.long, self.lost_tokens], axis=1)

    def grow(self) -> None:
        """Add an entry for one more source."""
        for name in COUNTS:
            setattr(self, name, np.append(getattr(self, name), 0))
        self._before = np.append(self._before, np.zeros((1, len(PASSED)), np.int64), axis=0)

    def count(self, plan: LoadingPlan, weights: Sequence[float], active: Sequence[bool]) -> None:
        n = len(self.samples)
        samples, tokens = (
            np.bincount(plan.source, minlength=n),
            np.bincount(plan.source, weights=plan.tokens, minlength=n).astype(np.int64),
        )
        self.samples += samples
        self.tokens += tokens
        wanted = np.where(active, weights, 0.0)
        if not self.mixed or plan.step > self.mixed[-1].step:
            self.mixed.append(Mixed(plan.step, wanted / (wanted.sum() or 1.0), samples, tokens))

    def list_bad(self, i: int, rows: list[BadRow]) -> None:
        """List failed rows, in the order of planning.

        When steps are planned again, the same rows come again and are not listed twice.
        """
        known = max(0, self.listed - int(self.quarantined.sum()))
        self.quarantine += [Quarantined(i, *row) for row in rows[known:]]
        self.quarantined[i] += len(rows)
        self.listed = max(self.listed, int(self.quarantined.sum()))

    def add_decode_failures(self, event: DecodeFailures) -> None:
        """Record samples that were delivered with a missing image.

        They never count for ``max_bad``: the time of building must not decide where the stream
        ends.
        """
        for (source, epoch, file, row, part), reason in zip(
            event.ids.tolist(), event.reasons, strict=True
        ):
            # a dict, since a step may be built twice
            self.spoiled[event.step, Quarantined(source, epoch, file, row, reason, part)] = None
        while len(self.spoiled) > KEPT_BAD:
            del self.spoiled[next(iter(self.spoiled))]

    def adopt(self, before: Ledger) -> None:
        """Take over the lists of a ledger that was further on, so that no row is listed twice."""
        self.quarantine, self.listed = before.quarantine, before.listed
        self.mixed, self.spoiled = before.mixed, before.spoiled

    def bad_rows(self) -> list[Quarantined]:
        """Return all listed rows.

        Decode failures come last and sorted, since constructors send them in any order.
        """
        late = sorted(
            self.spoiled,
            key=lambda s: (
                s[0],
                s[1].source,
                s[1].epoch,
                s[1].file,
                s[1].row,
                s[1].part,
                s[1].reason,
            ),
        )
        return [*self.quarantine, *(bad for _, bad in late)]

    def counted_before(self, i: int, passed: Sequence[int], sign: int = 1) -> None:
        """Exclude the counts of a source's stream so far: they were counted before the restart.

        ``sign=-1``: include them, since a new stream replaces this one and counts from 0.
        """
        self._before[i] -= sign * np.array(passed, np.int64)

    def see_passed(self, passed: Sequence[tuple[int, ...]]) -> None:
        """Update the counts of ``PASSED`` from the streams of all sources."""
        counts = np.fromiter(chain.from_iterable(passed), np.int64, self._before.size).reshape(
            self._before.shape
        )
        self.dropped, self.long, self.lost_tokens = np.ascontiguousarray((self._before + counts).T)

    def counts(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in COUNTS}


def initial_state(spec: PlannerSpec) -> StreamState:
    n = len(spec.sources)
    return StreamState(
        step=0, cursors=np.array([Cursor()] * n, np.int64), owed=(0,) * n, active=(True,) * n
    )
