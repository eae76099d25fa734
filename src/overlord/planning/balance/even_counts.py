"""Placement with equal numbers of samples in all microbatches, whose costs are levelled. Pure.

Trainers that gather values of samples across ranks need equal counts on all ranks.
"""

from __future__ import annotations

import numpy as np

from overlord.planning.balance.binpack import by_falling
from overlord.planning.balance.placement import ItemPlacement


def even_counts(
    costs: np.ndarray, sizes: np.ndarray, n_buckets: int, microbatches: int, capacity: int
) -> ItemPlacement | None:
    """Return a placement whose microbatches have equal counts; None if no number of them fits.

    The number of microbatches is the smallest multiple of ``microbatches`` with which all samples
    fit. If the samples cannot be divided evenly, as in the last step of a job, counts differ by at
    most one.
    """
    n = len(costs)
    each = -(-n // (n_buckets * microbatches))
    divides = n % (n_buckets * microbatches) == 0
    for k in range(1, max(each, 1) + 1):
        if divides and each % k:
            continue
        bins = _levelled(costs, sizes, n_buckets * microbatches * k, capacity)
        if bins is not None:
            return ItemPlacement(
                bucket=(bins % n_buckets).astype(np.int32),
                microbatch=(bins // n_buckets).astype(np.int32),
                n_microbatches=microbatches * k,
                algorithm="even counts",
            )
    return None  # one sample to a microbatch is too large


def _levelled(
    costs: np.ndarray, sizes: np.ndarray, n_bins: int, capacity: int
) -> np.ndarray | None:
    """Return the bin of each item; None if a bin exceeds the capacity.

    Every round gives each bin one item: the most expensive item left goes to the cheapest bin. If
    costs and sizes disagree, levelling sizes may keep the capacity where levelling costs does not.
    """
    for by in (costs, sizes.astype(np.float64)):
        order, bins = by_falling(by), np.zeros(len(by), np.int64)
        load = np.zeros(n_bins)
        for at in range(0, len(order), n_bins):
            items = order[at : at + n_bins]
            cheapest = np.argsort(load, kind="stable")[: len(items)]
            bins[items] = cheapest
            load[cheapest] += by[items]
        if np.bincount(bins, weights=sizes, minlength=n_bins).max(initial=0) <= capacity:
            return bins
    return None
