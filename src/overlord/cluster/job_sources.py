"""The sources of a job as they are added, and the workers that are started for new ones."""

from __future__ import annotations

from collections.abc import Callable

from overlord.cluster.placement import Placement
from overlord.cluster.rebalance import SCALED
from overlord.cluster.worker_factory import SIDE_BY_SIDE
from overlord.cluster.worker_pool import START_S, WorkerHandle, WorkerPool
from overlord.messages.control import Cursor
from overlord.rpc.actors import ActorHandle
from overlord.setup.prepared_job import PreparedJob


class JobSources:
    """Owns the prepared job with all sources so far. Code is sent only when a process starts.

    ``n_launched`` is the number of loader workers that the job was launched with.
    """

    def __init__(
        self, prepared: PreparedJob, pool: WorkerPool, placement: Placement, n_launched: int
    ):
        self.prepared = prepared
        self._pool, self._placement, self._n_launched = pool, placement, n_launched
        self._refused: dict[int, WorkerHandle] = {}  # workers of sources that could not be added

    def prepare(self, prepared: PreparedJob) -> int:
        """Start a worker for the last source of a job and return its number.

        Runs on: any thread.
        """
        # A number is used once: a worker that was dropped counts as lost.
        known = [h for h in self._placement.sources_of if h < SCALED]
        i, h = len(prepared.job.sources) - 1, max([self._n_launched - 1, *known]) + 1
        loaders = (*self._placement.loaders, prepared.loaders_of(i))
        before, self.prepared = self.prepared, prepared.with_loaders(loaders, SIDE_BY_SIDE)
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
        """Keep a worker aside whose source the planner refused; it may be added at a later step."""
        self.prepared = prepared
        self._placement.sources_of.pop(h)
        self._refused[h] = self._pool.loaders.pop(h)
