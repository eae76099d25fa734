"""``overlord plan``: print the plan of one step, or predict the end of a job."""

from __future__ import annotations

from pathlib import Path

import click

from overlord.cli.common import (
    debug_option,
    import_option,
    job_argument,
    json_option,
    make_console,
    note,
    print_json,
    read_job,
    run_guarded,
)


@click.command()
@job_argument
@click.option("--step", type=click.IntRange(min=0), help="The step to show, counted from 0.")
@click.option(
    "--until-end",
    is_flag=True,
    help="Predict the step at which each source ends, its tokens and its share. An estimate from "
    "a sample of documents, unless the index has the length of every one.",
)
@click.option("--exact", is_flag=True, help="With --until-end: read every document instead.")
@click.option("--place", metavar="dp=64", help="Plan for another mesh than the job's.")
@click.option(
    "--strategy",
    metavar="NAME",
    help="Plan with another strategy than the job's, also one that --import registers.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PLAN.HTML",
    help="Also write a page that shows the place of every sample.",
)
@import_option
@json_option
@debug_option
def plan(
    job_yaml: Path,
    step: int | None,
    until_end: bool,
    exact: bool,
    place: str | None,
    strategy: str | None,
    html: Path | None,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Print the plan of one step, or predict when each source ends."""
    if (step is None) is not until_end:
        raise click.UsageError("expected --step N or --until-end; give one of them")
    if (exact and not until_end) or ((place or strategy or html) and until_end):
        raise click.UsageError("expected --exact with --until-end, and other options with --step")

    def predict() -> None:
        from overlord.cli.plan_end import predict_end, prediction_view
        from overlord.observe.progress_bars import progress_bar

        job = read_job(job_yaml, modules)
        with progress_bar(make_console(stderr=True), "predicted steps", job.end_step) as advance:
            found = predict_end(job, exact=exact, progress=advance, note=note)
        if as_json:
            print_json(found.to_dict())
        else:
            make_console().print(prediction_view(found), soft_wrap=True)

    def act(step: int) -> None:
        from dataclasses import replace

        from overlord.cli.plan_step import parse_place, planned
        from overlord.jobfile.functions import strategy_named
        from overlord.observe.documents import plan_document
        from overlord.observe.progress_bars import progress_bars
        from overlord.observe.tables import plan_view

        job, console = read_job(job_yaml, modules), make_console()
        job = replace(
            job,
            strategy=job.strategy if strategy is None else strategy_named(strategy),
            place=job.place if place is None else parse_place(place, job.place),
        )
        what_if, err = place is not None or strategy is not None, make_console(stderr=True)
        with (
            progress_bars(err) as advance,
            planned(job, step, advance, what_if=what_if, note=note) as session,
        ):
            graph = session.graph(step)
        if html is not None:
            graph.to_html(html)
        assert graph.bound is not None
        if as_json:
            print_json(plan_document(job, graph.bound.plan))
            return
        console.print(plan_view(job, graph.bound.plan, console.width))
        if html is not None:
            console.print(f"wrote {html}", markup=False)

    run_guarded(predict if step is None else lambda: act(step), debug)
