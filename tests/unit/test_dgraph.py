"""The primitives, one by one, on buffers made by hand; and the costs they are fed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from overlord.errors import JobError, PlanError
from overlord.mesh import Batch, ClientPlaceTree
from overlord.planning import cost, schedule
from overlord.planning.graph.dgraph import DGraph
from overlord.planning.strategies import llm_balance, packed
from overlord.sample import Buffer

TREE = ClientPlaceTree(dp=2, tp=2)


def candidates(batch: Batch | None = None, **lengths: list[int]) -> Buffer:
    columns = {
        name: {"tokens": tokens}
        for name, tokens in (lengths or {"web": [8] * 9, "code": [4] * 9}).items()
    }
    return Buffer.from_columns(columns, batch=batch or Batch(samples=8, context=32))


def drawn(**columns: dict[str, list]) -> Buffer:
    return replace(Buffer.from_columns(columns, batch=Batch(samples=4, context=32)), drawn=True)


def test_a_strategy_reads_as_one_chain() -> None:
    graph = (
        DGraph.from_buffer(candidates(), TREE, meta="tokens")
        .mix({"web": 3, "code": 1})
        .distribute("DP")
        .cost(cost.transformer(hidden=64, layers=2, heads=4))
        .balance("greedy")
        .broadcast_at("TP")
    )
    plan = graph.plan()
    assert np.bincount(plan.source).tolist() == [6, 2]
    assert plan.main.broadcast == ("TP",)
    assert plan.imbalance()["bucket"] == 1.0
    for word in (
        "mix(exact)",
        "DP: 2 buckets",
        "Transformer(hidden=64",
        "greedy",
        "two-level",
        "TP",
    ):
        assert word in repr(graph)
    assert graph.to_mermaid().startswith("flowchart LR")
    assert "bucket 1: 1.000" in graph.to_mermaid()


def test_mix_draws_from_the_front_by_the_rule_of_the_stream() -> None:
    graph = DGraph.from_buffer(candidates(), TREE).mix({"web": 0.75, "code": 0.25})
    # six of web stand at 1/12, 3/12, ..., two of code at 1/4 and 3/4; ties go to web, which comes
    # first
    assert "".join("wc"[s] for s in graph.buffer.source) == "wwcwwwcw"
    assert graph.buffer.row.tolist() == [0, 1, 0, 2, 3, 4, 1, 5]
    assert graph.buffer.drawn


def test_mix_takes_weights_in_order_or_a_schedule() -> None:
    buffer = candidates()
    by_name = DGraph.from_buffer(buffer, TREE).mix({"code": 1}).buffer.source.tolist()
    assert by_name == [1] * 8
    assert DGraph.from_buffer(buffer, TREE).mix([0, 1]).buffer.source.tolist() == by_name
    assert (
        DGraph.from_buffer(buffer, TREE)
        .mix(schedule.constant({"code": 2.0}))
        .buffer.source.tolist()
        == by_name
    )


def test_mix_fills_up_from_the_others_when_a_source_runs_out() -> None:
    graph = DGraph.from_buffer(candidates(web=[8, 8], code=[4] * 9), TREE).mix([1, 1])
    assert np.bincount(graph.buffer.source).tolist() == [2, 6]


def test_mix_of_a_batch_in_tokens_weighs_tokens() -> None:
    graph = DGraph.from_buffer(candidates(Batch(tokens=32, context=32)), TREE).mix([1, 1])
    assert np.bincount(graph.buffer.source).tolist() == [2, 4]


def test_a_random_draw_follows_its_seed() -> None:
    def draw(seed: int) -> list[int]:
        return (
            DGraph.from_buffer(candidates(), TREE)
            .mix([1, 1], draw="random", seed=seed)
            .buffer.source.tolist()
        )

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(8)}) > 1


def test_a_drawn_buffer_is_not_drawn_again() -> None:
    buffer = drawn(web={"tokens": [8, 4, 2]})
    assert DGraph.from_buffer(buffer, TREE).mix().sample.tolist() == [0, 1, 2]
    with pytest.raises(PlanError, match="drawn this step already"):
        DGraph.from_buffer(buffer, TREE).mix([1])
    with pytest.raises(PlanError, match="after mix"):
        DGraph.from_buffer(buffer, TREE).mix().mix()
    with pytest.raises(PlanError, match="has no draw yet"):
        DGraph.from_buffer(candidates(), TREE).mix()


def test_a_plan_without_mix_or_distribute_or_balance_is_refused() -> None:
    graph = DGraph.from_buffer(drawn(web={"tokens": [8]}), TREE)
    with pytest.raises(PlanError, match=r"expected a mixed graph.*call \.mix"):
        graph.distribute("DP").balance().plan()
    with pytest.raises(PlanError, match=r"call \.distribute\(axis\) first"):
        graph.mix().balance()
    with pytest.raises(PlanError, match=r"got one without \.balance\(\)"):
        graph.mix().distribute("DP").plan()
    with pytest.raises(PlanError, match=r"got one without \.distribute\(\)"):
        graph.mix().plan()


def test_each_primitive_leaves_the_graph_it_was_called_on_alone() -> None:
    graph = DGraph.from_buffer(drawn(web={"tokens": [8, 4]}), TREE).mix().distribute("DP")
    balanced = graph.cost(cost.tokens).balance()
    assert graph.costs is None
    assert graph.placement is None
    assert balanced.placement is not None
    with pytest.raises(PlanError, match="after balance"):
        balanced.cost(cost.quadratic)


def test_images_are_placed_over_the_world_and_samples_over_replicas() -> None:
    buffer = drawn(web={"tokens": [8, 8, 8, 8], "patches": [[100, 1], [], [50], [50, 1, 1]]})
    mixed = DGraph.from_buffer(buffer, TREE).mix()
    images = (
        mixed.select("patches")
        .distribute("WORLD")
        .cost(cost.LengthCost(linear=1.0, column="patches"))
        .balance("greedy")
    )
    plan = mixed.select("tokens").distribute("DP").balance("greedy").plan(encoder=images)
    encoder = plan.modules["encoder"]
    assert encoder.sample.tolist() == [0, 0, 2, 3, 3, 3]
    assert (encoder.n_buckets, encoder.n_microbatches, plan.main.n_buckets) == (4, 1, 2)
    assert sorted(np.bincount(encoder.bucket, weights=encoder.cost).tolist()) == [
        3.0,
        50.0,
        50.0,
        100.0,
    ]
    assert "6 items of 4 samples" in repr(images)


def test_a_module_of_other_samples_is_refused() -> None:
    one, other = (
        DGraph.from_buffer(drawn(web={"tokens": t}), TREE).mix().distribute("DP").balance()
        for t in ([8, 4], [8])
    )
    with pytest.raises(PlanError, match="expected a graph of the same samples"):
        one.plan(encoder=other)


@pytest.mark.parametrize("name", ["audio", "draft", "Encoder"])
def test_a_module_that_nobody_delivers_is_refused_by_name(name: str) -> None:
    graph = DGraph.from_buffer(drawn(web={"tokens": [8, 4]}), TREE).mix().distribute("DP").balance()
    with pytest.raises(
        PlanError,
        match=f"module '{name}': expected 'backbone' or 'encoder', since no rank would receive "
        "any other",
    ):
        graph.plan(**{name: graph})
    plan = graph.plan()
    with pytest.raises(PlanError, match=f"module '{name}'"):  # by hand
        replace(plan, modules={**plan.modules, name: plan.main}).validate()


def test_a_module_on_another_mesh_is_refused_though_its_buckets_are_as_many() -> None:
    buffer = drawn(web={"tokens": [8, 8], "patches": [[3], [4]]})
    here, there = ClientPlaceTree(dp=2, tp=2), ClientPlaceTree(dp=4)
    samples = DGraph.from_buffer(buffer, here).mix().select("tokens").distribute("DP").balance()
    images = DGraph.from_buffer(buffer, there).mix().select("patches").distribute("WORLD")
    problem = (
        "expected a graph on pp1xdp2xcp1xtp2, got one on pp1xdp4xcp1xtp1; make both graphs "
        "with the place"
    )
    with pytest.raises(PlanError, match=f"module 'encoder': {problem}"):
        samples.plan(encoder=images.balance())
    with pytest.raises(
        PlanError,
        match=r"follow\(\): the other graph: expected a graph on pp1xdp4xcp1xtp1, got one on pp1xdp2xcp1xtp2",
    ):
        images.follow(samples)
    other = (
        DGraph.from_buffer(buffer, ClientPlaceTree(dp=2, tp=2, order=("pp", "tp", "cp", "dp")))
        .mix()
        .select("patches")
    )
    with pytest.raises(PlanError, match="module 'encoder': expected a graph on"):
        samples.plan(encoder=other.distribute("WORLD").balance())


def test_select_narrows_candidates_and_nodes() -> None:
    picked = DGraph.from_buffer(candidates(), TREE).select("tokens", sources=["code"])
    assert set(picked.mix([0, 1]).buffer.source.tolist()) == {1}
    nodes = (
        DGraph.from_buffer(drawn(web={"tokens": [8]}, code={"tokens": [4, 2]}), TREE)
        .mix()
        .select(sources=["code"])
    )
    assert nodes.sample.tolist() == [1, 2]
    with pytest.raises(PlanError, match="exactly once"):
        nodes.distribute("DP").balance().plan()


def test_sources_once_left_out_do_not_come_back() -> None:
    graph = (
        DGraph.from_buffer(drawn(web={"tokens": [8]}, code={"tokens": [4, 2]}), TREE)
        .mix()
        .select(sources="web")
    )
    assert graph.select(sources=["code"]).select(sources=["code"]).sample.tolist() == []


def test_mix_comes_before_cost_and_balance_where_it_chooses_the_nodes() -> None:
    graph = DGraph.from_buffer(candidates(), TREE)
    with pytest.raises(
        PlanError, match=r"mix\(\) was called after cost\(\); call \.mix\(\) earlier"
    ):
        graph.cost(cost.tokens).mix([1, 1])
    with pytest.raises(PlanError, match=r"mix\(\) was called after balance\(\)"):
        graph.distribute("DP").balance().mix([1, 1])
    assert graph.cost("llama_12b").select("tokens").unit == ""


def test_what_does_not_fit_is_left_out_alike_whatever_the_graph_is_over() -> None:
    rows = {
        "web": {"tokens": [30], "patches": [[90, 90]]},
        "code": {"tokens": [30, 30], "patches": [[1], [1, 1]]},
    }
    buffer = replace(
        Buffer.from_columns(rows, batch=Batch(samples=3, context=32)), drawn=True, overflow="defer"
    )
    graph = DGraph.from_buffer(buffer, TREE)
    assert graph.mix().sample.tolist() == [0, 1]
    items, code = graph.select("patches").mix(), graph.select(sources="code").mix()
    assert (items.sample.tolist(), code.sample.tolist()) == ([0, 0, 1], [1])
    assert len(items.buffer) == len(code.buffer) == 2


def test_candidates_that_the_draw_wants_cannot_be_left_out_before_it() -> None:
    buffer = replace(candidates(), wanted=((4, 4),))
    with pytest.raises(
        PlanError, match=r"expected all candidates of the step, .*; call \.mix\(\) before"
    ):
        DGraph.from_buffer(buffer, TREE).select(sources="web").mix()


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    graph = DGraph.from_buffer(drawn(web={"tokens": [8]}), TREE).mix()
    with pytest.raises(PlanError, match="expected metadata of tokens, got 'pixels'"):
        graph.select("pixels")
    with pytest.raises(
        PlanError, match="expected a source of the buffer, got 'book'; select one of web"
    ):
        graph.select(sources=["book"])
    with pytest.raises(PlanError, match="expected an axis of DP, CP, WORLD"):
        graph.distribute("EP")
    with pytest.raises(PlanError, match="known: greedy"):
        graph.distribute("DP").balance("best")
    with pytest.raises(PlanError, match="expected broadcast axes of TP, CP, PP, DP"):
        graph.broadcast_at("EP")
    with pytest.raises(PlanError, match="needs metadata 'patches'; known: tokens"):
        graph.cost(cost.LengthCost(linear=1.0, column="patches"))
    with pytest.raises(JobError, match="expected a source of the job, got 'book'"):
        DGraph.from_buffer(candidates(), TREE).mix({"book": 1})
    with pytest.raises(PlanError, match="known: exact, random"):
        DGraph.from_buffer(candidates(), TREE).mix([1, 1], draw="fair")


def test_a_cost_function_is_checked() -> None:
    graph = DGraph.from_buffer(drawn(web={"tokens": [8, 4]}), TREE).mix()
    with pytest.raises(PlanError, match="expected 2 numbers"):
        graph.cost(lambda columns: np.ones(3))
    with pytest.raises(PlanError, match="negative, infinite"):
        graph.cost(lambda columns: -columns["tokens"])
    with pytest.raises(PlanError, match=r"memory function .* negative"):
        graph.cost(cost.tokens, memory=lambda columns: -columns["tokens"])
    with pytest.raises(PlanError, match=r"unknown cost 'llama_13b'; did you mean 'llama_12b'\?"):
        graph.cost("llama_13b")


def test_a_cost_may_be_a_name_and_tells_its_unit() -> None:
    graph = (
        DGraph.from_buffer(drawn(web={"tokens": [8, 4]}), TREE)
        .mix()
        .distribute("DP")
        .cost("llama_12b")
    )
    assert np.array_equal(graph.costs, cost.llama_12b({"tokens": [8, 4]}))
    assert graph.unit == "FLOPs"
    assert "cost('llama_12b')" in repr(graph)


def test_a_joint_cost_sums_over_the_images_of_each_sample() -> None:
    buffer = drawn(web={"tokens": [8, 8, 8], "image_patches": [[100, 1], [], [50]]})
    both = (
        DGraph.from_buffer(buffer, TREE)
        .mix()
        .cost(cost.tokens + cost.LengthCost(square=1.0, column="image_patches"))
    )
    assert both.costs.tolist() == [8 + 10_001, 8, 8 + 2500]
    narrowed = DGraph.from_buffer(buffer, TREE, meta="tokens").mix()
    with pytest.raises(PlanError, match="needs metadata 'image_patches'; known: tokens"):
        narrowed.cost(cost.vit_1b)


def test_memory_is_bounded_beside_the_tokens_and_checked_by_the_plan() -> None:
    graph = (
        DGraph.from_buffer(drawn(web={"tokens": [8] * 8, "bytes": [3, 3, 3, 3, 1, 1, 1, 1]}), TREE)
        .mix()
        .distribute("DP")
    )
    held = graph.cost(cost.tokens, memory=lambda columns: columns["bytes"])
    plan = held.balance(memory_capacity=4).plan()
    a = plan.main
    assert (a.memory.tolist(), a.memory_capacity, a.n_microbatches) == ([3.0] * 4 + [1.0] * 4, 4, 2)
    assert np.bincount(a.bins(), weights=a.memory).max() <= 4
    with pytest.raises(
        PlanError,
        match=r"sample web/e0/f0/r0: expected at most 2.5 of memory, .* got 3; raise memory_capacity",
    ):
        held.balance(memory_capacity=2.5)
    with pytest.raises(PlanError, match=r"memory_capacity=.* was not given"):
        held.balance()
    with pytest.raises(PlanError, match=r"cost.memory=. was not given"):
        graph.cost(cost.tokens).balance(memory_capacity=4)
    with pytest.raises(PlanError, match="expected a number above 0"):
        held.balance(memory_capacity=0)
    assert held.select("tokens").memory is None


def test_with_keep_order_sub_draws_stay_microbatches() -> None:
    buffer = replace(
        drawn(web={"tokens": [8, 8, 16, 30, 30, 30, 4]}),
        substep=np.array([0, 0, 0, 1, 1, 1, 2], np.int32),
    )
    plan = DGraph.from_buffer(buffer, TREE).mix().distribute("DP").balance(keep_order=True).plan()
    assert [
        sorted(set(plan.substep[plan.main.microbatch == k].tolist()))
        for k in range(plan.n_microbatches)
    ] == [[0], [1], [1], [2]]


def test_a_padded_batch_gets_no_microbatch_that_it_does_not_need() -> None:
    rows = {"web": {"tokens": [16, 20, 20, 16, 32, 32, 32], "dear": [8, 1, 2, 8, 8, 8, 8]}}
    for layout, microbatches in (("packed", 3), ("padded", 2)):
        buffer = replace(
            Buffer.from_columns(rows, batch=Batch(samples=7, context=32, layout=layout)), drawn=True
        )
        graph = (
            DGraph.from_buffer(buffer, ClientPlaceTree(dp=3))
            .mix()
            .distribute("DP")
            .cost(lambda columns: columns["dear"])
        )
        assert graph.balance().plan().n_microbatches == microbatches


def test_a_sample_that_no_microbatch_can_hold_is_named() -> None:
    buffer = drawn(web={"tokens": [8, 40]})
    for strategy in (llm_balance, packed):
        with pytest.raises(
            PlanError,
            match="sample web/e0/f0/r1: expected at most the 32 tokens of a microbatch, got 40",
        ):
            strategy(buffer, TREE)


def test_documents_are_padded_for_context_parallelism() -> None:
    graph = DGraph.from_buffer(drawn(web={"tokens": [1, 8, 9]}), ClientPlaceTree(dp=1, cp=4))
    assert graph.sizes().tolist() == [8, 8, 16]
    for fields, multiple in (
        ({"cp_split": "contiguous"}, 4),
        ({"cp_split": "none"}, 1),
        ({"cp_split": "none", "sequence_parallel": True}, 3),
        ({"sequence_parallel": True, "pad_multiple": 5}, 5 * 8 * 3),
    ):
        batch = replace(graph.buffer.batch, context=240, **fields)
        padded = DGraph.from_buffer(
            replace(graph.buffer, batch=batch), ClientPlaceTree(dp=1, cp=4, tp=3)
        )
        assert padded.sizes().tolist() == [-(-n // multiple) * multiple for n in (1, 8, 9)]


def test_a_capacity_of_ones_own_is_kept() -> None:
    graph = (
        DGraph.from_buffer(drawn(web={"tokens": [8] * 4}), TREE)
        .mix()
        .distribute("DP")
        .balance(capacity=8)
    )
    assert graph.plan().n_microbatches == 2


def test_an_empty_step_and_idle_buckets_make_a_plan() -> None:
    assert len(llm_balance(drawn(web={"tokens": []}), TREE)) == 0
    plan = llm_balance(drawn(web={"tokens": [5]}), ClientPlaceTree(dp=4))
    assert np.bincount(plan.main.bucket, minlength=4).tolist() == [1, 0, 0, 0]


def test_constant_schedule() -> None:
    fixed = schedule.constant({"web": 3, "code": 1})
    assert fixed(0, {}) == fixed(99, {"loss": 1.0}) == {"web": 3.0, "code": 1.0}
    assert schedule.by_source({"code": 1}, ["web", "code"]) == [0.0, 1.0]
    with pytest.raises(JobError, match="expected a weight above 0"):
        schedule.constant({"web": 0})
    with pytest.raises(JobError, match="expected 2 weights"):
        schedule.by_source([1], ["web", "code"])
