"""The configuration of a coordinator in its own process: the job without its readers.

The process receives user code (strategy, hooks, mixture) only with this configuration.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from overlord.cluster.plan_router import ReportBarrier
from overlord.concurrency.platform import Platform
from overlord.constructor.images import PixelForm
from overlord.job.job import Job
from overlord.messages.control import Report, StreamState
from overlord.planning.schedule.by_stage import job_schedule
from overlord.planning.spec import SourceSpec
from overlord.process.forkserver import sendable
from overlord.scaling.loader_placement import LoaderPlacement, SourceLoad
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob


class PlannerJob(PreparedJob):
    """A prepared job for planning without reading.

    It has no files, indexes or transforms, which may be large or impossible to send.
    """

    def __init__(self, of: PreparedJob):
        self.__dict__.update(of.__dict__)
        sources = range(len(of.job.sources))
        self.specs: tuple[SourceSpec, ...] = tuple(of.source_spec(i) for i in sources)
        self.form: PixelForm | None = of.images
        self.loads: tuple[SourceLoad, ...] = tuple(loads_of(of))
        self.options = replace(of.options, progress=None, on_stall=None)
        self.job, self.given = _light(of.job), _light(of.given)
        self.indexes, self.pipelines, self.orders, self._workers = [], [], [], []
        del self.handles

    @property
    def images(self) -> PixelForm | None:
        return self.form

    def source_spec(self, i: int) -> SourceSpec:
        return replace(self.specs[i], loaders=self.loaders_of(i))

    def joined_by(self, source: SourceSpec, fingerprint: dict[str, str]) -> PlannerJob:
        """Return a copy of this job with one more source, of which it has only the spec."""
        more = copy.copy(self)
        more.specs, more.added, more.fingerprint = (
            (*self.specs, source),
            (*self.added, source.name),
            fingerprint,
        )
        stand_in = _with(
            self.job.sources[0],
            name=source.name,
            weight=source.weight,
            epochs=source.epochs,
            max_bad=source.max_bad,
        )
        more.job = _with(self.job, sources=(*self.job.sources, stand_in))
        more.given = _with(self.given, sources=more.job.sources)
        more.options = replace(
            self.options, loaders={**(self.options.loaders or {}), source.name: source.loaders}
        )
        return more

    def first(self, n: int, fingerprint: Mapping[str, str]) -> PlannerJob:
        """Return this job with only its first ``n`` sources, which are those of the journal.

        A later source was being added when the last coordinator was lost.
        """
        if n == len(self.specs):
            return self
        less = copy.copy(self)
        less.fingerprint = dict(fingerprint)
        less.specs, less.added = (
            self.specs[:n],
            tuple(name for name in self.added if name in {s.name for s in self.specs[:n]}),
        )
        less.loads = self.loads[:n]
        less.job, less.given = (
            _with(job, sources=job.sources[:n]) for job in (self.job, self.given)
        )
        return less

    def close(self) -> None:
        """Do nothing: no file is open."""


def _light(job: Job) -> Job:
    return _with(
        job, sources=tuple(_with(s, uri="", transforms=(), deferred=()) for s in job.sources)
    )


def _with(record: Any, **fields: Any) -> Any:
    """Return a copy of a frozen record with some fields replaced, without validation."""
    other = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


@dataclass(frozen=True, slots=True, eq=False)
class Incarnation:
    """The position of a coordinator among those of its session.

    ``number`` counts the earlier coordinators. ``planned`` has the digests of steps that they
    planned after the state at which this one starts. ``barrier`` holds acknowledgements until
    earlier reports have arrived.
    """

    number: int = 0
    planned: Mapping[int, str] = field(default_factory=dict)
    barrier: ReportBarrier = field(default_factory=ReportBarrier)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoordinatorConfig:
    """The configuration that the process of a coordinator receives at its start.

    ``living`` are the names of living workers, which the coordinator takes over.
    """

    prepared: PlannerJob
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
    # reports that the coordinator before it accepted; the last ones may not be in the journal
    reports: tuple[Report, ...] = ()
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

        Raise ``JobError`` if hooks, strategy or mixture cannot be sent to another process.
        """
        light = PlannerJob(prepared)
        sendable(light.job.hooks, "hooks")
        sendable(light.strategy, "strategy")
        sendable(job_schedule(light.job), "mixture")
        return CoordinatorConfig(prepared=light, **fields)
