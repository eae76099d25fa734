"""Graphs of items and the routes of their outputs, on examples small enough to follow by hand."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import JobError, PlanError
from overlord.planning.strategies import DENSE_12B, VIT_1B, encoder_balance, vlm, vlm_hybrid

ROOT = Path(__file__).resolve().parents[2]


def drawn(microbatches: int = 1, context: int = 64, **sources: Any) -> ov.Buffer:
    made = ov.Buffer.from_columns(
        sources, batch=ov.Batch(samples=8, microbatches=microbatches, context=context), step=7
    )
    return replace(made, drawn=True)


def seen(tokens: list[int], **columns: Any) -> ov.Buffer:
    return drawn(seen={"tokens": tokens, **columns})


PHOTOS = drawn(
    seen={"tokens": [20, 9, 30], "image_patches": [[4, 6], [], [8]]}, text={"tokens": [5]}
)
TWO = ov.ClientPlaceTree(dp=2, tp=2)


def by_hand(
    buffer: ov.Buffer, place: ov.ClientPlaceTree, ranks: list[int], slots: list[int] | None = None
) -> ov.LoadingPlan:
    """Samples dealt out in turn; image i goes to ``ranks[i]``, in the encoder's microbatch
    ``slots[i]``.
    """
    graph = ov.DGraph.from_buffer(buffer, place).mix()
    images = graph.select("image_patches").distribute("WORLD").balance("none")
    samples = graph.select("tokens").distribute("DP").balance("none")
    plan, slots = samples.plan(encoder=images), slots or [0] * len(ranks)
    bins = list(zip(ranks, slots, strict=True))
    placed = replace(
        plan.modules["encoder"],
        bucket=np.array(ranks, np.int32),
        microbatch=np.array(slots, np.int32),
        n_microbatches=max(slots) + 1,
        slot=np.array([bins[:i].count(b) for i, b in enumerate(bins)], np.int32),
    )
    return replace(plan, modules={"backbone": plan.main, "encoder": placed}).validate()


# Routes


def test_a_route_says_what_a_rank_encodes_sends_and_gets_and_where_it_goes() -> None:
    # Samples 0 and 2 (20 and 30 tokens) go to replica 0, whose first rank is 0; images 0 and 1 are
    # of sample 0, image 2 of sample 2.
    routes = by_hand(PHOTOS, TWO, ranks=[3, 1, 1]).routes("encoder")
    one, owner, idle = (routes.for_rank(r) for r in (1, 0, 2))
    assert (one.items.tolist(), one.send_lens.tolist(), one.send_splits.tolist()) == (
        [1, 2],
        [6, 8],
        [14, 0, 0, 0],
    )
    assert owner.recv_splits.tolist() == [0, 14, 0, 4]
    assert (owner.recv_items.tolist(), owner.recv_perm.tolist(), owner.out_lens.tolist()) == (
        [0, 1, 2],
        [2, 0, 1],
        [4, 6, 8],
    )
    assert owner.recv_rows.tolist() == [14, 15, 16, 17, *range(14)], (
        "image 0 arrives last: its encoder has the highest rank"
    )
    assert owner.image_token_index.tolist() == [*range(10), *range(20, 28)]
    assert (owner.docs.tolist(), owner.offsets.tolist()) == ([0, 0, 1], [0, 4, 0])
    assert [
        len(idle.items),
        len(idle.recv_rows),
        int(idle.send_splits.sum()),
        int(idle.recv_splits.sum()),
    ] == [0, 0, 0, 0]
    assert routes.number.tolist() == [0, 1, 0]
    assert (
        repr(routes)
        == "Routes(encoder, 3 items, 18 rows, 18 of them between ranks; 4 ranks, 1 exchange a step)"
    )


def test_an_encoder_may_run_in_microbatches_of_its_own() -> None:
    routes = by_hand(PHOTOS, TWO, ranks=[3, 1, 1], slots=[1, 0, 1]).routes()
    assert (routes.n_slots, routes.per) == (2, "iteration")
    assert [routes.for_rank(0, s).recv_items.tolist() for s in range(2)] == [[1], [0, 2]]
    assert [routes.for_rank(1, s).items.tolist() for s in range(2)] == [[1], [2]]


def test_rows_of_one_microbatch_are_cut_out_of_an_exchange_for_the_whole_step() -> None:
    buffer = seen([40, 40, 30], image_patches=[[4], [6], [8]])
    plan = by_hand(buffer, ov.ClientPlaceTree(), ranks=[0, 0, 0])
    assert plan.main.microbatch.tolist() == [0, 1, 2]
    route = plan.routes().for_rank(0)
    assert [rows.tolist() for rows, _ in map(route.microbatch, range(3))] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7, 8, 9],
        [*range(10, 18)],
    ]
    assert [index.tolist() for _, index in map(route.microbatch, range(3))] == [
        [*range(4)],
        [*range(6)],
        [*range(8)],
    ]


def test_placeholders_count_padding_of_the_documents_before_them() -> None:
    buffer = seen([5, 7], image_patches=[[], [2]])
    padded = replace(buffer, batch=ov.Batch(samples=2, context=64, pad_multiple=8))
    assert by_hand(padded, ov.ClientPlaceTree(), ranks=[0]).routes().for_rank(
        0
    ).image_token_index.tolist() == [8, 9]


def test_the_owner_is_the_first_rank_of_the_replica_whatever_the_order_of_ranks() -> None:
    place = ov.ClientPlaceTree(pp=2, dp=2, cp=2, tp=2, order=("tp", "pp", "cp", "dp"))
    routes = encoder_balance(PHOTOS, place).routes()
    assert routes.parts.owner.tolist() == [place.rank(dp=0)] * 3
    assert encoder_balance(PHOTOS, place).main.bucket.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda plan: plan.routes("audio"), "module 'audio': expected one of backbone, encoder"),
        (lambda plan: plan.routes("backbone"), "got 'backbone', which has samples"),
        (lambda plan: replace(plan, place=None).routes(), "has no place"),
        (lambda plan: plan.routes().for_rank(4), "expected a rank from 0 to 3, got 4"),
        (lambda plan: plan.routes().for_rank(0, 1), "expected a slot from 0 to 0, got 1"),
    ],
)
def test_what_cannot_be_routed_is_said(ask: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        ask(by_hand(PHOTOS, TWO, ranks=[3, 1, 1]))


PLAN = by_hand(PHOTOS, TWO, ranks=[3, 1, 1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"out": np.array([4, 17, 8])},
            "expected item 1 to end inside the 20 tokens of sample seen/e0/f0/r0, got an end at "
            "token 21",
        ),
        ({"offset": np.array([0, 3, 0])}, "two items of sample seen/e0/f0/r0 share a token"),
        ({"sample": np.array([0, 0, 0])}, "two items of sample seen/e0/f0/r0 share a token"),
        ({"out": None}, "expected out and offset together, got one of them"),
        ({"out": np.array([4, 6])}, "columns of equal length, got"),
        (
            {"offset": np.array([0, -4, 0])},
            "expected offset from 0 to 9007199254740991, got -4 to 0",
        ),
    ],
)
def test_a_plan_with_placeholders_that_cannot_be_is_refused(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        replace(
            PLAN,
            modules={"backbone": PLAN.main, "encoder": replace(PLAN.modules["encoder"], **changes)},
        ).validate()


def test_routes_whose_orders_were_changed_are_refused() -> None:
    routes = by_hand(PHOTOS, ov.ClientPlaceTree(dp=2), ranks=[1, 1, 0]).routes()
    for changes, said in (
        ({"sent": routes.sent[::-1].copy()}, "sent by another rank"),
        ({"received": np.array([2, 1, 0])}, "expected the same order of rows"),
        ({"wanted": np.zeros(3, np.int64)}, "expected every item to be wanted exactly once"),
    ):
        with pytest.raises(PlanError, match=said):
            replace(routes, **changes).validate()


# What an item becomes, and where


def ends(buffer: ov.Buffer, merge: int = 1) -> tuple[list[int], list[int], Any]:
    graph = ov.DGraph.from_buffer(buffer, TWO).mix()
    images = graph.select("image_patches", merge=merge).distribute("WORLD").balance("greedy")
    plan = graph.select("tokens").distribute("DP").balance("greedy").plan(encoder=images)
    a = plan.modules["encoder"]
    assert a.out is not None
    assert a.offset is not None
    return a.out.tolist(), a.offset.tolist(), plan.extra.get("cut")


def test_without_metadata_images_stand_at_the_start_one_after_another() -> None:
    assert ends(seen([20, 30], image_patches=[[8, 4], [12]])) == ([8, 4, 12], [0, 8, 0], None)
    assert ends(seen([20, 30], image_patches=[[8, 4], [12]]), merge=2) == (
        [2, 1, 3],
        [0, 2, 0],
        None,
    )


def test_metadata_says_how_many_tokens_an_image_becomes_and_where_they_stand() -> None:
    buffer = seen(
        [20, 30],
        image_patches=[[8, 4], [12]],
        image_tokens=[[5, 6], [7]],
        image_offset=[[3, 10], [23]],
    )
    assert ends(buffer) == ([5, 6, 7], [3, 10, 23], None)


def test_a_source_that_does_not_say_is_assumed_while_another_is_believed() -> None:
    buffer = drawn(
        a={"tokens": [20], "image_patches": [[4, 4]], "image_offset": [[9, 15]]},
        b={"tokens": [20], "image_patches": [[4, 4]]},
    )
    assert ends(buffer) == ([4, 4, 4, 4], [9, 15, 0, 4], None)


def test_what_does_not_fit_its_document_or_the_next_image_is_not_sent_and_is_counted() -> None:
    assert ends(seen([10, 3], image_patches=[[4, 8], [8]])) == (
        [4, 6, 3],
        [0, 4, 0],
        {"encoder": 2},
    )
    assert ends(seen([10], image_patches=[[4, 4, 4]], image_offset=[[6, 2, 50]])) == (
        [4, 4, 0],
        [6, 2, 10],
        {"encoder": 1},
    )
    assert ends(seen([10], image_patches=[[4, 4]], image_offset=[[2, 4]])) == (
        [2, 4],
        [2, 4],
        {"encoder": 1},
    )
    assert ends(seen([10], image_patches=[[4, 0]], image_offset=[[2, 4]])) == (
        [4, 0],
        [2, 4],
        None,
    ), "no rows are in nobody's way"


def test_metadata_that_does_not_match_the_items_is_refused_by_the_name_of_the_sample() -> None:
    with pytest.raises(
        PlanError,
        match=r"'image_tokens' of sample seen/e0/f0/r1: expected a list of 1 numbers .*, got 2;",
    ):
        ends(seen([9, 9], image_patches=[[1], [2]], image_tokens=[[1], [1, 1]]))
    with pytest.raises(
        PlanError, match=r"'image_offset' of .*r0: expected a list of 1 numbers .*, got no list;"
    ):
        ends(seen([9], image_patches=[[1]], image_offset=[1]))


# Graphs from one buffer


def test_several_graphs_come_from_one_mixed_graph() -> None:
    graph = ov.DGraph.from_buffer(PHOTOS, TWO).mix()
    images, text = graph.select("image_patches"), graph.select("tokens", sources=["text"])
    assert (images.sample.tolist(), images.columns["image_patches"].tolist(), images.items) == (
        [0, 0, 2],
        [4, 6, 8],
        True,
    )
    assert (text.sample.tolist(), text.columns["tokens"].tolist(), text.items) == ([3], [5], False)
    assert images.select("tokens").sample.tolist() == [0, 1, 2, 3], (
        "samples without images come back"
    )
    assert text.select("image_patches").sample.tolist() == [], "a source left out stays out"
    assert graph.select("image_patches", sources=["seen"]).select(
        "tokens", sources=["seen", "text"]
    ).sample.tolist() == [0, 1, 2]
    both = graph.select("tokens", "image_patches")
    assert {n: c.tolist() for n, c in both.columns.items()} == {
        "image_patches": [4, 6, 8],
        "tokens": [20, 20, 30],
    }
    assert both.sizes().tolist() == [4, 6, 8]
    samples = graph.select("tokens").distribute("DP").balance("greedy")
    plan = samples.plan(encoder=images.distribute("WORLD").balance("greedy"))
    assert {name: len(a.sample) for name, a in plan.modules.items()} == {
        "backbone": 4,
        "encoder": 3,
    }


def test_select_refuses_what_is_not_there() -> None:
    graph = ov.DGraph.from_buffer(PHOTOS, TWO).mix()
    for call, said in (
        (lambda: graph.select("audio"), "expected metadata of image_patches, tokens, got 'audio'"),
        (
            lambda: graph.select("tokens", sources=["sea"]),
            "expected a source of the buffer, got 'sea'; select one of seen, text",
        ),
        (
            lambda: graph.select("tokens", sources=["text"]).select(sources=["sea"]),
            "expected a source of the buffer, got 'sea'",
        ),
        (
            lambda: graph.select("image_patches", merge=0),
            "expected merge as a whole number of at least 1, got 0",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            call()


def test_follow_refuses_what_it_cannot_follow() -> None:
    graph = ov.DGraph.from_buffer(PHOTOS, TWO).mix()
    images, samples = (
        graph.select("image_patches").distribute("WORLD"),
        graph.select("tokens").distribute("DP").balance("greedy"),
    )
    text = graph.select("tokens", sources=["text"]).distribute("DP").balance("greedy")
    for call, said in (
        (
            lambda: graph.select("image_patches").follow(samples),
            "distributed items and balanced samples",
        ),
        (lambda: images.follow(graph.select("tokens")), "distributed items and balanced samples"),
        (lambda: images.follow(text), "a sample of these items was not placed"),
        (
            lambda: images.follow(samples, per="epoch"),
            "expected per as one of iteration, microbatch, got 'epoch'",
        ),
        (lambda: images.follow(samples, "best"), "expected a balance method, got 'best'"),
        (
            lambda: graph.select("image_patches").distribute("DP").follow(samples, stay=True),
            'distributed over "WORLD"',
        ),
        (
            lambda: images.follow(samples).follow(samples),
            r"follow\(\) was called after balance\(\)",
        ),
    ):
        with pytest.raises(PlanError, match=said):
            call()


# Strategies


def skewed(n: int = 160) -> ov.Buffer:
    chance = np.random.default_rng(4)
    patches = [
        np.clip(chance.lognormal(4.0, 1.2, k), 4, 900).astype(int).tolist()
        for k in chance.integers(0, 6, n)
    ]
    tokens = [
        min(2048, sum(p) // 4 + int(t))
        for p, t in zip(patches, chance.integers(8, 300, n), strict=True)
    ]
    return drawn(
        microbatches=2,
        context=4096,
        seen={"tokens": tokens, "image_patches": patches},
        text={"tokens": [150, 1200] * 10},
    )


def test_the_encoder_is_balanced_over_all_ranks_when_replicas_are_groups_and_with_the_backbone_otherwise() -> (
    None
):
    buffer, groups, singles = skewed(), ov.ClientPlaceTree(dp=4, tp=2), ov.ClientPlaceTree(dp=8)
    spread = vlm_hybrid(buffer, groups).routes()
    assert spread.n_slots == 1
    assert (
        groups.bucket_of("DP")[spread.encoder] != groups.bucket_of("DP")[spread.parts.owner]
    ).any(), "images leave their replica"
    joint = vlm_hybrid(buffer, singles).routes()
    assert joint.encoder.tolist() == joint.parts.owner.tolist(), (
        "on single ranks nothing is exchanged"
    )
    inside = vlm(joint=True)(buffer, groups).routes()
    assert (
        groups.bucket_of("DP")[inside.encoder] == groups.bucket_of("DP")[inside.parts.owner]
    ).all()
    assert (inside.encoder != inside.parts.owner).any(), "the ranks of a replica share its images"


def test_each_strategy_balances_what_its_name_says() -> None:
    buffer, place = (
        replace(skewed(), sync="step"),
        ov.ClientPlaceTree(dp=4, tp=2),
    )  # ranks meet once, so buckets are what counts
    names = ("vanilla", "backbone_balance", "encoder_balance", "vlm_hybrid")
    plans = {name: getattr(ov.strategy, name)(buffer, place) for name in names}
    encoder, backbone = (
        {n: p.imbalance(m)["bucket"] for n, p in plans.items()} for m in ("encoder", "backbone")
    )
    assert (
        max(encoder["encoder_balance"], encoder["vlm_hybrid"])
        < 1.01
        < 1.1
        < min(encoder["vanilla"], encoder["backbone_balance"])
    )
    assert (
        max(backbone["backbone_balance"], backbone["vlm_hybrid"])
        < 1.01
        < backbone["vanilla"]
        == backbone["encoder_balance"]
    )


def test_a_joint_plan_balances_the_sum_and_tells_each_cost_by_itself() -> None:
    buffer, place = skewed(), ov.ClientPlaceTree(dp=8)
    plan = vlm(joint=True)(buffer, place)
    both = plan.loads("encoder").sum(axis=1) + plan.loads("backbone").sum(axis=1)
    assert both.max() / both.mean() < 1.02
    assert plan.main.cost.tolist() == DENSE_12B({"tokens": buffer.column("tokens")}).tolist()
    apart = vlm(joint=False)(buffer, place)
    assert apart.imbalance()["bucket"] <= plan.imbalance()["bucket"]


def test_text_strategies_leave_images_with_the_ranks_of_their_replica_in_turn() -> None:
    place = ov.ClientPlaceTree(dp=2, tp=2)
    plan = ov.strategy.vanilla(PHOTOS, place)
    assert plan.modules["encoder"].bucket.tolist() == [0, 1, 0]
    assert (
        plan.modules["encoder"].cost.tolist()
        == VIT_1B({"image_patches": np.array([4, 6, 8])}).tolist()
    )
    assert "encoder" not in ov.strategy.vanilla(drawn(text={"tokens": [5]}), place).modules


def test_a_strategy_for_images_says_when_there_are_none_to_be_known_of() -> None:
    with pytest.raises(
        PlanError, match=r"expected metadata of tokens, got 'image_patches'.*ov\.Meta"
    ):
        vlm_hybrid(drawn(text={"tokens": [5]}), TWO)
    with pytest.raises(JobError, match="unknown per='step'; known: iteration, microbatch"):
        vlm(per="step")


def test_parameters_of_a_strategy_are_part_of_its_fingerprint() -> None:
    kinds = [
        vlm(),
        vlm(per="microbatch"),
        vlm(joint=True),
        vlm(merge=2),
        vlm(encoder=ov.cost.tokens),
    ]
    assert len({kind.fingerprint for kind in kinds}) == 5  # type: ignore[attr-defined]


def test_the_strategies_of_the_paper_take_seven_lines_and_five_more() -> None:
    tree = ast.parse((ROOT / "examples" / "08_vlm_hybrid.py").read_text())
    lines = {
        f.name: f.end_lineno - f.body[0].lineno + 1
        for f in tree.body
        if isinstance(f, ast.FunctionDef) and f.end_lineno
    }
    assert lines["llm"] <= 7
    assert lines["vlm"] <= lines["llm"] + 5
