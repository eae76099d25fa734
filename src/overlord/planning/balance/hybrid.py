"""Schedule of a hybrid step: a ring for every long document, a rank for every short one.

Long documents come first, on nested blocks of ranks (``ring_placement``) whose sizes a search
chooses (``ring_search``). Short documents level the ends of ranks (LPT), and each rank packs its
own into microbatches of the capacity. Every choice is deterministic; ties go to the lower rank and
to the earlier sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from overlord import ring
from overlord.plan.tasks import TaskTable
from overlord.planning.balance import binpack, hybrid_table, ring_placement, ring_search, rings
from overlord.planning.balance.hybrid_rules import HybridRules, check
from overlord.planning.balance.ring_placement import Rings
from overlord.planning.cost.ring import RingCosts

__all__ = ["HybridPlan", "HybridRules", "schedule"]

NEAR = 1.0005  # over the mean rank: nothing else is tried
MUCH = 1 << 21  # rings times ranks above which rings of any size are not tried: it takes too long
FEW = 16  # ranks up to which one ring of all for every document is tried too
PASSES = 3  # of the quota of pipelines


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The tasks of a step, and the task of every sample."""

    tasks: TaskTable
    task: np.ndarray  # int32 [samples]
    slot: np.ndarray  # int32 [samples]: place in its task
    load: np.ndarray  # float64 [ranks]: modelled time of each rank, with waits for its rings


def schedule(lengths: np.ndarray, costs: RingCosts, rules: HybridRules) -> HybridPlan:
    """Return the schedule of documents of these lengths: the best of some, the first of equals."""
    check(lengths, rules)
    length = np.asarray(lengths, np.int64)
    best, slowest = None, np.inf
    near = NEAR * rings.mean_load(length, costs, rules)
    for placed in _placements(length, costs, rules):
        found = _planned(length, placed, costs, rules)
        if best is None or float(found.load.max()) < slowest:
            best, slowest = found, float(found.load.max())
        if slowest <= near:
            break
    assert best is not None, "the last placement always exists"
    return best


def _placements(length: np.ndarray, costs: RingCosts, rules: HybridRules) -> Iterator[Rings]:
    """Yield placements of long documents: on nested blocks, then on the least busy ranks."""
    least, fixed = rings.floors(length, rules)
    whole = ring.padded(length, 1, rules.multiple) if rules.multiple else length
    found = 0
    for chain in rings.chains(rules):
        if not np.isin(least[fixed], chain).all():
            continue
        sizes = [ring_search.nested_sizes(length, least, chain, costs, rules)]
        if rules.ranks <= FEW:
            sizes.append(np.full(len(length), rules.ranks))
        for size in sizes:
            size[fixed] = least[fixed]
            docs = np.flatnonzero((size > 1) | (whole > rules.capacity))
            seconds = rings.seconds(length[docs], size[docs], costs, rules)
            yield ring_placement.in_blocks(
                docs,
                seconds,
                size[docs],
                rings.held(length[docs], size[docs], rules),
                chain,
                ranks=rules.ranks,
                capacity=rules.capacity,
            )
        found += 1
    if found and rules.groups != "any":
        return
    size = ring_search.free_sizes(length, least, costs, rules)
    size[fixed] = least[fixed]
    docs = np.flatnonzero((size > 1) | (whole > rules.capacity))
    if not found or len(docs) * rules.ranks <= MUCH:
        seconds = rings.seconds(length[docs], size[docs], costs, rules)
        yield ring_placement.listed(docs, seconds, size[docs], ranks=rules.ranks, node=rules.node)


def _planned(length: np.ndarray, placed: Rings, costs: RingCosts, rules: HybridRules) -> HybridPlan:
    """Return the plan with these rings: short documents on ranks, packs, and empty tasks."""
    alone = np.zeros(len(length), bool)
    alone[placed.doc] = True
    short = np.flatnonzero(~alone)
    rank = _ranks_of_short(length[short], placed, costs, rules)
    table, task, slot = hybrid_table.build(length, placed, short, rank, rules)
    return HybridPlan(table, task, slot, hybrid_table.times(table, task, length, costs, rules))


def _ranks_of_short(
    length: np.ndarray, placed: Rings, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the rank of every short document: LPT on what the rings leave free.

    With stages a rank also pays for filling and draining its pipeline: stages - 1 microbatches of
    its mean time. Ranks with few long ones then get less (equal W (m V + p - 1) for all).
    """
    exact, one = length.astype(np.float64), np.ones(len(length), np.int64)
    work = rings.seconds(length, one, costs, rules)
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
