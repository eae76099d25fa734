"""Sizes of rings: what documents need, and what a number of ranks can be divided into.

A *chain* is a rising list of sizes, each a divisor of the next. Its blocks nest: ranks k d to
(k + 1) d - 1 are the k-th block of size d, and each block consists of whole smaller ones.
"""

from __future__ import annotations

import numpy as np

from overlord import ring
from overlord.errors import PlanError
from overlord.planning.balance import binpack
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.cost.ring import RingCosts

WASTE = 1.1  # ranks times seconds of a larger ring over those of the one before it
FAR = np.int64(2**40)  # more ranks than any job has


def chains(rules: HybridRules) -> list[np.ndarray]:
    """Return the chains to try: powers of two with all ranks, and divisors of nodes and ranks.

    The number of all ranks ends each chain, also where it is no multiple of the size before it.
    """
    ranks, node = rules.ranks, rules.node
    powers = [2**k for k in range(ranks.bit_length()) if 2**k < ranks] + [ranks]
    found = [powers]
    if rules.groups == "any" and (ranks <= node or ranks % node == 0):
        divisors = _halved(ranks, min(ranks, node)) + _halved(min(ranks, node), 1)[1:]
        found.append(divisors[::-1])
    return [np.array(c, np.int64) for c in found if c != powers or c is powers]


def _halved(number: int, until: int) -> list[int]:
    """Return ``number`` and its quotients by the smallest prime of number / until, to ``until``."""
    found = [number]
    while found[-1] > until:
        rest = found[-1] // until
        prime = next((p for p in range(2, int(rest**0.5) + 1) if rest % p == 0), rest)
        found.append(found[-1] // prime)
    return found


def floors(length: np.ndarray, rules: HybridRules) -> tuple[np.ndarray, np.ndarray]:
    """Return the fewest ranks whose memory holds each document, and whether no other number does.

    Both chunks of a piece are rounded by themselves. So a piece surely fits an odd capacity only if
    it fits the even number below, or if all chunks have half of the capacity.
    """
    unit = 2 * rules.multiple
    alone = rules.capacity // max(1, unit) * max(1, unit)
    shared = rules.capacity // max(2, unit) * max(2, unit)
    least = -(-length // shared) if shared else np.full(len(length), FAR)
    least = np.where(length <= alone, 1, np.maximum(least, 2))
    fixed = np.zeros(len(length), bool)
    if not rules.multiple and rules.capacity % 2:
        whole = length // rules.capacity
        fixed = (least > rules.ranks) & (whole * rules.capacity == length) & (whole <= rules.ranks)
        if rules.groups != "any":
            fixed &= np.isin(whole, chains(rules)[0])
        least = np.where(fixed, whole, least)
    if rules.offload_share:
        least = np.minimum(least, _with_offload(length, rules))
        fixed &= least * rules.capacity == length
    if (least > rules.ranks).any():
        i = int((least > rules.ranks).argmax())
        raise PlanError(
            f"sample {i}: expected at most {max(alone, shared * rules.ranks)} tokens, "
            f"{rules.capacity} on each of {rules.ranks} ranks, got {int(length[i])}",
            remedy="cut documents to a shorter context, or give more ranks or capacity",
        )
    return least, fixed


def _with_offload(length: np.ndarray, rules: HybridRules) -> np.ndarray:
    """Return the fewest ranks if all offload that computation hides is used.

    Room is left for pieces whose sizes are rounded up.
    """
    kept = 1 - rules.offload_share * hidden_ratio(length, rules)
    room = np.minimum(rules.capacity / np.maximum(kept, 1e-9), float(FAR))
    # tokens that move: what is above the capacity, over the share of a token that can move
    on_host = rules.capacity + rules.offload_share * rules.host_tokens()
    # and one less, since ratios are rounded up
    room = np.minimum(room, max(float(rules.capacity), on_host - 1)).astype(np.int64)
    rounding = 2 * max(1, rules.multiple)
    least = np.where(room > rounding, -(-length // np.maximum(1, room - rounding)), FAR)
    held = ring.padded(length, 1, rules.multiple) if rules.multiple else length
    return np.where(held <= room, 1, np.maximum(least, 2))


def hidden_ratio(length: np.ndarray, rules: HybridRules) -> np.ndarray:
    """Return the largest ratio of offload that computation hides, for documents of a length."""
    ratio: np.ndarray = np.minimum(1.0, rules.offload_base + rules.offload_slope * length)
    return ratio if rules.offload_share else np.zeros(len(length))


def crossing(size: np.ndarray, rules: HybridRules) -> np.ndarray:
    """Return whether an aligned block of each size may have ranks of several nodes."""
    several: np.ndarray = (size > rules.node) | (rules.node % size != 0)
    return several & (rules.ranks > rules.node)


def seconds(
    length: np.ndarray, size: np.ndarray, costs: RingCosts, rules: HybridRules
) -> np.ndarray:
    """Return the time of each document on a ring of its size, with its share of a full task."""
    exact = length.astype(np.float64)
    alone = costs.seconds(exact, exact * exact, size, crossing(size, rules))
    constant = costs.coefficients(size)[2]
    return alone - constant + constant * np.minimum(1.0, exact / (size * rules.capacity))


def held(length: np.ndarray, size: np.ndarray, rules: HybridRules) -> np.ndarray:
    """Return an upper bound of the tokens of each document on a rank of its ring: int64."""
    if rules.multiple:
        return ring.padded(length, size, rules.multiple) // size
    # both chunks of a piece are rounded: by less than 1 each, and their sum by less than 2
    pieces: np.ndarray = np.minimum(-(-length // size) + 1, 2 * -(-length // (2 * size)))
    return np.where(size > 1, pieces, length)


def mean_load(
    length: np.ndarray, costs: RingCosts, rules: HybridRules, *, constants: bool = False
) -> float:
    """Return the computation of a mean rank, without transfers.

    ``constants``: add the constant of each task, as if every task were full.
    """
    exact, one = length.astype(np.float64), np.ones(len(length), np.int64)
    linear, square, constant = costs.coefficients(one)
    work = linear * exact + square * (exact * exact)
    if constants:
        work += constant * exact / rules.capacity
    return binpack.total(work) / rules.ranks


def within(
    length: np.ndarray,
    level: np.ndarray,
    chain: np.ndarray,
    most: float,
    costs: RingCosts,
    rules: HybridRules,
) -> np.ndarray:
    """Return levels of the chain with which no document takes longer than ``most``.

    A document keeps its size if the transfers of the next size, not hidden, waste time of ranks.
    """
    level = level.copy()
    going = np.arange(len(length))
    while len(going):
        now = seconds(length[going], chain[level[going]], costs, rules)
        going, now = going[now > most], now[now > most]
        going, now = going[level[going] + 1 < len(chain)], now[level[going] + 1 < len(chain)]
        then = seconds(length[going], chain[level[going] + 1], costs, rules)
        wider = chain[level[going] + 1] / chain[level[going]]
        going = going[then * wider <= now * WASTE]
        level[going] += 1
    return level
