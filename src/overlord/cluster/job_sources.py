"""The job of a coordinator without its readers, and the workers of sources added to it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from overlord.cluster.placement import Placement
from overlord.cluster.recovery import RecoveryManager
from overlord.cluster.worker_pool import WorkerHandle, WorkerPool
from overlord.errors import ActorLost
from overlord.job.job import Job
from overlord.messages.control import SetBufferBudget
from overlord.planning.spec import SourceSpec
from overlord.rpc.actors import ActorHandle
from overlord.scaling.profile import SourceLoad
from overlord.setup.partition import loads_of
from overlord.setup.prepared_job import PreparedJob

log = logging.getLogger("overlord")


class PlannerJob(PreparedJob):
    """A prepared job for planning without reading.

    It has no files, indexes or transforms, which may be large or impossible to send.
    """

    def __init__(self, of: PreparedJob):
        self.__dict__.update(of.__dict__)
        sources = range(len(of.job.sources))
        self.specs: tuple[SourceSpec, ...] = tuple(of.source_spec(i) for i in sources)
        self.loads: tuple[SourceLoad, ...] = tuple(loads_of(of))
        self.options = replace(of.options, progress=None, on_stall=None)
        self.job, self.given = _light(of.job), _light(of.given)
        self.indexes, self.pipelines, self.orders, self._workers = [], [], [], []
        del self.handles

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
            max_tokens=source.max_tokens,
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


class JobSources:
    """The prepared job with all sources so far, and the workers that added sources need.

    Each added source has a worker of its own, since a process receives code only at its start.
    """

    def __init__(
        self,
        prepared: PreparedJob,
        pool: WorkerPool,
        placement: Placement,
        recovery: RecoveryManager,
    ):
        self.prepared = prepared
        self._pool, self._placement, self._recovery = pool, placement, recovery
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

    def adopt(
        self,
        prepared: PreparedJob,
        h: int,
        handle: Callable[[], ActorHandle],
        linked: Mapping[int, str],
    ) -> None:
        """Use worker ``h``, which another process started for the last source of a job.

        ``linked``: addresses of the constructor workers to which it is connected, by number.
        ``refuse`` undoes this.
        """
        self.prepared = prepared
        self._placement.sources_of[h] = frozenset([len(prepared.job.sources) - 1])
        if (worker := self._refused.pop(h, None)) is None:
            worker = self._pool.watch(handle(), joined=False)
            worker.linked.update(linked)
        self._pool.loaders[h] = worker
        self._pool.link(worker)  # a constructor worker may have been restarted since its start

    def refuse(self, prepared: PreparedJob, h: int) -> None:
        """Undo ``adopt`` for a source that the planner refused.

        The worker is kept, since the source may still be added at a later step.
        """
        self.prepared = prepared
        self._placement.sources_of.pop(h)
        self._refused[h] = self._pool.loaders.pop(h)
