"""Tables of ``overlord simulate``: measured constants, memory, planning and fetch latency."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from overlord.observe.tables import grid

if TYPE_CHECKING:
    from rich.console import RenderableType

    from overlord.dryrun.estimate import Cell
    from overlord.dryrun.machines import Constants

MB = 2**20
ROLES = ("planner", "loaders", "constructors", "clients")


def _titled(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int
) -> RenderableType:
    return Group(Text(title, style="bold"), grid(heads, rows, text_columns), Text(""))


def constants_view(c: Constants, stored: Path) -> RenderableType:
    """Return a table of the constants measured on this machine; ``stored``: the file with them."""
    sizes = {
        "a worker of a colocated loader": c.worker_bytes,
        "  per source that it opens": c.opened_bytes,
        "a loader worker": c.host_bytes,
        "  per source that it reads": c.source_bytes,
        "a constructor worker": c.constructor_bytes,
        "the planner process": c.planner_bytes,
        "a client": c.client_bytes,
        "one end of a connection": c.link_bytes,
    }
    times = {
        "to read and transform a row": f"{1e6 * c.read_s:.1f} us",
        "to build a token": f"{1e9 * c.build_s:.1f} ns",
        "round trip of a call": f"{1e6 * c.call_s:.0f} us",
        "a message on a connection": f"{1e6 * c.link_s:.1f} us",
        "to open a connection": f"{1e6 * c.connect_s:.0f} us",
        "bandwidth of a connection": f"{c.bandwidth / 1e9:.2f} GB/s",
        "tokens of a sample": f"{c.sample_tokens:.0f}",
        "bytes of a buffered sample": f"{c.sample_bytes:.0f}",
    }
    rows = [
        (size, f"{n / MB:.2f} MB", value, what)
        for (size, n), (what, value) in zip(sizes.items(), times.items(), strict=True)
    ]
    return _titled(
        f"measured on this machine, stored as {stored.name} (--measure measures again)",
        ("memory", "", "", "time and size"),
        rows,
        1,
    )


def memory_view(cells: Sequence[Cell]) -> RenderableType:
    """Return a table of the memory per node, compared with a colocated loader."""
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
                _has_constructors(cell),
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
        f"memory of data loading per node of {f.gpus_per_node} GPUs ({mesh}), compared with a "
        f"colocated loader of {f.workers} workers per rank"
    )
    return _titled(what, heads, rows, 2)


def time_view(cells: Sequence[Cell], pace_s: float) -> RenderableType:
    """Return a table of planning time, connections and fetch latency.

    ``pace_s``: seconds that trainers compute per step.
    """
    heads = (
        "GPUs",
        "constructors",
        "workers",
        "plan ms",
        "route ms",
        "busy",
        "connections",
        "at most",
        "connect s",
        "fetch ms",
        "worst",
        "waited ms",
    )
    rows = []
    for cell in cells:
        ran = cell.ran
        times = [1e3 * x for x in (ran.median("plan_s"), ran.median("route_s"))]
        fetch = [
            1e3 * x for x in (ran.median("latency_s"), ran.most("latency_s"), ran.most("waited_s"))
        ]
        rows.append(
            [
                f"{cell.fleet.gpus}",
                _has_constructors(cell),
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
        f"planning, connections and fetch latency; trainers compute {pace_s:g} s per step\n"
        "(workers: of loaders; busy: the planner; at most: connections of one process)",
        heads,
        rows,
        2,
    )


def waits_of(cells: Sequence[Cell]) -> list[str]:
    """Return a sentence for each cell whose trainers wait, with the reason."""
    reasons = [(cell, cell.ran.wait_reason(cell.pace_s)) for cell in cells]
    return [
        f"{cell.fleet.gpus} GPUs, {'with' if cell.fleet.constructors else 'without'} "
        "constructors: trainers wait up to "
        f"{cell.ran.most('waited_s'):.2f} s per step for {why}"
        for cell, why in reasons
        if why
    ]


def _has_constructors(cell: Cell) -> str:
    return "yes" if cell.fleet.constructors else "no"
