"""Search of ring sizes with which the slowest rank of a step is as fast as possible.

Memory gives each document a least size. More ranks shorten a document that a rank would wait for,
but cost transfers. So a search begins with sizes with which no document takes longer than a share
of the mean rank. Then the longest document of each of the busiest ranks gets the next size.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from overlord.planning.balance import binpack, rings
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.balance.ring_placement import Blocks, Wide, members, nest
from overlord.planning.cost.ring import RingCosts

# most time of a document at the start of a search, over the mean rank; one search for each
SHARES = (1.0, 0.7, 0.5, 0.35, 0.25, 0.125)
# Documents on one rank that take less than the mean rank / FEW_FLUID are left out of the search:
# they are placed last and even out the ranks. With more than MANY documents a rank it is / FLUID.
FLUID, FEW_FLUID, MANY = 16, 256, 64
FASTER = 0.98  # a larger ring is used if it takes less than this share of the time
# slowest rank over the bound at which one search stops, and at which all searches stop
LEVEL, NEAR = 1.0005, 1.002
MISSES = 6  # consecutive tries without a better result, after which a search stops
MOST = 48  # tries of one search
GROWTHS = 4  # attempts of a try to find documents that a larger ring makes faster
TRIES, STEPS = 128, 1 << 20  # tries of all searches; and documents and ranks over all tries
BEHIND = 3  # searches after wide documents
BRIEF = 1024  # a document shorter than the longest / BRIEF starts with its smallest ring


def nested_sizes(
    length: np.ndarray,
    least: np.ndarray,
    chain: np.ndarray,
    costs: RingCosts,
    rules: HybridRules,
    wide: Wide,
) -> np.ndarray:
    """Return ring sizes for documents on nested blocks, which start after ``wide`` documents."""
    before = binpack.total(wide.end) / rules.ranks
    mean = before + rings.mean_load(length, costs, rules)
    smallest = np.searchsorted(chain, least)
    best, found = np.inf, smallest
    # larger rings only add transfers to the work of all ranks
    least_load = binpack.total(rings.seconds(length, least, costs, rules) * least) / rules.ranks
    least_load += before
    tries = max(16, min(TRIES, STEPS // (len(length) + rules.ranks)))
    starts = _starts(length, smallest, chain, mean, costs, rules)
    # the sizes of the longest documents are chosen already if some are wide
    for start in islice(starts, BEHIND if len(wide.doc) else None):
        slowest, level, used = _searched(length, start, chain, wide, (mean, best), costs, rules)
        tries -= used
        if slowest < best:
            best, found = slowest, level
        if best <= least_load * NEAR or tries <= 0:
            break
    sizes: np.ndarray = chain[found]
    return sizes


def _starts(
    length: np.ndarray,
    smallest: np.ndarray,
    chain: np.ndarray,
    mean: float,
    costs: RingCosts,
    rules: HybridRules,
) -> Iterator[np.ndarray]:
    """Yield the levels at which searches begin.

    The first ones bound the time of every document, the others the size of its ring from below.
    """
    for share in SHARES:
        yield rings.within(length, smallest, chain, share * mean, costs, rules)
    for least in range(1, len(chain)):
        yield np.maximum(smallest, np.where(length * BRIEF > length.max(initial=0), least, 0))


def _searched(
    length: np.ndarray,
    level: np.ndarray,
    chain: np.ndarray,
    wide: Wide,
    limits: tuple[float, float],
    costs: RingCosts,
    rules: HybridRules,
) -> tuple[float, np.ndarray, int]:
    """Return the time of the slowest rank, the levels that lead to it, and the tries.

    ``limits``: time of the mean rank, and the slowest rank of an earlier search.
    """
    mean, limit = limits
    best, found, missed = np.inf, level, 0
    before = binpack.total(wide.end) / rules.ranks
    seconds = rings.seconds(length, chain[level], costs, rules)
    stuck = np.zeros(len(length), bool)  # documents whose next size is not faster
    fluid = FLUID if len(length) > MANY * rules.ranks else FEW_FLUID
    tries = 0
    while tries < MOST:
        tries += 1
        size = chain[level]
        bound = before + binpack.total(seconds * size) / rules.ranks
        if bound >= min(best, limit):  # larger rings only cost more
            break
        big = np.flatnonzero((size > 1) | (seconds * fluid > mean))
        made = nest(seconds[big], size[big], chain, rules.ranks, wide)
        slowest = max(bound, float(made.end.max()))
        missed = 0 if slowest < best else missed + 1
        if slowest < best:
            best, found = slowest, level
        if slowest <= bound * LEVEL or missed > MISSES:
            break
        for _ in range(GROWTHS):
            able = (level[big] + 1 < len(chain)) & ~stuck[big]
            again = big[_late(seconds[big], size[big], able, made, (bound + slowest) / 2)]
            then = rings.seconds(length[again], chain[level[again] + 1], costs, rules)
            faster = then < FASTER * seconds[again]
            stuck[again[~faster]] = True
            if faster.any() or not len(again):
                break
        again, then = again[faster], then[faster]
        if not len(again):
            break
        level, seconds = level.copy(), seconds.copy()
        level[again] += 1
        seconds[again] = then
    return best, found, tries


def _late(
    seconds: np.ndarray, size: np.ndarray, able: np.ndarray, made: Blocks, late: float
) -> np.ndarray:
    """Return the longest document that may grow of each rank that ends after ``late``."""
    order = np.flatnonzero(able)
    order = order[np.argsort(seconds[order], kind="stable")]
    longest = np.full(len(made.end), -1)
    # the last assignment counts: the longest document of each rank
    longest[members(made.first[order], size[order])] = np.repeat(order, size[order])
    found = np.unique(longest[made.end > late])
    return found[found >= 0]


def free_sizes(
    length: np.ndarray, least: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return ring sizes of any number of ranks.

    A ring grows until memory suffices and the document takes at most the time of the mean rank. It
    stops where more ranks would waste too much of their time.
    """
    mean = rings.mean_load(length, costs, rules)
    size = least.copy()
    now = rings.seconds(length, size, costs, rules)
    going = np.flatnonzero((now > mean) & (mean > 0))
    while len(going):
        wanted = np.ceil(size[going] * np.minimum(2.0, now[going] / mean)).astype(np.int64)
        more = np.minimum(np.maximum(size[going] + 1, wanted), rules.ranks)
        then = rings.seconds(length[going], more, costs, rules)
        worth = then * more <= now[going] * size[going] * rings.WASTE
        worth &= more > size[going]
        size[going[worth]], now[going[worth]] = more[worth], then[worth]
        going = going[worth & (then > mean)]
    return size


def wide_sizes(
    length: np.ndarray, least: np.ndarray, most: float, costs: RingCosts, rules: HybridRules
) -> tuple[np.ndarray, np.ndarray]:
    """Return documents that need more than a node to take at most ``most``, with their sizes.

    A size is the smallest number of whole nodes that suffices, or the fastest. Nothing is returned
    if the ranks are no whole nodes, or if there are too many sizes to try.
    """
    node, nodes = rules.node, rules.ranks // rules.node
    none = np.zeros(0, np.int64)
    if nodes < FEW_NODES or rules.ranks % node:
        return none, none
    one = np.full(len(length), node)
    docs = np.flatnonzero(
        (least > node) | (rings.seconds(length, one, costs, rules) > most) & (length > node)
    )
    if not len(docs) or len(docs) * nodes > WIDE:
        return none, none
    size = node * np.tile(np.arange(1, nodes + 1), (len(docs), 1))
    flat = np.repeat(length[docs], nodes)
    seconds = rings.seconds(flat, size.reshape(-1), costs, rules).reshape(size.shape)
    seconds[size < least[docs][:, None]] = np.inf
    wanted = np.maximum(most, SLACK * seconds.min(axis=1))
    return docs, node * (1 + (seconds <= wanted[:, None]).argmax(axis=1))


SLACK = 1.015  # over the fastest ring: a document that is slower than ``most`` on all may take it
FEW_NODES = 3  # below which the sizes of a chain are all that there is
WIDE = 1 << 18  # documents times nodes above which no wide rings are tried: it takes too long
