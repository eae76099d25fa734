"""The job that a coordinator runs now: its planner and workers, and how its loaders start."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlord.cluster.placement import AttachedRanks, Placement, StandbyManager, standby_sizes
from overlord.cluster.plan_router import ImageContext, PlanRouter
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.worker_pool import WorkerHandle, WorkerPool
from overlord.job.hooks import CONSTRUCTOR, LOADER
from overlord.messages.control import (
    Attach,
    Cursor,
    FollowLoader,
    LoaderStart,
    Rollback,
    StreamState,
)
from overlord.planning.planner import Planner
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


class LoaderStarts:
    """The builder of ``LoaderStart`` messages; ``prepared`` returns the current job."""

    def __init__(self, prepared: Callable[[], PreparedJob], placement: Placement):
        self._prepared, self._placement = prepared, placement

    def at(self, state: StreamState) -> list[LoaderStart]:
        """Return the starts of all loaders at a state."""
        prepared = self._prepared()
        cursors = [Cursor(*c) for c in state.cursors.tolist()]
        return [o for i, cursor in enumerate(cursors) for o in prepared.loader_starts(i, cursor)]

    def of(self, loader: int, cursor: Cursor, generation: int) -> LoaderStart:
        """Return the start of one loader at a cursor."""
        source = self._placement.source_of(loader)
        starts = self._prepared().loader_starts(source, cursor)
        start = starts[loader - self._placement.loaders_of(source).start]
        return replace(start, generation=generation)

    def follow(self, loader: int, planner: Planner) -> list[Any]:
        """Return the messages for a standby that follows a loader from the next planned step on."""
        cursor, generation, refill = planner.loader_position(loader)
        return [FollowLoader(self.of(loader, cursor, generation)), refill]


class CurrentJob:
    """The current job and planner; an added source replaces the job, a rollback the planner."""

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
    """The workers of a job: their handles, placement, standbys and recovery."""

    pool: WorkerPool
    placement: Placement
    standby: StandbyManager
    recovery: RecoveryManager


def router_of(prepared: PreparedJob, placement: Placement) -> PlanRouter:
    """Return the router of a job; hooks and images decide which rows a worker receives."""
    job, images = prepared.job, None
    if prepared.images is not None:
        groups = list(job.place.buckets("DP"))
        images = ImageContext(job.batches, prepared.options.broadcast, groups)
    return PlanRouter(
        placement,
        whole_plans=bool(job.hooks_of(CONSTRUCTOR)),
        loader_hooks=bool(job.hooks_of(LOADER)),
        images=images,
    )


def standbys_of(
    prepared: PreparedJob, loader_placement: LoaderPlacement, placement: Placement
) -> StandbyManager:
    """Return the manager of the standbys that the launch option ``shadows`` requests."""
    kind = prepared.options.shadows
    if kind != "none" and loader_placement.n_hosts == 1:
        log.warning(
            "shadows=%r ignored: a standby needs a second loader worker, and the job has only one",
            kind,
        )
    return StandbyManager(
        placement, *standby_sizes(kind, loads_of(prepared), loader_placement.loaders)
    )


def rollback_messages(
    workers: JobWorkers,
    ranks: AttachedRanks,
    rollback: Rollback,
    starts: Sequence[LoaderStart],
    restarted: Collection[str],
) -> Iterator[tuple[WorkerHandle, Rollback | Attach | FollowLoader]]:
    """Yield the messages of a rollback, each with its worker.

    Loader workers open their loaders at ``starts``. Constructor workers named in ``restarted``
    attach their ranks. Standbys follow their loaders from ``starts`` on.
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
