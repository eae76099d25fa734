"""``overlord inspect``: check the sources of a job, or describe data without a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    error,
    import_option,
    json_option,
    make_console,
    print_json,
    read_job,
    run_guarded,
)
from overlord.errors import JobError

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.observe.source_report import SourceReport


@click.command(short_help="Open every source of a job, or describe data.")
@click.argument("what", metavar="JOB.YAML|DATA")
@click.option("--full", is_flag=True, help="Read every row of every file of a job, not a sample.")
@click.option(
    "--strict",
    is_flag=True,
    help="Exit with code 1 on warnings too: rows that cannot be used, lost tokens, data that no "
    "job can use as it is.",
)
@import_option
@json_option
@debug_option
def inspect(
    what: str, full: bool, strict: bool, modules: tuple[str, ...], as_json: bool, debug: bool
) -> None:
    """Open every source of a job and list its failures; or describe data without a job.

    DATA is a file, a directory, a pattern of files or a URI. The command lists its columns and
    suggests a job file.
    """

    def act() -> None:
        from overlord.cli.inspect_data import is_data

        if is_data(what):
            _inspect_data(what, strict, as_json)
        elif not os.path.exists(what):
            problem = "no such file or directory; give a job file, or the path or URI of data"
            raise JobError([problem], what)
        else:
            _inspect_job(read_job(Path(what), modules), full, strict, as_json)

    run_guarded(act, debug)


def _inspect_data(what: str, strict: bool, as_json: bool) -> None:
    from overlord.cli.inspect_data import data_document, data_view, defects, inspect_data

    report = inspect_data(what)
    if as_json:
        print_json(data_document(report))
    else:
        make_console().print(data_view(report), soft_wrap=True)
    if strict and (found := defects(report)):
        _fail(f"{len(found)} warning{'s' * (len(found) > 1)}", found)


def _inspect_job(job: Job, full: bool, strict: bool, as_json: bool) -> None:
    from overlord.observe.documents import source_document
    from overlord.observe.progress_bars import progress_bar
    from overlord.observe.source_inspection import inspect_job
    from overlord.observe.tables import inspect_view

    with progress_bar(make_console(stderr=True), "inspected sources", len(job.sources)) as advance:
        reports = inspect_job(job, full=full, progress=advance)
    if as_json:
        print_json({"job": job.name, "sources": [source_document(r) for r in reports]})
    else:
        make_console().print(inspect_view(job, reports))
    _exit_on_problems(reports, strict)


def _exit_on_problems(reports: list[SourceReport], strict: bool) -> None:
    if failures := [failure for report in reports for failure in report.failures]:
        broken = sum(bool(report.failures) for report in reports)
        _fail(f"{broken} of {len(reports)} sources cannot be used as they are", failures)
    warnings = [warning for report in reports for warning in report.warnings()]
    if strict and warnings:
        _fail(f"{len(warnings)} warning{'s' * (len(warnings) > 1)}", warnings)


def _fail(text: str, lines: list[str]) -> None:
    error(text, "\n".join(f"  - {line}" for line in lines))
    sys.exit(FAILED)
