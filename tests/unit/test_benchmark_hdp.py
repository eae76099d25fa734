"""The benchmark of hybrid schedules cannot rot: its baselines are valid and agree with hand work."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import hdp
from hybrid import baselines, megatron
from hybrid.lengths import LINUX, LOGNORMAL, MIXES, cut, draw, linux_tokens
from hybrid.measure import Case, K, measure, simulated
from overlord.plan.tasks import TaskRules
from overlord.planning.balance.hybrid import HybridRules, schedule


def test_megatrons_groups_are_powers_of_two_and_all_ranks() -> None:
    assert megatron.group_sizes(8) == [1, 2, 4, 8]
    assert megatron.group_sizes(12) == [1, 2, 4, 8, 12]
    assert megatron.group_sizes(1) == [1]


def test_a_microbatch_of_megatron_agrees_with_hand_work() -> None:
    """16 tokens need 2 ranks of 8, and work 16^2 / 2 on each: the most that there is.

    So both others take 1 rank. Of groups of 2, 1 and 1 the smallest double: 2, 2 and 2, then 4.
    """
    lengths = np.array([16, 8, 8])
    groups, left = megatron.microbatch(np.arange(3), lengths, ranks=8, capacity=8)
    assert not len(left)
    assert groups.rows == [[0], [1], [2]]
    assert groups.size[:3].tolist() == [4, 2, 2]


def test_megatrons_microbatches_leave_no_rank_idle_and_every_group_within_capacity() -> None:
    chance = np.random.default_rng(0)
    for ranks in (1, 3, 8, 16):
        lengths = np.minimum(np.ceil(chance.lognormal(3, 1.5, 60)), 64 * ranks).astype(np.int64)
        table, task = megatron.schedule(lengths, ranks, 64)
        table.check(TaskRules(ranks=ranks, equal_counts=True), task=task, tokens=lengths)
        # Megatron counts s / c, so a piece of its own may be larger by rounding
        held = np.bincount(task, weights=lengths / table.sizes()[task], minlength=len(table))
        assert held.max() <= 64 + 1e-9


def test_static_groups_hold_packs_of_the_context() -> None:
    lengths = np.array([30, 30, 30, 10, 64])
    table, task = baselines.static(lengths, ranks=8, capacity=16, context=64)
    assert task.tolist() == [0, 0, 1, 1, 2]
    assert table.sizes().tolist() == [4, 4, 4]
    assert [table.ranks(t)[0] for t in range(3)] == [0, 4, 0]
    table.check(TaskRules(ranks=8))


def test_lengths_have_the_percentages_that_they_claim() -> None:
    linux = linux_tokens()
    assert len(linux) == 78_549
    assert (linux <= 4 * K).mean() == pytest.approx(0.76, abs=0.01)
    assert linux[linux > 128 * K].sum() / linux.sum() == pytest.approx(0.31, abs=0.01)
    chance = np.random.default_rng(0)
    for mix, short, long in (("github", 0.76, 0.162), ("byted", 0.80, 0.443)):
        lengths = LOGNORMAL[mix].draw(2_000_000, chance)
        assert (lengths <= 4 * K).mean() == pytest.approx(short, abs=0.01)
        assert lengths[lengths > 128 * K].sum() / lengths.sum() == pytest.approx(long, abs=0.08)


def test_a_draw_has_exactly_the_tokens_and_no_document_above_the_context() -> None:
    assert cut(np.array([5, 10, 11]), 10).tolist() == [5, 10, 10, 1]
    for mix in MIXES:
        lengths = draw(mix, 1 << 20, 64 * K, seed=1)
        assert int(lengths.sum()) == 1 << 20
        assert 1 <= lengths.min() <= lengths.max() <= 64 * K


def test_our_schedules_are_not_slower_than_megatrons_by_more_than_the_constants() -> None:
    case = Case(mix="linux", ranks=64, context=64 * K, capacity=8 * K, slots=4)
    for mix in MIXES:
        found = measure(replace(case, mix=mix), seed=0)
        assert found.any.slowest <= 1.01 * found.megatron.slowest
        assert found.aligned.slowest <= 1.01 * found.megatron.slowest
        assert found.any.slowest == pytest.approx(
            found.any.compute + found.any.transfers + found.any.waits
        )


def test_ours_is_near_the_ideal_and_no_slower_than_megatrons_where_it_once_was_not() -> None:
    """Powers of two left 1.068 and 1.021; a full batch on 8 ranks was slower by 0.17 %."""
    for mix, ranks, context, seed in (("linux", 256, 1024, 1), ("web", 1024, 1024, 0)):
        case = Case(mix=mix, ranks=ranks, context=context * K, capacity=8 * K, slots=4)
        lengths = draw(mix, case.tokens, case.context, seed)
        rules = HybridRules(ranks=ranks, capacity=case.capacity)
        plan = schedule(lengths, case.costs, rules)
        assert simulated(plan.tasks, plan.task, lengths, case).slowest < 1.01
    for context, capacity in ((64, 8), (256, 32)):
        case = Case(mix="byted", ranks=8, context=context * K, capacity=capacity * K, slots=4)
        found = measure(case, 0)
        assert found.any.slowest <= found.megatron.slowest


def test_processes_return_the_results_of_one_process_in_order() -> None:
    grid = [
        Case(mix="byted", ranks=8, context=n * K, capacity=8 * K, slots=1) for n in (16, 64, 32)
    ]
    cells = [hdp.Cell(part="outcomes", work=measure, case=case, seed=0) for case in grid]
    steps: list[int] = []
    one, two = (hdp.results_of(cells, LINUX, n, lambda: steps.append(1)) for n in (1, 2))
    assert one == two
    assert [found.case for found in one] == grid
    assert len(steps) == 2 * len(grid)
