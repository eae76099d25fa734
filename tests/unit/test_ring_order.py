"""Ring orders of hybrid plans: late positions take longer, and ranks take turns at them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from overlord.planning.balance.hybrid import HybridPlan, HybridRules, schedule
from overlord.planning.cost.ring import RingCosts

COSTS = RingCosts(linear=1.0, square=1e-3)
LATER = 0.05  # how much longer the last position of a ring takes than the first, of the mean
RANKS, CAPACITY = 8, 64


def late_seconds(plan: HybridPlan, lengths: np.ndarray) -> np.ndarray:
    """Return for every rank the seconds that its positions cost beside those of a mean one."""
    table, late = plan.tasks, np.zeros(RANKS)
    for task, size in enumerate(table.sizes().tolist()):
        mine = lengths[plan.task == task].astype(np.float64)
        seconds = float((mine + 1e-3 * mine * mine).sum()) / size
        late[table.ranks(task)] += LATER * seconds * ((np.arange(size) + 0.5) / size - 0.5)
    return late


def planned(lengths: np.ndarray, groups: str) -> HybridPlan:
    return schedule(lengths, COSTS, HybridRules(ranks=RANKS, capacity=CAPACITY, groups=groups))


@pytest.mark.parametrize("rings", [2, 4, 6])
def test_of_two_equal_rings_the_second_is_reversed(rings: int) -> None:
    lengths = np.full(rings, RANKS * CAPACITY)
    plan = planned(lengths, "any")
    assert plan.tasks.sizes().tolist() == [RANKS] * rings
    orders = [plan.tasks.ranks(t).tolist() for t in range(rings)]
    assert orders[0] == list(range(RANKS))
    assert orders == [orders[0], orders[0][::-1]] * (rings // 2)
    assert np.abs(late_seconds(plan, lengths)).max() < 1e-9


def test_rings_of_pre_created_groups_keep_their_order() -> None:
    plan = planned(np.full(4, RANKS * CAPACITY), "power_of_two")
    assert [plan.tasks.ranks(t).tolist() for t in range(4)] == [list(range(RANKS))] * 4


@pytest.mark.parametrize("seed", range(5))
def test_turns_level_the_ranks_of_mixed_documents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, RANKS * CAPACITY, 40)
    plan = planned(lengths, "any")
    in_order = planned_in_rank_order(plan)
    spread, before = (np.ptp(late_seconds(one, lengths)) for one in (plan, in_order))
    assert spread < 0.5 * before
    members = [sorted(plan.tasks.ranks(t).tolist()) for t in range(len(plan.tasks))]
    assert members == [in_order.tasks.ranks(t).tolist() for t in range(len(plan.tasks))]


def planned_in_rank_order(plan: HybridPlan) -> HybridPlan:
    """Return the plan with the ranks of every ring in ascending order."""
    table = plan.tasks
    task = np.repeat(np.arange(len(table)), table.sizes())
    rank = table.task_rank[np.lexsort((table.task_rank, task))]
    return replace(plan, tasks=replace(table, task_rank=rank))
