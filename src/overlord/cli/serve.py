"""``overlord serve``: run a job for trainers in other processes."""

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
    print_json_line,
    read_job,
    read_options,
    resume_option,
    run_guarded,
    runtime_option,
    save_option,
)


@click.command(short_help="Run a job for trainers in other processes.")
@job_argument
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="The interface to serve at; by default only this machine reaches it.",
)
@click.option(
    "--port",
    type=click.IntRange(min=0, max=65535),
    default=0,
    show_default=True,
    help="0: any free port.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A file with the token that clients must present. Default: OVERLORD_TOKEN, or a "
    "random token.",
)
@runtime_option
@address_option
@launch_option
@click.option(
    "--detach",
    is_flag=True,
    help="On a Ray cluster: return as soon as trainers can connect; the job keeps running. "
    "`overlord status` lists it, `overlord stop` ends it.",
)
@click.option(
    "--start-s",
    type=float,
    metavar="SECONDS",
    help="With --detach: kill the job if it has not started by then. Default: 180.",
)
@resume_option
@save_option
@allow_option
@import_option
@json_option
@debug_option
def serve(
    job_yaml: Path,
    host: str,
    port: int,
    token_file: Path | None,
    runtime: str,
    address: str | None,
    options: tuple[str, ...],
    detach: bool,
    start_s: float | None,
    resume: Path | None,
    save: Path | None,
    allow: tuple[str, ...],
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Run a job for trainers in other processes, which connect by address and token."""
    if detach and runtime != "ray":
        raise click.UsageError("--detach needs --runtime ray: other runtimes end with this process")
    if start_s is not None and not detach:
        raise click.UsageError(
            "--start-s needs --detach: without it this process has no start limit"
        )
    if detach and save is not None:
        raise click.UsageError(
            "--save does not work with --detach; give the job a journal (Job.journal), "
            "or save in its trainers"
        )

    def act() -> None:
        from overlord.cli.run_job import resume_from
        from overlord.cli.serve_job import ServeRequest, read_token, serve_job, submit_job

        job = read_job(job_yaml, modules)
        state = None if resume is None else resume_from(resume)
        request = ServeRequest(
            job=job,
            host=host,
            port=port,
            token=read_token(token_file),
            resume=state,
            save=save,
            allow=allow,
            runtime=runtime,
            cluster=address if runtime == "ray" else None,
            options=read_options(options),
            start_s=start_s,
        )

        def announce(address: str, token: str | None) -> None:
            if as_json:
                print_json_line({"event": "serving", "address": address, "token": token})
                return
            click.echo(f"OVERLORD_ADDRESS={address}")
            if token is not None:
                click.echo(f"OVERLORD_TOKEN={token}")

        if detach:
            submit_job(request, announce, make_console(stderr=True))
            return
        steps = serve_job(request, announce, make_console(stderr=True))
        if as_json:
            print_json_line({"event": "end", "steps": steps})

    run_guarded(act, debug)
