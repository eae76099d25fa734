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
    """Owns the prepared job with all sources so far, and starts a worker for each added one.

    A process receives code only at its start. ``n_launched`` is the number of loader workers that
    the job was launched with.
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
        """Return the worker of a source that is about to be added; raise if it is lost."""
        worker = self._pool.loaders[h]
        if worker.lost:
            raise ActorLost(worker.name, worker.lost)
        return worker

    def add(self, worker: WorkerHandle, source: SourceSpec, budget_bytes: int) -> None:
        """Use a prepared worker: it reads the source that the planner has accepted."""
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
        """Forget the worker of a source that the journal could not record: the job ends."""
        worker = self._pool.loaders[h]
        worker.lost = "its source could not be added"
        self._recovery.retired(worker)

    def prepare(self, prepared: PreparedJob) -> int:
        """Start a worker for the last source of a job and return its number.

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
        """Use a worker that another process started for a new source. ``refuse`` undoes this."""
        self.prepared = prepared
        self._placement.sources_of[h] = frozenset([len(prepared.job.sources) - 1])
        if (worker := self._refused.pop(h, None)) is None:
            worker = self._pool.watch(handle(), joined=False)
        self._pool.loaders[h] = worker
        self._pool.link(worker)  # a constructor worker may have been restarted since its start

    def refuse(self, prepared: PreparedJob, h: int) -> None:
        """Set aside the worker of a refused source, which may be added at a later step."""
        self.prepared = prepared
        self._placement.sources_of.pop(h)
        self._refused[h] = self._pool.loaders.pop(h)
