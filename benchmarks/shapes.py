"""Padding and imbalance of packing documents or chunks, in free and in fixed shapes.

    python benchmarks/shapes.py --quick     # a few cells: seconds
    python benchmarks/shapes.py --save      # all cells: minutes; writes benchmarks/results

The planner of the package plans the steps; no token is read. benchmarks/README.md explains it.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import numpy as np
from rich.console import Console

import profiles
from hybrid import lengths
from overlord.mesh import Batch, Mesh
from overlord.messages.control import Attach, Consumed, PlannedStep
from overlord.messages.data import Announce, SampleBlock
from overlord.plan.plan import LoadingPlan
from overlord.planning.planner import Planner
from overlord.planning.spec import PlannerSpec, SourceSpec
from overlord.planning.strategies import resolve
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

K = 1024
MIXES = ("coyo", "navit", "linux", "web")  # two profiles with images, file sizes, generated text
CONTEXTS = {"coyo": 8 * K, "navit": 32 * K, "linux": 8 * K, "web": 8 * K}
LEVEL_FROM = 16  # chunks of a rank from which the target of imbalance applies
IMBALANCE = 1.01
FILL = 0.95
MORE = 1.6  # candidates that are generated, over the capacity of all steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A batch: how samples are packed, and how many candidates a step has."""

    packing: str
    shape: str
    look_ahead: int = 1

    def __str__(self) -> str:
        ahead = f", look-ahead {self.look_ahead}" if self.look_ahead > 1 else ""
        return f"{self.packing} + {self.shape}{ahead}"


WAYS = (
    Way(packing="documents", shape="free"),
    Way(packing="documents", shape="fixed"),
    Way(packing="documents", shape="fixed", look_ahead=2),
    Way(packing="concat", shape="free"),
    Way(packing="concat", shape="fixed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    mix: str
    ranks: int
    slots: int  # microbatches of a rank
    way: Way
    sync: str

    @property
    def context(self) -> int:
        return CONTEXTS[self.mix]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The worst step of a case, and the mean fill."""

    case: Case
    fill: float  # tokens over those of all microbatches of ``context`` tokens
    lowest: float  # of a step
    bucket: float
    microbatch: float
    bound: float
    most: int  # microbatches
    oldest: int  # steps that a sample waited
    cpu_ms: float  # of a step


def documents(mix: str, tokens: int, context: int, seed: int, linux: Path) -> list[np.ndarray]:
    """Return the lengths of each source's documents, cut at the context."""
    if mix not in profiles.PROFILES:
        return [lengths.draw(mix, tokens, context, seed, linux)]
    mean = float(profiles.draw(mix, 20_000, seed=seed, context=context).tokens().mean())
    found = profiles.draw(mix, int(tokens / mean), seed=seed, context=context)
    held = found.tokens()
    each = [held[found.source == i] for i in range(len(found.names))]
    return [source for source in each if len(source)]


def announced(number: int, tokens: np.ndarray) -> Announce:
    rows = np.arange(len(tokens))
    none = np.zeros(0, np.int64)
    block = SampleBlock(
        rows.astype(np.uint64),
        np.zeros(len(rows), np.int64),
        rows,
        np.zeros(len(rows), np.int32),
        {"tokens": tokens, "bytes": tokens},
        none.astype(np.uint64),
        none,
        none,
        (),
    )
    return Announce(number, 0, 0, 0, block, closes=True, last=True)


def planner_of(case: Case, sources: Sequence[np.ndarray]) -> Planner:
    way, capacity = case.way, case.ranks * case.slots * case.context
    concat = way.packing == "concat"
    count, total = sum(map(len, sources)), sum(int(s.sum()) for s in sources)
    batch = Batch(
        samples=case.ranks * case.slots if concat else int(capacity * count / total),
        microbatches=case.slots,
        context=case.context,
        packing=way.packing,
        shape=way.shape,
    )
    names = [f"source{i}" for i in range(len(sources))]
    weights = [float(s.sum() if concat else len(s)) for s in sources]
    return Planner(
        PlannerSpec(
            sources=tuple(SourceSpec(name=n, n_groups=1, epochs=1, max_bad=9) for n in names),
            batch=batch,
            place=Mesh(dp=case.ranks),
            strategy=resolve("llm_balance"),
            schedule=dict(zip(names, weights, strict=True)),
            look_ahead=way.look_ahead,
            overflow="defer" if batch.defers else "grow",
            sync=case.sync,
            prefetch=1,
        )
    )


def plans(
    case: Case, steps: int, seed: int, linux: Path
) -> Iterable[tuple[LoadingPlan, int, float]]:
    """Yield the plan of each step, the steps that its oldest sample waited, and the CPU time."""
    tokens = int(MORE * steps * case.ranks * case.slots * case.context)
    sources = documents(case.mix, tokens, case.context, seed, linux)
    planner = planner_of(case, sources)
    for i, source in enumerate(sources):
        planner.handle(announced(i, source))
    for step in range(steps):
        start = time.process_time()
        found = planner.handle(Attach(0) if step == 0 else Consumed(0, step - 1))
        took = time.process_time() - start
        planned = [command for command in found if isinstance(command, PlannedStep)]
        assert len(planned) == 1, "a step is planned at a time"
        ages = [int(a.max(initial=0)) for a in planner.state().ahead]
        yield planned[0].plan, max(ages, default=0), took


def measure(case: Case, steps: int, seed: int, linux: Path) -> Outcome:
    fills, ratios, most, oldest, times = (
        list[float](),
        list[dict[str, float]](),
        0,
        0,
        list[float](),
    )
    for plan, age, took in plans(case, steps, seed, linux):
        room = case.ranks * plan.n_microbatches * case.context
        fills.append(float(plan.tokens.sum()) / room)
        ratios.append(plan.imbalance())
        most, oldest = max(most, plan.n_microbatches), max(oldest, age)
        times.append(1e3 * took)
    return Outcome(
        case=case,
        fill=sum(fills) / len(fills),
        lowest=min(fills),
        bucket=max(r["bucket"] for r in ratios),
        microbatch=max(r["microbatch"] for r in ratios),
        bound=max(r["bound"] for r in ratios),
        most=most,
        oldest=oldest,
        cpu_ms=sorted(times)[len(times) // 2],
    )


def cases(quick: bool, ranks: Sequence[int], slots: Sequence[int]) -> list[Case]:
    return [
        Case(mix=mix, ranks=r, slots=m, way=way, sync=sync)
        for mix in (("web",) if quick else MIXES)
        for r in ((8,) if quick else ranks)
        for m in slots
        for way in WAYS
        for sync in ("step", "microbatch")
        if way != WAYS[3] or sync == "step"  # the plans of both shapes of chunks are the same
    ]


def problem(outcome: Outcome) -> str:
    """Return how an outcome misses a target; empty if it does not, or has none."""
    case, way = outcome.case, outcome.case.way
    if way.packing == "concat":
        if outcome.lowest < 1:
            return f"fill {outcome.lowest:.4f}"
        judged = case.sync == "step" and case.slots >= LEVEL_FROM
        if judged and outcome.bucket > IMBALANCE:
            return f"imbalance {outcome.bucket:.4f} (bound {outcome.bound:.4f})"
    elif way.look_ahead > 1 and outcome.lowest < FILL:
        return f"fill {outcome.lowest:.3f}"
    return ""


HEAD = [
    "mix",
    "context",
    "ranks",
    "chunks a rank",
    "batch",
    "fill (lowest)",
    "microbatches",
    "rank, sync step",
    "by microbatch, sync microbatch",
    "bound",
    "oldest",
    "CPU ms",
]


def rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    made = []
    by_step = {
        (o.case.mix, o.case.ranks, o.case.slots, o.case.way, o.case.sync): o for o in outcomes
    }
    for o in outcomes:
        c = o.case
        if c.sync != "step":
            continue
        other = by_step.get((c.mix, c.ranks, c.slots, c.way, "microbatch"))
        bold = "**" if problem(o) else ""
        made.append(
            [
                c.mix,
                f"{c.context // K}K",
                str(c.ranks),
                str(c.slots),
                str(c.way),
                f"{o.fill:.3f} ({o.lowest:.3f})",
                str(o.most),
                f"{bold}{o.bucket:.4f}{bold}",
                "" if other is None else f"{other.microbatch:.4f}",
                f"{o.bound:.4f}",
                str(o.oldest) if c.way.packing == "documents" and c.way.shape == "fixed" else "",
                f"{o.cpu_ms:.0f}",
            ]
        )
    return made


def unfavourable(outcomes: Sequence[Outcome]) -> list[str]:
    """Return what a reader should know before the good figures."""
    missed = [
        f"{c.mix} {c.ranks}x{c.slots} {c.way}: {text}"
        for o in outcomes
        if (text := problem(o)) and (c := o.case)
    ]
    fixed = [o for o in outcomes if o.case.way == WAYS[2]]
    worst = max(fixed, key=lambda o: o.bucket / o.bound)
    plain = min((o for o in outcomes if o.case.way == WAYS[1]), key=lambda o: o.lowest)
    return [
        f"- Outside a target: {'; '.join(missed) or 'no cell'}.",
        f"- {WAYS[2]} is full, so little is left to level: rank imbalance up to "
        f"{worst.bucket:.3f} ({worst.case.mix}, {worst.case.ranks} ranks, {worst.case.slots} "
        f"microbatches, sync {worst.case.sync}).",
        f"- Without look-ahead a step of few samples is {plain.lowest:.2f} full "
        f"({plain.case.mix}, {plain.case.ranks} ranks, {plain.case.slots} microbatches).",
        f"- Samples waited at most {max(o.oldest for o in outcomes)} steps; the largest plan took "
        f"{max(o.cpu_ms for o in outcomes):.0f} ms of CPU.",
    ]


def page(outcomes: Sequence[Outcome], today: str, command: str, steps: int) -> str:
    out = [
        f"# Padding and imbalance by packing and shape, {today}",
        "",
        f"`{command}`. {machine()}",
        "",
        f"{steps} steps of each case, planned by `llm_balance` with the cost of a 12B model. *Fill*: "
        "tokens over those of all microbatches of `context` tokens, mean and lowest step; the rest "
        "is padding where shapes are fixed. *Rank*: dearest rank over the mean. *By microbatch*: "
        "dearest rank of each index, summed, over the mean rank. *Bound*: least imbalance of any "
        "placement. *Oldest*: steps that a sample waited. Documents are split at the context. The "
        "batch of documents has as many samples as fill the step on average.",
        "",
        "## Unfavourable first",
        "",
        *unfavourable(outcomes),
        "",
        "## All cases",
        "",
        markdown_table(HEAD, rows(outcomes)),
    ]
    return "\n".join(out).rstrip() + "\n"


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--quick", is_flag=True, help="A few cells, two steps: a look, not a measurement.")
@click.option("--ranks", type=Numbers(), default="8,64,512", show_default=True)
@click.option("--slots", type=Numbers(), default="4,16", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Processes.")
@click.option(
    "--lengths",
    "linux",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    default=lengths.LINUX,
    help="File sizes in bytes (.npy) instead of those of linux-source-6.1.",
)
@click.option("--save", "saves", is_flag=True, help="Writes the dated page to benchmarks/results.")
def main(
    quick: bool, ranks: list[int], slots: list[int], steps: int, jobs: int, linux: Path, saves: bool
) -> None:
    console: Console = wide_console()
    grid, steps = cases(quick, ranks, slots), 2 if quick else steps
    found: dict[Case, Outcome] = {}
    with ProcessPoolExecutor(jobs) as pool, progress(console) as bars:
        bar = bars.add_task("planning", total=len(grid))
        # large cases first, so that no process ends last
        large = sorted(grid, key=lambda case: -case.ranks * case.slots)
        for outcome in pool.map(
            measure, large, *([value] * len(grid) for value in (steps, 0, linux))
        ):
            found[outcome.case] = outcome
            bars.advance(bar)
    outcomes = [found[case] for case in grid]
    console.print(shown_table("Padding and imbalance", HEAD, rows(outcomes)))
    console.print("\n".join(unfavourable(outcomes)), markup=False)
    if saves:
        today = datetime.date.today().isoformat()
        text = page(outcomes, today, command_line("benchmarks/shapes.py"), steps)
        console.print(f"saved {save(f'{today}-shapes', text, {})}")


if __name__ == "__main__":
    main()
