"""Static context parallelism and whole documents on ranks, as tasks: what a hybrid plan replaces."""

from __future__ import annotations

import numpy as np

from overlord.plan.tasks import TaskTable
from overlord.planning.balance import binpack
from overlord.planning.cost.ring import RingCosts


def static(
    lengths: np.ndarray, ranks: int, capacity: int, context: int
) -> tuple[TaskTable, np.ndarray]:
    """Pack documents to the context in arrival order; packs go to groups of equal size in turn."""
    d = max(1, -(-context // capacity))
    groups = max(1, ranks // d)
    pack = binpack.next_fit(lengths, context)
    n = int(pack.max(initial=-1)) + 1
    number = np.arange(n)
    return _table(number % groups, number // groups, min(d, ranks)), pack.astype(np.int64)


def static_balanced(
    lengths: np.ndarray, ranks: int, capacity: int, context: int, costs: RingCosts
) -> tuple[TaskTable, np.ndarray]:
    """Divide documents over the groups by LPT on cost, and pack each share to the context."""
    d = max(1, -(-context // capacity))
    groups = max(1, ranks // d)
    group = binpack.lpt(costs({"tokens": lengths}), groups)
    inside = binpack.next_fit_inside(group, lengths, groups, context).astype(np.int64)
    width = int(inside.max(initial=0)) + 1
    known, pack = np.unique(group * width + inside, return_inverse=True)
    return _table(known // width, known % width, min(d, ranks)), pack


def _table(group: np.ndarray, index: np.ndarray, d: int) -> TaskTable:
    ranks = (group[:, None] * d + np.arange(d)).astype(np.int32)
    return TaskTable(
        task_ptr=np.arange(len(group) + 1, dtype=np.int64) * d,
        task_rank=ranks.reshape(-1),
        index=index.astype(np.int32),
        order=np.argsort(np.argsort(index, kind="stable"), kind="stable").astype(np.int64),
        offload=np.zeros(len(group), np.float32),
    )


def whole(lengths: np.ndarray, ranks: int, costs: RingCosts) -> np.ndarray:
    """Return the time of ranks that hold whole documents (LPT), without a limit of memory."""
    cost = costs({"tokens": lengths})
    bins = binpack.lpt(cost, ranks)
    return np.bincount(bins, weights=cost, minlength=ranks)
