"""``launch``: checks the options of a job and starts it as a session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.job import Job
from overlord.session.runtime import RUNTIMES, hold_cluster, with_memory_bounds, with_worker_counts
from overlord.session.session import Session
from overlord.setup.options import (
    GROUPED,
    MemoryLimits,
    Options,
    PlanningOptions,
    RayPlacement,
    memory_fields,
    ray_fields,
    refuse_unknown,
)
from overlord.setup.partition import profiled
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.state_json import removed_before


def launch(
    job: Job,
    runtime: str = "local",
    resume: Mapping[str, Any] | str | None = None,
    *,
    allow: tuple[str, ...] = (),
    prefetch: int = 4,
    build_ahead: int | None = None,
    read_ahead: int | None = None,
    loaders: Mapping[str, int] | None = None,
    workers: int | None = None,
    memory: MemoryLimits | int | str | None = None,
    cache_dir: str | Path | None = None,
    stall_warn_s: float = 30.0,
    stall_limit_s: float = 540.0,
    on_stall: Callable[[str, float], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
    broadcast: bool = True,
    partition: str | None = "auto",
    watch_s: float = 2.0,
    autoscale: bool | Mapping[str, Any] = False,
    sources_per_host: int | None = None,
    hosts: int | None = None,
    constructor_hosts: int | None = None,
    ports: str | None = None,
    failover: bool = True,
    lost_after_s: float = 15.0,
    max_restarts: int = 3,
    shadows: str = "none",
    ray: RayPlacement | None = None,
    check: bool = False,
    **deprecated: Any,
) -> Session:
    """Start a job and return its session. No option changes the stream.

    job: the job to run.
    runtime: "local" runs everything in threads of this process. "process" runs loaders and
        constructors in processes of this machine, "ray" on a Ray cluster.
    resume: a saved state to continue from. "auto": continue after the last step that all ranks
        took, as the journal of the job records it.
    allow: parts of the fingerprint in which a resumed state may differ from the job.

    prefetch: steps that are planned ahead of the slowest rank.
    build_ahead: steps of the prefetch window that are built. Default: all in one process, 2 in
        several.
    read_ahead: steps' worth of samples that are held ready beyond the draw. Default: 2 in one
        process, 8 in several.
    loaders: loaders per source, as in {"web": 3}; 1 for sources that are not named.
    workers: threads that read, transform and build. Default: one for each core; in one process at
        least 2 and at most 8.
    memory: memory for loading on this machine, as in "64GB" or bytes; or MemoryLimits(...).
    cache_dir: directory of indexes and profiles. Default: OVERLORD_CACHE, or the user's cache.

    stall_warn_s: seconds that a client waits for a step until the reason is logged.
    stall_limit_s: seconds that a client waits until it raises DataStall. NCCL ends a job after 600.
    on_stall: called with (reason, seconds) instead of the logged warning.
    progress: called with (files indexed, total) while files are indexed.
    broadcast: False makes every rank fetch its own steps, whatever the plan's broadcasts are.

    partition: "auto" gives loaders to sources by measured cost, "off" by their index alone.
    watch_s: seconds between polls of loaders and trainers. Sources with slow reads are read further
        ahead, and sources that cannot keep up are named. 0: never.
    autoscale: True reads a source in more or fewer processes, as the mixture and the pace of
        trainers change. A mapping sets other limits.

    For "process" and "ray":

    sources_per_host: sources that share a loader worker. Default: about 25, with fewer workers
        than cores.
    hosts: cores that loader workers may use. Default: all of this machine.
    constructor_hosts: processes that constructors share. Default: one for sixteen cores.
    ports: TCP ports at which workers listen, as in "7000-7099", for firewalls. Default: any.
    failover: False makes the loss of a worker end the job.
    lost_after_s: seconds without an answer after which a worker is killed and replaced.
    max_restarts: restarts of one worker without a step taken by all ranks in between. One more
        loss ends the job.
    shadows: loaders with a standby in another worker: "none", those of the most costly sources
        ("heavy"), or "all".
    ray: placement on a Ray cluster, as in RayPlacement(address="10.0.0.1:6379"); "ray" only.

    check: check the invariants of all components after every command. Slow; for tests.
    deprecated: older names of the fields of MemoryLimits and RayPlacement, as keywords.
    """
    if not isinstance(job, Job):
        raise JobError([f"expected a Job, got {type(job).__name__}"], "launch")
    if problems := _launch_problems(job, runtime, resume, allow):
        raise JobError(problems, "launch")
    refuse_unknown(deprecated, GROUPED)
    given = Options(
        prefetch=prefetch,
        build_ahead=build_ahead,
        read_ahead=read_ahead,
        loaders=loaders,
        workers=workers,
        cache_dir=cache_dir,
        stall_warn_s=stall_warn_s,
        stall_limit_s=stall_limit_s,
        on_stall=on_stall,
        progress=progress,
        broadcast=broadcast,
        partition=partition,
        watch_s=watch_s,
        autoscale=autoscale,
        sources_per_host=sources_per_host,
        hosts=hosts,
        constructor_hosts=constructor_hosts,
        ports=ports,
        failover=failover,
        lost_after_s=lost_after_s,
        max_restarts=max_restarts,
        shadows=shadows,
        check=check,
        **memory_fields(memory, deprecated),
        **ray_fields(ray, deprecated),
    )
    return _start(job, runtime, resume, allow, given)


def launch_planning(
    job: Job,
    resume: Mapping[str, Any] | None = None,
    allow: tuple[str, ...] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Session:
    """Start a session for its plans alone: nothing is measured, and token ids may be zeros.

    The plans are those of the job. Ids of formats that index their lengths are not read. A row
    with an id out of range, which a run quarantines, is then planned like any other. ``progress``:
    called with (files indexed, total).
    """
    return _start(job, "local", resume, allow, PlanningOptions(progress=progress))


def _start(
    job: Job,
    runtime: str,
    resume: Mapping[str, Any] | str | None,
    allow: tuple[str, ...],
    given: Options,
) -> Session:
    if problems := _runtime_problems(runtime, given):
        raise JobError(problems[:1], "launch")
    if runtime == "ray" and (problems := given.problems(job)):  # before a cluster starts
        raise JobError(problems, "launch")
    # held while files are indexed; the session holds the cluster afterwards
    release_cluster = hold_cluster(runtime, given.address)
    try:
        options = with_memory_bounds(runtime, job, with_worker_counts(runtime, job, given))
        return _session(job, runtime, resume, allow, options)
    finally:
        release_cluster()


def _runtime_problems(runtime: str, given: Options) -> list[str]:
    """Return the problems of options that this runtime does not support, as texts."""
    found = []
    if given.address is not None and runtime != "ray":
        found.append(f"address: {given.address!r} is for runtime='ray'; leave it out")
    if given.ports is not None and runtime == "local":
        found.append(
            f"ports: expected None with runtime='local', got {given.ports!r}; leave it out: only "
            "session.serve listens, which has its own port="
        )
    if given.reserve is True and (runtime != "ray" or given.address is None):
        found.append(
            "reserve: True is for runtime='ray' with the address of a cluster; one machine cannot "
            "add nodes: leave it out"
        )
    if given.shadows in ("heavy", "all") and given.failover and runtime == "local":
        found.append(
            f"shadows: {given.shadows!r} is for runtime='process'; all loaders of one process are "
            "lost together: leave it out"
        )
    return found


def _session(
    job: Job,
    runtime: str,
    resume: Mapping[str, Any] | str | None,
    allow: tuple[str, ...],
    given: Options,
) -> Session:
    if runtime == "process":
        from overlord.process import forkserver  # imported for runtimes with processes only

        forkserver.warm_up()  # while files are indexed
    if job.journal is not None:
        from overlord.session.resume import launch_with_journal

        return launch_with_journal(job, runtime, resume, allow, given)
    removed = removed_before(resume, job.shuffle_chunks) if isinstance(resume, Mapping) else None
    prepared = PreparedJob(job, given, removed, reads_datasets=runtime == "local")
    prepared = profiled(prepared, runtime)
    if resume is None:
        return Session(job, prepared, None, runtime)
    assert isinstance(resume, Mapping)
    prepared = prepared.for_saved_state(resume)
    return Session(job, prepared, prepared.restore(resume, allow), runtime)


def _launch_problems(job: Job, runtime: Any, resume: Any, allow: Any) -> list[str]:
    found = []
    if runtime not in RUNTIMES:
        known = " or ".join(f"{name!r} ({where})" for name, where in RUNTIMES.items())
        found.append(f"runtime: expected {known}, got {runtime!r}")
    if isinstance(resume, str) and resume == "auto":
        if job.journal is None:
            found.append(
                "resume: 'auto' continues from the job's journal, and it has none; set "
                "Job.journal, or pass a state"
            )
    elif isinstance(resume, (str, PathLike)):
        found.append(_not_a_state(resume))
    elif resume is not None and not isinstance(resume, Mapping):
        found.append(f"resume: expected a result of state_dict(), got {type(resume).__name__}")
    if not isinstance(allow, (tuple, list)) or not all(isinstance(part, str) for part in allow):
        found.append(
            f"allow: expected a tuple of parts of the fingerprint, as in ('seed',), got {allow!r}"
        )
    return found


def _not_a_state(resume: str | PathLike[str]) -> str:
    """Return the problem of a text in place of a state: a file name, or a misspelt ``"auto"``.

    A text without a suffix or a slash that names no file is taken for a misspelt ``"auto"``.
    """
    word = (
        isinstance(resume, str)
        and not Path(resume).suffix
        and "/" not in resume
        and not Path(resume).exists()
    )
    if isinstance(resume, str) and word:
        return (
            "resume: expected a state, or 'auto' (from the job's journal), got "
            f"{resume!r}{did_you_mean(resume.lower(), ['auto'])}"
        )
    name = str(resume)
    return (
        f"resume: expected a state, got {name!r}; read the file first: "
        f"resume=json.loads(Path({name!r}).read_text()); or pass 'auto'"
    )
