"""Rings of long documents: how many ranks each needs, and which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.errors import PlanError
from overlord.planning.balance import binpack
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.cost.ring import RingCosts


@dataclass(frozen=True, slots=True, eq=False)
class Rings:
    """Rings in the order of their placement: document ``doc[i]`` on ranks ptr[i]:ptr[i+1]."""

    doc: np.ndarray  # int64: position in the list of long documents
    ptr: np.ndarray  # int64 [rings + 1]
    rank: np.ndarray  # int32, in ring order
    index: np.ndarray  # int64: microbatch, equal on all members
    load: np.ndarray  # float64 [ranks]: end of the last ring of each rank


def sizes(length: np.ndarray, costs: RingCosts, rules: HybridRules) -> np.ndarray:
    """Return the number of ranks of each document: int64.

    It is the larger of two floors: its memory, and a time of at most the mean load of a rank.
    """
    least, exact = memory_floor(length, rules)
    d = np.maximum(least, 1)
    if rules.ranks > 1 and len(length):
        d = np.maximum(d, _balance_floor(length, d, costs, rules))
    d = allowed_size(np.minimum(d, rules.ranks), rules)
    d[exact] = least[exact]
    return d


def memory_floor(length: np.ndarray, rules: HybridRules) -> tuple[np.ndarray, np.ndarray]:
    """Return the fewest ranks that hold each document, and whether it allows no larger ring.

    Two chunks of a piece are rounded by themselves. So a piece fits an odd capacity for certain
    only if it fits the even number below, or if chunks fill the capacity exactly.
    """
    whole = 2 * rules.multiple or 1
    single = rules.capacity // whole * whole
    shared = rules.capacity // (2 * max(1, rules.multiple)) * (2 * max(1, rules.multiple))
    far = np.int64(2**62)
    least = -(-length // shared) if shared else np.full(len(length), far)
    least = np.where(length <= single, 1, np.maximum(least, 2))
    exact = np.zeros(len(length), bool)
    if not rules.multiple and rules.capacity % 2 and rules.groups == "any":
        exact = (least > rules.ranks) & (length == length // rules.capacity * rules.capacity)
        least = np.where(exact, length // rules.capacity, least)
    least = np.where(exact, least, allowed_size(least, rules))
    if (least > rules.ranks).any():
        i = int((least > rules.ranks).argmax())
        most = max(single, shared * int(largest_size(rules)))
        raise PlanError(
            f"sample {i}: expected at most {most} tokens, {rules.capacity} on each of "
            f"{rules.ranks} ranks, got {int(length[i])}",
            remedy="cut longer documents (context), or give more capacity or ranks",
        )
    return least, exact


def largest_size(rules: HybridRules) -> int:
    return rules.ranks


def allowed_size(d: np.ndarray, rules: HybridRules) -> np.ndarray:
    """Round ring sizes up to allowed ones."""
    if rules.groups == "any":
        return d
    big = d > rules.ranks
    power = np.ones_like(d)
    while (power < np.minimum(d, rules.ranks)).any():
        power = np.where(power < np.minimum(d, rules.ranks), 2 * power, power)
    return np.where(big, d, np.minimum(power, rules.ranks))


def _balance_floor(
    length: np.ndarray, d: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the fewest ranks with which no document takes longer than the mean rank.

    More ranks do not help where their transfers take longer than they save; then it is the fastest
    size.
    """
    square = length.astype(np.float64) ** 2
    one = np.ones(len(length), np.int64)
    ideal = binpack.total(costs.compute(length, square, one)) / rules.ranks
    best, seconds = d.copy(), costs.seconds(length, square, d, d > rules.node)
    going = np.flatnonzero(seconds > ideal)
    for _ in range(64):
        if not len(going):
            break
        more = np.minimum(
            np.maximum(best[going] + 1, np.ceil(best[going] * seconds[going] / ideal)).astype(
                np.int64
            ),
            rules.ranks,
        )
        more = allowed_size(more, rules)
        then = costs.seconds(length[going], square[going], more, more > rules.node)
        better = then < seconds[going]
        best[going[better]], seconds[going[better]] = more[better], then[better]
        going = going[better & (then > ideal) & (more < rules.ranks)]
    return best


def place(length: np.ndarray, size: np.ndarray, costs: RingCosts, rules: HybridRules) -> Rings:
    """Place rings by falling time, each on the least busy ranks."""
    seconds = costs.seconds(length, length.astype(np.float64) ** 2, size, size > rules.node)
    aligned = rules.groups == "power_of_two"
    order = (
        np.lexsort((np.arange(len(size)), -seconds, -size))
        if aligned
        else binpack.by_falling(seconds)
    )
    load, following = np.zeros(rules.ranks), np.zeros(rules.ranks, np.int64)
    ranks: list[np.ndarray] = []
    index = np.empty(len(order), np.int64)
    for i, (d, t) in enumerate(zip(size[order].tolist(), seconds[order].tolist(), strict=True)):
        found = _block(load, d) if aligned else _least_busy(load, d, rules.node)
        index[i] = following[found].max()
        load[found] = load[found].max() + t
        following[found] = index[i] + 1
        ranks.append(found)
    return Rings(
        doc=order,
        ptr=np.concatenate(([0], np.cumsum(size[order]))),
        rank=np.concatenate(ranks).astype(np.int32) if ranks else np.zeros(0, np.int32),
        index=index,
        load=load,
    )


def _block(load: np.ndarray, d: int) -> np.ndarray:
    if d == len(load):
        return np.arange(d)
    blocks = len(load) // d
    busiest = load[: blocks * d].reshape(blocks, d).max(axis=1)
    return np.arange(d) + d * int(busiest.argmin())


def _least_busy(load: np.ndarray, d: int, node: int) -> np.ndarray:
    return np.sort(np.argsort(load, kind="stable")[:d])
