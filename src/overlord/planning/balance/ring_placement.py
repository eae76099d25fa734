"""Places of rings on ranks.

``in_blocks`` places rings of a chain from the largest size to the smallest, those of a size by LPT
over its blocks. All ranks of a block then have the same tasks so far, and a ring starts on all its
members at once: no rank waits, and indices are equal and dense by themselves. ``side_by_side``
places few rings of whole nodes before them, whose sizes need not divide each other. ``listed``
places rings of any size on the least busy ranks, where members may wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.hashing import position_in_key
from overlord.planning.balance import binpack


@dataclass(frozen=True, slots=True, eq=False)
class Rings:
    """Rings in the order of their start, and the documents on them."""

    doc: np.ndarray  # int64
    task: np.ndarray  # int64: ring of each of these documents
    ptr: np.ndarray  # int64 [rings + 1]
    rank: np.ndarray  # int32, in ring order: rank[ptr[i]:ptr[i+1]] of ring i
    index: np.ndarray  # int64: microbatch, equal on all members
    end: np.ndarray  # float64 [ranks]: end of the last ring of each rank


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Documents on ranks ``first`` to ``first + size - 1`` each."""

    first: np.ndarray  # int64
    end: np.ndarray  # float64 [ranks]


def nest(
    seconds: np.ndarray, size: np.ndarray, chain: np.ndarray, ranks: int, wide: Wide | None = None
) -> Blocks:
    """Place documents on blocks of their size, the largest size first, each size by LPT.

    A block is free when the last of its ranks is: after ``wide`` documents its ranks may differ.
    """
    first = np.zeros(len(size), np.int64)
    end = np.zeros(ranks) if wide is None else wide.end.copy()
    for d in chain[::-1].tolist():
        rows = np.flatnonzero(size == d)
        if not len(rows):
            continue
        rows = rows[binpack.by_falling(seconds[rows])]
        blocks = ranks // d
        free = end[: blocks * d].reshape(blocks, d).max(axis=1)
        block = binpack.lpt(seconds[rows], blocks, start=free)
        first[rows] = block.astype(np.int64) * d
        more = np.bincount(block, weights=seconds[rows], minlength=blocks)
        used = np.repeat(np.bincount(block, minlength=blocks) > 0, d)
        end[: blocks * d][used] = np.repeat(free + more, d)[used]
    return Blocks(first, end)


@dataclass(frozen=True, slots=True, eq=False)
class Wide:
    """Documents on consecutive ranks before all others, each in a task of its own."""

    doc: np.ndarray  # int64, in the order of their start
    first: np.ndarray  # int64: its ranks are first to first + size - 1
    size: np.ndarray  # int64
    index: np.ndarray  # int64
    end: np.ndarray  # float64 [ranks]
    following: np.ndarray  # int64 [ranks]: the next index of each rank

    @staticmethod
    def none(ranks: int) -> Wide:
        whole = np.zeros(0, np.int64)
        return Wide(whole, whole, whole, whole, np.zeros(ranks), np.zeros(ranks, np.int64))


def side_by_side(
    docs: np.ndarray, seconds: np.ndarray, size: np.ndarray, *, ranks: int, node: int
) -> Wide:
    """Place documents on whole nodes, the largest rings first, where they start first.

    Every size, and the number of ranks, is a multiple of ``node``.
    """
    nodes = ranks // node
    end, following = np.zeros(nodes), np.zeros(nodes, np.int64)
    order = np.lexsort((-seconds, -size))
    first, index = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for i, (d, time) in enumerate(zip(size[order].tolist(), seconds[order].tolist(), strict=True)):
        width = d // node
        busy = np.lib.stride_tricks.sliding_window_view(end, width).max(axis=1)
        at = int(busy.argmin())
        here = slice(at, at + width)
        first[i], index[i] = at * node, following[here].max()
        end[here], following[here] = busy[at] + time, index[i] + 1
    by = np.argsort(index, kind="stable")
    return Wide(
        docs[order][by],
        first[by],
        size[order][by],
        index[by],
        np.repeat(end, node),
        np.repeat(following, node),
    )


def members(first: np.ndarray, size: np.ndarray) -> np.ndarray:
    """Return the ranks of blocks, one block after the other."""
    start = np.cumsum(size) - size
    ranks: np.ndarray = np.repeat(first - start, size) + np.arange(int(size.sum()))
    return ranks


def in_blocks(
    docs: np.ndarray,
    seconds: np.ndarray,
    size: np.ndarray,
    held: np.ndarray,
    chain: np.ndarray,
    *,
    capacity: int,
    wide: Wide,
) -> Rings:
    """Place documents on nested blocks; those of a block share tasks as far as they fit.

    ``held``: tokens of each on a rank. A document above the capacity has a task of its own.
    ``wide``: documents that are placed before.
    """
    ranks = len(wide.end)
    made = nest(seconds, size, chain, ranks, wide)
    order = np.lexsort((-seconds, made.first, -size))  # in a block by falling time
    first, d = made.first[order], size[order]
    begins = np.concatenate(([True], (first[1:] != first[:-1]) | (d[1:] != d[:-1])))[: len(order)]
    block = np.cumsum(begins) - 1
    n = int(block[-1]) + 1 if len(block) else 0
    inside = binpack.next_fit_inside(block, np.minimum(held[order], capacity), n, capacity)
    opens = np.concatenate(([True], inside[1:] != inside[:-1]))[: len(order)] | begins
    task = np.cumsum(opens) - 1
    first, d, block = first[opens], d[opens], block[opens]
    index = np.concatenate((wide.index, _indices(first, d, chain, wide.following)))
    first, d = np.concatenate((wide.first, first)), np.concatenate((wide.size, d))
    by = np.lexsort((first, index))
    number = np.empty(len(by), np.int64)
    number[by] = np.arange(len(by))
    task = np.concatenate((np.arange(len(wide.doc)), task + len(wide.doc)))
    return Rings(
        doc=np.concatenate((wide.doc, docs[order])),
        task=number[task],
        ptr=np.concatenate(([0], np.cumsum(d[by]))),
        rank=members(first[by], d[by]).astype(np.int32),
        index=index[by],
        end=made.end,
    )


def _indices(
    first: np.ndarray, size: np.ndarray, chain: np.ndarray, following: np.ndarray
) -> np.ndarray:
    """Return the index of every ring, given block by block, after those that ranks have."""
    index, following, ranks = np.zeros(len(first), np.int64), following.copy(), len(following)
    for d in chain[::-1].tolist():
        rows = np.flatnonzero(size == d)
        if not len(rows):
            continue
        at, blocks = first[rows] // d, ranks // d
        free = following[: blocks * d].reshape(blocks, d).max(axis=1)
        index[rows] = free[at] + position_in_key(at, blocks)
        number = np.bincount(at, minlength=blocks)
        used = np.repeat(number > 0, d)
        following[: blocks * d][used] = np.repeat(free + number, d)[used]
    return index


def listed(
    docs: np.ndarray, seconds: np.ndarray, size: np.ndarray, *, ranks: int, node: int
) -> Rings:
    """Place documents on the least busy ranks, the largest rings first; members may wait.

    A ring that fits a node takes the node where it starts first. A larger one takes the least busy
    nodes, and of the last of them the least busy ranks.
    """
    node = min(node, ranks)
    nodes = -(-ranks // node)
    end = np.full((nodes, node), np.inf)  # ranks that the last node does not have are never free
    end.reshape(-1)[:ranks] = 0.0
    width = np.minimum(node, ranks - node * np.arange(nodes))
    following = np.zeros(nodes * node, np.int64)
    order = np.lexsort((-seconds, -size))
    rank, index = [], np.empty(len(order), np.int64)
    for i, (d, time) in enumerate(zip(size[order].tolist(), seconds[order].tolist(), strict=True)):
        where = _in_a_node(end, d) if d <= node else _over_nodes(end, width, d)
        index[i] = following[where].max()
        following[where] = index[i] + 1
        flat = end.reshape(-1)
        flat[where] = flat[where].max() + time
        rank.append(where)
    ptr = np.concatenate(([0], np.cumsum(size[order])))
    found = np.concatenate(rank) if rank else np.zeros(0, np.int64)
    last = end.reshape(-1)[:ranks].copy()
    return Rings(docs[order], np.arange(len(order)), ptr, found.astype(np.int32), index, last)


def _in_a_node(end: np.ndarray, d: int) -> np.ndarray:
    at = int(np.partition(end, d - 1, axis=1)[:, d - 1].argmin())
    ranks: np.ndarray = at * end.shape[1] + np.sort(np.argsort(end[at], kind="stable")[:d])
    return ranks


def _over_nodes(end: np.ndarray, width: np.ndarray, d: int) -> np.ndarray:
    busy = np.where(np.isinf(end), -1.0, end).max(axis=1)
    by = np.argsort(busy, kind="stable")
    by = by[: int(np.searchsorted(np.cumsum(width[by]), d)) + 1]
    whole, last = np.sort(by[:-1]), int(by[-1])
    rest = d - int(width[whole].sum())
    some = np.sort(np.argsort(end[last], kind="stable")[:rest])
    ranks = (whole[:, None] * end.shape[1] + np.arange(end.shape[1])).reshape(-1)
    held = np.isfinite(end.reshape(-1)[ranks])
    return np.concatenate((ranks[held], last * end.shape[1] + some))
