"""Messages between coordinator, launcher and session: starts, losses, and events of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from overlord.messages.control import EndOfJob, LoaderStart, SourceLost, StreamState


@dataclass(frozen=True, slots=True)
class StartConstructorWorker:
    """Start a constructor worker and redirect it to the coordinator."""

    lease_id: int
    number: int


@dataclass(frozen=True, slots=True)
class StartLoaderWorker:
    """Start a loader worker and redirect it to the coordinator.

    ``sources`` are the sources that it can open, ``constructors`` the addresses it connects to.
    ``instead_of`` is the worker whose loaders it is to read.
    """

    lease_id: int
    number: int
    sources: list[int]
    starts: list[LoaderStart]
    constructors: dict[int, str]
    instead_of: int | None = None


@dataclass(frozen=True, slots=True)
class RedirectWorker:
    """Redirect a worker that lives to the coordinator."""

    lease_id: int
    worker: str


@dataclass(frozen=True, slots=True)
class RetireWorker:
    """End a loader worker that is not needed any more."""

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


@dataclass(frozen=True, slots=True)
class StepPlanned:
    """A step was planned, for the server of the session: the state after it."""

    step: int
    after: StreamState
    skipped: bool


@dataclass(frozen=True, slots=True)
class StepAcked:
    """A rank took a step, as its constructor worker reports."""

    rank: int
    step: int


@dataclass(frozen=True, slots=True)
class RowsQuarantined:
    """New quarantined rows, and samples with images that could not be decoded."""

    rows: list[Any]
    undecodable: list[Any]


@dataclass(frozen=True, slots=True)
class EventApplied:
    """An event of the user has taken effect and is durable."""

    event: Any


@dataclass(frozen=True, slots=True)
class EventsFound:
    """The events in the journal, which an earlier coordinator may not have confirmed."""

    events: list[Any]


@dataclass(frozen=True, slots=True)
class ReportsRequested:
    """Confirm by ``all_reported(mark)`` that all reports up to now were sent."""

    mark: int


@dataclass(frozen=True, slots=True)
class WorkerRecovered:
    """A lost process was replaced: by a restart, or by its standbys."""

    worker: str
    reason: str
    seconds: float
    step: int  # the last step before those that were planned again
    by_standbys: bool = False


@dataclass(frozen=True, slots=True)
class JobFinished:
    """The end of the job, as planned; None while the job continues."""

    end: EndOfJob | None


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The coordinator is lost and not restarted."""

    error: Exception


SessionEvent = (
    StepPlanned
    | StepAcked
    | RowsQuarantined
    | SourceLost
    | EventApplied
    | EventsFound
    | ReportsRequested
    | WorkerRecovered
    | JobFinished
    | JobFailed
)
