"""Schedule of a hybrid step: a ring for every long document, a rank for every short one.

Long documents come first, on nested blocks of ranks (``ring_placement``) whose sizes a search
chooses (``ring_search``). Short documents level the ends of ranks (LPT), and each rank packs its
own into microbatches of the capacity. Every choice is deterministic; ties go to the lower rank and
to the earlier sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord import ring
from overlord.plan.tasks import TaskTable
from overlord.planning.balance import binpack, hybrid_table, ring_placement, ring_search, rings
from overlord.planning.balance.hybrid_rules import HybridRules, check
from overlord.planning.balance.ring_placement import Rings
from overlord.planning.cost.ring import RingCosts

__all__ = ["HybridPlan", "HybridRules", "schedule"]

NEAR = 1.01  # over the mean rank: nothing else is tried
MUCH = 1 << 21  # rings times ranks above which rings of any size are not tried: it takes too long
PASSES = 3  # of the quota of pipelines


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
    placed = _rings(length, costs, rules)
    alone = np.zeros(len(length), bool)
    alone[placed.doc] = True
    short = np.flatnonzero(~alone)
    rank = _ranks_of_short(length[short], placed, costs, rules)
    table, task, slot = hybrid_table.build(length, placed, short, rank, rules)
    return HybridPlan(table, task, slot, hybrid_table.times(table, task, length, costs, rules))


def _rings(length: np.ndarray, costs: RingCosts, rules: HybridRules) -> Rings:
    """Return the best of some placements of long documents; the first of equals."""
    least, fixed = rings.floors(length, rules)
    held = ring.padded(length, 1, rules.multiple) if rules.multiple else length
    best, found = np.inf, None
    for chain in rings.chains(rules):
        if np.isin(least[fixed], chain).all():
            size, slowest = ring_search.nested_sizes(length, least, chain, costs, rules)
            size[fixed] = least[fixed]
            if slowest < best:
                docs = np.flatnonzero((size > 1) | (held > rules.capacity))
                seconds = rings.seconds(length[docs], size[docs], costs, rules)
                best = slowest
                found = ring_placement.in_blocks(docs, seconds, size[docs], chain, rules.ranks)
    mean = rings.mean_load(length, costs, rules)
    if found is not None and (rules.groups != "any" or best <= NEAR * mean):
        return found
    size = ring_search.free_sizes(length, least, costs, rules)
    size[fixed] = least[fixed]
    docs = np.flatnonzero((size > 1) | (held > rules.capacity))
    if found is not None and len(docs) * rules.ranks > MUCH:
        return found
    seconds = rings.seconds(length[docs], size[docs], costs, rules)
    other = ring_placement.listed(docs, seconds, size[docs], ranks=rules.ranks, node=rules.node)
    # waits for members are time of ranks too
    rest = binpack.total(np.delete(rings.seconds(length, size, costs, rules), docs))
    slowest = max(float(other.end.max()), (binpack.total(other.end) + rest) / rules.ranks)
    return other if found is None or slowest < best else found


def _ranks_of_short(
    length: np.ndarray, placed: Rings, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the rank of every short document: LPT on what the rings leave free.

    With stages a rank also pays for filling and draining its pipeline: stages - 1 microbatches of
    its mean time. Ranks with few long ones then get less (equal W (m V + p - 1) for all).
    """
    exact, one = length.astype(np.float64), np.ones(len(length), np.int64)
    work = costs.compute(exact, exact * exact, one)
    constant = costs.coefficients(one)[2]
    work = work - constant + constant * exact / rules.capacity
    rank = binpack.lpt(work, rules.ranks, start=placed.end)
    if rules.stages == 1:
        return rank
    number = np.bincount(placed.rank, minlength=rules.ranks)
    for _ in range(PASSES):
        packs = np.bincount(rank, weights=exact, minlength=rules.ranks) / rules.capacity
        busy = placed.end + np.bincount(rank, weights=work, minlength=rules.ranks)
        mean = busy / np.maximum(1.0, number + np.ceil(packs))
        fill = mean * (rules.stages - 1) / rules.virtual
        rank = binpack.lpt(work, rules.ranks, start=placed.end + fill)
    return rank
