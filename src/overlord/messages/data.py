"""Messages of the data path, as frozen values: loaders, constructors and clients.

The last section checks the metrics that a trainer reports.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from overlord.errors import JobError
from overlord.mesh import Mesh
from overlord.messages.control import (
    Cursor,
    EncodedState,
    PlannedStep,
    Report,
    SentReport,
    StreamState,
)
from overlord.plan.plan import LoadingPlan
from overlord.sample import Column, Ragged, SampleId

# ----------------------------------------------------------------------------
# Messages between a constructor and the client of a rank.
#
#     StepMessage   constructor -> client   one step of a rank: its arrays and a StepInfo
#     StepInfo      constructor -> client   ids of the samples, digest, state after the step
#     EndOfStream   constructor -> client   no later step follows, with an error or without
#     StepAck       client -> constructor   a step was given to the trainer; its reports
#
# ``CompactLayout`` describes arrays that a StepMessage carries in compact form.


def _rank_mapping(plan: LoadingPlan) -> tuple[tuple[str, ...], str, Mesh | None, Mesh | None]:
    """Return the fields of StepInfo that map samples to ranks: broadcast, axis, place and on."""
    main, place = plan.main, plan.place
    if place is None:
        return (), main.axis, None, None
    mesh = main.on or place
    broadcast = tuple(dim for dim in main.broadcast if getattr(mesh, dim.lower()) > 1)
    if main.on is not None:
        return broadcast, main.axis, place, main.on
    return broadcast, main.axis, _place_if_needed(main.axis, broadcast, place), None


def _place_if_needed(axis: str, broadcast: tuple[str, ...], place: Mesh) -> Mesh | None:
    """Return the mesh; None if every rank of a data-parallel group gets all its samples."""
    return None if axis == "DP" and not broadcast and place.cp == place.pp == 1 else place


@dataclass(frozen=True, slots=True, eq=False)
class StepInfo:
    """The description of a step without its arrays: sample ids, and the state after the step."""

    step: int
    digest: str
    valid_tokens: int | float  # sum of the weights of all labels; an int if it is whole
    names: tuple[str, ...]
    # int64 [samples, 6]: source, epoch, file, row, part, tokens; one array, since each array costs
    # time on the wire. A seventh column has the offset of a piece in its sample.
    table: np.ndarray
    after: StreamState | EncodedState
    # axes along which the trainer broadcasts, with more than one rank
    broadcast: tuple[str, ...] = ()
    axis: str = "DP"  # axis of the plan's buckets
    # None: every rank of a data-parallel group gets all samples of the group
    place: Mesh | None = None
    on: Mesh | None = None  # the backbone's own mesh; None: ``place``
    stage: str | int | None = None  # name or number of the step's stage; None: there are no stages
    microbatches: int | None = None  # ``Batch.microbatches`` of the stage; None: that of the job
    samples: int = 0  # of the step, over all ranks

    @staticmethod
    def of(stage: PlannedStep, after: StreamState | EncodedState | None = None) -> StepInfo:
        """Return the StepInfo of all samples of a plan."""
        p = stage.plan
        columns = [p.source, p.epoch, p.file, p.row, p.part, p.tokens]
        columns += [] if p.offset is None else [p.offset]
        table = np.empty((len(p), len(columns)), np.int64)  # column_stack takes three times as long
        for number, column in enumerate(columns):
            table[:, number] = column
        return StepInfo(
            p.step,
            stage.digest,
            stage.valid_tokens,
            p.names,
            table,
            stage.after if after is None else after,
            *_rank_mapping(p),
            samples=stage.samples,
        )

    def without_broadcast(self) -> StepInfo:
        """Return this StepInfo without broadcasts: every rank fetches its own arrays."""
        return replace(
            self,
            broadcast=(),
            place=self.place
            if self.place is None or self.on is not None
            else _place_if_needed(self.axis, (), self.place),
        )

    def in_stage(self, stage: str | int | None, microbatches: int) -> StepInfo:
        """Return this StepInfo with the stage of its step; None: the job has no stages."""
        if stage is None:
            return self
        return replace(self, stage=stage, microbatches=microbatches)

    def of_rows(self, rows: np.ndarray) -> StepInfo:
        """Return this StepInfo with these rows of samples only, for the clients of one bucket."""
        return replace(self, table=self.table[rows])

    def __len__(self) -> int:
        return len(self.table)

    @property
    def source(self) -> np.ndarray:
        return self.table[:, 0]

    @property
    def row(self) -> np.ndarray:
        return self.table[:, 3]

    @property
    def tokens(self) -> np.ndarray:
        return self.table[:, 5]

    @property
    def offset(self) -> np.ndarray:
        """The tokens of each sample before its piece in this step: 0 for whole samples."""
        if self.table.shape[1] > 6:
            return self.table[:, 6]
        return np.zeros(len(self.table), np.int64)

    def sample_id(self, i: int) -> SampleId:
        source, *place = self.table[i, :5].tolist()
        return SampleId(self.names[source], *place)


class CompactLayout(NamedTuple):
    """The layout of compact microbatches, for their expansion (``constructor/compact.py``)."""

    keys: tuple[str, ...]  # arrays to compute, each with an entry for every token
    labels: str  # label convention, as in Batch
    context: int  # row length of the padded layout; 0: packed

    @property
    def has_ids(self) -> bool:
        """Whether an array is computed from token ids; a middle pipeline stage has none."""
        return any(key != "attention_mask" for key in self.keys)


@dataclass(frozen=True, slots=True, eq=False)
class StepMessage:
    """A step for the client of one rank.

    Its microbatches are concatenated in ``wide`` (``constructor/pack.py``). If their arrays cannot
    be concatenated, they are separate in ``microbatches``. Rows ``bounds[m]`` to ``bounds[m + 1]``
    of the samples in ``info`` belong to microbatch m.
    """

    info: StepInfo
    bounds: np.ndarray
    wide: Mapping[str, np.ndarray]
    rows: np.ndarray  # int64 [keys, microbatches]
    microbatches: tuple[Mapping[str, np.ndarray], ...] = ()
    # images and routes of the rank, exchange by exchange
    encoder: Mapping[str, np.ndarray] = field(default_factory=dict)
    encoder_rows: np.ndarray | None = None  # int64 [keys, exchanges]
    per: str = ""  # "microbatch": exchange m belongs to microbatch m
    form: CompactLayout | None = None  # layout of ``wide``, where it is compact


@dataclass(frozen=True, slots=True)
class EndOfStream:
    """The stream of a rank ends: no step follows those already sent."""

    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepAck:
    """The trainer has received this step and all steps before it.

    Reports travel with it: without a new step the last acknowledgement is repeated. They are kept
    and sent again after a lost connection, until plans can no longer need them.
    """

    step: int
    waited_s: float = 0.0  # total seconds that the trainer has waited for steps
    # generation of the session, if one connection carries steps of several
    generation: int | None = None
    reports: tuple[SentReport, ...] = ()


# ----------------------------------------------------------------------------
# Messages of a constructor: between its state machine and its service, and to other components.
#
# PayloadReady    service -> state machine     the payload of a step is complete
# Build           state machine -> service     build the arrays of a step
# Built           service -> state machine     the arrays are built
# Deliver         state machine -> service     send a step to the client of a rank
# Release         state machine -> service     free the memory of a step
# EndRank         state machine -> service     send the end of the stream to a rank
# Unfinish        state machine -> service     withdraw an end that was sent
# DecodeFailures  constructor -> planner       images that could not be decoded
# RankWait        constructor -> coordinator   seconds that a trainer has waited, when polled


@dataclass(frozen=True, slots=True, eq=False)
class DecodeFailures:
    """Images that could not be decoded; their pixels are zero.

    The planner only records them: they do not change the stream.
    """

    step: int
    ids: np.ndarray  # int64 [n, 5]: source, epoch, file, row, part of the sample of each image
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PayloadReady:
    """The payload of a step is complete."""

    step: int


@dataclass(frozen=True, slots=True)
class Build:
    """Build the arrays of a step for a bucket."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class Built:
    """The arrays of a step are built."""

    step: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Send a step to the client of a rank."""

    step: int
    rank: int


@dataclass(frozen=True, slots=True)
class Release:
    """Free the memory of a step for a bucket: every rank of the bucket has received it."""

    step: int
    bucket: int


@dataclass(frozen=True, slots=True)
class EndRank:
    """End the stream of a rank that has been sent all its steps, with an error or without."""

    rank: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Unfinish:
    """Withdraw the end of the stream that was sent to a rank: its cause has been repaired."""

    rank: int


class RankWait(NamedTuple):
    """The total seconds that the trainer of a rank has waited for steps."""

    rank: int
    waited_s: float


# ----------------------------------------------------------------------------
# Messages of a loader: between its state machine and its service, and to other components.
#
# Read            state machine -> service       read one window of a group
# WindowReady     service -> state machine       the window is in memory
# Evaluate        state machine -> service       turn the next rows into samples
# BlockReady      service -> state machine       samples of these rows, as a SampleBlock
# WindowsReady    service -> state machine       windows that were read and evaluated at once
# ReadFailed      service -> state machine       the loader cannot continue
# Announce        loader -> planner              metadata of new samples, in stream order
# Pop             service -> state machine       remove the samples of a planned step
# StepPayload     loader worker -> constructor   tokens and images of a planned step
# LoaderWork      loader worker -> coordinator   work and read latency so far, when polled


class GroupShare(NamedTuple):
    """The chunks of a group that a loader reads."""

    epoch: int
    group: int
    chunks: tuple[int, ...]


class ReadAhead(NamedTuple):
    """The samples and bytes that a loader has a use for, and the groups after the current one."""

    samples: int = 0
    nbytes: int = 0
    groups: tuple[GroupShare, ...] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Read one window of a group: slice ``window`` of each of these chunks.

    Rows up to ``after`` were drawn before and give no samples. If evaluation costs less than a
    round trip, the reader evaluates the window at once, and reads on.
    """

    loader: int
    epoch: int
    group: int
    window: int
    chunks: tuple[int, ...]
    after: Cursor | None = None
    urgent: bool = False  # the draw waits for this window
    generation: int = 0
    # Limit of reading on after this window. It changes only how much is read at once.
    ahead: ReadAhead = field(default=ReadAhead(), compare=False)


@dataclass(frozen=True, slots=True)
class WindowReady:
    """A window of ``rows`` raw rows is in memory; ``over`` lists the chunks that end with it."""

    rows: int
    over: tuple[int, ...]
    nbytes: int = 0
    dropped: int = 0  # rows dropped by filters, if no row is left to carry the count


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Turn the next ``rows`` rows of the open window, in stream order, into samples."""

    loader: int
    rows: int
    urgent: bool = False
    generation: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LongDocuments:
    """Documents that ``Job.on_long`` truncated or dropped, in stream order."""

    key: np.ndarray  # uint64: the order in the window
    file: np.ndarray
    row: np.ndarray
    lost: np.ndarray  # int64: number of lost tokens

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: np.ndarray) -> LongDocuments | None:
        """Return the documents at ``rows``; None if there are none."""
        return (
            LongDocuments(self.key[rows], self.file[rows], self.row[rows], self.lost[rows])
            if len(rows)
            else None
        )


@dataclass(frozen=True, slots=True, eq=False)
class SampleBlock:
    """Columns of samples in stream order, and the quarantined, dropped and long rows among them."""

    key: np.ndarray  # uint64: the order in the window
    file: np.ndarray
    row: np.ndarray
    part: np.ndarray
    meta: Mapping[str, Column]
    bad_key: np.ndarray  # uint64: keys of quarantined rows
    bad_file: np.ndarray
    bad_row: np.ndarray
    bad_reason: tuple[str, ...]
    dropped: int = 0
    long: LongDocuments | None = None  # None: no document lost tokens

    def __len__(self) -> int:
        return len(self.key)

    @staticmethod
    def empty(dropped: int) -> SampleBlock:
        """Return the block of a window whose rows were all dropped by filters."""
        none = np.zeros(0, np.int64)
        keys, meta = none.astype(np.uint64), {"tokens": none, "bytes": none}
        return SampleBlock(
            keys, none, none, none.astype(np.int32), meta, keys, none, none, (), dropped
        )


@dataclass(frozen=True, slots=True, eq=False)
class BlockReady:
    """Rows of the open window are evaluated."""

    found: SampleBlock
    rows: int  # raw rows of the window that were evaluated
    nbytes: int
    seconds: float = 0.0  # duration; it determines the size of later blocks


@dataclass(frozen=True, slots=True, eq=False)
class WindowsReady:
    """Windows of a loader in order, read and evaluated at once."""

    windows: tuple[tuple[WindowReady, BlockReady], ...]


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The loader cannot continue; the stream ends with this error when the draw reaches it."""

    error: Exception


@dataclass(frozen=True, slots=True, eq=False)
class Announce:
    """Metadata of new samples of a loader, in stream order, or the error that ends its stream."""

    loader: int
    epoch: int
    group: int
    window: int
    found: SampleBlock | None
    closes: bool = False  # this loader has no more rows of the window
    last: bool = False  # this loader has no more rows of the group
    error: Exception | None = None
    generation: int = 0  # generation of the loader; announcements of older ones are ignored


@dataclass(frozen=True, slots=True, eq=False)
class StepPayload:
    """Payload of a planned step from one loader worker to one constructor worker."""

    step: int
    origin: int
    tokens: Ragged
    generation: int = 0
    # uint8: images to be encoded by its ranks, in the order of the plan
    items: Ragged | None = None
    weights: Ragged | None = None  # loss weights with the offsets of ``tokens``; None: all are 1


@dataclass(frozen=True, slots=True)
class LoaderWork:
    """Totals of work of one loader since it was opened, and the seconds of usual and slow reads."""

    loader: int
    standby: bool
    busy_s: float  # CPU seconds
    took_s: float  # wall-clock seconds of work, with waiting
    samples: int
    usual_read_s: float
    slow_read_s: float


@dataclass(frozen=True, slots=True)
class Pop:
    """Remove the first ``samples`` samples of a loader: a PlannedStep takes them."""

    step: int
    samples: int
    ready_bytes: int | None = None  # bytes of the samples that remain; None: estimated


# ----------------------------------------------------------------------------
# Check of the metrics that a trainer reports, before a client sends them to the planner.


def surely_in_time(report: Report, next_step: int, lag: int, prefetch: int) -> bool:
    """Return whether the plan that uses a report cannot exist yet, however far planning is.

    ``next_step``: the first step that the reporting rank has not taken. Planning is at most
    ``prefetch`` steps ahead of that rank.
    """
    return report.step + lag >= next_step + prefetch


MAX_METRICS = 4096  # limit of one report: losses and tokens of two thousand sources
MAX_NAME = 200  # characters of a metric name
LARGEST = 1e100  # limit of a value: a product of two values and a sum over all ranks stay finite
SHOWN = 5  # problems that one error lists


def checked_report(rank: int, step: Any, metrics: Any, next_step: int) -> Report:
    """Return the report of a rank, or raise a ``JobError`` that lists its problems.

    ``next_step``: the first step that the rank has not taken. Infinite values and NaN are left out:
    a run that diverges must not end because of its report.
    """
    where = f"report of rank {rank}"
    try:
        number = operator.index(step)
    except TypeError:
        raise JobError([f"expected the number of a step, got {step!r}"], where) from None
    if not 0 <= number < next_step:
        taken = f"steps up to {next_step - 1} are taken" if next_step else "no step is taken yet"
        problem = f"expected a step that this rank has taken, got step {number}; {taken}"
        raise JobError([problem], where)
    if not isinstance(metrics, Mapping):
        raise JobError([f"expected a mapping of metric name to number, got {metrics!r}"], where)
    if len(metrics) > MAX_METRICS:
        raise JobError(
            [f"expected at most {MAX_METRICS} metrics, got {len(metrics)}; report fewer"], where
        )
    values = {name: _number(value) for name, value in metrics.items()}
    problems = [p for name, value in values.items() for p in _problems(name, value, metrics[name])]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise JobError(problems[:SHOWN] + more, f"{where}, step {number}")
    return Report(
        number,
        rank,
        {
            name: value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        },
    )


def _problems(name: Any, value: float | None, given: Any) -> list[str]:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return [f"expected a metric name of 1 to {MAX_NAME} characters, got {name!r:.{MAX_NAME}}"]
    if value is None or (math.isfinite(value) and abs(value) > LARGEST):
        return [
            f"{name}: expected a finite number (at most {LARGEST:g} in size), got {given!r:.80}"
        ]
    return (
        [f"{name}: expected a number of tokens of at least 0, got {given!r:.80}"]
        if name.startswith("tokens/") and value < 0
        else []
    )


def _number(value: Any) -> float | None:
    """Return a number, or a scalar of any array library, as a float; None for other values."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return (
            float(value)
            if isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
            else None
        )
    # an array of several values, or a whole number too large for a float
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
