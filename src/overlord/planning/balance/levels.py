"""Placement by levels, for ranks that wait for each other after every microbatch.

The time of a step is then the sum, over microbatch indices, of the slowest rank. So the tasks of an
index, a *level*, should take equally long. The longest document that is left begins a level and
sets its time by the size of its ring; others get the smallest ring that is no slower. Several sizes
of the first ring are tried, and the one with the least idle time is used. Packs of short documents
fill free ranks; the other packs form levels of equal time. In a level the rank with the least work
so far gets the longest pack, so ranks also end together.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np

from overlord import ring
from overlord.planning.balance import binpack
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.balance.ring_placement import Rings
from overlord.planning.cost.ring import RingCosts

TRIES = 6  # ring sizes that are tried for the first document of a level
WIDER = 1.1  # ratio of consecutive ring sizes above one node
UNITS = 1 << 20  # parts of a full pack
ALIKE = 1.1  # a document is long if it takes more than this many times a mean pack


def placed(
    length: np.ndarray, least: np.ndarray, chain: np.ndarray, costs: RingCosts, rules: HybridRules
) -> Rings:
    """Return all documents on rings and packs, level by level."""
    exact, one = length.astype(np.float64), np.ones(len(length), np.int64)
    held = ring.padded(length, 1, rules.multiple) if rules.multiple else length
    alone = costs.seconds(exact, exact * exact, one, np.zeros(len(one), bool))
    work = alone - costs.coefficients(one)[2]
    fits = held <= rules.capacity
    pack_s = float(work[fits].sum()) * rules.capacity / max(1.0, float(held[fits].sum()))
    long = (least > 1) | ~fits | (work > ALIKE * pack_s)
    left = np.lexsort((-length, -work))
    made = _Levels(length, work, held, alone - work, rules)
    sizes = _sizes(chain, rules)
    rows, short = left[long[left]], left[~long[left]]
    table = _by_size(length[rows], least[rows], sizes, costs, rules)
    while len(rows):
        seconds, taken, width = _level(table, sizes, work[rows], pack_s * (len(short) > 0), rules)
        spent = table[taken, np.searchsorted(sizes, width)]
        put, free = made.add_rings(rows[taken], width, spent)
        stays = np.ones(len(rows), bool)
        stays[taken[put]] = False
        rows, table = rows[stays], table[stays]
        short = short[~made.add_packs(short, free, seconds)]
        made.close()
    made.add_even_packs(short)
    return made.rings()


def _sizes(chain: np.ndarray, rules: HybridRules) -> np.ndarray:
    """Return the sizes of rings: any in a node, then whole nodes; or those of the chain."""
    if rules.groups != "any":
        return chain
    node, nodes = min(rules.node, rules.ranks), rules.ranks // rules.node
    several, last = [], 1.0
    while (last := max(last + 1, last * WIDER)) <= nodes:
        several.append(node * int(last))
    return np.unique([*range(1, node + 1), *several, rules.ranks])


def _by_size(
    length: np.ndarray, least: np.ndarray, sizes: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the seconds of every document on every size of ring that holds it, else inf."""
    d = np.tile(sizes, len(length))
    exact = np.repeat(length.astype(np.float64), len(sizes))
    seconds = costs.seconds(exact, exact * exact, d, d > rules.node)
    seconds[d < np.repeat(least, len(sizes))] = np.inf
    return seconds.reshape(len(length), len(sizes))


def _level(
    table: np.ndarray, sizes: np.ndarray, work: np.ndarray, pack_s: float, rules: HybridRules
) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the seconds of the next level, the rows that it takes, and their ring sizes.

    ``pack_s``: seconds of a pack for ranks that are free; 0: there are none.
    """
    able = np.flatnonzero(np.isfinite(table[0]))
    tries = able[np.unique(np.linspace(0, len(able) - 1, TRIES).round().astype(np.int64))]
    near = table[: 2 * rules.ranks]
    best, found = -1.0, (0.0, np.zeros(0, np.int64), np.zeros(0, np.int64))
    for seconds in table[0, tries].tolist():
        enough = near <= seconds
        rows = np.flatnonzero(enough.any(axis=1))
        width = sizes[enough[rows].argmax(axis=1)]
        taken = _prefix(width, rules.ranks)
        free = rules.ranks - int(width[taken].sum())
        used = binpack.total(work[rows[taken]]) + free * min(pack_s, seconds)
        score = used / max(seconds, np.finfo(np.float64).tiny)
        if score > best:
            best, found = score, (seconds, rows[taken], width[taken])
    return found


def _prefix(width: np.ndarray, ranks: int) -> np.ndarray:
    """Return the first rows that fit, and of the others the first that fit into what is left."""
    ends = np.cumsum(width)
    first = int(np.searchsorted(ends, ranks, side="right"))
    rest = ranks - (int(ends[first - 1]) if first else 0)
    others = first + np.flatnonzero(width[first:] <= rest)
    others = others[: int(np.searchsorted(np.cumsum(width[others]), rest, side="right"))]
    return np.concatenate((np.arange(first), others))


class _Levels:
    """The tasks so far. ``work`` and ``constant``: seconds of documents and tasks on a rank."""

    def __init__(
        self,
        length: np.ndarray,
        work: np.ndarray,
        held: np.ndarray,
        constant: np.ndarray,
        rules: HybridRules,
    ):
        self._length, self._work, self._held, self._constant = length, work, held, constant
        self._rules = rules
        self._docs: list[np.ndarray] = []  # by task
        self._ranks: list[np.ndarray] = []
        self._index: list[int] = []
        self._next = 0
        self._load = np.zeros(rules.ranks)

    def close(self) -> None:
        """End the level."""
        self._next += 1

    def add_rings(
        self, docs: np.ndarray, width: np.ndarray, seconds: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Place documents, each on a ring; return the rows that found room, and the free ranks.

        Rings in a node do not cross nodes. With nested sizes, each is on a block of its size.
        ``seconds``: of each document on its ring. Free ranks are in the order of their load.
        """
        node, ranks = self._rules.node, self._rules.ranks
        order = np.lexsort((-seconds, -width))
        rings, single = order[width[order] > 1], order[width[order] == 1]
        room, at, put = _Room(ranks, node), 0, []
        nested = self._rules.groups != "any"
        for row, d in zip(rings.tolist(), width[rings].tolist(), strict=True):
            first = at if nested else room.take(d)
            if first < 0:
                continue
            at += d
            put.append(row)
            self._add(docs[row : row + 1], np.arange(first, first + d), float(seconds[row]))
        free = self._lightest(np.arange(at, ranks) if nested else room.free())
        for row, rank in zip(single.tolist(), free.tolist(), strict=False):
            put.append(row)
            self._add(docs[row : row + 1], np.array([rank]), float(seconds[row]))
        return np.array(put, np.int64), free[len(single) :]

    def add_packs(self, short: np.ndarray, free: np.ndarray, seconds: float) -> np.ndarray:
        """Fill free ranks with packs of at most ``seconds``; return whether each is placed."""
        placed = np.zeros(len(short), bool)
        budget = seconds - self._constant[short]
        share = np.maximum(
            self._held[short] / self._rules.capacity,
            self._work[short] / np.maximum(budget, np.finfo(np.float64).tiny),
        )
        rows = np.flatnonzero(share <= 1)
        if not len(free) or not len(rows):
            return placed
        # rounded up, so that a full pack keeps both limits
        size = np.minimum(np.ceil(share[rows] * UNITS), UNITS).astype(np.int64)
        pack = binpack.next_fit(size, UNITS)
        rows, pack = rows[pack < len(free)], pack[pack < len(free)]
        self._add_packs(_groups(short[rows], pack), free)
        placed[rows] = True
        return placed

    def add_even_packs(self, short: np.ndarray) -> None:
        """Place documents in packs of equal time, in as few levels as their tokens need."""
        if not len(short):
            return
        ranks, capacity = self._rules.ranks, self._rules.capacity
        work, held = self._work[short], self._held[short]
        levels = max(1, -(-int(held.sum()) // (ranks * capacity)))
        while (pack := binpack.lpt(work, levels * ranks, capacity, held)).min() < 0:
            levels += 1
        load = np.bincount(pack, weights=work, minlength=levels * ranks)
        place = np.empty(levels * ranks, np.int64)
        place[binpack.by_falling(load)] = np.arange(levels * ranks)
        number = place[pack]
        packs, known = _groups(short, number), np.unique(number)
        for level in range(levels):
            first, last = np.searchsorted(known, [level * ranks, (level + 1) * ranks]).tolist()
            self._add_packs(packs[first:last], np.arange(ranks))
            self.close()

    def rings(self) -> Rings:
        """Return all tasks, by index."""
        by = np.argsort(np.array(self._index, np.int64), kind="stable")
        docs = [self._docs[t] for t in by.tolist()]
        ranks = [self._ranks[t] for t in by.tolist()]
        none = np.zeros(0, np.int64)
        return Rings(
            doc=np.concatenate([none, *docs]),
            task=np.repeat(np.arange(len(docs)), [len(d) for d in docs]),
            ptr=np.cumsum([0, *map(len, ranks)], dtype=np.int64),
            rank=np.concatenate([none, *ranks]).astype(np.int32),
            index=np.array(self._index, np.int64)[by],
            end=np.zeros(self._rules.ranks),
        )

    def _add_packs(self, packs: list[np.ndarray], free: np.ndarray) -> None:
        """Give the longest of some packs to the rank with the least work, and so on."""
        load = np.array([self._work[docs].sum() + self._constant[docs[0]] for docs in packs])
        by = binpack.by_falling(load).tolist()
        for t, rank in zip(by, self._lightest(free).tolist(), strict=False):
            self._add(packs[t], np.array([rank]), float(load[t]))

    def _lightest(self, ranks: np.ndarray) -> np.ndarray:
        found: np.ndarray = ranks[np.argsort(self._load[ranks], kind="stable")]
        return found

    def _add(self, docs: np.ndarray, ranks: np.ndarray, seconds: float) -> None:
        self._docs.append(docs)
        self._ranks.append(ranks)
        self._index.append(self._next)
        self._load[ranks] += seconds


class _Room:
    """The free ranks of one level: rings of several nodes first, then rings inside nodes."""

    def __init__(self, ranks: int, node: int):
        self._ranks, self._node = ranks, node
        self._at = 0  # ranks below are taken by rings of several nodes
        self._left: list[int] = []  # free ranks of the nodes above, once rings in nodes began
        self._with: list[list[int]] = []  # heaps: the nodes with a number of free ranks

    def take(self, d: int) -> int:
        """Return the first rank of a ring, or -1; sizes must fall.

        A ring in a node takes the fullest node with room, the first of equals.
        """
        node, ranks = self._node, self._ranks
        if d > node or d == ranks:
            if self._at + d > ranks:
                return -1
            first, self._at = self._at, min(ranks, self._at + -(-d // node) * node)
            return first
        if not self._left:
            self._left = [min(node, ranks - first) for first in range(self._at, ranks, node)]
            self._with = [[] for _ in range(node + 1)]
            for i, left in enumerate(self._left):
                self._with[left].append(i)  # rising, and so a heap
        left = next((n for n in range(d, node + 1) if self._with[n]), 0)
        if not left:
            return -1
        i = heappop(self._with[left])
        heappush(self._with[left - d], i)
        self._left[i] -= d
        base = self._at + i * node
        return base + min(node, ranks - base) - left

    def free(self) -> np.ndarray:
        """Return the ranks without a ring."""
        if not self._left:
            return np.arange(self._at, self._ranks)
        found = []
        for i, left in enumerate(self._left):
            base = self._at + i * self._node
            end = min(base + self._node, self._ranks)
            found.append(np.arange(end - left, end))
        return np.concatenate(found)


def _groups(docs: np.ndarray, number: np.ndarray) -> list[np.ndarray]:
    """Return the documents of each number that occurs, by rising number."""
    by = np.argsort(number, kind="stable")
    return np.split(docs[by], np.flatnonzero(np.diff(number[by])) + 1)
