"""Write-ahead journaling of a runtime: plans and events are durable before they take effect."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from overlord.concurrency.event_loop import CommandLoop
from overlord.errors import JournalError, PlanError
from overlord.journal.applied_ids import AppliedIds
from overlord.journal.log import JournalLog
from overlord.journal.record import Record
from overlord.journal.timeouts import TIMEOUTS
from overlord.messages.control import (
    AddSource,
    DropHeldSamples,
    EndOfJob,
    EventId,
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

# ----------------------------------------------------------------------------
# The append thread: it writes to the journal, so that the event loop does not wait for storage.
#
# An append takes milliseconds on a disk and longer in a store. Appends that wait at the same time
# are written together, in order, with one sync. After an error nothing more is written, and every
# waiting caller receives the error. A failed removal of a pruned segment is not such an error: the
# segment is no longer read, and only takes space.


@dataclass(frozen=True, slots=True)
class _Order:
    """Records that are appended together, and the segments that are pruned afterwards."""

    records: Sequence[Record]
    rolls: bool = False  # the records begin a new segment
    before: int | None = None  # afterwards, records with lower numbers are pruned
    anew: bool = False  # the records begin a new segment, and all segments before it are pruned


def _at_once(call: Callable[[], None]) -> None:
    call()


class AppendThread:
    """The writer of one log.

    ``on_change`` is called whenever an append became durable or failed, in the writer's thread.
    Without ``on_change`` no thread is started, and ``put`` writes. ``later`` replaces the thread:
    it runs a call once, at any later time, and never concurrently with another call of the writer.
    """

    def __init__(
        self,
        log: JournalLog,
        on_change: Callable[[], None] | None = None,
        later: Callable[[Callable[[], None]], None] | None = None,
    ):
        self._log, self._on_change = log, on_change
        # runs ``_turn``; None: the thread does
        self._later = _at_once if on_change is None else later
        self._orders: deque[_Order] = deque()
        self._given = self.done = 0  # orders accepted, and orders that are durable
        self.failed: JournalError | None = None
        self.unpruned = ""  # warning about pruned segments that could not be removed
        self.appends, self.seconds = 0, 0.0
        self._changed = threading.Condition(threading.RLock())
        self._closed = self._ended = False  # ended: the thread has exited
        self._late = False  # closed while the thread still writes: the thread then closes the log
        self._thread: threading.Thread | None = None
        self._sweeping: threading.Thread | None = None

    def put(
        self,
        records: Sequence[Record],
        *,
        rolls: bool = False,
        before: int | None = None,
        anew: bool = False,
    ) -> int:
        """Queue records for writing, and segments for pruning after them.

        Return the number of the order, for ``wait`` and for comparison with ``done``. Raise the
        error of an earlier append that failed. ``rolls``, ``before``, ``anew``: as in ``_Order``.
        """
        order = _Order(records, rolls or anew, before, anew)
        with self._changed:
            if self.failed is not None:
                raise self.failed
            self._given += 1
            self._orders.append(order)
            if self._later is not None:
                self._later(self._turn)
                if self.failed is not None:
                    raise self.failed
                return self._given
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="overlord-journal", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            return self._given

    def wait(self, number: int, timeout_s: float = TIMEOUTS.append_s) -> None:
        """Wait until an order is durable; raise the error of an append that failed.

        Raise ``JournalError`` if that takes longer than ``timeout_s``.
        """
        with self._changed:
            while self._later is not None and self.done < number and self.failed is None:
                self._turn()
            self._changed.wait_for(
                lambda: self.done >= number or self.failed is not None, timeout_s
            )
            if self.failed is not None and self.done < number:
                raise self.failed
            if self.done < number:
                raise JournalError(
                    self._log.shown,
                    f"expected a durable append within {timeout_s:g} s, got none",
                    "check the disk or the store, then resume",
                )

    def _run(self) -> None:
        try:
            self._loop()
        finally:
            with self._changed:
                self._ended = True
                if self._late:
                    self._log.close()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._orders or self._closed)
                if not self._orders:
                    return
            self._turn()
            if self.failed is not None:
                return

    def _turn(self) -> None:
        """Write the oldest orders, as many as one append may take, unless an append failed."""
        with self._changed:
            if not self._orders or self.failed is not None:
                return
            orders = [self._orders.popleft()]
            while self._orders and not self._orders[0].rolls and orders[-1].before is None:
                orders.append(self._orders.popleft())
        with contextlib.suppress(JournalError):  # ``failed`` has it, for all callers
            self._write(orders)
        self._notify()
        if self.failed is None:
            self._sweep(orders)

    def _notify(self) -> None:
        if self._on_change is not None:
            self._on_change()

    def _write(self, orders: Sequence[_Order]) -> None:
        start = time.perf_counter()
        try:
            if orders[0].rolls:
                self._log.roll()
            self._log.append(
                [record for order in orders for record in order.records], anew=orders[0].anew
            )
            with self._changed:
                self.appends, self.done = self.appends + 1, self.done + len(orders)
                self._changed.notify_all()
            if (before := orders[-1].before) is not None:
                self._log.mark_pruned(before)
        except Exception as error:
            failed = error if isinstance(error, JournalError) else self._unforeseen(error)
            with self._changed:
                self.failed = failed
                self._changed.notify_all()
            raise failed from failed.__cause__
        finally:
            self.seconds += time.perf_counter() - start

    def _sweep(self, orders: Sequence[_Order]) -> None:
        """Remove pruned segments, if these orders pruned any.

        It is called after all waiting callers were notified: a storage may accept writes and refuse
        removals.
        """
        if orders[-1].before is None and not orders[0].anew:
            return
        if not self._log.removes_slowly or self._thread is None:
            self._sweep_now()
        elif self._sweeping is None or not self._sweeping.is_alive():
            # In a thread of its own: plans must not wait for a store that does not answer.
            self._sweeping = threading.Thread(
                target=self._sweep_now, name="overlord-journal-sweep", daemon=True
            )
            self._sweeping.start()

    def _sweep_now(self) -> None:
        start, before = time.perf_counter(), self.unpruned
        try:
            self._log.sweep()
            self.unpruned = ""
        except Exception as error:
            where = error.path if isinstance(error, JournalError) else self._log.shown
            why = (
                error.problem
                if isinstance(error, JournalError)
                else f"{type(error).__name__}: {error}"
            )
            self.unpruned = (
                f"journal {where}: {self._log.doomed} pruned segments stay: {why}; "
                "let the job remove them (in a store: DeleteObject). The job continues, the "
                "journal grows, and the next pruning tries again"
            )
        if self.unpruned and not before:
            log.warning("%s", self.unpruned)
        self.seconds += time.perf_counter() - start

    def _unforeseen(self, error: Exception) -> JournalError:
        """Return the error of an append that failed outside the storage, as by lack of memory."""
        log.error("journal %s: append failed", self._log.shown, exc_info=error)
        what = f"an append failed: {type(error).__name__}: {error}"
        remedy = (
            "fix the cause (the traceback is in the log), and resume: all that was acknowledged is "
            "kept"
        )
        failed = JournalError(self._log.shown, what, remedy)
        failed.__cause__ = error
        return failed

    def close(self, timeout_s: float) -> bool:
        """Write the queued orders and stop; return whether that finished within ``timeout_s``.

        If so, the log is still open. If not, the thread closes the log when it finishes, so that
        this process can open the journal again.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        while self._later is not None and self._orders and self.failed is None:
            self._turn()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
            if self._sweeping is not None:
                self._sweeping.join(timeout_s)  # the next pruning removes what is left
            with self._changed:
                self._late = not self._ended
            return not self._late
        return True


# ----------------------------------------------------------------------------
# The write-ahead gate: a planner command waits until the record of its plan is durable.


class NullJournal:
    """A journal that writes nothing, for jobs without one; ``JobJournal`` documents the methods."""

    # shared by all writers of one launch: a writer continues only a journal of its own launch
    launch = ""
    applied: AppliedIds | None = None  # the applied events; None: nothing is written
    failed: JournalError | None = None
    settling = False  # the event loop waits until an event is durable
    # called on the event loop when a record became durable, or an append failed
    on_durable: Callable[[], None] = staticmethod(lambda: None)

    def start(self, post: Callable[[Callable[[], None]], None]) -> None:
        """Write in a thread from now on; ``post`` runs a call on the event loop."""

    def has(self, step: int) -> bool:
        """Return whether the plan of a step is durable."""
        return True

    def write_start(self, state: StreamState, prepared: PreparedJob) -> None: ...
    def write_plans(self, stages: Sequence[PlannedStep], taken: int | None) -> None: ...
    def write_event(self, event: Any, event_id: EventId) -> None: ...
    def write_added_source(
        self, event: AddSource, prepared: PreparedJob, event_id: EventId
    ) -> None: ...
    def write_report(self, report: Report, event_id: EventId) -> None: ...
    def write_acked(self, step: int | None, last: bool) -> None: ...
    def write_rollback(self, step: int, generation: int, reason: str) -> None: ...
    def write_rewind(self, state: StreamState, prepared: PreparedJob, floor: int = 0) -> None: ...
    def close(self, taken: int = -1) -> None: ...

    def metrics(self) -> dict[str, Any]:
        return {}


UNWRITTEN = NullJournal()
# commands of a planner
PLANNED = (PlannedStep, Refill, EndOfJob, DropHeldSamples, RestartLoader)


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The step at which a session began, and the reason."""

    step: int  # the first step that it delivers
    why: str

    def __str__(self) -> str:
        return f"continues with step {self.step}: {self.why}"


class Journaled(Protocol):
    """A runtime that writes the start of its stream to a journal."""

    def begin_journal(self, start: JournalStart, prepared: PreparedJob) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class JournalStart:
    """The journal of a session at its start, and the position from which the session resumes."""

    journal: NullJournal = UNWRITTEN
    resumed: ResumePoint | None = None
    floor: int = 0  # the first step that was never planned
    anew: bool = False  # records of steps after the state are void

    def write(self, runtime: Journaled, prepared: PreparedJob) -> None:
        """Write the start before the runtime plans a step; close the runtime if that fails."""
        try:
            runtime.begin_journal(self, prepared)
        except BaseException:
            runtime.close()
            raise

    def append(self, state: StreamState, prepared: PreparedJob) -> None:
        """Append the start of the stream at a state to the journal."""
        if self.anew:
            self.journal.write_rewind(state, prepared, self.floor)
        else:
            self.journal.write_start(state, prepared)


@dataclass(frozen=True, slots=True)
class Durable:
    """A held planner command whose plan has become durable."""

    command: Any


class WriteAheadGate:
    """The gate that admits planner commands in order, and no plan before its record is durable.

    A plan that is not durable is held, and with it every later planner command. Other commands
    pass. Runs on: event loop.
    """

    def __init__(self, commands: CommandLoop, planner: Callable[[], Planner]):
        self._commands, self._planner = commands, planner
        self._journal: NullJournal = UNWRITTEN
        self._applied = AppliedIds()  # without a journal
        self._held: deque[Any] = deque()  # planner commands that wait for a plan to be durable

    @property
    def journal(self) -> NullJournal:
        return self._journal

    @journal.setter
    def journal(self, journal: NullJournal) -> None:
        self._journal = journal
        if journal is not UNWRITTEN:
            journal.on_durable = self._release

    @property
    def applied(self) -> AppliedIds:
        """The events that were applied, by this process or by earlier ones of the launch."""
        return self._applied if self._journal.applied is None else self._journal.applied

    def record(self, event: Any, number: int | None = None) -> list[Any]:
        """Apply an event to the planner, journal it, and return the planner's commands.

        An event that was applied already is ignored: ``number`` identifies it among those of its
        origin. A change of the stream is durable on return. A report is written with the next plan.
        If the event cannot be written, end the job and raise ``JournalError``.
        """
        planner, event_id = self._planner(), self.applied.id_of(event, number)
        if event_id is None:
            return [*planner.handle(event)]
        if not self.applied.is_new(event_id):
            return []
        in_time = isinstance(event, Report) and planner.in_time(event)
        commands = planner.handle(event)
        if in_time:
            self._journal.write_report(event, event_id)
        try:
            self._journal.write_event(event, event_id)
        except JournalError as error:
            planner = self._planner()
            self._commands.run(planner.handle(EndOfJob(planner.next_step, error)))
            raise
        self.applied.add(event_id)  # only now: senders rely on the last applied event
        return [*commands]

    def record_source(self, event: AddSource, prepared: PreparedJob, event_id: EventId) -> None:
        """Journal that a source was added to the planner: it is durable on return."""
        self._journal.write_added_source(event, prepared, event_id)
        self.applied.add(event_id)

    def admit(self, command: Any) -> Any | None:
        """Return the command to execute now, or None if it is held or refused."""
        if isinstance(command, Durable):
            return command.command
        if not isinstance(command, PLANNED):
            return command
        if isinstance(command, PlannedStep) and not self._is_written(command):
            return None
        if self._held or self._waits(command):
            self._held.append(command)
            return None
        return command

    def _waits(self, command: Any) -> bool:
        return isinstance(command, PlannedStep) and not self._journal.has(command.plan.step)

    def _is_written(self, stage: PlannedStep) -> bool:
        """Pass a plan to the journal, with all plans of the same turn; return whether it is queued.

        If the journal refuses it, the job ends before this step.
        """
        same_turn = [c for c in self._commands.queue if isinstance(c, PlannedStep)]
        try:
            self._journal.write_plans([stage, *same_turn], self._planner().taken)
        except (JournalError, PlanError) as error:
            self._end_before(stage.plan.step, error)
            return False
        # After a rollback the plan may have been queued before: then only ``failed`` has the error.
        if (failed := self._journal.failed) is not None and self._waits(stage):
            self._end_before(stage.plan.step, failed)
            return False
        return True

    def _release(self) -> None:
        """Execute held commands up to the first plan that is not durable.

        The journal calls this when a plan became durable or failed.
        """
        # Read ``failed`` before the plans: a plan that is not durable then will never be.
        error = self._journal.failed
        waiting = next((c.plan.step for c in self._held if self._waits(c)), None)
        if waiting is not None and error is not None:
            self._end_before(waiting, error)
        free = []
        while self._held and not self._waits(self._held[0]):
            free.append(Durable(self._held.popleft()))
        self._commands.queue.extendleft(reversed(free))
        self._commands.run()

    def _end_before(self, step: int, error: JournalError | PlanError) -> None:
        """End the job before this step; plans of earlier steps are executed once durable."""

        def is_later(command: Any) -> bool:
            return isinstance(command, PlannedStep) and command.plan.step >= step

        self._held = deque(c for c in self._held if not is_later(c))
        self._commands.drop(is_later)
        self._commands.queue.extend(self._planner().handle(EndOfJob(step, error)))

    def rollback(self) -> None:
        """Drop held commands; the planner of the rollback issues them again."""
        self._held.clear()

    def acked(self) -> None:
        """Journal the last acknowledged step, unless a later plan will record it.

        If it cannot be written, the job ends.
        """
        planner = self._planner()
        try:
            self._journal.write_acked(planner.taken, last=planner.finished is not None)
        except JournalError as error:
            self._commands.run(planner.handle(EndOfJob(planner.next_step, error)))

    def waiting_for(self) -> str:
        """Return the journal write that the next step waits for, as text; empty if none."""
        steps = [c.plan.step for c in self._held if isinstance(c, PlannedStep)]
        return f"step {steps[0]} to be written to the journal" if steps else ""


def lose_source(
    event: SourceLost,
    handle: Callable[[SourceLost], None],
    watchers: Iterable[Callable[[SourceLost], None]],
) -> None:
    """Remove a source whose storage failed, as an event of the journal.

    ``handle`` writes the event before a step is planned without the source; then watchers are
    called.
    """
    log.error(
        "source %r removed from step %d on, because its storage failed: %s",
        event.name,
        event.at,
        event.reason,
    )
    with contextlib.suppress(JournalError):  # the job has ended with it
        handle(event)
        for watcher in watchers:
            watcher(event)
