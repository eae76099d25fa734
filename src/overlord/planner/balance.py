"""Balancing: which bucket and microbatch each item goes to, so that no rank waits for another.

A *method* is one function, ``fn(costs, n_bins, capacity, sizes) -> bins``; ``register_balance`` adds yours. ``place``
applies it to buckets and microbatches. Cost (what a bin takes to compute) and size (tokens it must hold) are separate
arrays. Two objectives: ``iteration`` for ranks that meet once per step (balance buckets, then the microbatches inside
each), ``microbatch`` for ranks that meet after every microbatch (balance all bins at once).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from types import MappingProxyType

import numpy as np

from overlord.errors import PlanError
from overlord.planner import kernel
from overlord.planner.kernel import NOWHERE

BalanceFn = Callable[[np.ndarray, int, int, np.ndarray], np.ndarray]
LEVELS = ("both", "inter", "intra", "interleaved")
OBJECTIVES = ("iteration", "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Bucket and microbatch of every item, and by which way they were found."""

    bucket: np.ndarray  # int32
    microbatch: np.ndarray  # int32
    n_microbatches: int
    way: str


def greedy(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """LPT: dearest first into the lightest bin with room. Within 0.7 % of the bound from 16 samples a bin on."""
    return kernel.lpt(costs, n_bins, capacity, sizes)


def zigzag(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Dearest first, to and fro over the bins: equal counts, worse balance. Knows no capacity."""
    r = np.arange(len(costs)) % (2 * n_bins)
    bins = np.empty(len(costs), np.int32)
    bins[kernel.by_falling(costs)] = np.where(r < n_bins, r, 2 * n_bins - 1 - r)
    return bins


def none(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Round robin in stream order."""
    return (np.arange(len(costs)) % n_bins).astype(np.int32)


def karmarkar_karp(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Largest differencing. Knows no capacity; equals LPT wherever the dearest item sticks out (offered for parity with the paper).

    A partial solution keeps its sums that are not zero, rising, as (sum, node). Joining two pairs the largest sums of one
    with the smallest of the other; a node remembers the two it was made of, and the tree is walked back at the end.
    """
    n = len(costs)
    left, right = [-1] * n, [-1] * n
    heap: list[tuple[float, int, list[tuple[float, int]]]] = []
    for i, cost in enumerate(costs.tolist()):
        heap.append((-cost if n_bins > 1 else 0.0, i, [(cost, i)]))
    heapify(heap)
    for serial in range(n, 2 * n - 1):
        a, b = heappop(heap)[2], heappop(heap)[2]
        if len(b) > len(a):
            a, b = b, a
        zeros = n_bins - len(a)
        paired = max(0, len(b) - zeros)  # b's smallest sums meet a's smallest; the others meet zeros
        fresh = b[paired:]
        for (x, p), (y, q) in zip(a[:paired], reversed(b[:paired]), strict=True):
            fresh.append((x + y, len(left)))
            left.append(p)
            right.append(q)
        del a[:paired]
        for entry in fresh:
            insort(a, entry)
        spread = a[-1][0] - (a[0][0] if len(a) == n_bins else 0.0)
        heappush(heap, (-spread, serial, a))
    bin_of = [0] * len(left)
    for k, (_, node) in enumerate(heap[0][2] if heap else []):
        bin_of[node] = k
    for node in range(len(left) - 1, n - 1, -1):
        bin_of[left[node]] = bin_of[right[node]] = bin_of[node]
    return np.array(bin_of[:n], np.int32)


_METHODS: dict[str, BalanceFn] = {"greedy": greedy, "karmarkar_karp": karmarkar_karp, "zigzag": zigzag, "none": none}
METHODS: Mapping[str, BalanceFn] = MappingProxyType(_METHODS)


def register_balance(name: str, fn: BalanceFn) -> None:
    """Make ``fn(costs, n_bins, capacity, sizes) -> bins`` known as ``name``. Bins are 0..n_bins-1, -1 where nothing has room."""
    if name in ("greedy", "none"):
        raise PlanError(f"the balance method {name!r} is built in", remedy="choose another name")
    _METHODS[name] = fn


def method_named(name: str) -> BalanceFn:
    if name not in _METHODS:
        raise PlanError(f"unknown balance method {name!r}; known: {', '.join(sorted(_METHODS))}", remedy="add it with register_balance")
    return _METHODS[name]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Items to place into ``n_buckets`` x M bins of ``capacity``; M is at least ``microbatches`` and grows until all fits."""

    costs: np.ndarray  # float64, none negative
    sizes: np.ndarray  # int64
    n_buckets: int
    microbatches: int = 1
    capacity: int = 0  # 0: none, then M never grows
    group_size: int | None = None
    method: str = "greedy"

    def least_microbatches(self) -> int:
        """No placement needs fewer: all tokens must fit, and items above half the capacity share no bin."""
        if not self.capacity or not len(self.sizes):
            return self.microbatches
        by_tokens = -(-int(self.sizes.sum()) // (self.n_buckets * self.capacity))
        by_large = -(-int((2 * self.sizes > self.capacity).sum()) // self.n_buckets)
        return max(self.microbatches, by_tokens, by_large)


def place(problem: Problem, *, level: str = "both", objective: str = "iteration", keep_order: bool = False) -> Placement:
    """Buckets and microbatches for all items; the capacity is kept whatever the method does."""
    _check(problem, level, objective, keep_order)
    if level == "inter" or problem.method == "none":
        return _arrival_inside(problem, _buckets(problem, 0))
    if level == "intra":
        return _first(problem, (_inside_round_robin,))
    if keep_order:
        return _first(problem, (_in_runs,))
    if objective == "microbatch":
        return _first(problem, (_better_flat, _best_fit))
    return _first(problem, (_two_level, _flat, _best_fit))


def _check(p: Problem, level: str, objective: str, keep_order: bool) -> None:
    for what, found, known in (("level", level, LEVELS), ("objective", objective, OBJECTIVES)):
        if found not in known:
            raise PlanError(f"unknown balance {what} {found!r}; known: {', '.join(known)}")
    method_named(p.method)
    if level == "interleaved":
        raise PlanError('level "interleaved" is not available in this version', remedy='use "both"')
    if level != "both" and (objective == "microbatch" or keep_order):
        raise PlanError(f'level {level!r} goes with objective "iteration" and without keep_order', remedy='use level "both"')
    if p.group_size is not None and (p.group_size < 1 or p.n_buckets % p.group_size):
        raise PlanError(f"group_size: wanted a divisor of the {p.n_buckets} buckets, found {p.group_size}")
    if len(p.costs) and not (np.isfinite(p.costs).all() and p.costs.min() >= 0):
        raise PlanError("a cost is negative, infinite or no number", remedy="mend the cost function")
    if p.capacity and len(p.sizes) and int(p.sizes.max()) > p.capacity:
        i = int(p.sizes.argmax())
        raise PlanError(f"item {i} has {int(p.sizes[i])} tokens with its padding, more than the {p.capacity} of a microbatch")


def _first(p: Problem, ways: Iterable[Callable[[Problem, int], Placement | None]]) -> Placement:
    """The first way that keeps the capacity, with as few microbatches as any of them needs."""
    ways, m = tuple(ways), p.least_microbatches()
    while True:
        for way in ways:
            if (found := way(p, m)) is not None:
                return found
        m += 1


def _two_level(p: Problem, m: int) -> Placement | None:
    """Buckets by cost, then the microbatches of each bucket: the bucket totals come out within a fraction of a percent."""
    bucket = _buckets(p, m)
    if not _fits(bucket, p.sizes, p.n_buckets, m * p.capacity):
        return None
    microbatch = _inside(p, bucket, m)
    if microbatch is None:
        return None
    return Placement(bucket=bucket, microbatch=microbatch, n_microbatches=m, way="two-level")


def _buckets(p: Problem, m: int) -> np.ndarray:
    """Bucket of every item. With groups: first over groups, then inside each, which loses nothing against one pass."""
    fn, room = method_named(p.method), m * p.capacity
    if p.group_size is None or p.group_size == p.n_buckets:
        return _bins(fn, p.costs, p.n_buckets, room, p.sizes)
    n_groups, size = p.n_buckets // p.group_size, p.group_size
    group = _bins(fn, p.costs, n_groups, size * room, p.sizes)
    if not _fits(group, p.sizes, n_groups, size * room):
        return np.full(len(group), NOWHERE, np.int32)
    inside = _nested(p, group, n_groups, size, room)
    return np.where(inside == NOWHERE, NOWHERE, group * np.int32(size) + inside).astype(np.int32)


def _inside(p: Problem, bucket: np.ndarray, m: int) -> np.ndarray | None:
    """Microbatches inside every bucket; a bucket that LPT cannot pack is packed tightly instead."""
    bins = _nested(p, bucket, p.n_buckets, m, p.capacity)
    if not p.capacity:
        return bins
    flat = bucket.astype(np.int64) * m + bins
    over = np.zeros(p.n_buckets, bool)
    over[bucket[bins == NOWHERE]] = True
    over |= (_loads(flat[bins >= 0], p.sizes[bins >= 0], p.n_buckets * m) > p.capacity).reshape(-1, m).any(axis=1)
    if not over.any():
        return bins
    redo = np.flatnonzero(over[bucket])
    number = np.cumsum(over) - 1  # overfull buckets, counted
    again = kernel.pack_inside(
        number[bucket[redo]], p.costs[redo], p.sizes[redo],
        n_parents=int(over.sum()), n_bins=m, capacity=p.capacity, tight=True,
    )  # fmt: skip
    bins[redo] = again
    return None if (again == NOWHERE).any() else bins


def _nested(p: Problem, parent: np.ndarray, n_parents: int, n_bins: int, capacity: int) -> np.ndarray:
    """The method inside every parent. Greedy does all parents in one sweep when they are many and their bins few."""
    if n_bins == 1:
        return np.zeros(len(parent), np.int32)
    if p.method == "greedy" and n_parents >= kernel.FEW_BINS and n_bins <= n_parents:
        return kernel.pack_inside(parent, p.costs, p.sizes, n_parents=n_parents, n_bins=n_bins, capacity=capacity)
    bins = np.empty(len(parent), np.int32)
    for rows in np.split(kernel.by_key(parent, n_parents), np.cumsum(np.bincount(parent, minlength=n_parents))[:-1]):
        bins[rows] = _bins(method_named(p.method), p.costs[rows], n_bins, capacity, p.sizes[rows])
    return bins


def _inside_round_robin(p: Problem, m: int) -> Placement | None:
    bucket = none(p.costs, p.n_buckets, 0, p.sizes)
    if not _fits(bucket, p.sizes, p.n_buckets, m * p.capacity):
        return None
    microbatch = _inside(p, bucket, m)
    if microbatch is None:
        return None
    return Placement(bucket=bucket, microbatch=microbatch, n_microbatches=m, way="round robin, balanced inside")


def _arrival_inside(p: Problem, bucket: np.ndarray) -> Placement:
    """Inside a bucket samples stay in stream order, cut where a microbatch is full."""
    if not p.capacity:
        microbatch = _runs(p, p.microbatches)
        return Placement(bucket=bucket, microbatch=microbatch, n_microbatches=p.microbatches, way="arrival order inside")
    microbatch = kernel.next_fit_inside(bucket, p.sizes, p.n_buckets, p.capacity)
    m = max(p.microbatches, int(microbatch.max(initial=0)) + 1)
    return Placement(bucket=bucket, microbatch=microbatch, n_microbatches=m, way="arrival order inside")


def _runs(p: Problem, m: int) -> np.ndarray:
    """The stream cut into m consecutive runs of about equal size."""
    total = max(1, int(p.sizes.sum()))
    middle = 2 * np.cumsum(p.sizes, dtype=np.int64) - p.sizes
    return np.minimum(middle * m // (2 * total), m - 1).astype(np.int32)


def _in_runs(p: Problem, m: int) -> Placement | None:
    """Microbatch k of all buckets together is the k-th run of the stream; only buckets are chosen."""
    run = _runs(p, m)
    bucket = np.empty(len(run), np.int32)
    for rows in np.split(np.arange(len(run)), np.searchsorted(run, np.arange(1, m))):
        for fn in (method_named(p.method), greedy):
            bins = _bins(fn, p.costs[rows], p.n_buckets, p.capacity, p.sizes[rows])
            if fits := _fits(bins, p.sizes[rows], p.n_buckets, p.capacity):
                break
        if not fits:
            return None
        bucket[rows] = bins
    return Placement(bucket=bucket, microbatch=run, n_microbatches=m, way="runs of the stream")


def _flat(p: Problem, m: int) -> Placement | None:
    bins = _bins(greedy, p.costs, p.n_buckets * m, p.capacity, p.sizes)
    return _arranged(p, bins, m, "flat")


def _levelled(p: Problem, m: int) -> Placement | None:
    """LPT towards a height per microbatch index: the dear items share the first indices, which are topped up to match."""
    dear = p.costs[kernel.by_falling(p.costs)][:: p.n_buckets][:m]  # the dearest item that index k cannot avoid
    least = np.zeros(m)
    least[: len(dear)] = dear
    heights = _water(least, float(np.cumsum(p.costs)[-1]) / p.n_buckets if len(p.costs) else 0.0)
    bins = kernel.lpt(p.costs, p.n_buckets * m, p.capacity, p.sizes, start=-np.repeat(heights, p.n_buckets))
    return _arranged(p, bins, m, "levelled")


def _water(least: np.ndarray, total: float) -> np.ndarray:
    """Heights no lower than ``least`` (falling) that sum to ``total``, as level as can be."""
    for k in range(len(least)):  # the first k stand out of the water
        level = (total - float(np.cumsum(least[:k])[-1] if k else 0.0)) / (len(least) - k)
        if level >= least[k]:
            return np.maximum(least, level)
    return least


def _better_flat(p: Problem, m: int) -> Placement | None:
    """All bins at once, by the method; for greedy the better of flat and levelled."""
    if p.method != "greedy":
        mine = _arranged(p, _bins(method_named(p.method), p.costs, p.n_buckets * m, p.capacity, p.sizes), m, "flat")
        return mine or _flat(p, m)
    found = [f for f in (_flat(p, m), _levelled(p, m)) if f is not None]
    return min(found, key=lambda f: _waited(p, f)) if found else None


def _waited(p: Problem, found: Placement) -> float:
    """Time of a step whose ranks meet after every microbatch: the slowest of each index, summed."""
    flat = found.microbatch.astype(np.int64) * p.n_buckets + found.bucket
    loads = _loads(flat, p.costs, p.n_buckets * found.n_microbatches).reshape(-1, p.n_buckets)
    return float(np.cumsum(loads.max(axis=1))[-1])


def _best_fit(p: Problem, m: int) -> Placement | None:
    return _arranged(p, kernel.best_fit(p.sizes, p.n_buckets * m, p.capacity), m, "best fit")


def _arranged(p: Problem, bins: np.ndarray, m: int, way: str) -> Placement | None:
    """Bins sorted by load and cut into microbatch indices, the heaviest of each going to the bucket that has least so far."""
    n = p.n_buckets
    if not _fits(bins, p.sizes, n * m, p.capacity):
        return None
    loads = _loads(bins, p.costs, n * m)
    order = kernel.by_falling(loads)
    bucket_of, index_of, total = np.empty(n * m, np.int32), np.empty(n * m, np.int32), np.zeros(n)
    for k in range(m):
        chunk = order[k * n : (k + 1) * n]
        poorest = np.argsort(total, kind="stable")
        bucket_of[chunk], index_of[chunk] = poorest, k
        total[poorest] += loads[chunk]
    return Placement(bucket=bucket_of[bins], microbatch=index_of[bins], n_microbatches=m, way=way)


def _bins(fn: BalanceFn, costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """What a method says, checked: methods are the user's own code."""
    bins = np.asarray(fn(costs, n_bins, capacity, sizes))
    name = getattr(fn, "__name__", repr(fn))
    if bins.shape != costs.shape or bins.dtype.kind not in "iu":
        raise PlanError(f"balance method {name!r}: wanted {len(costs)} whole numbers, found shape {bins.shape} of {bins.dtype}")
    if len(bins) and not (int(bins.min()) >= NOWHERE and int(bins.max()) < n_bins):
        raise PlanError(f"balance method {name!r}: wanted bins 0..{n_bins - 1} (or -1), found {int(bins.min())}..{int(bins.max())}")
    if not capacity and (bins == NOWHERE).any():
        raise PlanError(f"balance method {name!r} left items without a bin although there is no capacity")
    return bins.astype(np.int32, copy=False)


def _fits(bins: np.ndarray, sizes: np.ndarray, n_bins: int, capacity: int) -> bool:
    if not len(bins):
        return True
    return int(bins.min()) >= 0 and (not capacity or _loads(bins, sizes, n_bins).max() <= capacity)


def _loads(bins: np.ndarray, amounts: np.ndarray, n_bins: int) -> np.ndarray:
    return np.bincount(bins, weights=amounts, minlength=n_bins)
