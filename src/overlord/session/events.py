"""What people and trainers change in a running job: events of the log, reports, and which process
does what.
"""

from __future__ import annotations

import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from overlord.checks import did_you_mean
from overlord.errors import DataStall, JobError, JournalError, OverlordError, PlanError
from overlord.job.job import Job, Source
from overlord.messages.control import EndOfJob, Report, SetMixture, Skip, SourceLost
from overlord.messages.reports import checked
from overlord.planning.events import Event, EventLog, said_of_all
from overlord.planning.feedback import promised
from overlord.planning.lost_tokens import TokenLosses
from overlord.planning.schedule import plain
from overlord.setup.partition import joining

if TYPE_CHECKING:
    from overlord.client.client import Client, StepQueue
    from overlord.concurrency.event_loop import EventLoop
    from overlord.messages.control import StreamState
    from overlord.serving.session_server import SessionServer
    from overlord.session.runtime import Runtime
    from overlord.setup.options import Options
    from overlord.setup.prepared_job import PreparedJob
    from overlord.setup.profile_store import Refresher

log = logging.getLogger("overlord")


class Changes:
    """The part of ``Session`` that changes what it runs. All of it happens in the pump, between two
    steps.
    """

    job: Job
    _blueprint: PreparedJob
    _blueprints: list[PreparedJob]
    _clients: dict[int, Client]
    _closed: bool
    _host: Runtime
    _inboxes: dict[int, tuple[int, StepQueue]]
    _joining: (
        PreparedJob | None
    )  # with the source that is to join: a planner elsewhere may know of it first
    _lock: threading.RLock
    _learns: bool
    _log: EventLog
    _losses: TokenLosses
    _lost: dict[str, SourceLost]
    _moving: threading.Lock
    _options: Options
    _pump: EventLoop
    _refresher: Refresher | None
    _refused: int
    _runtime: str
    _serving: SessionServer | None
    _start_state: StreamState
    _warned: bool

    def _refuse_closed(self) -> None:
        if self._closed:
            raise OverlordError("the session is closed")

    def set_mixture(self, weights: Mapping[str, float], at: int | None = None) -> int:
        """New weights from step ``at`` on (default: the first step not yet planned); returns that
        step.
        """
        if not isinstance(weights, Mapping):
            raise PlanError(
                f"set_mixture: expected a mapping of source name to weight, got {weights!r}"
            )
        [step] = _steps("set_mixture", [] if at is None else [at]) or [None]
        given = {name: plain(weight) for name, weight in weights.items()}

        def act() -> int:
            return self._at(
                step, lambda at: self._add(said_of_all(SetMixture(at, given), self.job.names))
            )

        self._refuse_closed()
        return int(self._pump.ask(act, "the planner"))

    def _at(self, step: int | None, act: Callable[[int], None]) -> int:
        """In the pump: at that step, or at the first that is not planned yet: a planner elsewhere
        may plan on before it hears of it.
        """
        while True:
            self._host.settle()
            at = self._host.planner.open_step if step is None else step
            try:
                act(at)
                return at
            except PlanError:
                if step is not None or self._host.planner.open_step <= at:
                    raise

    def skip(self, steps: Iterable[int]) -> None:
        """These steps are drawn and listed, and not delivered; step numbers do not shift."""
        self._refuse_closed()
        event = Skip(_steps("skip", steps))
        if event.steps:
            self._pump.ask(lambda: self._add(event), "the planner")

    def _add(self, event: SetMixture | Skip) -> None:
        """In the pump. Clients stand at steps planned before this: their states get the event until
        they have passed it.
        """
        self._host.settle()
        self._host.event(event)
        self._note(event)

    def _listen_to(self, host: Runtime) -> None:
        host.on_lost.append(self._source_lost)
        host.on_late.append(self._note)
        host.on_stage.append(lambda stage: self._warn_of_losses(stage.after))

    def _warn_of_losses(self, after: StreamState) -> None:
        """Warn once of each source that loses many tokens to ``on_long``. A planner in another
        process sends the steps that need it.
        """
        job = (self._joining or self._blueprint).job
        for words in self._losses.warnings(after.counts, job.names, job.on_long, job.batch.context):
            log.warning("%s", words)

    def _note(self, event: Event) -> None:
        """From the pump, and of a planner elsewhere also from where its news are heard."""
        with self._lock:
            self._log.add(event, self._slowest())

    def _source_lost(self, event: SourceLost) -> None:
        """A source has left, since its storage was given up. A planner that comes later says so
        again.
        """
        with self._lock:
            if self._lost.get(event.name) == event:
                return
            self._note(event)
            self._lost[event.name] = event

    def _slowest(self) -> int:
        """The lowest step at which a client's state stands."""
        return min(
            (c._state.step for c in list(self._clients.values())), default=self._start_state.step
        )

    def add_source(
        self, source: Source, at: int | None = None, *, loaders: int | None = None
    ) -> int:
        """One more source, drawn from step ``at`` on (default: the first step not yet planned);
        returns that step.

        It weighs its own ``weight`` beside what the mixture gives the others, unless the mixture
        names it. Nothing else in the stream changes. ``loaders``: as many as what it is seen to
        cost takes, if you say nothing. It is indexed here first; what is wrong with it is raised as
        at launch, and then nothing has happened. To resume from a state saved after this, list the
        source last in ``Job.sources``: a state holds no code.
        """
        [step] = _steps("add_source", [] if at is None else [at]) or [None]
        self._refuse_closed()
        with self._moving:
            self._pump.ask(
                lambda: self._host.settle(), "the planner"
            )  # one that was given up may have joined since
            if step is not None:  # said before a long look at the files, too
                self._pump.ask(lambda: self._host.planner.refuse_planned(step), "the planner")
            before, host = self._blueprint.workers, self._host
            more = self._blueprint.with_source(source, 1 if loaders is None else loaders)
            more = joining(more, self._runtime) if loaders is None else more
            prepared = None
            try:
                prepared = host.prepare_source(more)
                self._refuse_closed()
                first = int(self._pump.ask(lambda: self._join(more, prepared, step), "the planner"))
                self._refuse_closed()
                if self._refresher is not None:
                    self._refresher.joined(more)
                return first
            except DataStall:  # the pump is busy, and may come to it yet
                raise
            except Exception:
                host.drop_prepared(prepared)
                more.close_workers(0 if self._closed else before)
                raise

    def _join(self, more: PreparedJob, prepared: Any, at: int | None) -> int:
        """In the pump: the source takes part from here on."""
        return self._at(at, lambda step: self._join_at(more, prepared, step))

    def _join_at(self, more: PreparedJob, prepared: Any, at: int) -> None:
        new = more.new_source(at)

        def joined() -> None:
            self._host.journal.joined(new.event, more)
            # The event before the source: a state written meanwhile, in a trainer's thread, must
            # not have one without the other.
            with self._lock:
                self._note(new.event)
                self._blueprint, self.job = more, more.given
                self._blueprints.append(more)

        self._joining = more
        try:
            self._host.add_source(new, prepared, more.budget_bytes, joined)
        # the planner knows of it, and the journal does not: no step may be planned with it
        except JournalError as error:
            self._host.event(EndOfJob(self._host.planner.next_step, error))
            raise

    # processes

    def move(self, source: str, *hosts: str) -> None:
        """Read a source in other loader hosts from here on (``metrics()["actors"]`` lists them); of
        several loaders one each, in turn. The stream stays what it is: the source is read again
        from where the draw stands.
        """
        self._refuse_closed()
        if source not in self.job.names:
            raise JobError(
                [f"unknown source {source!r}{did_you_mean(source, self.job.names)}"], "move"
            )
        if not hosts:
            raise JobError(
                ["expected the loader host to move to, as in session.move('web', 'loader-host/1')"],
                "move",
            )
        self._pump.ask(lambda: self._host.move(self.job.names.index(source), hosts), "the planner")

    def scale(self, source: str, hosts: int) -> bool:
        """Read a source in so many loader hosts from here on: new ones are started in the
        background, and take over when they hold what those before them hold. False: it is read so
        already, or another change is under way. The stream stays what it is.
        """
        self._refuse_closed()
        if source not in self.job.names:
            raise JobError(
                [f"unknown source {source!r}{did_you_mean(source, self.job.names)}"], "scale"
            )
        [n] = _steps("scale", [hosts])
        return bool(
            self._pump.ask(
                lambda: self._host.spread(self.job.names.index(source), n), "the planner"
            )
        )

    def kill(self, name: str) -> None:
        """End a process of the job at once, as a crash would. For drills; ``metrics()["actors"]``
        lists their names.
        """
        self._refuse_closed()
        self._pump.ask(lambda: self._host.kill(name), "the pump")

    # feedback

    def _report(self, rank: int, inbox: StepQueue, step: Any, metrics: Any, next_step: int) -> None:
        """In the trainer's thread: what is wrong is told here, what is right goes to the
        planner.
        """
        self._refuse_closed()
        try:
            report = checked(rank, step, metrics, next_step)
        except JobError:
            with self._lock:
                self._refused += 1
            raise
        with self._lock:
            if rank not in self._inboxes and (
                self._serving is None or rank not in self._serving.excused
            ):
                raise OverlordError(f"the client of rank {rank} is closed")
            if rank in self._inboxes and self._inboxes[rank][1] is not inbox:
                return  # another rank moved the session: the step belongs to what is over
            warn, self._warned = not self._warned, True
            self._send(report, self._is_promised(report, next_step))
            lost = len(metrics) - len(report.metrics)
            told, self._refused = self._refused, self._refused + (lost > 0)
        if lost and not told:
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

    def _send(self, report: Report, promised: bool) -> None:
        """Under the lock: to the planner of now. One that is in time for sure is in states from
        here on, wherever the planner is.
        """
        host, said = self._host, self._log
        if promised:
            said.expect(report)
        self._pump.post(lambda: self._take_report(host, said, report))

    def _is_promised(self, report: Report, next_step: int) -> bool:
        """Under the lock. Of ranks that are served by a broadcast it is not known: another takes
        steps ahead of them.
        """
        excused = self._serving is not None and report.rank in self._serving.excused
        return (
            self._learns
            and not excused
            and promised(report, next_step, self.job.feedback_lag, self._options.prefetch)
        )

    def _take_report(self, host: Runtime, said: EventLog, report: Report) -> None:
        """In the pump. What comes too late is dropped, so it must not be in a state either."""
        if used := host.report(report):
            said.report(report, self._slowest())
        if used is not None:
            with self._lock:
                said.heard(report)


def _steps(what: str, steps: Iterable[Any]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(step) for step in steps)
    except TypeError:
        raise PlanError(f"{what}: steps are whole numbers, got {steps!r}") from None
