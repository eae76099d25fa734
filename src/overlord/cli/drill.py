"""``overlord drill``: kill workers of a job and compare its stream with an undisturbed run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    import_option,
    job_argument,
    json_option,
    make_console,
    print_json,
    read_job,
    run_guarded,
)


@click.command(short_help="Run a job, kill its workers, and compare every byte.")
@job_argument
@click.option(
    "--faults",
    metavar="SIGNAL:WORKER@STEP,...",
    help="Faults, as in kill:loader-worker@10,stop:planner@20. Default: one of each kind.",
)
@click.option(
    "--steps", type=click.IntRange(min=2), default=40, show_default=True, help="Steps of both runs."
)
@click.option(
    "--step-s",
    type=click.FloatRange(min=0),
    default=0.1,
    show_default=True,
    help="Seconds that a trainer computes per step.",
)
@click.option(
    "--prefetch",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Steps that are prepared in advance.",
)
@click.option(
    "--shadows",
    metavar="WHICH",
    default="none",
    show_default=True,
    help="Loaders with a standby: none, heavy, all.",
)
@import_option
@json_option
@debug_option
def drill(
    job_yaml: Path,
    faults: str | None,
    steps: int,
    step_s: float,
    prefetch: int,
    shadows: str,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Run a job, kill its workers, and compare every byte with an undisturbed run."""

    def act() -> None:
        from overlord.drill.faults import default_faults, parse_faults
        from overlord.drill.run import Drill, refuse_too_late, run_drill
        from overlord.drill.tables import drill_document, drill_view
        from overlord.observe.progress_bars import progress_bar

        job = read_job(job_yaml, modules)
        wanted = default_faults(steps, planner=True) if faults is None else parse_faults(faults)
        refuse_too_late(wanted, steps)
        plan = Drill(
            job=job,
            faults=wanted,
            steps=steps,
            step_s=step_s,
            options={"prefetch": prefetch, "shadows": shadows},
        )
        with progress_bar(make_console(stderr=True), "steps of both runs", 2 * steps) as advance:
            report = run_drill(
                plan,
                lambda run, taken: advance(taken + (steps if run != "undisturbed" else 0), None),
            )
        if as_json:
            print_json(drill_document(report))
        else:
            make_console().print(drill_view(report))
        # A fault that did not take effect, or was not recovered from, fails the drill too.
        if report.difference or report.disturbed.missed or report.disturbed.unrecovered:
            sys.exit(FAILED)

    run_guarded(act, debug)
