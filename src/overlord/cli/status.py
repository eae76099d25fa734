"""``overlord status``: list the jobs of a Ray cluster and the nodes of their workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from overlord.cli.common import (
    address_option,
    debug_option,
    json_option,
    make_console,
    print_json,
    run_guarded,
)

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.cli.detached_jobs import Status


def without_cores(workers: list[str]) -> str:
    """Return a line about the workers for which Ray reserved no CPU core.

    The line has one reason for all, since idle cores of nodes with ranks are unknown here.
    """
    why = (
        "because no node had a spare core that they may use (on nodes with ranks, sidecar= sets "
        "how many)"
    )
    return f"workers without a reserved core, {why}: {', '.join(workers)}"


@click.command()
@address_option
@click.option(
    "--token",
    "whose",
    metavar="NAME",
    help="Print OVERLORD_ADDRESS and OVERLORD_TOKEN of this job instead, as `overlord serve "
    "--detach` did. No other command prints a token.",
)
@json_option
@debug_option
def status(address: str | None, whose: str | None, as_json: bool, debug: bool) -> None:
    """List the jobs of a Ray cluster, and the nodes of their workers."""

    def act() -> None:
        from overlord.cli.detached_jobs import jobs, served

        if whose is not None:
            found = served(whose, address)
            if as_json:
                print_json({"address": found.address, "token": found.token})
            else:
                click.echo(str(found))
            return
        listed = jobs(address)
        if as_json:
            print_json({"jobs": listed})
            return
        _print_jobs(listed)

    run_guarded(act, debug)


def _print_jobs(found: Sequence[Status]) -> None:
    from overlord.observe.stage_text import stage_name

    console = make_console()
    for job in found:
        rate = f" ({job.steps_per_s:.2f} per s)" if job.steps_per_s else ""
        stage = "" if job.stage is None else f" (stage {stage_name(job.stage)})"
        console.print(
            f"{job.name}: {job.state}; {job.steps} steps planned{stage}, "
            f"{job.taken + 1} taken by all{rate}; {job.clients} clients",
            markup=False,
        )
        if job.workers:
            _print_workers(job, console)
    if not found:
        console.print("no jobs on this cluster: none was submitted, or all were stopped")


def _print_workers(job: Status, console: Console) -> None:
    from rich.table import Table

    console.print(f"  trainers connect to {job.address}", markup=False, soft_wrap=True)
    kinds = sorted(
        {kind for worker in job.workers for kind in worker["asked"]} - {"cores", "memory"}
    )
    head = ("worker", "node", "cores", "memory MB", *kinds, "process", "state")
    table = Table(*head, box=None, pad_edge=False)
    for worker in job.workers:
        asked = {**worker["asked"], "memory": worker["asked"].get("memory", 0.0) // 2**20}
        reserved = [
            f"{asked[kind]:g}" if asked.get(kind) else "" for kind in ("cores", "memory", *kinds)
        ]
        table.add_row(
            f"  {worker['name']}", worker["node"], *reserved, str(worker["pid"]), worker["state"]
        )
    console.print(table)
    if crowded := [
        worker["name"]
        for worker in job.workers
        if worker["name"] != "planner" and not worker["asked"].get("cores")
    ]:
        console.print(f"  {without_cores(crowded)}", markup=False)
    for line in (*job.placement, *job.scaling):
        console.print(f"  {line}", markup=False, soft_wrap=True)
