"""The configuration of a coordinator in its own process: the job without its readers.

Code is sent to the process here, and only here.
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
        """Return this job with one more source, of which only planning facts are known."""
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
        """Return the job with its first ``n`` sources, those that the journal has.

        Later ones were being added when a coordinator was lost.
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
    """Return a frozen record with other fields, not validated: fields were removed."""
    other = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


@dataclass(frozen=True, slots=True, eq=False)
class Incarnation:
    """The place of a coordinator among those of its session.

    ``number`` counts the coordinators before it, ``planned`` has the digests of the steps that they
    planned after its state. ``barrier`` holds acknowledgements until reports have arrived.
    """

    number: int = 0
    planned: Mapping[int, str] = field(default_factory=dict)
    barrier: ReportBarrier = field(default_factory=ReportBarrier)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoordinatorConfig:
    """All that the process of a coordinator is given at its start.

    ``living`` are the names of workers that live already: the coordinator takes them over.
    """

    prepared: PlannerJob
    state: StreamState | None
    loader_placement: LoaderPlacement
    token: str
    session: int  # generation of the session
    incarnation: int = 0  # number of coordinators of this session before it
    reason: str = ""  # of the loss of the one before it
    constructor_of: tuple[int, ...] = ()  # constructor worker of every data-parallel group
    living: tuple[str, ...] = ()
    sources_of: tuple[
        tuple[int, tuple[int, ...]], ...
    ] = ()  # sources that each loader worker can open
    attached: tuple[int, ...] = ()
    # accepted by the coordinator before it, which may have died before it wrote the last of them
    reports: tuple[Report, ...] = ()
    machine: Platform = field(default_factory=Platform, repr=False)
    launch: str = ""  # of the journal; known when the journal is opened
    # the journal has the start of this session; else its content is of an earlier session
    opened: bool = True
    watched: bool = False  # planned and taken steps are reported, for clients that are served

    def placement_of(self, n: int) -> LoaderPlacement:
        """Return the placement of ``n`` sources.

        The last source may have been added when a coordinator was lost, before the launching
        process was informed.
        """
        loader_placement = self.loader_placement
        # workers of the launch win: those that scaling started have higher numbers
        host_of = {sources: h for h, sources in sorted(self.sources_of, reverse=True)}
        for i in range(len(loader_placement.loaders), n):
            loaders = self.prepared.specs[i].loaders
            loader_placement = replace(
                loader_placement,
                loaders=(*loader_placement.loaders, loaders),
                host_of=(*loader_placement.host_of, *[host_of[(i,)]] * loaders),
                n_hosts=loader_placement.n_hosts + 1,
            )
        return loader_placement

    @staticmethod
    def of(prepared: PreparedJob, **fields: Any) -> CoordinatorConfig:
        """Return a configuration; an error names what cannot be sent."""
        light = PlannerJob(prepared)
        sendable(light.job.hooks, "hooks")
        sendable(light.strategy, "strategy")
        sendable(light.job.mixture, "mixture")
        return CoordinatorConfig(prepared=light, **fields)
