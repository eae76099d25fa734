"""Laws of the balancing kernel and of placing."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlord.errors import PlanError
from overlord.planner import balance, kernel
from overlord.planner.balance import METHODS, Problem, greedy, karmarkar_karp, place, register_balance, zigzag
from overlord.planner.kernel import NOWHERE

# Small whole numbers make ties, floats make rounding; sizes on both sides of kernel.FEW_BINS run heap and rounds.
cost_lists = st.one_of(
    st.lists(st.integers(0, 12).map(float), max_size=400),
    st.lists(st.floats(0, 1e12, allow_nan=False), max_size=200),
    st.builds(lambda seed, n: np.random.default_rng(seed).lognormal(6, 1.3, n).tolist(), st.integers(0, 999), st.integers(0, 900)),
)
bin_counts = st.one_of(st.integers(1, 12), st.integers(kernel.FEW_BINS, 90))


def heap_lpt(costs: list[float], n_bins: int) -> tuple[list[int], list[float]]:
    """The textbook: dearest first, a heap of (load, bin). Bins by item, loads by bin."""
    heap, bins, loads = [(0.0, b) for b in range(n_bins)], [0] * len(costs), [0.0] * n_bins
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, b = heapq.heappop(heap)
        bins[i], loads[b] = b, load + costs[i]
        heapq.heappush(heap, (loads[b], b))
    return bins, loads


def loads_of(costs: np.ndarray, bins: np.ndarray, n_bins: int) -> list[float]:
    """Summed dearest first, as LPT does, so that floats can be compared exactly."""
    loads = [0.0] * n_bins
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        loads[bins[i]] += costs[i]
    return loads


@given(cost_lists, bin_counts)
def test_lpt_gives_every_bin_the_load_that_a_heap_gives_it(costs: list[float], n_bins: int) -> None:
    array = np.array(costs, np.float64)
    bins, loads = heap_lpt(costs, n_bins)
    found = kernel.lpt(array, n_bins)
    assert loads_of(array, found, n_bins) == loads
    assert [int(b) for b, c in zip(found, costs, strict=True) if c > 0] == [b for b, c in zip(bins, costs, strict=True) if c > 0]


@given(cost_lists, bin_counts)
def test_no_bin_is_heavier_than_the_lightest_plus_the_dearest_item(costs: list[float], n_bins: int) -> None:
    array = np.array(costs, np.float64)
    loads = loads_of(array, kernel.lpt(array, n_bins), n_bins)
    assert max(loads) <= (min(loads) + max(costs, default=0.0)) * (1 + 1e-12)


@given(cost_lists, bin_counts, st.randoms(use_true_random=False))
def test_the_order_of_the_items_does_not_change_the_loads(costs: list[float], n_bins: int, random) -> None:
    shuffled = list(costs)
    random.shuffle(shuffled)
    a, b = np.array(costs, np.float64), np.array(shuffled, np.float64)
    assert sorted(loads_of(a, kernel.lpt(a, n_bins), n_bins)) == sorted(loads_of(b, kernel.lpt(b, n_bins), n_bins))


@given(st.lists(st.floats(0, allow_nan=False, allow_infinity=False), max_size=80), st.lists(st.integers(0, 2**40), max_size=80))
def test_radix_orders_equal_stable_argsort(values: list[float], keys: list[int]) -> None:
    floats, whole = np.array([*values, -0.0, 0.0]), np.array([*keys, 0], np.int64)
    assert kernel.by_falling(floats).tolist() == np.argsort(-floats, kind="stable").tolist()
    assert kernel.by_key(whole, 2**40 + 1).tolist() == np.argsort(whole, kind="stable").tolist()


def test_items_that_cost_nothing_are_spread_over_the_bins() -> None:
    assert np.bincount(kernel.lpt(np.zeros(64), 8)).tolist() == [8] * 8


@st.composite
def sized(draw: st.DrawFn, capacity: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """Costs and sizes; costs follow sizes, or have nothing to do with them, or are zero here and there."""
    sizes = np.array(draw(st.lists(st.integers(1, capacity), max_size=250)), np.int64)
    kind = draw(st.sampled_from(["square", "own", "zeros"]))
    if kind == "square":
        return (sizes * sizes).astype(np.float64), sizes
    least, most = (0, 1) if kind == "zeros" else (0, 1000)
    return np.array(draw(st.lists(st.integers(least, most), min_size=len(sizes), max_size=len(sizes))), np.float64), sizes


@given(sized(), bin_counts)
def test_with_a_capacity_no_bin_overflows_and_items_go_without_only_when_nothing_has_room(items, n_bins: int) -> None:
    costs, sizes = items
    bins = kernel.lpt(costs, n_bins, 100, sizes)
    held = np.bincount(bins[bins >= 0], weights=sizes[bins >= 0], minlength=n_bins)
    assert held.max() <= 100
    if (left := np.flatnonzero(bins == NOWHERE)).size:
        first = min(left, key=lambda i: (-costs[i], i))
        assert sizes[first] > 100 - held.min()


@given(st.integers(0, 10_000), st.integers(kernel.FEW_BINS, 60), st.integers(200, 420))
def test_many_bins_that_are_almost_full_do_not_overflow_though_dear_items_are_small(seed: int, n_bins: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 24, n)
    bins = kernel.lpt(rng.integers(1, 50, n).astype(float), n_bins, 100, sizes)
    assert np.bincount(bins[bins >= 0], weights=sizes[bins >= 0], minlength=n_bins).max() <= 100
    assert (bins >= 0).all() or sizes.sum() > 0.7 * 100 * n_bins


@given(sized(), st.integers(1, 12))
def test_few_bins_with_a_capacity_take_the_lightest_that_has_room(items, n_bins: int) -> None:
    costs, sizes = items
    costs = costs + 1.0
    loads, room, wanted = [0.0] * n_bins, [100] * n_bins, [NOWHERE] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        open_ = [b for b in range(n_bins) if room[b] >= sizes[i]]
        if not open_:
            break
        b = min(open_, key=lambda b: (loads[b], b))
        wanted[i], loads[b], room[b] = b, loads[b] + costs[i], room[b] - sizes[i]
    assert kernel.lpt(costs, n_bins, 100, sizes).tolist() == wanted


@given(sized(), st.integers(1, 8), st.integers(1, 5))
def test_packing_inside_all_parents_at_once_equals_packing_each_alone(items, n_parents: int, n_bins: int) -> None:
    costs, sizes = items
    costs = costs + 1.0
    parent = (np.arange(len(costs)) * 7 % n_parents).astype(np.int32)
    found = kernel.pack_inside(parent, costs, sizes, n_parents=n_parents, n_bins=n_bins)
    for p in range(n_parents):
        mine = parent == p
        assert found[mine].tolist() == kernel.lpt(costs[mine], n_bins).tolist()


def plain_next_fit(sizes: list[int], capacity: int) -> list[int]:
    bins, b, held = [], 0, 0
    for size in sizes:
        if held + size > capacity:
            b, held = b + 1, 0
        held += size
        bins.append(b)
    return bins


@given(sized(), st.integers(1, 8))
def test_next_fit_opens_a_bin_only_when_the_next_item_does_not_fit(items, n_parents: int) -> None:
    sizes = items[1]
    parent = (np.arange(len(sizes)) * 5 % n_parents).astype(np.int32)
    assert kernel.next_fit(sizes, 100).tolist() == plain_next_fit(sizes.tolist(), 100)
    inside = kernel.next_fit_inside(parent, sizes, n_parents, 100)
    for p in range(n_parents):
        assert inside[parent == p].tolist() == plain_next_fit(sizes[parent == p].tolist(), 100)


@given(sized(), bin_counts)
def test_best_fit_never_overflows(items, n_bins: int) -> None:
    sizes = items[1]
    bins = kernel.best_fit(sizes, n_bins, 100)
    held = np.bincount(bins[bins >= 0], weights=sizes[bins >= 0], minlength=n_bins)
    assert held.max() <= 100
    assert (bins >= 0).all() or held.min() + sizes[bins == NOWHERE].max() > 100


ways = st.fixed_dictionaries(
    {},
    optional={"level": st.sampled_from(["inter", "intra"])},
) | st.fixed_dictionaries({}, optional={"objective": st.sampled_from(["iteration", "microbatch"]), "keep_order": st.booleans()})


@settings(max_examples=200)
@given(sized(), st.sampled_from([1, 2, 6, 40]), st.integers(1, 3), st.sampled_from(sorted(METHODS)), ways, st.booleans())
def test_every_way_of_placing_keeps_the_capacity_and_is_repeatable(items, n_buckets, microbatches, method, way, grouped) -> None:
    costs, sizes = items
    group = 2 if grouped and n_buckets % 2 == 0 else None
    problem = Problem(
        costs=costs, sizes=sizes, n_buckets=n_buckets, microbatches=microbatches, capacity=100, method=method, group_size=group
    )
    found = place(problem, **way)
    m = found.n_microbatches
    assert m >= max(microbatches, problem.least_microbatches())
    assert len(found.bucket) == len(found.microbatch) == len(costs)
    assert ((found.bucket >= 0) & (found.bucket < n_buckets) & (found.microbatch >= 0) & (found.microbatch < m)).all()
    assert np.bincount(found.bucket * m + found.microbatch, weights=sizes, minlength=n_buckets * m).max() <= 100
    again = place(problem, **way)
    assert (again.bucket.tolist(), again.microbatch.tolist()) == (found.bucket.tolist(), found.microbatch.tolist())


@given(sized(), st.sampled_from([2, 40]))
def test_with_keep_order_microbatches_follow_the_stream(items, n_buckets: int) -> None:
    costs, sizes = items
    found = place(Problem(costs=costs, sizes=sizes, n_buckets=n_buckets, microbatches=3, capacity=100), keep_order=True)
    assert (np.diff(found.microbatch) >= 0).all()


@given(cost_lists, st.integers(1, 40))
def test_karmarkar_karp_and_zigzag_use_bins_in_range_and_karmarkar_karp_obeys_the_bound(costs: list[float], n_bins: int) -> None:
    array = np.array(costs, np.float64)
    sizes = np.ones(len(costs), np.int64)
    counts = np.bincount(zigzag(array, n_bins, 0, sizes), minlength=n_bins)
    assert counts.max() - counts.min() <= 1
    loads = loads_of(array, karmarkar_karp(array, n_bins, 0, sizes), n_bins)
    assert max(loads) - min(loads) <= max(costs, default=0.0) * (1 + 1e-9)


def test_karmarkar_karp_finds_the_even_split_that_lpt_misses() -> None:
    costs = np.array([8.0, 7.0, 6.0, 5.0, 4.0])  # differencing: 16/14; LPT: 17/13
    ones = np.ones(5, np.int64)
    assert sorted(loads_of(costs, karmarkar_karp(costs, 2, 0, ones), 2)) == [14.0, 16.0]
    assert sorted(loads_of(costs, greedy(costs, 2, 0, ones), 2)) == [13.0, 17.0]


def skewed(n: int, seed: int, context: int = 16_384) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.clip(np.random.default_rng(seed).lognormal(6.5, 1.2, n), 16, context).astype(np.int64)
    return 2.4e10 * sizes + 4.1e5 * sizes.astype(np.float64) ** 2, sizes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("group_size", [None, 8, 32])
def test_sixteen_samples_a_rank_come_within_0_7_percent_of_the_bound(seed: int, group_size: int | None) -> None:
    costs, sizes = skewed(64 * 16, seed)
    found = place(Problem(costs=costs, sizes=sizes, n_buckets=64, capacity=16_384, group_size=group_size))
    heaviest = np.bincount(found.bucket, weights=costs).max()
    assert heaviest <= 1.007 * max(costs.sum() / 64, costs.max())


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_meet_after_every_microbatch_wait_less_with_that_objective(seed: int) -> None:
    costs, sizes = skewed(64 * 64, seed)
    problem = Problem(costs=costs, sizes=sizes, n_buckets=64, capacity=16_384)
    once, often = place(problem), place(problem, objective="microbatch")
    assert balance._waited(problem, often) < 0.98 * balance._waited(problem, once)


@pytest.mark.parametrize(
    ("sizes", "costs", "n_buckets", "microbatches", "way"),
    [
        ([60, 20, 40, 20], [5, 4, 4, 1], 2, 1, "two-level"),
        ([60, 50, 60, 60], [1, 9, 3, 2], 2, 2, "flat"),
        ([50, 60, 60, 50], [8, 1, 2, 8], 3, 1, "best fit"),  # the two dear ones must share a bin
    ],
)
def test_a_step_too_full_for_one_way_is_packed_by_the_next_before_it_gets_another_microbatch(
    sizes: list[int], costs: list[int], n_buckets: int, microbatches: int, way: str
) -> None:
    found = place(Problem(costs=np.array(costs, float), sizes=np.array(sizes), n_buckets=n_buckets, capacity=100))
    assert (found.n_microbatches, found.way) == (microbatches, way)


def test_bins_of_an_index_go_to_buckets_so_that_totals_come_out_level() -> None:
    sizes = np.full(6, 60, np.int64)  # one item a bin
    found = place(Problem(costs=np.arange(1.0, 7.0), sizes=sizes, n_buckets=3, capacity=100), objective="microbatch")
    assert np.bincount(found.bucket, weights=np.arange(1.0, 7.0)).tolist() == [7.0, 7.0, 7.0]
    assert found.microbatch.tolist() == [1, 1, 1, 0, 0, 0]


def test_microbatches_grow_until_all_fits() -> None:
    sizes = np.full(7, 60, np.int64)  # no two share a bin of 100
    assert place(Problem(costs=sizes.astype(float), sizes=sizes, n_buckets=2, capacity=100)).n_microbatches == 4


def test_a_registered_method_places_and_one_that_breaks_the_capacity_is_overruled() -> None:
    register_balance("test_all_in_one", lambda costs, n_bins, capacity, sizes: np.zeros(len(costs), np.int64))
    sizes = np.full(6, 40, np.int64)
    problem = Problem(costs=np.ones(6), sizes=sizes, n_buckets=3, method="test_all_in_one")
    assert set(place(problem).bucket.tolist()) == {0}
    full = place(Problem(costs=np.ones(6), sizes=sizes, n_buckets=3, capacity=100, method="test_all_in_one"))
    assert np.bincount(full.bucket * full.n_microbatches + full.microbatch, weights=sizes).max() <= 100


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (np.zeros(2, int), "wanted 3 whole numbers"),
        (np.zeros(3), "whole numbers"),
        (np.array([0, 1, 2]), "0..1"),
        (np.full(3, -1), "without a bin"),
    ],
)
def test_a_method_that_answers_nonsense_is_named(answer: np.ndarray, said: str) -> None:
    register_balance("test_nonsense", lambda costs, n_bins, capacity, sizes: answer)
    with pytest.raises(PlanError, match=said):
        place(Problem(costs=np.ones(3), sizes=np.ones(3, np.int64), n_buckets=2, method="test_nonsense"))


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    problem = Problem(costs=np.ones(3), sizes=np.ones(3, np.int64), n_buckets=2)
    with pytest.raises(PlanError, match="known: both, inter, intra"):
        place(problem, level="all")
    with pytest.raises(PlanError, match="known: iteration, microbatch"):
        place(problem, objective="step")
    with pytest.raises(PlanError, match="not available"):
        place(problem, level="interleaved")
    with pytest.raises(PlanError, match=r"known: greedy, karmarkar_karp"):
        place(Problem(costs=np.ones(3), sizes=np.ones(3, np.int64), n_buckets=2, method="gready"))
    with pytest.raises(PlanError, match="divisor of the 2 buckets"):
        place(Problem(costs=np.ones(3), sizes=np.ones(3, np.int64), n_buckets=2, group_size=3))
    with pytest.raises(PlanError, match="built in"):
        register_balance("greedy", greedy)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_costs_that_are_no_costs_are_refused(bad: float) -> None:
    with pytest.raises(PlanError, match="negative, infinite or no number"):
        place(Problem(costs=np.array([1.0, bad]), sizes=np.ones(2, np.int64), n_buckets=2))
