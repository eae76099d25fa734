"""Every message of the workflow, in the order of the paper's Figure 7. Frozen; ids and metadata
only, never payload.

Consumed   client      -> planner, constructors      a step was handed to the trainer: the window moves on
Report     client      -> planner                    what a trainer measured in a step, for the mixture of a later one
Refill     planner     -> loader                     how many samples to hold ready
Read, Evaluate, then WindowRead, Evaluated           the loader asks its host for work, and gets the outcome
Announce   loader      -> planner                    metadata of new samples, in stream order
Reopen     whoever     -> planner                    a source is to be read again from where the draw stands: a loader moved
Hold       whoever     -> planner                    how far ahead a source is read, from here on
Forget, Open   planner -> loaders                    what leads to that
Stage      planner     -> loaders, constructors      the plan of a step; between processes its cuts, Part and Placed
Staged     loader host -> constructors               payload of a step has come; between processes as Payload
Build, then Built                                    the constructor asks its host for work
Spoiled    constructor -> planner                    images that could not be decoded, for the record
Deliver    constructor -> client                     a step for a rank (what travels with its arrays is Told)
Finish     planner     -> constructors               no step from here on; with an error, or without
End        constructor -> client                     all steps before that are sent
Back       planner     -> loaders, constructors      some part was lost: all behind a step is planned again
Resume     constructor -> client                     the end that was told is none
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
    """A client of this rank exists: its steps must be built and its pace counts."""

    rank: int


@dataclass(frozen=True, slots=True)
class Detach:
    """A client went away: nobody waits for this rank any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Consumed:
    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class SetMixture:
    """New weights from step ``at`` on. An event of the log: it shapes the stream."""

    at: int
    weights: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Skip:
    """These steps are drawn, listed and not delivered. They may be very many, and every plan asks:
    rising, each once.
    """

    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(sorted(set(self.steps))))

    def between(self, first: int, stop: int) -> bool:
        """Whether one of steps first to stop - 1 is skipped."""
        k = bisect_left(self.steps, first)
        return k < len(self.steps) and self.steps[k] < stop

    @property
    def last(self) -> int:
        return self.steps[-1] if self.steps else -1


@dataclass(frozen=True, slots=True)
class AddSource:
    """A source that joins at step ``at``. Its name and fingerprint only: code never stands in a
    state (it is in the job).
    """

    at: int
    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class SourceLost:
    """The storage of a source was given up: from step ``at`` on nothing of it is drawn. An event of
    the log, so that a run that is resumed or replayed leaves it at the same step, whether its
    storage answers then or not. The planner asks for it, and is told it.
    """

    at: int
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """What one rank measured in a step. An event of the log: plan ``step + feedback_lag`` may
    depend on it.
    """

    step: int
    rank: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Refill:
    """Hold at least ``must`` samples ready whatever the budget says (the draw waits for them), and
    ``level`` if it allows.

    ``horizon`` is the last group (counted over epochs) to be opened: without it, a loader whose
    chunks give no samples would run ahead for ever.
    """

    loader: int
    must: int
    level: int
    horizon: int = -1


class Cursor(NamedTuple):
    """A place in a source's stream: just behind sample (file, row, part) of a window; file -1: at
    the window's start.
    """

    epoch: int = 0
    group: int = 0
    window: int = 0
    file: int = -1
    row: int = -1
    part: int = -1


@dataclass(frozen=True, slots=True)
class LoaderStart:
    """A logical loader as it begins: share number ``share`` of ``shares`` of a source's chunks,
    from a place of its stream on.
    """

    loader: int
    source: int
    share: int
    shares: int
    cursor: Cursor
    budget_bytes: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class RestartSource:
    """Read a source again from where the draw stands, as after a restart: what its loaders hold is
    gone, or is to be elsewhere.
    """

    source: int


@dataclass(frozen=True, slots=True)
class SetReadAhead:
    """Hold so many steps' worth of a source's samples ready beyond the draw: its reads may be slow
    now and then. It changes no stream.
    """

    source: int
    steps: int


@dataclass(frozen=True, slots=True)
class RestartLoader:
    """A loader begins again at a cursor, with nothing held; what it said before belongs to a
    generation that is over.
    """

    loader: int
    cursor: Cursor
    generation: int
    step: int = -1  # the last that was planned before


@dataclass(frozen=True, slots=True)
class Rollback:
    """All behind ``step``, the last that stays, is planned again under a new generation: some part
    was lost. What is complete of it stays complete; what comes of an older generation is not heard.
    """

    generation: int
    step: int
    openings: tuple[
        LoaderStart, ...
    ] = ()  # for loader hosts: where each of the host's loaders stands behind that step
    afresh: bool = False  # loaders read again, though they may hold what is wanted


@dataclass(frozen=True, slots=True)
class DropHeldSamples:
    """Payload held over from these loaders goes; the other held rows close ranks, and are numbered
    so from now on.
    """

    loaders: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class EncoderPlan:
    """What some ranks encode in a step and how outputs come to the backbone, as columns: rank by
    rank, in each exchange by exchange.

    Group ``g = i * n_slots + s`` is exchange s of ``ranks[i]``; its items are rows ``bounds[g]`` to
    ``bounds[g + 1]`` of the first columns, what it receives rows ``recv_bounds[g]`` to
    ``recv_bounds[g + 1]`` of the last ones (``plan/routes.py``).
    """

    ranks: np.ndarray  # int64
    n_slots: int  # exchanges in a step
    per: str  # "microbatch": exchange m belongs to microbatch m; else "iteration"
    item: np.ndarray  # int64: number in the plan's module, in the order in which outputs are sent
    at: np.ndarray  # int64: row of its bytes among the staged items
    ids: np.ndarray  # int64 [n, 5]: source, epoch, file, row, part of its sample
    number: np.ndarray  # int32: which item of its sample it is
    home: np.ndarray  # int64 [n, 3]: bucket, microbatch, slot of its sample in the backbone
    send_lens: np.ndarray  # int32
    bounds: np.ndarray  # int64 [groups + 1]
    send_splits: np.ndarray  # int32 [groups, world]
    recv_splits: np.ndarray  # int32 [groups, world]
    recv_perm: np.ndarray  # int64
    out_lens: np.ndarray  # int32
    microbatch: np.ndarray  # int32: of the backbone
    position: (
        np.ndarray
    )  # int64: first placeholder in the un-sliced microbatch, rows laid end to end
    recv_bounds: np.ndarray  # int64 [groups + 1]


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStep:
    """The plan of a step. ``pops[l]`` samples leave the front of loader l; ``doc[i]`` is sample i's
    number among all popped ones, counted loader by loader behind those that were held over from
    steps before.
    """

    plan: LoadingPlan
    pops: np.ndarray
    doc: np.ndarray
    digest: str
    after: StreamState | EncodedState
    skipped: bool = False
    kept: np.ndarray | None = (
        # look-ahead: the rows of held and popped payload that stay held, in order; None: nothing is
        # ever held
        None
    )
    loader: np.ndarray | None = (
        None  # int32: who read each sample of the plan; for people, never for a strategy
    )
    valid_tokens: int = 0  # with a loss, over all ranks: a plan cut for some buckets does not know
    encoding: EncoderPlan | None = (
        None  # where steps are built, for their ranks; None: the job has no images
    )


@dataclass(frozen=True, slots=True, eq=False)
class LoaderPlan:
    """A loader host's share of a Stage: what leaves its loaders, and which of it goes to which
    constructor host.

    The host's documents are numbered: those held over from steps before, then the popped ones,
    loader by loader. ``take[j]`` are those for constructor host ``to[j]``, rising; without ``take``
    all go to each of ``to``. ``items[j]`` are the images
    for constructor host ``to[j]``, which need not be of its documents; without ``take`` all go.

    Shadows. ``("follow", Opening)`` makes a loader host the shadow of a loader that is read on
    another: it reads the same, is told the same Refills, and is popped by the same Parts, where its
    loaders stand among the others, or in a Part of their own without ``to``. What is popped of a
    shadow goes nowhere and has no number; one that is behind owes it, and reads it at once. Nobody
    hears its announcements. It keeps what was popped until ``acked``, as its primary does, so that
    a Back with its Opening makes it the primary, from memory. Behind a Back the shadows that stay
    shadows are told ``("follow", Opening)`` again, with their place and generation there: until
    then they are not popped. So are they when their source is opened again. ``("drop", loader)``
    ends one.
    """

    step: int
    loaders: np.ndarray  # int64, rising: who is popped
    pops: np.ndarray  # int64: how many of each
    to: tuple[int, ...]
    take: tuple[np.ndarray, ...] = ()
    kept: np.ndarray | None = None  # the documents that stay held; None: nothing is ever held
    items: tuple[
        np.ndarray, ...
    ] = ()  # int64 [2, n]: document and number inside it; empty: no images in this step
    plan: LoadingPlan | None = (
        None  # for loader hooks: the samples of this host; then ``take`` has rows of it
    )
    doc: np.ndarray | None = None  # and the document of each
    generation: int = 0  # under which it was planned
    acked: int = -1  # every rank took the steps up to here: what is kept of them may go


@dataclass(frozen=True, slots=True, eq=False)
class ConstructorPlan:
    """A constructor host's share of a Stage: the samples of its buckets. ``doc`` counts over the
    payloads of ``origins``, in order.
    """

    stage: PlannedStep
    origins: tuple[int, ...]  # loader hosts that send payload
    generation: int = 0  # under which it was planned


@dataclass(frozen=True, slots=True)
class EndOfJob:
    """There is no step ``step``, nor any after it."""

    step: int
    error: Exception | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StreamState:
    """The planner's state between two steps: small, global, the same on every rank. What a
    checkpoint holds.
    """

    step: int  # the next step to draw
    cursors: np.ndarray  # int64 [sources, 6]: a Cursor each
    owed: tuple[int, ...]
    active: tuple[bool, ...]
    events: tuple[SetMixture | Skip | AddSource | SourceLost, ...] = ()
    mix_step: int = 0  # the step whose weights are in force (mix_every="epoch" keeps them)
    mix_epoch: int = 0
    ahead: tuple[
        np.ndarray, ...
    ] = ()  # look-ahead: per source the ages of samples behind the cursor; -1: drawn already
    counts: Mapping[str, np.ndarray] = field(
        default_factory=dict
    )  # per source: see ``planner.spec.COUNTS``
    weights: tuple[float, ...] = ()  # in force, where they outlive their step (mix_every="epoch")
    schedule: Mapping[str, Any] | None = None  # what a stateful schedule has learned, plain JSON
    reports: tuple[Report, ...] = ()  # of steps whose using plan is still to come, by step and rank


@dataclass(frozen=True, slots=True, eq=False)
class EncodedState:
    """A StreamState as bytes: whoever carries it to a client need not look inside, and a client
    looks only when it saves.
    """

    step: int  # the next step to draw, as in the state
    data: np.ndarray  # uint8


# groups a loader may open beyond the one the planner draws from; windows in memory are bounded by
# the level
GROUPS_AHEAD = 8


STRIDE = (
    2**20
)  # generations between two recoveries: between them a source may be opened again so often


# from the coordinator to loader workers


@dataclass(frozen=True, slots=True)
class FollowLoader:
    """Open a standby of a loader that another worker reads."""

    start: LoaderStart


@dataclass(frozen=True, slots=True)
class TakeOverLoader:
    """Read a loader from ``step`` on with the samples that its standby holds, or open it."""

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


# from workers to the coordinator


@dataclass(frozen=True, slots=True)
class StepsAcked:
    """The last steps that ranks of a constructor worker took: ``steps[i]`` of ``ranks[i]``."""

    ranks: list[int]
    steps: list[int]


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """A loader worker cannot reach a constructor worker at an address."""

    worker: str
    reason: str
    address: str


# from a coordinator in its own process to the launching process; ``ticket`` names the worker's lease


@dataclass(frozen=True, slots=True)
class StartConstructorWorker:
    """Start a constructor worker and redirect it to the coordinator."""

    ticket: int
    number: int


@dataclass(frozen=True, slots=True)
class StartLoaderWorker:
    """Start a loader worker and redirect it to the coordinator.

    ``sources`` are the sources that it can open, ``constructors`` the addresses it connects to.
    ``instead_of`` is the worker whose loaders it is to read.
    """

    ticket: int
    number: int
    sources: list[int]
    starts: list[LoaderStart]
    constructors: dict[int, str]
    instead_of: int | None = None


@dataclass(frozen=True, slots=True)
class RedirectWorker:
    """Redirect a worker that lives to the coordinator."""

    ticket: int
    worker: str


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """End a loader worker that is not needed any more."""

    number: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill a worker and report its death to the coordinator."""

    ticket: int
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The connection between the coordinator and a worker has ended."""

    ticket: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WaitingForWorkers:
    """Living workers that have not answered a coordinator that takes over."""

    workers: list[str]


@dataclass(frozen=True, slots=True)
class WorkerGivenUp:
    """A coordinator that takes over kills a living worker that does not answer."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementChanged:
    """The worker of every loader."""

    worker_of: list[int]


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The last step that every rank took, and the counts of this coordinator's journal."""

    acked: int
    written: list[float]


@dataclass(frozen=True, slots=True)
class CoordinatorFailed:
    """The event loop of the coordinator has stopped."""

    error: Exception
