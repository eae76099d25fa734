"""Where the clients of a job get their steps: the addresses of constructor workers."""

from __future__ import annotations

from overlord.client.local_queue import LaunchedStepQueue
from overlord.client.remote_queue import RemoteStepQueue
from overlord.cluster.placement import Placement
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.worker_pool import WorkerHandle, WorkerPool
from overlord.errors import ActorLost

TAKEN_S = 2.0  # for a constructor worker to answer the last step that a rank took


class ClientEndpoints:
    """Addresses and step queues of ranks. Runs on: any thread.

    ``session`` is the generation of the session, ``prefetch`` the steps that a client holds.
    """

    def __init__(
        self,
        pool: WorkerPool,
        placement: Placement,
        recovery: RecoveryManager,
        *,
        session: int,
        prefetch: int,
    ):
        self._pool, self._placement, self._recovery = pool, placement, recovery
        self._session, self._prefetch = session, prefetch
        self._queues: list[RemoteStepQueue] = []  # of clients in this process

    def constructor(self, rank: int) -> WorkerHandle:
        """Return the constructor worker of a rank."""
        return self._pool.constructors[self._placement.constructor(rank)]

    def address(self, rank: int) -> tuple[str, str]:
        """Return the address and the token for a client of this process."""
        worker = self.constructor(rank)
        if worker.lost:
            raise self._recovery.error_of(worker)
        return self._pool.address_of(self._placement.constructor(rank))

    def listen(self, interface: str, token: str) -> None:
        """Accept clients of other processes at this interface, if they present the token."""
        fails_over, every = self._recovery.fails_over, self._pool.constructors
        workers = {c: w for c, w in every.items() if not (w.lost and fails_over)}
        self._pool.listen(interface, token, workers)

    def outside(self, rank: int) -> tuple[str, str]:
        """Return the address for a client of another process, which has the token."""
        self.address(rank)
        found = self._pool.outside_of(self._placement.constructor(rank))
        if found is None:
            raise self._recovery.error_of(self.constructor(rank))
        return found, ""

    def taken(self, rank: int) -> int | None:
        """Return the last step that a client took. Runs on: any thread but the event loop.

        Its constructor worker reports steps only when the slowest rank has moved on, so it is
        asked. None: it is being replaced, and the step is not known. ``DataStall``: no answer.
        """
        worker = self.constructor(rank)
        if worker.lost:
            return None
        try:
            return int(self._pool.get(self._pool.call(worker, "taken", rank), TAKEN_S))
        except ActorLost:
            return None

    def queue(self, rank: int, next_step: int) -> LaunchedStepQueue:
        """Return the step queue of a client in this process."""
        return LaunchedStepQueue(
            rank,
            lambda: self.address(rank),
            next_step=next_step,
            generation=self._session,
            prefetch=self._prefetch,
            siblings=self._queues,
        )
