"""``overlord run``: run a job in this process and print what it delivers."""

from __future__ import annotations

from pathlib import Path

import click

from overlord.cli.common import (
    address_option,
    allow_option,
    debug_option,
    import_option,
    job_argument,
    json_option,
    launch_option,
    make_console,
    read_job,
    read_options,
    resume_option,
    run_guarded,
    runtime_option,
    save_option,
)


@click.command()
@job_argument
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Stop after this many steps; without it, at the end of the data.",
)
@click.option(
    "--rank", type=click.IntRange(min=0), help="Only this rank; without it, all ranks of the job."
)
@resume_option
@save_option
@allow_option
@click.option(
    "--digest", is_flag=True, help="Print a digest of the bytes of every step, to compare two runs."
)
@runtime_option
@address_option
@launch_option
@import_option
@json_option
@debug_option
def run(
    job_yaml: Path,
    steps: int | None,
    rank: int | None,
    resume: Path | None,
    save: Path | None,
    allow: tuple[str, ...],
    digest: bool,
    runtime: str,
    address: str | None,
    options: tuple[str, ...],
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Run a job in this process and print what it delivers."""

    def act() -> None:
        from overlord.cli.run_job import RunRequest, resume_from, run_job

        job = read_job(job_yaml, modules)
        state = None if resume is None else resume_from(resume)
        request = RunRequest(
            job=job,
            steps=steps,
            rank=rank,
            resume=state,
            save=save,
            allow=allow,
            digest=digest,
            runtime=runtime,
            as_json=as_json,
            options=read_options(options) | ({"address": address} if runtime == "ray" else {}),
        )
        run_job(request, make_console(), make_console(stderr=True))

    run_guarded(act, debug)
