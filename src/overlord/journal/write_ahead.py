"""What every engine does for its journal: plans and events are written down before anyone acts on
them. Without a journal nothing is.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from overlord.concurrency.command_loop import CommandLoop
from overlord.errors import JournalError, PlanError
from overlord.messages.control import (
    AddSource,
    DropHeldSamples,
    EndOfJob,
    PlannedStep,
    Refill,
    Report,
    RestartLoader,
    SourceLost,
    StreamState,
)
from overlord.planning.planner import Planner

if TYPE_CHECKING:
    from overlord.setup.prepared_job import PreparedJob


log = logging.getLogger("overlord")


class NullJournal:
    """The journal of a job that has none; what the others do is said in
    ``journal/job_journal.py``.
    """

    # what all writers of one launch share: the next one goes on only where the last was one of them
    launch = ""
    failed: JournalError | None = None
    settling = False  # an event waits to be durable, and the pump with it
    heard: Callable[[], None] = staticmethod(
        lambda: None
    )  # in the pump: something became durable, or cannot

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Write beside the pump from here on; ``post`` runs a call in it."""

    def has(self, step: int) -> bool:
        """Whether the plan of a step is durable."""
        return True

    def begin(self, state: StreamState, blueprint: PreparedJob) -> None: ...
    def planned(self, stages: Sequence[PlannedStep], taken: int | None) -> None: ...
    def said(self, event: Any) -> None: ...
    def joined(self, event: AddSource, blueprint: PreparedJob) -> None: ...
    def reported(self, report: Report) -> None: ...
    def took(self, step: int | None, last: bool) -> None: ...
    def went_back(self, step: int, generation: int, reason: str) -> None: ...
    def rewound(self, state: StreamState, blueprint: PreparedJob, floor: int = 0) -> None: ...
    def close(self, taken: int = -1) -> None: ...

    def figures(self) -> dict[str, Any]:
        return {}


UNWRITTEN = NullJournal()
PLANNED = (PlannedStep, Refill, EndOfJob, DropHeldSamples, RestartLoader)  # what a planner commands


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a session began, and why there."""

    step: int  # the first that it delivers
    why: str

    def __str__(self) -> str:
        return f"goes on with step {self.step}: {self.why}"


class Journaled(Protocol):
    """A runtime, as far as the start of its journal is concerned."""

    journal: NullJournal

    @property
    def planner(self) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class JournalStart:
    """How a session begins: its journal, and what stands there already."""

    journal: NullJournal = UNWRITTEN
    resumed: ResumePoint | None = None
    floor: int = 0  # the first step that was never planned
    anew: bool = False  # what the journal says of steps behind the state does not count any more

    def write(self, engine: Journaled, blueprint: PreparedJob) -> None:
        """Before the engine plans anything; if it cannot be written there is nothing to run. A
        planner elsewhere writes for itself.
        """
        try:
            if (write := getattr(engine, "write_beginning", None)) is not None:
                write(self)
                return
            if self.anew:
                self.journal.rewound(engine.planner.state(), blueprint, self.floor)
            else:
                self.journal.begin(engine.planner.state(), blueprint)
        except BaseException:
            engine.close()
            raise
        engine.journal = self.journal


@dataclass(frozen=True, slots=True)
class Durable:
    """A command of the planner that waits for nothing any more."""

    command: Any


class WriteAhead(CommandLoop):
    """The part of an engine that writes. In the pump.

    What the planner commands goes its way in the order in which it was said, and no plan goes
    before it is durable: it waits here, and with it all that was said behind it. Everything else
    goes on meanwhile.
    """

    planner: Planner
    on_lost: list[Callable[[SourceLost], None]]  # told of sources that left
    _journal: NullJournal = UNWRITTEN
    _held: deque[Any]

    def __init__(self, *, check: bool = False):
        super().__init__(check=check)
        self._held = deque()

    @property
    def journal(self) -> NullJournal:
        return self._journal

    @journal.setter
    def journal(self, journal: NullJournal) -> None:
        self._journal = journal
        if journal is not UNWRITTEN:
            journal.heard = self._released

    def settle(self) -> None:
        """Whatever is said here has happened when it returns."""

    def event(self, event: Any) -> None:
        """An event of the log, for the planner: when this returns it is durable, and may be said to
        have happened.
        """
        self.run(self._answered(event))

    def _answered(self, event: Any) -> list[Any]:
        """What the planner says to an event, which is written down before anyone does that."""
        in_time = isinstance(event, Report) and self.planner.in_time(event)
        commands = self.planner.handle(event)
        if in_time:
            self.journal.reported(event)
        try:
            self.journal.said(event)
        except JournalError as error:
            self.run(self.planner.handle(EndOfJob(self.planner.next_step, error)))
            raise
        return [*commands]

    def _lose(self, event: SourceLost) -> None:
        """The planner asks for an event: it is one like those that people say, written down before
        a step is planned with it.
        """
        log.error(
            "from step %d on nothing is drawn from source %r, whose storage was given up: %s",
            event.at,
            event.name,
            event.reason,
        )
        with contextlib.suppress(JournalError):  # the job has ended with it
            self.event(event)
            for watcher in self.on_lost:
                watcher(event)

    def report(self, report: Report) -> bool:
        """Whether it comes in time for a plan."""
        used = self.planner.in_time(report)
        self.event(report)
        return used

    # plans

    def _turn(self, command: Any) -> None:
        if isinstance(command, Durable):
            self._carry_out(command.command)
        elif not isinstance(command, PLANNED):
            self._carry_out(command)
        elif isinstance(command, PlannedStep) and not self._is_written(command):
            pass
        elif self._held or (
            isinstance(command, PlannedStep) and not self.journal.has(command.plan.step)
        ):
            self._held.append(command)
        else:
            self._carry_out(command)

    def _is_written(self, stage: PlannedStep) -> bool:
        """Hand a plan to the journal, and all that were made in the same turn. If that cannot be,
        the job ends before it.
        """
        try:
            self.journal.planned(
                [stage, *(c for c in self._queue if isinstance(c, PlannedStep))], self.planner.taken
            )
        except (JournalError, PlanError) as error:
            self._end_before(stage.plan.step, error)
            return False
        if (failed := self.journal.failed) is not None and not self.journal.has(stage.plan.step):
            self._end_before(
                stage.plan.step, failed
            )  # handed over before the planner went back: nobody tells again
            return False
        return True

    def _released(self) -> None:
        """Something became durable, or cannot."""
        error = self.journal.failed  # asked first: what is not durable then never will be
        waiting = next(
            (
                c.plan.step
                for c in self._held
                if isinstance(c, PlannedStep) and not self.journal.has(c.plan.step)
            ),
            None,
        )
        if waiting is not None and error is not None:
            self._end_before(waiting, error)
        free = []
        while self._held and not (
            isinstance(c := self._held[0], PlannedStep) and not self.journal.has(c.plan.step)
        ):
            free.append(Durable(self._held.popleft()))
        self._queue.extendleft(reversed(free))
        self.run()

    def _end_before(self, step: int, error: JournalError | PlanError) -> None:
        """No plan from this step on is acted upon. Those before it go their way when they are
        durable, if they are not yet.
        """
        self._held = deque(
            c for c in self._held if not isinstance(c, PlannedStep) or c.plan.step < step
        )
        self._queue = deque(
            c for c in self._queue if not isinstance(c, PlannedStep) or c.plan.step < step
        )
        self._queue.extend(self.planner.handle(EndOfJob(step, error)))

    def _unhold(self) -> None:
        """The planner is replaced: what the old one said last is said anew by the new one."""
        self._held.clear()

    def _was_taken(self) -> None:
        """Ranks took steps. The next plan says so; where none comes, it is said by itself."""
        try:
            self.journal.took(self.planner.taken, last=self.planner.finished is not None)
        except JournalError as error:
            self.run(self.planner.handle(EndOfJob(self.planner.next_step, error)))

    def _writing(self) -> str:
        """What a step waits for, if it is the journal; in words."""
        steps = [c.plan.step for c in self._held if isinstance(c, PlannedStep)]
        return f"step {steps[0]} to be written to the journal" if steps else ""
