"""Time and quality of planning: from a drawn buffer to a validated LoadingPlan.

    python benchmarks/planning.py [--seeds 3] [--repeat 7] [--strategy llm_balance] [--sync
    microbatch] [--json]

Times are CPU time of this process (best and median of the repeats). Lengths are log-normal,
truncated at the context: median 665 tokens, mean about 1,300, 5 % above 4,800. ``excess`` is the
time of the step over the lower bound of any placement: the larger of the mean and the most
expensive sample. ``--sync`` as in ``Job``: when ranks wait for each other.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from overlord.job.job import SYNCS
from overlord.mesh import Batch, ClientPlaceTree
from overlord.plan.plan import LoadingPlan
from overlord.planning.strategies import STRATEGIES, resolve
from overlord.sample import Buffer


@dataclass(frozen=True)
class Case:
    samples: int
    ranks: int
    target_ms: float | None


CASES = (
    Case(4_096, 64, None),
    Case(32_768, 512, 30.0),
    Case(262_144, 4_096, 250.0),
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
    digests: list[float] = []
    plans: list[LoadingPlan] = []
    for seed in range(seeds):
        buffer = make_buffer(case, context, seed, sync)
        plan = plan_fn(buffer, place)
        times += cpu_ms(lambda buffer=buffer: plan_fn(buffer, place), repeat)
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
        "digest_ms": min(digests),
        "target_ms": case.target_ms,
        "excess_pct": max(100 * (i[decides] / i["bound"] - 1) for i in imbalances),
        "fill": min(plan.fill() for plan in plans),
        "microbatches": max(plan.n_microbatches for plan in plans),
        "bucket": max(i["bucket"] for i in imbalances),
        "microbatch": max(i["microbatch"] for i in imbalances),
        "bound": max(i["bound"] for i in imbalances),
    }


@click.command()
@click.option("--strategy", default="llm_balance", type=click.Choice(sorted(STRATEGIES)))
@click.option("--sync", default="microbatch", type=click.Choice(SYNCS), show_default=True)
@click.option("--context", default=16_384, show_default=True)
@click.option("--seeds", default=3, show_default=True, help="Different steps a size.")
@click.option("--repeat", default=7, show_default=True, help="Runs a step.")
@click.option(
    "--largest", default=262_144, show_default=True, help="Leave out cases with more samples."
)
@click.option("--json", "as_json", is_flag=True)
def main(
    strategy: str, sync: str, context: int, seeds: int, repeat: int, largest: int, as_json: bool
) -> None:
    rows = [
        measure(case, strategy, context, seeds, repeat, sync)
        for case in CASES
        if case.samples <= largest
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(
        title=f"{strategy}, sync {sync}, context {context}, {seeds} steps x {repeat} runs"
    )
    heads = (
        "samples, ranks, CPU ms best, median, target, digest ms, excess %, M, fill, max/mean "
        "rank, by microbatch"
    )
    for head in heads.split(", "):
        table.add_column(head, justify="right")
    for r in rows:
        table.add_row(
            f"{r['samples']:,}",
            f"{r['ranks']:,}",
            f"{r['cpu_ms_best']:.1f}",
            f"{r['cpu_ms_median']:.1f}",
            "-" if r["target_ms"] is None else f"{r['target_ms']:.0f}",
            f"{r['digest_ms']:.1f}",
            f"{r['excess_pct']:.3f}",
            str(r["microbatches"]),
            f"{r['fill']:.3f}",
            f"{r['bucket']:.4f}",
            f"{r['microbatch']:.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
