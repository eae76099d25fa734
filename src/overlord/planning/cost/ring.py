"""Time of documents that a ring of ranks shares: computation, and transfers it does not hide.

    t(s, d) = linear s / d + max(square s^2 / d, transfers) + constant

for a document of s tokens on d ranks. The ring moves (d - 1) / d of the keys and values past every
rank while attention runs, so only the longer of both counts.

    costs = cost.ring(measured, token_bytes=16_384 * layers, inside=450e9, across=50e9)
    costs = cost.fit(lengths, seconds, ranks=[1, 1, 1, 1, 2, 2, 2, 2])  # measured by ring size
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.planning.cost.models import Cost, over_lengths


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeFit:
    """Coefficients that were fitted for one ring size, with the errors of the fit.

    ``linear`` and ``square`` are of the whole document, that is d times those of one rank.
    """

    ranks: int
    linear: float
    square: float
    constant: float
    worst_error: float = 0.0
    measurements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCosts(Cost):
    """Seconds of documents on rings. Called on columns, it is the cost of each on one rank.

    Arguments
    ---------
    linear, square: seconds of a token, and of a token squared, of a whole document.
    constant: seconds of a task, on each of its ranks.
    token_bytes: bytes per token that pass a rank in a ring, of all layers, forward and backward.
    inside, across: bytes per second of a rank to its neighbour, inside a node and across nodes.
    latency: seconds of a transfer of any size; a ring of d ranks makes d - 1 one after the other.
    fitted: coefficients by ring size. Other sizes have coefficients interpolated between the
        nearest two, and sizes beyond the largest have its coefficients.
    """

    linear: float
    square: float = 0.0
    constant: float = 0.0
    token_bytes: float = 0.0
    inside: float = math.inf
    across: float = math.inf
    latency: float = 0.0
    fitted: tuple[SizeFit, ...] = ()
    column: str = "tokens"
    unit: str = "s"

    def __post_init__(self) -> None:
        amounts = ("linear", "square", "constant", "token_bytes", "latency")
        wrong = [
            f"{name}={v!r}" for name in amounts if not 0 <= (v := getattr(self, name)) < math.inf
        ]
        wrong += [f"{n}={v!r}" for n in ("inside", "across") if not (v := getattr(self, n)) > 0]
        if wrong:
            raise PlanError(
                f"cost.ring: expected finite numbers of at least 0, and bandwidths above 0, got "
                f"{', '.join(wrong)}",
                remedy="give seconds, bytes and bytes per second",
            )

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        linear, square, _ = self.coefficients(np.ones(1, np.int64))
        return over_lengths(
            columns,
            self.column,
            lambda length: float(linear[0]) * length + float(square[0]) * (length * length),
        )

    def coefficients(self, d: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return linear, square and constant for every ring size: float64."""
        if not self.fitted:
            one = np.ones(len(d))
            return self.linear * one, self.square * one, self.constant * one
        by = sorted(self.fitted, key=lambda fit: fit.ranks)
        sizes = np.array([fit.ranks for fit in by], np.float64)
        table = np.array([(fit.linear, fit.square, fit.constant) for fit in by])
        inside = np.clip(d, sizes[0], sizes[-1])
        below = np.searchsorted(sizes, inside, side="right") - 1
        above = np.minimum(below + 1, len(by) - 1)
        share = (inside - sizes[below]) / np.maximum(1.0, sizes[above] - sizes[below])
        linear, square, constant = (table[below] + share[:, None] * (table[above] - table[below])).T
        return linear, square, constant

    def hops(self, tokens: np.ndarray, d: np.ndarray, crosses: np.ndarray) -> np.ndarray:
        """Return the seconds that keys and values of tasks travel on their rings."""
        seconds = np.where(crosses, self.token_bytes / self.across, self.token_bytes / self.inside)
        return tokens * (d - 1) / d * seconds + self.latency * (d - 1)

    def compute(self, tokens: np.ndarray, squares: np.ndarray, d: np.ndarray) -> np.ndarray:
        """Return the seconds of computation of tasks on each of their ranks."""
        linear, square, constant = self.coefficients(d)
        return (linear * tokens + square * squares) / d + constant

    def seconds(
        self, tokens: np.ndarray, squares: np.ndarray, d: np.ndarray, crosses: np.ndarray
    ) -> np.ndarray:
        """Return the seconds of tasks by their tokens, the squares of lengths and ring sizes.

        ``crosses``: whether a ring has ranks of several nodes.
        """
        linear, square, constant = self.coefficients(d)
        attention = square * squares / d
        return linear * tokens / d + np.maximum(attention, self.hops(tokens, d, crosses)) + constant
