"""``overlord journal``: list and verify the records of a job's journal."""

from __future__ import annotations

import sys

import click

from overlord.cli.common import (
    FAILED,
    debug_option,
    error,
    json_option,
    make_console,
    print_json,
    run_guarded,
)
from overlord.observe.terminal_text import printable


@click.group()
def journal() -> None:
    """Read a job's journal: a directory, or the URI of an object store.

    Nothing is written, and the job may be running.
    """


@journal.command()
@click.argument("uri")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N records.")
@json_option
@debug_option
def show(uri: str, last: int | None, as_json: bool, debug: bool) -> None:
    """List the records of a journal."""

    def act() -> None:
        from overlord.cli.journal_views import journal_document, journal_view
        from overlord.journal.log import read
        from overlord.journal.verify import report_of
        from overlord.observe.progress_bars import progress_bar

        console = make_console()
        with progress_bar(make_console(stderr=True), "read segments") as advance:
            reading = read(uri, advance)
        report = report_of(uri, reading)
        if as_json:
            print_json(journal_document(report, reading, last))
        else:
            console.print(journal_view(report, reading, last, console.width))
        _exit_on_faults(report.faults)

    run_guarded(act, debug)


@journal.command("verify")
@click.argument("uri")
@json_option
@debug_option
def check(uri: str, as_json: bool, debug: bool) -> None:
    """Read every byte of a journal, replay its steps, and list its faults."""

    def act() -> None:
        from overlord.cli.journal_views import replay_faults
        from overlord.journal.log import read
        from overlord.journal.verify import report_of
        from overlord.observe.json_text import plain
        from overlord.observe.progress_bars import progress_bars

        with progress_bars(make_console(stderr=True)) as advance:
            reading = read(uri, lambda done, of: advance("read segments", done, of))
            report = report_of(
                uri,
                reading,
                decoding=True,
                progress=lambda done, of: advance("decoded records", done, of),
            )
            advance("replayed job", 0, None)
            faults = report.faults or replay_faults(reading)
        if as_json:
            print_json({**plain(report), "faults": faults, "whole": not faults})
            _exit_on_faults(faults)
            return
        click.echo(
            printable(
                f"job {report.job!r}: {report.records} records in {report.segments} segments, "
                f"{report.nbytes} bytes"
            )
        )
        for cut in report.cuts:
            click.echo(printable(f"interrupted write, not a fault: {cut}"))
        _exit_on_faults(faults)
        click.echo("every record is whole")

    run_guarded(act, debug)


def _exit_on_faults(faults: tuple[str, ...]) -> None:
    """Print the faults and exit with ``FAILED``; do nothing if there are none."""
    if faults:
        error(
            f"{len(faults)} fault{'s' * (len(faults) > 1)} in the journal",
            "\n".join(f"  - {fault}" for fault in faults),
        )
        sys.exit(FAILED)
