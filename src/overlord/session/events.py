"""Events that users send to a running job: a mixture, skipped steps, an added source, reports."""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from overlord.client.step_queue import StepQueue
from overlord.concurrency.event_loop import EventLoop
from overlord.errors import DataStall, JobError, JournalError, OverlordError, PlanError
from overlord.job.job import Source
from overlord.messages.control import EndOfJob, Report, SetMixture, Skip, SourceLost, StreamState
from overlord.messages.reports import checked
from overlord.planning.events import Event, EventLog, with_every_weight
from overlord.planning.feedback import promised
from overlord.planning.lost_tokens import TokenLosses
from overlord.planning.schedule import as_float
from overlord.session.generation import Generation
from overlord.session.runtime import Runtime
from overlord.setup.options import Options
from overlord.setup.partition import joining
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.profile_store import Refresher

log = logging.getLogger("overlord")


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
    refresher: Refresher | None

    def refuse_closed(self) -> None: ...
    def slowest_step(self) -> int: ...


class UserEvents:
    """Sends events and reports to the planner, and keeps them for states that lack them.

    All events are applied on the event loop, between two steps.
    """

    def __init__(self, target: EventTarget, *, reports_used: bool = True):
        self._target = target
        # else the first report causes a warning
        self._warned = reports_used
        self._losses = TokenLosses()
        self.refused_reports = 0  # reports that raised, or that were used in part

    @property
    def _runtime(self) -> Runtime:
        return self._target.generation.runtime

    def observe(self, runtime: Runtime) -> None:
        """Record the events that a new runtime sends by itself."""
        runtime.on_lost.append(self._source_lost)
        runtime.on_late.append(self.note)
        runtime.on_stage.append(lambda stage: self._warn_of_losses(stage.after))

    def set_mixture(self, weights: Mapping[str, float], at: int | None) -> int:
        if not isinstance(weights, Mapping):
            raise PlanError(
                f"set_mixture: expected a mapping of source name to weight, got {weights!r}"
            )
        [step] = whole_numbers("set_mixture", [] if at is None else [at]) or [None]
        given = {name: as_float(weight) for name, weight in weights.items()}

        def send(at: int) -> None:
            names = self._target.generation.prepared.given.names
            self._send(with_every_weight(SetMixture(at, given), names))

        self._target.refuse_closed()
        return int(self._target.loop.ask(lambda: self._at(step, send), "the planner"))

    def _at(self, step: int | None, send: Callable[[int], None]) -> int:
        """Send an event for ``step``, or for the first step that is not planned yet.

        A coordinator in another process may plan more steps before it receives the event. Runs on:
        event loop.
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
            self._target.loop.ask(lambda: self._send(event), "the planner")

    def _send(self, event: SetMixture | Skip) -> None:
        """Apply an event. States of clients hold it until they have passed its step.

        Runs on: event loop.
        """
        self._runtime.settle()
        self._runtime.event(event)
        self.note(event)

    def note(self, event: Event) -> None:
        """Add an event to the states of clients. Runs on: any thread."""
        with self._target.lock:
            self._target.generation.events.add(event, self._target.slowest_step())

    def _warn_of_losses(self, after: StreamState) -> None:
        """Warn once of each source that loses many tokens to ``on_long``.

        A coordinator in another process sends the steps that are needed for this.
        """
        job = (self._target.adding or self._target.generation.prepared).job
        for words in self._losses.warnings(after.counts, job.names, job.on_long, job.batch.context):
            log.warning("%s", words)

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
        with target.switching:
            # an addition that timed out may have succeeded since
            target.loop.ask(lambda: self._runtime.settle(), "the planner")
            if step is not None:  # checked before files are indexed, which takes long
                target.loop.ask(lambda: self._runtime.planner.refuse_planned(step), "the planner")
            runtime, now = self._runtime, target.generation.prepared
            before = now.workers
            more = now.with_source(source, 1 if loaders is None else loaders)
            more = joining(more, target.kind) if loaders is None else more
            worker = None
            try:
                worker = runtime.prepare_source(more)
                target.refuse_closed()
                first = int(
                    target.loop.ask(
                        lambda: self._at(step, lambda at: self._add_at(more, worker, at)),
                        "the planner",
                    )
                )
                target.refuse_closed()
                if target.refresher is not None:
                    target.refresher.joined(more)
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
        # the planner has the source and the journal has not: no step may be planned with it
        except JournalError as error:
            self._runtime.event(EndOfJob(self._runtime.planner.next_step, error))
            raise

    # reports

    def report(self, rank: int, queue: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        """Check a report and post it to the planner. Runs on: thread of the trainer."""
        target = self._target
        target.refuse_closed()
        try:
            report = checked(rank, step, metrics, next_step)
        except JobError:
            self.count_refused()
            raise
        with target.lock:
            known = target.generation.queues.get(rank)
            if known is None and rank not in target.broadcast_ranks:
                raise OverlordError(f"the client of rank {rank} is closed")
            if known is not None and known is not queue:
                return  # another rank rewound the session: the step is of an older generation
            warn, self._warned = not self._warned, True
            self.send_report(report, self._is_in_time(report, next_step))
            lost = len(metrics) - len(report.metrics)
            warned, self.refused_reports = (self.refused_reports, self.refused_reports + (lost > 0))
        if lost and not warned:
            log.warning(
                "rank %d, step %d: %d reported values are infinite or no numbers and are left out",
                rank,
                report.step,
                lost,
            )
        if warn:
            log.warning(
                "reports reach no schedule: the mixture has no state and no takes_feedback = True"
            )

    def count_refused(self) -> None:
        with self._target.lock:
            self.refused_reports += 1

    def send_report(self, report: Report, in_time: bool) -> None:
        """Post a report to the planner. The caller holds the lock.

        States hold a report that is certainly ``in_time`` from now on, wherever the planner runs.
        """
        runtime, events = self._runtime, self._target.generation.events
        if in_time:
            events.expect(report)
        self._target.loop.post(lambda: self._apply_report(runtime, events, report))

    def _is_in_time(self, report: Report, next_step: int) -> bool:
        """Whether the plan that uses the report cannot exist yet. The caller holds the lock.

        It is unknown for ranks that receive a broadcast: another rank takes steps ahead of them.
        """
        target = self._target
        lag = target.generation.prepared.given.feedback_lag
        return (
            target.learns
            and report.rank not in target.broadcast_ranks
            and promised(report, next_step, lag, target.options.prefetch)
        )

    def _apply_report(self, runtime: Runtime, events: EventLog, report: Report) -> None:
        """Send a report to the planner. A late report is dropped, and must be in no state.

        Runs on: event loop.
        """
        if used := runtime.report(report):
            events.report(report, self._target.slowest_step())
        if used is not None:
            with self._target.lock:
                events.received(report)


def whole_numbers(what: str, steps: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(step) for step in steps)
    except TypeError:
        raise PlanError(f"{what}: expected steps as whole numbers, got {steps!r}") from None
