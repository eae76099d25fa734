"""Who of a job's parts is there, who is missed, and what is done about it. Pure: time comes in,
commands come out.

Parts are hosts by name. One that died, or answers nothing, is started again under its own name as
another *incarnation*; when all are there, planning goes back once for all that were lost meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlord.errors import SAID, ActorLost

KINDS = (
    "planner",
    "constructor-host",
    "loader-host",
)  # in the order in which they are started: each connects to those before it
# within which a part must answer; a supervisor that slept itself sees one late tick, and no silence
TICKS = 4


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """A part is there: at first, or again."""

    name: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A part has answered."""

    name: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """A part is gone, or could not be started."""

    name: str
    incarnation: int
    reason: str
    spare: bool = False  # others have all that it had: it is not waited for


@dataclass(frozen=True, slots=True)
class Needed:
    """A part that was not to be waited for is: those who had what it had are gone too."""

    name: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Others cannot reach a part, whatever it says itself."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retired:
    """A part is not needed any more: nobody misses it."""

    name: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: about a quarter of what a part may be silent."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Every rank has taken the steps up to this one."""

    step: int


@dataclass(frozen=True, slots=True)
class Closing:
    """The job ends: whoever dies from now on is not missed."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a part for good; that it died is still to be told."""

    name: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class RollBack:
    """All parts are there again: plan anew behind the last step that every rank took."""

    reason: str


@dataclass(frozen=True, slots=True)
class StandbyReady:
    """A part that was not waited for is there again."""

    name: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """A part cannot be kept alive."""

    error: ActorLost


Event = (
    WorkerReady
    | Heartbeat
    | WorkerDied
    | Needed
    | Unreachable
    | Retired
    | Tick
    | Progress
    | Closing
)
Command = StartWorker | KillWorker | RollBack | StandbyReady | GiveUp

UP, DYING, DEAD, STARTING = "up", "to be killed", "dead", "being started"


@dataclass(slots=True)
class _WorkerState:
    name: str
    incarnation: int
    state: str
    heard: float  # when it last answered
    ticks: int = 0  # since then
    restarts: int = 0  # since every rank last took a step
    reason: str = ""  # of what it died last
    since: float = 0.0  # when it was there last
    spare: bool = False  # others have what it had

    @property
    def kind(self) -> int:
        return KINDS.index(self.name.partition("/")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A part that was lost and is back."""

    part: str
    reason: str
    since: float  # when it was there last
    spare: bool = False  # others took its place


def worn_out(lost: ActorLost, restarts: int, doing: str = "") -> ActorLost:
    """A part that is not started again, for people: what it died of, what it was to do, how often
    it was tried, and what can be done.
    """
    why = str(lost).removeprefix(f"{lost.name} is lost: ")
    tried = (
        f"it was started again {restarts} time{'s' * (restarts != 1)}, and all ranks took no "
        "step in between"
    )
    said = "" if SAID in why else f"{SAID} is in the output of the job: "
    remedy = f"{said}mend what ends it; or raise max_restarts, if that passes by itself"
    return ActorLost(lost.name, "; ".join(words for words in (why, doing, tried, remedy) if words))


class Supervisor:
    """``handle(event, now) -> commands``."""

    def __init__(self, *, lost_after_s: float, max_restarts: int):
        self._lost_after_s, self._max_restarts = lost_after_s, max_restarts
        self._parts: dict[str, _WorkerState] = {}
        self._back: dict[str, Loss] = {}  # came back since planning last went back
        self._acked = -1
        self._over = False
        self.given_up: ActorLost | None = None

    def handle(self, event: Event, now: float) -> list[Command]:
        if self._over:
            return []
        match event:
            case WorkerReady():
                return self._is_up(event, now)
            case Heartbeat(name=name, incarnation=incarnation):
                return self._heard(name, incarnation, now)
            case WorkerDied(name=name, incarnation=incarnation, reason=reason, spare=spare):
                part = self._parts.get(name)
                if part is None or part.incarnation != incarnation or part.state == DEAD:
                    return []
                return self._died(part, reason, spare, now)
            case Needed(name=name):
                if name in self._parts:
                    self._parts[name].spare = False
                return []
            case Unreachable(name=name, reason=reason):
                part = self._parts.get(name)
                return self._kill(part, reason) if part is not None and part.state == UP else []
            case Retired(name=name):
                self._parts.pop(name, None)
                self._back.pop(name, None)
                return []
            case Tick():
                return [
                    command
                    for part in list(self._parts.values())
                    for command in self._look_at(part, now)
                ]
            case Progress(step=step):
                if step > self._acked:
                    self._acked = step
                    for part in self._parts.values():
                        part.restarts = 0
                return []
            case Closing():
                self._over = True
                return []

    def lost(self) -> dict[str, str]:
        """Parts that are not there, and why."""
        return {part.name: part.reason for part in self._parts.values() if part.state != UP}

    def silent_s(self, name: str, now: float) -> float:
        """How long ago a part that is there has answered; no part of this name, no silence."""
        part = self._parts.get(name)
        return 0.0 if part is None or part.state != UP else now - part.heard

    def back(self) -> list[Loss]:
        """Those that are there again since this was asked last."""
        losses, self._back = list(self._back.values()), {}
        return losses

    def _is_up(self, event: WorkerReady, now: float) -> list[Command]:
        part = self._parts.get(event.name)
        if part is None:
            self._parts[event.name] = _WorkerState(
                event.name, event.incarnation, UP, now, since=now
            )
            return []
        if part.incarnation != event.incarnation or part.state != STARTING:
            return [KillWorker(event.name, event.incarnation, "another was started in its place")]
        part.state, part.heard, part.ticks = UP, now, 0
        if not part.spare:
            self._back.setdefault(
                part.name, Loss(part=part.name, reason=part.reason, since=part.since)
            )
        spare, part.spare, part.since = part.spare, False, now
        return [StandbyReady(part.name), *self._go_on()] if spare else self._go_on()

    def _heard(self, name: str, incarnation: int, now: float) -> list[Command]:
        part = self._parts.get(name)
        if part is None or part.incarnation != incarnation or part.state == DEAD:
            return [
                KillWorker(
                    name, incarnation, "it was given up, and another is started in its place"
                )
            ]
        if part.state == UP:
            part.heard, part.ticks = now, 0
        return []

    def _look_at(self, part: _WorkerState, now: float) -> list[Command]:
        if part.state != UP:
            return []
        part.ticks += 1
        silent = now - part.heard
        if part.ticks <= TICKS or silent < self._lost_after_s:
            return []
        return self._kill(part, f"it answered nothing for {silent:.1f} s")

    def _kill(self, part: _WorkerState, reason: str) -> list[Command]:
        part.state, part.reason = DYING, reason
        return [KillWorker(part.name, part.incarnation, reason)]

    def _died(self, part: _WorkerState, reason: str, spare: bool, now: float) -> list[Command]:
        if part.state != STARTING:
            part.since = part.heard if part.state == DYING else now
        if part.state != DYING:
            part.reason = reason
        failed = part.state == STARTING
        part.state = DEAD
        # What could not be started because the one it connects to is gone has no fault of its own.
        if not (failed and any(p.state != UP and p.kind < part.kind for p in self._parts.values())):
            part.restarts += 1
        if part.restarts > self._max_restarts:
            self._over, self.given_up = True, ActorLost(part.name, part.reason)
            return [GiveUp(self.given_up)]
        if spare and not failed:
            part.spare = True
            self._back.setdefault(
                part.name, Loss(part=part.name, reason=part.reason, since=part.since, spare=True)
            )
        return self._go_on()

    def _go_on(self) -> list[Command]:
        """Start whoever can be; when all are there, go back once for all."""
        missing = [part for part in self._parts.values() if part.state != UP]
        first = min((part.kind for part in missing), default=0)
        starts = [part for part in missing if part.state == DEAD and part.kind == first]
        for part in starts:
            part.incarnation, part.state = part.incarnation + 1, STARTING
        begun: list[Command] = [StartWorker(part.name, part.incarnation) for part in starts]
        if any(not part.spare for part in missing) or not self._back:
            return begun
        return [
            *begun,
            RollBack("; ".join(f"{loss.part}: {loss.reason}" for loss in self._back.values())),
        ]
