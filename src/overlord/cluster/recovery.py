"""Supervision of workers: heartbeats, losses, restarts, and the generation of the last rollback.

``cluster/supervisor.py`` decides what is to be done; ``Coordinator.rollback`` does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from overlord.cluster.placement import AttachedRanks, Placement, StandbyManager, standby_sizes
from overlord.cluster.plan_router import ImageContext, PlanRouter
from overlord.cluster.supervisor import (
    TICKS,
    Closing,
    Command,
    Event,
    GiveUp,
    Heartbeat,
    KillWorker,
    Loss,
    Needed,
    Progress,
    Retired,
    RollBack,
    StandbyReady,
    StartWorker,
    Supervisor,
    Tick,
    Unreachable,
    WorkerDied,
    WorkerReady,
    worn_out,
)
from overlord.cluster.worker_pool import ProcessContext, WorkerHandle, WorkerPool
from overlord.errors import ActorLost, DataStall
from overlord.job.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.messages.control import (
    STRIDE,
    Attach,
    Cursor,
    EndOfJob,
    FollowLoader,
    LoaderStart,
    Rollback,
    StreamState,
    WorkerRecovered,
)
from overlord.planning.planner import Planner
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.options import Options
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")

KEPT_RECOVERIES = 1000  # rows in ``metrics()``


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryActions:
    """The calls that recovery makes on the event loop.

    ``roll_back(reason)`` is called once all lost workers are back, ``use_as_standby(name)`` when
    one is back whose loaders its standbys read. ``end_job(error)`` is called when a worker cannot
    be kept alive; ``duty_of(name)`` describes its task. ``end_at(end)`` ends the job at a step that
    a worker reported.
    """

    roll_back: Callable[[str], None]
    use_as_standby: Callable[[str], None]
    end_job: Callable[[ActorLost], None]
    end_at: Callable[[EndOfJob], None]
    duty_of: Callable[[str], str]


# ----------------------------------------------------------------------------
# The messages that open a loader at a state of the stream. Pure.


class LoaderStarts:
    """Builds ``LoaderStart`` messages of the current job. ``prepared`` returns that job."""

    def __init__(self, prepared: Callable[[], PreparedJob], placement: Placement):
        self._prepared, self._placement = prepared, placement

    def at(self, state: StreamState) -> list[LoaderStart]:
        """Return the starts of all loaders at a state."""
        prepared = self._prepared()
        cursors = [Cursor(*c) for c in state.cursors.tolist()]
        return [o for i, cursor in enumerate(cursors) for o in prepared.loader_starts(i, cursor)]

    def of(self, loader: int, cursor: Cursor, generation: int) -> LoaderStart:
        """Return the start of one loader."""
        source = self._placement.source_of(loader)
        starts = self._prepared().loader_starts(source, cursor)
        start = starts[loader - self._placement.loaders_of(source).start]
        return replace(start, generation=generation)

    def follow(self, loader: int, planner: Planner) -> list[Any]:
        """Return the messages to a worker that follows a loader from the next planned step on."""
        cursor, generation, refill = planner.opening(loader)
        return [FollowLoader(self.of(loader, cursor, generation)), refill]


class RecoveryManager:
    """Supervises workers and has lost ones restarted. Runs on: event loop.

    ``generation`` is the generation of the last rollback. With ``options.failover`` a lost worker
    is restarted, else the job ends after the complete steps.
    """

    def __init__(
        self,
        pool: WorkerPool,
        standby: StandbyManager,
        context: ProcessContext,
        options: Options,
        generation: int,
        actions: RecoveryActions,
    ):
        self._pool, self._standby, self._actions = pool, standby, actions
        self._event_loop, self._platform = context.event_loop, context.platform
        self._now = context.platform.now
        self._lost_after_s, self._max_restarts = options.lost_after_s, options.max_restarts
        self._supervisor = Supervisor(
            lost_after_s=options.lost_after_s, max_restarts=options.max_restarts
        )
        self.fails_over, self.generation = options.failover, generation
        self.recoveries: list[WorkerRecovered] = []  # the last ones
        self.n_recovered = 0  # all of them
        self._lost_at: dict[str, float] = {}
        # by worker: the step that planning was rolled back to for it
        self._losses: dict[str, tuple[int, Loss]] = {}
        self._ticking = False
        self._stop: Callable[[], None] = lambda: None

    @property
    def given_up(self) -> ActorLost | None:
        """The error of the worker that is not restarted any more."""
        return self._supervisor.given_up

    def start(self) -> None:
        """Poll heartbeats from now on, if lost workers are restarted."""
        if self.fails_over:
            every_s = self._lost_after_s / TICKS
            self._stop = self._platform.every(every_s, self._tick, "overlord heartbeats")

    def close(self) -> None:
        """Ignore losses from now on: the job ends."""
        self._supervisor.handle(Closing(), self._now())
        self._stop()

    # heartbeats

    def _tick(self) -> None:
        """Post a round of heartbeats unless one is waiting. Runs on: timer thread."""
        if not self._ticking:
            self._ticking = True
            self._event_loop.post(self._beat)

    def _beat(self) -> None:
        self._ticking = False
        if self._pool.closed:
            return
        now = self._now()
        self._pool.kill_stopped()
        for worker in self._pool.joined():
            if worker.answered:
                self._handle(Heartbeat(worker.name, worker.incarnation), now)
            self._pool.ask_heartbeat(worker)
        self._handle(Tick(), now)

    # events of workers

    def joined(self, worker: WorkerHandle) -> None:
        """Supervise a worker that is part of the job from now on."""
        self._supervisor.handle(WorkerReady(worker.name, worker.incarnation), self._now())

    def retired(self, worker: WorkerHandle) -> None:
        """Stop supervising a worker that is not needed any more."""
        self._supervisor.handle(Retired(worker.name), self._now())

    def acked(self, step: int) -> None:
        """Note that every rank acknowledged the steps up to this one."""
        self._supervisor.handle(Progress(step), self._now())

    def started(self, worker: WorkerHandle) -> None:
        """Note that a restarted worker is ready."""
        self._handle(WorkerReady(worker.name, worker.incarnation), self._now())

    def start_failed(self, name: str, incarnation: int, reason: str) -> None:
        self._handle(WorkerDied(name, incarnation, reason), self._now())

    def lost(self, worker: WorkerHandle, reason: str) -> None:
        """Have a lost worker restarted. It is not waited for if standbys have all that it read.

        Without failover the job ends.
        """
        now, name = self._now(), worker.name
        if not self.fails_over:
            self._end_job(ActorLost(name, reason), f"{name} is lost: {reason}")
            return
        self._lost_at.setdefault(name, now)
        living = self._pool.living()
        gone = {h: w for h, w in list(self._pool.loaders.items()) if w.lost and w.joined}
        covered = {h for h in gone if self._standby.covers(h, living)}
        for h in gone:
            if h not in covered:
                self._handle(Needed(f"loader-worker/{h}"), now)
        spare = any(w is worker and h in covered for h, w in gone.items())
        died = WorkerDied(name, worker.incarnation, reason, spare)
        commands = self._supervisor.handle(died, now)
        restarts = "; restarting it, trainers continue with the steps they have"
        log.warning("%s is lost: %s%s", name, reason, restarts if self.given_up is None else "")
        self._execute(commands)

    def missed_by_peer(self, lost: WorkerHandle, end: EndOfJob) -> None:
        """Handle the end of a worker that cannot continue without another one.

        With failover that one is restarted, unless it is given up. Without it the job ends. Peers
        only see the connection close, so the launcher is asked for the exit reason first.
        """
        if self.fails_over:
            if self.given_up is not None:
                self._actions.end_at(EndOfJob(end.step, self.given_up))
            return

        def answered(future: Future[Any]) -> None:
            error = future.exception()
            known = EndOfJob(end.step, error) if isinstance(error, ActorLost) else end
            self._event_loop.post(
                lambda: None if self._pool.closed else self._actions.end_at(known)
            )

        self._pool.call(lost, "do", []).add_done_callback(answered)

    def unreachable(self, name: str, reason: str, address: str) -> None:
        """Handle a constructor worker that a loader worker cannot connect to.

        If that has died, its launcher reports it. If it answers a heartbeat, it is killed, since it
        is of no use. If it does not answer, the next heartbeats find out.
        """
        c = int(name.rpartition("/")[2])
        if self._pool.addresses.get(c) != address:
            return  # it has been replaced
        worker = self._pool.restarted.get(name, self._pool.constructors[c])

        def answered(future: Future[Any]) -> None:
            if future.exception() is None:
                self._event_loop.post(act)

        def act() -> None:
            if not self._pool.closed and self._pool.addresses.get(c) == address:
                event = Unreachable(name, f"others cannot reach it: {reason}")
                self._handle(event, self._now())

        self._pool.call(worker, "beat").add_done_callback(answered)

    def _handle(self, event: Event, now: float) -> None:
        self._execute(self._supervisor.handle(event, now))

    def _execute(self, commands: Sequence[Command]) -> None:
        """Execute the commands of the supervisor."""
        for command in commands:
            match command:
                case StartWorker(name=name, incarnation=incarnation):
                    self._pool.restart(name, incarnation)
                case KillWorker(name=name, incarnation=incarnation, reason=reason):
                    self._pool.kill_incarnation(name, incarnation, reason)
                case RollBack(reason=reason):
                    self._actions.roll_back(reason)
                case StandbyReady(name=name):
                    self._actions.use_as_standby(name)
                case GiveUp(error=error):
                    self._give_up(error)

    def _give_up(self, error: ActorLost) -> None:
        """End the job: a worker is not restarted any more."""
        error = worn_out(error, self._max_restarts, self._actions.duty_of(error.name))
        self._supervisor.given_up = error
        self._end_job(error, str(error))

    def _end_job(self, error: ActorLost, words: str) -> None:
        log.error("%s", words)
        self._actions.end_job(error)

    # rollbacks

    def next_generation(self) -> int:
        """Raise the generation: messages of earlier ones are ignored from now on."""
        self.generation += STRIDE
        return self.generation

    def adopted(self, worker: WorkerHandle) -> None:
        """Note that a restarted worker has taken its place."""
        self._lost_at.pop(worker.name, None)

    def rolled_back(self, step: int) -> None:
        """Note the step that planning was rolled back to for all losses so far."""
        for loss in self._supervisor.take_recovered():
            # a worker that was lost again meanwhile is missed since the first time
            self._losses.setdefault(loss.worker, (step, loss))

    def planned(self, step: int, floor: int) -> None:
        """Report losses as recovered once all steps before ``floor`` are planned again."""
        if not self._losses or step < floor - 1:
            return
        losses, self._losses, now = self._losses, {}, self._now()
        for rolled_back_to, loss in losses.values():
            log.warning(
                "%s %s after %.2f s: %s, nothing was lost",
                loss.worker,
                "replaced by its standbys" if loss.spare else "recovered",
                now - loss.since,
                _planned_again(rolled_back_to + 1, floor - 1),
            )
            self.recoveries.append(
                WorkerRecovered(
                    loss.worker, loss.reason, now - loss.since, rolled_back_to, loss.spare
                )
            )
        self.n_recovered += len(losses)
        del self.recoveries[:-KEPT_RECOVERIES]

    # status

    def silent_s(self, worker: WorkerHandle) -> float:
        """Return the seconds since a worker last answered; 0 where heartbeats are not polled."""
        return self._supervisor.silent_s(worker.name, self._now()) if self.fails_over else 0.0

    def error_of(self, worker: WorkerHandle) -> Exception:
        """Return the error of a request to a lost worker."""
        if not self.fails_over or self.given_up is not None:
            if self.given_up is not None and self.given_up.name == worker.name:
                return self.given_up
            return ActorLost(worker.name, worker.lost)
        lost_at = self._lost_at.get(worker.name, self._now())
        what = f"{worker.name} to be started again ({worker.lost})"
        return DataStall(what, self._now() - lost_at)


def _planned_again(first: int, last: int) -> str:
    if last > first:
        return f"steps {first} to {last} were planned again"
    return f"step {last} was planned again" if last == first else "no step had to be planned again"


# ----------------------------------------------------------------------------
# The job that a coordinator runs, as its objects read it, and the objects that follow from it.


class CurrentJob:
    """The prepared job and the planner of now: sources are added, and a rollback replaces both."""

    def __init__(self, prepared: Callable[[], PreparedJob], planner: Callable[[], Planner]):
        self._prepared, self._planner = prepared, planner

    @property
    def prepared(self) -> PreparedJob:
        return self._prepared()

    @property
    def planner(self) -> Planner:
        return self._planner()


@dataclass(frozen=True, slots=True, eq=False)
class JobWorkers:
    """The workers of a job: their handles, what each reads, standbys, and supervision."""

    pool: WorkerPool
    placement: Placement
    standby: StandbyManager
    recovery: RecoveryManager


def router_of(prepared: PreparedJob, placement: Placement) -> PlanRouter:
    """Return the router of a job: its hooks and images decide what a worker must receive."""
    job, images = prepared.job, None
    if prepared.images is not None:
        groups = list(job.place.buckets("DP"))
        images = ImageContext(job.batch, job.document_multiple, groups)
    return PlanRouter(
        placement,
        whole_plans=bool(of_kind(job.hooks, CONSTRUCTOR)),
        loader_hooks=bool(of_kind(job.hooks, LOADER)),
        images=images,
    )


def standbys_of(
    prepared: PreparedJob, loader_placement: LoaderPlacement, placement: Placement
) -> StandbyManager:
    """Return the standbys of a job, as its option ``shadows`` asks for them."""
    kind = prepared.options.shadows
    if kind != "none" and loader_placement.n_hosts == 1:
        log.warning(
            "shadows=%r has no effect: there is one loader worker, and no other for standbys", kind
        )
    return StandbyManager(
        placement, *standby_sizes(kind, loads_of(prepared), loader_placement.loaders)
    )


# ----------------------------------------------------------------------------
# The messages that roll the workers of a job back to a step.


def rollback_messages(
    workers: JobWorkers,
    ranks: AttachedRanks,
    rollback: Rollback,
    starts: Sequence[LoaderStart],
    restarted: Collection[str],
) -> Iterator[tuple[WorkerHandle, Rollback | Attach | FollowLoader]]:
    """Yield the messages of a rollback with the worker of each.

    Loader workers open their loaders at ``starts``, restarted constructor workers attach their
    ranks, and standbys follow their loaders from there on.
    """
    pool, placement = workers.pool, workers.placement
    for c, worker in pool.constructors.items():
        yield worker, Rollback(rollback.generation, rollback.step)
        if worker.name in restarted:
            for rank in ranks.served_by(c):
                yield worker, Attach(rank)
    for h, worker in list(pool.loaders.items()):
        if worker.joined:
            mine = tuple(start for start in starts if placement.worker(start.loader) == h)
            yield worker, replace(rollback, openings=mine)
    for h, follow in workers.standby.follow(starts):
        yield pool.loaders[h], follow
