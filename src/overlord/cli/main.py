"""The command line. Heavy things are imported by the command that needs them, so that ``overlord
--help`` is quick.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NoReturn

import click

from overlord import __version__
from overlord.cli.common import (
    FAILED,
    STOPPED,
    TERMINATED,
    allowing,
    debug,
    error,
    guarded,
    imports,
    job_file,
    launching,
    note,
    read_job,
    read_options,
    resuming,
    saving,
    screen,
    where,
)
from overlord.cli.jobs import cluster_address, status, stop
from overlord.cli.journal_drill import drill, journal
from overlord.cli.profile import partition, profile
from overlord.cli.simulate import simulate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="overlord")
def cli() -> None:
    """Overlord: one plan, one stream, every rank."""


cli.add_command(drill)
cli.add_command(journal)
cli.add_command(partition)
cli.add_command(profile)
cli.add_command(simulate)
cli.add_command(status)
cli.add_command(stop)


@cli.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("overlord-demo"),
    show_default=True,
    help="Where corpus and report go.",
)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True)
@click.option(
    "--ranks",
    type=click.IntRange(min=1, max=64),
    default=4,
    show_default=True,
    help="Data-parallel ranks.",
)
@click.option(
    "--rows",
    type=click.IntRange(min=8),
    default=10_000,
    show_default=True,
    help="Rows of a source, at most.",
)
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True)
@where
@debug
def demo(
    out: Path, steps: int, ranks: int, rows: int, seed: int, runtime: str, debug: bool
) -> None:
    """Make a corpus, run a job, write a report."""

    def act() -> None:
        from overlord.demo.corpus import Shape
        from overlord.demo.run import run_demo

        given = (("ranks", ranks, 4), ("rows", rows, 10_000), ("seed", seed, 7))
        changed = [f"--{name} {value}" for name, value, usual in given if value != usual]
        command = " ".join(
            [
                "overlord demo",
                f"--out {shlex.quote(str(out))}",
                f"--steps {steps}",
                *changed,
                *([] if runtime == "local" else [f"--runtime {runtime}"]),
            ]
        )
        vocab = 8192 if rows >= 1000 else 1024
        shape = Shape(seed=seed, rows=rows, ranks=ranks, vocab=vocab, samples=min(512, 32 * ranks))
        run_demo(out, shape, steps, screen(), command, runtime=runtime)

    guarded(act, debug)


@cli.command()
@job_file
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Stop after this many steps; without it, at the end of the data.",
)
@click.option(
    "--rank",
    type=click.IntRange(min=0),
    help="Only this rank; without it, all ranks of the job's place.",
)
@resuming
@saving
@allowing
@click.option(
    "--digest", is_flag=True, help="Print a fingerprint of every step's bytes, to compare two runs."
)
@where
@cluster_address
@launching
@imports
@debug
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
    debug: bool,
) -> None:
    """Run a job and show what it delivers."""

    def act() -> None:
        from overlord.cli.run import Run, resume_from, run_job

        job = read_job(job_yaml, modules)
        state = None if resume is None else resume_from(resume)
        wanted = Run(
            job=job,
            steps=steps,
            rank=rank,
            resume=state,
            save=save,
            allow=allow,
            digest=digest,
            runtime=runtime,
            options=read_options(options) | ({"address": address} if runtime == "ray" else {}),
        )
        run_job(wanted, screen(), screen(stderr=True))

    guarded(act, debug)


@cli.command()
@job_file
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
    help="0: any that is free.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Holds the token that clients must know. Without it OVERLORD_TOKEN says it, or one "
    "is made up.",
)
@where
@cluster_address
@launching
@click.option(
    "--detach",
    is_flag=True,
    help="On a Ray cluster: return at once; `overlord status` and `overlord stop` find the job.",
)
@click.option(
    "--start-s",
    type=float,
    metavar="SECONDS",
    help="With --detach: for the job to begin, 180 if not said; then it is ended.",
)
@resuming
@saving
@allowing
@imports
@debug
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
    debug: bool,
) -> None:
    """Run a job for trainers in other processes, which connect to it."""
    if detach and runtime != "ray":
        raise click.UsageError("--detach needs --runtime ray: nothing else outlives this program")
    if start_s is not None and not detach:
        raise click.UsageError(
            "--start-s is for --detach: this program waits for as long as it runs"
        )
    if detach and save is not None:
        raise click.UsageError(
            "--save is not for --detach: a job that lives by itself has a journal "
            "(Job.journal), or its trainers save"
        )

    def act() -> None:
        from overlord.cli.run import resume_from
        from overlord.cli.serve import Serve, read_token, serve_job, submit_job

        job = read_job(job_yaml, modules)
        state = None if resume is None else resume_from(resume)
        wanted = Serve(
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
        if detach:
            submit_job(wanted, click.echo, screen(stderr=True))
            return
        serve_job(wanted, click.echo, screen(stderr=True))

    guarded(act, debug)


@cli.command()
@click.argument("what", metavar="JOB.YAML|DATA")
@click.option("--full", is_flag=True, help="Of a job: read every row of every file, not just some.")
@imports
@debug
def inspect(what: str, full: bool, modules: tuple[str, ...], debug: bool) -> None:
    """Open every source of a job and list what is broken; or show what data hold.

    DATA is a file, a directory, a pattern of files or a URI: its columns are listed, and a job file
    for it is suggested.
    """

    def act() -> None:
        from overlord.cli.inspect import inspect_job
        from overlord.cli.inspect_data import data_view, inspect_data, is_data
        from overlord.observe.tables import inspect_view, waiting

        if is_data(what):
            screen().print(data_view(inspect_data(what)), soft_wrap=True)
            return
        job, console = read_job(Path(what), modules), screen()
        with waiting(screen(stderr=True), "looked at", len(job.sources)) as advance:
            reports = inspect_job(job, full=full, progress=advance)
        console.print(inspect_view(job, reports))
        failures = [failure for report in reports for failure in report.failures]
        if failures:
            broken = sum(bool(report.failures) for report in reports)
            error(
                f"{broken} of {len(reports)} sources cannot be used as they are",
                "\n".join(f"  - {failure}" for failure in failures),
            )
            sys.exit(FAILED)

    guarded(act, debug)


@cli.command()
@job_file
@click.option(
    "--step", type=click.IntRange(min=0), required=True, help="The step to show, counted from 0."
)
@click.option("--place", metavar="dp=64", help="Plan for another place than the job's.")
@click.option("--strategy", metavar="NAME", help="Plan with another strategy than the job's.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PLAN.HTML",
    help="Also write a page that shows where every sample went.",
)
@imports
@debug
def plan(
    job_yaml: Path,
    step: int,
    place: str | None,
    strategy: str | None,
    html: Path | None,
    modules: tuple[str, ...],
    debug: bool,
) -> None:
    """Show the plan of one step."""

    def act() -> None:
        from dataclasses import replace

        from overlord.cli.plan import parse_place, planned
        from overlord.observe.tables import plan_view, waiting

        job, console = read_job(job_yaml, modules), screen()
        changes: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
        job = replace(
            job, **changes, place=job.place if place is None else parse_place(place, job.place)
        )
        what_if, err = place is not None or strategy is not None, screen(stderr=True)
        with (
            waiting(err, "planned", step + 1) as advance,
            planned(job, step, advance, what_if=what_if, say=note) as session,
        ):
            graph = session.graph(step)
        if html is not None:
            graph.to_html(html)
        assert graph.bound is not None
        console.print(plan_view(job, graph.bound.plan, console.width))
        if html is not None:
            console.print(f"the page is {html}", markup=False)

    guarded(act, debug)


@cli.command()
@job_file
@click.option("--step", type=click.IntRange(min=0), help="The step to explain, counted from 0.")
@click.option(
    "--sample", metavar="WEB/E0/F2/R17", help="The sample to look for: source, epoch, file, row."
)
@click.option(
    "--within",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="How many steps to look through for the sample.",
)
@imports
@debug
def explain(
    job_yaml: Path,
    step: int | None,
    sample: str | None,
    within: int,
    modules: tuple[str, ...],
    debug: bool,
) -> None:
    """Say which rows are in a step, or where a sample goes, and why."""
    if (step is None) == (sample is None):
        raise click.UsageError("give either --step K or --sample ID")

    def act() -> None:
        from overlord.cli.plan import find_sample, planned
        from overlord.observe.sample_lookup import parse_id
        from overlord.observe.tables import waiting

        wanted = None if sample is None else parse_id(sample)
        job, err = read_job(job_yaml, modules), screen(stderr=True)
        if wanted is None:
            assert step is not None
            with (
                waiting(err, "planned", step + 1) as advance,
                planned(job, step, advance, say=note) as session,
            ):
                click.echo(str(session.explain(step)))
            return
        with waiting(err, "looked through", within) as advance:
            found = find_sample(job, wanted, within, advance, say=note)
        click.echo(str(found))
        if found.status in ("ahead", "undecided"):
            error(f"the sample is not in the first {within} steps; --within looks through more")
            sys.exit(FAILED)

    guarded(act, debug)


def main() -> NoReturn:
    """The entry point. After Ctrl-C the process ends at once: a thread in the middle of a read must
    not hold it up.
    """
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(
            stream, TextIOWrapper
        ):  # bars are no Latin-1; a mark in their place is better than no table
            stream.reconfigure(errors="replace")
    signal.signal(signal.SIGTERM, _terminate)
    try:
        code = cli.main(prog_name="overlord", standalone_mode=False) or 0
    except click.ClickException as fault:
        fault.show()
        code = fault.exit_code
    except (click.Abort, KeyboardInterrupt) as stop:
        click.echo("stopped", err=True)
        _leave(TERMINATED if isinstance(stop.__cause__ or stop, _Terminated) else STOPPED)
    except BrokenPipeError:  # the reader of a pipe has gone, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _leave(FAILED)
    sys.exit(code)


class _Terminated(KeyboardInterrupt):
    """What schedulers send; also all that reaches a command which a script started with ``&``:
    Ctrl-C is ignored there.
    """


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
