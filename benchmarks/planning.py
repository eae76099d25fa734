"""Time and quality of planning: from a drawn buffer to a validated LoadingPlan.

    python benchmarks/planning.py [--seeds 3] [--repeat 7] [--strategy llm_balance] [--sync
    microbatch] [--json]
    python benchmarks/planning.py --strategy llm_balance --strategy vanilla --save  # the dated page

Times are CPU time of this process (best and median of the repeats), the check of the plan
included; that of the check alone is also shown, since the planner repeats it. Lengths are log-normal,
truncated at the context: median 665 tokens, mean about 1,300, 5 % above 4,800. ``excess`` is the
time of the step over the lower bound of any placement: the larger of the mean and the most
expensive sample. ``--sync`` as in ``Job``: when ranks wait for each other.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
import numpy as np

from overlord.job.job import SYNCS
from overlord.mesh import Batch, ClientPlaceTree
from overlord.plan.plan import LoadingPlan
from overlord.planning.strategies import STRATEGIES, resolve
from overlord.sample import Buffer
from page import command_line, machine, markdown_table, save, shown_table, wide_console


@dataclass(frozen=True)
class Case:
    samples: int
    ranks: int
    target_ms: float | None


CASES = (
    Case(4_096, 64, None),
    Case(32_768, 512, 30.0),
    Case(262_144, 4_096, 250.0),
    Case(1_048_576, 16_384, 600.0),
    Case(65_536, 4_096, None),
)


def make_buffer(case: Case, context: int, seed: int, sync: str) -> Buffer:
    """Return a drawn step of 16 sources with skewed lengths."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(rng.lognormal(6.5, 1.2, case.samples), 16, context).astype(np.int64)
    parts = np.array_split(tokens, 16)
    columns = {f"source{i}": {"tokens": part} for i, part in enumerate(parts)}
    buffer = Buffer.from_columns(
        columns, batch=Batch(samples=case.samples, context=context), sync=sync
    )
    order = rng.permutation(case.samples)
    return replace(buffer.take(order), drawn=True)


def cpu_ms(work: Callable[[], Any], repeat: int) -> list[float]:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        work()
        times.append(1e3 * (time.process_time() - start))
    return times


def measure(
    case: Case, strategy: str, context: int, seeds: int, repeat: int, sync: str = "microbatch"
) -> dict[str, Any]:
    """Return the worst quality over the seeds, and the best and median time over all runs."""
    plan_fn, place = resolve(strategy), ClientPlaceTree(dp=case.ranks)
    times: list[float] = []
    checks: list[float] = []
    digests: list[float] = []
    plans: list[LoadingPlan] = []
    for seed in range(seeds):
        buffer = make_buffer(case, context, seed, sync)
        plan = plan_fn(buffer, place)
        times += cpu_ms(lambda buffer=buffer: plan_fn(buffer, place), repeat)
        checks += cpu_ms(plan.validate, repeat)
        digests += cpu_ms(plan.digest, repeat)
        plans.append(plan)
    imbalances = [plan.imbalance() for plan in plans]
    decides = "bucket" if sync == "step" else "microbatch"
    return {
        "samples": case.samples,
        "ranks": case.ranks,
        "strategy": strategy,
        "sync": sync,
        "cpu_ms_best": min(times),
        "cpu_ms_median": statistics.median(times),
        "check_ms": min(checks),
        "digest_ms": min(digests),
        "target_ms": case.target_ms,
        "excess_pct": max(100 * (i[decides] / i["bound"] - 1) for i in imbalances),
        "fill": min(plan.fill() for plan in plans),
        "microbatches": max(plan.n_microbatches for plan in plans),
        "bucket": max(i["bucket"] for i in imbalances),
        "microbatch": max(i["microbatch"] for i in imbalances),
        "bound": max(i["bound"] for i in imbalances),
    }


HEAD = (
    "strategy",
    "samples -> ranks",
    "target ms",
    "CPU ms, best / median",
    "check ms",
    "digest ms",
    "excess",
    "M",
    "filled",
    "slowest over mean rank",
    "by microbatch",
)


def line(r: dict[str, Any]) -> list[str]:
    """Return the row of a measurement, in the columns of ``HEAD``."""
    return [
        r["strategy"],
        f"{r['samples']:,} -> {r['ranks']:,}",
        "-" if r["target_ms"] is None else f"{r['target_ms']:.0f}",
        f"{r['cpu_ms_best']:.1f} / {r['cpu_ms_median']:.1f}",
        f"{r['check_ms']:.1f}",
        f"{r['digest_ms']:.1f}",
        f"{r['excess_pct']:.3f} %",
        str(r["microbatches"]),
        f"{100 * r['fill']:.0f} %",
        f"{r['bucket']:.4f}",
        f"{r['microbatch']:.4f}",
    ]


@click.command()
@click.option(
    "--strategy",
    "strategies",
    default=["llm_balance"],
    type=click.Choice(sorted(STRATEGIES)),
    multiple=True,
    show_default=True,
)
@click.option("--sync", default="microbatch", type=click.Choice(SYNCS), show_default=True)
@click.option("--context", default=16_384, show_default=True)
@click.option("--seeds", default=3, show_default=True, help="Different steps a size.")
@click.option("--repeat", default=7, show_default=True, help="Runs a step.")
@click.option(
    "--largest", default=1_048_576, show_default=True, help="Leave out cases with more samples."
)
@click.option("--json", "as_json", is_flag=True)
@click.option("--save", "saving", is_flag=True, help="Writes the dated page.")
def main(
    strategies: tuple[str, ...],
    sync: str,
    context: int,
    seeds: int,
    repeat: int,
    largest: int,
    as_json: bool,
    saving: bool,
) -> None:
    found = [
        measure(case, strategy, context, seeds, repeat, sync)
        for strategy in strategies
        for case in CASES
        if case.samples <= largest
    ]
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    rows = [line(r) for r in found]
    title = f"sync {sync}, context {context}, {seeds} steps x {repeat} runs"
    console = wide_console()
    console.print(shown_table(title, HEAD, rows))
    if saving:
        today = datetime.date.today().isoformat()
        text = f"# Planning, {today}\n\n"
        text += f"`{command_line('benchmarks/planning.py')}` on {machine()}\n\n"
        text += (
            "Buffer in, validated LoadingPlan out; log-normal lengths, CPU time of the process; "
            f"{title}.\n*Check*: one validation alone. *Excess* over the lower bound of any "
            "placement, where ranks wait for each other.\n\n"
        )
        text += markdown_table(HEAD, rows) + "\n"
        console.print(f"saved {save(f'{today}-planning', text, {})}")


if __name__ == "__main__":
    main()
