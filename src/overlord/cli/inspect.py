"""``overlord inspect``: check the sources of a job, or describe data without a job."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    error,
    import_option,
    make_console,
    read_job,
    run_guarded,
)


@click.command()
@click.argument("what", metavar="JOB.YAML|DATA")
@click.option("--full", is_flag=True, help="Read every row of every file of a job, not a sample.")
@import_option
@debug_option
def inspect(what: str, full: bool, modules: tuple[str, ...], debug: bool) -> None:
    """Open every source of a job and list its failures; or describe data without a job.

    DATA is a file, a directory, a pattern of files or a URI. The command lists its columns and
    suggests a job file.
    """

    def act() -> None:
        from overlord.cli.inspect_data import data_view, inspect_data, is_data
        from overlord.cli.inspect_job import inspect_job
        from overlord.observe.tables import inspect_view, progress_bar

        if is_data(what):
            make_console().print(data_view(inspect_data(what)), soft_wrap=True)
            return
        job, console = read_job(Path(what), modules), make_console()
        with progress_bar(make_console(stderr=True), "inspected", len(job.sources)) as advance:
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

    run_guarded(act, debug)
