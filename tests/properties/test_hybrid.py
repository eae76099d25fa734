"""Hybrid schedules: every table is valid and cannot block, and no rank is late without need."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import PlanError
from overlord.planning.balance import hybrid, hybrid_table, ring_placement, rings
from overlord.planning.balance.hybrid import HybridPlan, HybridRules, schedule
from overlord.planning.balance.ring_bound import lower_bound
from overlord.planning.cost import RingCosts, fit

COSTS = RingCosts(linear=1.0, square=0.05, constant=2.0)
SLOW = replace(COSTS, token_bytes=1.0, inside=2.0, across=0.2, latency=0.5)


@st.composite
def demands(draw: st.DrawFn) -> HybridRules:
    multiple = draw(st.sampled_from([0, 0, 1, 3]))
    return HybridRules(
        ranks=draw(st.integers(1, 24)),
        capacity=draw(st.integers(max(1, 2 * multiple), 60)),
        groups=draw(st.sampled_from(["any", "power_of_two"])),
        node=draw(st.integers(1, 9)),
        stages=draw(st.integers(1, 3)),
        virtual=draw(st.integers(1, 2)),
        equal_counts=draw(st.booleans()),
        count_multiple=draw(st.integers(1, 3)),
        multiple=multiple,
    )


lists = st.lists(
    st.one_of(st.integers(0, 8), st.integers(0, 70), st.integers(0, 1500)), max_size=40
)
FITTED = fit(
    [[n] for n in (10, 20, 40, 80)] * 2,
    [12.0, 30.0, 100.0, 380.0, 14.0, 25.0, 60.0, 200.0],
    ranks=[1] * 4 + [2] * 4,
)
costs = st.sampled_from([COSTS, SLOW, FITTED, RingCosts(linear=1.0), RingCosts(linear=0.0)])


def fitting(lengths: list[int], rules: HybridRules) -> np.ndarray:
    """Return documents cut to what surely fits on all ranks."""
    unit = max(2, 2 * rules.multiple)
    most = max(rules.capacity // unit * unit * rules.ranks, 1)
    if not rules.multiple:
        most = most if rules.ranks > 1 else rules.capacity
    return np.minimum(np.array(lengths, np.int64), most)


def checked(lengths: np.ndarray, rules: HybridRules, cost: RingCosts = COSTS) -> HybridPlan:
    plan = schedule(lengths, cost, rules)
    memory = hybrid_table.memory_of(plan.tasks, plan.task, lengths, rules)
    plan.tasks.check(rules.task_rules(), task=plan.task, tokens=lengths, memory=memory)
    return plan


@given(lists, demands(), costs)
def test_every_table_is_valid(lengths: list[int], rules: HybridRules, cost: RingCosts) -> None:
    tokens = fitting(lengths, rules)
    plan = checked(tokens, rules, cost)
    assert plan.load.shape == (rules.ranks,)
    if len(tokens):
        assert plan.load.max() >= lower_bound(tokens, cost, rules) * (1 - 1e-9)
    kinds = [plan.task.dtype.name, plan.slot.dtype.name, plan.load.dtype.name]
    assert kinds == ["int32", "int32", "float64"]
    for task in range(len(plan.tasks)):  # slots of a task are 0, 1, ...
        slots = np.sort(plan.slot[plan.task == task])
        assert slots.tolist() == list(range(len(slots)))


@given(lists, demands(), costs)
def test_a_schedule_is_the_same_each_time(
    lengths: list[int], rules: HybridRules, cost: RingCosts
) -> None:
    tokens = fitting(lengths, rules)
    first, second = (schedule(tokens, cost, rules) for _ in range(2))
    assert first.tasks.digest() == second.tasks.digest()
    assert first.task.tolist() == second.task.tolist()
    assert first.slot.tolist() == second.slot.tolist()


@given(lists, demands())
def test_aligned_groups_are_in_the_set_of_groups_that_exist(
    lengths: list[int], rules: HybridRules
) -> None:
    rules = replace(rules, groups="power_of_two")
    plan = checked(fitting(lengths, rules), rules)
    for task in range(len(plan.tasks)):
        ranks = plan.tasks.ranks(task).tolist()
        d = len(ranks)
        assert ranks == list(range(ranks[0], ranks[0] + d))
        assert d == rules.ranks or (d & (d - 1) == 0 and ranks[0] % d == 0)


@given(lists, demands())
def test_every_pipeline_has_the_number_of_microbatches_that_it_needs(
    lengths: list[int], rules: HybridRules
) -> None:
    tokens = fitting(lengths, rules)
    counts = checked(tokens, rules).tasks.counts(rules.ranks)
    assert (counts % rules.count_multiple == 0).all()
    if rules.equal_counts:
        assert len(set(counts.tolist())) == 1


@given(st.lists(st.integers(1, 400), max_size=20), demands(), st.floats(0, 1), st.floats(0, 0.01))
def test_offload_keeps_more_of_a_document_on_a_rank(
    lengths: list[int], rules: HybridRules, base: float, slope: float
) -> None:
    rules = replace(rules, offload_share=0.9, offload_base=base, offload_slope=slope)
    tokens = fitting(lengths, rules)
    plan = checked(tokens, rules)
    hidden = rings.hidden_ratio(tokens, rules)
    single = np.bincount(plan.task, minlength=len(plan.tasks)) == 1
    for i in np.flatnonzero(single[plan.task]).tolist():
        assert plan.tasks.offload[plan.task[i]] <= hidden[i] + 1e-5
    without, _ = rings.floors(tokens, replace(rules, offload_share=0.0))
    assert (rings.floors(tokens, rules)[0] <= without).all()


@given(st.integers(1, 24), st.integers(1, 60), st.integers(1, 100))
def test_a_document_that_fits_on_no_ring_is_refused(ranks: int, capacity: int, more: int) -> None:
    rules = HybridRules(ranks=ranks, capacity=capacity)
    with pytest.raises(PlanError, match=r"sample 1: expected at most .* tokens, .*; cut documents"):
        schedule(np.array([1, ranks * capacity + more]), COSTS, rules)


@given(st.integers(1, 24), st.integers(1, 61))
def test_a_document_that_fills_all_ranks_exactly_fits(ranks: int, capacity: int) -> None:
    for groups in ("any", "power_of_two"):
        rules = HybridRules(ranks=ranks, capacity=capacity, groups=groups)  # type: ignore[arg-type]
        plan = checked(np.array([ranks * capacity, 1]), rules)
        assert plan.tasks.sizes().max() == ranks


@given(lists, demands())
def test_any_groups_are_never_slower_than_aligned_ones(
    lengths: list[int], rules: HybridRules
) -> None:
    tokens = fitting(lengths, rules)
    free, aligned = (
        schedule(tokens, SLOW, replace(rules, groups=groups)).load.max()  # type: ignore[arg-type]
        for groups in ("any", "power_of_two")
    )
    assert free <= aligned or free <= 1.01 * rings.mean_load(tokens, SLOW, rules)


def in_step(plan: HybridPlan, lengths: np.ndarray, cost: RingCosts, rules: HybridRules) -> float:
    """Return the time of a step whose ranks wait for each other after every microbatch."""
    total, slowest = 0.0, dict[int, float]()
    for task, index in enumerate(plan.tasks.index.tolist()):
        own = lengths[plan.task == task].astype(np.float64)
        nodes = {int(rank) // rules.node for rank in plan.tasks.ranks(task)}
        args = np.array([own.sum()]), np.array([(own * own).sum()]), plan.tasks.sizes()[[task]]
        seconds = float(cost.seconds(*args, np.array([len(nodes) > 1]))[0])
        slowest[index] = max(slowest.get(index, 0.0), seconds)
    for seconds in slowest.values():
        total += seconds
    return total * (1 + (rules.stages - 1) / rules.virtual / max(1, len(slowest)))


@given(lists, demands(), costs)
def test_with_equal_counts_the_sum_of_slowest_tasks_is_no_worse_than_of_one_sum_by_rank(
    lengths: list[int], rules: HybridRules, cost: RingCosts
) -> None:
    """Padding the schedule that is best without waits to equal counts is what levels replace."""
    rules = replace(rules, equal_counts=True)
    tokens = fitting(lengths, rules)
    plan = checked(tokens, rules, cost)
    ours = in_step(plan, tokens, cost, rules)
    np.testing.assert_allclose(plan.load, ours, rtol=1e-9)
    alone = replace(rules, equal_counts=False)
    best = min(
        (hybrid.planned(tokens, placed, cost, alone).load.max(), i)
        for i, placed in enumerate(hybrid.placements(tokens, cost, alone))
    )[1]
    placed = list(hybrid.placements(tokens, cost, alone))[best]
    before = in_step(hybrid.planned(tokens, placed, cost, rules), tokens, cost, rules)
    near = hybrid.NEAR * rings.mean_load(tokens, cost, rules, constants=True)
    assert ours <= max(before * (1 + 1e-9), near)


def test_levels_of_equal_tasks_do_better_than_rings_before_packs() -> None:
    """Packs of short documents would wait for long ones at every index."""
    rng = np.random.default_rng(0)
    lengths = np.concatenate((rng.integers(100, 1500, 30), rng.integers(1, 60, 600)))
    rules = HybridRules(ranks=32, capacity=400, equal_counts=True)
    plan = checked(lengths, rules)
    alone = schedule(lengths, COSTS, replace(rules, equal_counts=False))
    assert plan.load.max() < 1.02 * rings.mean_load(lengths, COSTS, rules, constants=True)
    assert plan.load.max() < 0.75 * in_step(alone, lengths, COSTS, rules)


def test_a_document_takes_whole_nodes_where_a_power_of_two_would_wait() -> None:
    """On 4 of 8 nodes it lasts longer than the mean rank, and on all 8 transfers show."""
    lengths = np.array([16_000, *[1000] * 60, *[100] * 400])
    rules = HybridRules(ranks=64, capacity=1000, node=8)
    cost = RingCosts(linear=1.0, square=0.01, token_bytes=1.0, inside=1e9, across=0.35)
    plan, aligned = (
        checked(lengths, replace(rules, groups=groups), cost)  # type: ignore[arg-type]
        for groups in ("any", "power_of_two")
    )
    mean = rings.mean_load(lengths, cost, rules)
    ranks = plan.tasks.ranks(int(plan.task[0]))
    assert len(ranks) == 56, "the smallest number of nodes that is no slower than the mean rank"
    assert plan.load.max() < 1.02 * mean < 1.08 * mean < aligned.load.max()


@given(st.lists(st.integers(1, 8), min_size=1, max_size=12), st.integers(0, 2**32))
def test_rings_side_by_side_start_on_all_their_ranks_at_once(nodes: list[int], seed: int) -> None:
    node, ranks = 4, 32
    size = node * np.array(nodes)
    seconds = np.random.default_rng(seed).random(len(size)) + 0.1
    placed = ring_placement.side_by_side(
        np.arange(len(size)), seconds, size, ranks=ranks, node=node
    )
    end, index = np.zeros(ranks), np.full(ranks, -1)
    for doc, first, d, at in zip(placed.doc, placed.first, placed.size, placed.index, strict=True):
        mine = slice(first, first + d)
        assert first % node == 0
        assert first + d <= ranks
        assert index[mine].max() < at, "order and index differ on a rank"
        index[mine], end[mine] = at, end[mine].max() + seconds[doc]
    assert sorted(placed.doc.tolist()) == list(range(len(size)))
    np.testing.assert_allclose(placed.end, end)
    assert (placed.following == index + 1).all()


def test_columns_of_pipelines_with_long_documents_end_together() -> None:
    """A column with one long microbatch would fill and drain its pipeline for three more."""
    rng = np.random.default_rng(1)
    lengths = np.concatenate(([9000, 4000], rng.integers(1, 300, 600)))
    rules = HybridRules(ranks=32, capacity=800, stages=4)
    plan = checked(lengths, rules)
    alone = replace(rules, stages=1)
    before = [
        hybrid.planned(lengths, placed, COSTS, rules).load
        for placed in hybrid.placements(lengths, COSTS, alone)
    ]
    assert plan.load.max() < 1.15 * plan.load.mean()
    assert all(plan.load.max() < 0.9 * load.max() for load in before)


def test_pipelines_with_few_long_microbatches_do_less() -> None:
    """W (m + p - 1) is equal, so a column of 1 long microbatch waits longer to fill and drain."""
    rules = HybridRules(ranks=2, capacity=64, stages=4)
    tokens = np.array([64, *[2] * 200])
    plan = checked(tokens, replace(rules, stages=4), RingCosts(linear=1.0))
    flat = checked(tokens, replace(rules, stages=1), RingCosts(linear=1.0))
    assert plan.load.max() <= 1.1 * plan.load.min()
    work = np.bincount(plan.tasks.task_rank[plan.task], weights=tokens, minlength=2)
    even = np.bincount(flat.tasks.task_rank[flat.task], weights=tokens, minlength=2)
    assert np.ptp(work) >= np.ptp(even)


def optimum(tokens: list[int], rules: HybridRules, cost: RingCosts) -> float:
    """Return the least time of the slowest rank over all rings and all orders; no two share a task."""
    subsets = [c for d in range(1, rules.ranks + 1) for c in combinations(range(rules.ranks), d)]
    best = np.inf
    one = np.array([0])
    times = [
        {
            d: float(cost.seconds(one + n, one + float(n * n), one + d, one > 0)[0])
            for d in range(1, rules.ranks + 1)
            if n <= d * (rules.capacity - rules.capacity % 2)
        }
        for n in tokens
    ]
    for chosen in product(*[[s for s in subsets if len(s) in t] for t in times]):
        for order in permutations(range(len(tokens))):
            end = [0.0] * rules.ranks
            for i in order:
                at = max(end[r] for r in chosen[i]) + times[i][len(chosen[i])]
                for r in chosen[i]:
                    end[r] = at
            best = min(best, max(end))
    return best


@given(st.lists(st.integers(1, 90), min_size=1, max_size=3), st.integers(10, 60), st.booleans())
def test_tiny_schedules_are_near_the_optimum_of_all(
    tokens: list[int], capacity: int, slow: bool
) -> None:
    rules = HybridRules(ranks=3, capacity=2 * capacity)
    tokens = [min(n, 3 * rules.capacity) for n in tokens]
    cost = replace(SLOW if slow else COSTS, constant=0.0)
    found = float(schedule(np.array(tokens), cost, rules).load.max())
    assert found <= NEAR_OPTIMUM * optimum(tokens, rules, cost)


NEAR_OPTIMUM = 1.35


def test_planning_is_linear_in_documents() -> None:
    """32M tokens for 1,024 ranks take milliseconds (benchmarks/hdp.py); here only that they do."""
    chance = np.random.default_rng(0)
    tokens = np.minimum(np.ceil(chance.lognormal(6.5, 1.6, 13_000)), 2**20).astype(np.int64)
    rules = HybridRules(ranks=1024, capacity=8192)
    plan = checked(tokens, rules, RingCosts(linear=2.6e-6, square=1e-10, constant=3e-4))
    assert plan.load.max() <= 1.02 * plan.load.mean()
