"""``overlord explain``: print which rows a step holds, or which step holds a sample."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    error,
    import_option,
    job_argument,
    json_option,
    make_console,
    note,
    print_json,
    read_job,
    run_guarded,
)

if TYPE_CHECKING:
    from overlord.observe.explanation import Explanation


@click.command(short_help="Print the rows of a step, or the step of a sample, and why.")
@job_argument
@click.option("--step", type=click.IntRange(min=0), help="The step to explain, counted from 0.")
@click.option(
    "--sample", metavar="WEB/E0/F2/R17", help="The sample to find: source, epoch, file, row."
)
@click.option(
    "--within",
    type=click.IntRange(min=1),
    default=1000,
    show_default=True,
    help="Number of steps to search for the sample.",
)
@import_option
@json_option
@debug_option
def explain(
    job_yaml: Path,
    step: int | None,
    sample: str | None,
    within: int,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Print which rows a step holds, or which step holds a sample, and why."""
    if (step is None) == (sample is None):
        raise click.UsageError("give either --step K or --sample ID")

    def act() -> None:
        from overlord.cli.plan_step import find_sample, planned
        from overlord.observe.progress_bars import progress_bars
        from overlord.observe.sample_lookup import parse_id
        from overlord.observe.terminal_text import printable

        wanted = None if sample is None else parse_id(sample)
        job, err = read_job(job_yaml, modules), make_console(stderr=True)

        def show(found: Explanation) -> None:
            if as_json:
                print_json(found.to_dict())
            else:
                click.echo(printable(str(found)))

        if wanted is None:
            assert step is not None
            with progress_bars(err) as advance, planned(job, step, advance, note=note) as session:
                show(session.explain(step))
            return
        with progress_bars(err) as advance:
            found = find_sample(job, wanted, within, advance, note=note)
        show(found)
        if found.status in ("ahead", "undecided"):
            end = job.end_step
            error(
                f"the sample is not in the {end} steps of the job"
                if end is not None and end <= within
                else f"the sample is not in the first {within} steps; --within N searches more"
            )
            sys.exit(FAILED)

    run_guarded(act, debug)
