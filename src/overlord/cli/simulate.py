"""``overlord simulate``: what a job would take on many more machines than there are. The paper's
dry run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from overlord.cli.common import debug, guarded, imports, job_file, read_job, screen

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.dryrun.estimate import Cell
    from overlord.dryrun.machines import Constants

MB = 2**20
COUNT = click.IntRange(min=1)
ROLES = ("planner", "loaders", "constructors", "clients")


class Sizes(click.ParamType):
    name = "N,N,..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        try:
            found = [int(part) for part in str(value).split(",")]
        except ValueError:
            found = []
        if not found or min(found) < 1:
            self.fail(
                "expected whole numbers above 0 with commas between them, as in 512,4096, "
                f"got {value!r}",
                param,
                ctx,
            )
        return found


@click.command()
@job_file
@click.option(
    "--gpus",
    type=Sizes(),
    help="GPUs of the fleet; several with commas: a line each. Default "
    "512,1024,2048,4096,8192,16384.",
)
@click.option("--nodes", type=Sizes(), help="The same in nodes.")
@click.option("--gpus-per-node", type=COUNT, default=8, show_default=True)
@click.option("--tp", type=COUNT, default=1, show_default=True)
@click.option("--cp", type=COUNT, default=1, show_default=True)
@click.option("--pp", type=COUNT, default=1, show_default=True)
@click.option(
    "--batch",
    type=COUNT,
    help="Samples of a step over all ranks. Default: as many for a data-parallel group as the "
    "job has.",
)
@click.option(
    "--workers",
    type=COUNT,
    default=4,
    show_default=True,
    help="Of the colocated loader it is compared with, in every rank.",
)
@click.option(
    "--hosts",
    type=COUNT,
    help="Loader hosts at least. Default: what reading takes at the trainers' pace.",
)
@click.option(
    "--sources-per-host",
    type=COUNT,
    default=25,
    show_default=True,
    help="1: a process for every source, as in the paper.",
)
@click.option(
    "--step-seconds",
    "pace_s",
    type=float,
    default=1.0,
    show_default=True,
    help="What trainers take for a step.",
)
@click.option(
    "--constructors/--no-constructors",
    "constructors",
    default=None,
    help="Only with them, or only without. Default: both.",
)
@click.option(
    "--broadcast/--no-broadcast",
    default=True,
    help="Whether ranks of a tensor-parallel group share what one of them fetches.",
)
@click.option(
    "--measure",
    "again",
    is_flag=True,
    help="Measure the constants again, though some are kept of an earlier run.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write all figures there.",
)
@imports
@debug
def simulate(
    job_yaml: Path,
    gpus: list[int] | None,
    nodes: list[int] | None,
    gpus_per_node: int,
    tp: int,
    cp: int,
    pp: int,
    batch: int | None,
    workers: int,
    hosts: int | None,
    sources_per_host: int,
    pace_s: float,
    constructors: bool | None,
    broadcast: bool,
    again: bool,
    json_path: Path | None,
    modules: tuple[str, ...],
    debug: bool,
) -> None:
    """Say what a job would take on hundreds of machines: memory, planning, connections, fetch
    latency.

    The planner is real and timed at that size; reading, sending and building take what dummy
    loading jobs took on this machine.
    """
    if gpus and nodes:
        raise click.UsageError("give either --gpus or --nodes")
    if not 0 < pace_s < 1e6:
        raise click.UsageError(f"--step-seconds: expected a number above 0, got {pace_s:g}")
    sizes = [n * gpus_per_node for n in nodes] if nodes else gpus or [512 * 2**k for k in range(6)]

    def act() -> None:
        from overlord.dryrun.estimate import DryRunRequest, simulated

        job = read_job(job_yaml, modules)
        asked = DryRunRequest(
            gpus=sizes,
            tp=tp,
            cp=cp,
            pp=pp,
            gpus_per_node=gpus_per_node,
            batch=batch,
            workers=workers,
            hosts=hosts,
            sources_per_host=sources_per_host,
            pace_s=pace_s,
            constructors=(True, False) if constructors is None else (constructors,),
            broadcast=broadcast,
        )
        with _Bars() as progress:
            found, kept, cells = simulated(job, asked, again=again, progress=progress)
        console = screen()
        console.print(constants_view(found.constants, kept))
        for view in (memory_view(cells), time_view(cells, pace_s)):
            console.print(view)
        for words in waits_of(cells):
            console.print(words, markup=False)
        console.print(
            "Planning is measured (CPU seconds of the real planner at that place tree); "
            "all else is computed from the constants. "
            "Memory is that of data loading: what trainers hold anyway counts for nobody.",
            markup=False,
        )
        if json_path is not None:
            values = {
                "constants": found.plain()["constants"],
                "cells": [cell.plain() for cell in cells],
            }
            json_path.write_text(json.dumps(values, indent=1), encoding="utf-8")

    guarded(act, debug)


class _Bars:
    """A bar on stderr for whatever is under way; nothing where nobody watches."""

    def __enter__(self) -> Any:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._shown = Progress(*columns, console=screen(stderr=True), transient=True)
        self._tasks: dict[str, Any] = {}
        self._shown.__enter__()
        return self._progress

    def _progress(self, what: str, done: int, of: int) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._shown.add_task(what, total=of)
        self._shown.update(self._tasks[what], completed=done)

    def __exit__(self, *why: Any) -> None:
        self._shown.__exit__(*why)


def _titled(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int
) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from overlord.observe.tables import grid

    return Group(Text(title, style="bold"), grid(heads, rows, text_columns), Text(""))


def constants_view(c: Constants, kept: Path) -> RenderableType:
    sizes = {
        "a worker of a colocated loader": c.worker_bytes,
        "  for every source it opens": c.opened_bytes,
        "a loader host": c.host_bytes,
        "  for every source it has": c.source_bytes,
        "a constructor host": c.constructor_bytes,
        "the planner's process": c.planner_bytes,
        "a client": c.client_bytes,
        "an end of a connection": c.link_bytes,
    }
    times = {
        "a row, read and transformed": f"{1e6 * c.read_s:.1f} us",
        "a token, built": f"{1e9 * c.build_s:.1f} ns",
        "a call and its answer": f"{1e6 * c.call_s:.0f} us",
        "a message on a link": f"{1e6 * c.link_s:.1f} us",
        "to open a connection": f"{1e6 * c.connect_s:.0f} us",
        "bandwidth of a link": f"{c.bandwidth / 1e9:.2f} GB/s",
        "tokens of a sample": f"{c.sample_tokens:.0f}",
        "bytes of a sample, held ready": f"{c.sample_bytes:.0f}",
    }
    rows = [
        (size, f"{n / MB:.2f} MB", value, what)
        for (size, n), (what, value) in zip(sizes.items(), times.items(), strict=True)
    ]
    return _titled(
        f"measured on this machine, kept as {kept.name} (--measure: again)",
        ("memory", "", "", "time and size"),
        rows,
        1,
    )


def memory_view(cells: Sequence[Cell]) -> RenderableType:
    heads = (
        "GPUs",
        "constructors",
        "dp",
        "batch",
        "MB",
        "planner",
        "loaders",
        "building",
        "clients",
        "colocated MB",
        "x less",
        "if TP shares",
    )
    rows = []
    for cell in cells:
        f, roles = cell.fleet, cell.overlord.by_role
        rows.append(
            [
                f"{f.gpus}",
                _how(cell),
                f"{f.dp}",
                f"{f.batch}",
                f"{cell.overlord.per_node / MB:.0f}",
                *(f"{roles[role] / f.nodes / MB:.1f}" for role in ROLES),
                f"{cell.colocated.per_node / MB:,.0f}",
                f"{cell.times_less:.1f}",
                f"{cell.colocated_tp.total / cell.overlord.total:.1f}",
            ]
        )
    f = cells[0].fleet
    mesh = f"cp {f.cp}, pp {f.pp}, tp {f.tp}"
    what = (
        f"memory of data loading per node of {f.gpus_per_node} GPUs ({mesh}), beside a loader "
        f"with {f.workers} workers in every rank"
    )
    return _titled(what, heads, rows, 2)


def time_view(cells: Sequence[Cell], pace_s: float) -> RenderableType:
    heads = (
        "GPUs",
        "constructors",
        "loader hosts",
        "plan ms",
        "cut ms",
        "planner busy",
        "connections",
        "at one end",
        "to connect s",
        "fetch ms",
        "worst",
        "waited ms",
    )
    rows = []
    for cell in cells:
        ran = cell.ran
        times = [1e3 * x for x in (ran.median("plan_s"), ran.median("cut_s"))]
        fetch = [
            1e3 * x for x in (ran.median("latency_s"), ran.most("latency_s"), ran.most("waited_s"))
        ]
        rows.append(
            [
                f"{cell.fleet.gpus}",
                _how(cell),
                f"{ran.loader_hosts}",
                *(f"{ms:.1f}" for ms in times),
                f"{ran.planner_s / pace_s:.0%}",
                f"{cell.links.total}",
                f"{cell.links.most}",
                f"{cell.connecting_s:.2f}",
                *(f"{ms:.1f}" for ms in fetch),
            ]
        )
    return _titled(
        f"planning, connections and fetch latency; trainers take {pace_s:g} s a step",
        heads,
        rows,
        2,
    )


def waits_of(cells: Sequence[Cell]) -> list[str]:
    """What trainers wait for, where they do."""
    told = [(cell, cell.ran.why(cell.pace_s)) for cell in cells]
    return [
        f"{cell.fleet.gpus} GPUs, {'with' if cell.fleet.constructors else 'without'} "
        "constructors: trainers wait up to "
        f"{cell.ran.most('waited_s'):.2f} s a step for {why}"
        for cell, why in told
        if why
    ]


def _how(cell: Cell) -> str:
    return "yes" if cell.fleet.constructors else "no"
