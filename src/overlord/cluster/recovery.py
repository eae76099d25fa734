"""Supervision of workers: heartbeats, losses, restarts, and the generation of the last rollback.

``cluster/supervisor.py`` decides on restarts and rollbacks. ``RecoveryManager`` executes its
commands, and ``Coordinator.rollback`` rolls back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from overlord.cluster.placement import StandbyManager
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
    Retired,
    StandbyReady,
    StartRollback,
    StartWorker,
    Supervisor,
    Tick,
    Unreachable,
    WorkerDied,
    WorkerReady,
    restart_limit_error,
)
from overlord.cluster.worker_pool import ProcessContext, WorkerHandle, WorkerPool
from overlord.errors import ActorLost
from overlord.messages.control import STRIDE, EndOfJob
from overlord.messages.launcher import WorkerRecovered
from overlord.setup.options import Options

log = logging.getLogger("overlord")

KEPT_RECOVERIES = 1000  # rows in ``metrics()``


@dataclass(frozen=True, slots=True, eq=False)
class RecoveryActions:
    """The calls that recovery makes on the event loop.

    ``roll_back(reason)`` is called once all lost workers are restarted, ``use_as_standby(name)``
    when a worker is restarted that its standbys have replaced. ``end_job(error)`` is called when a
    worker is not restarted any more; ``duty_of(name)`` describes its task. ``end_at(end)`` ends the
    job at a step that a worker reported. ``acked`` returns the last step that every rank
    acknowledged.
    """

    roll_back: Callable[[str], None]
    use_as_standby: Callable[[str], None]
    end_job: Callable[[ActorLost], None]
    end_at: Callable[[EndOfJob], None]
    duty_of: Callable[[str], str]
    acked: Callable[[], int]


class RecoveryManager:
    """The supervision of workers: heartbeats, losses and recoveries. Runs on: event loop.

    ``generation`` is the generation of the last rollback. With ``options.failover`` a lost worker
    is restarted; otherwise the job ends after the complete steps.
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
        self.recoveries: list[WorkerRecovered] = []  # the last KEPT_RECOVERIES
        self.n_recovered = 0  # recoveries since the start
        self._lost_at: dict[str, float] = {}
        # lost worker -> the step of its rollback, and the loss, until all steps are planned again
        self.losses: dict[str, tuple[int, Loss]] = {}
        self._ticking = False
        self._stop: Callable[[], None] = lambda: None

    @property
    def given_up(self) -> ActorLost | None:
        """The error of the worker that is not restarted any more; None if there is none."""
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
        for worker in self._pool.joined():
            if worker.answered:
                self._handle(Heartbeat(worker.name, worker.incarnation), now)
            self._pool.ask_heartbeat(worker)
        self._handle(Tick(), now)

    # events of workers

    def joined(self, worker: WorkerHandle) -> None:
        """Supervise a worker from now on."""
        self._supervisor.handle(WorkerReady(worker.name, worker.incarnation), self._now())

    def retired(self, worker: WorkerHandle) -> None:
        """Stop supervising a worker that is not needed any more."""
        self._supervisor.handle(Retired(worker.name), self._now())

    def started(self, worker: WorkerHandle) -> None:
        """Record that a restarted worker is ready."""
        self._handle(WorkerReady(worker.name, worker.incarnation), self._now())

    def start_failed(self, name: str, incarnation: int, reason: str) -> None:
        died = WorkerDied(name, incarnation, reason, acked=self._actions.acked())
        self._handle(died, self._now())

    def lost(self, worker: WorkerHandle, reason: str) -> None:
        """Restart a lost worker; the rollback waits for it unless standbys cover its loaders.

        Without failover, end the job.
        """
        now, name = self._now(), worker.name
        if not self.fails_over:
            self._end_job(ActorLost(name, reason), f"{name} lost, and failover is off: {reason}")
            return
        self._lost_at.setdefault(name, now)
        living = self._pool.living()
        gone = {h: w for h, w in list(self._pool.loaders.items()) if w.lost and w.joined}
        covered = {h for h in gone if self._standby.covers(h, living)}
        for h in gone:
            if h not in covered:
                self._handle(Needed(f"loader-worker/{h}"), now)
        spare = any(w is worker and h in covered for h, w in gone.items())
        died = WorkerDied(name, worker.incarnation, reason, spare, self._actions.acked())
        commands = self._supervisor.handle(died, now)
        restarts = "; restarting it, trainers continue with prefetched steps"
        log.warning("%s lost: %s%s", name, reason, restarts if self.given_up is None else "")
        self._execute(commands)

    def missed_by_peer(self, lost: WorkerHandle, end: EndOfJob) -> None:
        """Handle the report of a worker that cannot continue without ``lost``.

        With failover ``lost`` is restarted; if it was given up, the job ends with its error.
        Without failover the job ends. Peers only detect that the connection closed, so a call of
        ``lost`` first returns the reason of its exit.
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

        If it has died, its launcher reports that. If it answers a heartbeat, it is killed, since it
        cannot receive payload. If it does not answer, the next heartbeats detect that.
        """
        c = int(name.rpartition("/")[2])
        if self._pool.addresses.get(c) != address:
            return  # another worker has replaced it
        worker = self._pool.restarted.get(name, self._pool.constructors[c])

        def answered(future: Future[Any]) -> None:
            if future.exception() is None:
                self._event_loop.post(act)

        def act() -> None:
            if not self._pool.closed and self._pool.addresses.get(c) == address:
                event = Unreachable(name, f"loader workers cannot connect to it: {reason}")
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
                case StartRollback(reason=reason):
                    self._actions.roll_back(reason)
                case StandbyReady(name=name):
                    self._actions.use_as_standby(name)
                case GiveUp(error=error):
                    self._give_up(error)

    def _give_up(self, error: ActorLost) -> None:
        """End the job: a worker is not restarted any more."""
        error = restart_limit_error(error, self._max_restarts, self._actions.duty_of(error.name))
        self._supervisor.given_up = error
        self._end_job(error, str(error))

    def _end_job(self, error: ActorLost, cause: str) -> None:
        log.error("job ended after the complete steps: %s", cause)
        self._actions.end_job(error)

    # rollbacks

    def next_generation(self) -> int:
        """Increase the generation: messages of earlier ones are ignored from now on."""
        self.generation += STRIDE
        return self.generation

    def adopted(self, worker: WorkerHandle) -> None:
        """Record that a restarted worker has replaced the lost one."""
        self._lost_at.pop(worker.name, None)

    def rolled_back(self, step: int) -> None:
        """Record the step of a rollback for all losses that it recovers."""
        for loss in self._supervisor.take_recovered():
            # a worker that was lost twice counts from its first loss
            self.losses.setdefault(loss.worker, (step, loss))

    def planned(self, step: int, floor: int) -> None:
        """Report losses as recovered once all steps below ``floor`` are planned again."""
        if not self.losses or step < floor - 1:
            return
        losses, self.losses, now = self.losses, {}, self._now()
        for rolled_back_to, loss in losses.values():
            log.warning(
                "%s %s after %.2f s: %s, no sample was lost",
                loss.worker,
                "replaced by its standbys" if loss.spare else "recovered",
                now - loss.since,
                _replanned_text(rolled_back_to + 1, floor - 1),
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
        """Return the seconds since a worker last answered; 0 if it is lost, or without failover."""
        return self._supervisor.silent_s(worker.name, self._now()) if self.fails_over else 0.0


def _replanned_text(first: int, last: int) -> str:
    if last > first:
        return f"steps {first} to {last} were planned again"
    return f"step {last} was planned again" if last == first else "no step had to be planned again"
