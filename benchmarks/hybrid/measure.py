"""Modelled times of one batch under each way of dividing it over ranks.

The model (seconds of one layer, forward and backward): computation as fitted on one H200, keys and
values of 8 heads of 128 over a ring. Nothing here ran on a cluster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hybrid import baselines, megatron
from hybrid.lengths import LINUX, MIXES, draw
from overlord.plan.tasks import TaskTable
from overlord.planning.balance import hybrid
from overlord.planning.balance.hybrid import HybridRules, schedule
from overlord.planning.balance.ring_bound import lower_bound
from overlord.planning.cost import RingCosts

K = 1024
# the fit of four layers (benchmarks/gpu, 2026-11-15), divided by four; 4 KB of keys and values a
# token in bfloat16, once forward, and backward again with gradients in float32; NVLink and 400 Gb/s
MODEL = RingCosts(
    linear=2.575e-6,
    square=1.015e-10,
    constant=3e-4,
    token_bytes=16_384,
    inside=450e9,
    across=50e9,
    latency=30e-6,
)
SLOW_NETWORK = replace(MODEL, across=12.5e9)  # 100 Gb/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cell: ``slots`` microbatches of ``capacity`` tokens for every rank."""

    mix: str
    ranks: int
    context: int
    capacity: int
    slots: int
    costs: RingCosts = MODEL

    @property
    def tokens(self) -> int:
        return self.ranks * self.capacity * self.slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Time:
    """Seconds of the slowest rank, and what the mean rank does meanwhile, over the ideal."""

    slowest: float
    compute: float
    transfers: float

    @property
    def waits(self) -> float:
        return self.slowest - self.compute - self.transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    case: Case
    seed: int
    any: Time
    aligned: Time
    megatron: Time
    static: Time
    balanced: Time
    whole: float  # whole documents on ranks (LPT), memory aside
    bound: float  # that no schedule can go below: the longest document on its best ring
    documents: int
    largest: int  # ranks of our largest ring


def ideal(lengths: np.ndarray, case: Case) -> float:
    """Return the computation of the mean rank with as few microbatches as tokens allow."""
    exact, costs = lengths.astype(np.float64), case.costs
    compute = costs.linear * exact.sum() + costs.square * (exact * exact).sum()
    return float(compute + costs.constant * exact.sum() / case.capacity) / case.ranks


def simulated(table: TaskTable, task: np.ndarray, lengths: np.ndarray, case: Case) -> Time:
    """Run all tasks in their order: a ring starts when its last member is free."""
    exact = lengths.astype(np.float64)
    tokens = np.bincount(task, weights=exact, minlength=len(table))
    squares = np.bincount(task, weights=exact * exact, minlength=len(table))
    size = table.sizes()
    node = table.task_rank // 8
    crosses = np.minimum.reduceat(node, table.task_ptr[:-1]) != np.maximum.reduceat(
        node, table.task_ptr[:-1]
    )
    compute = case.costs.compute(tokens, squares, size)
    seconds = case.costs.seconds(tokens, squares, size, crosses)
    end = np.zeros(case.ranks)
    ptr = table.task_ptr.tolist()
    for t in np.lexsort((table.order, table.index)).tolist():
        ranks = table.task_rank[ptr[t] : ptr[t + 1]]
        end[ranks] = end[ranks].max() + seconds[t]
    bound = ideal(lengths, case)
    return Time(
        slowest=float(end.max()) / bound,
        compute=float((compute * size).sum()) / case.ranks / bound,
        transfers=float(((seconds - compute) * size).sum()) / case.ranks / bound,
    )


def measure(case: Case, seed: int, linux: Path = LINUX) -> Outcome:
    lengths = draw(case.mix, case.tokens, case.context, seed, linux)
    rules = HybridRules(ranks=case.ranks, capacity=case.capacity)
    ours = schedule(lengths, case.costs, rules)
    aligned = schedule(lengths, case.costs, replace(rules, groups="power_of_two"))
    other = megatron.schedule(lengths, case.ranks, case.capacity)
    for table, task in ((ours.tasks, ours.task), (aligned.tasks, aligned.task), other):
        table.check(rules.task_rules(), task=task, tokens=lengths)
    ways = (
        (ours.tasks, ours.task),
        (aligned.tasks, aligned.task),
        other,
        baselines.static(lengths, case.ranks, case.capacity, case.context),
        baselines.static_balanced(lengths, case.ranks, case.capacity, case.context, case.costs),
    )
    times = [simulated(table, task, lengths, case) for table, task in ways]
    whole = baselines.whole(lengths, case.ranks, case.costs).max() / ideal(lengths, case)
    return Outcome(
        case=case,
        seed=seed,
        any=times[0],
        aligned=times[1],
        megatron=times[2],
        static=times[3],
        balanced=times[4],
        whole=float(whole),
        bound=lower_bound(lengths, case.costs, rules) / ideal(lengths, case),
        documents=len(lengths),
        largest=int(ours.tasks.sizes().max()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Schedules for pipelines of 4 stages, and for ranks that meet at every microbatch."""

    mix: str
    ranks: int
    context: int
    uneven: float  # slowest over mean of W (m + p - 1)
    slowest: float  # over the same of a mean rank with as few microbatches as tokens allow
    alone: tuple[float, float]  # both for the schedule that is best without stages
    fewest: int  # microbatches of a rank
    most: int
    gaps: int  # empty tasks without equal counts
    padded: float  # share of empty tasks with equal counts
    meeting: float  # sum of the slowest tasks by index over the ideal, with equal counts
    meeting_alone: float  # the same for the schedule that is best by rank


def pipeline(case: Case, seed: int, linux: Path = LINUX) -> Pipeline:
    lengths = draw(case.mix, case.tokens, case.context, seed, linux)
    single = HybridRules(ranks=case.ranks, capacity=case.capacity)
    rules, even = replace(single, stages=4), replace(single, equal_counts=True)
    plan = schedule(lengths, case.costs, rules)
    equal = schedule(lengths, case.costs, even)
    best = min(
        hybrid.placements(lengths, case.costs, single),
        key=lambda placed: hybrid.planned(lengths, placed, case.costs, single).load.max(),
    )
    staged, meeting = (hybrid.planned(lengths, best, case.costs, r) for r in (rules, even))
    bound = ideal(lengths, case)
    filled = bound * (1 + (rules.stages - 1) * case.capacity * case.ranks / lengths.sum())
    counts = plan.tasks.counts(case.ranks)
    empty = [len(p.tasks) - len(np.unique(p.task)) for p in (plan, equal)]
    return Pipeline(
        mix=case.mix,
        ranks=case.ranks,
        context=case.context,
        uneven=float(plan.load.max() / plan.load.mean()),
        slowest=float(plan.load.max() / filled),
        alone=(float(staged.load.max() / staged.load.mean()), float(staged.load.max() / filled)),
        fewest=int(counts.min()),
        most=int(counts.max()),
        gaps=empty[0],
        padded=empty[1] / len(equal.tasks.task_rank),
        meeting=float(equal.load.max() / bound),
        meeting_alone=float(meeting.load.max() / bound),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """CPU milliseconds of schedules of 32M tokens, and of the check; the best of some."""

    mix: str
    ranks: int
    context: int
    capacity: int
    documents: int
    any: float
    aligned: float
    equal: float  # with equal counts
    staged: float  # with 4 pipeline stages
    check: float
    over_bound: float  # slowest rank over the larger of the ideal and the lower bound
    over_ideal: float

    @property
    def most(self) -> float:
        return max(self.any, self.aligned, self.equal, self.staged) + self.check


def planning(
    mix: str, ranks: int, context: int, capacity: int, repeat: int, linux: Path = LINUX
) -> Planning:
    lengths = draw(mix, 1 << 25, context, 0, linux)
    case = Case(mix=mix, ranks=ranks, context=context, capacity=capacity, slots=1)
    rules = HybridRules(ranks=ranks, capacity=capacity)
    ways = {
        "aligned": replace(rules, groups="power_of_two"),
        "equal": replace(rules, equal_counts=True),
        "staged": replace(rules, stages=4),
        "any": rules,
    }
    taken: dict[str, float] = {}
    for way, its in ways.items():
        for _ in range(repeat):
            at = time.process_time()
            plan = schedule(lengths, MODEL, its)
            planned = time.process_time()
            plan.tasks.check(its.task_rules(), task=plan.task, tokens=lengths)
            checked = time.process_time()
            for name, ms in ((way, planned - at), ("check", checked - planned)):
                taken[name] = min(taken.get(name, np.inf), 1000 * ms)
    at_least = ideal(lengths, case)
    slowest = float(plan.load.max())
    return Planning(
        mix=mix,
        ranks=ranks,
        context=context,
        capacity=capacity,
        documents=len(lengths),
        over_bound=slowest / max(at_least, lower_bound(lengths, MODEL, rules)),
        over_ideal=slowest / at_least,
        **taken,
    )


def cases(quick: bool, slots_of_ranks: Sequence[int] = (4, 16)) -> Iterator[Case]:
    """Yield the cells: 8 to 1,024 ranks, contexts of 64K to 2M."""
    grid = [
        (8, 64, 8),
        (8, 256, 32),
        (64, 64, 8),
        (64, 256, 8),
        (64, 512, 8),
        (64, 2048, 32),
        (256, 256, 8),
        (256, 1024, 8),
        (256, 2048, 8),
        (1024, 64, 8),
        (1024, 256, 8),
        (1024, 1024, 8),
        (1024, 2048, 8),
    ]
    for mix in MIXES:
        for ranks, context, capacity in grid[:5] if quick else grid:
            for slots in (4,) if quick else slots_of_ranks:
                yield Case(
                    mix=mix, ranks=ranks, context=context * K, capacity=capacity * K, slots=slots
                )
