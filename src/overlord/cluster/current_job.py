"""The job that a coordinator runs, as its objects read it, and the objects that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from overlord.cluster.placement import Placement
from overlord.cluster.plan_router import ImageContext, PlanRouter
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.standby import StandbyManager, standby_sizes
from overlord.cluster.worker_pool import WorkerPool
from overlord.job.hooks import CONSTRUCTOR, LOADER, of_kind
from overlord.planning.planner import Planner
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


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
