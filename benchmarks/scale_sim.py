"""The Overlord paper's dry run (arXiv 2504.09844, Figures 14, 17, 18) with constants measured here.

    python benchmarks/scale_sim.py                     # minutes; uses constants of an earlier run
    python benchmarks/scale_sim.py --measure --save    # measures them again, writes the page

The model is that of ``overlord simulate``: memory from stand-in jobs, and the real planner on a
virtual clock. A node is a tensor-parallel group here. One rank of it loads in the colocated loader
too, as in Megatron: this comparison is the least favourable for Overlord.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

import overlord as ov
from corpus import Corpus, default_folder
from overlord.dryrun.constants import Measured
from overlord.dryrun.estimate import Cell, DryRunRequest, constants_of, estimate_sizes
from overlord.dryrun.machines import ClusterShape, Constants, colocated_memory, overlord_memory
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from page import (
    Numbers,
    command_line,
    machine,
    markdown_table,
    progress,
    save,
    shown_table,
    wide_console,
)
from peers.data import corpora

PER_NODE = 16  # GPUs, as in the paper's cluster
SIDES = (1, 2, 4, 8, 16)  # of CP and PP
BASE = ClusterShape(
    gpus=512 * PER_NODE, tp=PER_NODE, gpus_per_node=PER_NODE, batch=512, workers=4
)  # Figure 14
VARIED = (
    ("Figure 14", {}),
    ("batch 2048", {"batch": 2048}),
    ("16 workers", {"workers": 16}),
    ("4096 nodes", {"gpus": 4096 * PER_NODE}),
)
FIGURE_18 = (
    "1k GPUs: modest improvement by constructors; 2k: 10x fetch latency without them; 4k: "
    "without them the system collapses"
)
BUSY = (
    "The machine was busy with other work; of wall times only a call's is used, the fastest "
    "quarter. "
)
FETCH_GPUS = (1024, 2048, 4096)
PLANNED = (4096, 16384)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The memory of Overlord relative to a colocated loader, CP by PP."""

    name: str
    shared: list[list[float]]  # every source is opened once in the cluster
    apart: list[
        list[float]
        # every data-parallel group has loaders of its own, with all sources: no partitioning, as in
        # the
        # paper's figures
    ]


def make_job(corpus: Corpus) -> ov.Job:
    sources = [
        ov.Source(s.name, s.glob, transforms=[ov.Tokens("tokens")], weight=s.weight)
        for s in corpus.sources
    ]
    batch = ov.Batch(samples=64, context=32_768)
    return ov.Job(
        name="scale",
        sources=sources,
        place=ov.ClientPlaceTree(),
        batch=batch,
        seed=1,
        on_long="truncate",
    )


def grid_of(name: str, fleet: ClusterShape, constants: Constants) -> Grid:
    def ratio(cp: int, pp: int, apart: bool) -> float:
        made = replace(fleet, cp=cp, pp=pp)
        made = replace(made, copies=made.dp) if apart else made
        return (
            overlord_memory(made, constants).total
            / colocated_memory(made, constants, first_of_tp=True).total
        )

    cells = {
        apart: [[ratio(cp, pp, apart) for pp in SIDES] for cp in SIDES] for apart in (False, True)
    }
    return Grid(name=name, shared=cells[False], apart=cells[True])


def grids(constants: Constants, sources: int) -> list[Grid]:
    return [
        grid_of(name, replace(BASE, sources=sources, **change), constants)
        for name, change in VARIED
    ]  # type: ignore[arg-type]


def statements(constants: Constants, sources: int) -> list[str]:
    """Return the paper's statements about Figures 14 and 17, each with our number."""

    def ours(cp: int, pp: int, **change: Any) -> tuple[float, float]:
        """Return MB per node, and relative to a colocated loader; loaders separately."""
        fleet = replace(BASE, sources=sources, cp=cp, pp=pp, **change)
        made = overlord_memory(replace(fleet, copies=fleet.dp), constants)
        return made.per_node / 2**20, made.total / colocated_memory(
            fleet, constants, first_of_tp=True
        ).total

    (base, low), (_, high) = ours(1, 1), ours(16, 16)
    batch, workers, cluster, both = (
        ours(1, 1, batch=2048)[0],
        ours(1, 1, workers=16)[1],
        ours(1, 1, gpus=4096 * PER_NODE)[1],
        16 * 16,
    )
    return [
        "*Marginal overhead at low parallelism, gains with more of it*: with loaders "
        f"apart {low:.2f} of a colocated loader's memory at "
        f"CP 1 and PP 1, {high:.3f} at CP 16 and PP 16 ({both} ranks a group).",
        f"*A larger batch costs Overlord more*: {batch - base:+.2f} MB a node for 2048 "
        "samples in place of 512; a sample is "
        f"{constants.sample_tokens:.0f} tokens here, and images in the paper.",
        f"*More workers make the savings more pronounced*: {low:.2f} with 4 workers, "
        f"{workers:.2f} with 16.",
        f"*In a larger cluster with little parallelism it is harder to save*: {low:.2f} "
        f"with 512 nodes, {cluster:.2f} with 4096.",
    ]


def fetching(
    job: ov.Job, sources: int, step: Callable[[str, int, int], None]
) -> list[tuple[str, Cell]]:
    """Return Figure 18, with 25 sources per loader worker and with one, as in the paper."""
    found = []
    for name, per_host in (("25 sources a host", 25), ("1 source a host", 1)):
        asked = DryRunRequest(
            gpus=FETCH_GPUS,
            tp=4,
            pp=4,
            gpus_per_node=PER_NODE,
            sources_per_host=per_host,
            broadcast=False,
        )
        found += [(name, cell) for cell in estimate_sizes(job, asked, progress=step)[2]]
    return found


def planning(job: ov.Job, step: Callable[[str, int, int], None]) -> list[Cell]:
    """Return the time of the real planner: every rank a data-parallel group, and a mesh."""
    cells = []
    for cp, pp in ((1, 1), (4, 4)):
        asked = DryRunRequest(
            gpus=PLANNED, cp=cp, pp=pp, gpus_per_node=PER_NODE, batch=None, constructors=(True,)
        )
        cells += estimate_sizes(job, asked, progress=step)[2]
    return cells


# ---- tables


def grid_rows(values: Sequence[Sequence[float]]) -> list[list[str]]:
    return [[f"CP {cp}", *(f"{x:.3f}" for x in row)] for cp, row in zip(SIDES, values, strict=True)]


GRID_HEAD = ("", *(f"PP {pp}" for pp in SIDES))
FETCH_HEAD = (
    "GPUs",
    "loaders",
    "constructors",
    "connections",
    "at one end",
    "to connect s",
    "fetch ms",
    "worst",
    "waited ms",
    "x with",
)
PLAN_HEAD = ("ranks", "place", "samples", "plan ms", "cut ms", "constructor hosts", "all ms")


def fetch_rows(found: Sequence[tuple[str, Cell]]) -> list[list[str]]:
    rows = []
    built = {(name, cell.fleet.gpus): cell for name, cell in found if cell.fleet.constructors}
    for name, cell in found:
        fetch, first = (
            cell.ran.median("latency_s"),
            built[name, cell.fleet.gpus].ran.median("latency_s"),
        )
        rows.append(
            [
                str(cell.fleet.gpus),
                name,
                "yes" if cell.fleet.constructors else "no",
                str(cell.links.total),
                str(cell.links.most),
                f"{cell.connecting_s:.2f}",
                f"{1e3 * fetch:.1f}",
                f"{1e3 * cell.ran.most('latency_s'):.1f}",
                f"{1e3 * cell.ran.most('waited_s'):.1f}",
                f"{fetch / first:.1f}",
            ]
        )
    return rows


def plan_rows(cells: Sequence[Cell]) -> list[list[str]]:
    rows = []
    for cell in cells:
        f, plan, cut = cell.fleet, cell.ran.median("plan_s"), cell.ran.median("route_s")
        where = f"dp {f.dp}" + (f", cp {f.cp}, pp {f.pp}" if f.group > 1 else "")
        rows.append(
            [
                str(f.gpus),
                where,
                str(f.batch),
                f"{1e3 * plan:.1f}",
                f"{1e3 * cut:.1f}",
                str(f.constructor_hosts),
                f"{1e3 * (plan + cut):.1f}",
            ]
        )
    return rows


def constants_rows(c: Constants) -> list[list[str]]:
    return [
        [
            name,
            f"{value / 2**20:.3f} MB"
            if name.endswith("_bytes") and value > 4096
            else f"{value:.4g}",
        ]
        for name, value in asdict(c).items()
    ]


def page(
    today: str,
    command: str,
    sources: int,
    found: Measured,
    made: list[Grid],
    fetch: list[tuple[str, Cell]],
    plans: list[Cell],
) -> str:
    parts = [
        f"# Simulated scale, {today}",
        f"{machine()} "
        f"{BUSY if os.getloadavg()[0] > (os.cpu_count() or 1) else ''}Planning is CPU "
        "seconds.",
        f"    {command}",
    ]
    parts += [
        f"A model with measured constants, {sources} sources of Parquet (token ids). The "
        "planner is real: its times are measured at that "
        "place tree, on this machine. Memory is that of data loading over all nodes; "
        "beside it a DataLoader in every rank that loads (one "
        "of a tensor-parallel group), each of whose workers opens every source.",
        "## Constants",
        markdown_table(("what", "measured"), constants_rows(found.constants)),
        "## Memory over a colocated loader's (Figures 14 and 17)",
        "The paper's statements (7.4 and appendix A), with our figures:",
        "\n".join(f"- {line}" for line in statements(found.constants, sources)),
        f"{BASE.gpus // PER_NODE} nodes of {PER_NODE} GPUs (TP {PER_NODE}), batch "
        f"{BASE.batch}, {BASE.workers} workers; one is changed. "
        "*Shared*: every source is opened once in the fleet, as Overlord does. *Apart*: "
        "every data-parallel group has loaders of its own "
        'for all sources, which is how we read the paper\'s "without data source partitioning".',
    ]
    for grid in made:
        parts += [f"### {grid.name}: shared", markdown_table(GRID_HEAD, grid_rows(grid.shared))]
        parts += [f"### {grid.name}: apart", markdown_table(GRID_HEAD, grid_rows(grid.apart))]
    parts += [
        "## Constructors (Figure 18)",
        f"The paper (appendix B): {FIGURE_18}.",
        "TP 4, PP 4, every rank fetches. *Fetch*: from the first moment of planning "
        "until the last rank has the step, nothing "
        "prefetched; *waited*: what trainers of a second a step stand still, with "
        "prefetch. *x with*: over the same with constructors.",
        markdown_table(FETCH_HEAD, fetch_rows(fetch)),
        "What this model has: the time of every message and byte at the node that sends "
        "and at the one that receives, and the planner's "
        "own. What it lacks: congestion inside a network, lost packets, limits of open "
        "sockets. So it shows where time and connections go, "
        "and no collapse.",
        "## What the planner takes, measured",
        "CPU milliseconds of a step: the draw, the strategy (`llm_balance`), the checks, and "
        "cutting the plan for every loader host and constructor host. Not simulated.",
        markdown_table(PLAN_HEAD, plan_rows(plans)),
    ]
    return "\n\n".join(parts) + "\n"


@click.command(help=__doc__.split("\n")[0])
@click.option("--sources", type=Numbers(), default="300", show_default=True, help="One number.")
@click.option("--measure", "again", is_flag=True, help="Measure the constants again.")
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_folder,
    help="Where the data is made and kept.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes all figures there.",
)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(sources: list[int], again: bool, data: Path, json_path: Path | None, saving: bool) -> None:
    console, today, n = wide_console(), datetime.date.today().isoformat(), sources[0]
    job, began = make_job(corpora(console, data, [n], 1)[n]), time.monotonic()
    with progress(console) as shown:
        tasks: dict[str, Any] = {}

        def step(what: str, done: int, of: int) -> None:
            if what not in tasks:
                tasks[what] = shown.add_task(what, total=of)
            shown.update(tasks[what], completed=done)

        blueprint = PreparedJob(job, Options())
        found, _ = constants_of(blueprint, again=again, progress=step)
        blueprint.close()
        made, fetch, plans = grids(found.constants, n), fetching(job, n, step), planning(job, step)
    show(console, found, made, fetch, plans)
    console.print(f"{time.monotonic() - began:.0f} s")
    if json_path:
        cells = {
            "fetch": [{"loaders": name, **cell.plain()} for name, cell in fetch],
            "planning": [cell.plain() for cell in plans],
        }
        json_path.write_text(
            json.dumps(
                {"constants": asdict(found.constants), "grids": [asdict(g) for g in made], **cells},
                indent=1,
            )
        )
    if saving:
        text = page(today, command_line("benchmarks/scale_sim.py"), n, found, made, fetch, plans)
        console.print(f"saved {save(f'{today}-scale-sim', text, {})}")


def show(
    console: Console,
    found: Measured,
    made: list[Grid],
    fetch: list[tuple[str, Cell]],
    plans: list[Cell],
) -> None:
    console.print(shown_table("constants", ("what", "measured"), constants_rows(found.constants)))
    for grid in made:
        for name in ("shared", "apart"):
            console.print(
                shown_table(f"{grid.name}: {name}", GRID_HEAD, grid_rows(getattr(grid, name)))
            )
    console.print(shown_table("with and without constructors", FETCH_HEAD, fetch_rows(fetch)))
    console.print(shown_table("planning, measured", PLAN_HEAD, plan_rows(plans)))


if __name__ == "__main__":
    main()
