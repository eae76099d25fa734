"""The configuration of a coordinator process: the job without its readers.

The process receives user code only with this configuration: strategy, hooks, mixture, and what
``register_cost``, ``register_balance`` and ``register_schedule`` have registered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from overlord.cluster.job_sources import PlannerJob
from overlord.concurrency.platform import Platform
from overlord.messages.control import StreamState
from overlord.planning.registrations import Registrations
from overlord.planning.schedule.by_stage import job_schedule
from overlord.process.code import sendable
from overlord.scaling.loader_placement import LoaderPlacement
from overlord.setup.prepared_job import PreparedJob


@dataclass(frozen=True, slots=True, eq=False)
class Incarnation:
    """The position of a coordinator among those of its session.

    ``number`` counts the earlier coordinators. ``planned`` has the digests of steps that they
    planned after the state at which this one starts.
    """

    number: int = 0
    planned: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoordinatorConfig:
    """The configuration that the process of a coordinator receives at its start.

    ``living`` are the names of living workers, which the coordinator takes over.
    """

    prepared: PlannerJob
    registered: Registrations
    state: StreamState | None
    loader_placement: LoaderPlacement
    token: str
    session: int  # generation of the session
    incarnation: int = 0  # number of earlier coordinators of this session
    reason: str = ""  # why the coordinator before it was lost
    constructor_of: tuple[int, ...] = ()  # constructor worker of every data-parallel group
    living: tuple[str, ...] = ()
    # the sources that each loader worker can open
    sources_of: tuple[tuple[int, tuple[int, ...]], ...] = ()
    attached: tuple[int, ...] = ()
    machine: Platform = field(default_factory=Platform, repr=False)
    launch: str = ""  # identifies the launch in the journal; set when the journal is opened
    # the journal has the start of this session; else it is empty or of an earlier session
    opened: bool = True
    watched: bool = False  # report planned and taken steps, for clients in other processes

    def placement_of(self, n: int) -> LoaderPlacement:
        """Return the loader placement, extended to ``n`` sources.

        A coordinator may have been lost after it added the last source, and before the launching
        process recorded that.
        """
        loader_placement = self.loader_placement
        # the lowest number counts: workers that scaling started have higher numbers
        worker_of = {sources: h for h, sources in sorted(self.sources_of, reverse=True)}
        for i in range(len(loader_placement.loaders), n):
            loaders = self.prepared.specs[i].loaders
            loader_placement = replace(
                loader_placement,
                loaders=(*loader_placement.loaders, loaders),
                host_of=(*loader_placement.host_of, *[worker_of[(i,)]] * loaders),
                n_hosts=loader_placement.n_hosts + 1,
            )
        return loader_placement

    @staticmethod
    def of(prepared: PreparedJob, **fields: Any) -> CoordinatorConfig:
        """Return the configuration for a job.

        Raise ``JobError`` if user code cannot be sent to another process.
        """
        light, registered = PlannerJob(prepared), Registrations.here()
        sendable(light.job.hooks, "hooks")
        sendable(light.strategy, "strategy")
        sendable(job_schedule(light.job), "mixture")
        for kind, entries in registered.by_function().items():
            sendable(entries, kind)
        sendable(light, f"job {light.job.name!r}")
        return CoordinatorConfig(prepared=light, registered=registered, **fields)
