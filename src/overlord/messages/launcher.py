"""Messages from a coordinator to the launcher and to the session.

The launcher starts, redirects and ends processes; ``lease_id`` identifies the lease of a worker.
The session receives the ``SessionEvent`` messages. The launcher itself sends ``JobFailed``, and
``WorkerRecovered`` for the coordinator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlord.messages.control import EncodedState, EndOfJob, LoaderStart, SourceLost, StreamState


@dataclass(frozen=True, slots=True)
class StartConstructorWorker:
    """Start a constructor worker and redirect it to the coordinator."""

    lease_id: int
    number: int


@dataclass(frozen=True, slots=True)
class StartLoaderWorker:
    """Start a loader worker and redirect it to the coordinator.

    ``sources``: the sources that it can open. ``constructors``: the addresses that it connects to,
    by constructor worker. ``instead_of``: the worker whose loaders it takes over, if any.
    """

    lease_id: int
    number: int
    sources: list[int]
    starts: list[LoaderStart]
    constructors: dict[int, str]
    instead_of: int | None = None


@dataclass(frozen=True, slots=True)
class RedirectWorker:
    """Connect a running worker to the coordinator that takes over."""

    lease_id: int
    worker: str


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """End a loader worker that is no longer needed."""

    number: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill a worker and report its death to the coordinator."""

    lease_id: int
    worker: str


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The connection between the coordinator and a worker has ended."""

    lease_id: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class WaitingForWorkers:
    """The coordinator that takes over waits for these running workers to answer."""

    workers: list[str]


@dataclass(frozen=True, slots=True)
class WorkerGivenUp:
    """The coordinator that takes over kills a running worker that does not answer."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class PlacementChanged:
    """Loaders were moved: ``worker_of[k]`` is now the worker of loader k."""

    worker_of: list[int]


@dataclass(frozen=True, slots=True)
class StepProgress:
    """Progress of a job: the last step that every rank took, and counts of journal writes."""

    acked: int
    written: list[float]


@dataclass(frozen=True, slots=True)
class CoordinatorFailed:
    """The event loop of the coordinator has stopped."""

    error: Exception


@dataclass(frozen=True, slots=True)
class StepPlanned:
    """A step was planned. ``after`` is the state after it, for clients of the session's server.

    It is a ``StreamState`` if a source began to lose many tokens in this step.
    """

    step: int
    after: StreamState | EncodedState
    skipped: bool


@dataclass(frozen=True, slots=True)
class StepAcked:
    """A rank took a step, according to its constructor worker."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RowsQuarantined:
    """Rows were quarantined, or images of samples could not be decoded."""

    rows: list[Any]
    undecodable: list[Any]


@dataclass(frozen=True, slots=True)
class EventApplied:
    """The event of the session with this number has taken effect and is durable.

    A coordinator that takes over sends the last one in the journal: its predecessor may not have
    confirmed it.
    """

    number: int


@dataclass(frozen=True, slots=True)
class WorkerRecovered:
    """A lost process was replaced: by a restart, or by its standbys."""

    worker: str
    reason: str
    seconds: float
    step: int  # the last step that was not planned again
    by_standbys: bool = False


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The planned end of the job; None withdraws an end that was sent before."""

    end: EndOfJob | None


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The coordinator is lost and is not restarted."""

    error: Exception


SessionEvent = (
    StepPlanned
    | StepAcked
    | RowsQuarantined
    | SourceLost
    | EventApplied
    | WorkerRecovered
    | JobFinished
    | JobFailed
)
