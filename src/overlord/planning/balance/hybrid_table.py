"""Table of tasks from placed rings and the ranks of short documents."""

from __future__ import annotations

import numpy as np

from overlord import ring
from overlord.hashing import position_in_key
from overlord.plan.tasks import TaskTable
from overlord.planning.balance import binpack
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.balance.rings import Rings
from overlord.planning.cost.ring import RingCosts


def build(
    length: np.ndarray,
    long: np.ndarray,
    placed: Rings,
    short: np.ndarray,
    rank: np.ndarray,
    costs: RingCosts,
    rules: HybridRules,
) -> tuple[TaskTable, np.ndarray, np.ndarray, np.ndarray]:
    """Return table, task, slot and load. Tasks are rings, packs of short documents in the free indices, and empty tasks."""
    n_rings = len(placed.doc)
    pack, pack_rank = packs(length[short], rank, rules)
    used = _used(placed, rules.ranks)
    pack_index = _free_index(used, pack_rank)
    ranks = np.concatenate((placed.rank, pack_rank)).astype(np.int32)
    size = np.concatenate((np.diff(placed.ptr), np.ones(len(pack_rank), np.int64)))
    index = np.concatenate((placed.index, pack_index))
    empty_rank, empty_index = _empty(ranks, np.repeat(index, size), rules)
    ranks = np.concatenate((ranks, empty_rank)).astype(np.int32)
    size = np.concatenate((size, np.ones(len(empty_rank), np.int64)))
    index = np.concatenate((index, empty_index))
    task = np.empty(len(length), np.int32)
    task[long[placed.doc]] = np.arange(n_rings)
    task[short] = pack + n_rings
    # tasks in their global order: by index, then as placed
    by = np.argsort(index, kind="stable")
    number = np.empty(len(by), np.int32)
    number[by] = np.arange(len(by))
    ptr = np.concatenate(([0], np.cumsum(size)))
    start, held = ptr[:-1][by], size[by]
    new_ptr = np.concatenate(([0], np.cumsum(held)))
    take = np.repeat(start - new_ptr[:-1], held) + np.arange(int(new_ptr[-1]))
    table = TaskTable(
        task_ptr=new_ptr.astype(np.int64),
        task_rank=ranks[take],
        index=index[by].astype(np.int32),
        order=np.arange(len(by), dtype=np.int64),
        offload=np.zeros(len(by), np.float32),
    )
    task = number[task] if len(by) else task
    slot = position_in_key(task.astype(np.int64), max(1, len(by)), np.int32)
    return table, task, slot, times(table, task, length, costs, rules)


def packs(
    length: np.ndarray, rank: np.ndarray, rules: HybridRules
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pack of every short document, and the rank of every pack."""
    held = ring.padded(length, 1, rules.multiple) if rules.multiple else length
    order = np.lexsort((-held, rank))
    inside = np.empty(len(rank), np.int64)
    inside[order] = binpack.next_fit_inside(rank[order], held[order], rules.ranks, rules.capacity)
    width = int(inside.max(initial=-1)) + 1
    key = rank.astype(np.int64) * max(1, width) + inside
    known, pack = np.unique(key, return_inverse=True)
    return pack, known // max(1, width)


def times(
    table: TaskTable, task: np.ndarray, length: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the end of every rank: a ring starts when its last member is free."""
    n = len(table)
    load = np.zeros(rules.ranks)
    if not n:
        return load
    exact = length.astype(np.float64)
    tokens = np.bincount(task, weights=exact, minlength=n)
    squares = np.bincount(task, weights=exact * exact, minlength=n)
    seconds = costs.seconds(tokens, squares, table.sizes(), crossing(table, rules.node))
    levels = np.searchsorted(table.index, np.arange(int(table.index[-1]) + 2))
    for first, last in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        if first == last:
            continue
        at = table.task_ptr[first : last + 1]
        ranks = table.task_rank[at[0] : at[-1]]
        end = np.maximum.reduceat(load[ranks], at[:-1] - at[0]) + seconds[first:last]
        load[ranks] = np.repeat(end, np.diff(at))
    return load


def crossing(table: TaskTable, node: int) -> np.ndarray:
    """Return whether each task has ranks of several nodes."""
    where = table.task_rank // node
    first = table.task_ptr[:-1]
    return np.maximum.reduceat(where, first) != np.minimum.reduceat(where, first)


def _used(placed: Rings, ranks: int) -> np.ndarray:
    """Return which indices of each rank have a ring: bool [ranks, indices]."""
    used = np.zeros((ranks, int(placed.index.max(initial=-1)) + 1), bool)
    used[placed.rank, np.repeat(placed.index, np.diff(placed.ptr))] = True
    return used


def _free_index(used: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """Return indices for packs, rank by rank: those without a ring first, then those behind."""
    ranks, width = used.shape
    nth = position_in_key(rank, ranks)
    free = width - used.sum(axis=1)
    by = np.argsort(used, axis=1, kind="stable")
    index = nth - free[rank] + width
    inside = nth < free[rank]
    index[inside] = by[rank[inside], nth[inside]]
    return index


def _empty(
    ranks: np.ndarray, index: np.ndarray, rules: HybridRules
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank and index of every empty task: in gaps of pipelines, and to pad counts."""
    counts = np.bincount(ranks, minlength=rules.ranks)
    ends = np.zeros(rules.ranks, np.int64)
    np.maximum.at(ends, ranks, index + 1)
    wanted = ends if rules.stages > 1 else counts
    if rules.equal_counts:
        wanted = np.full(rules.ranks, int(wanted.max(initial=0)))
    wanted = -(-wanted // rules.count_multiple) * rules.count_multiple
    missing = wanted - counts
    width = int(max(ends.max(initial=0), 0))
    used = np.zeros((rules.ranks, width), bool)
    used[ranks, index] = True
    where = np.repeat(np.arange(rules.ranks), missing)
    return where, _free_index(used, where)
