"""Maps from the exponents of units (blocks or matrices) to multipliers of their learning rates.

A large exponent means a light tail, which the theory reads as undertrained: the unit gets a larger
rate. Units with equal exponents all have the multiplier 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.errors import JobError

MAPS = ("linear", "sqrt", "log2", "step", "sigmoid")
EQUAL = 1e-6  # exponents that differ by less are equal: eigensolvers differ by as much
DIGITS = 4  # multipliers are rounded, so that rounding errors of eigensolvers have no effect
SCALES = {"linear": (0.5, 1.5), "step": (0.5, 1.5), "sigmoid": (2.0, 1.0)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RateMap:
    """A map with its settings.

    ``scale``: for ``linear`` and ``step`` the smallest and the largest multiplier, for ``sigmoid``
    the strength below and above the mean exponent; None: ``SCALES``. ``tau``: the steepness of
    ``sigmoid``. ``limits``: bounds of every multiplier.
    """

    name: str = "linear"
    scale: tuple[float, float] | None = None
    tau: float = 10.0
    limits: tuple[float, float] = (0.1, 10.0)

    def __post_init__(self) -> None:
        problems = []
        if self.name not in MAPS:
            problems.append(f"map: expected one of {', '.join(MAPS)}, got {self.name}")
        elif self.scale is not None and self.name not in SCALES:
            problems.append(f"scale: expected None for map={self.name!r}, got {self.scale}")
        if self.scale is not None and not min(self.scale) >= 0:
            problems.append(f"scale: expected two numbers of at least 0, got {self.scale}")
        if not 0 < self.limits[0] <= 1 <= self.limits[1]:
            problems.append(f"limits: expected 0 < low <= 1 <= high, got {self.limits}")
        if problems:
            raise JobError(problems, "TempBalance")

    def __call__(self, alphas: np.ndarray) -> np.ndarray:
        """Return the multiplier of every unit; ``alphas`` must be finite."""
        values = np.asarray(alphas, np.float64)
        if not len(values) or values.max() - values.min() < EQUAL:
            return np.ones(len(values))
        return np.clip(self._mapped(values), *self.limits)

    def _mapped(self, values: np.ndarray) -> np.ndarray:
        if self.name == "sqrt":
            return _shares(np.sqrt(np.maximum(values, 0.0)))
        if self.name == "log2":
            return _shares(np.log2(np.maximum(values, 1.0)))
        low, high = self.scale or SCALES[self.name]
        if self.name == "linear":
            return low + (high - low) * (values - values.min()) / (values.max() - values.min())
        if self.name == "step":
            return low + (high - low) * _ranks(values) / (len(values) - 1)
        centred = values - values.mean()
        strength = np.where(centred < 0, low, high)
        # 0.5 * tanh(x / 2) is the sigmoid of x minus a half, and cannot overflow
        return np.asarray(10.0 ** (strength * 0.5 * np.tanh(0.5 * self.tau * centred)))


def _shares(values: np.ndarray) -> np.ndarray:
    return values * len(values) / values.sum()


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each exponent, from 0; equal exponents get their mean rank."""
    below = (values[None, :] < values[:, None] - EQUAL).sum(axis=1)
    same = (np.abs(values[None, :] - values[:, None]) <= EQUAL).sum(axis=1)
    return np.asarray(below + (same - 1) / 2.0)


def renormalised(multipliers: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the multipliers scaled to a mean of 1, weighted by ``sizes``, the parameters of units.

    If all multipliers are 0, return them unchanged.
    """
    total = float((multipliers * sizes).sum())
    return multipliers * (float(sizes.sum()) / total) if total > 0 else multipliers
