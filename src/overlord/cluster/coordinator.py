"""The coordinator of a job in several processes: it plans, routes steps to workers, and recovers.

The planner runs here, on one event loop. Loader workers and constructor workers are actors. Each
receives one list of messages per turn and answers with its events. The stream does not depend on
the number of workers or on their placement.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from overlord.cluster.autoscale import Autoscaler, scaler_of
from overlord.cluster.coordinator_config import Incarnation
from overlord.cluster.current_job import (
    CurrentJob,
    JobWorkers,
    LoaderStarts,
    rollback_messages,
    router_of,
    standbys_of,
)
from overlord.cluster.job_sources import JobSources
from overlord.cluster.placement import AttachedRanks, Placement
from overlord.cluster.plan_router import PlanHistory
from overlord.cluster.rebalance import FIRST_SCALED, NUMBERS_PER_COORDINATOR, Rebalancer
from overlord.cluster.recovery import RecoveryActions, RecoveryManager
from overlord.cluster.status import StatusReporter
from overlord.cluster.worker_factory import WorkerStarter, constructors_of, read_ahead_of
from overlord.cluster.worker_pool import ProcessContext, WorkerCallbacks, WorkerHandle, WorkerPool
from overlord.concurrency.event_loop import CommandLoop, EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, PlanError
from overlord.journal.write_ahead import NullJournal, WriteAheadGate, lose_source
from overlord.messages.batches import Announcements
from overlord.messages.control import (
    Attach,
    ConnectionLost,
    Consumed,
    Detach,
    DropHeldSamples,
    EncodedState,
    EndOfJob,
    PlannedStep,
    Refill,
    RestartLoader,
    Rollback,
    SentReport,
    SetMixture,
    Skip,
    SourceLost,
    StepsAcked,
    StreamState,
)
from overlord.messages.data import Announce, DecodeFailures
from overlord.planning.mixture import with_every_weight
from overlord.planning.planner import Planner
from overlord.planning.schedule.base import learns
from overlord.planning.schedule.by_stage import job_schedule
from overlord.planning.spec import NewSource, RecentPlans
from overlord.rpc.actors import ActorSystem
from overlord.setup.partition import scales
from overlord.setup.prepared_job import PreparedJob, copied_schedule
from overlord.transport.codec import encode_state

log = logging.getLogger("overlord")

# first generations of successive coordinators differ by this: each may roll back a million times
GENERATIONS_PER_COORDINATOR = 2**40


class Coordinator:
    """The coordinator of a job: it plans steps, routes them to workers, and recovers lost workers.

    ``starter`` starts the workers. ``incarnation`` distinguishes this coordinator from those before
    it. Runs on: event loop.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        state: StreamState | None,
        control: ActorSystem,
        event_loop: EventLoop,
        platform: Platform,
        starter: WorkerStarter,
        incarnation: Incarnation,
    ):
        loader_placement = starter.loader_placement
        read_ahead = read_ahead_of(loader_placement, scales(prepared))
        prepared = prepared.with_loaders(loader_placement.loaders, read_ahead)
        options = prepared.options
        context = ProcessContext(control, event_loop, platform)
        self._context = context
        self.planner = prepared.planner(state)
        # of the job as launched; every planner has a copy
        self._mixture = job_schedule(prepared.job, prepared.added)
        self._learns = learns(self._mixture)
        self.plans = RecentPlans()
        # called with every planned step and the encoded state after it
        self.on_stage: list[Callable[[PlannedStep, EncodedState], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None
        groups = list(prepared.job.place.buckets("DP"))

        self.placement = Placement(
            loader_placement.loaders, loader_placement.host_of, constructors_of(prepared), groups
        )
        self._ranks = AttachedRanks(self.placement, len(groups))
        self.router = router_of(prepared, self.placement)
        callbacks = WorkerCallbacks(
            events=self._worker_events,
            lost=lambda worker, reason: self.recovery.lost(worker, reason),
            started=lambda worker: self.recovery.started(worker),
            start_failed=lambda *failed: self.recovery.start_failed(*failed),
        )
        self.pool = WorkerPool(context, starter, self.placement, callbacks)
        self.commands = CommandLoop(
            self._execute, check=self.check if options.check else None, after=self.pool.flush
        )
        self.gate = WriteAheadGate(self.commands, lambda: self.planner)
        self.history = PlanHistory(
            self.planner.state(), prepared.job.feedback_lag, incarnation.planned
        )
        self.standby = standbys_of(prepared, loader_placement, self.placement)
        actions = RecoveryActions(
            roll_back=self.rollback,
            use_as_standby=lambda name: self.rebalancer.use_as_standby(name),
            end_job=self._end_with,
            end_at=lambda end: self.run([end]),
            duty_of=lambda name: self.status.duty_of(name, self.history.acked),
            acked=lambda: self.history.acked,
        )
        generation = self._first_generation = incarnation.number * GENERATIONS_PER_COORDINATOR
        self.recovery = RecoveryManager(
            self.pool, self.standby, context, options, generation, actions
        )
        self.sources = JobSources(prepared, self.pool, self.placement, self.recovery)
        self.starts = LoaderStarts(lambda: self.prepared, self.placement)
        current = CurrentJob(lambda: self.prepared, lambda: self.planner)
        workers = self._workers = JobWorkers(self.pool, self.placement, self.standby, self.recovery)
        self.rebalancer = Rebalancer(
            workers,
            current,
            context,
            history=self.history,
            starts=self.starts,
            commands=self.commands,
            first=FIRST_SCALED + incarnation.number * NUMBERS_PER_COORDINATOR,
        )
        scaler = scaler_of(prepared, loader_placement, self.planner.spec.read_ahead)
        self.autoscaler: Autoscaler | None = None
        if scaler is not None:
            self.autoscaler = Autoscaler(
                scaler,
                current,
                context,
                workers=workers,
                rebalancer=self.rebalancer,
                history=self.history,
                attached=self._ranks,
                set_read_ahead=lambda command: self.run(self.planner.handle(command)),
            )
        self.status = StatusReporter(
            self.pool,
            self.placement,
            self.recovery,
            context.platform,
            lambda: self.prepared.job.names,
        )

    # starting

    def start(self) -> Coordinator:
        """Start all workers, wait for them, and supervise them; return this coordinator."""
        with self.closed_on_error():
            sources = range(len(self.prepared.job.sources))
            self.pool.start_all(sources, self.starts.at(self.planner.state()))
            self.begin()
        return self

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close this coordinator if the body of the ``with`` statement raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Supervise the started workers, attach standbys, and start the autoscaler."""
        for worker in self.pool.workers():
            self.recovery.joined(worker)
        self.standby.fill(self.pool.living(), self.pool.nodes())
        for h, follow in self.standby.follow(self.starts.at(self.planner.state())):
            self.pool.send(h, follow)
        self.commands.run()
        self.recovery.start()
        if self.autoscaler is not None:
            self.autoscaler.start()

    # journal

    @property
    def journal(self) -> NullJournal:
        return self.gate.journal

    @journal.setter
    def journal(self, journal: NullJournal) -> None:
        self.gate.journal = journal

    def run(self, commands: Sequence[Any] = ()) -> None:
        """Execute commands and send the messages that result."""
        self.commands.run(commands)

    # events of the session

    def event(self, event: Any, number: int | None = None) -> None:
        """Apply an event and write it to the journal: it is durable on return.

        ``number`` identifies an event that may be sent again; the second time it is ignored.
        """
        if self._is_applied(event, number):
            return
        ended, commands = self.planner.ended, self.gate.record(event, number)
        if isinstance(event, (SetMixture, Skip, SourceLost)) and ended is None:
            self._keep_event(event)
        self.run(commands)

    def _is_applied(self, event: Any, number: int | None) -> bool:
        event_id = self.gate.applied.id_of(event, number)
        return event_id is not None and not self.gate.applied.is_new(event_id)

    def report(self, sent: Sequence[SentReport]) -> None:
        """Apply the reports that are new; they are written with the next plan.

        A late report is counted, and no plan uses it.
        """
        for one in sent:
            if self._is_applied(one.report, one.number):
                continue
            if self.planner.in_time(one.report):
                self.history.reported(one.report)
            self.commands.queue.extend(self.gate.record(one.report, one.number))

    def _keep_event(self, event: Any) -> None:
        """Keep an event for the next rollback, before a plan that uses it takes effect."""
        if isinstance(event, SetMixture):
            event = with_every_weight(event, self.planner.spec.names)
        self.history.applied(event)

    @property
    def attached(self) -> frozenset[int]:
        return self._ranks.ranks

    def _constructor_of(self, rank: int) -> WorkerHandle:
        return self.pool.constructors[self.placement.constructor(rank)]

    def attach(self, ranks: Collection[int]) -> None:
        """Attach the clients of these ranks; constructor workers send them their steps."""
        for rank in ranks:
            self._ranks.add(rank)
            self._constructor_of(rank).out.append(Attach(rank))
        self.run([command for rank in ranks for command in self.planner.handle(Attach(rank))])

    def take_over_rank(self, rank: int) -> None:
        """Count a rank as attached; its steps are planned after the rollback that follows."""
        self._ranks.add(rank)
        self.planner.handle(Attach(rank))

    def detach(self, rank: int) -> None:
        if rank in self._ranks:
            self._ranks.remove(rank)
            self._constructor_of(rank).out.append(Detach(rank))
            self.run(self.planner.handle(Detach(rank)))

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        """Record, with failover, that clients of the session took the steps up to ``step``.

        Constructor workers report it too, but an acknowledgement may be lost with its worker. This
        call arrives before the client requests its next step. A mixture that learns does without:
        a step counts once the reports that travel with its acknowledgement have arrived.
        """
        if self.recovery.fails_over and not self._learns:
            self.run(
                [
                    Consumed(rank, step)
                    for rank in ranks
                    if rank in self._ranks and self.planner.last_taken(rank) < step
                ]
            )

    # events of workers

    def _worker_events(self, events: Sequence[Any]) -> None:
        for event in events:
            match event:
                case StepsAcked(generation=sent) if sent < self._first_generation:
                    # The coordinator before this one may have received earlier reports and acks.
                    # The worker sends all of them again after the rollback of the takeover.
                    pass
                case StepsAcked(ranks=ranks, steps=steps, reports=reports):
                    self.report(reports)  # before a step counts that was taken after them
                    for rank, step in zip(ranks, steps, strict=True):
                        self._acked(rank, step)
                case ConnectionLost():
                    self.recovery.unreachable(event.worker, event.reason, event.address)
                case EndOfJob(error=ActorLost(name=name)) if (
                    lost := self.pool.named(name)
                ) is not None:
                    self.recovery.missed_by_peer(lost, event)
                case Announcements():
                    self.commands.queue.extend(event.split())
                case Announce() | EndOfJob() | DecodeFailures():
                    self.commands.queue.append(event)
                case _:
                    raise TypeError(
                        f"coordinator: expected an event of a worker, got {event!r:.80}; this is a "
                        "bug in Overlord: report it"
                    )
        self.run()
        self.gate.acked()

    def _acked(self, rank: int, step: int) -> None:
        if rank in self._ranks:
            self.on_taken(rank, step)
            self.commands.queue.append(Consumed(rank, step))

    def _end_with(self, error: ActorLost) -> None:
        """End the job with an error after the complete steps: a worker is lost for good."""
        self.run(self.planner.handle(EndOfJob(self.planner.next_step, error)))

    # recovery

    def rollback(self, reason: str) -> None:
        """Replan all steps after the last one that every rank acknowledged.

        This is the only recovery path. Every worker receives the rollback before any later message.
        """
        assert not self.commands.running, "a rollback must not run inside a command of the planner"
        restarted = self.pool.adopt_restarted()
        for worker in restarted.values():
            self.recovery.adopted(worker)
        dead = [
            h
            for h, w in list(self.pool.loaders.items())
            if w.joined and (w.lost or w.name in restarted)
        ]
        old, step = self.planner, self.history.acked
        generation = self.recovery.next_generation()
        state = self.history.rollback(old.spec.names)
        new = self._planner_at(state)
        self.router.rollback(generation)
        self.standby.promote(dead, self.pool.living() - set(dead))
        self.rebalancer.settle(dead)
        if not any(self.pool.loaders[h].lost for h in dead):
            # otherwise the workers that are being restarted get the standbys
            self.standby.fill(self.pool.living(), self.pool.nodes())
        self.recovery.rolled_back(step)
        to = f"to step {step}" if step >= 0 else "to the beginning"
        log.warning("rolled back %s: %s", to, reason)
        self.pool.link_all()
        message = Rollback(generation, step, afresh=old.holds_over or new.holds_over)
        starts = [replace(start, generation=generation) for start in self.starts.at(state)]
        for worker, out in rollback_messages(
            self._workers, self._ranks, message, starts, restarted
        ):
            worker.out.append(out)
        self.gate.rollback()
        self.journal.write_rollback(step, generation, reason)
        self.planner = new
        self.run(new.adopt(old))
        self.recovery.planned(self.planner.next_step - 1, self.planner.floor)

    def _planner_at(self, state: StreamState) -> Planner:
        """Return a planner at a state, with a new copy of the job's schedule."""
        old, schedule = self.planner, copied_schedule(self._mixture)
        spec = replace(old.spec, schedule=schedule, prefer=getattr(schedule, "prefer", None))
        floor = max(old.floor, old.next_step)
        return Planner(spec, state, generation=self.recovery.generation, floor=floor)

    # commands of the planner

    def _execute(self, command: Any) -> None:
        match self.gate.admit(command):
            case None:
                pass
            case Refill(loader=loader) as refill:
                self.pool.send(self.placement.worker(loader), refill)
                if (standby := self.placement.standby_of.get(loader)) is not None:
                    self.pool.send(standby, refill)
            case (Announce() | DecodeFailures()) as event:
                self.commands.queue.extend(self.planner.handle(event))
            case Consumed() as taken:
                self.commands.queue.extend(self.planner.handle(taken))
                self._progress()
                if self.rebalancer.retiring:
                    self.rebalancer.acked()
            case PlannedStep() as stage:
                self._publish(stage)
            case EndOfJob() as finish:
                self._finish(finish)
            case DropHeldSamples(loaders=loaders) as drop:
                self.router.forget(loaders)
                self.pool.broadcast(drop)
            case SourceLost() as lost:
                lose_source(lost, self.event, self.on_lost)
            case RestartLoader() as restart:
                self.rebalancer.restart(restart)
            case unknown:
                raise TypeError(
                    f"coordinator: expected a known command, got {type(unknown).__name__}; "
                    "this is a bug in Overlord: report it"
                )

    def _progress(self) -> None:
        taken = self.planner.taken
        if taken is not None:
            self.history.taken(taken)

    def _publish(self, stage: PlannedStep) -> None:
        """Send a planned step to its workers, unless the job ends before it."""
        assert isinstance(stage.after, StreamState)
        step, ends = stage.plan.step, self.planner.finished
        if (ends is not None and step >= ends.step) or (first := self._is_first(stage)) is None:
            return
        after, acked = encode_state(stage.after), self.history.acked
        # a step that an earlier coordinator planned may not be listed here yet
        if first or not self.plans.of(step):
            self.plans.keep(stage)
            for watcher in self.on_stage:
                watcher(stage, after)
        routed = self.router.route(stage, after, self._ranks.served, acked)
        for c, plan in routed.constructor_plans.items():
            self.pool.constructors[c].out.append(plan)
        for h, loader_plan in routed.loader_plans.items():
            self.pool.send(h, loader_plan)
        if self.recovery.losses:
            self.recovery.planned(step, self.planner.floor)

    def _is_first(self, stage: PlannedStep) -> bool | None:
        """Return whether a step is new; None if it differs from its first plan: the job ends."""
        try:
            return self.history.planned(stage)
        except PlanError as error:
            self.commands.queue.extend(self.planner.handle(EndOfJob(stage.plan.step, error)))
            return None

    def _finish(self, finish: EndOfJob) -> None:
        """Send the end of the job to constructor workers, once the planner has accepted it."""
        if self.planner.finished is not finish:
            self.commands.queue.extend(self.planner.handle(finish))
            return
        for worker in self.pool.constructors.values():
            worker.out.append(finish)

    # sources

    @property
    def prepared(self) -> PreparedJob:
        """The job with all sources so far."""
        return self.sources.prepared

    def add_source(
        self, new: NewSource, prepared: int, budget_bytes: int, joined: Callable[[], None]
    ) -> None:
        """Add a source that worker ``prepared`` reads; an error of the planner changes nothing.

        ``joined`` is called once the source is added, before a client receives a step with it.
        """
        worker = self.sources.ready(prepared)
        commands = self.planner.handle(new)
        self._keep_event(new.event)
        self.sources.add(worker, new.source, budget_bytes)
        joined()
        self.run(commands)

    def move(self, source: int, hosts: Sequence[str]) -> None:
        """Move the k-th loader of a source to the worker named ``hosts[k % len(hosts)]``."""
        self.rebalancer.move(source, hosts)

    def scale(self, source: int, n: int) -> bool:
        """Start to read a source in ``n`` workers; return whether a migration has begun."""
        return self.rebalancer.scale(source, n)

    # status

    def waiting_for(self, rank: int) -> str:
        """Describe what a rank's next step waits for."""
        waits = self.status.constructor_waits_for(self._constructor_of(rank), rank)
        if words := waits or self.gate.waiting_for():
            return words
        answers = self.status.poll()
        busy = self.status.busy(answers)
        if not self._learns:
            # Constructor workers report late, and the planner needs all steps to name the slowest
            # rank. Where the mixture learns, a step counts only after its rank's reports.
            self.run([ack for ack in self.status.acks(answers) if ack.rank in self._ranks])
        return self.planner.waiting_for() + (f" ({'; '.join(busy[:3])})" if busy else "")

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of all workers and of autoscaling."""
        return self.status.metrics({} if self.autoscaler is None else self.autoscaler.metrics())

    # the end

    def close(self) -> None:
        self.pool.closed = True
        self.recovery.close()
        if self.autoscaler is not None:
            self.autoscaler.close()
        self.pool.close()

    def check(self) -> None:
        self.planner.check()
