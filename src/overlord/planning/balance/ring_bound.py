"""Lower bound of the time of the slowest rank, for every way of dividing a step over rings."""

from __future__ import annotations

import numpy as np

from overlord.planning.balance import binpack, rings
from overlord.planning.balance.hybrid_rules import HybridRules
from overlord.planning.cost.ring import RingCosts


def lower_bound(length: np.ndarray, costs: RingCosts, rules: HybridRules) -> float:
    """Return a lower bound of the seconds of every schedule, without constants of tasks.

    It is the larger of two: the computation of the mean rank, and the longest document on its
    fastest ring, with the transfers that computation does not hide there.
    """
    if not len(length):
        return 0.0
    least, _ = rings.floors(length, rules)
    longest = int(length.argmax())
    d = np.arange(int(least[longest]), rules.ranks + 1)
    exact = np.full(len(d), float(length[longest]))
    alone = costs.seconds(exact, exact * exact, d, d > rules.node) - costs.coefficients(d)[2]
    return max(_least_work(length, costs) / rules.ranks, float(alone.min()))


def _least_work(length: np.ndarray, costs: RingCosts) -> float:
    """Return the computation of all documents, each on the ring size where it has least."""
    exact = length.astype(np.float64)
    sizes = np.array([fit.ranks for fit in costs.fitted] or [1], np.int64)
    linear, square, _ = costs.coefficients(sizes)
    work = [a * exact + b * (exact * exact) for a, b in zip(linear, square, strict=True)]
    return binpack.total(np.min(work, axis=0))
