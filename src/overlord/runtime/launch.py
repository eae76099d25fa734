"""``launch``: from a job to a running session, and everything that can be wrong with how it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from overlord.errors import JobError
from overlord.job import Job
from overlord.runtime.bootstrap import Blueprint
from overlord.runtime.later import RUNTIMES
from overlord.runtime.options import Options
from overlord.runtime.session import Session


def launch(
    job: Job, runtime: str = "local", resume: Mapping[str, Any] | None = None, *, allow: tuple[str, ...] = (), **options: Any
) -> Session:
    """Start a job. ``runtime``: ``"local"`` embeds it in this process. ``resume``: a state to go on from.

    Options (none changes the stream): prefetch=4, loaders={"web": 3}, workers=, read_ahead=2, buffer_bytes=, open_bytes=,
    open_files=, cache_dir=, stall_warn_s=30, stall_limit_s=600, progress=callback(done, total). Others are still to come:
    partition, autoscale, shadows, constructors, sources_per_host.
    """
    if not isinstance(job, Job):
        raise JobError([f"wanted a Job, found {type(job).__name__}"], "launch")
    if problems := _launch_problems(runtime, resume, allow):
        raise JobError(problems, "launch")
    blueprint = Blueprint(job, Options.of(options))
    if resume is None:
        return Session(job, blueprint, None)
    blueprint = blueprint.fitting(resume)
    state = blueprint.restore(resume, allow)
    return Session(job, blueprint, state)


def _launch_problems(runtime: Any, resume: Any, allow: Any) -> list[str]:
    found = []
    if runtime in RUNTIMES:
        found.append(f"runtime: {runtime!r} is not available in this version; 'local' is")
    elif runtime != "local":
        found.append(f"runtime: wanted 'local', found {runtime!r}")
    if resume == "auto":
        found.append("resume: 'auto' needs a journal, which is not available in this version; give a state that state_dict() gave")
    elif isinstance(resume, (str, PathLike)):
        found.append(
            f"resume: wanted a state, found {str(resume)!r}; read the file first: resume=json.loads(Path({str(resume)!r}).read_text())"
        )
    elif resume is not None and not isinstance(resume, Mapping):
        found.append(f"resume: wanted a state as state_dict() gives it, found {type(resume).__name__}")
    if not isinstance(allow, (tuple, list)) or not all(isinstance(part, str) for part in allow):
        found.append(f"allow: wanted a tuple of parts of the fingerprint, as in ('seed',), found {allow!r}")
    return found
