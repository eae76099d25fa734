"""Hybrid schedules, modelled: slowest rank over the ideal, next to static CP, LPT and Megatron's.

    python benchmarks/hdp.py --quick     # a few cells: seconds on 2 cores
    python benchmarks/hdp.py --save      # the whole grid: a minute on 16 cores; writes benchmarks/results

Everything but planning time is a model; nothing ran on a cluster. benchmarks/README.md explains it.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from hybrid.lengths import LINUX, MIXES
from hybrid.measure import (
    SLOW_NETWORK,
    Case,
    K,
    Outcome,
    Pipeline,
    Planning,
    Time,
    cases,
    measure,
    pipeline,
    planning,
)
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

TARGET = {"linux": 1.05}  # up to 1M; lognormal mixes 1.02
LOGNORMAL_TARGET = 1.02
PLANNING_MS = {1024: 150, 16384: 1500}
LITTLE = 1.05  # a gain over balanced static CP below this is little
Section = tuple[str, str, list[str], list[list[str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    outcomes: list[Outcome]
    slow: list[Outcome]
    pipelines: list[Pipeline]
    planning: list[Planning]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One piece of work for a process: what to call, and its arguments."""

    part: str  # field of Found
    work: Callable[..., Any]
    case: Case
    seed: int

    def done(self, linux: Path) -> Any:
        return self.work(self.case, self.seed, linux)


def run(
    quick: bool, slots: Sequence[int], seeds: int, linux: Path, processes: int, console: Console
) -> Found:
    grid = list(cases(quick, slots))
    slow = [
        replace(case, costs=SLOW_NETWORK)
        for case in grid
        if case.ranks >= 64 and case.slots == min(slots) and case.context >= 256 * K
    ]
    pipes = [case for case in grid if case.slots == max(slots) or quick]
    ranks = (1024,) if quick else (1024, 16384)
    plans = [
        (mix, r, context * K, capacity * K)
        for r in ranks
        for mix in MIXES
        for context, capacity in ((64, 8), (1024, 8), (1024, 64))
    ]
    cells = [
        Cell(part="outcomes", work=measure, case=case, seed=seed)
        for case in grid
        for seed in range(seeds)
    ]
    cells += [Cell(part="slow", work=measure, case=case, seed=0) for case in slow]
    cells += [Cell(part="pipelines", work=pipeline, case=case, seed=0) for case in pipes]
    found = Found(outcomes=[], slow=[], pipelines=[], planning=[])
    with progress(console) as bars:
        bar = bars.add_task("", total=len(cells) + len(plans))
        for mix, r, context, capacity in plans:  # one at a time: they are timed
            bars.update(bar, description=f"planning {mix}, {r} ranks")
            found.planning.append(planning(mix, r, context, capacity, 1 if quick else 3, linux))
            bars.advance(bar)
        bars.update(bar, description=f"{len(cells)} cells in {processes} processes")
        for cell, result in zip(
            cells, results_of(cells, linux, processes, lambda: bars.advance(bar)), strict=True
        ):
            getattr(found, cell.part).append(result)
    return found


def results_of(
    cells: Sequence[Cell], linux: Path, processes: int, advance: Callable[[], None]
) -> list[Any]:
    """Return the results of all cells in their order; processes take the largest first."""
    results: list[Any] = [None] * len(cells)
    by = sorted(range(len(cells)), key=lambda i: -cells[i].case.tokens)
    if processes == 1:
        for i in by:
            results[i] = cells[i].done(linux)
            advance()
        return results
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        number = {pool.submit(cells[i].done, linux): i for i in by}
        for future in as_completed(number):
            results[number[future]] = future.result()
            advance()
    return results


def target(case: Case) -> float:
    """Return the target of a cell; 0: it has none."""
    if case.mix == "linux" and case.context > 1024 * K:
        return 0.0
    return TARGET.get(case.mix, LOGNORMAL_TARGET)


def by_case(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Return the outcomes of every case, over its seeds."""
    return [[o for o in outcomes if o.case == c] for c in dict.fromkeys(o.case for o in outcomes)]


def name(case: Case) -> list[str]:
    return [
        case.mix,
        f"{case.ranks:,}",
        f"{case.context // K}K",
        f"{case.capacity // K}K x {case.slots}",
    ]


NAMES = ["mix", "ranks", "context", "tokens a rank"]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def gains(outcomes: Sequence[Outcome], way: Callable[[Outcome], float]) -> str:
    return f"{mean([way(o) / o.any.slowest for o in outcomes]):.2f}"


def main_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    rows = []
    for same in by_case(outcomes):
        worst = max(o.any.slowest for o in same)
        bold = "**" if 0 < target(same[0].case) < worst else ""
        rows.append(
            [
                *name(same[0].case),
                f"{bold}{worst:.3f}{bold}",
                f"{max(o.bound for o in same):.3f}",
                f"{max(o.aligned.slowest for o in same):.3f}",
                f"{max(o.megatron.slowest for o in same):.3f}",
                f"{mean([o.static.slowest for o in same]):.2f}",
                f"{mean([o.balanced.slowest for o in same]):.2f}",
                f"{mean([o.whole for o in same]):.2f}",
                gains(same, lambda o: o.static.slowest),
                gains(same, lambda o: o.balanced.slowest),
                gains(same, lambda o: o.whole),
                gains(same, lambda o: o.megatron.slowest),
            ]
        )
    return rows


MAIN_HEAD = [
    *NAMES,
    "ours (worst)",
    "bound (worst)",
    "ours, aligned (worst)",
    "Megatron (worst)",
    "static CP",
    "static CP, LPT",
    "whole documents, LPT",
    "gain over static",
    "over static LPT",
    "over whole",
    "over Megatron",
]


def part(same: Sequence[Outcome], way: Callable[[Outcome], Time]) -> str:
    times = [way(o) for o in same]
    return " / ".join(
        f"{max(0.0, mean([f(t) for t in times])):.3f}"
        for f in (lambda t: t.compute, lambda t: t.transfers, lambda t: t.waits)
    )


def part_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    return [
        [
            *name(same[0].case),
            part(same, lambda o: o.any),
            part(same, lambda o: o.megatron),
            part(same, lambda o: o.static),
            part(same, lambda o: o.balanced),
            str(max(o.largest for o in same)),
        ]
        for same in by_case(outcomes)
    ]


def unfavourable(found: Found) -> list[str]:
    """Return what a reader should know before the good figures."""
    lines = []
    worst = [max(same, key=lambda o: o.any.slowest) for same in by_case(found.outcomes)]
    missed = [
        f"{' '.join(name(o.case))}: {o.any.slowest:.3f}, where no schedule can go below "
        f"{o.bound:.3f}"
        for o in worst
        if 0 < target(o.case) < o.any.slowest
    ]
    lines.append(f"- Above the target (worst seed): {'; '.join(missed) or 'no cell'}.")
    for title, way in (
        ("Megatron's", lambda o: o.megatron.slowest),
        ("static CP", lambda o: o.static.slowest),
        ("static CP with LPT", lambda o: o.balanced.slowest),
    ):
        worse = [o for o in found.outcomes if min(o.any.slowest, o.aligned.slowest) > way(o)]
        most = max((o.any.slowest / way(o) - 1 for o in worse), default=0.0)
        lines.append(
            f"- Slower than {title}: {len(worse)} of {len(found.outcomes)} runs, by at most "
            f"{most:.2%}."
        )
    cells = by_case(found.outcomes)
    little = [c for c in cells if mean([o.balanced.slowest / o.any.slowest for o in c]) < LITTLE]
    short = sum(c[0].case.context == 64 * K for c in little)
    lines.append(
        f"- Less than 5 % faster than static CP with LPT: {len(little)} of {len(cells)} cells, "
        f"{short} of them with a context of 64K (one node of 8 ranks holds it)."
    )
    bound = max((p for p in found.planning), key=lambda p: p.over_ideal)
    lines.append(
        f"- Few tokens for many ranks: 32M tokens on {bound.ranks:,} ranks ({bound.mix}, context "
        f"{bound.context // K}K) take {bound.over_ideal:.1f} times the ideal. The longest document "
        f"takes that long whatever its ring: transfers bind. Over that bound: {bound.over_bound:.2f}."
    )
    uneven = max(found.pipelines, key=lambda p: p.uneven)
    lines.append(
        f"- Pipelines of 4 stages are less even: the slowest column is up to {uneven.uneven:.2f} "
        f"times the mean ({uneven.mix}, {uneven.ranks} ranks, context {uneven.context // K}K)."
    )
    wait = max(found.pipelines, key=lambda p: p.meeting)
    lines.append(
        f"- Ranks that meet at every microbatch take up to {wait.meeting:.2f} times the ideal "
        f"({wait.mix}, {wait.ranks} ranks, context {wait.context // K}K)."
    )
    return lines


def sections(found: Found) -> list[Section]:
    made: list[Section] = [
        (
            "Slowest rank over the ideal",
            "Ours and Megatron's: the worst seed; others and gains: the mean. Bold: above the "
            "target (1.02 for lognormal mixes, 1.05 for linux up to 1M). *Bound*: no schedule can go "
            "below it, since the longest document takes that long on its best ring, with the "
            "transfers that show there (below 1: the ideal binds). *Aligned*: groups of "
            "powers of two. *Whole documents* ignore the memory of ranks.",
            MAIN_HEAD,
            main_rows(found.outcomes),
        ),
        (
            "What the time consists of",
            "Computation / transfers that attention does not hide / waits of the mean rank, over "
            "the ideal. The last column: ranks of our largest ring.",
            [*NAMES, "ours", "Megatron", "static CP", "static CP, LPT", "largest ring"],
            part_rows(found.outcomes),
        ),
        (
            "A network of 100 Gb/s",
            "The same with a quarter of the bandwidth across nodes, one seed. No targets.",
            MAIN_HEAD,
            [[c.replace("**", "") for c in row] for row in main_rows(found.slow)],
        ),
        (
            "Pipelines of 4 stages",
            "Slowest over mean column by W (m + p - 1); the slowest over the same of a mean rank with "
            "as few microbatches as tokens allow (below 1: more and shorter ones fill a pipeline "
            "sooner). Both also for the schedule that is best without stages. Microbatches of a "
            "column; empty tasks.",
            [
                *NAMES[:3],
                "slowest / mean",
                "without stages",
                "slowest / ideal",
                "without stages",
                "microbatches",
                "gaps",
            ],
            [
                [
                    *(p.mix, f"{p.ranks:,}", f"{p.context // K}K", f"{p.uneven:.3f}"),
                    *(f"{p.alone[0]:.3f}", f"{p.slowest:.3f}", f"{p.alone[1]:.3f}"),
                    *(f"{p.fewest} to {p.most}", str(p.gaps)),
                ]
                for p in found.pipelines
            ],
        ),
        (
            "Ranks that meet at every microbatch",
            "The sum, over microbatch indices, of the slowest task, over the ideal. *By rank*: the "
            "schedule with the smallest sum of a rank, padded to equal counts. Share of empty tasks.",
            [*NAMES[:3], "ours", "by rank", "gain", "padding"],
            [
                [
                    *(p.mix, f"{p.ranks:,}", f"{p.context // K}K", f"{p.meeting:.3f}"),
                    *(f"{p.meeting_alone:.3f}", f"{p.meeting_alone / p.meeting:.2f}"),
                    f"{p.padded:.1%}",
                ]
                for p in found.pipelines
            ],
        ),
        (
            "Planning time",
            "CPU ms for 32M tokens, the best of the runs; the check of the table by itself. Targets: "
            "150 ms on 1,024 ranks and 1,500 ms on 16,384. *Over the bound*: slowest rank of any "
            "rings over the ideal, or over the least time of the longest document if that is more.",
            [
                "mix",
                "ranks",
                "context",
                "capacity",
                "documents",
                "any",
                "aligned",
                "equal counts",
                "4 stages",
                "check",
                "over the bound",
                "over the ideal",
            ],
            [
                [
                    p.mix,
                    f"{p.ranks:,}",
                    f"{p.context // K}K",
                    f"{p.capacity // K}K",
                    f"{p.documents:,}",
                    f"{p.any:.0f}",
                    f"{p.aligned:.0f}",
                    f"{p.equal:.0f}",
                    f"{p.staged:.0f}",
                    f"{p.check:.1f}",
                    f"{p.over_bound:.3f}",
                    f"{p.over_ideal:.3f}",
                ]
                for p in found.planning
            ],
        ),
    ]
    return made


def summary(found: Found) -> list[str]:
    judged = [c for c in by_case(found.outcomes) if target(c[0].case)]
    kept = [c for c in judged if max(o.any.slowest for o in c) <= target(c[0].case)]
    lines = [f"- Slowest rank over ideal: {len(kept)} of {len(judged)} cells within the target."]
    near = max(o.any.slowest / max(1.0, o.bound) for o in found.outcomes)
    lines.append(
        f"- Slowest rank over the larger of the ideal and the lower bound: at most {near:.4f}, over "
        f"all {len(found.outcomes)} runs."
    )
    for ranks, most in PLANNING_MS.items():
        ms = [p.most for p in found.planning if p.ranks == ranks]
        if ms:
            lines.append(
                f"- Planning and check on {ranks:,} ranks: at most {max(ms):.0f} ms (target {most})."
            )
    over = [o.static.slowest / o.any.slowest for o in found.outcomes]
    lpt = [o.balanced.slowest / o.any.slowest for o in found.outcomes]
    other = [o.megatron.slowest / o.any.slowest for o in found.outcomes]
    lines += [
        f"- Gain over {what}: {min(g):.2f} to {max(g):.2f}, median {sorted(g)[len(g) // 2]:.2f}."
        for what, g in (
            ("static CP", over),
            ("static CP with LPT", lpt),
            ("Megatron's scheduler", other),
        )
    ]
    return lines


def page(found: Found, today: str, command: str) -> str:
    out = [
        f"# Hybrid schedules, modelled, {today}",
        "",
        f"`{command}`. {machine()}",
        "",
        "**A model.** No cluster ran: times are computed from the fit of one H200 and assumed "
        "bandwidths (450 GB/s in a node, 50 GB/s across nodes, 30 us a hop). Kernels are as "
        "efficient on small pieces as on large ones, and links are never shared. Only planning "
        "time is measured. The scheduler of Megatron is written anew from its source.",
        "",
        "## Unfavourable first",
        "",
        *unfavourable(found),
        "",
        "## Against the targets",
        "",
        *summary(found),
        "",
    ]
    for title, shows, head, rows in sections(found):
        out += [f"## {title}", "", shows, "", markdown_table(head, rows), ""]
    return "\n".join(out).rstrip() + "\n"


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--quick", is_flag=True, help="A few cells, one seed: a look, not a measurement.")
@click.option(
    "--slots",
    type=Numbers(),
    default="4,16",
    show_default=True,
    help="Capacities of tokens for every rank; Megatron's scheduler takes long with many.",
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--lengths",
    "linux",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=LINUX,
    help="File sizes in bytes (.npy) instead of those of linux-source-6.1.",
)
@click.option(
    "--processes",
    type=click.IntRange(1),
    default=len(os.sched_getaffinity(0)),
    help="Processes for the cells; planning is timed in one.  [default: all CPUs]",
)
@click.option("--save", "saves", is_flag=True, help="Writes the dated page to benchmarks/results.")
def main(
    quick: bool, slots: list[int], seeds: int, linux: Path, processes: int, saves: bool
) -> None:
    console = wide_console()
    found = run(quick, slots, 1 if quick else seeds, linux, processes, console)
    for title, _, head, rows in sections(found):
        console.print(shown_table(title, head, rows))
    console.print("\n".join([*unfavourable(found), *summary(found)]), markup=False)
    if saves:
        today = datetime.date.today().isoformat()
        text = page(found, today, command_line("benchmarks/hdp.py"))
        console.print(f"saved {save(f'{today}-hdp', text, {})}")


if __name__ == "__main__":
    main()
