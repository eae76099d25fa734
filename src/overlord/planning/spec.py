"""The job's fields that the planner needs, and the planner's records of counts and losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.batch_by_step import BatchByStep, size_of
from overlord.errors import StorageError
from overlord.job.model import Model
from overlord.mesh import Batch, Mesh
from overlord.messages.control import (
    AddSource,
    Cursor,
    EndOfJob,
    PlannedStep,
    SourceLost,
    StreamState,
)
from overlord.messages.data import DecodeFailures
from overlord.plan.plan import LoadingPlan
from overlord.planning.draw import Drawer
from overlord.planning.mixture import Feedback, Schedule, in_order, lost_sources, with_added_sources
from overlord.planning.stream import BadRow, RowLocations, SourceStream
from overlord.sample import Buffer

if TYPE_CHECKING:
    pass

# ----------------------------------------------------------------------------
# The fields of a job that the planner needs.


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSpec:
    """The fields of a source that the planner needs."""

    name: str
    n_groups: int
    epochs: int | None
    max_bad: int
    loaders: int = 1
    files: tuple[str, ...] = ()  # paths, for errors
    row_unit: str = "row"  # unit of row numbers: "row", or "byte" for offsets
    meta: tuple[str, ...] = ()  # names of the metadata columns that its transforms add
    # names of those with a value for each document; empty: its samples are single documents
    documents: tuple[str, ...] = ()
    # whether the job continues without the source if its storage fails permanently
    leaves: bool = False
    # the source's own weight, used if it was added in mid-run and the mixture does not name it
    weight: float = 0.0
    max_tokens: int | None = None  # most tokens that the job draws from the source
    last_groups: int | None = None  # groups of the last epoch, if it ends early

    def stream(self, cursor: Cursor) -> SourceStream:
        """Return a new stream of the source that starts at ``cursor``."""
        return SourceStream(
            self.name,
            loaders=self.loaders,
            n_groups=self.n_groups,
            epochs=self.epochs,
            max_bad=self.max_bad,
            cursor=cursor,
            rows=RowLocations(self.files, self.row_unit),
            last_groups=self.last_groups,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSpec:
    """The fields of a job that the planner needs."""

    sources: tuple[SourceSpec, ...]
    batch: Batch  # of the job: stages and ramps change sizes, see ``batch_at``
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
    # source number -> steps to read ahead, for sources whose reads are sometimes slow
    ahead_of: Mapping[int, int] = field(default_factory=dict)
    look_ahead: int = 1  # a step chooses each source's n samples among its first look_ahead * n
    max_age: int = 8  # steps a sample may be passed over
    # scores of the schedule for look-ahead candidates
    prefer: Callable[[int, Buffer], np.ndarray] | None = None
    # rows of the look-ahead candidates that a step takes, by the user's choice
    consume: Callable[[Buffer], np.ndarray] | None = None
    # "defer": samples that do not fit into the microbatches of a step wait for a later step
    overflow: str = "grow"
    sync: str = "microbatch"  # when ranks wait for each other
    model: Model | None = None  # by which strategies balance; None: a 12B Llama
    images: bool = False  # some source has images: every plan must assign them to encoders
    batches: BatchByStep | None = None  # None: ``batch`` at every step, with its ramps
    end: int | None = None  # step before which stages or ``until`` end the job
    mixture_starts: tuple[int, ...] = ()  # first steps of stages with a mixture of their own
    # "split" or "truncate" samples longer than the context of their stage; None: there are none
    cut_samples: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(s.name for s in self.sources)

    @property
    def budgeted(self) -> bool:
        """Whether a source has a budget of tokens."""
        return any(source.max_tokens is not None for source in self.sources)

    def batch_at(self, step: int) -> Batch:
        """Return the batch of a step."""
        return (self.batch if self.batches is None else self.batches).at(step)

    @property
    def stage_starts(self) -> tuple[int, ...]:
        """The first steps of stages, and the step before which a number of steps ends the job."""
        firsts = () if self.batches is None else tuple(p.first for p in self.batches.parts)
        return firsts if self.end is None else (*firsts, self.end)

    def growth(self, step: int, later: int) -> float:
        """Return the size of a later step over that of a step, in samples or tokens."""
        return size_of(self.batch_at(later))[0] / size_of(self.batch_at(step))[0]

    def drawer(self, batch: Batch) -> Drawer:
        """Return the rules of the draw of steps with this batch."""
        chunks = batch.in_chunks
        return Drawer(
            samples=None if chunks else batch.samples,
            tokens=batch.tokens_of_chunks if chunks else batch.tokens,
            draws=batch.microbatches if self.mix_every == "microbatch" else 1,
            random=self.draw == "random",
            seed=self.seed,
            fill=self.until != "first",
            exact_tokens=chunks,
        )

    def ends_at(self, step: int) -> bool:
        """Return whether a number of steps, or the stages, end the job before ``step``.

        A saved state may be past the end of a job that was shortened.
        """
        ends = (self.until if isinstance(self.until, int) else None, self.end)
        return any(end is not None and step >= end for end in ends)

    @property
    def leaves_holes(self) -> bool:
        """Whether samples, or the rest of a cut sample, may stay for a later step."""
        return self.look_ahead > 1 or self.overflow == "defer" or self.batch.in_chunks


class DrawerByStep:
    """The rules of the draw of every step; a drawer is kept while its batch stays the same."""

    def __init__(self, spec: PlannerSpec):
        self._spec = spec
        self._batch = spec.batch_at(0)
        self._drawer = spec.drawer(self._batch)

    def at(self, step: int) -> Drawer:
        """Return the rules of the draw of a step."""
        batch = self._spec.batch_at(step)
        if batch is not self._batch and batch != self._batch:
            self._batch, self._drawer = batch, self._spec.drawer(batch)
        return self._drawer


@dataclass(frozen=True, slots=True, kw_only=True)
class NewSource:
    """An added source: the event of the log, and the fields that the planner needs."""

    event: AddSource
    source: SourceSpec


def initial_state(spec: PlannerSpec) -> StreamState:
    """Return the state before step 0."""
    n = len(spec.sources)
    return StreamState(
        step=0, cursors=np.array([Cursor()] * n, np.int64), owed=(0,) * n, active=(True,) * n
    )


# ----------------------------------------------------------------------------
# Running counts, mixtures and quarantined rows.

KEPT_BAD = 200_000  # latest quarantined rows that are listed; all are counted. About 60 MB.


KEPT_MIX = 64  # steps whose target and actual mixture are kept


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A row without a sample, or a sample with a broken image, and the reason."""

    source: int
    epoch: int
    file: int
    row: int
    reason: str
    part: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Mixed:
    """The mixture of one step, per source: target shares, samples and tokens drawn."""

    step: int
    wanted: np.ndarray
    samples: np.ndarray
    tokens: np.ndarray


COUNTS = ("samples", "tokens", "quarantined", "dropped", "long", "lost_tokens")


# counts of dropped rows, long documents and lost tokens; streams add to them as the draw advances
PASSED = ("dropped", "long", "lost_tokens")
# counts of data that a job leaves out without being asked to
LOST = ("quarantined", "lost_tokens")


def has_losses(counts: Mapping[str, np.ndarray]) -> bool:
    """Return whether running counts (``StreamState.counts``) have lost data of any source."""
    return any(name in counts and bool(counts[name].any()) for name in LOST)


class Ledger:
    """Running counts per source, the mixtures of the last steps, and the quarantined rows.

    A state contains the counts, so that they survive a restart.
    """

    def __init__(self, state: StreamState, n_sources: int):
        self.samples, self.tokens, self.quarantined, self.dropped, self.long, self.lost_tokens = (
            np.array(state.counts.get(name, np.zeros(n_sources)), np.int64) for name in COUNTS
        )
        self.mixed: deque[Mixed] = deque(maxlen=KEPT_MIX)
        self.quarantine: deque[Quarantined] = deque(maxlen=KEPT_BAD)
        # decode failures with their step; they arrive late, so no state counts them
        self.spoiled: dict[tuple[int, Quarantined], None] = {}
        # number of quarantined rows up to the last one in the list; more than the count while
        # steps are planned again
        self.listed = int(self.quarantined.sum())
        # the counts of PASSED without those of the present streams, which start at 0
        self._before = np.stack([self.dropped, self.long, self.lost_tokens], axis=1)

    def grow(self) -> None:
        """Add an entry for one more source."""
        for name in COUNTS:
            setattr(self, name, np.append(getattr(self, name), 0))
        self._before = np.append(self._before, np.zeros((1, len(PASSED)), np.int64), axis=0)

    def count(self, plan: LoadingPlan, weights: Sequence[float], active: Sequence[bool]) -> None:
        """Count the samples and tokens of a planned step, and record its mixture."""
        n = len(self.samples)
        samples, tokens = (
            np.bincount(plan.begun, minlength=n),
            np.bincount(plan.source, weights=plan.tokens, minlength=n).astype(np.int64),
        )
        self.samples += samples
        self.tokens += tokens
        wanted = np.where(active, weights, 0.0)
        if not self.mixed or plan.step > self.mixed[-1].step:
            self.mixed.append(Mixed(plan.step, wanted / (wanted.sum() or 1.0), samples, tokens))

    def list_bad(self, i: int, rows: list[BadRow]) -> None:
        """Count failed rows of source ``i``, and add them to the quarantine in planning order.

        Rows of steps that are planned again are counted again, but not listed twice.
        """
        known = max(0, self.listed - int(self.quarantined.sum()))
        self.quarantine += [Quarantined(i, *row) for row in rows[known:]]
        self.quarantined[i] += len(rows)
        self.listed = max(self.listed, int(self.quarantined.sum()))

    def add_decode_failures(self, event: DecodeFailures) -> None:
        """Record samples that were delivered with a missing image.

        They do not count for ``max_bad``: otherwise the stream would depend on timing.
        """
        for (source, epoch, file, row, part), reason in zip(
            event.ids.tolist(), event.reasons, strict=True
        ):
            # a dict drops duplicates: a step may be built twice
            self.spoiled[event.step, Quarantined(source, epoch, file, row, reason, part)] = None
        while len(self.spoiled) > KEPT_BAD:
            del self.spoiled[next(iter(self.spoiled))]

    def count_truncated(self, samples: np.ndarray, tokens: np.ndarray) -> None:
        """Count samples that a step truncated, and their lost tokens, by source."""
        n = len(samples)
        self._before[:n, PASSED.index("long")] += samples
        self._before[:n, PASSED.index("lost_tokens")] += tokens

    def adopt(self, before: Ledger) -> None:
        """Take over the lists of the previous planner's ledger, so that no row is listed twice."""
        self.quarantine, self.listed = before.quarantine, before.listed
        self.mixed, self.spoiled = before.mixed, before.spoiled

    def bad_rows(self) -> list[Quarantined]:
        """Return the quarantined rows, then the samples with decode failures.

        Decode failures are sorted, since constructors send them in any order.
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

    def exclude_counts(self, i: int, passed: Sequence[int], sign: int = 1) -> None:
        """Subtract ``passed``, the counts of source i's stream, from the total of the source.

        Restored samples were counted before, so their stream must not count them again.
        ``sign=-1`` adds ``passed`` permanently, before a new stream that counts from 0 replaces it.
        """
        self._before[i] -= sign * np.array(passed, np.int64)

    def update_passed(self, passed: Sequence[tuple[int, ...]]) -> None:
        """Update the counts of ``PASSED``; ``passed`` has one tuple from each source's stream."""
        counts = np.fromiter(chain.from_iterable(passed), np.int64, self._before.size).reshape(
            self._before.shape
        )
        self.dropped, self.long, self.lost_tokens = np.ascontiguousarray((self._before + counts).T)

    def counts(self) -> dict[str, np.ndarray]:
        return {name: getattr(self, name).copy() for name in COUNTS}


# ----------------------------------------------------------------------------
# Removal of sources whose storage failed permanently (``Source(on_lost="leave")``).
#
# The planner requests a ``SourceLost`` event. No sample of the source is drawn from the event's
# step on. When storage fails depends on timing; the stream depends on the log alone.


class LostSources:
    """The rules by which sources with failed storage leave the job.

    A draw may charge the accounts of a step and select no sample: the step has then *begun*. The
    state before that draw is kept, so that the step can restart without a lost source.
    """

    def __init__(self, floor: int):
        """Start without losses; steps before ``floor`` are planned again with their sources."""
        self._floor = floor
        self._before: StreamState | None = None

    def begin(self, state: StreamState) -> None:
        """Keep ``state`` to restart its step from, unless the step has begun already."""
        if not self.has_begun(state.step):
            self._before = state

    def has_begun(self, step: int) -> bool:
        """Return whether a draw has charged the accounts for ``step`` without selecting samples."""
        return self._before is not None and self._before.step == step

    def requests(
        self,
        state: StreamState,
        broken: Mapping[int, Exception],
        weights: Sequence[float],
        sources: Sequence[SourceSpec],
    ) -> list[SourceLost]:
        """Return the events that remove the ``broken`` sources from the state's step on.

        ``broken`` maps source numbers to errors. The list is empty if the job must end there
        instead: some broken source may not leave, or no other active source has a weight. It is
        also empty for a step that was planned before, or that has begun and since then exhausted a
        source. Such a step is planned identically or not at all.
        """
        known = {event.name for event in lost_sources(state.events)}
        may_leave = all(
            sources[i].leaves and sources[i].name not in known and isinstance(error, StorageError)
            for i, error in broken.items()
        )
        others = any(
            weight and active
            for i, (weight, active) in enumerate(zip(weights, state.active, strict=True))
            if i not in broken
        )
        unchanged = (
            self._before is None
            or self._before.step != state.step
            or self._before.active == state.active
        )
        if not may_leave or not others or not unchanged or state.step < self._floor:
            return []
        return [
            SourceLost(state.step, sources[i].name, _reason(error)) for i, error in broken.items()
        ]

    def apply(self, event: SourceLost, state: StreamState) -> StreamState:
        """Return the state with the event in its log.

        If the event's step has begun, return the state before that step, so that it restarts.
        """
        if self.has_begun(state.step) and event.at == state.step:
            assert self._before is not None
            # events that came since the step began stay in the log, and so do sources they added
            before = replace(self._before, events=state.events)
            state, self._before = with_added_sources(before, len(state.active)), None
        return replace(state, events=in_order((*state.events, event)))


def without_lost(
    state: StreamState, sources: Sequence[SourceSpec]
) -> tuple[StreamState, tuple[int, ...]]:
    """Return the state with lost sources inactive, and the numbers of those that changed.

    A source is inactive from the step of its SourceLost event on. Its samples in the look-ahead
    pool are dropped from the state.
    """
    gone = {event.name for event in lost_sources(state.events) if event.at <= state.step}
    leaving = tuple(i for i, s in enumerate(sources) if s.name in gone and state.active[i])
    if not leaving:
        return state, ()
    active, owed = list(state.active), list(state.owed)
    for i in leaving:
        active[i], owed[i] = False, 0
    ahead = state.ahead and tuple(a[:0] if i in leaving else a for i, a in enumerate(state.ahead))
    cut = tuple(0 if i in leaving else n for i, n in enumerate(state.cut))
    return replace(state, active=tuple(active), owed=tuple(owed), ahead=ahead, cut=cut), leaving


def all_lost(
    state: StreamState, weights: Sequence[float], sources: Sequence[SourceSpec]
) -> StorageError | None:
    """Return the error of a job that lost every source with a weight; None if one is left."""
    reasons = {event.name: event.reason for event in lost_sources(state.events)}
    weighed = [s.name for s, weight in zip(sources, weights, strict=True) if weight]
    if not weighed or any(name not in reasons for name in weighed):
        return None
    return StorageError(
        weighed[0], f"the source was lost, and no other source has a weight: {reasons[weighed[0]]}"
    )


def _reason(error: Exception) -> str:
    assert isinstance(error, StorageError)
    return f"{error.path}: {error.problem}" if error.path else error.problem


# ----------------------------------------------------------------------------
# The plans of the last steps, for status queries.


KEPT_PLANS = 256


KEPT_SAMPLES = 2**21  # of the kept plans: about 100 bytes each, and a step may have 262,144


class RecentPlans(deque[PlannedStep]):
    """The last plans, for status queries: at most KEPT_PLANS and KEPT_SAMPLES samples.

    The last plan is always kept.
    """

    def __init__(self) -> None:
        super().__init__()
        self._samples = 0  # of all kept plans

    def of(self, step: int) -> list[PlannedStep]:
        """Return the kept plan of a step as a list, empty if it is not kept."""
        return [stage for stage in self if stage.plan.step == step]

    def steps(self) -> list[int]:
        return [stage.plan.step for stage in self]

    def keep(self, stage: PlannedStep) -> None:
        self.append(stage)
        self._samples += len(stage.plan)
        while len(self) > KEPT_PLANS or (len(self) > 1 and self._samples > KEPT_SAMPLES):
            self._samples -= len(self.popleft().plan)


class Handover(NamedTuple):
    """State that a planner takes over from the one it replaces."""

    stop: EndOfJob | None
    ended: EndOfJob | None
    ledger: Ledger
    feedback: Feedback
    taken: dict[int, int]  # rank -> last step it took
