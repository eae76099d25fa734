"""The sources of a running job, and the workers that are started for added sources."""

from __future__ import annotations

import logging
from collections.abc import Callable

from overlord.cluster.placement import Placement
from overlord.cluster.rebalance import FIRST_SCALED
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.worker_factory import MULTI_WORKER_READ_AHEAD
from overlord.cluster.worker_pool import START_S, WorkerHandle, WorkerPool
from overlord.errors import ActorLost
from overlord.messages.control import Cursor, SetBufferBudget
from overlord.planning.spec import SourceSpec
from overlord.rpc.actors import ActorHandle
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


class JobSources:
    """The prepared job with all sources so far, and the workers that added sources need.

    Each added source has a worker of its own, since a process receives code only at its start.
    ``n_launched`` is the number of loader workers that the job was launched with.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        pool: WorkerPool,
        placement: Placement,
        recovery: RecoveryManager,
        n_launched: int,
    ):
        self.prepared = prepared
        self._pool, self._placement, self._recovery = pool, placement, recovery
        self._n_launched = n_launched
        self._refused: dict[int, WorkerHandle] = {}  # workers of sources that could not be added

    def ready(self, h: int) -> WorkerHandle:
        """Return the worker of a source that is about to be added; raise ``ActorLost`` if lost."""
        worker = self._pool.loaders[h]
        if worker.lost:
            raise ActorLost(worker.name, worker.lost)
        return worker

    def add(self, worker: WorkerHandle, source: SourceSpec, budget_bytes: int) -> None:
        """Let a prepared worker read its source, which the planner has accepted.

        ``budget_bytes`` is the new buffer budget of every loader.
        """
        worker.joined = True
        self._pool.link(worker)  # a constructor worker may have been restarted since its start
        self._recovery.joined(worker)
        self._placement.add_source(source.loaders, worker.number)
        self._pool.broadcast(SetBufferBudget(budget_bytes))
        if self.prepared.options.shadows == "all":
            log.warning(
                "source %r has no standby: no worker other than its own can open it", source.name
            )

    def abandon(self, h: int) -> None:
        """Mark a worker as lost: the journal could not record its source, and the job ends."""
        worker = self._pool.loaders[h]
        worker.lost = "its source could not be added"
        self._recovery.retired(worker)

    def prepare(self, prepared: PreparedJob) -> int:
        """Start a worker for the last source of a job, wait for it, and return its number.

        Runs on: any thread.
        """
        # A number is never reused: a worker that was dropped counts as lost.
        known = [h for h in self._placement.sources_of if h < FIRST_SCALED]
        i, h = len(prepared.job.sources) - 1, max([self._n_launched - 1, *known]) + 1
        loaders = (*self._placement.loaders, prepared.loaders_of(i))
        before, self.prepared = (
            self.prepared,
            prepared.with_loaders(loaders, MULTI_WORKER_READ_AHEAD),
        )
        try:
            starts = self.prepared.loader_starts(i, Cursor())
            worker = self._pool.start_loader(h, [i], starts, joined=False)
            self._pool.get(self._pool.call(worker, "do", []), START_S)
        except BaseException:
            self.prepared = before
            self.drop(h)
            raise
        return h

    def drop(self, h: int) -> None:
        """End the worker of a source that is not added. Runs on: any thread."""
        if (worker := self._pool.loaders.pop(h, None)) is not None:
            worker.lost = "not needed"
            self._pool.end(h, worker)

    def adopt(self, prepared: PreparedJob, h: int, handle: Callable[[], ActorHandle]) -> None:
        """Use worker ``h``, which another process started for the last source of a job.

        ``refuse`` undoes this.
        """
        self.prepared = prepared
        self._placement.sources_of[h] = frozenset([len(prepared.job.sources) - 1])
        if (worker := self._refused.pop(h, None)) is None:
            worker = self._pool.watch(handle(), joined=False)
        self._pool.loaders[h] = worker
        self._pool.link(worker)  # a constructor worker may have been restarted since its start

    def refuse(self, prepared: PreparedJob, h: int) -> None:
        """Undo ``adopt`` for a source that the planner refused.

        The worker is kept, since the source may still be added at a later step.
        """
        self.prepared = prepared
        self._placement.sources_of.pop(h)
        self._refused[h] = self._pool.loaders.pop(h)
