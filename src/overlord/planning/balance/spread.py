"""Distribute a step over its microbatches, so that none is empty while another can give a sample.

Runs keep stream order. Marks divide the items of a parent (a bucket, or the whole step) evenly by
count or by size. A mark that breaks the capacity moves as little as the capacity demands.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from overlord.array_order import by_key, number_inside
from overlord.planning.balance import binpack

LITTLE = 0.005  # share of the step that samples in otherwise empty microbatches may cost


def cut_inside(
    parent: np.ndarray,
    sizes: np.ndarray,
    *,
    n_parents: int,
    n_bins: int,
    capacity: int = 0,
    by_count: bool,
) -> np.ndarray:
    """Return the bin of every item: each parent's items in order, divided evenly into ``n_bins``.

    ``n_bins`` must be at least what next fit needs in every parent. A capacity of 0 means none. A
    parent with at least ``n_bins`` items has no empty bin. In a parent with fewer, every item has a
    bin of its own.
    """
    order, counts = by_key(parent, n_parents), np.bincount(parent, minlength=n_parents)
    size = sizes[order].astype(np.int64, copy=False)
    ends = np.concatenate([[0], np.cumsum(size)])
    first = np.cumsum(counts) - counts
    marks = even_marks(size, counts, n_bins, by_count=by_count)
    if capacity:
        held = np.diff(ends[first[:, None] + marks], axis=1)
        for p in np.flatnonzero((held > capacity).any(axis=1)).tolist():
            inside = (ends[first[p] : first[p] + counts[p] + 1] - ends[first[p]]).tolist()
            marks[p] = _within(inside, marks[p].tolist(), capacity)
    bins = np.empty(len(order), np.int32)
    bins[order] = np.repeat(
        np.tile(np.arange(n_bins, dtype=np.int32), n_parents), np.diff(marks, axis=1).reshape(-1)
    )
    return bins


def even_marks(
    size: np.ndarray, counts: np.ndarray, n_bins: int, *, by_count: bool, least: int = 1
) -> np.ndarray:
    """Return the first item of each bin in each parent: int64 [parents, n_bins + 1].

    ``size`` holds the items parent by parent. Every bin gets at least ``least`` items; if there are
    too few, counts are equal.
    """
    k, n = np.arange(n_bins + 1), counts[:, None]
    equal = k * (n // n_bins) + np.minimum(k, n % n_bins)
    if by_count:
        return equal
    item = np.repeat(np.arange(len(counts)), counts)
    ends = np.cumsum(size)
    total = np.bincount(item, weights=size, minlength=len(counts)).astype(np.int64)
    middle = 2 * (ends - (np.cumsum(total) - total)[item]) - size
    bins = np.minimum(middle * n_bins // (2 * np.maximum(total, 1))[item], n_bins - 1)
    held = np.bincount(item * n_bins + bins, minlength=len(counts) * n_bins).reshape(-1, n_bins)
    marks = np.concatenate([np.zeros((len(counts), 1), np.int64), np.cumsum(held, axis=1)], axis=1)
    marks = np.maximum.accumulate(marks - least * k, axis=1) + least * k
    marks = np.minimum(marks, n - least * (n_bins - k))
    return np.where(n <= least * n_bins, equal, marks)


def _within(ends: list[int], marks: list[int], capacity: int) -> list[int]:
    """Move the marks of one parent as little as the capacity demands.

    ``ends`` has its running size from 0 on.
    """
    n, m = len(ends) - 1, len(marks) - 1
    low = [0] * m + [n]  # an earlier start of bin k leaves no room for the rest
    for k in range(m - 1, 0, -1):
        low[k] = bisect_left(ends, ends[low[k + 1]] - capacity, 0, low[k + 1])
    found = [0] * m + [n]
    for k in range(1, m):
        begin = found[k - 1]
        full = bisect_right(ends, ends[begin] + capacity, begin) - 1
        found[k] = min(max(marks[k], low[k], begin + 1), full, n - (m - k))
    assert ends[n] - ends[found[m - 1]] <= capacity, "fewer bins than next fit needs"
    return found


def spread(
    bucket: np.ndarray,
    microbatch: np.ndarray,
    costs: np.ndarray,
    n_buckets: int,
    m: int,
    bound: float | None = None,
) -> np.ndarray:
    """Fill empty microbatches from others of the same bucket that hold several samples.

    Bucket totals stay as they are. ``bound``: the time of a step whose ranks wait after every
    microbatch. A sample then moves only if it makes no index slower, or all indices together by
    LITTLE of the step at most.
    """
    bins, limit = bucket.astype(np.int64) * m + microbatch, None
    if bound is not None:
        loads = np.bincount(bins, weights=costs, minlength=n_buckets * m).reshape(n_buckets, m)
        limit = np.maximum(loads.max(axis=0), LITTLE * bound / m)
    filled = none_empty(bins, costs, n_buckets, m, limit)
    return microbatch if filled is bins else (filled % m).astype(np.int32)


def none_empty(
    bins: np.ndarray,
    costs: np.ndarray,
    n_parents: int,
    n_bins: int,
    limit: np.ndarray | None = None,
) -> np.ndarray:
    """Give empty bins a sample of their parent: the cheapest that does not leave its own bin empty.

    ``bins`` counts over the parents: bin b of parent p is ``p * n_bins + b``. One item fits any
    bin, so no capacity is broken. ``limit``: bin b of any parent takes no item more expensive than
    ``limit[b]``.
    """
    counts = np.bincount(bins, minlength=n_parents * n_bins)
    empty = (counts == 0).reshape(n_parents, n_bins)
    gives = (counts > 1).reshape(n_parents, n_bins).any(axis=1) & empty.any(axis=1)
    if not gives.any():
        return bins
    order = binpack.by_falling(costs)
    order = order[by_key(bins[order], n_parents * n_bins)]
    spare = gives[bins[order] // n_bins]
    # the most expensive item of each bin stays
    spare[(np.cumsum(counts) - counts)[counts > 0]] = False
    items = np.sort(order[spare])
    items = items[binpack.by_falling(costs[items])[::-1]]
    parent = bins[items] // n_bins
    nth, wanted = number_inside(parent, n_parents), empty.sum(axis=1)
    taken = nth < wanted[parent]
    items, parent, nth = items[taken], parent[taken], nth[taken]
    # the cheapest go to the bins with the highest limits
    column = np.arange(n_bins) if limit is None else binpack.by_falling(limit)
    nth_empty = np.argsort(~empty[:, column], axis=1, kind="stable")
    bin_of = column[nth_empty[parent, nth]]
    if limit is not None:
        fits = costs[items] <= limit[bin_of]
        items, parent, bin_of = items[fits], parent[fits], bin_of[fits]
    filled = bins.copy()
    filled[items] = parent * n_bins + bin_of
    return filled
