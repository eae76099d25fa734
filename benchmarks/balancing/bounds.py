"""What no placement can pass, so that a missed target can be told from an impossible one."""

from __future__ import annotations

import numpy as np


def iteration_bound(costs: np.ndarray, n_ranks: int) -> float:
    """Slowest rank over the mean rank, at least: one rank computes the dearest sample."""
    return max(1.0, float(costs.max()) * n_ranks / float(costs.sum()))


def microbatch_bound(costs: np.ndarray, sizes: np.ndarray, n_ranks: int, context: int) -> float:
    """Sum of every microbatch's slowest rank over the mean rank, at least.

    Samples above half the context share no bin, so the dearest k * n_ranks + 1 of them stand in k +
    1 microbatch indices or more, whose slowest ranks take at least the costs number 0, n_ranks, 2
    n_ranks, ... of them. These k + 1 indices hold at most as much work as their tokens allow; what
    is left over takes its share of the mean. The best k counts. (For k = 0 any sample will do.)
    """
    total = float(costs.sum())
    alone = np.sort(costs[2 * sizes > context])[::-1][
        ::n_ranks
    ]  # costs number 0, n_ranks, ... of those that share no bin
    firsts = (
        alone if len(alone) and alone[0] >= costs.max() else np.array([costs.max(), *alone[1:]])
    )
    room = np.arange(1, len(firsts) + 1) * (n_ranks * context)
    left = total - most_work(costs, sizes, room)
    return max(1.0, float((np.cumsum(firsts) + left / n_ranks).max()) * n_ranks / total)


def most_work(costs: np.ndarray, sizes: np.ndarray, room: np.ndarray) -> np.ndarray:
    """The most cost that so many tokens can hold: dearest by token first, the last one in part."""
    order = np.argsort(-costs / sizes, kind="stable")
    held = np.concatenate([[0], np.cumsum(sizes[order])])
    work = np.concatenate([[0.0], np.cumsum(costs[order])])
    return np.interp(room, held, work)
