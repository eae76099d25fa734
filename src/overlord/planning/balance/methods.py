"""Balance methods: each is one function from costs to bins. ``register_balance`` adds yours."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from types import MappingProxyType
from typing import Any

import numpy as np

from overlord.checks import signature_problem
from overlord.errors import PlanError
from overlord.planning.balance import binpack
from overlord.planning.balance.binpack import NOWHERE

BalanceFn = Callable[[np.ndarray, int, int, np.ndarray], np.ndarray]


def greedy(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Return the bins by LPT: the most expensive item first, into the lightest bin with room.

    From 16 samples a bin on, the result is within 0.7 % of the lower bound.
    """
    return binpack.lpt(costs, n_bins, capacity, sizes)


def zigzag(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Return the bins by falling cost, back and forth over the bins: equal counts, worse balance.

    Capacity is ignored.
    """
    r = np.arange(len(costs)) % (2 * n_bins)
    bins = np.empty(len(costs), np.int32)
    bins[binpack.by_falling(costs)] = np.where(r < n_bins, r, 2 * n_bins - 1 - r)
    return bins


def none(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Return the bins of items in turn, in stream order, without balancing. Capacity is ignored."""
    return (np.arange(len(costs)) % n_bins).astype(np.int32)


def karmarkar_karp(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Return the bins by largest differencing, the method of the paper. Capacity is ignored.

    It equals LPT if the most expensive item dominates. A partial solution keeps its non-zero sums,
    rising, as (sum, node). Joining two solutions pairs the largest sums of one with the smallest of
    the other. A node stores the two nodes it was made of. Following these from the last solution
    gives the bins.
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
        # b's smallest sums are paired with a's smallest; the others with zeros
        paired = max(0, len(b) - zeros)
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


_METHODS: dict[str, BalanceFn] = {
    "greedy": greedy,
    "karmarkar_karp": karmarkar_karp,
    "zigzag": zigzag,
    "none": none,
}
BUILT_IN = tuple(_METHODS)  # users register others later
METHODS: Mapping[str, BalanceFn] = MappingProxyType(_METHODS)


def register_balance(
    name: str, fn: Callable[..., np.ndarray], *, capacity_aware: bool = True
) -> None:
    """Register a balance method as ``name``, for ``.balance(name)``.

    ``fn(costs, n_bins, capacity, sizes) -> bins`` returns 0 to n_bins - 1 for every item, or -1 if
    no bin has room. A capacity of 0 means no limit. ``capacity_aware=False``: the function is
    ``fn(costs, n_bins) -> bins``. The capacity is kept whatever a method returns: the cheapest
    items of overfull bins move to the lightest bins with room. The function must return the same
    result for the same arrays on every machine: no randomness, no clock.
    """
    if not isinstance(name, str) or not name or not callable(fn):
        raise PlanError(
            f"register_balance: expected a name and a function, got {name!r} and {fn!r}"
        )
    if name in BUILT_IN:
        raise PlanError(f"the balance method {name!r} is built in", remedy="choose another name")
    wanted = ("costs", "n_bins", "capacity", "sizes") if capacity_aware else ("costs", "n_bins")
    if problem := signature_problem(fn, wanted):
        remedy = (
            ""
            if not capacity_aware or signature_problem(fn, wanted[:2])
            else "give capacity_aware=False for a function without capacity"
        )
        raise PlanError(f"register_balance: {name!r} {problem}", remedy=remedy)
    _METHODS[name] = fn if capacity_aware else _by_cost_alone(fn)


def registered() -> dict[str, BalanceFn]:
    """Return the balance methods that users registered in this process."""
    return {name: fn for name, fn in _METHODS.items() if name not in BUILT_IN}


def restore(methods: Mapping[str, BalanceFn]) -> None:
    """Register balance methods that another process has registered."""
    _METHODS.update(methods)


def _by_cost_alone(fn: Callable[[np.ndarray, int], np.ndarray]) -> BalanceFn:
    def method(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
        return fn(costs, n_bins)

    method.__name__ = getattr(fn, "__name__", repr(fn))
    return method


def method_named(name: str) -> BalanceFn:
    if not isinstance(name, str) or name not in _METHODS:
        raise PlanError(
            f"expected a balance method, got {name!r}; known: {', '.join(sorted(_METHODS))}",
            remedy="add it with register_balance",
        )
    return _METHODS[name]


def bins_by(
    name: str, costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray
) -> np.ndarray:
    """Return the bins of a method by its name; raise ``PlanError`` for an invalid result.

    Items of overfull bins move to other bins; those without room have NOWHERE.
    """
    fn: Any = method_named(name)
    if not len(costs):
        return np.zeros(0, np.int32)
    bins = np.asarray(fn(costs, n_bins, capacity, sizes))
    if bins.shape != costs.shape or bins.dtype.kind not in "iu":
        raise PlanError(
            f"balance method {name!r}: expected {len(costs)} whole numbers, got shape "
            f"{bins.shape} of {bins.dtype}"
        )
    if len(bins) and not (int(bins.min()) >= NOWHERE and int(bins.max()) < n_bins):
        raise PlanError(
            f"balance method {name!r}: expected bins 0..{n_bins - 1} (or -1), got "
            f"{int(bins.min())}..{int(bins.max())}"
        )
    if not capacity and (bins == NOWHERE).any():
        raise PlanError(
            f"balance method {name!r}: without a capacity, expected a bin for every item, got -1 "
            f"(no bin) for {int((bins == NOWHERE).sum())} items; return -1 only if capacity is "
            "above 0"
        )
    bins = bins.astype(np.int32, copy=False)
    if capacity and name != "greedy" and not fits(bins, sizes, n_bins, capacity):
        return binpack.settle(bins, costs, sizes, n_bins, capacity)
    return bins


def fits(bins: np.ndarray, sizes: np.ndarray, n_bins: int, capacity: int) -> bool:
    """Return whether every item has a bin and no bin exceeds the capacity (0: no limit)."""
    if not len(bins):
        return True
    return int(bins.min()) >= 0 and (
        not capacity or loads_of(bins, sizes, n_bins).max() <= capacity
    )


def loads_of(bins: np.ndarray, amounts: np.ndarray, n_bins: int) -> np.ndarray:
    return np.bincount(bins, weights=amounts, minlength=n_bins)
