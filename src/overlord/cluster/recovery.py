"""Lost workers: which are missed, what each loss cost, and the generation of the last rollback.

``cluster/supervisor.py`` decides what is to be done; ``Coordinator.rollback`` does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from overlord.cluster.supervisor import (
    Closing,
    Command,
    Heartbeat,
    Loss,
    Needed,
    Progress,
    Retired,
    Supervisor,
    Tick,
    Unreachable,
    WorkerDied,
    WorkerReady,
    worn_out,
)
from overlord.cluster.worker_pool import WorkerHandle
from overlord.errors import ActorLost, DataStall
from overlord.messages.control import STRIDE

log = logging.getLogger("overlord")

KEPT_RECOVERIES = 1000  # rows in ``metrics()``


class RecoveryManager:
    """Follows losses and recoveries of workers. Runs on: event loop.

    ``generation`` is the generation of the last rollback. With ``fails_over`` a lost worker is
    restarted, else the job ends.
    """

    def __init__(
        self,
        *,
        lost_after_s: float,
        max_restarts: int,
        fails_over: bool,
        now: Callable[[], float],
        generation: int = 0,
    ):
        self._supervisor = Supervisor(lost_after_s=lost_after_s, max_restarts=max_restarts)
        self._max_restarts, self._now = max_restarts, now
        self.fails_over, self.generation = fails_over, generation
        self.recoveries: list[dict[str, Any]] = []
        self._lost_at: dict[str, float] = {}
        # by worker: the step that planning was rolled back to for it
        self._losses: dict[str, tuple[int, Loss]] = {}

    @property
    def given_up(self) -> ActorLost | None:
        """The error of the worker that is not restarted any more."""
        return self._supervisor.given_up

    # events of workers; each returns the supervisor's commands

    def ready(self, worker: WorkerHandle) -> list[Command]:
        return self._supervisor.handle(WorkerReady(worker.name, worker.incarnation), self._now())

    def heartbeat(self, worker: WorkerHandle) -> list[Command]:
        return self._supervisor.handle(Heartbeat(worker.name, worker.incarnation), self._now())

    def tick(self) -> list[Command]:
        return self._supervisor.handle(Tick(), self._now())

    def lost(
        self, worker: WorkerHandle, reason: str, *, spare: bool, needed: Iterable[str]
    ) -> list[Command]:
        """Note the loss of a worker.

        ``spare``: standbys have all that it read. ``needed`` are lost workers without standbys.
        """
        now, name = self._now(), worker.name
        self._lost_at.setdefault(name, now)
        for other in needed:
            self._supervisor.handle(Needed(other), now)
        died = WorkerDied(name, worker.incarnation, reason, spare)
        commands = self._supervisor.handle(died, now)
        restarts = "; restarting it, trainers continue with the steps they have"
        log.warning("%s is lost: %s%s", name, reason, restarts if self.given_up is None else "")
        return commands

    def start_failed(self, name: str, incarnation: int, reason: str) -> list[Command]:
        return self._supervisor.handle(WorkerDied(name, incarnation, reason), self._now())

    def unreachable(self, name: str, reason: str) -> list[Command]:
        """Note that other workers cannot connect to a worker that answers heartbeats."""
        event = Unreachable(name, f"others cannot reach it: {reason}")
        return self._supervisor.handle(event, self._now())

    def retired(self, worker: WorkerHandle) -> None:
        """Note that a worker is not needed any more."""
        self._supervisor.handle(Retired(worker.name), self._now())

    def acked(self, step: int) -> None:
        """Note that every rank acknowledged the steps up to this one."""
        self._supervisor.handle(Progress(step), self._now())

    def close(self) -> None:
        self._supervisor.handle(Closing(), self._now())

    def give_up(self, error: ActorLost, role: str) -> ActorLost:
        """Return the error of a worker that is not restarted any more; ``role`` says its duty."""
        self._supervisor.given_up = worn_out(error, self._max_restarts, role)
        return self._supervisor.given_up

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
        for loss in self._supervisor.back():
            # a worker that was lost again meanwhile is missed since the first time
            self._losses.setdefault(loss.part, (step, loss))

    def planned(self, step: int, floor: int) -> None:
        """Report losses as recovered once all steps before ``floor`` are planned again."""
        if not self._losses or step < floor - 1:
            return
        losses, self._losses, now = self._losses, {}, self._now()
        for rolled_back_to, loss in losses.values():
            log.warning(
                "%s %s after %.2f s: %s, nothing was lost",
                loss.part,
                "replaced by its standbys" if loss.spare else "recovered",
                now - loss.since,
                _planned_again(rolled_back_to + 1, floor - 1),
            )
            row = {
                "part": loss.part,
                "reason": loss.reason,
                "seconds": now - loss.since,
                "step": rolled_back_to,
                "stand_bys": loss.spare,
            }
            self.recoveries.append(row)
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
