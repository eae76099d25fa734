"""Estimates of one job at several cluster sizes; ``cli/simulate_report.py`` prints them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from overlord.dryrun.constants import Measured, load_or_measure
from overlord.dryrun.machines import (
    ClusterShape,
    Constants,
    Links,
    MemoryEstimate,
    colocated_memory,
    connecting_s,
    connections,
    overlord_memory,
)
from overlord.dryrun.run import BUSY, THREADS, DryRun, DryRunResult
from overlord.errors import JobError
from overlord.hashing import digest
from overlord.job.job import Job
from overlord.mesh import ClientPlaceTree
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from overlord.sources.index import default_cache_dir

# steps that are run, and the number of first steps that fill the prefetch window and do not count
STEPS, WARM = 9, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRunRequest:
    """The arguments of dry runs of one job, one for each cluster size of ``gpus``."""

    gpus: Sequence[int]
    tp: int = 1
    cp: int = 1
    pp: int = 1
    gpus_per_node: int = 8
    batch: int | None = None  # samples per step; None: the job's number per data-parallel group
    workers: int = 4  # workers of a colocated loader, per rank
    hosts: int | None = None  # loader workers, at least; None: as many as reading needs
    sources_per_host: int = 25
    pace_s: float = 1.0  # seconds that trainers compute per step
    constructors: Sequence[bool] = (True, False)
    broadcast: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The estimate for one cluster size, with or without constructors."""

    fleet: ClusterShape
    overlord: MemoryEstimate
    colocated: MemoryEstimate
    colocated_tp: MemoryEstimate  # if one rank of a tensor-parallel group loads for all
    links: Links
    connecting_s: float
    ran: DryRunResult
    pace_s: float = 1.0  # step time of the trainers

    @property
    def times_less(self) -> float:
        """The memory of a colocated loader divided by that of Overlord."""
        return self.colocated.total / self.overlord.total

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        roles = {role: n / self.fleet.nodes for role, n in self.overlord.by_role.items()}
        memory = {
            "overlord_per_node": self.overlord.per_node,
            "by_role_per_node": roles,
            "colocated_per_node": self.colocated.per_node,
            "colocated_first_of_tp_per_node": self.colocated_tp.per_node,
            "times_less": self.times_less,
            "times_less_first_of_tp": self.colocated_tp.total / self.overlord.total,
        }
        ran = self.ran
        return {
            **asdict(self.fleet),
            "dp": self.fleet.dp,
            "nodes": self.fleet.nodes,
            "memory": memory,
            "links": asdict(self.links),
            "connecting_s": self.connecting_s,
            "loader_hosts": ran.loader_hosts,
            "constructor_hosts": self.fleet.constructor_hosts,
            "planner": {
                "plan_s": ran.median("plan_s"),
                "cut_s": ran.median("route_s"),
                "measured": True,
            },
            "fetch_s": ran.median("latency_s"),
            "fetch_worst_s": ran.most("latency_s"),
            "waited_s": ran.median("waited_s"),
            "payload_bytes": ran.median("nbytes"),
            "planner_busy_s": ran.planner_s,
            "slowest_source": ran.source,
            "slowest_source_s": ran.source_s,
            "waits_for": ran.wait_reason(self.pace_s),
        }


Progress = Callable[[str, int, int], None]


def constants_of(
    prepared: PreparedJob, *, again: bool, progress: Progress
) -> tuple[Measured, Path]:
    """Return the constants of this machine for a job's files, and the file that stores them.

    ``again``: measure them even if they are stored.
    """
    # The name of the file depends on the sources, their weights and the context. Means over sources
    # follow the weights, and the context bounds a sample. Batch size and mesh do not matter.
    files = (f"{i.source} {i.nbytes} {len(i.chunks)} {len(i.files)}" for i in prepared.indexes)
    job = prepared.job
    sources = (f"{source.name} {source.weight}" for source in job.sources)
    lengths = f"context {job.document_limit}, on_long {job.on_long}"
    key = digest(
        *files, *sources, lengths, *(pipeline.fingerprint for pipeline in prepared.pipelines)
    )
    stored = Path(prepared.options.cache_dir or default_cache_dir()) / f"fleet-{key[:24]}.json"
    return load_or_measure(prepared, stored, again=again, progress=progress), stored


def check_request(job: Job, request: DryRunRequest) -> None:
    """Raise ``JobError`` if the job or the request is invalid at one of the sizes."""
    for gpus in request.gpus:
        fleet = _shape(job, request, gpus)
        try:
            replace(
                job,
                place=ClientPlaceTree(pp=fleet.pp, dp=fleet.dp, cp=fleet.cp, tp=fleet.tp),
                journal=None,
            )
        except JobError as fault:
            mesh = f"simulate, {gpus} GPUs with cp {fleet.cp}, pp {fleet.pp}, tp {fleet.tp}"
            raise JobError(fault.problems, mesh) from fault


def fleet_of(
    job: Job, request: DryRunRequest, gpus: int, constants: Constants, constructors: bool
) -> ClusterShape:
    """Return the shape of a cluster of ``gpus``: ranks, batch and loader workers.

    ``request.hosts`` sets the workers; else they are as many as reading at trainers' pace needs.
    """
    made = replace(_shape(job, request, gpus), constructors=constructors)
    samples = request.batch or max(1, round(_samples(job, constants) * made.dp / job.place.dp))
    hosts = request.hosts or max(
        1, math.ceil(samples * constants.read_s / request.pace_s / THREADS / BUSY)
    )
    return replace(made, batch=samples, hosts=hosts)


def _shape(job: Job, request: DryRunRequest, gpus: int) -> ClusterShape:
    try:
        return ClusterShape(
            gpus=gpus,
            tp=request.tp,
            cp=request.cp,
            pp=request.pp,
            gpus_per_node=request.gpus_per_node,
            sources=len(job.sources),
            workers=request.workers,
            sources_per_host=request.sources_per_host,
            broadcast=request.broadcast,
        )
    except ValueError as problem:
        raise JobError([str(problem)], "simulate") from None


def _samples(job: Job, constants: Constants) -> float:
    batch = job.batches.largest
    if batch.samples and not batch.in_chunks:
        return float(batch.samples)
    return (batch.tokens_of_chunks or batch.tokens or 0) / constants.sample_tokens


def job_at_size(job: Job, fleet: ClusterShape, constants: Constants) -> Job:
    """Return the job with the mesh and batch size of a cluster, without journal and end.

    All its steps are as the largest one of its stages and ramps.
    """
    job = uniform(job)
    place = ClientPlaceTree(pp=fleet.pp, dp=fleet.dp, cp=fleet.cp, tp=fleet.tp)
    tokens = int(fleet.batch * constants.sample_tokens)
    if job.batch.in_chunks:
        chunks = max(1, tokens // job.batch.context)
        batch = replace(job.batch, samples=chunks, tokens=None)
    elif job.batch.samples:
        batch = replace(job.batch, samples=fleet.batch)
    else:
        batch = replace(job.batch, tokens=tokens)
    return replace(job, place=place, batch=batch, journal=None, until="all")


def uniform(job: Job) -> Job:
    """Return a job without stages and ramps, whose steps all have the largest size."""
    if not job.stages:
        return replace(job, batch=job.batches.largest)
    number = job.batches.largest_number
    stage, batch = job.stages[number], job.batches.parts[number].most
    limit = None if job.hybrid or batch.in_chunks else min(job.document_limit, batch.context)
    return replace(
        job,
        stages=(),
        batch=batch,
        mixture=job.mixture if stage.mixture is None else stage.mixture,
        max_document=job.max_document if limit is None else limit,
    )


def estimate_sizes(
    job: Job,
    request: DryRunRequest,
    *,
    again: bool = False,
    progress: Progress = lambda what, done, of: None,
    clock: Callable[[], float] = time.thread_time,
    cache_dir: Path | None = None,
) -> tuple[Measured, Path, list[Cell]]:
    """Return the constants, the file that stores them, and the estimate for every size.

    ``again``: measure the constants even if they are stored. ``clock`` times the planner. Raise
    ``JobError`` for an invalid request, before anything is measured.
    """
    check_request(job, request)
    # The sources repeat, since a large cluster would finish a small corpus at once.
    endless = tuple(replace(source, epochs=None, max_tokens=None) for source in job.sources)
    prepared = PreparedJob(
        uniform(replace(job, journal=None, sources=endless, evaluation=False)),
        Options(cache_dir=cache_dir, progress=lambda done, of: progress("indexed files", done, of)),
    )
    try:
        found, stored = constants_of(prepared, again=again, progress=progress)
        cells = []
        for gpus in request.gpus:
            for constructors in request.constructors:
                fleet = fleet_of(job, request, gpus, found.constants, constructors)
                cells.append(_cell(prepared, fleet, found, request.pace_s, clock, progress))
        return found, stored, cells
    finally:
        prepared.close()


def _cell(
    prepared: PreparedJob,
    fleet: ClusterShape,
    found: Measured,
    pace_s: float,
    clock: Callable[[], float],
    progress: Progress,
) -> Cell:
    job = job_at_size(prepared.job, fleet, found.constants)
    made = prepared.placed(job.place)
    made.given, made.job = replace(made.given, batch=job.batch), replace(made.job, batch=job.batch)
    what = f"{fleet.gpus} GPUs{'' if fleet.constructors else ' without constructors'}"
    run = DryRun(made, found.probes, fleet, found.constants, pace_s=pace_s, clock=clock)
    progress(what, 0, STEPS)
    ran = run.run(STEPS, WARM, lambda step: progress(what, step + 1, STEPS))
    fleet = replace(fleet, hosts=ran.loader_hosts)
    return Cell(
        fleet=fleet,
        overlord=overlord_memory(fleet, found.constants),
        colocated=colocated_memory(fleet, found.constants),
        colocated_tp=colocated_memory(fleet, found.constants, first_of_tp=True),
        links=connections(fleet),
        connecting_s=connecting_s(fleet, found.constants),
        ran=ran,
        pace_s=pace_s,
    )
