"""Exponents of the power-law tail of a spectrum: small for heavy tails, large for light ones.

``hill`` is the formula of the TempBalance paper. ``published`` is the arithmetic of its code, whose
tail holds the threshold itself. ``farms`` is ``hill`` on the pooled spectra of square windows, so
that the aspect ratio of a matrix has no effect. ``ks`` takes the threshold with the best fit.
An exponent that cannot be computed is NaN; weights that are not finite give infinity.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.errors import JobError

ESTIMATORS = ("hill", "farms", "ks", "published")
FLATTEST = 1e-4  # mean log ratio of a tail that counts as flat, as after orthogonal initialisation
NOT_FINITE = float("inf")
DEGENERATE = float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """An estimator with its settings.

    ``xmin_pos``: the tail has ``N - int(N / xmin_pos)`` of N eigenvalues; ``ks`` ignores it.
    ``min_eigs``: matrices with fewer eigenvalues have no exponent.
    """

    name: str = "hill"
    xmin_pos: float = 2.0
    min_eigs: int = 50

    def __post_init__(self) -> None:
        problems = []
        if self.name not in ESTIMATORS:
            problems.append(f"estimator: expected one of {', '.join(ESTIMATORS)}, got {self.name}")
        if not self.xmin_pos > 1:
            problems.append(f"xmin_pos: expected more than 1, got {self.xmin_pos}")
        if self.min_eigs < 2:
            problems.append(f"min_eigs: expected at least 2, got {self.min_eigs}")
        if problems:
            raise JobError(problems, "spectra")

    @property
    def takes_windows(self) -> bool:
        """Whether the spectrum is pooled over square windows."""
        return self.name == "farms"

    def alpha(self, eigenvalues: np.ndarray, tolerance: float = 0.0) -> float:
        """Return the exponent of a spectrum; NaN if it has none, infinity if a value is not finite.

        ``tolerance``: the rounding error of the eigenvalues as a fraction of the largest. Smaller
        eigenvalues count as zero. A zero threshold gives NaN; ``ks`` drops zeros.
        """
        values = np.sort(np.asarray(eigenvalues, np.float64))
        if not np.isfinite(values).all():
            return NOT_FINITE
        if len(values) < self.min_eigs or values[-1] <= 0:
            return DEGENERATE
        zero = values[-1] * tolerance
        if self.name == "ks":
            return _best_fit(values[values > zero])
        return _hill(values, self.xmin_pos, zero, with_threshold=self.name == "published")


def _hill(values: np.ndarray, xmin_pos: float, zero: float, with_threshold: bool) -> float:
    """Return the Hill estimate of sorted values; ``with_threshold``: the tail holds its threshold.

    NaN: the threshold is at most ``zero``, or the tail is flat.
    """
    first = int(len(values) / xmin_pos)
    threshold = first if with_threshold else first - 1
    if threshold < 0 or values[threshold] <= zero:
        return DEGENERATE
    logs = np.log(values[threshold:])
    n = len(values) - first
    total = float((logs - logs[0]).sum())
    return 1.0 + n / total if total > n * FLATTEST else DEGENERATE


def _best_fit(values: np.ndarray) -> float:
    """Return the exponent at the threshold with the smallest Kolmogorov-Smirnov distance.

    NaN: there are fewer than two values, or every tail is flat.
    """
    count = len(values)
    best, found = np.inf, DEGENERATE
    if count < 2:
        return found
    logs = np.log(values)
    sums = np.cumsum(logs[::-1])[::-1]
    ranks = np.arange(count, dtype=np.float64)
    for first in range(count - 1):
        n = count - first
        total = float(sums[first] - n * logs[first])
        if total <= n * FLATTEST:
            continue
        slope = n / total
        fit = 1.0 - np.exp(-slope * (logs[first:] - logs[first]))
        distance = float(np.abs(fit - ranks[:n] / n).max())
        if distance < best:
            best, found = distance, 1.0 + slope
    return found


def window_starts(long: int, short: int) -> list[int]:
    """Return the starts of the square windows that cover the long side of a matrix.

    There are as few windows as possible, at even distances. They overlap only if ``short`` does
    not divide ``long``.
    """
    if long <= short:
        return [0]
    windows = -(-long // short)
    return [round(i * (long - short) / (windows - 1)) for i in range(windows)]
