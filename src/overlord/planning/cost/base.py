"""Base of cost functions: call on metadata columns, addition, scaling, unit and fingerprint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.sample import Ragged

CostFn = Callable[[Mapping[str, Any]], np.ndarray]


class Cost:
    """A cost function of metadata columns. Costs can be added and scaled: ``2 * a + b`` is a cost.

    A sum may be a backbone and its encoder in one plan, a factor a slower device. ``unit`` is "s",
    "FLOPs", "tokens", or "" if only ratios have a meaning.
    """

    __slots__ = ()

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        raise NotImplementedError

    def __add__(self, other: CostFn) -> Sum:
        if not callable(other):
            return NotImplemented
        return Sum(
            (
                *(self.parts if isinstance(self, Sum) else (self,)),
                *(other.parts if isinstance(other, Sum) else (other,)),
            )
        )

    def __radd__(self, other: CostFn) -> Sum:
        return Sum((other, self)) if callable(other) else NotImplemented

    def __mul__(self, factor: float) -> Scaled:
        if not isinstance(factor, (int, float)):
            return NotImplemented
        return Scaled(float(factor), self)

    __rmul__ = __mul__

    @property
    def fingerprint(self) -> str:
        """Text of the cost's parameters: equal for equal costs, in every process."""
        return repr(self)

    @property
    def title(self) -> str:
        """Short text, with the few numbers by which people know a model."""
        return repr(self)


@dataclass(frozen=True, slots=True, repr=False)
class Sum(Cost):
    """The sum of several costs of one sample, in one unit."""

    parts: tuple[CostFn, ...]

    def __post_init__(self) -> None:
        units = sorted({unit_of(part) for part in self.parts} - {""})
        if len(units) > 1:
            raise PlanError(
                f"costs in {' and '.join(units)} cannot be added",
                remedy="give both in one unit: cost.fit gives seconds",
            )

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        total = np.asarray(self.parts[0](columns), np.float64)
        for part in self.parts[1:]:
            total = total + np.asarray(part(columns), np.float64)
        return total

    @property
    def unit(self) -> str:
        return max(unit_of(part) for part in self.parts)

    def __repr__(self) -> str:
        return " + ".join(fingerprint_of(part) for part in self.parts)


@dataclass(frozen=True, slots=True, repr=False)
class Scaled(Cost):
    """A cost times a number."""

    factor: float
    of: CostFn

    def __post_init__(self) -> None:
        if not 0 <= self.factor < float("inf"):
            raise PlanError(f"expected a factor of at least 0 for a cost, got {self.factor!r}")

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return self.factor * np.asarray(self.of(columns), np.float64)

    @property
    def unit(self) -> str:
        return unit_of(self.of)

    def __repr__(self) -> str:
        # every digit, since plans depend on it
        inner, factor = (fingerprint_of(self.of), repr(self.factor).removesuffix(".0"))
        return f"{factor} * ({inner})" if isinstance(self.of, Sum) else f"{factor} * {inner}"


@dataclass(frozen=True, slots=True)
class LengthCost(Cost):
    """``linear * length + square * length ** 2``.

    For a ragged column (images) it is the sum over a sample's items.
    """

    linear: float = 0.0
    square: float = 0.0
    column: str = "tokens"
    unit: str = ""

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return over_lengths(
            columns,
            self.column,
            lambda length: self.linear * length + self.square * (length * length),
        )


def over_lengths(
    columns: Mapping[str, Any], name: str, cost_of: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the cost of each length of a metadata column.

    For a ragged column it is the sum over the items of every sample.
    """
    if not isinstance(columns, Mapping):
        raise PlanError(
            f"a cost: expected metadata columns by name, got {type(columns).__name__}",
            remedy=f"as in {{{name!r}: lengths}}",
        )
    if name not in columns:
        raise PlanError(
            f"the cost needs metadata {name!r}; known: {', '.join(sorted(columns))}",
            remedy="select it or add it with ov.Meta",
        )
    column = columns[name]
    if not isinstance(column, Ragged):
        return cost_of(np.asarray(column, np.float64))
    items = cost_of(column.values[column.offsets[0] : column.offsets[-1]].astype(np.float64))
    # bincount adds one by one, in order: the same sum on every machine.
    return np.bincount(
        np.repeat(np.arange(len(column)), column.lengths), weights=items, minlength=len(column)
    )


def unit_of(fn: CostFn) -> str:
    return str(getattr(fn, "unit", ""))


def fingerprint_of(fn: CostFn) -> str:
    """Return the ``fingerprint`` of a cost, or its name if it has none."""
    mine = getattr(fn, "fingerprint", None)
    return (
        str(mine)
        if mine
        else f"{getattr(fn, '__module__', '')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
    )
