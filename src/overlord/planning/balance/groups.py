"""Items inside parents: buckets inside groups of buckets, and bins inside buckets.

Each item gets a parent first. Then a method places the items of each parent separately.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from overlord.hashing import order_by_key
from overlord.planning.balance import binpack
from overlord.planning.balance.binpack import NOWHERE
from overlord.planning.balance.methods import bins_by, fits

if TYPE_CHECKING:
    from overlord.planning.balance.placement import PackingProblem

# methods that level costs; others deal items out by count, or are a user's
LEVELLING = ("greedy", "karmarkar_karp")


def nested(
    p: PackingProblem, parent: np.ndarray, n_parents: int, n_bins: int, capacity: int = 0
) -> np.ndarray:
    """Return the bin, 0 to ``n_bins`` - 1, of every item inside its parent, by the method.

    With many parents of few bins, ``greedy`` places the items of all parents in one call.
    """
    if n_bins == 1:
        return np.zeros(len(parent), np.int32)
    if p.method == "greedy" and n_parents >= binpack.FEW_BINS and n_bins <= n_parents:
        return binpack.pack_inside(
            parent, p.costs, p.sizes, n_parents=n_parents, n_bins=n_bins, capacity=capacity
        )
    bins = np.empty(len(parent), np.int32)
    for rows in rows_by(parent, n_parents):
        bins[rows] = bins_by(p.method, p.costs[rows], n_bins, capacity, p.sizes[rows])
    return bins


def rows_by(part: np.ndarray, n_parts: int) -> list[np.ndarray]:
    """Return the items of every part, each in stream order. ``part`` is by item."""
    return np.split(
        order_by_key(part, n_parts), np.cumsum(np.bincount(part, minlength=n_parts))[:-1]
    )


def by_groups(p: PackingProblem, size: int, room: int) -> np.ndarray:
    """Return the bucket of every item: the group first, then the bucket inside it.

    Groups have ``size`` buckets; the last one has the rest if ``size`` is not a divisor.
    """
    full, rest = divmod(p.n_buckets, size)
    if not rest:
        group = bins_by(p.method, p.costs, full, size * room, p.sizes)
        if not fits(group, p.sizes, full, size * room):
            return np.full(len(group), NOWHERE, np.int32)
        return _in_group(group, nested(p, group, full, size, room), size)
    group = _uneven_groups(p, size, room)
    if (group == NOWHERE).any():
        return np.full(len(group), NOWHERE, np.int32)
    bucket = np.empty(len(group), np.int32)
    for mine, n_groups, n_bins in ((group < full, full, size), (group == full, 1, rest)):
        some = replace(p, costs=p.costs[mine], sizes=p.sizes[mine], memory=None, substep=None)
        parent = group[mine] % full if n_groups == full else np.zeros(int(mine.sum()), np.int32)
        inside = nested(some, parent, n_groups, n_bins, room)
        bucket[mine] = _in_group(group[mine], inside, size)
    return bucket


def _in_group(group: np.ndarray, inside: np.ndarray, size: int) -> np.ndarray:
    return np.where(inside == NOWHERE, NOWHERE, group * np.int32(size) + inside).astype(np.int32)


def _uneven_groups(p: PackingProblem, size: int, room: int) -> np.ndarray:
    """Return the group of every item if the last group has fewer buckets than the others.

    An item that stands for the missing buckets, with their mean cost and their room, makes all
    groups equal; its group is the last one. Methods that do not level costs place over single
    buckets, and groups follow from these.
    """
    n_groups = -(-p.n_buckets // size)
    missing = n_groups * size - p.n_buckets
    if p.method not in LEVELLING:
        bucket = bins_by(p.method, p.costs, p.n_buckets, room, p.sizes)
        return bucket if (bucket == NOWHERE).any() else bucket // np.int32(size)
    costs = np.append(p.costs, binpack.total(p.costs) * missing / p.n_buckets)
    sizes = np.append(p.sizes, missing * room)
    group = bins_by(p.method, costs, n_groups, size * room, sizes)
    if not fits(group, sizes, n_groups, size * room):
        return np.full(len(p.costs), NOWHERE, np.int32)
    number = np.arange(n_groups, dtype=np.int32)
    number[[group[-1], n_groups - 1]] = n_groups - 1, group[-1]
    renamed: np.ndarray = number[group[:-1]]
    return renamed
