"""What a planner in a process of its own is started with: the job without what reads it. Code
crosses here, and only here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from overlord.concurrency.platform import Platform
from overlord.constructor.images import PixelForm
from overlord.job.job import Job
from overlord.messages.control import Report, StreamState
from overlord.planning.spec import SourceSpec
from overlord.process.pickle_check import sendable
from overlord.scaling.loader_placement import LoaderPlacement, SourceLoad
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob


class PlannerJob(PreparedJob):
    """A blueprint that can be planned from and not read from: no files, indexes or transforms,
    which may be large, or not to be sent.
    """

    specs: tuple[SourceSpec, ...]
    loads: tuple[SourceLoad, ...]
    form: PixelForm | None

    def __init__(self, of: PreparedJob):
        self.__dict__.update(of.__dict__)
        self.specs, self.form = (
            tuple(of._source_spec(i) for i in range(len(of.job.sources))),
            of.images,
        )
        self.loads = tuple(loads_of(of))
        self.options = replace(of.options, progress=None, on_stall=None)
        self.job, self.given = _light(of.job), _light(of.given)
        self.indexes, self.pipelines, self.orders, self._workers = [], [], [], []
        del self.handles

    @property
    def images(self) -> PixelForm | None:
        return self.form

    def _source_spec(self, i: int) -> SourceSpec:
        return replace(self.specs[i], loaders=self.loaders_of(i))

    def joined_by(self, source: SourceSpec, fingerprint: dict[str, str]) -> PlannerJob:
        """One source more, of which only what a planner must know has come."""
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
        """Without sources that were to join when a planner was lost, and had not: as the journal
        knows it.
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
        """It holds nothing open."""


def _light(job: Job) -> Job:
    return _with(
        job, sources=tuple(_with(s, uri="", transforms=(), deferred=()) for s in job.sources)
    )


def _with(record: Any, **fields: Any) -> Any:
    """A frozen record with other fields, not checked again: what was left out would be missed."""
    other = copy.copy(record)
    for name, value in fields.items():
        object.__setattr__(other, name, value)
    return other


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CoordinatorConfig:
    """All that a planner's process is told when it starts. ``living``: hosts that are there
    already, by name; then it takes them over.
    """

    blueprint: PlannerJob
    state: StreamState | None
    hosting: LoaderPlacement
    token: str
    session: int  # its generation
    incarnation: int = 0  # how many planners of this session were before it
    reason: str = ""  # of what the one before it died
    constructor_of: tuple[int, ...] = ()  # constructor host of every data-parallel group
    living: tuple[str, ...] = ()
    kits: tuple[
        tuple[int, tuple[int, ...]], ...
    ] = ()  # sources that loader hosts of joined sources can open
    attached: tuple[int, ...] = ()
    reports: tuple[
        Report, ...
    ] = ()  # that the one before it had accepted: the last may have died with it
    machine: Platform = field(default_factory=Platform, repr=False)  # where it comes to
    launch: str = ""  # as its journal knows it; known when the journal is opened
    # the journal says where this session begins; else what it says is of the session before it
    opened: bool = True
    watched: bool = False  # stages and taken steps are told, for clients that are served

    def hosting_of(self, n: int) -> LoaderPlacement:
        """Of so many sources: the last may have joined when a planner was lost, and then the
        launching process was not told.
        """
        hosting, host_of = (
            self.hosting,
            {sources: h for h, sources in sorted(self.kits, reverse=True)},
        )  # scaled ones have higher numbers
        for i in range(len(hosting.loaders), n):
            loaders = self.blueprint.specs[i].loaders
            hosting = replace(
                hosting,
                loaders=(*hosting.loaders, loaders),
                host_of=(*hosting.host_of, *[host_of[(i,)]] * loaders),
                n_hosts=hosting.n_hosts + 1,
            )
        return hosting

    @staticmethod
    def of(blueprint: PreparedJob, **fields: Any) -> CoordinatorConfig:
        """What cannot be sent is told by name."""
        light = PlannerJob(blueprint)
        sendable(light.job.hooks, "hooks")
        sendable(light.strategy, "strategy")
        sendable(light.job.mixture, "mixture")
        return CoordinatorConfig(blueprint=light, **fields)


def host_numbers(names: Sequence[str], kind: str) -> list[int]:
    """Of the hosts of a kind, as in "loader-host/3"."""
    return sorted(int(name.rpartition("/")[2]) for name in names if name.startswith(f"{kind}/"))
