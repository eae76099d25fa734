"""Messages of the planner and of workers: planning, plans and the control of workers.

Clients, session and coordinator to the planner:

    Attach, Detach      client -> planner                   a rank takes part, or no longer
    Consumed            client -> planner, constructors     a step was given to the trainer
    Report              client -> planner                   metrics of a step, for the mixture
    SentReport          client -> coordinator               a Report with its number
    SetMixture, Skip    session -> planner                  events of the user
    AddSource           session -> planner                  event: a source is added
    SourceLost          planner -> session -> planner       event: a source is lost
    SetReadAhead        coordinator -> planner              how far ahead a source is read
    RestartSource       coordinator -> planner              read a source again from its cursor

The planner to loaders and constructors:

    Refill              planner -> loader                   number of samples to hold ready
    RestartLoader       planner -> loader                   start again at a cursor
    DropHeldSamples     planner -> loaders                  free payload held for later steps
    PlannedStep         planner -> loaders, constructors    the plan of a step, in one process
    EndOfJob            planner -> constructors             no step follows

The coordinator to workers, and workers to the coordinator:

    LoaderPlan          coordinator -> loader worker        its routed share of a PlannedStep
    ConstructorPlan     coordinator -> constructor worker   its routed share of a PlannedStep
    Rollback            coordinator -> workers              drop incomplete steps after a step
    FollowLoader        coordinator -> loader worker        open a standby of a loader
    TakeOverLoader      coordinator -> loader worker        read a loader from now on
    DropLoader          coordinator -> loader worker        close a loader
    ConnectConstructor  coordinator -> loader worker        address of a constructor worker
    SetBufferBudget     coordinator -> loader worker        bytes that each loader may buffer
    StepsAcked          constructor worker -> coordinator   the last steps that ranks took, reports
    ConnectionLost      loader worker -> coordinator        a constructor worker is unreachable

Values inside messages: ``EventId``, ``Cursor``, ``LoaderStart``, ``EncoderPlan``, ``StreamState``
and ``EncodedState``. ``messages/data.py`` has the messages of loaders, constructors and clients on
the data path. ``messages/launcher.py`` has those between coordinator, launcher and session.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from overlord.plan.plan import LoadingPlan


@dataclass(frozen=True, slots=True)
class Attach:
    """A client of this rank exists: its steps are built, and planning waits for it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Detach:
    """The client of this rank is closed: planning no longer waits for it."""

    rank: int


@dataclass(frozen=True, slots=True)
class Consumed:
    """A rank gave a step and all steps before it to its trainer; the prefetch window advances."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class SetMixture:
    """The mixture has new weights from step ``at`` on: an event of the log."""

    at: int
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Skip:
    """These steps are drawn and listed, but not delivered.

    They are sorted and unique: every plan searches them, and there may be very many.
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))

    def between(self, first: int, stop: int) -> bool:
        """Return whether one of steps first to stop - 1 is skipped."""
        k = bisect_left(self.steps, first)
        return k < len(self.steps) and self.steps[k] < stop

    @property
    def last(self) -> int:
        """The last skipped step; -1 if there is none."""
        return self.steps[-1] if self.steps else -1


@dataclass(frozen=True, slots=True)
class AddSource:
    """A source is added at step ``at``: its name and fingerprint; its code is in the job."""

    at: int
    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The storage of a source failed permanently: no sample of it is drawn from step ``at`` on.

    The planner requests this event and receives it from the log. So a resumed or replayed run drops
    the source at the same step, whether its storage works then or not.
    """

    at: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Metrics of one rank and step; the plan of step ``step + feedback_lag`` may use them."""

    step: int
    rank: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SentReport:
    """A report on its way from a client to the planner, which may receive it more than once.

    ``number`` identifies it among the reports of its rank, and rises.
    """

    number: int
    report: Report
    in_time: bool  # no plan that uses it can exist yet, however far planning is


class EventId(NamedTuple):
    """The identity of an event or a report: the same whenever it is sent again.

    The events of one origin are sent in the order of their numbers.
    """

    launch: str  # as the journal identifies it; empty without a journal
    origin: str  # "session", "planner", or "rank 3" for its reports
    number: int


@dataclass(frozen=True, slots=True)
class Refill:
    """Hold at least ``must`` samples ready, and ``level`` samples if the budget allows.

    ``must`` ignores the budget, since the draw waits for these samples. ``horizon`` is the last
    group (counted over epochs) that the loader may open; -1 leaves it unchanged. Without a horizon,
    a loader whose chunks give no samples would read ahead without end.
    """

    loader: int
    must: int
    level: int
    horizon: int = -1


class Cursor(NamedTuple):
    """A position in a source's stream: just after sample (file, row, part) of a window."""

    epoch: int = 0
    group: int = 0
    window: int = 0
    file: int = -1  # -1: at the start of the window
    row: int = -1
    part: int = -1


@dataclass(frozen=True, slots=True)
class LoaderStart:
    """The start of a loader: shard ``share`` of ``shares`` of a source's chunks, from a cursor."""

    loader: int
    source: int
    share: int
    shares: int
    cursor: Cursor
    budget_bytes: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class RestartSource:
    """Read a source again from the cursor of the draw, as after a restart.

    The samples in its loaders are lost, or its loaders are to move to other workers.
    """

    source: int


@dataclass(frozen=True, slots=True)
class SetReadAhead:
    """Hold samples of a source for ``steps`` steps beyond the draw, since some reads are slow.

    The stream does not change.
    """

    source: int
    steps: int


@dataclass(frozen=True, slots=True)
class RestartLoader:
    """Start a loader again at a cursor, with no samples.

    Its earlier announcements belong to an older generation and are ignored.
    """

    loader: int
    cursor: Cursor
    generation: int
    step: int = -1  # the last step planned before the restart


@dataclass(frozen=True, slots=True)
class Rollback:
    """All steps after ``step`` are planned again in a new generation, since a worker was lost.

    Complete steps stay complete. Messages of older generations are ignored.
    """

    generation: int
    step: int
    # for loader workers: the start of each of the worker's loaders after that step
    openings: tuple[LoaderStart, ...] = ()
    afresh: bool = False  # loaders read again even if they hold the samples


@dataclass(frozen=True, slots=True)
class DropHeldSamples:
    """Free the payload of these loaders that is held for later steps.

    The other held rows keep their order and are numbered consecutively again.
    """

    loaders: tuple[int, ...]


SHARED = -2  # in ``EncoderPlan.home``: several buckets hold the sample


@dataclass(frozen=True, slots=True, eq=False)
class EncoderPlan:
    """The images that some ranks encode in a step, and the routes of outputs to the backbone.

    Columns list items or parts of them by rank, and by exchange within each rank. Group
    ``g = i * n_slots + s`` is exchange s of ``ranks[i]``. It encodes rows ``bounds[g]`` to
    ``bounds[g + 1]`` of the columns ``item`` to ``send_lens``, and sends rows ``sent_bounds[g]`` to
    ``sent_bounds[g + 1]`` of ``sent``. It receives rows ``recv_bounds[g]`` to
    ``recv_bounds[g + 1]`` of the columns ``recv_perm`` to ``position`` (``plan/routes.py``).
    """

    ranks: np.ndarray  # int64
    n_slots: int  # exchanges in a step
    per: str  # "microbatch": exchange m belongs to microbatch m; else "iteration"
    item: np.ndarray  # int64: item of the plan's module, in the order of outputs
    at: np.ndarray  # int64: row of its bytes among the payload's items
    ids: np.ndarray  # int64 [n, 5]: source, epoch, file, row, part of its sample
    number: np.ndarray  # int32: number of the item in its sample
    # int64 [n, 3]: bucket (or ``SHARED``), microbatch, slot of its sample in the backbone
    home: np.ndarray
    send_lens: np.ndarray  # int32
    bounds: np.ndarray  # int64 [groups + 1]
    # int64 [parts, 3] in sending order: number of the item in its group, first row, rows
    sent: np.ndarray
    sent_bounds: np.ndarray  # int64 [groups + 1]
    send_splits: np.ndarray  # int32 [groups, world]
    recv_splits: np.ndarray  # int32 [groups, world]
    recv_perm: np.ndarray  # int64, by part
    out_lens: np.ndarray  # int32: rows of each part
    microbatch: np.ndarray  # int32: the receiving rank's microbatch
    position: np.ndarray  # int64: first placeholder in that microbatch, rows laid end to end
    recv_bounds: np.ndarray  # int64 [groups + 1]
    # int64 [m, 5], for all documents that the ranks hold, whole or a part of them: bucket,
    # microbatch and slot of the sample, first placeholder in the document, placeholders
    placeholders: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """The plan of a step, its samples in the loaders, and the state after it.

    ``pops[l]`` samples leave the front of loader l. ``doc[i]`` is the payload row of sample i. Rows
    held from earlier steps come first, then the popped rows, loader by loader.
    """

    plan: LoadingPlan
    pops: np.ndarray
    doc: np.ndarray
    digest: str
    after: StreamState | EncodedState
    skipped: bool = False
    # look-ahead: the rows of held and popped payload that stay held; None: nothing is ever held
    kept: np.ndarray | None = None
    # int32: loader of each sample; for status and explanations, never for a strategy
    loader: np.ndarray | None = None
    # sum of the weights of all labels, over all ranks; a plan of some buckets cannot count them
    valid_tokens: int | float = 0
    # encoder plan for the ranks of a constructor; None: the job has no images
    encoding: EncoderPlan | None = None
    samples: int = 0  # of the step, over all ranks


@dataclass(frozen=True, slots=True, eq=False)
class LoaderPlan:
    """A loader worker's share of a PlannedStep: the samples that leave its loaders.

    The documents of the worker are numbered: first those held from earlier steps, then the popped
    ones, loader by loader. Constructor worker ``to[j]`` gets documents ``take[j]``, in rising
    order, and the images ``items[j]``, which may belong to documents of other constructor workers.
    Without ``take``, every constructor worker of ``to`` gets all documents and images.

    Standbys: ``FollowLoader`` makes a worker the standby of a loader on another worker. The standby
    reads the same samples, gets the same Refills, and is popped by the same LoaderPlans. Its
    loaders are listed among the others, or in a LoaderPlan of their own without ``to``. Popped
    samples of a standby are not sent and have no number. A late standby reads the missing samples
    at once. Its announcements are ignored.

    A standby keeps popped samples until ``acked``, as its primary does. So a Rollback with its
    LoaderStart makes it the primary, from memory. After a Rollback, or a restart of their source,
    the remaining standbys get ``FollowLoader`` again, with cursor and generation. Until then they
    are not popped. ``DropLoader`` ends a standby.
    """

    step: int
    loaders: np.ndarray  # int64, rising: the loaders that are popped
    pops: np.ndarray  # int64: number of samples of each
    to: tuple[int, ...]
    take: tuple[np.ndarray, ...] = ()
    # int64 [2, n]: first token and number of tokens of each document of ``take``; empty: all tokens
    spans: tuple[np.ndarray, ...] = ()
    kept: np.ndarray | None = None  # the documents that stay held; None: nothing is ever held
    # int64 [2, n]: document and number inside it; empty: no images in this step
    items: tuple[np.ndarray, ...] = ()
    # for loader hooks: a plan of this worker's samples; ``take`` then has rows of this plan
    plan: LoadingPlan | None = None
    doc: np.ndarray | None = None  # document of each sample of ``plan``
    generation: int = 0  # of the plan
    acked: int = -1  # last step that every rank took: samples up to it need not be kept


@dataclass(frozen=True, slots=True, eq=False)
class ConstructorPlan:
    """A constructor worker's share of a PlannedStep: the samples of its buckets.

    ``stage.doc`` counts rows over the payloads of ``origins``, in that order.
    """

    stage: PlannedStep
    origins: tuple[int, ...]  # loader workers that send payload
    generation: int = 0  # of the plan


@dataclass(frozen=True, slots=True)
class EndOfJob:
    """The job ends before step ``step``, with an error or without."""

    step: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamState:
    """The planner's state between two steps. It is small, equal on every rank, and checkpointed."""

    step: int  # the next step to draw
    cursors: np.ndarray  # int64 [sources, 6]: a Cursor each
    owed: tuple[int, ...]  # per source: samples or tokens that it is due, scaled to integers
    active: tuple[bool, ...]  # per source: whether samples may still be drawn from it
    events: tuple[SetMixture | Skip | AddSource | SourceLost, ...] = ()
    mix_step: int = 0  # the step whose weights are in force (mix_every="epoch" keeps them)
    mix_epoch: int = 0
    # look-ahead: per source, the age in steps of each sample after the cursor; -1: drawn already
    ahead: tuple[np.ndarray, ...] = ()
    # packing="concat": per source, the tokens of its first sample left that steps have received
    cut: tuple[int, ...] = ()
    # running counts per source (``planning.spec.COUNTS``)
    counts: Mapping[str, np.ndarray] = field(default_factory=dict)
    weights: tuple[float, ...] = ()  # weights in force; only with mix_every="epoch"
    schedule: Mapping[str, Any] | None = None  # state of a schedule that learns, plain JSON
    reports: tuple[Report, ...] = ()  # reports that later plans will use, by step and rank


@dataclass(frozen=True, slots=True, eq=False)
class EncodedState:
    """A StreamState as bytes, which a client decodes only when it saves a state."""

    step: int  # the next step to draw, as in the state
    data: np.ndarray  # uint8


# groups that a loader may open beyond the group of the draw; ``Refill.level`` bounds its samples
GROUPS_AHEAD = 8

# generations that a recovery adds: sources may be restarted this often until the next recovery
STRIDE = 2**20


# Messages from the coordinator to loader workers.


@dataclass(frozen=True, slots=True)
class FollowLoader:
    """Open a standby of a loader that another worker reads."""

    start: LoaderStart


@dataclass(frozen=True, slots=True)
class TakeOverLoader:
    """Continue a loader after ``step``: from this worker's standby if it has one, else open it."""

    step: int
    start: LoaderStart


@dataclass(frozen=True, slots=True)
class DropLoader:
    """Close a loader that another worker reads from now on."""

    loader: int


@dataclass(frozen=True, slots=True)
class ConnectConstructor:
    """Connect to a constructor worker, in place of an earlier connection."""

    constructor: int
    address: str
    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SetBufferBudget:
    """Bound the bytes that each loader may buffer."""

    nbytes: int


# Messages from workers to the coordinator.


@dataclass(frozen=True, slots=True)
class StepsAcked:
    """The last steps that ranks of a constructor worker took: ``steps[i]`` of ``ranks[i]``.

    ``reports``: the reports that these ranks sent before; they are applied before the steps count.
    ``generation``: of the last rollback that the worker received. Then it sent all of this again.
    """

    ranks: list[int]
    steps: list[int]
    reports: list[SentReport] = field(default_factory=list)
    generation: int = 0


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A loader worker cannot reach a constructor worker at an address."""

    worker: str
    reason: str
    address: str
