"""Pinned host memory that offload needs: the pool of every rank, and its limit. Pure.

``ot.offload`` keeps what it moves in a pool that grows to its peak: the sum over the microbatches
whose backward has not run, of ratio x tokens of the rank x bytes of a token. Without stages that is
one microbatch; with stages every rank is counted like stage 0 (``TaskRules.in_flight``).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.errors import PlanError
from overlord.plan.tasks import TaskRules, TaskTable

ROUNDING = 1e-6  # ratios are float32 and rounded up


@dataclass(frozen=True, slots=True, eq=False)
class HostPools:
    """Peak bytes of the pool of every rank, and the microbatch in which each is reached."""

    bytes: np.ndarray  # float64 [ranks]
    index: np.ndarray  # int64 [ranks]
    ratio: np.ndarray  # float64 [ranks]: of that microbatch

    def nodes(self, node: int) -> np.ndarray:
        """Return the bytes of all pools of every node: float64."""
        sums: np.ndarray = np.add.reduceat(self.bytes, np.arange(0, len(self.bytes), node))
        return sums


def host_pools(table: TaskTable, rules: TaskRules, held: np.ndarray) -> HostPools:
    """Return the pools of a step; ``held``: tokens of each row of ``table.task_rank``."""
    bounds, by = table.members(rules.ranks)
    task = table.task_of(by)
    ratio = table.offload[task].astype(np.float64)
    moved = ratio * held[by] * rules.host_bytes
    ends = np.concatenate((np.zeros(1), np.cumsum(moved)))
    rank = table.task_rank[by]
    at = np.arange(len(by))
    in_flight = ends[at + 1] - ends[np.maximum(bounds[rank], at + 1 - rules.in_flight())]
    # the first of the rows with the most bytes of each rank
    order = np.lexsort((at, -in_flight, rank))
    first = order[np.searchsorted(rank[order], np.arange(rules.ranks))[bounds[1:] > bounds[:-1]]]
    peak, index, share = (np.zeros(rules.ranks, t) for t in (np.float64, np.int64, np.float64))
    peak[rank[first]], index[rank[first]] = in_flight[first], table.index[task[first]]
    share[rank[first]] = ratio[first]
    return HostPools(peak, index, share)


def check_host_memory(table: TaskTable, rules: TaskRules, held: np.ndarray, step: int = -1) -> None:
    """Raise ``PlanError`` if the pools of a node need more host memory than it has."""
    if not rules.host_memory or not len(table):
        return
    pools = host_pools(table, rules, held)
    nodes = pools.nodes(rules.node)
    wrong = nodes > rules.host_memory * (1 + ROUNDING)
    if not wrong.any():
        return
    node = int(wrong.argmax())
    first = node * rules.node
    rank = first + int(pools.bytes[first : first + rules.node].argmax())
    raise PlanError(
        f"node {node}: expected at most {rules.host_memory:.12g} bytes of host memory for offload, "
        f"got {nodes[node]:.12g}; rank {rank} needs most, {pools.bytes[rank]:.12g} bytes in "
        f"microbatch {pools.index[rank]} at ratio {pools.ratio[rank]:.3g}",
        step,
        "give the task more ranks and a smaller offload ratio, or raise host_memory",
    )
