"""Measured step times of plans: 8 data-parallel ranks run one after another on one GPU.

    python benchmarks/gpu/plans.py                          # one H200: under four minutes
    python benchmarks/gpu/plans.py --device cpu --tiny      # a smoke test, no measurement

First, times of microbatches by tokens and lengths are measured, and a cost is fitted to them
(``ov.cost.fit``). The balanced plans use that cost. Then every microbatch of every rank of every
plan is run, forward and backward, in a random order. The time of an iteration is that of its
slowest rank. benchmarks/README.md explains the method.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault(
    "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"
)  # before torch: microbatches of many sizes, no stalls
sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # its own modules, also when started from elsewhere

import numpy as np
import torch

import overlord as ov
from gpu.bench import (
    COST_HEAD,
    Bench,
    Measured,
    by_microbatch,
    calibrate,
    cost_rows,
    grid,
    in_turn,
    told,
)
from gpu.model import LLAMA_12B, TINY, Shape, Stack
from gpu.timing import all_seconds, default_folder, device_of, machine, save, table
from overlord.plan.plan import LoadingPlan
from overlord.planning.cost.fit import Fitted
from overlord.planning.cost.models import CostFn
from overlord.planning.strategies import DENSE_12B, packed, vanilla
from overlord.sample import Buffer
from page import command_line
from profiles import draw

TARGET = 1.01  # slowest over mean rank
BASELINES = ("vanilla", "packed")

Strategy = Callable[[Buffer, ov.ClientPlaceTree], LoadingPlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The size of one step."""

    context: int
    per_rank: int  # samples
    ranks: int = 8
    passes: int = 2  # over all its microbatches

    def buffer(self, seed: int) -> Buffer:
        n = self.ranks * self.per_rank
        return draw("navit", n, seed=seed, context=self.context).buffer(
            ov.Batch(samples=n, context=self.context), images=False
        )


TINY_CASES = (Case(context=256, per_rank=4, ranks=4),)


def balanced(cost: CostFn) -> Strategy:
    """Return ``llm_balance`` with another cost, for ranks that wait once per step."""

    def plan(buffer: Buffer, place: ov.ClientPlaceTree) -> LoadingPlan:
        graph = (
            ov.DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute("DP").cost(cost)
        )
        return graph.balance("greedy", objective="iteration").plan()

    return plan


def strategies(cost: CostFn) -> dict[str, Strategy]:
    """Return the strategies by their names on the page."""
    return {
        "vanilla": vanilla,
        "packed": packed,
        "balanced, FLOPs": balanced(DENSE_12B),
        "balanced, fitted": balanced(cost),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The seconds of every rank for one plan of one step."""

    case: Case
    seed: int
    strategy: str
    microbatches: int
    measured: list[float] = field(repr=False)
    told: list[float] = field(repr=False)  # by the fitted cost
    noise: float = 0.0  # of a rank's time between passes: standard deviation over the mean

    @property
    def iteration(self) -> float:
        return max(self.measured)

    @property
    def over_mean(self) -> float:
        return max(self.measured) / float(np.mean(self.measured))

    @property
    def told_over_mean(self) -> float:
        return max(self.told) / float(np.mean(self.told))


def measure(bench: Bench, case: Case, seed: int, cost: Fitted) -> list[Outcome]:
    """Measure all plans of one step; their microbatches run in one random order."""
    buffer, place = case.buffer(seed), ov.ClientPlaceTree(dp=case.ranks)
    plans = {
        name: strategy(buffer, place).validate() for name, strategy in strategies(cost).items()
    }
    cut = {name: by_microbatch(plan) for name, plan in plans.items()}
    pieces = [bench.piece(m) for ranks in cut.values() for rank in ranks for m in rank]
    seconds = all_seconds(pieces, bench.device, passes=case.passes, seed=seed)
    found, at = [], 0
    for name, ranks in cut.items():
        m, n = plans[name].n_microbatches, len(ranks)
        mine = seconds[:, at : at + n * m].reshape(case.passes, n, m)
        at += n * m
        spread = (
            float((mine.sum(axis=2).std(axis=0, ddof=1) / mine.sum(axis=2).mean(axis=0)).mean())
            if case.passes > 1
            else 0.0
        )
        found.append(
            Outcome(
                case=case,
                seed=seed,
                strategy=name,
                microbatches=m,
                measured=np.median(mine, axis=0).sum(axis=1).tolist(),
                noise=spread,
                told=[sum(cost.seconds(part) for part in rank) for rank in ranks],
            )
        )
    return found


def expected_s(case: Case, seed: int, cost: Fitted) -> float:
    """Return the estimated seconds of measuring a step."""
    return (
        len(strategies(cost))
        * case.passes
        * float(cost({"tokens": case.buffer(seed).column("tokens")}).sum())
    )


def run(
    bench: Bench, cases: Sequence[Case], cost: Fitted, seconds: float, say: Callable[[str], None]
) -> list[Outcome]:
    """Run each case once, then more steps of the cases that still fit into the time."""
    start, found, seed = time.perf_counter(), [], 0
    while seed == 0 or any(_fits(case, seed, cost, start, seconds) for case in cases):
        for case in cases:
            if seed == 0 or _fits(case, seed, cost, start, seconds):
                found += measure(bench, case, seed, cost)
                say(
                    f"{case} step {seed}: "
                    + ", ".join(
                        f"{o.strategy} {o.iteration * 1e3:.0f} ms ({o.over_mean:.4f})"
                        for o in found[-4:]
                    )
                )
        seed += 1
    return found


def _fits(case: Case, seed: int, cost: Fitted, start: float, seconds: float) -> bool:
    return time.perf_counter() - start + 1.1 * expected_s(case, seed, cost) < seconds


def rows_of(found: Sequence[Outcome]) -> list[list[str]]:
    """Return a row for every case and strategy, with means over its steps."""
    rows = []
    for case in dict.fromkeys(o.case for o in found):
        mine = [o for o in found if o.case == case]
        times = {
            s: float(np.mean([o.iteration for o in mine if o.strategy == s]))
            for s in dict.fromkeys(o.strategy for o in mine)
        }
        for strategy, iteration in times.items():
            steps = [o for o in mine if o.strategy == strategy]
            ratio, told = [o.over_mean for o in steps], [o.told_over_mean for o in steps]
            gains = [f"{times[b] / iteration:.2f}" for b in BASELINES]
            held = (
                "" if strategy in BASELINES else "met" if np.mean(ratio) < TARGET else "**missed**"
            )
            many = f"{np.mean([o.microbatches for o in steps]):.1f}"
            rows.append(
                [
                    f"{case.context // 1024}k",
                    str(case.per_rank),
                    strategy,
                    str(len(steps)),
                    many,
                    f"{iteration * 1e3:.0f}",
                    f"{np.mean(ratio):.4f}",
                    f"{max(ratio):.4f}",
                    f"{np.mean([o.noise for o in steps]):.4f}",
                    f"{np.mean(told):.4f}",
                    held,
                    *gains,
                ]
            )
    return rows


HEAD = (
    "context",
    "samples a rank",
    "plan",
    "steps",
    "microbatches",
    "iteration ms",
    "slowest over mean",
    "worst step",
    "noise",
    "by the fit",
    f"under {TARGET}",
    "x vanilla",
    "x packed",
)


NOTES = """`x vanilla`, `x packed`: their iteration time over this one's. `by the fit`: slowest over mean rank as the fitted cost tells it,
constants of microbatches included. `noise`: how much the time of one rank, its work unchanged, moves between passes (standard
deviation over the mean); medians of the passes are what is compared."""


def page(
    found: Sequence[Outcome], cost: Fitted, measured: Measured, shape: Shape, device: torch.device
) -> str:
    head = f"# Plans on a GPU\n\n{machine(device)}\n\n    {command_line('benchmarks/gpu/plans.py')}"
    what = (
        f"{shape}, bf16, forward and backward. Ranks run one after another; an iteration is "
        "its slowest rank."
    )
    parts = [
        head,
        what,
        "## Steps",
        table(HEAD, rows_of(found)),
        NOTES,
        "## The fitted cost",
        told(cost),
    ]
    return "\n\n".join([*parts, table(COST_HEAD, cost_rows(cost, measured))]) + "\n"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="a model and steps that a laptop runs: a look, no measurement",
    )
    parser.add_argument("--layers", type=int, default=LLAMA_12B.layers)
    parser.add_argument(
        "--seconds",
        type=float,
        default=190.0,
        help="for the steps; each case is measured once in any case",
    )
    parser.add_argument("--per-rank", default="16,72", help="samples of a rank, with commas")
    parser.add_argument("--contexts", default="8192,16384")
    parser.add_argument(
        "--passes",
        type=int,
        default=0,
        help="over every step  [default: 4 up to 16 samples a rank, else 1]",
    )
    parser.add_argument(
        "--drawn",
        type=int,
        default=12,
        help="microbatches of real lengths that the fit is made of, by context",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=default_folder(),
        help="folder of the page, of the cost and of all figures",
    )
    return parser


def cases_of(given: argparse.Namespace) -> tuple[Case, ...]:
    """Return the cases; short steps are measured more often."""
    sizes = [(int(n), int(c)) for n in given.per_rank.split(",") for c in given.contexts.split(",")]
    return tuple(
        Case(context=c, per_rank=n, passes=given.passes or (4 if n <= 16 else 1)) for n, c in sizes
    )


def main(words: Sequence[str] | None = None) -> list[Outcome]:
    given = arguments().parse_args(words)
    device, began = device_of(given.device), time.perf_counter()
    shape = TINY if given.tiny else Shape(**{**asdict(LLAMA_12B), "layers": given.layers})
    cases = TINY_CASES if given.tiny else cases_of(given)
    contexts = sorted({case.context for case in cases})
    bench = Bench(Stack(shape, contexts[-1]), shape.hidden, shape.hidden, contexts[-1], device)

    def say(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", flush=True)

    many, least_s = (2, 0.0) if given.tiny else (given.drawn, 8.0)
    seen = [
        m
        for c in contexts
        for m in in_turn(draw("navit", 64 * many, seed=1_000, context=c).tokens(), c, many)
    ]
    cost, measured = calibrate(bench, grid(contexts, contexts[-1]) + seen, least_s)
    say(f"fitted: {cost}")
    found = run(bench, cases, cost, 0.0 if given.tiny else given.seconds, say)
    text = page(found, cost, measured, shape, device)
    print(text)
    if not given.tiny or "--out" in (words or sys.argv):
        print(f"saved {save('plans', text, given.out)}")
        everything = {
            "cost": asdict(cost),
            "microbatches": [[m.tolist(), s] for m, s in measured],
            "steps": [asdict(o) for o in found],
        }
        (given.out / "gpu-plans.json").write_text(json.dumps(everything))
    return found


if __name__ == "__main__":
    main()
