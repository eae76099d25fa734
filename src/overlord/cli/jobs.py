"""The commands about jobs that live on a cluster by themselves: ``overlord status`` and ``overlord
stop``.
"""

from __future__ import annotations

import click

from overlord.cli.common import debug, guarded, screen

cluster_address = click.option(
    "--address",
    metavar="HOST:PORT",
    envvar="OVERLORD_CLUSTER",
    help="With Ray: the head of a cluster; OVERLORD_CLUSTER says it too.",
)


def without_cores(parts: list[str]) -> str:
    """Whether nodes with ranks had more idle than a job may take there is not known here."""
    why = (
        "since no node had any to spare that they may use (on nodes with ranks sidecar= says "
        "how many)"
    )
    return f"without cores of their own, {why}: {', '.join(parts)}"


@click.command()
@cluster_address
@click.option(
    "--token",
    "whose",
    metavar="NAME",
    help="Print OVERLORD_ADDRESS and OVERLORD_TOKEN of this job instead, as `overlord serve "
    "--detach` did: nothing else shows a token.",
)
@debug
def status(address: str | None, whose: str | None, debug: bool) -> None:
    """List the jobs of a cluster, and where their parts are."""

    def act() -> None:
        from rich.table import Table

        from overlord.cli.detached_jobs import jobs, served

        if whose is not None:
            click.echo(str(served(whose, address)))
            return
        found, console = jobs(address), screen()
        for job in found:
            console.print(
                f"{job.name}: {job.state}; {job.steps} steps planned, {job.taken + 1} "
                f"taken by all; {job.clients} clients",
                markup=False,
            )
            if not job.parts:
                continue
            console.print(f"  trainers connect to {job.address}", markup=False, soft_wrap=True)
            kinds = sorted(
                {kind for part in job.parts for kind in part["asked"]} - {"cores", "memory"}
            )
            table = Table(
                "part",
                "node",
                "cores",
                "memory MB",
                *kinds,
                "process",
                "state",
                box=None,
                pad_edge=False,
            )
            for part in job.parts:
                asked = {**part["asked"], "memory": part["asked"].get("memory", 0.0) // 2**20}
                kept = [
                    f"{asked[kind]:g}" if asked.get(kind) else ""
                    for kind in ("cores", "memory", *kinds)
                ]
                table.add_row(
                    f"  {part['name']}", part["node"], *kept, str(part["pid"]), part["state"]
                )
            console.print(table)
            if crowded := [
                part["name"]
                for part in job.parts
                if part["name"] != "planner" and not part["asked"].get("cores")
            ]:
                console.print(f"  {without_cores(crowded)}", markup=False)
            for line in (*job.placement, *job.scaling):
                console.print(f"  {line}", markup=False, soft_wrap=True)
        if not found:
            console.print("no job was submitted to this cluster, or all were stopped")

    guarded(act, debug)


@click.command()
@click.argument("name")
@cluster_address
@debug
def stop(name: str, address: str | None, debug: bool) -> None:
    """End a job of a cluster and all its parts."""

    def act() -> None:
        from overlord.cli.detached_jobs import stop as stop_job

        why = stop_job(name, address)
        click.echo(f"{name} is stopped" + (f": it was killed, since {why}" if why else ""))

    guarded(act, debug)
