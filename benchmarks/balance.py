"""Balance of steps and cost of planning: every method, `vanilla`, `packed` and the lower bounds.

    python benchmarks/balance.py --quick     # a few cells: seconds
    python benchmarks/balance.py --save      # the whole grid: minutes; writes benchmarks/results

benchmarks/README.md explains the columns.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from balancing.ahead import CASES as AHEAD
from balancing.ahead import Ahead, ahead_table, run_ahead
from balancing.grid import METHODS, Case, Outcome, available, measure
from balancing.modules import (
    MESHES,
    PlanTime,
    Spread,
    figure_3,
    figure_3_table,
    plan_times,
    time_summary,
)
from balancing.modules import time_table as vlm_time_table
from balancing.tables import Grid, fill_table, iteration_table, microbatch_table, plots, time_table
from balancing.targets import (
    GROUPING_POINTS,
    TARGETS,
    grouping_table,
    judge,
    summary,
    verdict_table,
)
from page import Numbers, command_line, machine, markdown_table, progress, save, shown_table
from profiles import PROFILES

# From here on three seeds are enough: a step holds many samples, and seeds hardly differ.
MANY_RANKS = 4096
FIGURE_3_SEEDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """The size of the benchmark."""

    profiles: tuple[str, ...] = tuple(PROFILES)
    ranks: tuple[int, ...] = (8, 64, 512, 4096)
    per_rank: tuple[int, ...] = (8, 16, 32, 72)
    contexts: tuple[int, ...] = (4096, 8192, 16384, 32768)
    seeds: int = 5
    methods: tuple[str, ...] = tuple(METHODS)
    steps_ahead: int = 64
    look_aheads: tuple[int, ...] = (1, 4, 16)
    vlm_samples: int = 262_144
    repeat: int = 3

    def jobs(self) -> list[tuple[Case, int]]:
        cases = [
            Case(profile=p, context=c, ranks=r, per_rank=n)
            for p in self.profiles
            for c in self.contexts
            for n in self.per_rank
            for r in self.ranks
        ]
        return [
            (case, seed)
            for case in cases
            for seed in range(min(self.seeds, 3) if case.ranks >= MANY_RANKS else self.seeds)
        ]


QUICK = Extent(
    ranks=(8, 64),
    per_rank=(8, 16),
    contexts=(4096, 16384),
    seeds=1,
    steps_ahead=4,
    look_aheads=(1, 4),
    vlm_samples=8192,
    repeat=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All measurements of one run of the benchmark."""

    grid: Grid
    spreads: list[Spread]
    ahead: list[Ahead]
    times: list[PlanTime]


def run(extent: Extent, console: Console) -> Found:
    outcomes: list[Outcome] = []
    methods, jobs = available(extent.methods), extent.jobs()
    with progress(console) as bars:
        bar = bars.add_task("", total=sum(case.samples for case, _ in jobs))
        for case, seed in jobs:
            bars.update(
                bar,
                description=f"{case.profile} {case.context}, {case.ranks} ranks x {case.per_rank}",
            )
            outcomes += measure(case, seed, methods)
            bars.advance(bar, case.samples)
        bars.update(bar, description="the case of Figure 3")
        contexts = [c for c in extent.contexts if c <= 16384]
        spreads = [
            s
            for p in extent.profiles
            for c in contexts
            for s in figure_3(p, c, 16, range(FIGURE_3_SEEDS))
        ]
        bars.update(bar, description="look-ahead")
        cases = [case for case in AHEAD if case.ranks <= max(extent.ranks)]
        ahead = [
            run_ahead(case, wide, steps=extent.steps_ahead)
            for case in cases
            for wide in extent.look_aheads
        ]
        bars.update(bar, description="models with an encoder")
        times = plan_times(extent.vlm_samples, MESHES, extent.repeat)
    return Found(grid=Grid(outcomes), spreads=spreads, ahead=ahead, times=times)


def sections(found: Found) -> list[tuple[str, str, list[str], list[list[str]]]]:
    """Return (title, description, head, rows) of every table."""
    grid = found.grid
    cells = f"Cells: {' / '.join(f'{r:,}' for r in grid.ranks)} ranks"
    across = f"{cells}, mean over the seeds."
    made = [
        (
            "Ranks meet once a step",
            f"Slowest over mean rank; for our methods percent above the bound. {across}",
            *iteration_table(grid),
        ),
        (
            "Ranks meet after every microbatch",
            f"Sum of the slowest rank of every microbatch over the mean rank. {across}",
            *microbatch_table(grid),
        ),
        (
            "Microbatches and fill",
            f"Microbatches a rank (M) and the share of them that holds tokens. {across}",
            *fill_table(grid),
        ),
        (
            "Planning time",
            "CPU ms of a plan, validation included: the best of the seeds for each "
            "profile and context, of these the median "
            "(and the slowest).",
            *time_table(grid),
        ),
    ]
    for target in TARGETS:
        if verdicts := judge(grid, target):
            shows = f"`{target.method}`: {target.name}. The worst seed of each cell; bold: missed."
            made.append((f"Target: {target.name}", shows, *verdict_table(grid, verdicts)))
    shows = (
        "Points of the mean rank that grouping costs `greedy`, ranks meeting once a step. "
        "The worst seed of each cell; bold: missed."
    )
    made.append(
        (
            f"Target: group_size, at most {GROUPING_POINTS} points",
            f"{shows} {cells}.",
            *grouping_table(grid),
        )
    )
    return [*made, *_other_sections(found)]


def _other_sections(found: Found) -> list[tuple[str, str, list[str], list[list[str]]]]:
    steps = found.ahead[0].steps if found.ahead else 0
    made = [
        (
            "The paper's Figure 3",
            "Eight cards, the encoder over all, the backbone over DP=4 x TP=2, 16 "
            "samples a rank: dearest over "
            f"cheapest microbatch by FLOPs (median of {FIGURE_3_SEEDS} steps). The paper "
            "found 6.9 for the backbone and 3.2 for the encoder.",
            *figure_3_table(found.spreads),
        ),
        (
            "Look-ahead",
            f"{steps} steps in a row, samples dearer than a rank's share waiting for each "
            "other: slowest over "
            "mean rank of all steps together.",
            *ahead_table(found.ahead),
        ),
        (
            "Models with an encoder",
            "`navit`, context 16k: buffer in, validated plan with images and placeholders out.",
            *vlm_time_table(found.times),
        ),
    ]
    return [section for section in made if section[3]]


def verdicts(found: Found) -> list[str]:
    return [*summary(found.grid), time_summary(found.times)]


def page(found: Found, today: str, command: str, pictures: Sequence[str]) -> str:
    out = [f"# Balance, {today}", "", f"`{command}`. {machine()}", ""]
    out += [
        "Imbalance, fill and microbatches are the same on every machine. CPU times are "
        "not: believe them from an idle machine only.",
        "",
    ]
    out += ["## Against the targets", "", *verdicts(found), ""]
    for title, shows, head, rows in sections(found):
        out += [f"## {title}", "", shows, "", markdown_table(head, rows), ""]
    out += [f"![{name}](img/{name}.svg)" for name in pictures]
    return "\n".join(out).rstrip() + "\n"


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--ranks", type=Numbers(), default="8,64,512,4096", show_default=True)
@click.option(
    "--per-rank", type=Numbers(), default="8,16,32,72", show_default=True, help="Samples a rank."
)
@click.option("--contexts", type=Numbers(), default="4096,8192,16384,32768", show_default=True)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Different steps a cell; three from 4096 ranks on.",
)
@click.option(
    "--quick", is_flag=True, help="A corner of everything, one seed: a look, not a measurement."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every outcome there.",
)
@click.option(
    "--save",
    "saves",
    is_flag=True,
    help="Writes the page, dated, and its plots to benchmarks/results.",
)
def main(
    ranks: list[int],
    per_rank: list[int],
    contexts: list[int],
    seeds: int,
    quick: bool,
    json_path: Path | None,
    saves: bool,
) -> None:
    console = Console()
    whole = Extent(
        ranks=tuple(ranks), per_rank=tuple(per_rank), contexts=tuple(contexts), seeds=seeds
    )
    found = run(QUICK if quick else whole, console)
    for title, _, head, rows in sections(found):
        console.print(shown_table(title, head, rows))
    console.print("\n".join(verdicts(found)), markup=False)
    today = datetime.date.today().isoformat()
    if json_path:
        parts = {
            "outcomes": found.grid.outcomes,
            "figure 3": found.spreads,
            "look-ahead": found.ahead,
            "models with an encoder": found.times,
        }
        figures = {name: [asdict(one) for one in part] for name, part in parts.items()}
        json_path.write_text(json.dumps({"date": today, "machine": machine(), **figures}, indent=1))
    if saves:
        pictures = plots(found.grid)
        command = command_line("benchmarks/balance.py")
        console.print(
            "saved "
            f"{save(f'{today}-balance', page(found, today, command, list(pictures)), pictures)}"
        )


if __name__ == "__main__":
    main()
