"""Fit of a cost to measured times of microbatches, by the lengths of their documents.

    lengths = [[512] * 8, [4096], [64] * 64, [2048, 1024], [8192]]
    measured = cost.fit(lengths, [0.045, 0.050, 0.043, 0.036, 0.112])

The model is ``linear * sum(len) + square * sum(len ** 2) + constant``. Its coefficients, none
negative, minimize the squares of the relative errors. The sums are exact before they are rounded
(``math.fsum``), and the equations are solved in fractions. So a fit repeated on another machine
gives the same cost and the same plans.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from typing import Any, overload

import numpy as np

from overlord.errors import PlanError
from overlord.planning.cost.models import Cost, over_lengths
from overlord.planning.cost.ring import RingCosts, SizeFit

TERMS = ("the tokens of a microbatch", "the squares of its lengths", "the constant")
LEAST = 4  # different microbatches that a fit needs: one more than the number of coefficients
# share of the square of each term that the other terms must leave unexplained; the measurements
# of tests/unit/test_cost.py leave 0.17
APART = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted(Cost):
    """A fitted cost: ``linear * length + square * length ** 2`` seconds for each document.

    Every rank pays ``constant`` once per microbatch: it changes no plan, and is kept for
    predictions. ``worst_error`` and ``mean_error`` are relative errors over the measurements.
    """

    linear: float
    square: float
    constant: float
    worst_error: float
    mean_error: float
    measurements: int
    column: str = "tokens"
    unit: str = "s"

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return over_lengths(
            columns,
            self.column,
            lambda length: self.linear * length + self.square * (length * length),
        )

    def seconds(self, lengths: Any) -> float:
        """Return the predicted seconds of one microbatch with documents of these lengths."""
        a, b, one = _terms(lengths)
        return self.linear * a + self.square * b + self.constant * one


@overload
def fit(
    samples: Sequence[Any],
    seconds: Sequence[float] | np.ndarray,
    *,
    column: str = ...,
    ranks: None = ...,
) -> Fitted: ...


@overload
def fit(
    samples: Sequence[Any],
    seconds: Sequence[float] | np.ndarray,
    *,
    column: str = ...,
    ranks: Sequence[int] | np.ndarray,
) -> RingCosts: ...


def fit(
    samples: Sequence[Any],
    seconds: Sequence[float] | np.ndarray,
    *,
    column: str = "tokens",
    ranks: Sequence[int] | np.ndarray | None = None,
) -> Fitted | RingCosts:
    """Fit a cost to measured microbatches and their times in seconds; raise if it is not possible.

    A microbatch is an array of document lengths, or a mapping of columns with the lengths in
    ``column``.

    Measure microbatches that differ in tokens and in the lengths of their documents. Include 64
    short ones, a few long ones, and one as long as the context. Take the median of some runs after
    a warm-up.

    ``ranks``: the ring size of every microbatch, whose lengths are those of whole documents. The
    result is then a cost of rings with coefficients by size. Measured times include transfers, so
    it adds none.
    """
    if ranks is None:
        return fit_microbatches(samples, seconds, column=column)
    try:
        size = [operator.index(d) for d in ranks]
    except TypeError:
        size = [0]
    if len(size) != len(samples) or min(size, default=1) < 1:
        raise PlanError(
            f"cost.fit: expected ranks as {len(samples)} whole numbers of at least 1, one per "
            f"microbatch, got {ranks!r:.80}",
            remedy="give the ring size of every measurement",
        )
    if 1 not in size:
        raise PlanError(
            f"cost.fit: expected measurements on one rank too, got rings of {sorted(set(size))}",
            remedy="short documents run on one rank: measure them",
        )
    found = []
    for d in sorted(set(size)):
        rows = [i for i, other in enumerate(size) if other == d]
        try:
            one = fit_microbatches(
                [samples[i] for i in rows], [seconds[i] for i in rows], column=column
            )
        except PlanError as e:
            raise PlanError(f"rings of {d}: {e.problem}", remedy=e.remedy) from None
        found.append(
            SizeFit(
                ranks=d,
                linear=d * one.linear,
                square=d * one.square,
                constant=one.constant,
                worst_error=one.worst_error,
                measurements=one.measurements,
            )
        )
    first = found[0]
    return RingCosts(
        linear=first.linear,
        square=first.square,
        constant=first.constant,
        fitted=tuple(found),
        column=column,
    )


def fit_microbatches(
    samples: Sequence[Any], seconds: Sequence[float] | np.ndarray, *, column: str = "tokens"
) -> Fitted:
    """Fit a cost to microbatches of one ring size: ``fit`` without ``ranks``."""
    if not all(hasattr(given, "__len__") for given in (samples, seconds)):
        raise PlanError(
            "cost.fit: expected a list of microbatches and a list of seconds, got "
            f"{samples!r:.40} and {seconds!r:.40}"
        )
    rows = [_terms(_lengths(sample, column)) for sample in samples]
    try:
        times = [float(t) for t in seconds]
    except (TypeError, ValueError) as e:
        raise PlanError(
            f"cost.fit: expected seconds above 0 for every microbatch, got another value: {e}"
        ) from None
    if len(rows) != len(times):
        raise PlanError(
            f"cost.fit: expected {len(rows)} times, one per microbatch, got {len(times)}"
        )
    if bad := [t for t in times if not 0 < t < math.inf]:
        raise PlanError(f"cost.fit: expected seconds above 0, got {bad[0]!r}")
    if len(set(rows)) < LEAST:
        raise PlanError(
            f"cost.fit: expected at least {LEAST} different microbatches, got {len(set(rows))}",
            remedy="measure more of them",
        )
    # so that every residual is a relative error
    weighed = [[x / t for x in row] for row, t in zip(rows, times, strict=True)]
    scale = [max(col) or 1.0 for col in zip(*weighed, strict=True)]
    table = [[x / s for x, s in zip(row, scale, strict=True)] for row in weighed]
    gram = [
        [Fraction(math.fsum(row[i] * row[j] for row in table)) for j in range(3)] for i in range(3)
    ]
    _check_apart(gram)
    found = [float(x) / s for x, s in zip(_not_negative(table, gram), scale, strict=True)]
    # added one by one: the result of sum() depends on the version of Python
    linear, square, constant = found
    errors = [
        abs((linear * a + square * b + constant * one) / t - 1)
        for (a, b, one), t in zip(rows, times, strict=True)
    ]
    return Fitted(
        linear=linear,
        square=square,
        constant=constant,
        worst_error=max(errors),
        mean_error=math.fsum(errors) / len(errors),
        measurements=len(times),
        column=column,
    )


def _lengths(sample: Any, column: str) -> Any:
    if not isinstance(sample, Mapping):
        return sample
    if column not in sample:
        raise PlanError(
            f"cost.fit: expected column {column!r} in every microbatch, got only "
            f"{', '.join(map(str, sample))}",
            remedy="give column= the name of the column with the lengths",
        )
    return sample[column]


def _terms(lengths: Any) -> tuple[float, float, float]:
    try:
        length = np.asarray(lengths, np.float64).reshape(-1)
    except (TypeError, ValueError):
        raise PlanError(
            f"cost.fit: expected the lengths of a microbatch's documents, got {lengths!r:.80}"
        ) from None
    if not len(length) or not (np.isfinite(length).all() and length.min() >= 0):
        raise PlanError(
            "cost.fit: expected documents with finite lengths of at least 0 in every microbatch, "
            f"got {lengths!r:.80}",
            remedy="leave out empty microbatches, and correct the lengths",
        )
    return math.fsum(length.tolist()), math.fsum((length * length).tolist()), 1.0


def _check_apart(gram: list[list[Fraction]]) -> None:
    """Raise ``PlanError`` unless each term of the model can be separated from the others."""
    for i, term in enumerate(TERMS):
        others = [j for j in range(3) if j != i]
        explained = _determinant(gram, others) * gram[i][i]
        if explained == 0 or _determinant(gram, [0, 1, 2]) / explained < APART:
            raise PlanError(
                f"cost.fit: expected measurements that separate {term} from the other terms, got "
                "some in which they change together",
                remedy="measure microbatches of different tokens, each divided into short and into "
                "long documents",
            )


def _not_negative(table: list[list[float]], gram: list[list[Fraction]]) -> list[Fraction]:
    """Return the coefficients, none negative, with the smallest sum of squared relative errors."""
    right = [Fraction(math.fsum(row[i] for row in table)) for i in range(3)]
    solutions = [
        _solve(gram, right, list(chosen))
        for size in (3, 2, 1)
        for chosen in combinations(range(3), size)
    ]
    # The explained variance of a least-squares solution is its product with the right side. The
    # first of equals has the most terms.
    return max(
        (s for s in solutions if min(s) >= 0),
        key=lambda s: sum(x * r for x, r in zip(s, right, strict=True)),
    )


def _solve(gram: list[list[Fraction]], right: list[Fraction], chosen: list[int]) -> list[Fraction]:
    """Return the coefficients of the chosen terms by Cramer's rule; all others are zero."""
    whole, solution = _determinant(gram, chosen), [Fraction(0)] * 3
    for i in chosen:
        swapped = [[right[r] if c == i else gram[r][c] for c in range(3)] for r in range(3)]
        solution[i] = _determinant(swapped, chosen) / whole
    return solution


def _determinant(m: list[list[Fraction]], rows: list[int]) -> Fraction:
    if len(rows) == 1:
        return m[rows[0]][rows[0]]
    if len(rows) == 2:
        i, j = rows
        return m[i][i] * m[j][j] - m[i][j] * m[j][i]
    (a, b, c), (d, e, f), (g, h, k) = m
    return a * (e * k - f * h) - b * (d * k - f * g) + c * (d * h - e * g)
