"""Lower bounds of the time of a step, to tell a missed target from an impossible one."""

from __future__ import annotations

import numpy as np


def iteration_bound(costs: np.ndarray, n_ranks: int) -> float:
    """Return a lower bound of slowest over mean rank: one rank has the most expensive sample."""
    return max(1.0, float(costs.max()) * n_ranks / float(costs.sum()))


def microbatch_bound(costs: np.ndarray, sizes: np.ndarray, n_ranks: int, context: int) -> float:
    """Return a lower bound of the sum of every microbatch's slowest rank over the mean rank.

    Samples above half the context share no bin. So the most expensive k * n_ranks + 1 of them are
    in at least k + 1 microbatch indices. The slowest ranks of these indices take at least the costs
    number 0, n_ranks, 2 n_ranks and so on. These k + 1 indices hold at most as much work as their
    tokens allow; the remaining work takes its share of the mean. The largest bound over all k
    counts. For k = 0 any sample is valid.
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
    """Return the most cost that ``tokens`` can hold: the most expensive per token first.

    The last sample counts in part.
    """
    order = np.argsort(-costs / sizes, kind="stable")
    held = np.concatenate([[0], np.cumsum(sizes[order])])
    work = np.concatenate([[0.0], np.cumsum(costs[order])])
    return np.interp(room, held, work)
