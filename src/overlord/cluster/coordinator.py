"""The coordinator of a job in several processes: it plans, routes steps to workers, and recovers.

The planner core lives here, on one event loop. Loader workers and constructor workers are actors;
each receives one list of messages per turn and answers with its events. The stream does not depend
on which process does what.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.client.local_queue import LaunchedStepQueue
from overlord.cluster.autoscale import Autoscaler, scaler_of
from overlord.cluster.client_endpoints import ClientEndpoints
from overlord.cluster.coordinator_config import Incarnation
from overlord.cluster.job_sources import JobSources
from overlord.cluster.loader_starts import LoaderStarts
from overlord.cluster.node_placement import watch
from overlord.cluster.placement import Placement
from overlord.cluster.plan_history import PlanHistory, RecentPlans
from overlord.cluster.plan_router import ImageContext, PlanRouter
from overlord.cluster.rebalance import PER_PLANNER, SCALED, Rebalancer
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.standby import StandbyManager, standby_sizes
from overlord.cluster.status import StatusReporter
from overlord.cluster.worker_factory import (
    WorkerFactory,
    WorkerStarter,
    constructors_of,
    read_ahead_of,
    settings_of,
)
from overlord.cluster.worker_pool import WorkerHandle, WorkerPool
from overlord.concurrency.command_loop import CommandLoop
from overlord.concurrency.event_loop import EventLoop
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost, JobError, OverlordError, PlanError
from overlord.job.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.journal.write_ahead import NullJournal, WriteAheadGate, lose_source
from overlord.messages.constructor import DecodeFailures
from overlord.messages.control import (
    Attach,
    ConnectionLost,
    Consumed,
    Detach,
    DropHeldSamples,
    EndOfJob,
    FollowLoader,
    LoaderStart,
    PlannedStep,
    Refill,
    Report,
    RestartLoader,
    Rollback,
    SetBufferBudget,
    SetMixture,
    SetReadAhead,
    Skip,
    SourceLost,
    StepsAcked,
    StreamState,
)
from overlord.messages.loader import Announce
from overlord.planning.events import with_every_weight
from overlord.planning.planner import Planner
from overlord.planning.spec import NewSource
from overlord.process.pickle_check import sendable
from overlord.rpc.actors import ActorSystem
from overlord.setup.partition import hosting_of, loads_of, scales
from overlord.setup.prepared_job import PreparedJob, schedule_of
from overlord.transport.state_codec import seal

log = logging.getLogger("overlord")

PLANNERS = 2**40  # generations between two coordinators: each may roll back a million times


class Coordinator:
    """Plans steps, routes them to workers, and recovers lost workers. Runs on: event loop.

    ``starter`` starts workers elsewhere; without it they are started here. ``incarnation`` tells a
    coordinator in its own process from those before it.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        state: StreamState | None,
        control: ActorSystem,
        event_loop: EventLoop,
        session: int = 0,
        platform: Platform | None = None,
        starter: WorkerStarter | None = None,
        incarnation: Incarnation = Incarnation(),  # noqa: B008
    ):
        hosting = hosting_of(prepared) if starter is None else starter.hosting
        read_ahead = read_ahead_of(hosting, scales(prepared))
        prepared = prepared.with_loaders(hosting.loaders, read_ahead)
        self._first = prepared  # the job whose schedule the planner has
        self._options = prepared.options
        self._control, self._event_loop = control, event_loop
        self._platform = platform or Platform()
        self.planner = prepared.planner(state)
        self._barrier = incarnation.barrier
        self.plans = RecentPlans()
        self.on_stage: list[Callable[[PlannedStep], None]] = []
        self.on_lost: list[Callable[[SourceLost], None]] = []
        self.on_late: list[Callable[[Any], None]] = []
        self.on_taken: Callable[[int, int], None] = lambda rank, step: None
        groups = list(prepared.job.place.buckets("DP"))
        self._served = np.zeros(len(groups), np.int64)  # attached ranks of every group
        self._attached: set[int] = set()

        self.placement = Placement(
            hosting.loaders, hosting.host_of, constructors_of(prepared), groups
        )
        self._starter: WorkerStarter = starter or WorkerFactory(
            control,
            lambda: self.prepared,
            settings_of(prepared, hosting, secrets.token_urlsafe(24), session, platform),
            hosting,
            self.placement.constructor_of.tolist(),
        )
        hooks, options = prepared.job.hooks, self._options
        self.router = PlanRouter(
            self.placement,
            whole_plans=bool(of_kind(hooks, CONSTRUCTOR)),
            loader_hooks=bool(of_kind(hooks, LOADER)),
            images=_image_context(prepared, groups),
        )
        self.pool = WorkerPool(
            control,
            event_loop,
            self._platform,
            self._starter,
            self.placement,
            lost_after_s=options.lost_after_s,
            on_events=self._worker_events,
            on_lost=self._worker_lost,
            on_started=lambda worker: self.recovery.started(worker),
            on_start_failed=lambda *failed: self.recovery.start_failed(*failed),
        )
        self.commands = CommandLoop(
            self._execute, check=self.check if options.check else None, after=self.pool.flush
        )
        self.gate = WriteAheadGate(self.commands, lambda: self.planner)
        self.history = PlanHistory(
            self.planner.state(), prepared.job.feedback_lag, incarnation.planned
        )
        sizes = standby_sizes(options.shadows, loads_of(prepared), hosting.loaders)
        self.standby = StandbyManager(self.placement, *sizes)
        self.recovery = RecoveryManager(
            pool=self.pool,
            standby=self.standby,
            event_loop=event_loop,
            platform=self._platform,
            lost_after_s=options.lost_after_s,
            max_restarts=options.max_restarts,
            fails_over=options.failover,
            generation=incarnation.number * PLANNERS,
            roll_back=self.rollback,
            use_as_standby=lambda name: self.rebalancer.use_as_standby(name),
            give_up=self._give_up,
        )
        self.endpoints = ClientEndpoints(
            self.pool, self.placement, self.recovery, session=session, prefetch=options.prefetch
        )
        self.sources = JobSources(prepared, self.pool, self.placement, hosting.n_hosts)
        self.starts = LoaderStarts(lambda: self.prepared, self.placement)
        self.rebalancer = Rebalancer(
            placement=self.placement,
            pool=self.pool,
            standby=self.standby,
            recovery=self.recovery,
            history=self.history,
            starts=self.starts,
            commands=self.commands,
            event_loop=event_loop,
            platform=self._platform,
            job=lambda: self.prepared.job,
            planner=lambda: self.planner,
            first=SCALED + incarnation.number * PER_PLANNER,
        )
        self.autoscaler = self._autoscaler(hosting)
        self.status = StatusReporter(
            self.pool,
            self.placement,
            self.recovery,
            self._platform,
            lambda: self.prepared.job.names,
        )
        self._stop_reviews: Callable[[], None] = lambda: None
        if options.shadows != "none" and hosting.n_hosts == 1:
            log.warning(
                "shadows=%r has no effect: there is one loader worker, and no other for standbys",
                options.shadows,
            )

    def _autoscaler(self, hosting: Any) -> Autoscaler | None:
        scaler = scaler_of(self.prepared, hosting, self.planner.spec.read_ahead)
        if scaler is None:
            return None
        return Autoscaler(
            scaler,
            placement=self.placement,
            pool=self.pool,
            rebalancer=self.rebalancer,
            history=self.history,
            event_loop=self._event_loop,
            platform=self._platform,
            prepared=lambda: self.prepared,
            planner=lambda: self.planner,
            attached=lambda: bool(self._attached),
            set_read_ahead=self._set_read_ahead,
        )

    # starting

    def start(self) -> Coordinator:
        """Start all workers, wait for them, and supervise them. Returns this coordinator."""
        with self.closed_on_error():
            job = self.prepared.job
            sendable(job.hooks, "hooks")
            self.pool.start_all(range(len(job.sources)), self.starts.at(self.planner.state()))
            self.begin()
        return self

    @contextlib.contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close this coordinator if the start of its workers fails."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Supervise the workers, all of which have started, and place standbys and statistics."""
        for worker in self.pool.workers():
            self.recovery.joined(worker)
        self.standby.fill(self.pool.living(), self.pool.nodes())
        self._follow(self.starts.at(self.planner.state()))
        self.commands.run()
        self.recovery.start()
        if self.autoscaler is not None:
            self.autoscaler.start()
        if self._starter.placement is not None:
            relocate = self.rebalancer.relocate_later
            self._stop_reviews = watch(
                self._starter.placement, self._platform, self._control, relocate
            )

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

    def settle(self) -> None:
        """Return at once: every event has taken effect when ``event`` returns."""

    def event(self, event: Any) -> None:
        """Apply an event of the log: it is durable on return."""
        if isinstance(event, Report) and self.planner.in_time(event):
            self.history.reported(event)
        ended, commands = self.planner.ended, self.gate.record(event)
        if isinstance(event, (SetMixture, Skip, SourceLost)) and ended is None:
            self._note(event)
        self.run(commands)

    def _note(self, event: Any) -> None:
        """Keep an event for the next rollback, before a plan made with it takes effect."""
        if isinstance(event, SetMixture):
            event = with_every_weight(event, self.planner.spec.names)
        self.history.said(event)

    def report(self, report: Report) -> bool:
        """Apply a report and return whether it comes in time for a plan."""
        used = self.planner.in_time(report)
        self.event(report)
        return used

    @property
    def attached(self) -> frozenset[int]:
        return frozenset(self._attached)

    def attach(self, queues: Mapping[int, Any]) -> None:
        """Plan for the clients of these ranks; they receive steps from their constructor worker."""
        for rank in queues:
            self._count_rank(rank)
            self.endpoints.constructor(rank).out.append(Attach(rank))
        self.run([command for rank in queues for command in self.planner.handle(Attach(rank))])

    def take_over_rank(self, rank: int) -> None:
        """Count a rank as attached: the planner starts no step for it before the rollback."""
        self._count_rank(rank)
        self.planner.handle(Attach(rank))

    def _count_rank(self, rank: int) -> None:
        self._attached.add(rank)
        self._served[self.placement.bucket_of[rank]] += 1

    def detach(self, rank: int) -> None:
        if rank in self._attached:
            self._attached.discard(rank)
            self._served[self.placement.bucket_of[rank]] -= 1
            self.endpoints.constructor(rank).out.append(Detach(rank))
            self.run(self.planner.handle(Detach(rank)))

    def stop(self) -> None:
        for rank in list(self._attached):
            self.detach(rank)

    def consumed(self, ranks: Sequence[int], step: int) -> None:
        """Count steps that clients of this process took.

        Constructor workers report the same; an acknowledgement that was lost with a worker arrives
        here, before the client requests a step that others do not have yet.
        """
        if self.recovery.fails_over:
            self.run(
                [
                    Consumed(rank, step)
                    for rank in ranks
                    if rank in self._attached and self.planner.took(rank) < step
                ]
            )

    def _set_read_ahead(self, command: SetReadAhead) -> None:
        self.run(self.planner.handle(command))

    # events of workers

    def _worker_events(self, events: Sequence[Any]) -> None:
        for event in events:
            match event:
                case StepsAcked(ranks=ranks, steps=steps):
                    for rank, step in zip(ranks, steps, strict=True):
                        self._took(rank, step)
                case ConnectionLost():
                    self.recovery.unreachable(event.worker, event.reason, event.address)
                case EndOfJob(error=ActorLost(name=name)) if (
                    lost := self.pool.named(name)
                ) is not None:
                    self._missed_by_peer(lost, event)
                case Announce() | EndOfJob() | DecodeFailures():
                    self.commands.queue.append(event)
                case _:
                    raise TypeError(f"unknown event of a worker: {event!r}")
        self.run()
        self.gate.acked()

    def _took(self, rank: int, step: int) -> None:
        if rank in self._attached:
            self.on_taken(rank, step)
            self._count([Consumed(rank, step)])

    def _count(self, taken: list[Consumed]) -> None:
        """Count acknowledgements, unless they have to wait for reports."""
        counted = taken if self._barrier is None else self._barrier.hold(taken)
        self.commands.queue.extend(counted)

    def all_reported(self, mark: int) -> None:
        """Count the acknowledgements whose reports have arrived."""
        if self._barrier is None or (sure := self._barrier.release(mark)) is None:
            return
        self.commands.queue.extend(c for c in sure if c.rank in self._attached)
        self.run()
        self.gate.acked()  # no plan follows the last steps

    def _missed_by_peer(self, lost: WorkerHandle, finish: EndOfJob) -> None:
        """A worker cannot continue without another one, which is restarted unless it is given up.

        Without failover the job ends. Peers only see the connection close, so the launcher is asked
        for the exit reason first.
        """
        if self.recovery.fails_over:
            if (error := self.recovery.given_up) is not None:
                self.commands.queue.append(EndOfJob(finish.step, error))
            return

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            known = EndOfJob(finish.step, error) if isinstance(error, ActorLost) else finish
            self._event_loop.post(lambda: None if self.pool.closed else self.run([known]))

        self.pool.call(lost, "do", []).add_done_callback(answered)

    def _worker_lost(self, worker: WorkerHandle, reason: str) -> None:
        """Have a lost worker restarted; without failover the job ends after the complete steps."""
        if self.recovery.fails_over:
            self.recovery.lost(worker, reason)
        else:
            log.error("%s is lost: %s", worker.name, reason)
            self._end_with(ActorLost(worker.name, reason))

    def _give_up(self, error: ActorLost) -> None:
        """End the job: a worker cannot be kept alive."""
        duty = self.status.duty_of(error.name, self.history.acked)
        error = self.recovery.worn_out(error, duty)
        log.error("%s", error)
        self._end_with(error)

    def _end_with(self, error: ActorLost) -> None:
        self.run(self.planner.handle(EndOfJob(self.planner.next_step, error)))

    # recovery

    def rollback(self, reason: str) -> None:
        """Replan everything after the last step that every rank acknowledged.

        The one recovery path: all workers receive the rollback before any message that follows it.
        """
        assert not self.commands.running, "a planner is not replaced while its commands execute"
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
            # else the workers that are being restarted are to have the standbys
            self.standby.fill(self.pool.living(), self.pool.nodes())
        self.recovery.rolled_back(step)
        to = f"to step {step}" if step >= 0 else "to the beginning"
        log.warning("rolled back %s: %s", to, reason)
        self._send_rollback(state, step, old.holds_over or new.holds_over, restarted)
        self.gate.rollback()
        self.journal.went_back(step, generation, reason)
        self.planner = new
        self.run(new.adopt(old))
        self.recovery.planned(self.planner.next_step - 1, self.planner.floor)

    def _send_rollback(
        self, state: StreamState, step: int, afresh: bool, restarted: Mapping[str, WorkerHandle]
    ) -> None:
        """Queue the rollback for all workers: loaders open at it, constructors attach ranks."""
        generation = self.recovery.generation
        for c, worker in self.pool.constructors.items():
            worker.out.append(Rollback(generation, step))
            if worker.name in restarted:
                worker.out += [Attach(rank) for rank in self._ranks_at(c)]
        starts = [replace(start, generation=generation) for start in self.starts.at(state)]
        for h, worker in list(self.pool.loaders.items()):
            if worker.joined:
                self.pool.link(worker)
                mine = tuple(s for s in starts if self.placement.worker(s.loader) == h)
                worker.out.append(Rollback(generation, step, mine, afresh))
        self._follow(starts)

    def _ranks_at(self, c: int) -> list[int]:
        """Return the attached ranks that a constructor worker serves."""
        return [rank for rank in sorted(self._attached) if self.placement.constructor(rank) == c]

    def _follow(self, starts: Sequence[LoaderStart]) -> None:
        """Send standbys where the loaders that they follow start."""
        start_of = {start.loader: start for start in starts}
        for loader, h in self.standby.worker_of.items():
            if loader in start_of:
                self.pool.send(h, FollowLoader(start_of[loader]))

    def _planner_at(self, state: StreamState) -> Planner:
        """Return a planner at a state, with a new schedule that has not learned anything since."""
        old, schedule = self.planner, schedule_of(self._first.job, self._first.added)
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
                self.rebalancer.acked()
            case PlannedStep() as stage:
                self._publish(stage)
            case EndOfJob() as finish:
                self._finish(finish)
            case DropHeldSamples(loaders=loaders) as drop:
                self.router.forget(loaders)
                # a copy: another thread may add the worker of a source
                for worker in list(self.pool.loaders.values()):
                    worker.out.append(drop)
            case SourceLost() as lost:
                lose_source(lost, self.event, self.on_lost)
            case RestartLoader() as restart:
                self.rebalancer.restart(restart)
            case unknown:
                raise TypeError(f"no handler for the command {type(unknown).__name__}")

    def _progress(self) -> None:
        taken = self.planner.taken
        if taken is not None and self.history.took(taken):
            self.recovery.acked(self.history.acked)

    def _publish(self, stage: PlannedStep) -> None:
        """Send a planned step to the workers that execute it."""
        assert isinstance(stage.after, StreamState)
        step, ends = stage.plan.step, self.planner.finished
        if (ends is not None and step >= ends.step) or (first := self._is_first(stage)) is None:
            return
        # a step that a coordinator before this one planned is unknown here until now
        if first or not self.plans.of(step):
            self.plans.keep(stage)
            for watcher in self.on_stage:
                watcher(stage)
        after, acked = seal(stage.after), self.history.acked
        routed = self.router.route(stage, after, self._served > 0, acked)
        for c, plan in routed.placed.items():
            self.pool.constructors[c].out.append(plan)
        for h, part in routed.parts.items():
            self.pool.send(h, part)
        self.recovery.planned(step, self.planner.floor)

    def _is_first(self, stage: PlannedStep) -> bool | None:
        """Return whether a step is planned for the first time.

        None where it differs from its first plan: that ends the job.
        """
        try:
            return self.history.staged(stage)
        except PlanError as error:
            self.commands.queue.extend(self.planner.handle(EndOfJob(stage.plan.step, error)))
            return None

    def _finish(self, finish: EndOfJob) -> None:
        """End the job. An end that a worker reports goes to the planner first, which repeats it."""
        if self.planner.finished is not finish:
            self.commands.queue.extend(self.planner.handle(finish))
            return
        for worker in self.pool.constructors.values():
            worker.out.append(finish)

    # where clients get their steps

    def address_for(self, rank: int) -> tuple[str, str]:
        """Return the address and the token for a client of this process. Runs on: any thread."""
        return self.endpoints.address(rank)

    def listen(self, host: str, token: str) -> None:
        """Accept clients of other processes at this interface, if they present the token."""
        self.endpoints.listen(host, token)

    def outside(self, rank: int) -> tuple[str, str]:
        """Return the address for a client of another process, which has the token."""
        return self.endpoints.outside(rank)

    def taken_by(self, rank: int) -> int | None:
        """Return the last step that a client took. Runs on: any thread but the event loop."""
        return self.endpoints.taken(rank)

    def inbox(self, rank: int, next_step: int) -> LaunchedStepQueue:
        """Return the step queue of a client in this process."""
        return self.endpoints.queue(rank, next_step)

    # sources

    @property
    def prepared(self) -> PreparedJob:
        """The job with all sources so far."""
        return self.sources.prepared

    def prepare_source(self, prepared: PreparedJob) -> int:
        """Start a worker for a new source and return its number. Runs on: any thread."""
        return self.sources.prepare(prepared)

    def drop_prepared(self, h: int) -> None:
        """End the worker of a source that is not added. Runs on: any thread."""
        self.sources.drop(h)

    def add_source(
        self,
        new: NewSource,
        prepared: int,
        budget_bytes: int,
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        """Add a source that the prepared worker reads. The planner refuses before any change.

        ``joined`` is called once it is added, before a step with the source reaches a client.
        """
        worker = self.pool.loaders[prepared]
        if worker.lost:
            raise ActorLost(worker.name, worker.lost)
        commands = self.planner.handle(new)
        self._note(new.event)
        worker.joined = True
        self.pool.link(worker)  # a constructor worker may have been restarted since its start
        self.recovery.joined(worker)
        self.placement.add_source(new.source.loaders, prepared)
        for other in list(self.pool.loaders.values()):
            other.out.append(SetBufferBudget(budget_bytes))
        joined()
        if self._options.shadows == "all":
            log.warning(
                "source %r has no standby: no worker other than its own can open it",
                new.source.name,
            )
        self.run(commands)

    def abandon_source(self, h: int) -> None:
        """Forget the worker of a source that was added and not written: the job is about to end."""
        worker = self.pool.loaders[h]
        worker.lost = "its source could not join"
        self.recovery.retired(worker)

    def move(self, source: int, hosts: Sequence[str]) -> None:
        """Read the k-th loader of a source on ``hosts[k % len(hosts)]``."""
        self.rebalancer.move(source, hosts)

    def spread(self, source: int, n: int) -> bool:
        """Read a source in ``n`` workers; return whether that changes anything."""
        return self.rebalancer.scale(source, n)

    # status

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return self.recovery.recoveries

    def waiting_for(self, rank: int) -> str:
        """Describe what a rank's next step waits for."""
        waits = self.status.constructor_waits_for(self.endpoints.constructor(rank), rank)
        if words := waits or self.gate.waiting_for():
            return words
        answers = self.status.poll()
        busy = self.status.busy(answers)
        # Constructor workers report only when their slowest rank moves on: the planner must know
        # which one that is.
        acks = self.status.acks(answers)
        self._count([ack for ack in acks if ack.rank in self._attached])
        self.run()
        return self.planner.waiting_for() + (f" ({'; '.join(busy[:3])})" if busy else "")

    def figures(self) -> dict[str, Any]:
        """Return the metrics of all workers."""
        nodes = self._starter.placement
        scaling = {} if self.autoscaler is None else self.autoscaler.metrics()
        placement = {} if nodes is None else nodes.figures()
        return self.status.metrics(scaling) | {"placement": placement}

    def kill(self, name: str) -> None:
        """Kill a worker, for drills."""
        every = {worker.name: worker for worker in self.pool.workers()}
        if name not in every:
            raise JobError(
                [f"no process of this job is called {name!r}; there are {', '.join(every)}"], "kill"
            )
        self._control.kill(every[name].handle)

    # the end

    def broke(self, error: Exception) -> None:
        """End the job after the event loop has failed: constructor workers end their clients."""
        for worker in list(self.pool.constructors.values()):
            if not worker.lost and not self.pool.closed:
                with contextlib.suppress(OverlordError):
                    self.pool.tell(worker, [EndOfJob(self.planner.next_step, error)])

    def close(self) -> None:
        self.pool.closed = True
        self.recovery.close()
        if self.autoscaler is not None:
            self.autoscaler.close()
        self._stop_reviews()
        self.pool.close()

    @property
    def actor_system(self) -> ActorSystem:
        """The actor system that started the workers."""
        return self._control

    @property
    def absent(self) -> str:
        """Return an empty text: the planner is in this process and can always be asked."""
        return ""

    def use_buffers(self, buffers: Any) -> None:
        """Do nothing: constructor workers have buffers of their own."""

    def check(self) -> None:
        self.planner.check()


def _image_context(prepared: PreparedJob, groups: Sequence[Sequence[int]]) -> ImageContext | None:
    if prepared.images is None:
        return None
    return ImageContext(prepared.job.batch, prepared.job.document_multiple, groups)
