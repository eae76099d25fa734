"""The partition of a prepared job: the loaders of each source, and the worker of each loader.

A load is measured, or estimated from the index. With the launch option ``partition="off"`` all
loads are estimated; the same function then places the loaders.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from overlord.job.hooks import LOADER
from overlord.planning.schedule.base import Base
from overlord.planning.schedule.by_stage import job_schedule
from overlord.process import resources
from overlord.scaling.loader_placement import LoaderPlacement, with_shards
from overlord.scaling.partition import CLUSTER, Partition, PartitionLimits, Resources, partition
from overlord.scaling.profile import JobProfile, SourceLoad, SourceProfile
from overlord.setup.options import Options, n_cores, n_workers
from overlord.setup.prepared_job import READ_AHEAD, PreparedJob
from overlord.setup.profile_store import known, path_of, quick, save

if TYPE_CHECKING:
    from overlord.job.job import Source
    from overlord.sources.index import Index
    from overlord.transforms.pipeline import Pipeline

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# Estimated load of a source: seconds and bytes of a row, from its index and transforms.

# CPU seconds. Tokenizing costs a hundred times as much as reading, so rough values are enough.
READ_S = 4e-9  # per byte in memory of a columnar file
PARSE_S = 2e-8  # per byte of text lines or tar members, decompressed
TOKENIZE_S = 4e-7  # per byte of text: 2.45 MB in a CPU second
CODE_S = 2e-5  # per row, for each transform with user code
# Cheaper rows never need a second process: one process delivers ten thousand a second.
HEAVY_ROW_S = 1e-4
ROW_BYTES = 2048  # bytes of a row, if the number of rows is unknown
COLUMNAR = ("parquet", "arrow", "megatron", "mds")  # formats whose rows are arrays
OWN_CODE = ("dataset", "factory")  # formats whose rows come from Python objects of the user
HANDLES = 3 * 2**20  # bytes of an open source without its rows: footers, handles, codecs


def load_of(
    source: Source,
    pipeline: Pipeline,
    index: Index,
    share: float,
    *,
    shuffle_chunks: int = 8,
    slice_rows: int = 256,
) -> SourceLoad:
    """Return a source's load, estimated from its index alone.

    The estimate assumes that all rows are alike and that all bytes of tokenized rows are text. It
    assumes a compression ratio of three, and rows of 2 kB if only reading can count the rows. A
    window has one slice of each chunk of a group, and loaders own whole chunks. So a source needs
    at most as many loaders as a group has chunks.
    """
    held, row_bytes = _held(index)
    read_s, encode_s, code_s = _row_seconds(pipeline, index)
    open_chunks = min(shuffle_chunks if source.shuffle else 1, len(index.chunks))
    rows_of_code = index.format in OWN_CODE
    window = open_chunks * slice_rows * row_bytes
    return SourceLoad(
        name=source.name,
        share=share,
        cost=share * (read_s + encode_s + code_s),
        memory=int(HANDLES + min(2 * window, held or 2 * window)),
        max_loaders=max(1, open_chunks),
        shares=max(1, open_chunks) if _may_be_heavy(pipeline, index) else 1,
        free_s=encode_s + (0.0 if rows_of_code else read_s) if code_s or rows_of_code else math.inf,
    )


def _row_seconds(pipeline: Pipeline, index: Index) -> tuple[float, float, float]:
    """Return the estimated CPU seconds of a row: reading, tokenizing, and code of the user."""
    row_bytes, transforms = _held(index)[1], pipeline.transforms
    return (
        row_bytes * (READ_S if index.format in COLUMNAR else PARSE_S),
        row_bytes * TOKENIZE_S * sum(t.kind == "tokenize" for t in transforms),
        CODE_S * sum(t.user_code for t in transforms),
    )


def _may_be_heavy(pipeline: Pipeline, index: Index) -> bool:
    """Return whether a second process may be worth its start for a source."""
    return sum(_row_seconds(pipeline, index)) >= HEAVY_ROW_S or any(
        t.user_code or t.kind == "tokenize" for t in pipeline.transforms
    )


def _held(index: Index) -> tuple[int, float]:
    """Return the estimated bytes of a source in memory, and those of one row."""
    held = max(index.nbytes, int(index.chunks.nbytes.clip(0).sum()))
    if any(f.path.endswith((".gz", ".zst")) for f in index.files):
        held = 3 * index.nbytes
    return held, held / index.rows if index.rows and held else ROW_BYTES


def row_tokens(index: Index) -> float:
    """Return the estimated tokens of a row: four bytes each, of text and of ids alike."""
    return max(1.0, _held(index)[1] / 4)


# CPU seconds of the work after loading.
BUILD_S = 1e-8  # per token: a constructor builds a hundred million tokens a second
PLAN_S = 3e-6  # per sample, for steps of two thousand: the planner with its messages
TRANSFER_S = 1e-6  # per sample from loader to constructor, if it is not measured
# Seconds of loading in a step, below which a second loader in the same process gains nothing.
WORTH_S = 0.005
# Fraction of the machine's memory for loader workers; it bounds their number.
MEMORY = 0.8


# ----------------------------------------------------------------------------
# The partition: weights and loads of sources, then their loaders and workers.


def weights_of(prepared: PreparedJob) -> list[float]:
    """Return the weights of the sources at step 0.

    A schedule of this package is called for step 0. For other schedules the weights of the sources
    are used.
    """
    job = prepared.job
    mixture: Any = job_schedule(job)
    if isinstance(mixture, Base) and callable(mixture):
        mixture = copy.deepcopy(mixture)(0, {})
    if isinstance(mixture, Mapping):
        return [float(mixture.get(s.name, 0.0)) for s in job.sources]
    return [float(s.weight) for s in job.sources]


def loads_of(prepared: PreparedJob) -> list[SourceLoad]:
    """Return the load of each source, with its cost for each sample that the mixture draws.

    Costs are measured, or else estimated from the index. A job without indexes holds its loads.
    Transforms in worker processes do not hold the interpreter lock of a loader worker. In a job
    that is scaled, the loaders of a source on one loader worker share one transform process. It
    handles one batch at a time, so the source needs more processes, as if it held the lock.
    """
    if (loads := getattr(prepared, "loads", None)) is not None:
        return list(loads)
    job, shares, found = prepared.job, shares_of(prepared), list[SourceLoad]()
    how = {"shuffle_chunks": job.shuffle_chunks, "slice_rows": job.slice_rows}
    estimates = [
        load_of(s, p, i, 1.0, **how)
        for s, p, i in zip(job.sources, prepared.pipelines, prepared.indexes, strict=True)
    ]
    corrections = _corrections(prepared, estimates)
    for i, (estimate, share) in enumerate(zip(estimates, shares, strict=True)):
        p, correction = _profile(prepared, i), corrections.get(_kind(prepared, i), 1.0)
        seconds = p.cost_s if p is not None else estimate.cost * correction
        load = replace(estimate, share=share, cost=share * seconds)
        if prepared.processes_of(i):
            load = replace(load, free_s=0.0 if scales(prepared) else math.inf)
        found.append(
            load if p is None else replace(load, memory=p.memory or load.memory, state=p.file_bytes)
        )
    return found


def _corrections(
    prepared: PreparedJob, estimates: Sequence[SourceLoad]
) -> dict[tuple[str, ...], float]:
    """Return the median ratio of measured to estimated cost, by kind of source.

    It makes measured and estimated sources of one kind comparable.
    """
    ratios: dict[tuple[str, ...], list[float]] = {}
    for i, estimate in enumerate(estimates):
        if (p := _profile(prepared, i)) is not None and estimate.cost and p.cost_s:
            ratios.setdefault(_kind(prepared, i), []).append(p.cost_s / estimate.cost)
    return {kind: median(found) for kind, found in ratios.items()}


def _kind(prepared: PreparedJob, i: int) -> tuple[str, ...]:
    return tuple(t.kind for t in prepared.pipelines[i].transforms)


def shares_of(prepared: PreparedJob) -> list[float]:
    """Return the share of each source in the drawn samples.

    If a batch counts tokens, sources with long samples are drawn from less often.
    """
    weights = weights_of(prepared)
    if prepared.job.batch.mixes_tokens:
        weights = [w / max(1.0, t) for w, t in zip(weights, tokens_of(prepared), strict=True)]
    total = sum(weights) or 1.0
    return [w / total for w in weights]


def tokens_of(prepared: PreparedJob) -> list[float]:
    """Return the mean tokens of a sample for each source, measured or else estimated."""
    found = []
    for i, index in enumerate(prepared.indexes):
        p = _profile(prepared, i)
        estimate = min(float(prepared.job.document_limit), row_tokens(index))
        found.append(p.tokens if p is not None and p.tokens else estimate)
    return found


def _profile(prepared: PreparedJob, i: int) -> SourceProfile | None:
    known = prepared.profile
    return None if known is None else known.sources.get(prepared.job.sources[i].name)


def sample_tokens(prepared: PreparedJob) -> float:
    """Return the mean number of tokens of a drawn sample."""
    return sum(s * t for s, t in zip(shares_of(prepared), tokens_of(prepared), strict=True))


def batch_samples(prepared: PreparedJob) -> int:
    """Return the number of samples in a step, at most over all stages."""
    batch = prepared.job.batches.largest
    if batch.samples is not None and not batch.in_chunks:
        return int(batch.samples)
    tokens = batch.tokens_of_chunks or batch.tokens or 1
    return max(1, round(tokens / max(1.0, sample_tokens(prepared))))


def other_work_s(prepared: PreparedJob) -> float:
    """Return the CPU seconds per drawn sample of transfer, planner and constructors."""
    moved = 0.0
    for i, share in enumerate(shares_of(prepared)):
        p = _profile(prepared, i)
        moved += share * (p.transfer_s if p is not None and p.transfer_s else TRANSFER_S)
    return moved + PLAN_S + BUILD_S * sample_tokens(prepared)


def partition_of(
    prepared: PreparedJob,
    *,
    cores: int | None = None,
    memory_bytes: int | None = None,
    per_source: int | None = None,
    per_actor: int | None = None,
    worth_s: float = 0.0,
    cluster: int = CLUSTER,
) -> Partition:
    """Return the partition of a job.

    ``cores``: by default those of the launch option ``hosts=``, which are for loading alone, else
    all cores of this machine. The other arguments are described in ``scaling/partition.py``.
    """
    options, job = prepared.options, prepared.job
    alone = cores is None and options.hosts is not None
    return partition(
        loads_of(prepared),
        Resources(
            cores=cores or options.hosts or n_cores(),
            memory_bytes=memory_bytes,
            beside_s=0.0 if alone else other_work_s(prepared),
        ),
        PartitionLimits(
            batch=batch_samples(prepared),
            per_source=per_source,
            per_actor=per_actor,
            loaders=dict(options.loaders or {}),
            sources_per_host=options.sources_per_host,
            together=bool(job.hooks_of(LOADER)),
            worth_s=worth_s,
            cluster=cluster,
        ),
    )


def loader_placement_of(prepared: PreparedJob) -> LoaderPlacement:
    """Return the loaders of a job and their workers.

    In a job that is scaled, every source has as many loaders as it can ever use.
    """
    options = prepared.options
    made = partition_of(
        prepared, memory_bytes=None if options.address is not None else machine_memory()
    )
    if not made.fits:
        log.warning(
            "job %r does not fit into memory, and runs with the fewest workers: %s",
            prepared.job.name,
            made.shortfall(0.0),
        )
    hosting = made.hosting
    if not scales(prepared):
        return hosting
    named, cores = options.loaders or {}, _most_cores(options)
    shares = [1 if load.name in named else min(load.shares, cores) for load in loads_of(prepared)]
    loaders, host_of = with_shards(hosting.loaders, hosting.host_of, shares)
    return replace(hosting, loaders=loaders, host_of=host_of)


def _most_cores(options: Options) -> int:
    """Return the most CPU cores that a scaled job may use: a cluster may grow."""
    limit = options.autoscale.get("cores", 1) if isinstance(options.autoscale, Mapping) else 1
    return max(options.hosts or n_cores(), limit)


def machine_memory() -> int:
    """Return the bytes of this machine, or of the job's cgroup, that loader workers may use."""
    return int(MEMORY * resources.memory_bytes())


def profiled(prepared: PreparedJob, runtime: str) -> PreparedJob:
    """Return the job with the profiles of its sources: saved ones, or measured now if worth it.

    ``prepared`` gets them too. For the local runtime the numbers of loaders are set as well.
    """
    if prepared.options.partition == "auto":
        prepared.profile = known(prepared)
        loads = loads_of(prepared)
        if _worth_measuring(loads, batch_samples(prepared), prepared.options):
            found = quick(prepared, loads, prepared.profile)
            if found != prepared.profile:
                save(path_of(prepared.given, prepared.options.cache_dir), found)
            prepared.profile = found
    if runtime != "local":
        return prepared
    loaders = _local_loaders(prepared)
    return prepared if set(loaders) == {1} else prepared.with_loaders(loaders, READ_AHEAD)


def _local_loaders(prepared: PreparedJob) -> list[int]:
    """Return the number of loaders of each source in the local runtime.

    All threads serve all loaders. In a job that is scaled, a source that may become heavy gets as
    many loaders as there are threads. A source with transform processes does not: each loader would
    hold the memory of one process.
    """
    options, threads = prepared.options, n_workers(prepared.options)
    loaders = list(partition_of(prepared, cores=threads, worth_s=WORTH_S).hosting.loaders)
    if not options.autoscale:
        return loaders
    fixed = [
        prepared.reader_spec(i).processes or name in (options.loaders or {})
        for i, name in enumerate(prepared.job.names)
    ]
    return [
        n if stays else max(n, min(load.shares, threads))
        for n, stays, load in zip(loaders, fixed, loads_of(prepared), strict=True)
    ]


def with_new_loaders(prepared: PreparedJob, runtime: str) -> PreparedJob:
    """Return a copy of a job with the profile and the number of loaders of its last source.

    The source is to be added to a running job. If its rows are too cheap for a second process, it
    has one loader, and nothing is measured.
    """
    name, made = prepared.job.names[-1], copy.copy(prepared)
    others = {n: k for n, k in (prepared.options.loaders or {}).items() if n != name}
    made.options = options = replace(prepared.options, loaders=others)
    if runtime != "local" and not _may_be_heavy(made.pipelines[-1], made.indexes[-1]):
        made.options = replace(options, loaders={**others, name: 1})
        return made
    if options.partition == "auto":
        found, have = known(made), prepared.profile or JobProfile()
        have = replace(
            found if not have.sources else have, sources={**found.sources, **have.sources}
        )
        made.profile, loads = have, loads_of(made)
        if _worth_measuring(loads[-1:], batch_samples(made), options):
            made.profile = quick(made, loads, have, only={name})
    n = _local_loaders(made)[-1] if runtime == "local" else _cluster_loaders(made)
    made.options = replace(options, loaders={**others, name: n})
    return made


def _cluster_loaders(prepared: PreparedJob) -> int:
    """Return the number of loaders of the last source, which gets its own workers."""
    n = partition_of(prepared).hosting.loaders[-1]
    return (
        max(n, min(loads_of(prepared)[-1].shares, _most_cores(prepared.options)))
        if scales(prepared)
        else n
    )


def _worth_measuring(loads: Sequence[SourceLoad], samples: int, options: Options) -> bool:
    """Return whether to measure sources: not for cheap steps, and not with one CPU core."""
    return (options.hosts or n_cores()) > 1 and samples * sum(
        load.cost for load in loads
    ) >= WORTH_S


def scales(prepared: PreparedJob) -> bool:
    """Return whether the autoscaler may change the workers of sources.

    A loader hook receives all samples that a step takes from a source, so its loaders stay
    together. Without failover there is no replay buffer, which a move of a loader needs.
    """
    options = prepared.options
    return bool(options.autoscale) and options.failover and not prepared.job.hooks_of(LOADER)
