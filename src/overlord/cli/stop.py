"""``overlord stop``: end a job of a Ray cluster."""

from __future__ import annotations

import click

from overlord.cli.common import address_option, debug_option, json_option, print_json, run_guarded


@click.command()
@click.argument("name")
@address_option
@json_option
@debug_option
def stop(name: str, address: str | None, as_json: bool, debug: bool) -> None:
    """End a job of a Ray cluster and all its workers."""

    def act() -> None:
        from overlord.cli.detached_jobs import stop as stop_job

        why = stop_job(name, address)
        if as_json:
            print_json({"name": name, "killed_because": why})
            return
        click.echo(f"{name} is stopped" + (f": it was killed, because {why}" if why else ""))

    run_guarded(act, debug)
