"""Events and reports that users and trainers send to a running job."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from overlord.client.client import StepQueue
from overlord.client.sent_reports import REPORTS_UNUSED, warn_of_lost_values
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import DataStall, JobError, OverlordError, PlanError
from overlord.job.job import Source
from overlord.messages.control import Report, SetMixture, Skip, SourceLost
from overlord.messages.data import checked_report, surely_in_time
from overlord.planning.mixture import Event, with_every_weight
from overlord.planning.schedule import as_float
from overlord.session.generation import Generation
from overlord.session.runtime import Runtime
from overlord.setup.options import Options
from overlord.setup.partition import with_new_loaders
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Events that were sent to a coordinator in another process.
#
# The coordinator may apply an event after the deadline of its answer: then it takes effect.

MAY_APPLY_LATER = (
    "the coordinator may still apply the event: then it takes effect, and states that are saved "
    "later contain it"
)


class UnansweredEvents:
    """The sent events, by number, that the coordinator has not confirmed. Runs on: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # what to call if the event is applied after its deadline; None: the sender waits
        self._open: dict[int, Callable[[], None] | None] = {}

    @property
    def unsettled(self) -> bool:
        """Whether an event that timed out may still be applied.

        Until that is known, no other event is sent: of two changes for one step the last one
        counts, and sources are numbered.
        """
        with self._lock:
            return any(late is not None for late in self._open.values())

    def send(self, number: int, ask: Callable[[], Any], late: Callable[[], None]) -> None:
        """Send an event with ``ask``, which returns once a coordinator has applied it.

        ``late`` is called if the event is applied after ``ask`` has timed out. The ``DataStall`` of
        ``ask`` is raised, unless the event was confirmed meanwhile.
        """
        with self._lock:
            self._open[number] = None
        try:
            ask()
        except DataStall as stall:
            with self._lock:
                if number in self._open:
                    self._open[number] = late
                    stall.add_note(MAY_APPLY_LATER)
                    raise
        except BaseException:
            with self._lock:
                self._open.pop(number, None)
            raise
        with self._lock:
            self._open.pop(number, None)

    def confirmed(self, number: int) -> None:
        """Record the coordinator's confirmation that it has applied an event."""
        with self._lock:
            late = self._open.pop(number, None)
        if late is not None:
            late()

    def settle(self, last: int) -> None:
        """Settle events that timed out; ``last`` is the last event that was applied.

        A later event was not applied, and will not be.
        """
        with self._lock:
            given_up = sorted(n for n, late in self._open.items() if late is not None)
        for number in given_up:
            if number <= last:
                self.confirmed(number)
        with self._lock:
            self._open = {n: late for n, late in self._open.items() if late is None}


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
    uses_reports: bool
    adding: PreparedJob | None
    prepared_jobs: list[PreparedJob]
    broadcast_ranks: frozenset[int]
    lock: threading.RLock
    switching: threading.Lock

    def refuse_closed(self) -> None: ...
    def slowest_step(self) -> int: ...
    def next_event(self) -> int: ...


class UserEvents:
    """Events and reports on their way to the planner; those that saved states may lack are kept.

    All events are applied on the event loop, between two steps.
    """

    def __init__(self, target: EventTarget):
        self._target = target
        self._warned = False  # that reports are not used
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
        self._runtime.event(event, self._target.next_event())
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
            # The event before the source: a state that another thread exports meanwhile must not
            # have one without the other.
            with target.lock:
                self.note(new.event)
                target.generation.prepared = more
                target.prepared_jobs.append(more)

        target.adding = more
        self._runtime.add_source(new, worker, more, added, number=target.next_event())

    # reports

    def report(self, rank: int, queue: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        """Check a report of a client in this process, and send it. Runs on: thread of the trainer.

        It reaches the planner before any later acknowledgement of the client.
        """
        target = self._target
        target.refuse_closed()
        try:
            report = checked_report(rank, step, metrics, next_step)
        except JobError:
            self.count_refused()
            raise
        lost = len(metrics) - len(report.metrics)
        with target.lock:
            known = target.generation.queues.get(rank)
            if known is None:
                raise OverlordError(
                    f"report: the client of rank {rank} is closed; report before close()"
                )
            if known is not queue:
                return  # another rank rewound the session: the step is of an older generation
            warn, self._warned = not (self._warned or target.uses_reports), True
            warned, self.refused_reports = (self.refused_reports, self.refused_reports + (lost > 0))
            in_time = self._is_in_time(report, next_step)
        queue.report(report, in_time)
        if lost and not warned:
            warn_of_lost_values(report, lost)
        if warn:
            log.warning(REPORTS_UNUSED)

    def count_refused(self) -> None:
        with self._target.lock:
            self.refused_reports += 1

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


def whole_numbers(what: str, steps: Iterable[Any]) -> tuple[int, ...]:
    """Return numbers as integers; raise a ``PlanError`` that names the method ``what``."""
    try:
        return tuple(operator.index(step) for step in steps)
    except TypeError:
        raise PlanError(f"{what}: expected whole numbers, got {steps!r}") from None
