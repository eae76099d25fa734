"""The plan check includes the pinned host memory that offload needs, by rank and by node."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import overlord as ov
from overlord.errors import JobError, PlanError
from overlord.observe.tables import plan_view
from overlord.plan.host_pools import check_host_memory, host_pools
from overlord.plan.tasks import TaskRules, TaskTable
from overlord.planning.balance import hybrid_table, rings
from overlord.planning.balance.hybrid import HybridRules, schedule
from overlord.planning.cost import RingCosts
from overlord.planning.strategies import hdp

COSTS = RingCosts(linear=1.0, square=0.05, constant=2.0)
RULES = TaskRules(ranks=4, host_bytes=10.0, host_memory=1.0, node=2)
# rank 0: 100 tokens at 0.5, then 60 at 1; rank 1: 60 at 1; rank 2: nothing; rank 3: 80 at 0
TABLE = TaskTable.of([[0], [0, 1], [3]], [0, 1, 0], offload=[0.5, 1.0, 0.0])
HELD = np.array([100, 60, 60, 80])


def test_a_pool_is_ratio_times_tokens_times_bytes_of_the_microbatch_that_needs_most() -> None:
    pools = host_pools(TABLE, RULES, HELD)
    assert pools.bytes.tolist() == [600.0, 600.0, 0.0, 0.0]
    assert pools.index.tolist() == [1, 1, 0, 0]
    assert pools.ratio.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert pools.nodes(2).tolist() == [1200.0, 0.0]


def test_with_stages_as_many_microbatches_wait_for_their_backward() -> None:
    pools = host_pools(TABLE, replace(RULES, stages=2), HELD)
    assert pools.bytes.tolist() == [1100.0, 600.0, 0.0, 0.0]


def test_interleaved_stages_keep_more_microbatches() -> None:
    """Rank 0 of Megatron's schedule runs (2 (p - 1) + (v - 1) p + 1) / v forwards of microbatches
    before its first backward ends.
    """
    for p in range(2, 9):
        for v in range(2, 5):
            rules = TaskRules(ranks=1, stages=p, virtual=v)
            assert rules.in_flight() == -(-(2 * (p - 1) + (v - 1) * p + 1) // v)
    table = TaskTable.of([[0]] * 4, [0, 1, 2, 3], offload=[1.0] * 4)
    rules, held = TaskRules(ranks=1, stages=2, host_bytes=1.0), np.full(4, 100)
    assert host_pools(table, rules, held).bytes.tolist() == [200.0]
    assert host_pools(table, replace(rules, virtual=2), held).bytes.tolist() == [300.0]


def test_a_refusal_names_rank_microbatch_bytes_limit_and_remedy() -> None:
    with pytest.raises(
        PlanError,
        match=r"node 0: expected at most 1199 bytes of host memory for offload, got 1200; rank 0 "
        r"needs most, 600 bytes in microbatch 1 at ratio 1; give the task more ranks",
    ):
        check_host_memory(TABLE, replace(RULES, host_memory=1199.0), HELD)
    check_host_memory(TABLE, replace(RULES, host_memory=1200.0), HELD)
    check_host_memory(TABLE, replace(RULES, host_memory=0.0), HELD)  # no limit


@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=16),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from([0, 0, 1]),
    st.integers(1, 3),
    st.floats(1, 1e4),
)
def test_schedules_lower_the_ratio_and_raise_the_ranks_until_the_host_has_room(
    lengths: list[int],
    ranks: int,
    node: int,
    stages: int,
    multiple: int,
    virtual: int,
    memory: float,
) -> None:
    rules = HybridRules(
        ranks=ranks,
        capacity=60,
        node=node,
        stages=stages,
        virtual=virtual if stages > 1 else 1,
        multiple=multiple,
        offload_share=0.9,
        offload_base=0.8,
        offload_bytes=3.0,
    )
    tokens = np.minimum(np.array(lengths), 60 * ranks)
    limited = replace(rules, host_memory=memory)
    plan = schedule(tokens, COSTS, limited)
    task_rules = limited.task_rules()
    held = hybrid_table.memory_of(plan.tasks, plan.task, tokens, limited)
    plan.tasks.check(task_rules, task=plan.task, tokens=tokens, memory=held)
    d = plan.tasks.sizes()[plan.task]
    whole = tokens if not multiple else -(-tokens // (2 * d)) * 2 * d
    check_host_memory(plan.tasks, task_rules, plan.tasks.held(plan.task, whole))
    free, _ = rings.floors(tokens, rules)
    assert (rings.floors(tokens, limited)[0] >= free).all()


def planned(**rules: float) -> ov.LoadingPlan:
    columns = {"web": {"tokens": np.array([700, 300, 250, 120, 90, 1, 60])}}
    batch = ov.Batch(samples=7, context=256)
    drawn = replace(ov.Buffer.from_columns(columns, batch=batch), drawn=True, sync="step")
    return hdp(offload_share=0.9, offload_base=0.6, node=4, **rules)(drawn, ov.Mesh(dp=4))


def test_a_limit_changes_the_plan_and_the_check_refuses_the_plan_without_it() -> None:
    free = planned(offload_bytes=1000.0)
    assert free.tasks is not None
    told = free.summary()["modules"]["backbone"]["tasks"]["host_memory"]
    assert max(told["by_rank"]) > 50_000
    assert told["largest_node"] == pytest.approx(sum(told["by_rank"]))
    limited = planned(offload_bytes=1000.0, host_memory=200_000.0)
    assert limited.tasks is not None
    told = limited.summary()["modules"]["backbone"]["tasks"]["host_memory"]
    assert max(told["by_rank"]) <= 50_000, "an equal share of the node"
    assert told["limit"] == 200_000
    assert limited.tasks.table.sizes().max() > free.tasks.table.sizes().max()
    tight = replace(free.tasks, rules=replace(free.tasks.rules, host_memory=1000.0))
    with pytest.raises(PlanError, match=r"node 0: expected at most 1000 bytes of host memory"):
        replace(free, tasks=tight).validate()
    again = ov.LoadingPlan.from_bytes(limited.to_bytes())
    assert again.tasks is not None
    assert again.tasks.rules == limited.tasks.rules
    assert again.imbalance() == limited.imbalance()


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({}, "unknown and not checked: give offload_bytes and host_memory"),
        ({"offload_bytes": 1e6}, "GB on a node; not checked: give host_memory"),
        ({"offload_bytes": 1e6, "host_memory": 1e9}, "limit 1 GB a node"),
    ],
)
def test_plans_show_host_memory_or_why_it_is_not_checked(
    rules: dict[str, float], words: str
) -> None:
    rows = [{"tokens": [1] * 700}]
    source = ov.Source.from_dataset("web", rows, transforms=[ov.Tokens("tokens")])
    batch, place = ov.Batch(samples=7, context=256), ov.Mesh(dp=4)
    job = ov.Job(sources=[source], batch=batch, place=place, name="pools", strategy="hdp_balance")
    out = StringIO()
    Console(file=out, width=240).print(plan_view(job, planned(**rules), 240))
    assert words in out.getvalue()


def test_a_limit_without_the_bytes_of_a_token_is_refused() -> None:
    with pytest.raises(PlanError, match="expected offload_bytes with host_memory"):
        planned(host_memory=1e9)
    with pytest.raises(JobError, match="expected host_memory to be a number, got 'much'"):
        hdp(host_memory="much")  # type: ignore[arg-type]
