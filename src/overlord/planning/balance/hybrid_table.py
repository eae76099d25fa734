"""Table of tasks from placed rings and the ranks of short documents."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from overlord import ring
from overlord.hashing import position_in_key
from overlord.plan.tasks import TaskTable
from overlord.planning.balance import binpack
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.balance.ring_placement import Rings
from overlord.planning.cost.ring import RingCosts
from overlord.sample import ranges


def build(
    length: np.ndarray, placed: Rings, short: np.ndarray, rank: np.ndarray, rules: HybridRules
) -> tuple[TaskTable, np.ndarray, np.ndarray]:
    """Return the table, and the tasks and slots of samples.

    Packs of short documents take the indices without a ring; empty tasks fill what is left.
    """
    pack, pack_rank = packs(length[short], rank, rules)
    pack_index = _free_index(placed.rank, _of_members(placed), pack_rank, rules.ranks)
    ranks = np.concatenate((placed.rank, pack_rank))
    index_of = np.concatenate((_of_members(placed), pack_index))
    empty_rank, empty_index = _empty(ranks, index_of, rules)
    single = len(pack_rank) + len(empty_rank)
    size = np.concatenate((np.diff(placed.ptr), np.ones(single, np.int64)))
    index = np.concatenate((placed.index, pack_index, empty_index))
    # the global order: by index, then rings before packs and packs before empty tasks
    by = np.argsort(index, kind="stable")
    number = np.empty(len(by), np.int32)
    number[by] = np.arange(len(by))
    task = np.empty(len(length), np.int32)
    task[placed.doc] = number[placed.task]
    task[short] = number[len(placed.index) + pack]
    table = TaskTable(
        task_ptr=np.concatenate(([0], np.cumsum(size[by]))).astype(np.int64),
        task_rank=_gathered(np.concatenate((ranks, empty_rank)), size, by).astype(np.int32),
        index=index[by].astype(np.int32),
        order=np.arange(len(by), dtype=np.int64),
        offload=np.zeros(len(by), np.float32),
    )
    slot = position_in_key(task, max(1, len(by)), np.int32)
    if rules.offload_share:
        held = tokens_of(table, task, length, rules)
        needed = (1 - rules.capacity / np.maximum(held, 1)) / rules.offload_share
        # a little more: the ratio is rounded
        ratio = np.where(held > rules.capacity, np.clip(needed + 1e-7, 0, 1), 0)
        table.offload[:] = np.nextafter(ratio.astype(np.float32), np.float32(1)) * (ratio > 0)
    return table, task, slot


def _of_members(placed: Rings) -> np.ndarray:
    return np.repeat(placed.index, np.diff(placed.ptr))


def _gathered(members: np.ndarray, size: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Return the members of tasks in another order: task ``by[0]`` first, then ``by[1]``, ...

    ``members``: of all tasks, task after task; ``size``: number of members of each task.
    """
    start = np.cumsum(size) - size
    held = size[by]
    first = np.cumsum(held) - held
    take = np.repeat(start[by] - first, held) + np.arange(int(held.sum()))
    gathered: np.ndarray = members[take]
    return gathered


def packs(
    length: np.ndarray, rank: np.ndarray, rules: HybridRules
) -> tuple[np.ndarray, np.ndarray]:
    """Return the pack of every short document, and the rank of every pack, rank by rank.

    The longest document goes first, into the fullest pack with room (best fit). A rank for which
    this takes more packs than next fit uses next fit.
    """
    held = ring.padded(length, 1, rules.multiple) if rules.multiple else length
    inside = np.zeros(len(rank), np.int64)
    order = np.lexsort((-held, rank))
    inside[order] = binpack.next_fit_inside(rank[order], held[order], rules.ranks, rules.capacity)
    width = int(inside.max(initial=0)) + 1
    if 1 < width <= MANY:
        tight = binpack.pack_inside(
            rank,
            held.astype(np.float64),
            held,
            n_parents=rules.ranks,
            n_bins=width,
            capacity=rules.capacity,
            tight=True,
        )
        failed = np.bincount(rank[tight < 0], minlength=rules.ranks) > 0
        inside = np.where(failed[rank], inside, tight)
    key = rank.astype(np.int64) * width + inside
    found = np.zeros(rules.ranks * width, bool)
    found[key] = True
    number = np.cumsum(found) - 1
    return number[key], np.flatnonzero(found) // width


MANY = 64  # packs of a rank above which next fit is good enough


def times(
    table: TaskTable, task: np.ndarray, length: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the time of every rank: a ring starts when its last member is free.

    With equal counts all ranks wait for each other after every microbatch. With stages it includes
    the time to fill and drain the pipeline.
    """
    load = np.zeros(rules.ranks)
    if not len(table):
        return load
    seconds = _seconds(table, task, length, costs, rules)
    levels = _levels(table)
    if rules.equal_counts:
        slowest = np.maximum.reduceat(seconds, levels[:-1])
        number = len(slowest) + (rules.stages - 1) / rules.virtual
        load[:] = binpack.total(slowest) / len(slowest) * number
        return load
    for first, last in zip(levels[:-1].tolist(), levels[1:].tolist(), strict=True):
        if first == last:
            continue
        at = table.task_ptr[first : last + 1]
        ranks = table.task_rank[at[0] : at[-1]]
        end = np.maximum.reduceat(load[ranks], at[:-1] - at[0]) + seconds[first:last]
        load[ranks] = np.repeat(end, np.diff(at))
    if rules.stages == 1:
        return load
    filled = (rules.stages - 1) / rules.virtual / np.maximum(1, table.counts(rules.ranks))
    return load + load * filled


def leveled_positions(
    table: TaskTable, task: np.ndarray, length: np.ndarray, costs: RingCosts, rules: HybridRules
) -> TaskTable:
    """Return the table with some rings reversed, so that ranks have late positions equally often.

    A later position of a ring takes a few percent longer: more of its blocks have all queries, and
    their outputs must be merged. ``rules.groups`` other than "any" have a fixed order.
    """
    if rules.groups != "any" or not len(table):
        return table
    seconds = _seconds(table, task, length, costs, rules)
    late = np.zeros(rules.ranks)  # seconds at late positions, less those at early ones
    ring_rank = table.task_rank.copy()
    for first, last in pairwise(_levels(table).tolist()):
        if first == last:
            continue
        at = table.task_ptr[first : last + 1]
        members, size = slice(int(at[0]), int(at[-1])), np.diff(at)
        place, width = ranges(np.zeros(len(size), np.int64), size), np.repeat(size, size)
        lag = np.repeat(seconds[first:last], size) * (2 * place - width + 1) / width
        ranks = table.task_rank[members]
        worse = np.add.reduceat(late[ranks] * lag, at[:-1] - at[0]) > 0
        turned = np.repeat(worse, size)
        late[ranks] += np.where(turned, -lag, lag)
        mirror = np.arange(len(place)) + width - 1 - 2 * place
        ring_rank[members] = np.where(turned, ranks[mirror], ranks)
    return replace(table, task_rank=ring_rank)


def _levels(table: TaskTable) -> np.ndarray:
    """Return the first task of every microbatch index, and the number of tasks."""
    found: np.ndarray = np.searchsorted(table.index, np.arange(int(table.index[-1]) + 2))
    return found


def _seconds(
    table: TaskTable, task: np.ndarray, length: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the time of every task."""
    exact = length.astype(np.float64)
    tokens = np.bincount(task, weights=exact, minlength=len(table))
    squares = np.bincount(task, weights=exact * exact, minlength=len(table))
    return costs.seconds(tokens, squares, table.sizes(), _crosses(table, rules.node))


def _crosses(table: TaskTable, node: int) -> np.ndarray:
    """Return whether each task has ranks of several nodes."""
    where = table.task_rank // node
    first = table.task_ptr[:-1]
    return np.maximum.reduceat(where, first) != np.minimum.reduceat(where, first)


def tokens_of(
    table: TaskTable, task: np.ndarray, length: np.ndarray, rules: HybridRules
) -> np.ndarray:
    """Return the tokens of the fullest member of each task: int64."""
    d = table.sizes()[task]
    held = table.held(task, ring.padded(length, d, rules.multiple) if rules.multiple else length)
    return np.maximum.reduceat(held, table.task_ptr[:-1]) if len(table) else held


def memory_of(
    table: TaskTable, task: np.ndarray, length: np.ndarray, rules: HybridRules
) -> np.ndarray:
    """Return the tokens whose activations stay on the fullest member of each task: float64."""
    held = tokens_of(table, task, length, rules)
    return held * (1 - rules.offload_share * table.offload.astype(np.float64))


def _free_index(
    taken_rank: np.ndarray, taken_index: np.ndarray, rank: np.ndarray, ranks: int
) -> np.ndarray:
    """Return indices for more tasks of ranks: first free ones, then those after the last in use."""
    width = int(taken_index.max(initial=-1)) + 1
    used = np.zeros((ranks, width), bool)
    used[taken_rank, taken_index] = True
    nth = position_in_key(rank, ranks)
    free = (width - used.sum(axis=1))[rank]
    by = np.argsort(used, axis=1, kind="stable")
    index = nth - free + width
    inside = nth < free
    index[inside] = by[rank[inside], nth[inside]]
    return index


def _empty(
    ranks: np.ndarray, index: np.ndarray, rules: HybridRules
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rank and index of every empty task: in gaps of pipelines, and to pad counts."""
    counts = np.bincount(ranks, minlength=rules.ranks)
    wanted = counts
    if rules.stages > 1 or rules.equal_counts:  # no index without a task
        wanted = np.zeros(rules.ranks, np.int64)
        np.maximum.at(wanted, ranks, index + 1)
    if rules.equal_counts:
        wanted = np.full(rules.ranks, int(wanted.max(initial=0)))
    wanted = -(-wanted // rules.count_multiple) * rules.count_multiple
    where = np.repeat(np.arange(rules.ranks), wanted - counts)
    return where, _free_index(ranks, index, where, rules.ranks)
