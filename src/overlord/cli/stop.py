"""``overlord stop``: end a job of a Ray cluster."""

from __future__ import annotations

import click

from overlord.cli.common import address_option, debug_option, run_guarded


@click.command()
@click.argument("name")
@address_option
@debug_option
def stop(name: str, address: str | None, debug: bool) -> None:
    """End a job of a Ray cluster and all its workers."""

    def act() -> None:
        from overlord.cli.detached_jobs import stop as stop_job

        why = stop_job(name, address)
        click.echo(f"{name} is stopped" + (f": it was killed, because {why}" if why else ""))

    run_guarded(act, debug)
