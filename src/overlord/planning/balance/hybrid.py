"""Schedule of a hybrid step: a ring for every long document, a rank for every short one.

Long documents come first, on nested blocks of ranks (``ring_placement``) whose sizes a search
chooses (``ring_search``). Short documents level the ends of ranks (LPT), and each rank packs its
own into microbatches of the capacity. Every choice is deterministic; ties go to the lower rank and
to the earlier sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from overlord import ring
from overlord.plan.tasks import TaskTable
from overlord.planning.balance import (
    binpack,
    hybrid_table,
    levels,
    ring_placement,
    ring_search,
    rings,
)
from overlord.planning.balance.hybrid_rules import HybridRules, check
from overlord.planning.balance.ring_placement import Rings, Wide
from overlord.planning.cost.ring import RingCosts

__all__ = ["HybridPlan", "HybridRules", "schedule"]

NEAR = 1.005  # slowest rank over the mean: at a lower ratio no other placement is tried
MUCH = 1 << 21  # rings times ranks above which rings of any size take too long to place
FEW = 16  # most ranks for which a ring of all ranks for every document is tried too
# such rings are also tried for documents of more than capacity / (n x ranks) tokens alone
TINY = (8, 32)
PASSES = 3  # rounds of LPT, each with the times to fill pipelines that the last one gives
SHARES = (1.0, 0.9, 0.6)  # most time of a document on a ring of whole nodes, over the mean rank


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The tasks of a step, and the task of every sample."""

    tasks: TaskTable
    task: np.ndarray  # int32 [samples]
    slot: np.ndarray  # int32 [samples]: place in its task
    load: np.ndarray  # float64 [ranks]: modelled time of each rank, with waits for its rings


def schedule(lengths: np.ndarray, costs: RingCosts, rules: HybridRules) -> HybridPlan:
    """Return the best of the schedules that are tried; of equals, the first."""
    check(lengths, rules)
    length = np.asarray(lengths, np.int64)
    best, slowest = None, np.inf
    near = rings.mean_load(length, costs, rules, constants=True)
    near *= NEAR if rules.ranks > FEW else 1.0
    for placed in placements(length, costs, rules):
        found = planned(length, placed, costs, rules)
        if best is None or float(found.load.max()) < slowest:
            best, slowest = found, float(found.load.max())
        if slowest <= near:
            break
    assert best is not None, "the last placement always exists"
    table = hybrid_table.leveled_positions(best.tasks, best.task, length, costs, rules)
    return replace(best, tasks=table)


def placements(length: np.ndarray, costs: RingCosts, rules: HybridRules) -> Iterator[Rings]:
    """Yield placements of long documents, the cheapest to compute first.

    The first are on the least busy ranks, the next on nested blocks. Some of these come after rings
    of whole nodes.
    """
    least, fixed = rings.floors(length, rules)
    chains = [chain for chain in rings.chains(rules) if np.isin(least[fixed], chain).all()]
    choices = [Choice(length, least, fixed, chain, costs, rules) for chain in chains]
    free = rules.groups == "any"
    if (rules.equal_counts or rules.stages > 1) and choices and not fixed.any():
        yield levels.placed(length, least, choices[0].chain, costs, rules)
    if free or not choices:
        size = ring_search.free_sizes(length, least, costs, rules)
        size[fixed] = least[fixed]
        whole = ring.padded(length, 1, rules.multiple) if rules.multiple else length
        docs = np.flatnonzero((size > 1) | (whole > rules.capacity))
        if not choices or len(docs) * rules.ranks <= MUCH:
            seconds = rings.seconds(length[docs], size[docs], costs, rules)
            yield ring_placement.listed(
                docs, seconds, size[docs], ranks=rules.ranks, node=rules.node
            )
    shares = SHARES if free and not fixed.any() else ()
    for share in shares[:1]:
        yield from choices[0].wide(share)
    for choice in choices:
        yield choice.nested(Wide.none(rules.ranks))
        if rules.ranks <= FEW:
            yield choice.all_ranks(0)
            for part in TINY:
                yield choice.all_ranks(rules.capacity // (part * rules.ranks))
    for share in shares[1:]:
        yield from choices[0].wide(share)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Placements on the blocks of one chain."""

    length: np.ndarray
    least: np.ndarray
    fixed: np.ndarray
    chain: np.ndarray
    costs: RingCosts
    rules: HybridRules

    def nested(self, wide: Wide) -> Rings:
        """Return the placement with the sizes of a search."""
        rest = np.ones(len(self.length), bool)
        rest[wide.doc] = False
        rows = np.flatnonzero(rest)
        size = ring_search.nested_sizes(
            self.length[rows], self.least[rows], self.chain, self.costs, self.rules, wide
        )
        return self._placed(rows, size, wide)

    def all_ranks(self, short: int) -> Rings:
        """Return the placement with all ranks for every document of more than ``short`` tokens."""
        size = np.where(self.length > short, self.rules.ranks, self.least)
        return self._placed(np.arange(len(size)), size, Wide.none(self.rules.ranks))

    def wide(self, share: float) -> Iterator[Rings]:
        """Yield the placement whose longest documents have any number of whole nodes, if any do.

        ``share``: the most time of such a document, as a share of the mean rank's.
        """
        most = share * rings.mean_load(self.length, self.costs, self.rules)
        docs, size = ring_search.wide_sizes(self.length, self.least, most, self.costs, self.rules)
        if len(docs):
            seconds = rings.seconds(self.length[docs], size, self.costs, self.rules)
            yield self.nested(
                ring_placement.side_by_side(
                    docs, seconds, size, ranks=self.rules.ranks, node=self.rules.node
                )
            )

    def _placed(self, rows: np.ndarray, size: np.ndarray, wide: Wide) -> Rings:
        length, rules = self.length[rows], self.rules
        size = np.where(self.fixed[rows], self.least[rows], size)
        whole = ring.padded(length, 1, rules.multiple) if rules.multiple else length
        at = np.flatnonzero((size > 1) | (whole > rules.capacity))
        return ring_placement.in_blocks(
            rows[at],
            rings.seconds(length[at], size[at], self.costs, rules),
            size[at],
            rings.held(length[at], size[at], rules),
            self.chain,
            capacity=rules.capacity,
            wide=wide,
        )


def planned(length: np.ndarray, placed: Rings, costs: RingCosts, rules: HybridRules) -> HybridPlan:
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

    With stages a rank also fills and drains its pipeline, which takes stages - 1 microbatches of
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
