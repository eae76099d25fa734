"""Laws of spreading a step over its microbatches, and when ranks wait for each other:
``Job.sync``.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import PlanError
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance import placement
from overlord.planning.balance.balance import ItemPlacement, PackingProblem, place
from overlord.planning.balance.binpack import LITTLE, even_marks, none_empty
from overlord.planning.strategies import STRATEGIES, vlm
from tests import reference_place
from tests.laws import examples
from tests.properties.test_balance import problems

CONTEXT = 64
TEXT = ("vanilla", "packed", "backbone_balance", "llm_balance", "look_ahead_balance")


def drawn(
    lengths: list[int], microbatches: int = 1, sync: str = "microbatch", context: int = CONTEXT
) -> ov.Buffer:
    batch = ov.Batch(samples=max(1, len(lengths)), microbatches=microbatches, context=context)
    return replace(
        ov.Buffer.from_columns(
            {"s": {"tokens": np.array(lengths, np.int64)}}, batch=batch, sync=sync
        ),
        drawn=True,
    )


def counts(plan: LoadingPlan) -> list[list[int]]:
    """Samples by rank and microbatch."""
    a = plan.main
    return (
        np.bincount(a.bins(), minlength=a.n_buckets * a.n_microbatches)
        .reshape(a.n_buckets, -1)
        .tolist()
    )


def placed(plan: LoadingPlan) -> reference_place.Placed:
    a, order = plan.main, plan.main.order()
    bins = a.bins()[order]
    return [
        [order[bins == b * a.n_microbatches + k].tolist() for k in range(a.n_microbatches)]
        for b in range(a.n_buckets)
    ]


@pytest.mark.parametrize("sync", ["microbatch", "step"])
@pytest.mark.parametrize("name", TEXT)
def test_a_step_that_fits_one_microbatch_is_spread_over_all(name: str, sync: str) -> None:
    assert counts(STRATEGIES[name](drawn([10] * 16, 4, sync, 1024), ov.ClientPlaceTree())) == [
        [4, 4, 4, 4]
    ]
    assert (
        counts(STRATEGIES[name](drawn([10] * 32, 4, sync, 1024), ov.ClientPlaceTree(dp=2)))
        == [[4, 4, 4, 4]] * 2
    )


@pytest.mark.parametrize("name", ["vanilla", "packed"])
def test_strategies_that_balance_nothing_place_alike_whenever_ranks_wait(name: str) -> None:
    plans = [
        STRATEGIES[name](drawn(skewed(64, 60), 4, sync), ov.ClientPlaceTree(dp=4))
        for sync in ("microbatch", "step")
    ]
    assert plans[0].digest() == plans[1].digest()


@pytest.mark.parametrize(
    "strategy", [STRATEGIES["encoder_balance"], STRATEGIES["vlm_hybrid"], vlm(joint=False)]
)
def test_a_step_with_images_that_fits_one_microbatch_is_spread_over_all(
    strategy: ov.strategy.Strategy,
) -> None:
    columns = {"pairs": {"tokens": [12] * 16, "image_patches": [[4]] * 16}}
    buffer = replace(
        ov.Buffer.from_columns(columns, batch=ov.Batch(samples=16, microbatches=4, context=1024)),
        drawn=True,
    )
    plan = strategy(buffer, ov.ClientPlaceTree(dp=2))
    assert counts(plan) == [[2, 2, 2, 2]] * 2


def test_vanilla_gives_equal_counts_to_ranks_and_microbatches_in_stream_order() -> None:
    plan = STRATEGIES["vanilla"](
        drawn(list(range(1, 23)), 4, context=1024), ov.ClientPlaceTree(dp=2)
    )
    assert counts(plan) == [[3, 3, 3, 2], [3, 3, 3, 2]]
    assert placed(plan)[0] == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20]]


def test_a_microbatch_that_would_be_too_full_ends_earlier_and_the_number_of_microbatches_stays_the_least() -> (
    None
):
    plan = STRATEGIES["vanilla"](drawn([60, 60, 1, 1, 1, 1], 2), ov.ClientPlaceTree())
    assert placed(plan) == [[[0], [1, 2, 3, 4, 5]]]
    assert counts(STRATEGIES["vanilla"](drawn([60, 60, 60, 1], 1), ov.ClientPlaceTree())) == [
        [1, 1, 2]
    ]


def test_packed_cuts_the_stream_by_tokens_and_not_by_count() -> None:
    plan = STRATEGIES["packed"](drawn([30, 10, 10, 10, 5, 5, 10, 10, 30], 4), ov.ClientPlaceTree())
    assert placed(plan) == [[[0], [1, 2, 3], [4, 5, 6, 7], [8]]]


def test_backbone_balance_cuts_ranks_by_tokens_or_the_stream_into_runs() -> None:
    lengths, place_ = [20, 30, *[1] * 40, 10, 50, *[2] * 20], ov.ClientPlaceTree(dp=2)
    once, often = (
        STRATEGIES["backbone_balance"](drawn(lengths, 4, sync), place_)
        for sync in ("step", "microbatch")
    )
    for b, rank in enumerate(placed(once)):
        mine = np.flatnonzero(once.main.bucket == b).tolist()
        assert rank == reference_place.cut(mine, lengths, 4, CONTEXT, by_count=False)
    runs = reference_place.marks(lengths, 4, by_count=False, least=2)
    assert often.main.microbatch.tolist() == np.repeat(np.arange(4), np.diff(runs)).tolist()


def test_backbone_balance_balances_every_microbatch_where_ranks_wait_at_every_one() -> None:
    lengths = (
        np.clip(np.random.default_rng(3).lognormal(2.0, 1.0, 16 * 40), 1, CONTEXT)
        .astype(int)
        .tolist()
    )
    place_ = ov.ClientPlaceTree(dp=16)
    once, often = (
        STRATEGIES["backbone_balance"](drawn(lengths, 8, sync), place_).imbalance()
        for sync in ("step", "microbatch")
    )
    assert often["microbatch"] < 1.1 < 1.3 < once["microbatch"]
    assert once["bucket"] < often["bucket"] < 1.01


def bins_of(found: ItemPlacement) -> np.ndarray:
    return found.bucket.astype(np.int64) * found.n_microbatches + found.microbatch


def check_spread(
    found: ItemPlacement, costs: np.ndarray, n_buckets: int, limit: np.ndarray
) -> None:
    """An empty microbatch k of a rank: no sample with company on that rank costs ``limit[k]`` or
    less.
    """
    m = found.n_microbatches
    held = np.bincount(bins_of(found), minlength=n_buckets * m).reshape(n_buckets, m)
    for i, (b, k) in enumerate(zip(found.bucket.tolist(), found.microbatch.tolist(), strict=True)):
        if held[b, k] < 2 or (held[b] > 0).all():
            continue
        company = (found.bucket == b) & (found.microbatch == k)
        if i != int(np.flatnonzero(company)[np.argmax(costs[company])]):  # the dearest stays
            assert costs[i] > limit[held[b] == 0].max()


@examples(300)
@given(
    problems(),
    st.sampled_from(["both", "inter", "intra", "interleaved"]),
    st.sampled_from(["iteration", "microbatch"]),
    st.booleans(),
)
def test_no_microbatch_of_a_rank_is_empty_beside_one_that_could_give_a_sample(
    problem: PackingProblem, level: str, objective: str, keep_order: bool
) -> None:
    """Every method, level and objective. Where ranks meet often, a sample could be given if that
    made no index slower.
    """
    objective = "iteration" if level in ("intra", "interleaved") else objective
    problem = replace(
        problem, substep=None
    )  # sub-draws are microbatches, however many samples they have
    found = place(
        problem, level=level, objective=objective, keep_order=keep_order and level == "both"
    )
    limit = np.full(found.n_microbatches, np.inf)
    if level == "interleaved" or (
        level == "both" and objective == "microbatch" and found.algorithm != "two-level"
    ):
        loads = np.bincount(
            bins_of(found),
            weights=problem.costs,
            minlength=problem.n_buckets * found.n_microbatches,
        )
        limit = np.maximum(
            loads.reshape(problem.n_buckets, -1).max(axis=0),
            LITTLE * problem.bound() / found.n_microbatches,
        )
    check_spread(found, problem.costs, problem.n_buckets, limit)


@examples(120)
@given(
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, CONTEXT)), max_size=60),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 6),
    st.sampled_from(TEXT),
    st.sampled_from(["microbatch", "step"]),
)
def test_with_samples_for_every_microbatch_of_every_rank_strategies_in_stream_order_leave_none_empty(
    lengths: list[int], dp: int, microbatches: int, name: str, sync: str
) -> None:
    found = counts(STRATEGIES[name](drawn(lengths, microbatches, sync), ov.ClientPlaceTree(dp=dp)))
    for rank in found:
        assert min(rank) > 0 or max(rank) < 2 or name in ("llm_balance", "look_ahead_balance")
    if name in ("vanilla", "packed") and len(lengths) >= dp * len(found[0]):
        assert min(map(min, found)) > 0


@examples(150)
@given(
    st.lists(st.one_of(st.integers(1, 9), st.integers(1, CONTEXT)), min_size=1, max_size=40),
    st.sampled_from([1, 2, 3, 8]),
    st.integers(1, 6),
    st.sampled_from(["vanilla", "packed"]),
)
def test_strategies_without_balance_place_as_the_reference_does(
    lengths: list[int], dp: int, microbatches: int, name: str
) -> None:
    plan = STRATEGIES[name](drawn(lengths, microbatches), ov.ClientPlaceTree(dp=dp))
    reference = reference_place.vanilla if name == "vanilla" else reference_place.packed
    assert placed(plan) == reference(lengths, dp, microbatches, CONTEXT)


@examples(100)
@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.integers(1, 6),
    st.sampled_from([1, 2, 5]),
    st.booleans(),
)
def test_marks_are_those_of_the_reference(
    sizes: list[int], m: int, least: int, by_count: bool
) -> None:
    found = even_marks(
        np.array(sizes, np.int64), np.array([len(sizes)]), m, by_count=by_count, least=least
    )
    if sum(sizes):
        assert found[0].tolist() == reference_place.marks(sizes, m, by_count=by_count, least=least)
    assert (np.diff(found[0]) >= (least if len(sizes) > least * m else 0)).all()


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=60),
    st.sampled_from([1, 2, 4]),
)
def test_filling_empty_bins_moves_no_more_samples_than_needed(
    items: list[tuple[int, int]], n_parents: int
) -> None:
    bins = np.array([(i % n_parents) * 4 + b for i, (b, _) in enumerate(items)], np.int64)
    costs = np.array([c for _, c in items], np.float64)
    found = none_empty(bins, costs, n_parents, 4)
    before, after = (
        np.bincount(b, minlength=4 * n_parents).reshape(n_parents, 4) for b in (bins, found)
    )
    assert (before.sum(axis=1) == after.sum(axis=1)).all()
    assert ((after > 0).sum(axis=1) == np.minimum(before.sum(axis=1), 4)).all()
    assert (bins != found).sum() == ((after > 0).sum() - (before > 0).sum())


def skewed(n: int, most: int) -> list[int]:
    """Many short samples and few long ones, by a linear congruence."""
    found, x = [], 7
    for _ in range(n):
        x = (x * 1103515245 + 12345) % 2**31
        found.append(16 + (most - 16) * ((x >> 8) % 1000) ** 8 // 1000**8)
    return found


@pytest.mark.parametrize("name", ["llm_balance", "look_ahead_balance"])
def test_ranks_that_wait_at_every_microbatch_wait_little_by_default_where_one_balance_a_step_costs_seven_tenths(
    name: str,
) -> None:
    place, lengths = ov.ClientPlaceTree(dp=16), skewed(128, 32_768)
    once, often = (
        STRATEGIES[name](drawn(lengths, 8, sync, 32_768), place).imbalance()
        for sync in ("step", "microbatch")
    )
    default = STRATEGIES[name](replace(drawn(lengths, 8, context=32_768)), place).imbalance()
    assert once["microbatch"] > 1.65
    assert default == often
    assert often["microbatch"] < 1.05
    assert once["bucket"] <= often["bucket"]


def test_a_strategy_of_ones_own_follows_the_sync_of_the_job_unless_it_says_otherwise() -> None:
    lengths, place_ = skewed(128, 32_768), ov.ClientPlaceTree(dp=16)
    for sync, objective in (("microbatch", "microbatch"), ("step", "iteration")):
        graph = (
            ov.DGraph.from_buffer(drawn(lengths, 8, sync, 32_768), place_)
            .mix()
            .distribute("DP")
            .cost("llama_12b")
        )
        assert (
            graph.balance("greedy").plan().digest()
            == graph.balance("greedy", objective=objective).plan().digest()
        )
    asked = [
        ov.DGraph.from_buffer(drawn(lengths, 8, sync, 32_768), place_)
        .mix()
        .distribute("DP")
        .balance(objective="iteration")
        .plan()
        .digest()
        for sync in ("microbatch", "step")
    ]
    assert asked[0] == asked[1]


@pytest.mark.parametrize("level", ["intra", "interleaved"])
def test_levels_without_an_objective_of_their_own_are_the_same_under_every_sync(level: str) -> None:
    found = [
        ov.DGraph.from_buffer(drawn(skewed(64, 60), 4, sync), ov.ClientPlaceTree(dp=4))
        .mix()
        .distribute("DP")
        .balance(level=level)
        .plan()
        for sync in ("microbatch", "step")
    ]
    assert found[0].digest() == found[1].digest()
    with pytest.raises(PlanError, match=r'level .*: expected objective "iteration"'):
        ov.DGraph.from_buffer(drawn([1, 2]), ov.ClientPlaceTree()).mix().distribute("DP").balance(
            level=level, objective="microbatch"
        )


def test_with_one_microbatch_both_objectives_give_the_same_plan() -> None:
    costs = np.random.default_rng(0).lognormal(6.5, 1.2, 512)
    problem = PackingProblem(
        costs=costs, sizes=costs.astype(np.int64) // 8, n_buckets=8, capacity=1 << 30
    )
    once, often = place(problem), place(problem, objective="microbatch")
    assert (once.algorithm, bins_of(once).tolist()) == (often.algorithm, bins_of(often).tolist())
    assert placement.waited(problem, often) == pytest.approx(placement.heaviest(problem, once))


def test_a_buffer_with_an_unknown_sync_is_refused_by_name() -> None:
    with pytest.raises(
        PlanError, match=r"buffer.sync: expected one of microbatch, step, got 'epoch'"
    ):
        STRATEGIES["llm_balance"](drawn([1, 2, 3], sync="epoch"), ov.ClientPlaceTree())
