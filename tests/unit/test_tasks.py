"""Tables of tasks: every rule has an error of its own, and no table that is accepted can block.

The second is compared with an exhaustive search for cycles: all lists of at most 3 tasks on 3
ranks, with 1, 2 and 3 pipeline stages.
"""

from __future__ import annotations

import timeit
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, permutations, product

import numpy as np
import pytest

from overlord.errors import PlanError
from overlord.plan.tasks import TaskRules, TaskTable

RANKS = 3
Lists = tuple[tuple[int, ...], ...]  # the tasks of every rank, in its order


def table() -> TaskTable:
    """Rank 0: tasks 0, 1, 3; rank 1: tasks 0, 2, 3; rank 2: task 0."""
    return TaskTable.of([[2, 0, 1], [0], [1], [1, 0]], [0, 1, 1, 2], offload=[0.5, 0, 0, 1])


RULES = TaskRules(ranks=3)


def test_a_table_knows_its_rings_and_the_list_of_every_rank() -> None:
    made = table().check(RULES)
    assert len(made) == 4
    assert made.ranks(0).tolist() == [2, 0, 1]
    assert made.sizes().tolist() == [3, 1, 1, 2]
    assert [made.tasks(r).tolist() for r in range(3)] == [[0, 1, 3], [0, 2, 3], [0]]
    assert made.counts(4).tolist() == [3, 3, 1, 0]
    bounds, tasks = made.lists(4)
    assert bounds.tolist() == [0, 3, 6, 7, 7]
    assert tasks.tolist() == [0, 1, 3, 0, 2, 3, 0]
    kinds = [made.task_ptr, made.task_rank, made.index, made.order, made.offload]
    assert [a.dtype.name for a in kinds] == ["int64", "int32", "int32", "int64", "float32"]


def test_an_empty_table_is_valid() -> None:
    assert len(TaskTable.of([], []).check(TaskRules(ranks=2, stages=2, equal_counts=True))) == 0


def test_the_digest_covers_ring_order_index_and_offload() -> None:
    first = table()
    others = [
        replace(first, task_rank=np.array([0, 2, 1, 0, 1, 1, 0], np.int32)),
        replace(first, index=np.array([0, 1, 1, 3], np.int32)),
        replace(first, order=np.array([0, 2, 1, 3])),
        replace(first, offload=np.zeros(4, np.float32)),
    ]
    assert first.digest() == table().digest()
    assert len({first.digest(), *(t.digest() for t in others)}) == 5


WRONG: dict[str, tuple[TaskTable, TaskRules, str]] = {
    "column": (
        replace(table(), index=np.zeros(4)),
        RULES,
        "tasks: expected index to be one column of whole numbers, got float64",
    ),
    "length": (replace(table(), order=np.arange(3)), RULES, "expected 4 values in order, got 3"),
    "pointer": (
        replace(table(), task_ptr=np.array([0, 3, 4, 5, 6])),
        RULES,
        "expected task_ptr from 0 to 7, got 0 to 6",
    ),
    "no rank": (TaskTable.of([[0], []], [0, 0]), RULES, "task 1: expected at least 1 rank, got 0"),
    "index": (TaskTable.of([[0]], [-1]), RULES, "task 0: expected an index of at least 0, got -1"),
    "offload": (
        TaskTable.of([[0]], [0], offload=[1.5]),
        RULES,
        "task 0: expected an offload ratio of 0 to 1, got 1.5",
    ),
    "offload is a number": (
        TaskTable.of([[0]], [0], offload=[float("nan")]),
        RULES,
        "expected an offload ratio of 0 to 1, got nan",
    ),
    "rank": (
        TaskTable.of([[0], [1, 3]], [0, 0]),
        RULES,
        "task 1: expected ranks of 0 to 2, got 3; use ranks of the HDP axis",
    ),
    "rank twice": (
        TaskTable.of([[0], [1, 2, 1]], [0, 0]),
        RULES,
        r"task 1: expected distinct ranks, got rank 1 twice in \[1, 2, 1\]",
    ),
    "order": (
        TaskTable.of([[0], [1]], [0, 0], order=[1, 1]),
        RULES,
        "expected each order of 0 to 1 once, got 1 in place of 0",
    ),
    "two tasks at once": (
        TaskTable.of([[0, 1], [1]], [0, 0]),
        RULES,
        "rank 1: expected task 1, later in the global order than task 0, to have a larger "
        "index than 0, got 0",
    ),
    "index against order": (
        TaskTable.of([[0, 1], [1, 0]], [1, 0]),
        RULES,
        "rank 0: expected task 1, later in the global order than task 0, to have a larger "
        "index than 1, got 0",
    ),
    "gap with stages": (
        TaskTable.of([[0], [0, 1]], [0, 1]),
        TaskRules(ranks=2, stages=2),
        "rank 1: expected its task 1, number 0 of that rank, to have index 0, got 1; with 2 "
        "stages indices have no gaps",
    ),
    "equal counts": (
        table(),
        TaskRules(ranks=3, equal_counts=True),
        "rank 2: expected 3 tasks as on every rank, got 1; add empty tasks",
    ),
    "multiple of counts": (
        table(),
        TaskRules(ranks=3, count_multiple=3),
        "rank 2: expected a multiple of 3 tasks, got 1",
    ),
}


@pytest.mark.parametrize("rule", WRONG)
def test_a_broken_rule_is_named_with_its_place(rule: str) -> None:
    made, rules, text = WRONG[rule]
    with pytest.raises(PlanError, match=text) as caught:
        made.check(rules, step=7)
    assert caught.value.step == 7
    assert caught.value.remedy


def test_gaps_are_fine_without_stages() -> None:
    TaskTable.of([[0], [0, 1]], [0, 1]).check(TaskRules(ranks=2))


# samples

TASK, TOKENS = np.array([0, 0, 1, 2, 3]), np.array([30, 1, 12, 12, 8])


def test_samples_fit_their_ranks() -> None:
    table().check(replace(RULES, capacity=12), task=TASK, tokens=TOKENS)
    with pytest.raises(PlanError, match="task 0, rank 2: expected at most 11 tokens, got 12"):
        # Position 0 holds the last chunk of the document of one token.
        table().check(replace(RULES, capacity=11), task=TASK, tokens=np.array([32, 1, 0, 0, 0]))
    with pytest.raises(PlanError, match="task 0, rank 2: expected at most 12 tokens, got 14"):
        # 31 tokens are padded to 36 and 1 to 6: 42 over 3 ranks.
        table().check(
            replace(RULES, capacity=12, multiple=1),
            task=np.array([0, 0, 3]),
            tokens=np.array([31, 1, 1]),
        )


def test_samples_have_one_task() -> None:
    with pytest.raises(PlanError, match="sample 1: expected a task of 0 to 3, got 4"):
        table().check(RULES, task=np.array([0, 4]), tokens=np.array([1, 1]))
    with pytest.raises(PlanError, match="expected a task for each of 2 samples, got int64 of"):
        table().check(RULES, task=np.array([0]), tokens=np.array([1, 1]))


def test_only_a_task_of_one_rank_may_be_empty() -> None:
    table().check(RULES, task=np.array([0, 3]), tokens=np.array([9, 9]))
    with pytest.raises(PlanError, match="task 3: expected samples for its 2 ranks, got none"):
        table().check(RULES, task=np.array([0]), tokens=np.array([9]))


def test_memory_is_bounded() -> None:
    rules = replace(RULES, memory_capacity=10.0)
    table().check(rules, memory=np.array([10.0, 1, 1, 1]))
    with pytest.raises(PlanError, match=r"task 3: expected at most 10 of memory .* got 11 with"):
        table().check(rules, memory=np.array([10.0, 1, 1, 11]))
    with pytest.raises(PlanError, match="expected memory for 4 tasks"):
        table().check(rules, memory=np.array([1.0]))


# deadlocks, searched exhaustively


def blocks(lists: Lists, stages: int) -> bool:
    """Whether ranks that run these lists wait for each other for ever.

    A forward or backward of a task is one event of all its ranks, stage by stage. A rank runs
    1F1B, forwards wait for the stage before, backwards for the stage behind.
    """
    after: defaultdict[tuple[str, int, int], set[tuple[str, int, int]]] = defaultdict(set)
    for tasks in lists:
        for stage in range(stages):
            for before, event in pairwise(one_forward_one_backward(tasks, stage, stages)):
                after[event].add(before)
            for task in tasks:
                if stage:
                    after["F", stage, task].add(("F", stage - 1, task))
                    after["B", stage - 1, task].add(("B", stage, task))
                after["B", stage, task].add(("F", stage, task))
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return True
    return False


def one_forward_one_backward(
    tasks: tuple[int, ...], stage: int, stages: int
) -> Iterator[tuple[str, int, int]]:
    warm = min(stages - stage - 1, len(tasks))
    order = [("F", i) for i in range(warm)]
    for i in range(len(tasks) - warm):
        order += [("F", warm + i), ("B", i)]
    order += [("B", i) for i in range(len(tasks) - warm, len(tasks))]
    return ((kind, stage, tasks[i]) for kind, i in order)


def all_lists() -> Iterator[Lists]:
    each = [p for n in range(4) for p in permutations(range(3), n)]
    return product(each, repeat=RANKS)


@cache
def accepted(stages: int) -> frozenset[Lists]:
    """The lists of all tables that are accepted; tasks are numbered in the global order."""
    subsets = [s for n in range(1, RANKS + 1) for s in combinations(range(RANKS), n)]
    rules, found = TaskRules(ranks=RANKS, stages=stages), set()
    for n in range(4):
        for rings in product(subsets, repeat=n):
            for index in product(range(3), repeat=n):
                made = TaskTable.of(rings, index)
                try:
                    made.check(rules)
                except PlanError:
                    continue
                found.add(tuple(tuple(made.tasks(r).tolist()) for r in range(RANKS)))
    return frozenset(found)


def is_accepted(lists: Lists, stages: int) -> bool:
    """Whether a table has these lists, for some numbers of the tasks."""
    renamed = (
        tuple(tuple(names[t] for t in tasks) for tasks in lists)
        for names in permutations(range(RANKS))
    )
    return any(other in accepted(stages) for other in renamed)


def test_without_stages_exactly_the_lists_that_cannot_block_have_a_table() -> None:
    assert [ls for ls in all_lists() if blocks(ls, 1) == is_accepted(ls, 1)] == []
    assert sum(blocks(ls, 1) for ls in all_lists()) > 1000


@pytest.mark.parametrize("stages", [2, 3])
def test_with_stages_no_list_that_can_block_has_a_table(stages: int) -> None:
    cyclic = [ls for ls in all_lists() if blocks(ls, stages)]
    assert [ls for ls in cyclic if is_accepted(ls, stages)] == []
    assert len(accepted(stages)) > 50
    # One global order is not enough with stages: some of these block.
    assert any(not blocks(ls, 1) for ls in cyclic)
    assert all(not is_accepted(ls, stages) for ls in cyclic if is_accepted(ls, 1))


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_columns_with_different_counts_are_accepted(stages: int) -> None:
    uneven = ((0, 1, 2), (0, 1), (0,))
    assert is_accepted(uneven, stages)
    assert not blocks(uneven, stages)


def test_the_tasks_of_one_constructor_take_no_time_for_those_of_all_others() -> None:
    """A dry run of 16,384 ranks asks once for each of as many workers: it took minutes."""
    n = 300_000
    table = TaskTable.of([], [])
    table = replace(
        table,
        task_ptr=np.arange(n + 1),
        task_rank=np.arange(n, dtype=np.int32),
        index=np.zeros(n, np.int32),
        order=np.arange(n),
        offload=np.zeros(n, np.float32),
    )
    some, every = np.array([5, 70_000]), np.arange(n)
    for ask in (table.task_of, table.take):
        few, all_of_them = (
            min(timeit.repeat(lambda rows=rows, ask=ask: ask(rows), number=3, repeat=5))
            for rows in (some, every)
        )
        assert few < all_of_them / 10, ask
    assert table.task_of(some).tolist() == [5, 70_000]
    rings = TaskTable.of([[0, 1], [2], [3, 4, 5]], [0, 0, 0])
    assert rings.task_of(np.arange(6)).tolist() == [0, 0, 1, 2, 2, 2]
