"""Memory and fetch time of Overlord and of a DataLoader per rank (Figures 12 and 15 of the paper).

    python benchmarks/memory.py --save       # three quarters of an hour on two idle cores
    python benchmarks/memory.py --sources 5 --ranks 2 --workers 1 \\
        --kinds torch,local,process --no-extras      # a quick look

Cells vary sources, ranks and workers. Memory is the PSS over all processes of a cell, minus that of
the ranks after their imports: every rank of every loader imports torch. Workers and the launching
process count completely. Rows are shuffled (Overlord's default) and in order. Both sides are
compared at equal settings, and each at the smallest setting that keeps the required speed. Cells
that do not fit this machine are computed from slopes fitted over the others, and marked. Some
sources have row groups of 16 MB and more. benchmarks/README.md explains the method.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from corpus import default_folder
from holding.case import COLOCATED, KINDS, LOCAL, PROCESS, RAY, Case, Found
from holding.cell import run
from holding.compared import HEAD as COMPARED_HEAD
from holding.compared import MOST, SMALLEST, compare, on_off, source_parallelism
from holding.corpora import mixed_corpus
from holding.grids import Extent, extras, grid, needless, parallelism
from holding.slopes import Slopes, fit, guess
from overlord.process import resources
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
from peers.ledger import SERVICES, adopt_orphans

TARGET = 13.5  # times less than colocated, at the largest cell: the paper's best
ROOM = 0.6  # share of the free memory: a larger cell is not run
HEAD = (
    "loader",
    "shuffle",
    "sources",
    "ranks",
    "workers",
    "workers in all",
    "MB",
    "with imports MB",
    "Ray's own",
    "shadows",
    "processes",
    "fetch ms",
    "worst",
    "late",
    "keeps pace",
)
SLOPE_HEAD = ("loader", "shuffle", "MB for each", "", "", "", "", "worst fit")


def free_mb() -> float:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) / 1024, resources.memory_bytes() / 2**20)


def measure(
    cases: Sequence[Case], extent: Extent, console: Console, limit_s: float
) -> tuple[list[Found], dict[str, str]]:
    """Run cells, smallest first; slopes replace cells that do not fit, and failures are listed."""
    found: list[Found] = []
    failed: dict[str, str] = {}
    with progress(console) as shown:
        bar = shown.add_task("", total=len(cases))
        for case in cases:
            shown.update(
                bar,
                description=f"{case.n_sources} sources, {case.ranks} ranks, "
                f"{case.workers} workers: {case.name}",
            )
            if not needless(case, found, extent) and expected(case, found) < ROOM * free_mb():
                try:
                    found.append(run(case, limit_s))
                except Exception as failure:
                    failed[
                        f"{case.name}, {case.n_sources} sources, {case.ranks} ranks, "
                        f"{case.workers} workers"
                    ] = f"{type(failure).__name__}: {failure}"
            shown.advance(bar)
    return found + by_slope(
        [case for case in cases if not needless(case, found, extent)], found
    ), failed


def plain(found: Sequence[Found], case: Case) -> list[Found]:
    """Return the measured cells of the same kind and shape, without special options."""

    def shape(c: Case) -> tuple[Any, ...]:
        return (c.kind, c.shuffle, c.tp, c.context, c.microbatches, c.hosts, c.partition, c.shadows)

    return [f for f in found if shape(f.case) == shape(case) and not f.by_slope]


def expected(case: Case, found: Sequence[Found]) -> float:
    alike = plain(found, case)
    return (
        fit(alike).predict(case)
        if len(alike) >= 4
        else max([guess(case), *(f.over_mb for f in alike)])
    )


def by_slope(cases: Sequence[Case], found: Sequence[Found]) -> list[Found]:
    """Return the colocated cells that were not run."""
    done, made = {f.case for f in found}, []
    for case in cases:
        if case in done or case.kind != COLOCATED or len(alike := plain(found, case)) < 3:
            continue
        mb = fit(alike).predict(case)
        made.append(
            Found(
                case=case,
                over_mb=mb,
                whole_mb=0.0,
                parts_mb={},
                shadows_mb=0.0,
                processes=0,
                waits=(),
                late=0,
                by_slope=True,
            )
        )
    return made


# ---- tables


def rows_of(found: Sequence[Found]) -> list[list[str]]:
    rows = []

    def in_order(c: Case) -> tuple[Any, ...]:
        return (
            c.context,
            c.n_sources,
            c.ranks,
            c.kind != COLOCATED,
            c.name,
            not c.shuffle,
            c.workers,
        )

    for f in sorted(found, key=lambda f: in_order(f.case)):
        case = f.case
        start = [
            case.name,
            on_off(case.shuffle),
            str(case.n_sources),
            str(case.ranks),
            str(case.workers),
            str(case.loading),
        ]
        if f.by_slope:
            rows.append(
                [*start, f"{f.over_mb:.0f} (by slope)"] + [""] * (len(HEAD) - len(start) - 1)
            )
            continue
        waits = [1e3 * w for w in f.waits]
        services = f.parts_mb.get(SERVICES, 0.0)
        rows.append(
            [
                *start,
                f"{f.over_mb:.0f}",
                f"{f.whole_mb:.0f}",
                f"{services:.0f}" if services else "",
                f"{f.shadows_mb:.1f}" if case.shadows else "",
                str(f.processes),
                f"{statistics.median(waits):.1f}",
                f"{max(waits):.0f}",
                str(f.late),
                "yes" if f.keeps_pace else "**no**",
            ]
        )
    return rows


def plain_cells(found: Sequence[Found], kind: str, shuffle: bool) -> list[Found]:
    """Return the measured cells of Figure 12, without special options."""
    cells = [
        f
        for f in found
        if (f.case.kind, f.case.shuffle, f.case.tp, f.case.context, f.by_slope)
        == (kind, shuffle, 1, 8192, False)
    ]
    return [f for f in cells if not (f.case.hosts or f.case.partition or f.case.shadows)]


def slopes_of(found: Sequence[Found]) -> list[tuple[str, Slopes]]:
    """Return (shuffle, slopes) of every loader with enough cells."""
    made = []
    for kind in KINDS:
        for shuffle in (True, False):
            cells = plain_cells(found, kind, shuffle)
            if len(cells) >= (3 if kind == COLOCATED else 4):
                made.append((on_off(shuffle), fit(cells)))
    return made


def slope_rows(slopes: Sequence[tuple[str, Slopes]]) -> list[list[str]]:
    rows = []
    for shuffle, s in slopes:
        cells = [f"{name} {value:.3f}" for name, value in zip(s.names, s.values, strict=True)]
        rows.append(
            [
                s.kind,
                shuffle,
                *(cells + [""] * (len(SLOPE_HEAD) - 3 - len(cells))),
                f"{s.worst:.0%}",
            ]
        )
    return rows


def flatness(found: Sequence[Found]) -> list[str]:
    """Return the memory of one more rank by number of sources; it should not grow with them."""
    lines = []
    for kind, shuffle in ((k, s) for k in (LOCAL, PROCESS, RAY, COLOCATED) for s in (True, False)):
        cells = plain_cells(found, kind, shuffle)
        per_rank = {}
        for n in sorted({f.case.n_sources for f in cells}):
            some = sorted(
                (f.case.ranks, f.over_mb)
                for f in cells
                if f.case.n_sources == n and f.case.workers == 1
            )
            if len(some) > 1 and some[-1][0] > some[0][0]:
                per_rank[n] = (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0])
        if per_rank:
            order = "shuffled" if shuffle else "in order"
            steps = ", ".join(f"{mb:.1f} at {n} sources" for n, mb in per_rank.items())
            lines.append(f"{kind}, {order}, one worker: MB for one more rank {steps}.")
    return lines


def verdict(found: Sequence[Found]) -> list[str]:
    """Return the target at the most sources and ranks, at the smallest and at equal settings."""
    made = [c for c in compare(found) if c.setting in (SMALLEST, MOST)]
    largest = max(((c.ours.case.n_sources, c.ours.case.ranks) for c in made), default=None)
    lines = []
    for c in made:
        case = c.ours.case
        if (case.n_sources, case.ranks) == largest:
            how = "measured" if c.measured else "by slope"
            lines.append(
                f"{case.n_sources} sources, {case.ranks} ranks, "
                f"{'shuffled' if case.shuffle else 'in order'}, {c.setting} "
                f"({case.loading} "
                f"workers in all; torch {c.theirs.case.loading}): {case.name} takes "
                f"{c.ratio:.1f} times less than a colocated loader "
                f"({how}); {TARGET:g} is {'met' if c.ratio >= TARGET else 'missed'}."
            )
    return lines


def page(found: Sequence[Found], failed: dict[str, str], today: str, command: str) -> str:
    about = (
        "MB of PSS over all processes of a cell, the highest seen, less what ranks held "
        "after their imports; every rank of every loader "
        "imports torch. *With imports*: nothing subtracted. *Ray's own*: its services, "
        "counted in MB too. *Fetch*: how long a rank waits "
        "for a step, asked for every half second; *late*: steps that took longer than "
        "that; *keeps pace*: no step was late. torch: one "
        "DataLoader in every rank, *workers* of each. Overlord: *workers* are loading "
        "threads in all. *Shuffle*: Overlord shuffles each "
        "source, which is its default; a DataLoader has one buffer of 1,000 rows in each "
        "worker. *Shadows*: what shadow loaders hold, "
        "counted in MB too."
    )
    usual = [f for f in found if f.case.context == 8192]
    parallel = [f for f in found if f.case.context != 8192]
    parts = [
        f"# Memory by sources, ranks and workers, {today}",
        f"{machine()}\n\n    {command}",
        about,
    ]
    parts += ["\n".join(f"- {line}" for line in [*verdict(usual), *flatness(usual)])]
    parts += [
        "## Compared",
        "*Smallest that keeps pace*: each side with the fewest workers of those tried. "
        "*Equal*: as many workers in all on both sides.",
        markdown_table(COMPARED_HEAD, [c.row() for c in compare(usual)]),
        "## Cells (Figure 12)",
        markdown_table(HEAD, rows_of(usual)),
        "## Slopes",
        markdown_table(SLOPE_HEAD, slope_rows(slopes_of(found))),
    ]
    if parallel:
        words = (
            "TP 16, DP 2, batch 32, a context of 32k, no trainer; one rank of a TP group "
            "loads. Sources in one loader host or two."
        )
        words += (
            " With shadows each source is read in the other host too; what they hold stands "
            "apart, and is counted in MB too."
        )
        told = "\n".join(f"- {line}" for line in source_parallelism(parallel))
        parts += [
            "## Source parallelism (Figure 15)",
            words,
            *([told] if told else []),
            markdown_table(HEAD, rows_of(parallel)),
        ]
    if failed:
        parts += ["## Failed", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    return "\n\n".join(parts) + "\n"


class Orders(click.ParamType):
    name = "on,off"

    def convert(
        self,
        value: str | tuple[bool, ...],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> tuple[bool, ...]:
        if isinstance(value, tuple):
            return value
        if unknown := [word for word in value.split(",") if word not in ("on", "off")]:
            self.fail(f"expected on, off or both, got {unknown[0]!r}", param, ctx)
        return tuple(word == "on" for word in value.split(","))


@click.command(help=__doc__.split("\n")[0])
@click.option("--sources", type=Numbers(), default="5,100,300", show_default=True)
@click.option("--ranks", type=Numbers(), default="2,8", show_default=True)
@click.option(
    "--workers",
    type=Numbers(),
    default="1,2,4",
    show_default=True,
    help="Of one rank's DataLoader, ascending.",
)
@click.option("--shuffle", "shuffles", type=Orders(), default="on,off", show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option(
    "--extras/--no-extras",
    "more",
    default=True,
    help="Auto-partitioning, shadows, source parallelism.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_folder,
    help="Where the data is made and kept.",
)
@click.option(
    "--limit",
    "limit_s",
    type=float,
    default=240.0,
    show_default=True,
    help="Seconds after which a cell is given up.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every cell's figures there.",
)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(
    sources: list[int],
    ranks: list[int],
    workers: list[int],
    shuffles: tuple[bool, ...],
    kinds: str,
    more: bool,
    data: Path,
    limit_s: float,
    json_path: Path | None,
    saving: bool,
) -> None:
    console, today, wanted = wide_console(), datetime.date.today().isoformat(), kinds.split(",")
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise click.BadParameter(
            f"{', '.join(unknown)}: there are {', '.join(KINDS)}", param_hint="--kinds"
        )
    adopt_orphans()
    with progress(console) as shown:
        bars = {
            name: shown.add_task(f"data: {name}", total=None)
            for name in ("sources", "tokenizer", "large sources")
        }
        folder = str(
            mixed_corpus(
                data,
                max(sources),
                1,
                lambda name, at, of: shown.update(bars[name], completed=at, total=of),
            )
        )
    extent = Extent(
        sources=tuple(sources),
        ranks=tuple(sorted(ranks)),
        workers=tuple(sorted(workers)),
        kinds=tuple(wanted),
        shuffles=shuffles,
        folder=folder,
    )
    cases = grid(extent) + (extras(extent) + parallelism(extent) if more else [])
    found, failed = measure(cases, extent, console, limit_s)
    console.print(shown_table("compared", COMPARED_HEAD, [c.row() for c in compare(found)]))
    console.print(shown_table("cells", HEAD, rows_of(found)))
    console.print(shown_table("slopes", SLOPE_HEAD, slope_rows(slopes_of(found))))
    for line in [
        *verdict(found),
        *flatness(found),
        *source_parallelism(found),
        *(f"failed: {name}: {why}" for name, why in failed.items()),
    ]:
        console.print(line, markup=False)
    if json_path:
        json_path.write_text(
            json.dumps(
                {
                    "date": today,
                    "machine": machine(),
                    "cells": [asdict(f) for f in found],
                    "failed": failed,
                },
                indent=1,
            )
        )
    if saving:
        text = page(found, failed, today, command_line("benchmarks/memory.py"))
        console.print(f"saved {save(f'{today}-memory', text, {})}")


if __name__ == "__main__":
    main()
