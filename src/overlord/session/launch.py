"""``launch``: from a job to a running session, and everything that can be wrong with how it is
asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.job import Job
from overlord.session.runtime import RUNTIMES, budgeted, keep, sized
from overlord.session.session import Session
from overlord.setup.options import Options
from overlord.setup.partition import profiled
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.removed_sources import left_behind


def launch(
    job: Job,
    runtime: str = "local",
    resume: Mapping[str, Any] | str | None = None,
    *,
    allow: tuple[str, ...] = (),
    **options: Any,
) -> Session:
    """Start a job. ``runtime``: ``"local"`` embeds it in this process, ``"process"`` hosts its
    loaders and constructors in processes of this machine, ``"ray"`` on a Ray cluster. ``resume``: a
    state to go on from; ``"auto"``: behind the last step that all ranks took, as the job's journal
    says.

    Options (none changes the stream): prefetch=4, loaders={"web": 3}, workers=, read_ahead=,
    build_ahead=, buffer_bytes=, open_bytes=, open_files=, memory="64GB" (of this machine, split
    over these), cache_dir=, stall_warn_s=30, stall_limit_s=540 (NCCL gives up after 600),
    on_stall=callback(words, seconds), progress=callback(done, total). Of the process runtime:
    sources_per_host=, hosts=, constructor_hosts=, ring_bytes=. Of trainers that
    broadcast: broadcast=True (False: every rank fetches its own). Of what is lost (process
    runtime): failover=True (False: a lost part ends the job), lost_after_s=15, max_restarts=3,
    shadows="none", "heavy" or "all". Of the Ray runtime, which has all of these too:
    address="host:port" of a cluster's head (None: a cluster of this machine, for this job),
    rank_nodes=["gpu-0", ...] by rank, sidecar=0.5 (of those nodes' idle cores and memory, for
    loaders), node_labels={"pool": "cpu"} and node_resources={"scratch": 1} (for hosts that need not
    be beside ranks), reserve=False (True: hosts for which there is no room wait for Ray to find
    it). ports="7000-7099": where hosts listen, for firewalls. Of scaling: partition="auto" (loaders
    by what sources cost; "off": by what their index says), autoscale=False (True: sources are read
    in more processes, or in fewer, as the mixture and the pace of trainers change), watch_s=2 (how
    often loaders and trainers are looked at, to read sources with slow reads further ahead and to
    name those that cannot keep up; 0: never).
    """
    if not isinstance(job, Job):
        raise JobError([f"expected a Job, got {type(job).__name__}"], "launch")
    if problems := _launch_problems(job, runtime, resume, allow):
        raise JobError(problems, "launch")
    given = Options.of(options)
    if given.address is not None and runtime != "ray":
        raise JobError([f"address: {given.address!r} is for runtime='ray'; leave it out"], "launch")
    if given.ports is not None and runtime == "local":
        raise JobError(
            [
                "ports: in one process nobody listens but session.serve, which has a "
                "port= of its own: leave it out"
            ],
            "launch",
        )
    if given.reserve is True and (runtime != "ray" or given.address is None):
        raise JobError(
            [
                "reserve: True is for runtime='ray' with the address of a cluster; one "
                "machine cannot get more: leave it out"
            ],
            "launch",
        )
    if given.shadows in ("heavy", "all") and given.failover and runtime == "local":
        raise JobError(
            [
                f"shadows: {given.shadows!r} is for runtime='process'; what is in one "
                "process is lost together"
            ],
            "launch",
        )
    if runtime == "ray" and (problems := given.problems(job)):  # before a cluster is started
        raise JobError(problems, "launch")
    let_go = keep(
        runtime, given.address
    )  # a cluster is there while files are indexed; then the session has it
    try:
        return _launched(
            job, runtime, resume, allow, budgeted(runtime, job, sized(runtime, job, given))
        )
    finally:
        let_go()


def _launched(
    job: Job,
    runtime: str,
    resume: Mapping[str, Any] | str | None,
    allow: tuple[str, ...],
    given: Options,
) -> Session:
    if runtime == "process":
        from overlord.process import forkserver  # processes: for those who ask for them

        forkserver.warm_up()  # while files are indexed
    if job.journal is not None:
        from overlord.session.resume import launch_with_journal

        return launch_with_journal(job, runtime, resume, allow, given)
    left = left_behind(resume, job.shuffle_chunks) if isinstance(resume, Mapping) else None
    blueprint = profiled(PreparedJob(job, given, left), runtime)
    if resume is None:
        return Session(job, blueprint, None, runtime)
    assert isinstance(resume, Mapping)
    blueprint = blueprint.fitting(resume)
    return Session(job, blueprint, blueprint.restore(resume, allow), runtime)


def _launch_problems(job: Job, runtime: Any, resume: Any, allow: Any) -> list[str]:
    found = []
    if runtime not in RUNTIMES:
        known = " or ".join(f"{name!r} ({where})" for name, where in RUNTIMES.items())
        found.append(f"runtime: expected {known}, got {runtime!r}")
    if isinstance(resume, str) and resume == "auto":
        if job.journal is None:
            found.append(
                "resume: 'auto' goes on from the job's journal, and it has none: name "
                "one in Job.journal, or give a state"
            )
    elif isinstance(resume, (str, PathLike)):
        found.append(_no_state(resume))
    elif resume is not None and not isinstance(resume, Mapping):
        found.append(
            f"resume: expected a state as state_dict() gives it, got {type(resume).__name__}"
        )
    if not isinstance(allow, (tuple, list)) or not all(isinstance(part, str) for part in allow):
        found.append(
            f"allow: expected a tuple of parts of the fingerprint, as in ('seed',), got {allow!r}"
        )
    return found


def _no_state(resume: str | PathLike[str]) -> str:
    """What is no file by its name, nor there, was to be the one word there is."""
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
        f"resume=json.loads(Path({name!r}).read_text()); or say 'auto'"
    )
