"""From a job made ready to its partition: the one place that says how many loaders a source has and
which host they live in.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from overlord.job.hooks import LOADER, of_kind
from overlord.planning.schedule.base import Base
from overlord.process import cgroup
from overlord.scaling.levels import CLUSTER
from overlord.scaling.loader_placement import LoaderPlacement, SourceLoad, plan_hosts
from overlord.scaling.partition import Limits, Partition, Resources, partition
from overlord.scaling.profile import JobProfile, SourceProfile
from overlord.scaling.shards import widened
from overlord.setup.options import Options, n_cores, n_workers
from overlord.setup.prepared_job import READ_AHEAD, PreparedJob
from overlord.setup.profile_store import known, path_of, quick, save
from overlord.setup.source_loads import load_of, row_tokens

log = logging.getLogger("overlord")

# What is beside loading, on one core: a constructor builds a hundred million tokens a second, a
# planner with its messages takes this for
# a sample of a step of two thousand, and a sample costs about this to be handed over where nobody
# has measured it.
BUILD_S, PLAN_S, TRANSFER_S = 1e-8, 3e-6, 1e-6
# of work in a step: below it, threads of one process gain nothing by a second loader (see INLINE_S)
WORTH_S = 0.005
MEMORY = (
    0.8  # of the machine's, for loader hosts: what is predicted to need more gets fewer of them
)


def weights_of(blueprint: PreparedJob) -> list[float]:
    """The mixture as it begins. Schedules of this package are asked for step 0; of others only the
    sources' weights are known.
    """
    job = blueprint.job
    said: Any = job.mixture
    if isinstance(said, Base) and callable(said):
        said = copy.deepcopy(said)(0, {})
    if isinstance(said, Mapping):
        return [float(said.get(s.name, 0.0)) for s in job.sources]
    return [float(s.weight) for s in job.sources]


def loads_of(blueprint: PreparedJob) -> list[SourceLoad]:
    """What reading each source takes for every sample that the mixture draws: as measured, else as
    its index says. A blueprint without indexes has been told.

    Transforms in worker processes hold no lock of a host. Where a job is scaled, the loaders of a
    source share one worker per host, which does one batch at a time: there such a source needs
    processes as one that holds the lock does.
    """
    if (told := getattr(blueprint, "loads", None)) is not None:
        return list(told)
    job, shares, found = blueprint.job, shares_of(blueprint), list[SourceLoad]()
    how = {"shuffle_chunks": job.shuffle_chunks, "slice_rows": job.slice_rows}
    guesses = [
        load_of(s, p, i, 1.0, **how)
        for s, p, i in zip(job.sources, blueprint.pipelines, blueprint.indexes, strict=True)
    ]
    off = _off(blueprint, guesses)
    for i, (guess, share) in enumerate(zip(guesses, shares, strict=True)):
        p = _profile(blueprint, i)
        seconds = p.cost_s if p is not None else guess.cost * off.get(_kind(blueprint, i), 1.0)
        load = replace(guess, share=share, cost=share * seconds)
        if blueprint.processes_of(i):
            load = replace(load, free_s=0.0 if scales(blueprint) else math.inf)
        found.append(
            load if p is None else replace(load, memory=p.memory or load.memory, state=p.file_bytes)
        )
    return found


def _off(blueprint: PreparedJob, guesses: Sequence[SourceLoad]) -> dict[tuple[str, ...], float]:
    """How far guesses are off, by kind of source: a measured one beside a guessed one of its kind
    must not look dearer than it is.
    """
    ratios: dict[tuple[str, ...], list[float]] = {}
    for i, guess in enumerate(guesses):
        if (p := _profile(blueprint, i)) is not None and guess.cost and p.cost_s:
            ratios.setdefault(_kind(blueprint, i), []).append(p.cost_s / guess.cost)
    return {kind: median(found) for kind, found in ratios.items()}


def _kind(blueprint: PreparedJob, i: int) -> tuple[str, ...]:
    return tuple(t.kind for t in blueprint.pipelines[i].transforms)


def shares_of(blueprint: PreparedJob) -> list[float]:
    """Of the samples that are drawn. Where a batch counts tokens, sources of long samples are drawn
    from less often.
    """
    weights = weights_of(blueprint)
    if blueprint.job.batch.tokens is not None:
        weights = [w / max(1.0, t) for w, t in zip(weights, tokens_of(blueprint), strict=True)]
    total = sum(weights) or 1.0
    return [w / total for w in weights]


def tokens_of(blueprint: PreparedJob) -> list[float]:
    """Tokens of a sample by source: as measured, else a guess."""
    found = []
    for i, index in enumerate(blueprint.indexes):
        p = _profile(blueprint, i)
        guess = min(float(blueprint.job.batch.context), row_tokens(index))
        found.append(p.tokens if p is not None and p.tokens else guess)
    return found


def _profile(blueprint: PreparedJob, i: int) -> SourceProfile | None:
    return (
        None if blueprint.profile is None else blueprint.profile.sources.get(blueprint.job.names[i])
    )


def sample_tokens(blueprint: PreparedJob) -> float:
    """Tokens of a drawn sample, on average."""
    return sum(s * t for s, t in zip(shares_of(blueprint), tokens_of(blueprint), strict=True))


def batch_samples(blueprint: PreparedJob) -> int:
    """Samples of a step."""
    batch = blueprint.job.batch
    return (
        batch.samples
        if batch.samples is not None
        else max(1, round((batch.tokens or 1) / max(1.0, sample_tokens(blueprint))))
    )


def beside_s(blueprint: PreparedJob) -> float:
    """Seconds of constructors, planner and hand-over for every drawn sample."""
    moved = 0.0
    for i, share in enumerate(shares_of(blueprint)):
        p = _profile(blueprint, i)
        moved += share * (p.transfer_s if p is not None and p.transfer_s else TRANSFER_S)
    return moved + PLAN_S + BUILD_S * sample_tokens(blueprint)


def partition_of(
    blueprint: PreparedJob,
    *,
    cores: int | None = None,
    memory_bytes: int | None = None,
    per_source: int | None = None,
    per_actor: int | None = None,
    worth_s: float = 0.0,
    cluster: int = CLUSTER,
) -> Partition:
    """A job's partition; ``hosts=`` of its launch says how many cores are for loading alone."""
    options, job = blueprint.options, blueprint.job
    alone = cores is None and options.hosts is not None
    return partition(
        loads_of(blueprint),
        Resources(
            cores=cores or options.hosts or n_cores(),
            memory_bytes=memory_bytes,
            beside_s=0.0 if alone else beside_s(blueprint),
        ),
        Limits(
            batch=batch_samples(blueprint),
            per_source=per_source,
            per_actor=per_actor,
            loaders=dict(options.loaders or {}),
            sources_per_host=options.sources_per_host,
            together=bool(of_kind(job.hooks, LOADER)),
            worth_s=worth_s,
            cluster=cluster,
        ),
    )


def hosting_of(blueprint: PreparedJob) -> LoaderPlacement:
    """Loaders and loader hosts of a job; where it is scaled, with as many loaders as its sources
    could ever use.
    """
    options = blueprint.options
    hosting = _partitioned(blueprint) if options.partition == "auto" else _guessed(blueprint)
    if not scales(blueprint):
        return hosting
    named, cores = options.loaders or {}, _cores_to_come(options)
    shares = [1 if load.name in named else min(load.shares, cores) for load in loads_of(blueprint)]
    loaders, host_of = widened(hosting.loaders, hosting.host_of, shares)
    return replace(hosting, loaders=loaders, host_of=host_of)


def _cores_to_come(options: Options) -> int:
    """Loader hosts that a scaled job may have in the end: a cluster may get more cores than it has
    now.
    """
    said = options.autoscale.get("cores", 1) if isinstance(options.autoscale, Mapping) else 1
    return max(options.hosts or n_cores(), said)


def _guessed(blueprint: PreparedJob) -> LoaderPlacement:
    options = blueprint.options
    return plan_hosts(
        loads_of(blueprint),
        cores=options.hosts or n_cores(),
        sources_per_host=options.sources_per_host,
        loaders=options.loaders,
        together=bool(of_kind(blueprint.job.hooks, LOADER)),
    )


def _partitioned(blueprint: PreparedJob) -> LoaderPlacement:
    made = partition_of(
        blueprint, memory_bytes=None if blueprint.options.address is not None else machine_memory()
    )
    if not made.fits:
        log.warning(
            "job %r: %s; it runs with the fewest hosts", blueprint.job.name, made.shortfall(0.0)
        )
    return made.hosting


def machine_memory() -> int:
    """Of this machine, or of the group that the job runs in, what loader hosts may take."""
    return int(MEMORY * cgroup.memory_bytes())


def profiled(blueprint: PreparedJob, runtime: str) -> PreparedJob:
    """A job made ready, with what is known of its sources; in one process, where hosts do not
    matter, with its loaders.
    """
    if blueprint.options.partition == "auto":
        blueprint.profile = known(blueprint)
        loads = loads_of(blueprint)
        if _matters(loads, batch_samples(blueprint), blueprint.options):
            found = quick(blueprint, loads, blueprint.profile)
            if found != blueprint.profile:
                save(path_of(blueprint.given, blueprint.options.cache_dir), found)
            blueprint.profile = found
    if runtime != "local" or (
        blueprint.options.partition != "auto" and not blueprint.options.autoscale
    ):
        return blueprint
    loaders = _loaders_here(blueprint)
    return blueprint if set(loaders) == {1} else blueprint.with_loaders(loaders, READ_AHEAD)


def _loaders_here(blueprint: PreparedJob) -> list[int]:
    """Loaders of each source where all are in one process. Its threads take whatever there is to
    do, so scaling is that a source which may become heavy has as many loaders as there are threads;
    a worker process for each of them would cost memory all the time, though.
    """
    options, threads = blueprint.options, n_workers(blueprint.options)
    loaders = [blueprint.loaders_of(i) for i in range(len(blueprint.job.sources))]
    if options.partition == "auto":
        loaders = list(partition_of(blueprint, cores=threads, worth_s=WORTH_S).hosting.loaders)
    if not options.autoscale:
        return loaders
    fixed = [
        blueprint.kit(i).processes or name in (options.loaders or {})
        for i, name in enumerate(blueprint.job.names)
    ]
    return [
        n if stays else max(n, min(load.shares, threads))
        for n, stays, load in zip(loaders, fixed, loads_of(blueprint), strict=True)
    ]


def joining(blueprint: PreparedJob, runtime: str) -> PreparedJob:
    """A blueprint whose last source is about to join, with what that costs, and as many loaders for
    it as that takes.
    """
    name, made = blueprint.job.names[-1], copy.copy(blueprint)
    others = {n: k for n, k in (blueprint.options.loaders or {}).items() if n != name}
    made.options = options = replace(blueprint.options, loaders=others)
    if options.partition == "auto":
        found, have = known(made), blueprint.profile or JobProfile()
        have = replace(
            found if not have.sources else have, sources={**found.sources, **have.sources}
        )
        made.profile, loads = have, loads_of(made)
        if _matters(loads[-1:], batch_samples(made), options):
            made.profile = quick(made, loads, have, only={name})
    n = _loaders_here(made)[-1] if runtime == "local" else _loaders_apart(made)
    made.options = replace(options, loaders={**others, name: n})
    return made


def _loaders_apart(blueprint: PreparedJob) -> int:
    """Of the last source, where it gets a host of its own, or more of them later."""
    n = partition_of(blueprint).hosting.loaders[-1] if blueprint.options.partition == "auto" else 1
    return (
        max(n, min(loads_of(blueprint)[-1].shares, _cores_to_come(blueprint.options)))
        if scales(blueprint)
        else n
    )


def _matters(loads: Sequence[SourceLoad], samples: int, options: Options) -> bool:
    """Whether it is worth a look how dear sources are: not where a step is nothing, or one core
    does it all.
    """
    return (options.hosts or n_cores()) > 1 and samples * sum(
        load.cost for load in loads
    ) >= WORTH_S


def scales(blueprint: PreparedJob) -> bool:
    """Whether sources get more processes, and fewer, as the mixture and the pace of trainers
    change. A loader hook is shown all that a step takes from a source, so there its loaders stay
    together; without failover nothing is kept that a loader could be moved with.
    """
    options = blueprint.options
    return bool(options.autoscale) and options.failover and not of_kind(blueprint.job.hooks, LOADER)
