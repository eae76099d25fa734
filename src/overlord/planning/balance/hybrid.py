"""Schedule of a hybrid step: the ring of every long document, and the rank of every short one.

Long documents come first, by falling time, each on the least busy ranks. Short ones fill the ends
(LPT). A rank packs its short documents into microbatches of the capacity. All choices are
deterministic; ties go to the lower rank, task or sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.plan.tasks import TaskTable
from overlord.planning.balance import binpack, hybrid_table, rings
from overlord.planning.balance.hybrid_rules import HybridRules, check
from overlord.planning.cost.ring import RingCosts

__all__ = ["HybridPlan", "HybridRules", "schedule"]


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The tasks of a step, and the task of every sample."""

    tasks: TaskTable
    task: np.ndarray  # int32 [samples]
    slot: np.ndarray  # int32 [samples]: place in its task
    load: np.ndarray  # float64 [ranks]: modelled time of each rank, with waits for its rings


def schedule(lengths: np.ndarray, costs: RingCosts, rules: HybridRules) -> HybridPlan:
    """Return the schedule of documents of these lengths."""
    check(lengths, rules)
    length = np.asarray(lengths, np.int64)
    size = rings.sizes(length, costs, rules)
    long = np.flatnonzero(size > 1)
    placed = rings.place(length[long], size[long], costs, rules)
    short = np.flatnonzero(size == 1)
    one = np.ones(len(short), np.int64)
    cost = costs.seconds(length[short], length[short].astype(float) ** 2, one, one > 1)
    work = cost - costs.coefficients(one)[2]
    rank = binpack.lpt(work, rules.ranks, start=placed.load)
    made = hybrid_table.build(length, long, placed, short, rank, costs, rules)
    return HybridPlan(*made)
