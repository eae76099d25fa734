"""``overlord profile``: measure what each source costs."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    error,
    import_option,
    job_argument,
    json_option,
    make_console,
    print_json,
    read_job,
    run_guarded,
)


@click.command(short_help="Measure what each source costs.")
@job_argument
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=2048,
    show_default=True,
    help="Rows to read per source, at most.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0.01),
    default=2.0,
    show_default=True,
    help="Seconds per source, at most.",
)
@click.option(
    "--save",
    is_flag=True,
    help="Store the profile for the next launch, in the job's journal or in the cache.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PROFILE.HTML",
    help="Also write a page with a plot.",
)
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PROFILE.SVG",
    help="Also write the plot alone.",
)
@import_option
@json_option
@debug_option
def profile(
    job_yaml: Path,
    rows: int,
    seconds: float,
    save: bool,
    html: Path | None,
    svg: Path | None,
    modules: tuple[str, ...],
    as_json: bool,
    debug: bool,
) -> None:
    """Measure what each source costs: seconds per sample, transfer, memory."""

    def act() -> None:
        from overlord.cli.profile_report import profile_job, profile_page, profile_svg, profile_view
        from overlord.observe.progress_bars import progress_bars
        from overlord.setup.measure import Bounds
        from overlord.setup.options import Options
        from overlord.setup.prepared_job import PreparedJob
        from overlord.setup.profile_store import load, path_of, shown
        from overlord.setup.profile_store import save as keep

        job, n = read_job(job_yaml, modules), 0
        # With --json stdout holds the document alone.
        console = make_console(stderr=as_json)
        with progress_bars(make_console(stderr=True)) as advance:

            def measured(name: str) -> None:
                nonlocal n
                n += 1
                advance("measured sources", n, len(job.sources))

            options = Options(progress=lambda done, of: advance("indexed files", done, of))
            with closing(PreparedJob(job, options)) as prepared:
                advance("measured sources", 0, len(job.sources))
                found = profile_job(prepared, Bounds(rows=rows, seconds=seconds), measured)
        if as_json:
            print_json({**found.profile.to_plain(), "failures": found.failures})
        else:
            console.print(profile_view(found.profile))
        for path, text in (
            (html, profile_page(found.profile, job.name)),
            (svg, profile_svg(found.profile)),
        ):
            if path is not None:
                path.write_text(text, encoding="utf-8")
                console.print(f"wrote {path}", markup=False)
        if save and keep(where := path_of(job, None), load(where).merge(found.profile, weight=1.0)):
            console.print(f"profile stored: {shown(where)}", markup=False, soft_wrap=True)
        if found.failures:
            error(
                f"{len(found.failures)} of {len(job.sources)} sources could not be measured",
                "\n".join(f"  - {f}" for f in found.failures),
            )
            sys.exit(FAILED)

    run_guarded(act, debug)
