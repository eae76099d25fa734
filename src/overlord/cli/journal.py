"""``overlord journal``: list and verify the records of a job's journal."""

from __future__ import annotations

import sys

import click

from overlord.cli.common import FAILED, debug_option, error, make_console, run_guarded


@click.group()
def journal() -> None:
    """Read a job's journal: a directory, or the URI of an object store.

    Nothing is written, and the job may be running.
    """


@journal.command()
@click.argument("uri")
@click.option("--last", type=click.IntRange(min=1), metavar="N", help="Only the last N records.")
@click.option("--json", "json_wanted", is_flag=True, help="Print one JSON document.")
@debug_option
def show(uri: str, last: int | None, json_wanted: bool, debug: bool) -> None:
    """List the records of a journal."""

    def act() -> None:
        from overlord.cli.journal_views import as_json, journal_view
        from overlord.journal.log import read
        from overlord.journal.verify import report_of

        reading, console = read(uri), make_console()
        report = report_of(uri, reading)
        if json_wanted:
            click.echo(as_json(report, reading, last))
        else:
            console.print(journal_view(report, reading, last, console.width))
        _exit_on_faults(report.faults)

    run_guarded(act, debug)


@journal.command("verify")
@click.argument("uri")
@debug_option
def check(uri: str, debug: bool) -> None:
    """Read every byte of a journal, replay its steps, and list its faults."""

    def act() -> None:
        from overlord.cli.journal_views import replay_faults
        from overlord.journal.log import read
        from overlord.journal.verify import report_of

        reading = read(uri)
        report = report_of(uri, reading, decoding=True)
        click.echo(
            f"job {report.job!r}: {report.records} records in {report.segments} segments, "
            f"{report.nbytes} bytes"
        )
        for cut in report.cuts:
            click.echo(f"interrupted write, not a fault: {cut}")
        _exit_on_faults(report.faults or replay_faults(reading))
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
