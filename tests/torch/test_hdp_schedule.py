"""The order of 1F1B with unequal counts, executed without processes: every transfer waits for its
partner, every task for all of its columns, and nobody waits for ever.
"""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.errors import PlanError
from overlord.plan.tasks import TaskRules, TaskTable

pytest.importorskip("torch")

from overlord.torch.hdp.schedule import (
    BACKWARD,
    FORWARD,
    TRANSFER,
    Action,
    Message,
    actions,
    computations,
    in_flight,
)

Lists = tuple[tuple[int, ...], ...]  # the tasks of every column


def finishes(lists: Lists, stages: int) -> bool:
    """Execute the actions of all ranks. A computation of a task ends when all its columns have
    begun it. A batch of transfers ends when the partner of each has begun its own: as NCCL does it,
    without buffers.
    """
    ranks = list(product(range(stages), range(len(lists))))
    todo = {(s, c): list(actions(s, stages, len(lists[c]))) for s, c in ranks}
    begun = dict.fromkeys(ranks, 0)  # the action that each rank is in
    where: dict[tuple[str, int, int, int], int] = {}  # kind, stage, column, task: number of action
    partner: dict[tuple[bool, int, int, Message], int] = {}
    for (s, c), made in todo.items():
        for number, action in enumerate(made):
            if action.kind != TRANSFER:
                where[action.kind, s, c, lists[c][action.index]] = number
            partner |= {(True, s, c, m): number for m in action.sends}
            partner |= {(False, s, c, m): number for m in action.receives}

    def waits_for(s: int, c: int, action: Action) -> list[tuple[tuple[int, int], int]]:
        if action.kind != TRANSFER:
            task = lists[c][action.index]
            return [
                ((s, o), where[action.kind, s, o, task])
                for o in range(len(lists))
                if task in lists[o]
            ]
        found = []
        for sends, messages in ((True, action.sends), (False, action.receives)):
            for m in messages:
                other = s + (1 if (m.kind == FORWARD) == sends else -1)
                found.append(((other, c), partner[not sends, other, c, m]))
        return found

    moved = True
    while moved:
        moved = False
        for s, c in ranks:
            while begun[s, c] < len(todo[s, c]) and all(
                begun[rank] >= number for rank, number in waits_for(s, c, todo[s, c][begun[s, c]])
            ):
                begun[s, c] += 1
                moved = True
    return all(begun[rank] == len(todo[rank]) for rank in ranks)


def test_the_order_of_three_stages() -> None:
    def text(stage: int, count: int) -> str:
        return " ".join(f"{kind[0].upper()}{i}" for kind, i in computations(stage, 3, count))

    assert text(0, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text(1, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text(2, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text(0, 1) == text(2, 1) == "F0 B0"
    assert text(0, 0) == ""


@given(st.integers(1, 5), st.integers(0, 9), st.data())
def test_every_microbatch_runs_once_each_way_and_every_message_has_a_partner(
    stages: int, count: int, data: st.DataObject
) -> None:
    stage = data.draw(st.integers(0, stages - 1))
    made = list(actions(stage, stages, count))
    order = [(a.kind, a.index) for a in made if a.kind != TRANSFER]
    assert sorted(order) == sorted(product((FORWARD, BACKWARD), range(count)))
    assert all(order.index((FORWARD, i)) < order.index((BACKWARD, i)) for i in range(count))
    held = most = 0
    for kind, _ in order:
        held += 1 if kind == FORWARD else -1
        most = max(most, held)
    assert most == in_flight(stage, stages, count)
    if stage + 1 < stages:
        behind = list(actions(stage + 1, stages, count))
        for kind, a, b in ((FORWARD, made, behind), (BACKWARD, behind, made)):
            sent = [m.index for x in a for m in x.sends if m.kind == kind]
            received = [m.index for x in b for m in x.receives if m.kind == kind]
            assert sent == received == list(range(count))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=4), st.integers(1, 4))
def test_shared_tasks_have_one_order_whatever_the_counts(counts: list[int], stages: int) -> None:
    """Columns share as many of their first microbatches as they have in common."""
    lists = tuple(tuple(range(n)) for n in counts)
    assert finishes(lists, stages)
    common = min(counts)
    for stage in range(stages):
        orders = {tuple(x for x in computations(stage, stages, n) if x[1] < common) for n in counts}
        assert len(orders) == 1


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_every_small_table_that_is_accepted_finishes(stages: int) -> None:
    """All tables of at most 3 tasks on 3 ranks, with transfers that block."""
    subsets = [s for n in range(1, 4) for s in combinations(range(3), n)]
    rules, found = TaskRules(ranks=3, stages=stages), set()
    for n in range(4):
        for rings, index in product(product(subsets, repeat=n), product(range(3), repeat=n)):
            table = TaskTable.of(rings, index)
            try:
                table.check(rules)
            except PlanError:
                continue
            found.add(tuple(tuple(table.tasks(r).tolist()) for r in range(3)))
    assert len(found) > 50
    assert [lists for lists in found if not finishes(lists, stages)] == []


def test_lists_that_block_are_found() -> None:
    assert not finishes(((0, 1), (1, 0)), 1)
    assert finishes(((0, 2), (0, 1, 2)), 1)
    assert not finishes(((0, 2), (0, 1, 2)), 2), "task 2 has two indices"


def test_a_stage_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match="expected a stage of 0 to 1 and a count of at least 0"):
        list(computations(2, 2, 1))
