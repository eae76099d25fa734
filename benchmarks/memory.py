"""Memory and fetch time by sources, ranks and workers: Overlord beside a DataLoader in every rank (Figures 12 and 15 of the paper).

    python benchmarks/memory.py --save                                   # for the record: about 20 minutes on two idle cores
    python benchmarks/memory.py --sources 5 --ranks 2 --workers 1 --kinds torch,local,process --no-extras    # a look

PSS over all processes of a cell, less what the ranks held after their imports (a trainer has those anyway); hosts and the launching
process count whole. All are asked for the same steps at the same pace. Cells that would not fit this machine are computed from slopes
fitted over those that did, and say so. Some sources have row groups of 16 MB and more. How it is measured: benchmarks/README.md.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # its own modules, also when started from elsewhere

import click
from rich.console import Console

from corpus import default_folder
from holding.case import COLOCATED, KINDS, LOCAL, PROCESS, RAY, Case, Found
from holding.cell import run
from holding.corpora import mixed_corpus
from holding.slopes import Slopes, fit, guess
from overlord import limits
from page import Numbers, command_line, machine, markdown_table, progress, save, shown_table, wide_console
from peers.ledger import SERVICES, adopt_orphans

TARGET = 13.5  # times less than colocated, at the largest cell: the paper's best
ROOM = 0.6  # of the memory that is free: a cell above it is not run
HEAD = (
    "loader",
    "sources",
    "ranks",
    "workers",
    "MB",
    "x less than torch",
    "with imports MB",
    "Ray's own",
    "shadows",
    "processes",
    "fetch ms",
    "worst",
    "late",
)
SLOPE_HEAD = ("loader", "MB for each", "", "", "", "", "worst fit")


def grid(sources: Sequence[int], ranks: Sequence[int], workers: Sequence[int], kinds: Sequence[str], folder: str) -> list[Case]:
    """Few ranks with all numbers of workers, many with the fewest and the most: enough for slopes. Overlord has no workers in ranks, but
    threads: as many as most workers, and at the most ranks as few too."""
    made = []
    for n in sources:
        if COLOCATED in kinds:
            for r in ranks:
                for w in workers if r == ranks[0] else sorted({workers[0], workers[-1]}):
                    made.append(Case(kind=COLOCATED, folder=folder, n_sources=n, ranks=r, workers=w))
        for kind in (k for k in (LOCAL, PROCESS, RAY) if k in kinds):
            shapes = sorted({(ranks[0], workers[-1]), (ranks[-1], workers[0]), (ranks[-1], workers[-1])})
            made += [Case(kind=kind, folder=folder, n_sources=n, ranks=r, workers=w) for r, w in shapes]
    return sorted(made, key=lambda c: (c.n_sources, c.ranks * c.workers if c.kind == COLOCATED else 0))


def extras(sources: Sequence[int], ranks: Sequence[int], workers: Sequence[int], kinds: Sequence[str], folder: str) -> list[Case]:
    """With auto-partitioning on every runtime, and with shadows, at the largest."""
    base = Case(kind=PROCESS, folder=folder, n_sources=sources[-1], ranks=ranks[-1], workers=workers[-1])
    made = [replace(base, kind=kind, partition="auto") for kind in (LOCAL, PROCESS, RAY) if kind in kinds]
    return made + ([replace(base, shadows=True, hosts=2)] if PROCESS in kinds else [])


def parallelism(sources: Sequence[int], workers: Sequence[int], kinds: Sequence[str], folder: str) -> list[Case]:
    """Figure 15: TP 16, DP 2, batch 32, a context of 32k; sources in one loader host and in two, and there with shadows, which stand in
    the other host. One rank of a TP group loads. On Ray at the most sources."""
    shape: dict[str, Any] = {"folder": folder, "ranks": 2, "context": 32_768, "microbatches": 1}
    made = []
    for n in [n for n in sources if n >= 100]:
        for w in sorted({workers[0], workers[-1]}):
            made += [Case(kind=COLOCATED, n_sources=n, workers=w, **shape)] if COLOCATED in kinds else []
        for kind in (k for k in (PROCESS, RAY) if k in kinds and (k == PROCESS or n == max(sources))):
            base = Case(kind=kind, n_sources=n, workers=workers[-1], hosts=1, tp=16, samples=32, **shape)
            made += [base, replace(base, hosts=2), replace(base, hosts=2, shadows=True)]
    return made


def free_mb() -> float:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) / 1024, limits.memory_bytes() / 2**20)


def measure(cases: Sequence[Case], console: Console, limit_s: float) -> tuple[list[Found], dict[str, str]]:
    """Smallest first; one that would not fit is left for slopes, one that fails is told."""
    found: list[Found] = []
    failed: dict[str, str] = {}
    with progress(console) as shown:
        bar = shown.add_task("", total=len(cases))
        for case in cases:
            shown.update(bar, description=f"{case.n_sources} sources, {case.ranks} ranks, {case.workers} workers: {case.name}")
            if expected(case, found) < ROOM * free_mb():
                try:
                    found.append(run(case, limit_s))
                except Exception as failure:
                    failed[f"{case.name}, {case.n_sources} sources, {case.ranks} ranks, {case.workers} workers"] = (
                        f"{type(failure).__name__}: {failure}"
                    )
            shown.advance(bar)
    return found + by_slope(cases, found), failed


def plain(found: Sequence[Found], case: Case) -> list[Found]:
    """Measured cells of the same kind and shape, without options of their own."""
    shape = lambda c: (c.kind, c.tp, c.context, c.microbatches, c.hosts, c.partition, c.shadows)  # noqa: E731
    return [f for f in found if shape(f.case) == shape(case) and not f.by_slope]


def expected(case: Case, found: Sequence[Found]) -> float:
    alike = plain(found, case)
    return fit(alike).predict(case) if len(alike) >= 4 else max([guess(case), *(f.over_mb for f in alike)])


def by_slope(cases: Sequence[Case], found: Sequence[Found]) -> list[Found]:
    """The colocated cells that were not run."""
    done, made = {f.case for f in found}, []
    for case in cases:
        if case in done or case.kind != COLOCATED or len(alike := plain(found, case)) < 3:
            continue
        mb = fit(alike).predict(case)
        made.append(Found(case=case, over_mb=mb, whole_mb=0.0, parts_mb={}, shadows_mb=0.0, processes=0, waits=(), late=0, by_slope=True))
    return made


# ---- tables ---------------------------------------------------------------------------------------------------------


def rival(found: Sequence[Found], case: Case, workers: int) -> Found | None:
    """The colocated loader with as many ranks, and so many workers."""
    same = (case.n_sources, case.ranks, workers, case.context)
    return next(
        (f for f in found if f.case.kind == COLOCATED and (f.case.n_sources, f.case.ranks, f.case.workers, f.case.context) == same), None
    )


def rows_of(found: Sequence[Found]) -> list[list[str]]:
    rows = []
    for f in sorted(
        found, key=lambda f: (f.case.context, f.case.n_sources, f.case.ranks, f.case.kind != COLOCATED, f.case.name, f.case.workers)
    ):
        theirs = rival(found, f.case, f.case.workers) if f.case.kind != COLOCATED else None
        ratio = "" if theirs is None else f"{theirs.over_mb / f.over_mb:.1f}" + (" (by slope)" if theirs.by_slope else "")
        start = [f.case.name, str(f.case.n_sources), str(f.case.ranks), str(f.case.workers)]
        if f.by_slope:
            rows.append([*start, f"{f.over_mb:.0f} (by slope)"] + [""] * (len(HEAD) - 5))
            continue
        waits = [1e3 * w for w in f.waits]
        services = f.parts_mb.get(SERVICES, 0.0)
        rows.append([
            *start, f"{f.over_mb:.0f}", ratio, f"{f.whole_mb:.0f}", f"{services:.0f}" if services else "",
            f"{f.shadows_mb:.1f}" if f.case.shadows else "", str(f.processes), f"{statistics.median(waits):.1f}", f"{max(waits):.0f}",
            str(f.late),
        ])  # fmt: skip
    return rows


def slopes_of(found: Sequence[Found]) -> list[Slopes]:
    made = []
    for kind in KINDS:
        cells = [
            f for f in found if f.case.kind == kind and not f.by_slope and f.case.context == Case.__dataclass_fields__["context"].default
        ]
        cells = [f for f in cells if not (f.case.hosts or f.case.partition or f.case.shadows)]
        if len(cells) >= (3 if kind == COLOCATED else 4):
            made.append(fit(cells))
    return made


def slope_rows(slopes: Sequence[Slopes]) -> list[list[str]]:
    rows = []
    for s in slopes:
        cells = [f"{name} {value:.3f}" for name, value in zip(s.names, s.values, strict=True)]
        rows.append([s.kind, *(cells + [""] * (len(SLOPE_HEAD) - 2 - len(cells))), f"{s.worst:.0%}"])
    return rows


def flatness(found: Sequence[Found]) -> list[str]:
    """What one more rank takes, by number of sources: the promise is that it does not grow with them."""
    lines = []
    for kind in (LOCAL, PROCESS, RAY, COLOCATED):
        cells = [
            f
            for f in found
            if f.case.kind == kind and f.case.tp == 1 and not (f.case.hosts or f.case.partition or f.case.shadows or f.by_slope)
        ]
        per_rank = {}
        for n in sorted({f.case.n_sources for f in cells}):
            for w in sorted({f.case.workers for f in cells})[-1:]:
                some = sorted(
                    (f.case.ranks, f.over_mb) for f in cells if f.case.n_sources == n and f.case.workers == w and f.case.context == 8192
                )
                if len(some) > 1 and some[-1][0] > some[0][0]:
                    per_rank[n] = (some[-1][1] - some[0][1]) / (some[-1][0] - some[0][0])
        if per_rank:
            lines.append(f"{kind}: MB for one more rank " + ", ".join(f"{mb:.1f} at {n} sources" for n, mb in per_rank.items()) + ".")
    return lines


def verdict(found: Sequence[Found]) -> list[str]:
    """The target at the largest cell."""
    largest = max((f.case for f in found if f.case.kind == COLOCATED), key=lambda c: (c.n_sources, c.ranks, c.workers), default=None)
    if largest is None:
        return []
    theirs, lines = rival(found, largest, largest.workers), []
    for f in found:
        if f.case.kind != COLOCATED and (f.case.n_sources, f.case.ranks, f.case.workers, f.case.context) == (
            largest.n_sources,
            largest.ranks,
            largest.workers,
            largest.context,
        ):
            assert theirs is not None
            less = theirs.over_mb / f.over_mb
            how = "by slope" if theirs.by_slope else "measured"
            lines.append(
                f"{largest.n_sources} sources, {largest.ranks} ranks, {largest.workers} workers: {f.case.name} takes {less:.1f} times less "
                f"than a colocated loader ({how}); {TARGET:g} is {'met' if less >= TARGET else 'missed'}."
            )
    return lines


def page(found: Sequence[Found], failed: dict[str, str], today: str, command: str) -> str:
    about = (
        "MB of PSS over all processes of a cell, the highest seen, less what ranks held after their imports. *With imports*: nothing "
        "subtracted. *Ray's own*: its services, counted in MB too. *Fetch*: how long a rank waits for a step, asked for every half second; "
        "*late*: steps that took longer than that. torch: one DataLoader in every rank. Overlord: as many loading threads in all "
        "as one rank of torch has workers, and two at least. *Shadows*: what shadow loaders hold, counted in MB too."
    )
    usual = [f for f in found if f.case.context == 8192]
    parallel = [f for f in found if f.case.context != 8192]
    parts = [f"# Memory by sources, ranks and workers, {today}", f"{machine()}\n\n    {command}", about]
    parts += ["\n".join(f"- {line}" for line in [*verdict(usual), *flatness(usual)])]
    parts += [
        "## Cells (Figure 12)",
        markdown_table(HEAD, rows_of(usual)),
        "## Slopes",
        markdown_table(SLOPE_HEAD, slope_rows(slopes_of(found))),
    ]
    if parallel:
        words = "TP 16, DP 2, batch 32, a context of 32k, no trainer; one rank of a TP group loads. Sources in one loader host or two."
        words += " With shadows each source is read in the other host too; what they hold stands apart, and is counted in MB too."
        parts += ["## Source parallelism (Figure 15)", words, markdown_table(HEAD, rows_of(parallel))]
    if failed:
        parts += ["## Failed", "\n".join(f"- {name}: {why}" for name, why in failed.items())]
    return "\n\n".join(parts) + "\n"


@click.command(help=__doc__.split("\n")[0])
@click.option("--sources", type=Numbers(), default="5,100,300", show_default=True)
@click.option("--ranks", type=Numbers(), default="2,8", show_default=True)
@click.option("--workers", type=Numbers(), default="1,4", show_default=True)
@click.option("--kinds", default=",".join(KINDS), show_default=True)
@click.option("--extras/--no-extras", "more", default=True, help="Auto-partitioning, shadows, source parallelism.")
@click.option("--data", type=click.Path(path_type=Path, file_okay=False), default=default_folder, help="Where the data is made and kept.")
@click.option("--limit", "limit_s", type=float, default=240.0, show_default=True, help="Seconds after which a cell is given up.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Writes every cell's figures there.")
@click.option("--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results.")
def main(
    sources: list[int], ranks: list[int], workers: list[int], kinds: str, more: bool, data: Path, limit_s: float,
    json_path: Path | None, saving: bool,
) -> None:  # fmt: skip
    console, today, wanted = wide_console(), datetime.date.today().isoformat(), kinds.split(",")
    if unknown := [kind for kind in wanted if kind not in KINDS]:
        raise click.BadParameter(f"{', '.join(unknown)}: there are {', '.join(KINDS)}", param_hint="--kinds")
    adopt_orphans()
    with progress(console) as shown:
        bars = {name: shown.add_task(f"data: {name}", total=None) for name in ("sources", "tokenizer", "large sources")}
        folder = str(mixed_corpus(data, max(sources), 1, lambda name, at, of: shown.update(bars[name], completed=at, total=of)))
    cases = grid(sources, ranks, workers, wanted, folder)
    cases += extras(sources, ranks, workers, wanted, folder) + parallelism(sources, workers, wanted, folder) if more else []
    found, failed = measure(cases, console, limit_s)
    console.print(shown_table("cells", HEAD, rows_of(found)))
    console.print(shown_table("slopes", SLOPE_HEAD, slope_rows(slopes_of(found))))
    for line in [*verdict(found), *flatness(found), *(f"failed: {name}: {why}" for name, why in failed.items())]:
        console.print(line, markup=False)
    if json_path:
        json_path.write_text(
            json.dumps({"date": today, "machine": machine(), "cells": [asdict(f) for f in found], "failed": failed}, indent=1)
        )
    if saving:
        console.print(f"saved {save(f'{today}-memory', page(found, failed, today, command_line('benchmarks/memory.py')), {})}")


if __name__ == "__main__":
    main()
