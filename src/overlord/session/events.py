"""Events and reports that users and trainers send to a running job."""

from __future__ import annotations

import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from overlord.client.client import StepQueue
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import DataStall, JobError, JournalError, OverlordError, PlanError
from overlord.job.job import Source
from overlord.messages.control import EndOfJob, Report, SetMixture, Skip, SourceLost
from overlord.messages.data import checked_report
from overlord.planning.mixture import Event, EventLog, surely_in_time, with_every_weight
from overlord.planning.schedule import as_float
from overlord.session.generation import Generation
from overlord.session.runtime import Runtime
from overlord.setup.options import Options
from overlord.setup.partition import with_new_loaders
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Outbox of events for a coordinator in another process.
#
# The coordinator may apply an event after the deadline of its answer: then it takes effect.

KEPT = 64  # applied events that are remembered, to recognize equal events that were sent twice
MAY_APPLY_LATER = (
    "the coordinator may still apply the event: then it takes effect, and states that are saved "
    "later contain it"
)


@dataclass(slots=True, eq=False)
class _Pending:
    """An event whose answer has not arrived."""

    event: Any
    late: Callable[[], None]  # called if the event is applied after ``given_up``
    taken: bool = False  # the event was applied
    given_up: bool = False  # the answer did not arrive in time


class EventOutbox:
    """The sent events that the coordinator has not applied yet. Runs on: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Pending] = []
        self._taken: deque[Any] = deque(maxlen=KEPT)
        self._unconfirmed: deque[Any] = deque(maxlen=KEPT)  # answered and not yet confirmed

    @property
    def unsettled(self) -> bool:
        """Whether an event that timed out may still be applied.

        Until that is known, no other event is sent: of two changes for one step the last one
        counts, and sources are numbered.
        """
        return any(pending.given_up for pending in list(self._open))

    def send(self, event: Any, ask: Callable[[], Any], late: Callable[[], None]) -> None:
        """Send an event with ``ask``, which returns once a coordinator has applied it.

        ``late`` is called if the event is applied after ``ask`` has timed out. The ``DataStall`` of
        ``ask`` is raised, unless the event was confirmed meanwhile.
        """
        pending = _Pending(event, late)
        with self._lock:
            self._open.append(pending)
        try:
            ask()
        except DataStall as stall:
            with self._lock:
                if not pending.taken:
                    pending.given_up = True
                    stall.add_note(MAY_APPLY_LATER)
                    raise
        except BaseException:
            with self._lock:
                self._open.remove(pending)
            raise
        with self._lock:
            self._open.remove(pending)
            if not pending.taken:
                self._taken.append(event)
                self._unconfirmed.append(event)

    def confirmed(self, event: Any) -> None:
        """Record the coordinator's confirmation that it has applied an event."""
        with self._lock:
            if event in self._unconfirmed:
                self._unconfirmed.remove(event)
                return
            late = self._mark_applied(
                next((s for s in self._open if not s.taken and s.event == event), None)
            )
        late()

    def found(self, events: Sequence[Any]) -> None:
        """Mark the open events that are among ``events`` as applied.

        ``events`` are those of the coordinator's journal: its predecessor may have died before it
        confirmed them.
        """
        for pending in list(self._open):
            with self._lock:
                new = (
                    not pending.taken
                    and pending in self._open
                    and events.count(pending.event) > self._taken.count(pending.event)
                )
                late = self._mark_applied(pending if new else None)
            late()

    def settle(self, events: Sequence[Any]) -> None:
        """Settle events that timed out; ``events`` are all events that were applied.

        An event that is not among these was not applied, and will not be.
        """
        self.found(events)
        with self._lock:
            self._open = [pending for pending in self._open if not pending.given_up]

    def _mark_applied(self, pending: _Pending | None) -> Callable[[], None]:
        """Mark an event as applied, under the lock; return the call to make outside it."""
        if pending is None:
            return lambda: None
        pending.taken = True
        self._taken.append(pending.event)
        if not pending.given_up:
            return lambda: None
        self._open.remove(pending)
        return pending.late


# ----------------------------------------------------------------------------
# Events that users send to a running job: a mixture, skipped steps, an added source, reports.


class EventTarget(Protocol):
    """The running job that ``UserEvents`` changes."""

    kind: str
    options: Options
    loop: EventLoop
    generation: Generation
    closed: bool
    learns: bool
    adding: PreparedJob | None
    prepared_jobs: list[PreparedJob]
    broadcast_ranks: frozenset[int]
    lock: threading.RLock
    switching: threading.Lock

    def refuse_closed(self) -> None: ...
    def slowest_step(self) -> int: ...


class UserEvents:
    """Events and reports on their way to the planner; those that saved states may lack are kept.

    All events are applied on the event loop, between two steps.
    """

    def __init__(self, target: EventTarget, *, reports_used: bool = True):
        self._target = target
        self._warned = reports_used  # False: the first report causes a warning
        self.refused_reports = 0  # reports that raised, or that were used in part

    @property
    def _runtime(self) -> Runtime:
        return self._target.generation.runtime

    def observe(self, runtime: Runtime) -> None:
        """Record the events that a new runtime sends by itself."""
        runtime.on_lost.append(self._source_lost)
        runtime.on_late.append(self.note)

    def set_mixture(self, weights: Mapping[str, float], at: int | None) -> int:
        if not isinstance(weights, Mapping):
            raise PlanError(
                f"set_mixture: expected a mapping of source name to weight, got {weights!r}"
            )
        [step] = whole_numbers("set_mixture", [] if at is None else [at]) or [None]
        self._refuse_evaluation("set_mixture")
        given = {name: as_float(weight) for name, weight in weights.items()}

        def send(at: int) -> None:
            names = self._target.generation.prepared.given.names
            self._send(with_every_weight(SetMixture(at, given), names))

        self._target.refuse_closed()
        return int(self._target.loop.call(lambda: self._at(step, send), "the planner"))

    def _refuse_evaluation(self, what: str) -> None:
        """Raise ``JobError`` for an evaluation, whose sources and their order are fixed."""
        if self._target.generation.prepared.given.evaluation:
            problem = "expected a job that trains, got an evaluation; evaluate another job"
            raise JobError([problem], what)

    def _at(self, step: int | None, send: Callable[[int], None]) -> int:
        """Send an event for ``step``, or for the first step that is not planned yet; return it.

        A coordinator in another process may plan more steps before it receives the event. Then a
        later step is tried, unless ``step`` is given. Runs on: event loop.
        """
        while True:
            self._runtime.settle()
            at = self._runtime.planner.open_step if step is None else step
            try:
                send(at)
                return at
            except PlanError:
                if step is not None or self._runtime.planner.open_step <= at:
                    raise

    def skip(self, steps: Iterable[int]) -> None:
        self._target.refuse_closed()
        event = Skip(whole_numbers("skip", steps))
        if event.steps:
            self._target.loop.call(lambda: self._send(event), "the planner")

    def _send(self, event: SetMixture | Skip) -> None:
        """Apply an event, and keep it for states of clients that have not passed its step.

        Runs on: event loop.
        """
        self._runtime.settle()
        self._runtime.event(event)
        self.note(event)

    def note(self, event: Event) -> None:
        """Keep an event for the states of clients. Runs on: any thread."""
        with self._target.lock:
            self._target.generation.events.add(event, self._target.slowest_step)

    def _source_lost(self, event: SourceLost) -> None:
        """Record that a source was removed because its storage failed. Idempotent.

        A restarted planner sends the event again.
        """
        with self._target.lock:
            lost = self._target.generation.lost_sources
            if lost.get(event.name) == event:
                return
            self.note(event)
            lost[event.name] = event

    # added sources

    def add_source(self, source: Source, at: int | None, loaders: int | None) -> int:
        target = self._target
        [step] = whole_numbers("add_source", [] if at is None else [at]) or [None]
        target.refuse_closed()
        self._refuse_evaluation("add_source")
        with target.switching:
            # an addition that timed out may have succeeded since
            target.loop.call(lambda: self._runtime.settle(), "the planner")
            if step is not None:  # checked before files are indexed, which takes long
                target.loop.call(lambda: self._runtime.planner.refuse_planned(step), "the planner")
            runtime, now = self._runtime, target.generation.prepared
            before = now.workers
            more = now.with_source(source, 1 if loaders is None else loaders)
            more = with_new_loaders(more, target.kind) if loaders is None else more
            worker = None
            try:
                worker = runtime.prepare_source(more)
                target.refuse_closed()
                first = int(
                    target.loop.call(
                        lambda: self._at(step, lambda at: self._add_at(more, worker, at)),
                        "the planner",
                    )
                )
                target.refuse_closed()
                return first
            except DataStall:  # the event loop is busy, and may apply the event later
                raise
            except Exception:
                runtime.drop_prepared(worker)
                more.close_workers(0 if target.closed else before)
                raise

    def _add_at(self, more: PreparedJob, worker: Any, at: int) -> None:
        """Add the last source of ``more`` from step ``at`` on. Runs on: event loop."""
        target, new = self._target, more.new_source(at)

        def added() -> None:
            self._runtime.journal.write_added_source(new.event, more)
            # The event before the source: a state that another thread exports meanwhile must not
            # have one without the other.
            with target.lock:
                self.note(new.event)
                target.generation.prepared = more
                target.prepared_jobs.append(more)

        target.adding = more
        try:
            self._runtime.add_source(new, worker, more.budget_bytes, added)
        # the planner has the source and the journal lacks it: no step may be planned with it
        except JournalError as error:
            self._runtime.event(EndOfJob(self._runtime.planner.next_step, error))
            raise

    # reports

    def report(self, rank: int, queue: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        """Check a report and post it to the planner. Runs on: thread of the trainer."""
        target = self._target
        target.refuse_closed()
        try:
            report = checked_report(rank, step, metrics, next_step)
        except JobError:
            self.count_refused()
            raise
        with target.lock:
            known = target.generation.queues.get(rank)
            if known is None and rank not in target.broadcast_ranks:
                raise OverlordError(
                    f"report: the client of rank {rank} is closed; report before close()"
                )
            if known is not None and known is not queue:
                return  # another rank rewound the session: the step is of an older generation
            warn, self._warned = not self._warned, True
            self.send_report(report, self._is_in_time(report, next_step))
            lost = len(metrics) - len(report.metrics)
            warned, self.refused_reports = (self.refused_reports, self.refused_reports + (lost > 0))
        if lost and not warned:
            log.warning(
                "rank %d, step %d: %d reported values ignored: expected finite numbers",
                rank,
                report.step,
                lost,
            )
        if warn:
            log.warning(
                "reports are not used: the mixture has neither a state nor takes_feedback = True"
            )

    def count_refused(self) -> None:
        with self._target.lock:
            self.refused_reports += 1

    def send_report(self, report: Report, in_time: bool) -> None:
        """Post a report to the planner. The caller holds the lock.

        A report that is certainly ``in_time`` is in saved states from now on.
        """
        runtime, events = self._runtime, self._target.generation.events
        if in_time:
            events.expect(report)
        self._target.loop.post(lambda: self._apply_report(runtime, events, report))

    def _is_in_time(self, report: Report, next_step: int) -> bool:
        """Return whether the plan that uses a report cannot exist yet. The caller holds the lock.

        This is unknown for ranks that receive a broadcast: another rank takes steps ahead of them.
        """
        target = self._target
        lag = target.generation.prepared.given.feedback_lag
        return (
            target.learns
            and report.rank not in target.broadcast_ranks
            and surely_in_time(report, next_step, lag, target.options.prefetch)
        )

    def _apply_report(self, runtime: Runtime, events: EventLog, report: Report) -> None:
        """Send a report to the planner. A late report is dropped, and removed from states.

        Runs on: event loop.
        """
        if used := runtime.report(report):
            events.report(report, self._target.slowest_step())
        if used is not None:
            with self._target.lock:
                events.received(report)


def whole_numbers(what: str, steps: Iterable[Any]) -> tuple[int, ...]:
    """Return numbers as integers; raise a ``PlanError`` that names the method ``what``."""
    try:
        return tuple(operator.index(step) for step in steps)
    except TypeError:
        raise PlanError(f"{what}: expected whole numbers, got {steps!r}") from None
