"""The command line. Heavy things are imported by the command that needs them, so that ``overlord --help`` is quick."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from overlord import __version__
from overlord.errors import JobError, OverlordError

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.job import Job

FAILED, UNUSABLE, STOPPED, TERMINATED = 1, 2, 130, 143  # exit codes: found failures; the job cannot run; Ctrl-C; SIGTERM

job_file = click.argument("job_yaml", metavar="JOB.YAML", type=click.Path(dir_okay=False, path_type=Path))
imports = click.option(
    "--import", "modules", metavar="MODULE", multiple=True,
    help="Import a module first: one that registers the functions which the job file names. May be given several times.",
)  # fmt: skip
where = click.option(
    "--runtime", metavar="NAME", default="local", show_default=True, help="Where loaders and constructors live: local, process."
)
resuming = click.option(
    "--resume", type=click.Path(dir_okay=False, path_type=Path), metavar="STATE.JSON|auto",
    help="Go on from a saved state; auto: behind the last step that all ranks took, as the job's journal says.",
)  # fmt: skip
saving = click.option(
    "--save", type=click.Path(dir_okay=False, path_type=Path), metavar="STATE.JSON",
    help="Write the state at the end, also after Ctrl-C or SIGTERM.",
)  # fmt: skip
allowing = click.option(
    "--allow", metavar="PART", multiple=True, help="A part in which a resumed state may differ from the job, as the error names it."
)
debug = click.option("--debug", is_flag=True, help="Show the traceback of an error.")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="overlord")
def cli() -> None:
    """Overlord: one plan, one stream, every rank."""


@cli.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("overlord-demo"), show_default=True, help="Where corpus and report go."
)
@click.option("--steps", type=click.IntRange(min=1), default=40, show_default=True)
@click.option("--ranks", type=click.IntRange(min=1, max=64), default=4, show_default=True, help="Data-parallel ranks.")
@click.option("--rows", type=click.IntRange(min=8), default=10_000, show_default=True, help="Rows of a source, at most.")
@click.option("--seed", type=click.IntRange(min=0), default=7, show_default=True)
@debug
def demo(out: Path, steps: int, ranks: int, rows: int, seed: int, debug: bool) -> None:
    """Make a corpus, run a job, write a report."""

    def act() -> None:
        from overlord.demo.corpus import Shape
        from overlord.demo.run import run_demo

        given = (("ranks", ranks, 4), ("rows", rows, 10_000), ("seed", seed, 7))
        changed = [f"--{name} {value}" for name, value, usual in given if value != usual]
        command = " ".join(["overlord demo", f"--out {shlex.quote(str(out))}", f"--steps {steps}", *changed])
        vocab = 8192 if rows >= 1000 else 1024
        shape = Shape(seed=seed, rows=rows, ranks=ranks, vocab=vocab, samples=min(512, 32 * ranks))
        run_demo(out, shape, steps, _console(), command)

    _guarded(act, debug)


@cli.command()
@job_file
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this many steps; without it, at the end of the data.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank; without it, all ranks of the job's place.")
@resuming
@saving
@allowing
@click.option("--digest", is_flag=True, help="Print a fingerprint of every step's bytes, to compare two runs.")
@where
@imports
@debug
def run(
    job_yaml: Path, steps: int | None, rank: int | None, resume: Path | None, save: Path | None, allow: tuple[str, ...], digest: bool,
    runtime: str, modules: tuple[str, ...], debug: bool,
) -> None:  # fmt: skip
    """Run a job and show what it delivers."""

    def act() -> None:
        from overlord.observe.running import Run, resume_from, run_job

        job = _read_job(job_yaml, modules)
        state = None if resume is None else resume_from(resume)
        wanted = Run(job=job, steps=steps, rank=rank, resume=state, save=save, allow=allow, digest=digest, runtime=runtime)
        run_job(wanted, _console(), _console(stderr=True))

    _guarded(act, debug)


@cli.command()
@job_file
@click.option("--host", default="127.0.0.1", show_default=True, help="The interface to serve at; by default only this machine reaches it.")
@click.option("--port", type=click.IntRange(min=0, max=65535), default=0, show_default=True, help="0: any that is free.")
@click.option(
    "--token-file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
    help="Holds the token that clients must know. Without it OVERLORD_TOKEN says it, or one is made up.",
)  # fmt: skip
@where
@resuming
@saving
@allowing
@imports
@debug
def serve(
    job_yaml: Path, host: str, port: int, token_file: Path | None, runtime: str, resume: Path | None, save: Path | None,
    allow: tuple[str, ...], modules: tuple[str, ...], debug: bool,
) -> None:  # fmt: skip
    """Run a job for trainers in other processes, which connect to it."""

    def act() -> None:
        from overlord.observe.attending import Serve, read_token, serve_job
        from overlord.observe.running import resume_from

        job = _read_job(job_yaml, modules)
        state = None if resume is None else resume_from(resume)
        wanted = Serve(
            job=job, host=host, port=port, token=read_token(token_file), resume=state, save=save, allow=allow, runtime=runtime
        )  # fmt: skip
        serve_job(wanted, click.echo, _console(stderr=True))

    _guarded(act, debug)


@cli.command()
@job_file
@click.option("--full", is_flag=True, help="Read every row of every file, not just some.")
@imports
@debug
def inspect(job_yaml: Path, full: bool, modules: tuple[str, ...], debug: bool) -> None:
    """Open every source and list what is broken."""

    def act() -> None:
        from overlord.observe.inspect import inspect_job
        from overlord.observe.tables import inspect_view, waiting

        job, console = _read_job(job_yaml, modules), _console()
        with waiting(_console(stderr=True), "looked at", len(job.sources)) as advance:
            reports = inspect_job(job, full=full, progress=advance)
        console.print(inspect_view(job, reports))
        failures = [failure for report in reports for failure in report.failures]
        if failures:
            broken = sum(bool(report.failures) for report in reports)
            _error(f"{broken} of {len(reports)} sources cannot be used as they are", "\n".join(f"  - {failure}" for failure in failures))
            sys.exit(FAILED)

    _guarded(act, debug)


@cli.command()
@job_file
@click.option("--step", type=click.IntRange(min=0), required=True, help="The step to show, counted from 0.")
@click.option("--place", metavar="dp=64", help="Plan for another place than the job's.")
@click.option("--strategy", metavar="NAME", help="Plan with another strategy than the job's.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), metavar="PLAN.HTML",
    help="Also write a page that shows where every sample went.",
)  # fmt: skip
@imports
@debug
def plan(
    job_yaml: Path, step: int, place: str | None, strategy: str | None, html: Path | None, modules: tuple[str, ...], debug: bool
) -> None:
    """Show the plan of one step."""

    def act() -> None:
        from dataclasses import replace

        from overlord.observe.planning import parse_place, planned
        from overlord.observe.tables import plan_view, waiting

        job, console = _read_job(job_yaml, modules), _console()
        changes: dict[str, Any] = {} if strategy is None else {"strategy": strategy}
        job = replace(job, **changes, place=job.place if place is None else parse_place(place, job.place))
        with waiting(_console(stderr=True), "planned", step + 1) as advance, planned(job, step, advance) as session:
            graph = session.graph(step)
        if html is not None:
            graph.to_html(html)
        assert graph.bound is not None
        console.print(plan_view(job, graph.bound.plan, console.width))
        if html is not None:
            console.print(f"the page is {html}", markup=False)

    _guarded(act, debug)


@cli.command()
@job_file
@click.option("--step", type=click.IntRange(min=0), help="The step to explain, counted from 0.")
@click.option("--sample", metavar="WEB/E0/F2/R17", help="The sample to look for: source, epoch, file, row.")
@click.option(
    "--within", type=click.IntRange(min=1), default=1000, show_default=True, help="How many steps to look through for the sample."
)
@imports
@debug
def explain(job_yaml: Path, step: int | None, sample: str | None, within: int, modules: tuple[str, ...], debug: bool) -> None:
    """Say which rows are in a step, or where a sample goes, and why."""
    if (step is None) == (sample is None):
        raise click.UsageError("give either --step K or --sample ID")

    def act() -> None:
        from overlord.observe.planning import find_sample, planned
        from overlord.observe.tables import waiting
        from overlord.observe.whereabouts import parse_id

        wanted = None if sample is None else parse_id(sample)
        job, err = _read_job(job_yaml, modules), _console(stderr=True)
        if wanted is None:
            assert step is not None
            with waiting(err, "planned", step + 1) as advance, planned(job, step, advance) as session:
                click.echo(str(session.explain(step)))
            return
        with waiting(err, "looked through", within) as advance:
            found = find_sample(job, wanted, within, advance)
        click.echo(str(found))
        if found.status in ("ahead", "undecided"):
            _error(f"the sample is not in the first {within} steps; --within looks through more")
            sys.exit(FAILED)

    _guarded(act, debug)


@cli.command()
@job_file
@click.option("--faults", metavar="HOW:WHOM@STEP,...", help="As kill:loader-host@10,stop:planner@20. Without it: one of each kind.")
@click.option("--steps", type=click.IntRange(min=2), default=40, show_default=True, help="Steps of both runs.")
@click.option("--step-s", type=click.FloatRange(min=0), default=0.1, show_default=True, help="Seconds that a trainer takes for a step.")
@click.option("--prefetch", type=click.IntRange(min=1), default=4, show_default=True, help="Steps that are prepared ahead.")
@click.option("--shadows", metavar="WHICH", default="none", show_default=True, help="Loaders with a standby: none, heavy, all.")
@imports
@debug
def drill(
    job_yaml: Path, faults: str | None, steps: int, step_s: float, prefetch: int, shadows: str, modules: tuple[str, ...], debug: bool
) -> None:
    """Rehearse faults: run a job, kill its parts, compare every byte with an undisturbed run."""

    def act() -> None:
        from overlord.drill.faults import parse_faults, usual_faults
        from overlord.drill.run import Drill, refuse_too_late, rehearse
        from overlord.drill.show import drill_view
        from overlord.observe.tables import waiting

        job = _read_job(job_yaml, modules)
        wanted = usual_faults(steps, planner=True) if faults is None else parse_faults(faults)
        refuse_too_late(wanted, steps)
        plan = Drill(job=job, faults=wanted, steps=steps, step_s=step_s, options={"prefetch": prefetch, "shadows": shadows})
        with waiting(_console(stderr=True), "steps of both runs", 2 * steps) as advance:
            report = rehearse(plan, lambda what, taken: advance(taken + (steps if what != "undisturbed" else 0)))
        _console().print(drill_view(report))
        if report.difference:
            sys.exit(FAILED)

    _guarded(act, debug)


@cli.group()
def journal() -> None:
    """Look into a job's journal: a directory, or a store's URI. Nothing is written, and the job may run meanwhile."""


@journal.command()
@click.argument("uri")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N records.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@debug
def show(uri: str, last: int | None, as_json: bool, debug: bool) -> None:
    """List the records of a journal."""

    def act() -> None:
        from overlord.journal.log import read
        from overlord.journal.report import report_of
        from overlord.observe import journal as views

        reading, console = read(uri), _console()
        report = report_of(uri, reading)
        if as_json:
            click.echo(views.as_json(report, reading, last))
        else:
            console.print(views.journal_view(report, reading, last, console.width))
        _tell_faults(report.faults)

    _guarded(act, debug)


@journal.command("verify")
@click.argument("uri")
@debug
def check(uri: str, debug: bool) -> None:
    """Read every byte of a journal, and go through its steps; say what is wrong with it."""

    def act() -> None:
        from overlord.journal.log import read
        from overlord.journal.report import report_of
        from overlord.observe.journal import fold_faults

        reading = read(uri)
        report = report_of(uri, reading, decoding=True)
        click.echo(f"job {report.job!r}: {report.records} records in {report.segments} segments, {report.nbytes} bytes")
        for cut in report.cuts:
            click.echo(f"no fault, a write that was cut: {cut}")
        _tell_faults(report.faults or fold_faults(reading))
        click.echo("every record is whole")

    _guarded(act, debug)


def _tell_faults(faults: tuple[str, ...]) -> None:
    """A sentence each, and the exit code that says so."""
    if faults:
        _error(f"{len(faults)} fault{'s' * (len(faults) > 1)} in the journal", "\n".join(f"  - {fault}" for fault in faults))
        sys.exit(FAILED)


def _read_job(path: Path, modules: tuple[str, ...]) -> Job:
    from importlib import import_module

    from overlord.job import Job

    sys.path.insert(0, os.getcwd())
    for name in modules:
        try:
            import_module(name)
        except ImportError as fault:
            problem = f"cannot import {name!r}: {fault}; it is looked for in the working directory and in PYTHONPATH"
            raise JobError([problem], "--import") from fault
    return Job.from_yaml(path)


def _console(stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = 120  # a file or a pipe has no width; 80 would break rows of tables
    return console


def _guarded(act: Callable[[], None], debug: bool) -> None:
    """Runs a command; what goes wrong is one block of text and an exit code."""
    try:
        act()
    except OverlordError as fault:
        _fail(fault, debug, UNUSABLE, str(fault))
    except (KeyboardInterrupt, click.ClickException, SystemExit):
        raise
    except BrokenPipeError:
        raise
    except Exception as fault:
        said = "\n".join([f"{type(fault).__name__}: {fault}", *getattr(fault, "__notes__", ())])
        words = f"{said}\nThis is not an error that Overlord knows; --debug shows where it comes from."
        _fail(fault, debug, FAILED, words)


def _fail(fault: Exception, debug: bool, code: int, words: str) -> NoReturn:
    if debug:
        traceback.print_exception(fault)
    _error(words)
    sys.exit(code)


def _error(words: str, more: str = "") -> None:
    click.echo(click.style("error: ", fg="red", bold=True) + words + (f"\n{more}" if more else ""), err=True)


def main() -> NoReturn:
    """The entry point. After Ctrl-C the process ends at once: a thread in the middle of a read must not hold it up."""
    code = 0
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # bars are no Latin-1; a mark in their place is better than no table
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
    """What schedulers send; also all that reaches a command which a script started with ``&``: Ctrl-C is ignored there."""


def _terminate(*_: object) -> NoReturn:
    raise _Terminated


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
