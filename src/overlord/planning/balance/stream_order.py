"""Placement algorithms that keep the order of the stream, in buckets or in microbatches.

In arrival order a bucket has its items as they came. In runs every microbatch is a piece of the
stream, and only the buckets are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from overlord.planning.balance import binpack
from overlord.planning.balance.binpack import cut_inside, even_marks, none_empty
from overlord.planning.balance.groups import rows_by
from overlord.planning.balance.methods import bins_by, fits, loads_of
from overlord.planning.balance.placement import ItemPlacement, PackingProblem, assign_buckets, first


def arrival_inside(p: PackingProblem, bucket: np.ndarray) -> ItemPlacement:
    """Keep stream order in every bucket, divided evenly into microbatches.

    The division is by count with method ``none``, else by size.
    """
    needed = (
        int(binpack.next_fit_inside(bucket, p.sizes, p.n_buckets, p.capacity).max(initial=0)) + 1
        if p.capacity
        else 1
    )
    m = max(p.microbatches, needed)
    microbatch = cut_inside(
        bucket,
        p.sizes,
        n_parents=p.n_buckets,
        n_bins=m,
        capacity=p.capacity,
        by_count=p.method == "none",
    )
    return ItemPlacement(
        bucket=bucket, microbatch=microbatch, n_microbatches=m, algorithm="arrival order inside"
    )


def runs(p: PackingProblem, m: int) -> np.ndarray:
    """Return the run of every item, if the stream is divided into m runs of about equal size.

    Each run has an item for every bucket if there are enough.
    """
    marks = even_marks(p.sizes, np.array([len(p.sizes)]), m, by_count=False, least=p.n_buckets)
    return np.repeat(np.arange(m, dtype=np.int32), np.diff(marks[0]))


def in_runs(p: PackingProblem, m: int) -> ItemPlacement | None:
    """Use the k-th run of the stream as microbatch k of all buckets; only buckets are chosen."""
    return _deal_indices(p, runs(p, m), m, "runs of the stream")


def by_substep(p: PackingProblem) -> ItemPlacement:
    """Use each sub-draw as the next microbatch of all buckets.

    A sub-draw that does not fit into one takes as many microbatches as it needs.
    """
    assert p.substep is not None
    n = max(p.microbatches, int(p.substep.max(initial=0)) + 1)
    slot, done = np.zeros(len(p.costs), np.int32), 0
    for rows in rows_by(p.substep, n):
        part = PackingProblem(
            costs=p.costs[rows],
            sizes=p.sizes[rows],
            n_buckets=p.n_buckets,
            capacity=p.capacity,
            method=p.method,
        )
        found = first(part, (in_runs,))
        slot[rows], done = done + found.microbatch, done + found.n_microbatches
    placed = _deal_indices(p, slot, done, "sub-draws")
    assert placed is not None, "the same methods packed every part before"
    return placed


def _deal_indices(
    p: PackingProblem, slot: np.ndarray, m: int, algorithm: str
) -> ItemPlacement | None:
    """Balance the items of every index (``slot``) over the buckets; None if one does not fit.

    The heaviest bin of an index goes to the bucket with the lowest total so far.
    """
    bins = np.empty(len(slot), np.int64)
    for k, rows in enumerate(rows_by(slot, m)):
        if (found := _packed(p, rows)) is None:
            return None
        bins[rows] = found + k * p.n_buckets
    bins = none_empty(bins, p.costs, m, p.n_buckets)
    bucket_of, _ = assign_buckets(loads_of(bins, p.costs, m * p.n_buckets).reshape(m, p.n_buckets))
    return ItemPlacement(
        bucket=bucket_of[bins], microbatch=slot, n_microbatches=m, algorithm=algorithm
    )


def _packed(p: PackingProblem, rows: np.ndarray) -> np.ndarray | None:
    """Return the bucket of each of these items in one microbatch; None if they do not fit.

    The method is tried first, then greedy, then best fit.
    """
    costs, sizes = p.costs[rows], p.sizes[rows]
    tries: Sequence[Callable[[], np.ndarray]] = (
        lambda: bins_by(p.method, costs, p.n_buckets, p.capacity, sizes),
        lambda: bins_by("greedy", costs, p.n_buckets, p.capacity, sizes),
        lambda: binpack.best_fit(sizes, p.n_buckets, p.capacity),
    )
    return next(
        (bins for attempt in tries if fits(bins := attempt(), sizes, p.n_buckets, p.capacity)), None
    )
