"""Supervision of the workers of a job: it detects losses, and decides on restarts. Pure.

The input is events with their times, the output commands. A worker that died or does not answer is
restarted under its own name as another *incarnation*. When all workers are restarted, one rollback
recovers all losses.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlord.errors import LAST_OUTPUT, ActorLost

# in the order of starts: a worker connects to workers of the kinds before its own
KINDS = ("planner", "constructor-worker", "loader-worker")
# A worker must answer within this many ticks. A supervisor that was suspended gets one late tick.
TICKS = 4


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A worker has started or restarted."""

    name: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker has answered a heartbeat."""

    name: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A worker died, or could not be started."""

    name: str
    incarnation: int
    reason: str
    spare: bool = False  # standbys cover all its loaders: the rollback does not wait for it
    acked: int = -1  # every rank has acknowledged the steps up to this one


@dataclass(frozen=True, slots=True)
class Needed:
    """A lost worker is needed for the rollback after all: its standbys are lost too."""

    name: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Loader workers cannot connect to a constructor worker that answers heartbeats."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retired:
    """A worker is not needed any more."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A quarter of ``lost_after_s`` has passed."""


@dataclass(frozen=True, slots=True)
class Closing:
    """The job ends: losses are ignored from now on."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a worker as a new incarnation."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker; its death is reported as an event."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class StartRollback:
    """All workers are restarted: replan after the last step that every rank acknowledged."""

    reason: str


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """Use a restarted worker for standbys: its own standbys have replaced it."""

    name: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the job: a worker is not restarted any more."""

    error: ActorLost


Event = WorkerReady | Heartbeat | WorkerDied | Needed | Unreachable | Retired | Tick | Closing
Command = StartWorker | KillWorker | StartRollback | StandbyReady | GiveUp

UP, DYING, DEAD, STARTING = "up", "to be killed", "dead", "being started"


@dataclass(slots=True)
class _WorkerState:
    name: str
    incarnation: int
    state: str
    answered_at: float  # time of the last answer
    ticks: int = 0  # number of ticks since the last answer
    restarts: int = 0  # number of losses since every rank last acknowledged a step
    acked: int = -1  # the last acknowledged step at its last loss
    reason: str = ""  # of its last loss
    since: float = 0.0  # time at which it was last alive
    spare: bool = False  # standbys cover all its loaders

    @property
    def kind(self) -> int:
        return KINDS.index(self.name.partition("/")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss of a worker that was restarted, or that standbys replaced."""

    worker: str
    reason: str
    since: float  # time at which it was last alive
    spare: bool = False  # standbys replaced it


def restart_limit_error(lost: ActorLost, restarts: int, doing: str = "") -> ActorLost:
    """Return the error of a worker that is not restarted any more.

    It has the reason of the loss, the task of the worker, the number of restarts, and the remedy.
    """
    why = str(lost).removeprefix(f"{lost.name} is lost: ")
    tried = (
        f"it was started again {restarts} time{'s' * (restarts != 1)}, and no step was taken by "
        "all ranks in between"
    )
    output = "" if LAST_OUTPUT in why else f"{LAST_OUTPUT} is in the output of the job: "
    remedy = f"{output}fix the cause; or raise max_restarts, if the cause is temporary"
    return ActorLost(lost.name, "; ".join(words for words in (why, doing, tried, remedy) if words))


class Supervisor:
    """The state of every worker; ``handle(event, now)`` updates it and returns commands. Pure."""

    def __init__(self, *, lost_after_s: float, max_restarts: int):
        self._lost_after_s, self._max_restarts = lost_after_s, max_restarts
        self._workers: dict[str, _WorkerState] = {}
        self._recovered: dict[str, Loss] = {}  # losses that the next rollback recovers
        self._over = False
        self.given_up: ActorLost | None = None

    def handle(self, event: Event, now: float) -> list[Command]:
        if self._over:
            return []
        match event:
            case WorkerReady():
                return self._is_up(event, now)
            case Heartbeat(name=name, incarnation=incarnation):
                return self._answered(name, incarnation, now)
            case WorkerDied(name=name, incarnation=incarnation):
                worker = self._workers.get(name)
                if worker is None or worker.incarnation != incarnation or worker.state == DEAD:
                    return []
                return self._died(worker, event, now)
            case Needed(name=name):
                if name in self._workers:
                    self._workers[name].spare = False
                return []
            case Unreachable(name=name, reason=reason):
                worker = self._workers.get(name)
                return (
                    self._kill(worker, reason) if worker is not None and worker.state == UP else []
                )
            case Retired(name=name):
                self._workers.pop(name, None)
                self._recovered.pop(name, None)
                return []
            case Tick():
                return [
                    command
                    for worker in list(self._workers.values())
                    for command in self._check_silence(worker, now)
                ]
            case Closing():
                self._over = True
                return []

    def lost(self) -> dict[str, str]:
        """Return the reasons of the losses of all workers that are not up, by name."""
        return {
            worker.name: worker.reason for worker in self._workers.values() if worker.state != UP
        }

    def silent_s(self, name: str, now: float) -> float:
        """Return the seconds since a living worker last answered; 0 for other workers."""
        worker = self._workers.get(name)
        return 0.0 if worker is None or worker.state != UP else now - worker.answered_at

    def take_recovered(self) -> list[Loss]:
        """Remove and return the losses that the current rollback recovers."""
        losses, self._recovered = list(self._recovered.values()), {}
        return losses

    def _is_up(self, event: WorkerReady, now: float) -> list[Command]:
        worker = self._workers.get(event.name)
        if worker is None:
            self._workers[event.name] = _WorkerState(
                event.name, event.incarnation, UP, now, since=now
            )
            return []
        if worker.incarnation != event.incarnation or worker.state != STARTING:
            return [KillWorker(event.name, event.incarnation, "another process has replaced it")]
        worker.state, worker.answered_at, worker.ticks = UP, now, 0
        if not worker.spare:
            self._recovered.setdefault(
                worker.name, Loss(worker=worker.name, reason=worker.reason, since=worker.since)
            )
        spare, worker.spare, worker.since = worker.spare, False, now
        commands = self._next_commands()
        return [StandbyReady(worker.name), *commands] if spare else commands

    def _answered(self, name: str, incarnation: int, now: float) -> list[Command]:
        worker = self._workers.get(name)
        if worker is None or worker.incarnation != incarnation or worker.state == DEAD:
            return [
                KillWorker(name, incarnation, "it was given up, and another process replaces it")
            ]
        if worker.state == UP:
            worker.answered_at, worker.ticks = now, 0
        return []

    def _check_silence(self, worker: _WorkerState, now: float) -> list[Command]:
        if worker.state != UP:
            return []
        worker.ticks += 1
        silent = now - worker.answered_at
        if worker.ticks <= TICKS or silent < self._lost_after_s:
            return []
        return self._kill(worker, f"it answered nothing for {silent:.1f} s")

    def _kill(self, worker: _WorkerState, reason: str) -> list[Command]:
        worker.state, worker.reason = DYING, reason
        return [KillWorker(worker.name, worker.incarnation, reason)]

    def _died(self, worker: _WorkerState, died: WorkerDied, now: float) -> list[Command]:
        if worker.state != STARTING:
            worker.since = worker.answered_at if worker.state == DYING else now
        if worker.state != DYING:
            worker.reason = died.reason
        failed = worker.state == STARTING
        worker.state = DEAD
        if died.acked > worker.acked:
            worker.restarts, worker.acked = 0, died.acked
        # A start that failed because the worker it connects to is lost does not count as a restart.
        if not (
            failed and any(p.state != UP and p.kind < worker.kind for p in self._workers.values())
        ):
            worker.restarts += 1
        if worker.restarts > self._max_restarts:
            self._over, self.given_up = True, ActorLost(worker.name, worker.reason)
            return [GiveUp(self.given_up)]
        if died.spare and not failed:
            worker.spare = True
            self._recovered.setdefault(
                worker.name,
                Loss(worker=worker.name, reason=worker.reason, since=worker.since, spare=True),
            )
        return self._next_commands()

    def _next_commands(self) -> list[Command]:
        """Start the workers that can be started; when no needed worker is missing, roll back."""
        missing = [worker for worker in self._workers.values() if worker.state != UP]
        first = min((worker.kind for worker in missing), default=0)
        starts = [worker for worker in missing if worker.state == DEAD and worker.kind == first]
        for worker in starts:
            worker.incarnation, worker.state = worker.incarnation + 1, STARTING
        begun: list[Command] = [StartWorker(worker.name, worker.incarnation) for worker in starts]
        if any(not worker.spare for worker in missing) or not self._recovered:
            return begun
        return [
            *begun,
            StartRollback(
                "; ".join(f"{loss.worker}: {loss.reason}" for loss in self._recovered.values())
            ),
        ]
