"""Placement algorithms. A function ``way(problem, m)`` places all items into m microbatches.

It returns None if it cannot keep the capacity. The algorithms differ in what they level. Two-level:
bucket totals first. Flat: all bins at once. Levelled and alternating: one microbatch index after
the other. Best fit levels nothing and packs tightly. ``balance.place`` chooses among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from overlord.hashing import order_by_key
from overlord.planning.balance import binpack
from overlord.planning.balance.binpack import NOWHERE, spread
from overlord.planning.balance.groups import by_groups, nested, rows_by
from overlord.planning.balance.local_search import even_out
from overlord.planning.balance.methods import bins_by, fits, loads_of, none

LEVEL = 1.0005  # factor on the lower bound at which the local search stops
NEAR = 4  # microbatches above the least number that are tried one by one
# items times indices above which indices are not filled one by one: it would take many seconds
MUCH = 1 << 25
# items above which a step that is more than 99 % full gets one microbatch more: searching for a
# packing would cost more
MANY = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ItemPlacement:
    """The bucket and microbatch of every item, and the name of the placement algorithm."""

    bucket: np.ndarray  # int32
    microbatch: np.ndarray  # int32
    n_microbatches: int
    algorithm: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackingProblem:
    """Items to place into ``n_buckets`` x M bins of ``capacity``.

    M, the number of microbatches, is at least ``microbatches`` and grows until all items fit.
    """

    costs: np.ndarray  # float64, none negative
    sizes: np.ndarray  # int64
    n_buckets: int
    microbatches: int = 1
    capacity: int = 0  # 0: none, then M never grows
    group_size: int | None = None
    method: str = "greedy"
    # float64: a second size of every item, against memory_capacity
    memory: np.ndarray | None = None
    memory_capacity: float = 0.0
    # sub-draw of every item, rising: keep_order keeps it together
    substep: np.ndarray | None = None
    # if M grows anyway, one more microbatch than needed is allowed if it levels the ranks
    spare: bool = True
    count_multiple: int = 1  # M is a multiple of this number
    chunk: np.ndarray | None = None  # chunk of every item, rising: chunks are placed whole

    def counted(self, m: int) -> int:
        """Return the smallest number of microbatches of at least ``m`` that is allowed."""
        return -(-m // self.count_multiple) * self.count_multiple

    def least_microbatches(self) -> int:
        """Return a lower bound of the number of microbatches, at least ``microbatches``.

        All tokens must fit, and items above half the capacity share no bin.
        """
        if not self.capacity or not len(self.sizes):
            return self.microbatches
        by_tokens = -(-int(self.sizes.sum()) // (self.n_buckets * self.capacity))
        by_large = -(-int((2 * self.sizes > self.capacity).sum()) // self.n_buckets)
        return max(self.microbatches, by_tokens, by_large)

    def of_chunks(self) -> PackingProblem:
        """Return the problem whose items are the chunks."""
        if self.chunk is None:
            return self
        n = int(self.chunk[-1]) + 1 if len(self.chunk) else 0
        costs, sizes, memory = (
            None if column is None else np.bincount(self.chunk, weights=column, minlength=n)
            for column in (self.costs, self.sizes, self.memory)
        )
        assert costs is not None
        assert sizes is not None
        return replace(self, costs=costs, sizes=sizes.astype(np.int64), memory=memory, chunk=None)

    def may_add(self, m: int) -> bool:
        """Return whether one microbatch more than the ``m`` needed is allowed, to level the ranks.

        It is not allowed if the items fit into the requested number of microbatches.
        """
        return self.spare and self.capacity > 0 and m > self.microbatches

    def bound(self) -> float:
        """Return a lower bound of the heaviest bucket: the mean or the most expensive item."""
        return max(binpack.total(self.costs) / self.n_buckets, float(self.costs.max(initial=0.0)))


Way = Callable[[PackingProblem, int], ItemPlacement | None]


def first(p: PackingProblem, ways: Iterable[Way]) -> ItemPlacement:
    """Return the placement of the first algorithm of ``ways`` that keeps the capacity.

    The search starts at the lower bound of M and ends at an M below which all algorithms fail. Many
    items of just over a third of the capacity need far more than the bound. Then M is searched by
    doubling and halving.
    """
    ways, failed, ahead = tuple(ways), p.least_microbatches() - 1, 1
    while (found := _at(p, ways, failed + ahead)) is None:
        failed, ahead = failed + ahead, 1 if failed < p.least_microbatches() + NEAR else 2 * ahead
    while found.n_microbatches - failed > 1:
        m = (found.n_microbatches + failed) // 2
        fewer = _at(p, ways, m)
        failed, found = (m, found) if fewer is None else (failed, fewer)
    return found


def _at(p: PackingProblem, ways: Iterable[Way], m: int) -> ItemPlacement | None:
    return next((found for algorithm in ways if (found := algorithm(p, m)) is not None), None)


def heaviest(p: PackingProblem, found: ItemPlacement) -> float:
    """Return the time of a step whose ranks wait once: the cost of the slowest rank."""
    return float(loads_of(found.bucket, p.costs, p.n_buckets).max())


def waited(p: PackingProblem, found: ItemPlacement) -> float:
    """Return the time of a step whose ranks wait after every microbatch.

    It is the sum over indices of the slowest bin.
    """
    flat = found.microbatch.astype(np.int64) * p.n_buckets + found.bucket
    loads = loads_of(flat, p.costs, p.n_buckets * found.n_microbatches).reshape(-1, p.n_buckets)
    return float(np.cumsum(loads.max(axis=1))[-1])


def two_level(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Level buckets by cost, then the microbatches of each bucket; None if the capacity breaks.

    Bucket totals typically differ by a fraction of a percent.
    """
    return _then_inside(p, buckets(p, m), m, "two-level")


def whole(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Place as ``two_level`` if m is 1, else return None.

    With one microbatch, ranks wait for each other once a step, whatever the objective.
    """
    return two_level(p, m) if m == 1 else None


def _then_inside(
    p: PackingProblem, bucket: np.ndarray, m: int, algorithm: str
) -> ItemPlacement | None:
    if (
        not fits(bucket, p.sizes, p.n_buckets, m * p.capacity)
        or (microbatch := _inside(p, bucket, m)) is None
    ):
        return None
    microbatch = spread(bucket, microbatch, p.costs, p.n_buckets, m)
    return ItemPlacement(
        bucket=bucket, microbatch=microbatch, n_microbatches=m, algorithm=algorithm
    )


def buckets(p: PackingProblem, m: int) -> np.ndarray:
    """Return the bucket of every item by the method; NOWHERE or overfull if there is no room.

    With groups of buckets, items are placed over groups first, then in each group. An exchange
    between buckets follows ``greedy``. m = 0: no capacity.
    """
    room = m * p.capacity
    if p.group_size is None or p.group_size >= p.n_buckets:
        bucket = bins_by(p.method, p.costs, p.n_buckets, room, p.sizes)
    else:
        bucket = by_groups(p, p.group_size, room)
    if p.method != "greedy" or not fits(bucket, p.sizes, p.n_buckets, room):
        return bucket
    return even_out(bucket, p.costs, p.n_buckets, LEVEL * p.bound(), sizes=p.sizes, capacity=room)


def _inside(p: PackingProblem, bucket: np.ndarray, m: int) -> np.ndarray | None:
    """Return the microbatch of every item inside its bucket; None if a bucket cannot be packed.

    A bucket that the method cannot pack is packed tightly instead.
    """
    bins = nested(p, bucket, p.n_buckets, m, p.capacity)
    if not p.capacity:
        return bins
    flat = bucket.astype(np.int64) * m + bins
    over = np.zeros(p.n_buckets, bool)
    over[bucket[bins == NOWHERE]] = True
    over |= (
        (loads_of(flat[bins >= 0], p.sizes[bins >= 0], p.n_buckets * m) > p.capacity)
        .reshape(-1, m)
        .any(axis=1)
    )
    if not over.any():
        return bins
    redo, n_over = np.flatnonzero(over[bucket]), int(over.sum())
    number = (np.cumsum(over) - 1)[bucket[redo]]  # overfull buckets, numbered
    if m <= n_over:
        bins[redo] = binpack.pack_inside(
            number,
            p.costs[redo],
            p.sizes[redo],
            n_parents=n_over,
            n_bins=m,
            capacity=p.capacity,
            tight=True,
        )
    else:
        for rows in rows_by(number, n_over):
            bins[redo[rows]] = binpack.best_fit(p.sizes[redo[rows]], m, p.capacity, lowest=True)
    return None if (bins[redo] == NOWHERE).any() else bins


def inside_round_robin(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Give items to buckets in turn, and balance the microbatches of each bucket."""
    return _then_inside(
        p, none(p.costs, p.n_buckets, 0, p.sizes), m, "round robin, balanced inside"
    )


def assign_buckets(loads: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (bucket of every bin, total of every bucket) for loads by [index, bin].

    In each index, the heavier a bin, the lighter the bucket that gets it.
    """
    bucket_of, total = np.empty(loads.shape, np.int32), np.zeros(loads.shape[1])
    heavy = (-loads).argsort(axis=1, kind="stable")
    for number, row, by_load in zip(
        bucket_of, np.take_along_axis(loads, heavy, 1), heavy, strict=True
    ):
        poorest = total.argsort(kind="stable")
        number[by_load] = poorest
        total[poorest] += row
    return bucket_of.reshape(-1), total


class SortedItems:
    """The orders of a problem's items that several algorithms need, each sorted once."""

    def __init__(self, p: PackingProblem):
        self.by_size = binpack.by_falling_size(p.sizes)
        self.by_cost = binpack.by_falling_like(p.costs, self.by_size)


def flat(p: PackingProblem, m: int, once: bool = False) -> ItemPlacement | None:
    """Place by LPT over all bins at once; ``once`` as in ``_arrange``."""
    return _arrange(p, _flat_bins(p, m, SortedItems(p)), m, "flat", once)


def levelled(p: PackingProblem, m: int, once: bool = False) -> ItemPlacement | None:
    """Fill indices with an expensive item as far as possible, and place all other items by LPT.

    Such an index is slow in any case. If LPT finds no room, more indices are filled, which packs
    tighter. ``once`` as in ``_arrange``.
    """
    bins = _levelled_bins(p, m, SortedItems(p))
    return None if bins is None else _arrange(p, bins, m, "levelled", once)


def _flat_bins(p: PackingProblem, m: int, items: SortedItems) -> np.ndarray:
    """Return the bins of ``flat``; NOWHERE for items without room."""
    order = items.by_cost
    return binpack.lpt(p.costs, p.n_buckets * m, p.capacity, p.sizes, order=order)


def _levelled_bins(p: PackingProblem, m: int, items: SortedItems) -> np.ndarray | None:
    """Return the bins of ``levelled``, or None; NOWHERE for items without room."""
    if _is_large(p) and p.sizes.sum() > 0.99 * p.n_buckets * m * p.capacity:
        return None
    filled = _fill_indices(p, m, items.by_size)
    while filled is not None:
        bins, k = _with_the_rest(p, m, filled, by_cost=items.by_cost), filled.indices
        if k >= m - 1 or bins.min(initial=0) >= 0:
            return bins
        filled = _fill_indices(p, m, items.by_size, filled, k + max(1, (m - k) // 2))
    return None


@dataclass(frozen=True, slots=True, eq=False)
class PartialPacking:
    """A placement in progress: the bins of the first indices are filled as far as possible."""

    indices: int  # number of filled indices
    bins: np.ndarray  # int32: bin of every item; NOWHERE for the items left
    left: np.ndarray  # items without a bin, by falling size


def _fill_indices(
    p: PackingProblem,
    m: int,
    by_size: np.ndarray,
    before: PartialPacking | None = None,
    at_least: int = 0,
) -> PartialPacking | None:
    """Fill index after index while the most expensive item left costs more than the mean bin.

    No placement can make the index of such an item cheaper. ``before``: continue from it;
    ``at_least``: number of indices to fill. Return None if the remaining indices cannot hold the
    rest, or if the search would take too long.
    """
    if len(p.costs) * m > MUCH:
        return None
    n, k, bins, left = p.n_buckets, 0, np.full(len(p.costs), NOWHERE, np.int32), by_size
    if before is not None:
        k, bins, left = before.indices, before.bins.copy(), before.left
    costs, sizes = p.costs[left], p.sizes[left]
    tokens = int(sizes.sum())
    while k < m:
        mean, dearest = binpack.total(costs) / (n * (m - k)), float(costs.max(initial=0.0))
        if dearest <= mean and k >= at_least:
            break
        most = (1 + 2.0**-30) * max(dearest, mean)
        taken = binpack.fill_up(
            left, p.costs, p.sizes, n_bins=n, capacity=p.capacity or 2**62, most=most
        )
        stays = taken < 0
        going = np.flatnonzero(~stays)
        bins[left[going]] = taken[going] + np.int32(k * n)
        tokens -= int(sizes[going].sum())
        left, costs, sizes, k = left[stays], costs[stays], sizes[stays], k + 1
        if p.capacity and tokens > n * (m - k) * p.capacity:
            return None
    return PartialPacking(k, bins, left)


def _with_the_rest(
    p: PackingProblem,
    m: int,
    filled: PartialPacking,
    start: np.ndarray | None = None,
    *,
    by_cost: np.ndarray,
) -> np.ndarray:
    """Return the bins of all items, NOWHERE for items without room.

    LPT places the items left into the indices that are not filled yet. ``start``: initial loads of
    the bins of these indices. ``by_cost``: all items by falling cost.
    """
    bins, first = filled.bins.copy(), filled.indices * p.n_buckets
    left = np.flatnonzero(bins == NOWHERE)
    if len(left) and filled.indices < m:
        order = by_cost[bins[by_cost] == NOWHERE]
        if len(left) < len(bins):  # the numbers of the items among those left
            order = (np.cumsum(bins == NOWHERE) - 1)[order]
        costs, sizes = p.costs[left], p.sizes[left]
        rest = binpack.lpt(costs, m * p.n_buckets - first, p.capacity, sizes, start, order)
        bins[left] = np.where(rest == NOWHERE, NOWHERE, rest + np.int32(first))
    return bins


def alternating(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Return the best of three placements for ranks that wait after microbatches and after steps.

    The measure is the cost of the slowest rank plus that of the slowest bin of every index. The
    three are flat, levelled, and levelled with regard to bucket totals.
    """
    found = [f for f in (_with_totals(p, m), flat(p, m), levelled(p, m)) if f is not None]
    return min(found, key=lambda f: heaviest(p, f) + waited(p, f)) if found else None


def _with_totals(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Place as ``levelled``, but give a bucket with light bins more in its later microbatches."""
    n, items = p.n_buckets, SortedItems(p)
    filled = _fill_indices(p, m, items.by_size)
    if filled is None:
        return None
    k, bins = filled.indices, filled.bins.copy()
    placed = np.flatnonzero(bins >= 0)
    bucket_of, total = assign_buckets(loads_of(bins[placed], p.costs[placed], n * k).reshape(k, n))
    bins[placed] = bins[placed] // n * n + bucket_of[bins[placed]]
    start = np.tile(total / max(1, m - k), m - k)
    bins = _with_the_rest(p, m, replace(filled, bins=bins), start, by_cost=items.by_cost)
    if not fits(bins, p.sizes, n * m, p.capacity):
        return None
    loads = loads_of(bins, p.costs, n * m)
    bucket_of = even_out(
        np.tile(np.arange(n, dtype=np.int32), m), loads, n, LEVEL * p.bound(), moves=False
    )
    return _number_bins(p, bins, bucket_of, loads, m, "alternating", once=False)


def _number_bins(
    p: PackingProblem,
    bins: np.ndarray,
    bucket_of: np.ndarray,
    loads: np.ndarray,
    m: int,
    algorithm: str,
    once: bool,
) -> ItemPlacement:
    """Return the placement of bins whose buckets are known: assign their microbatch indices.

    Heavy bins come first in every bucket, so that the bins of an index have similar costs.
    """
    order = binpack.by_falling(loads)
    index_of = np.empty(len(loads), np.int32)
    index_of[order[order_by_key(bucket_of[order], len(loads) // m)]] = np.tile(
        np.arange(m, dtype=np.int32), len(loads) // m
    )
    microbatch = spread(
        bucket_of[bins], index_of[bins], p.costs, p.n_buckets, m, None if once else p.bound()
    )
    return ItemPlacement(
        bucket=bucket_of[bins], microbatch=microbatch, n_microbatches=m, algorithm=algorithm
    )


def own_bins(p: PackingProblem, m: int, once: bool = False) -> ItemPlacement | None:
    """Place over all bins at once by the problem's method; ``once`` as in ``_arrange``."""
    bins = bins_by(p.method, p.costs, p.n_buckets * m, p.capacity, p.sizes)
    return _arrange(p, bins, m, f"bins of {p.method}", once)


def own_bins_swapped(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Place as ``own_bins``, then swap bins between buckets until the buckets are level."""
    return own_bins(p, m, once=True)


def better_flat(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Place all bins at once: the better of flat and levelled.

    With one microbatch, ranks wait for each other once a step, whatever the objective.
    """
    if m == 1:
        return whole(p, m) or tight(p, m)
    if (best := _best_of_flat(p, m)) is not None:
        return best
    # two levels and best fit pack tighter than flat and levelled
    found = [f for f in (two_level(p, m), _best_fit(p, m)) if f is not None]
    return min(found, key=lambda f: waited(p, f)) if found else None


def _best_of_flat(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Return the better of flat and levelled; None if neither keeps the capacity.

    The loads of the bins tell it. Only the better one is arranged, unless a bin is empty: then a
    sample moves into it, which changes the loads.
    """
    items, n = SortedItems(p), p.n_buckets * m
    tried = {"flat": _flat_bins(p, m, items), "levelled": _levelled_bins(p, m, items)}
    kept = {
        name: bins
        for name, bins in tried.items()
        if bins is not None and fits(bins, p.sizes, n, p.capacity)
    }
    if any(np.bincount(bins, minlength=n).min() == 0 for bins in kept.values()):
        found = [f for name, b in kept.items() if (f := _arrange(p, b, m, name)) is not None]
        return min(found, key=lambda f: waited(p, f)) if found else None
    best, least = None, np.inf
    for name, bins in kept.items():
        loads = loads_of(bins, p.costs, n)
        slowest = loads[binpack.by_falling(loads)][:: p.n_buckets]  # of each index
        if (time := binpack.total(slowest)) < least:
            best, least = name, time
    return None if best is None else _arrange(p, kept[best], m, best)


def tight(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Place over all bins at once, for steps that are too full for ``two_level``.

    Then bins are swapped between buckets until the buckets are level.
    """
    found = [f for f in (flat(p, m, once=True), levelled(p, m, once=True)) if f is not None]
    return min(found, key=lambda f: heaviest(p, f)) if found else _best_fit(p, m, once=True)


def _best_fit(p: PackingProblem, m: int, once: bool = False) -> ItemPlacement | None:
    if _is_large(p):
        return None
    return _arrange(p, binpack.best_fit(p.sizes, p.n_buckets * m, p.capacity), m, "best fit", once)


def _is_large(p: PackingProblem) -> bool:
    return len(p.costs) > MANY and p.may_add(p.least_microbatches())


def _arrange(
    p: PackingProblem, bins: np.ndarray, m: int, algorithm: str, once: bool = False
) -> ItemPlacement | None:
    """Return the placement of filled bins: sort them by load, and divide them into indices.

    The heaviest bin of each index goes to the bucket with the lowest total so far. None if a bin
    exceeds the capacity.

    ``once``: ranks wait for each other once a step, so bins may change their bucket whatever their
    index.
    """
    n = p.n_buckets
    if not fits(bins, p.sizes, n * m, p.capacity):
        return None
    loads = loads_of(bins, p.costs, n * m)
    order = binpack.by_falling(loads)
    bucket_of, index_of = np.empty(n * m, np.int32), np.empty(n * m, np.int32)
    bucket_of[order] = assign_buckets(loads[order].reshape(m, n))[0]
    index_of[order] = np.repeat(np.arange(m, dtype=np.int32), n)
    if once:
        bucket_of = even_out(bucket_of, loads, n, LEVEL * p.bound(), moves=False)
        return _number_bins(p, bins, bucket_of, loads, m, algorithm, once)
    microbatch = spread(bucket_of[bins], index_of[bins], p.costs, n, m, p.bound())
    return ItemPlacement(
        bucket=bucket_of[bins], microbatch=microbatch, n_microbatches=m, algorithm=algorithm
    )
