"""A hybrid plan is shown as ranks see it: pieces, rings, and the modelled load of every rank."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import overlord as ov
from overlord.errors import JobError, PlanError
from overlord.observe.tables import plan_view
from overlord.plan.tasks import TaskTable
from overlord.planning.cost.ring import RingCosts
from overlord.planning.strategies import hdp, hdp_balance, llm_balance

LENGTHS = [700, 300, 250, 120, 90, 1, 60]
BATCH = ov.Batch(samples=7, context=256)
PLACE = ov.Mesh(dp=4)


def buffer(**changes: Any) -> ov.Buffer:
    columns = {"web": {"tokens": np.array(LENGTHS)}}
    return replace(ov.Buffer.from_columns(columns, batch=BATCH), drawn=True, **changes)


def graph(**changes: Any) -> ov.DGraph:
    return ov.DGraph.from_buffer(buffer(**changes), PLACE).mix().distribute("CP")


def job(**changes: Any) -> ov.Job:
    rows = [{"tokens": [k] * n} for k, n in enumerate(LENGTHS)]
    source = ov.Source.from_dataset("web", rows, transforms=[ov.Tokens("tokens")], shuffle=False)
    settings: dict[str, Any] = {"batch": BATCH, "place": PLACE, "until": 1, "name": "hybrid"}
    return ov.Job(sources=[source], **{"strategy": "hdp_balance", **settings, **changes})


def test_loads_are_those_of_the_pieces_and_add_up_to_the_step() -> None:
    plan = hdp_balance(buffer(), PLACE)
    held = plan.pieces()
    assert np.bincount(held.bucket, weights=held.size).sum() == sum(LENGTHS)
    assert plan.loads().sum() == pytest.approx(plan.main.cost.sum())
    found = plan.imbalance()
    assert found["bound"] == found["slot_bound"] <= found["bucket"]
    assert found["bucket"] <= found["waits"] < 2, "rings wait for their last rank"
    assert (
        1.0
        <= found["bucket"]
        < llm_balance(replace(buffer(), batch=replace(BATCH, context=1024)), PLACE).imbalance()[
            "bucket"
        ]
    )


def test_the_summary_counts_rings_and_samples_once() -> None:
    plan = hdp_balance(buffer(), PLACE)
    told = json.loads(plan.to_json())
    backbone = told["modules"]["backbone"]
    assert backbone["items"] == len(LENGTHS)
    assert sum(backbone["tasks"]["rings"].values()) == backbone["tasks"]["tasks"]
    assert len(backbone["tasks"]["by_rank"]) == 4
    assert backbone["peak"]["tokens_per_rank"] <= BATCH.context
    assert sum(row["size"] for row in told["placed"]["backbone"]) == sum(LENGTHS)


def test_tables_and_pictures_show_pieces(tmp_path: Path) -> None:
    plan = hdp_balance(buffer(), PLACE)
    assert plan.to_table().count("\n") == 5
    out = StringIO()
    Console(file=out, width=140).print(plan_view(job(), plan, 140))
    assert "rings of up to" in out.getvalue()
    split = graph().cost("tokens").split()
    assert "bucket 3" in split.to_mermaid()
    split.to_html(tmp_path / "step.html")
    assert "split(256, any)" in (tmp_path / "step.html").read_text()


def test_a_sample_is_explained_with_the_ring_that_shares_it() -> None:
    with ov.launch(job()) as session:
        step = next(session.client(0))
        longest = max((p for mb in step for p in mb.samples), key=lambda p: p.length)
        told = session.explain(longest.sample)
        assert "in pieces on the ring of buckets" in told.placed[0].why
        assert len(told.placed[0].ranks) > 2
        shown = session.explain(step.step)
        assert shown.modules[0].items == len(LENGTHS)
        assert shown.modules[0].peak_tokens <= BATCH.context
        assert "split(256, any)" in session.graph(step.step).to_mermaid()


def test_the_order_of_a_ring_is_part_of_the_digest() -> None:
    plan = hdp_balance(buffer(), PLACE)
    assert plan.tasks is not None
    table = plan.tasks.table
    t = int(table.sizes().argmax())
    ring = np.array(table.task_rank)
    a, b = int(table.task_ptr[t]) + 1, int(table.task_ptr[t + 1])
    ring[a:b] = ring[a:b][::-1]
    turned = replace(plan, tasks=replace(plan.tasks, table=replace(table, task_rank=ring)))
    assert turned.validate().digest() != plan.digest()


def test_a_plan_that_could_block_or_lose_tokens_is_refused() -> None:
    plan = hdp_balance(buffer(), PLACE)
    assert plan.tasks is not None
    tasks, table = plan.tasks, plan.tasks.table
    wrong: dict[str, Any] = {
        "larger index": replace(tasks, table=replace(table, order=table.order[::-1].copy())),
        "expected rules for the 4 buckets": replace(tasks, rules=replace(tasks.rules, ranks=5)),
        "expected a capacity of 128": replace(tasks, rules=replace(tasks.rules, capacity=128)),
        "expected a task of 0 to": replace(tasks, task=tasks.task + np.int32(len(table))),
        "expected bucket": replace(
            tasks, table=replace(table, task_rank=((table.task_rank + 1) % 4).astype(np.int32))
        ),
    }
    for problem, other in wrong.items():
        with pytest.raises(PlanError, match=problem):
            replace(plan, tasks=other).validate()
    two = TaskTable.of([[0, 1, 2], [0, 1, 2]], index=[0, 0])
    with pytest.raises(PlanError):
        replace(plan, tasks=replace(tasks, table=two)).validate()


def test_damaged_tasks_are_a_plan_error() -> None:
    data = hdp_balance(buffer(), PLACE).to_bytes()
    for old, new in ((b'"ranks": 4', b'"ranks": 9'), (b'"stages": 1', b'"stages": 0')):
        assert old in data
        with pytest.raises(PlanError):
            ov.LoadingPlan.from_bytes(data.replace(old, new))


def test_split_says_what_it_needs() -> None:
    with pytest.raises(PlanError, match=r"split\(\): expected a graph that is distributed"):
        ov.DGraph.from_buffer(buffer(), PLACE).mix().split()
    with pytest.raises(PlanError, match=r"expected every rank of .* in a bucket of its own"):
        ov.DGraph.from_buffer(buffer(), ov.Mesh(dp=2, cp=2)).mix().distribute("DP").split()
    with pytest.raises(PlanError, match="expected at most 512 tokens"):
        ov.DGraph.from_buffer(buffer(), ov.Mesh(dp=2)).mix().distribute("CP").split()
    with pytest.raises(PlanError, match=r"split\(\) was called after split\(\)"):
        graph().split(capacity=1024).split()
    with pytest.raises(PlanError, match="expected a cost of the metadata 'tokens' alone"):
        replace(graph(), costs_by=ov.cost.named("vit_1b")).split()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"gropus": 2}, r"expected a known argument, got 'gropus'"),
        ({"stages": 2}, r"expected a known argument, got 'stages'"),
        ({"groups": "powers"}, r"expected groups \"any\" or \"power_of_two\", got 'powers'"),
        ({"capacity": "256"}, r"expected capacity to be a whole number of at least 1, got '256'"),
        ({"capacity": 0}, r"expected capacity to be a whole number of at least 1, got 0"),
        ({"node": "8"}, r"expected node to be a whole number of at least 1, got '8'"),
        ({"count_multiple": 2.5}, r"expected count_multiple to be a whole number .* got 2.5"),
        ({"padded": "no"}, r"expected padded to be True, False or None, got 'no'"),
        ({"offload_share": "most"}, r"expected offload_share to be a number, got 'most'"),
    ],
)
def test_wrong_arguments_are_refused_by_the_strategy_and_by_the_primitive(
    arguments: dict[str, Any], problem: str
) -> None:
    with pytest.raises(JobError, match=rf"strategy\.hdp: {problem}"):
        hdp(**arguments)
    with pytest.raises(PlanError, match=rf"split\(\): {problem}"):
        graph().split(**arguments)


def test_none_stands_for_the_default_of_an_argument() -> None:
    names = ("capacity", "padded", "equal_counts", "count_multiple", "node", "virtual")
    none: dict[str, Any] = dict.fromkeys(names)
    given = hdp(**none)
    assert given.fingerprint == hdp().fingerprint
    split = graph().split(**none).plan()
    assert split.digest() == graph().split().plan().digest()
    counts = given(buffer(sync="microbatch"), PLACE).tasks.table.counts(4)  # type: ignore[union-attr]
    assert len({*counts.tolist()}) == 1


def test_arguments_that_contradict_the_job_are_refused() -> None:
    """Else ranks would wait for ever, or would get pieces that their kernels cannot divide."""
    with pytest.raises(PlanError, match=r'expected equal counts with Job.sync="microbatch"'):
        hdp(equal_counts=False)(buffer(sync="microbatch"), PLACE)
    hdp(equal_counts=False)(buffer(sync="step"), PLACE)
    padded = replace(buffer(), batch=replace(BATCH, pad_multiple=4))
    with pytest.raises(PlanError, match="a piece is a multiple of 4 tokens, got padded=False"):
        hdp(padded=False)(padded, PLACE)
    whole = replace(buffer(), batch=replace(BATCH, cp_split="none"))
    with pytest.raises(PlanError, match=r'expected Batch\.cp_split "zigzag", got'):
        hdp()(whole, PLACE)


def test_a_placement_by_rings_is_named_after_its_primitive() -> None:
    with pytest.raises(PlanError, match=r"balance\(\) was called after split\(\)"):
        graph().split().balance("greedy")


def test_costs_of_lengths_become_costs_of_rings() -> None:
    """Only the cost of a token and of a pair is known of others: their rings are free."""
    own = RingCosts(linear=2.0, square=0.5, token_bytes=8.0, inside=1e3, across=10.0)
    near = hdp(own, node=8)(buffer(), PLACE)
    free = graph().cost(ov.cost.LengthCost(2.0, 0.5)).split().plan()
    assert near.tasks is not None
    assert free.tasks is not None
    assert free.main.cost[0] == pytest.approx(2.0 * 700 + 0.5 * 700**2)
    assert near.main.cost[0] >= free.main.cost[0] - 1e-6


def test_the_number_of_microbatches_follows_sync_and_the_demands_of_the_trainer() -> None:
    for sync, rules, expected in (
        ("microbatch", {}, 1),
        ("step", {"equal_counts": True}, 1),
        ("step", {"count_multiple": 3}, None),
    ):
        plan = hdp(**rules)(buffer(sync=sync), PLACE)  # type: ignore[arg-type]
        assert plan.tasks is not None
        counts = plan.tasks.table.counts(4)
        assert len({*counts.tolist()}) == (expected or len({*counts.tolist()}))
        assert not (counts % rules.get("count_multiple", 1)).any()


def test_offload_gives_a_sample_fewer_ranks_and_its_ratio_to_each() -> None:
    """The capacity is then one of memory: tokens whose activations stay on the rank."""
    strategy = hdp(offload_share=0.9, offload_base=0.5)
    plan = strategy(buffer(sync="step"), PLACE)
    assert plan.tasks is not None
    ratio = plan.tasks.table.offload
    assert ratio.max() > 0
    held = plan.pieces()
    kept = held.size * (1 - 0.9 * ratio[plan.tasks.task[held.sample]])
    bins = held.bins()
    assert np.bincount(bins, weights=kept).max() <= BATCH.context * (1 + 1e-9)
    assert ov.LoadingPlan.from_bytes(plan.to_bytes()).digest() == plan.digest()
    with pytest.raises(PlanError, match="of memory on a rank"):
        replace(plan, tasks=replace(plan.tasks, offload_share=0.0)).validate()
    with ov.launch(job(strategy=strategy, sync="step")) as session:
        told = [float(mb["offload"]) for mb in next(session.client(0))]
        assert max(told) == pytest.approx(float(ratio.max()))
