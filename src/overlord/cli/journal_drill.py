"""The commands about faults: ``overlord drill`` rehearses them, ``overlord journal`` looks into
what is kept against them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from overlord.cli.common import FAILED, debug, error, guarded, imports, job_file, read_job, screen


@click.command()
@job_file
@click.option(
    "--faults",
    metavar="HOW:WHOM@STEP,...",
    help="As kill:loader-host@10,stop:planner@20. Without it: one of each kind.",
)
@click.option(
    "--steps", type=click.IntRange(min=2), default=40, show_default=True, help="Steps of both runs."
)
@click.option(
    "--step-s",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Seconds that a trainer takes for a step.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Steps that are prepared ahead.",
)
@click.option(
    "--shadows",
    metavar="WHICH",
    default="none",
    show_default=True,
    help="Loaders with a standby: none, heavy, all.",
)
@imports
@debug
def drill(
    job_yaml: Path,
    faults: str | None,
    steps: int,
    step_s: float,
    prefetch: int,
    shadows: str,
    modules: tuple[str, ...],
    debug: bool,
) -> None:
    """Rehearse faults: run a job, kill its parts, compare every byte with an undisturbed run."""

    def act() -> None:
        from overlord.drill.faults import parse_faults, usual_faults
        from overlord.drill.run import Drill, refuse_too_late, rehearse
        from overlord.drill.show import drill_view
        from overlord.observe.tables import waiting

        job = read_job(job_yaml, modules)
        wanted = usual_faults(steps, planner=True) if faults is None else parse_faults(faults)
        refuse_too_late(wanted, steps)
        plan = Drill(
            job=job,
            faults=wanted,
            steps=steps,
            step_s=step_s,
            options={"prefetch": prefetch, "shadows": shadows},
        )
        with waiting(screen(stderr=True), "steps of both runs", 2 * steps) as advance:
            report = rehearse(
                plan, lambda what, taken: advance(taken + (steps if what != "undisturbed" else 0))
            )
        screen().print(drill_view(report))
        if (
            report.difference or report.hit.missed or report.hit.unmended
        ):  # what was not rehearsed must not pass for it
            sys.exit(FAILED)

    guarded(act, debug)


@click.group()
def journal() -> None:
    """Look into a job's journal: a directory, or a store's URI. Nothing is written, and the job may
    run meanwhile.
    """


@journal.command()
@click.argument("uri")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N records.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON document.")
@debug
def show(uri: str, last: int | None, as_json: bool, debug: bool) -> None:
    """List the records of a journal."""

    def act() -> None:
        from overlord.cli import journal as views
        from overlord.journal.log import read
        from overlord.journal.verify import report_of

        reading, console = read(uri), screen()
        report = report_of(uri, reading)
        if as_json:
            click.echo(views.as_json(report, reading, last))
        else:
            console.print(views.journal_view(report, reading, last, console.width))
        _tell_faults(report.faults)

    guarded(act, debug)


@journal.command("verify")
@click.argument("uri")
@debug
def check(uri: str, debug: bool) -> None:
    """Read every byte of a journal, and go through its steps; say what is wrong with it."""

    def act() -> None:
        from overlord.cli.journal import fold_faults
        from overlord.journal.log import read
        from overlord.journal.verify import report_of

        reading = read(uri)
        report = report_of(uri, reading, decoding=True)
        click.echo(
            f"job {report.job!r}: {report.records} records in {report.segments} segments, "
            f"{report.nbytes} bytes"
        )
        for cut in report.cuts:
            click.echo(f"no fault, a write that was cut: {cut}")
        _tell_faults(report.faults or fold_faults(reading))
        click.echo("every record is whole")

    guarded(act, debug)


def _tell_faults(faults: tuple[str, ...]) -> None:
    """A sentence each, and the exit code that says so."""
    if faults:
        error(
            f"{len(faults)} fault{'s' * (len(faults) > 1)} in the journal",
            "\n".join(f"  - {fault}" for fault in faults),
        )
        sys.exit(FAILED)
