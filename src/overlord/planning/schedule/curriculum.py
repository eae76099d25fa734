"""Curricula: schedules that also choose which of the look-ahead candidates a step takes.

``prefer`` gives every candidate a score; the lowest are taken first, ties in stream order. The
score is the excess of a sample's difficulty over the limit of the step. So samples up to the limit
tie and keep their order, and after the ramp the plain stream is taken. Samples that are passed over
come later; none is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from overlord.errors import JobError, PlanError
from overlord.planning.schedule.base import Base, Check, Constant, Feedback, Part
from overlord.sample import Buffer, Ragged


@dataclass(frozen=True, slots=True, repr=False)
class Curriculum(Base):
    kind: ClassVar[str] = "curriculum"
    column: str
    low: float
    high: float
    steps: int
    weights: Any = None  # None: the sources' own weights

    def __post_init__(self) -> None:
        check = Check(self)
        check.text("column")
        if check.real("a finite number", math.isfinite, "low", "high") and self.low > self.high:
            check.found.append(
                f"low, high: expected low at most high, got {self.low:g} above {self.high:g}; "
                "reverse the column in ov.Meta"
            )
        check.whole(1, "steps")
        _take_weights(self, check)
        check.done()

    def __call__(self, step: int, feedback: Feedback) -> Any:
        return _weights_of(self, step, feedback)

    def threshold(self, step: int) -> float:
        """Return the highest difficulty of an easy sample at a step.

        It rises evenly from ``low`` at step 0 towards ``high``, and is infinite from ``steps`` on.
        """
        return _rise(self.low, self.high, step, self.steps)

    def prefer(self, step: int, candidates: Buffer) -> np.ndarray:
        return _above(candidates, self.column, self.threshold(step))

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Curriculum:
        return (
            replace(self, weights=Constant(weights))
            if self.weights is None
            else Base.bound(self, weights, rows)
        )


@dataclass(frozen=True, slots=True, repr=False)
class LengthWarmup(Base):
    kind: ClassVar[str] = "length_warmup"
    start: int
    end: int
    steps: int
    weights: Any = None
    column: str = "tokens"

    def __post_init__(self) -> None:
        check = Check(self)
        check.whole(1, "start", "end", "steps")
        if not check.found and self.start > self.end:
            check.found.append(
                f"start, end: expected start at most end, got {self.start} above {self.end}"
            )
        check.text("column")
        _take_weights(self, check)
        check.done()

    def __call__(self, step: int, feedback: Feedback) -> Any:
        return _weights_of(self, step, feedback)

    def threshold(self, step: int) -> float:
        """Return the greatest length of a short sample at a step.

        It rises evenly from ``start`` at step 0 towards ``end``, and is infinite from ``steps`` on.
        """
        return _rise(self.start, self.end, step, self.steps)

    def prefer(self, step: int, candidates: Buffer) -> np.ndarray:
        return _above(candidates, self.column, self.threshold(step))

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> LengthWarmup:
        return (
            replace(self, weights=Constant(weights))
            if self.weights is None
            else Base.bound(self, weights, rows)
        )


def curriculum(
    column: str, low: float, high: float, steps: int, weights: Part | None = None
) -> Curriculum:
    """Return a schedule that takes easy samples first.

    A sample is easy if its ``column`` is at most a threshold, which rises from ``low`` to ``high``
    over ``steps`` steps. ``weights``: default is the sources' own weights.

    The column is metadata (``ov.Meta``), with the same scale in every source. The schedule needs
    ``Job(look_ahead=...)`` above 1: a step chooses among ``look_ahead`` times its samples. A larger
    value makes a sharper curriculum.
    """
    return Curriculum(column, low, high, steps, weights)


def length_warmup(
    start: int, end: int, steps: int, weights: Part | None = None, column: str = "tokens"
) -> LengthWarmup:
    """Return a schedule that takes short samples first, for a job with ``look_ahead`` above 1.

    The limit of ``column`` rises from ``start`` to ``end`` over ``steps`` steps. ``weights``:
    default is the sources' own weights.
    """
    return LengthWarmup(start, end, steps, weights, column)


def _take_weights(schedule: Curriculum | LengthWarmup, check: Check) -> None:
    if schedule.weights is not None:
        check.set_parts("weights")


def _weights_of(schedule: Curriculum | LengthWarmup, step: int, feedback: Feedback) -> Any:
    if schedule.weights is None:
        raise JobError(
            [
                "weights: the sources' weights are not known outside a job; give "
                "weights={name: weight}"
            ],
            f"schedule.{schedule.kind}",
        )
    return schedule.weights(step, feedback)


def _rise(low: float, high: float, step: int, steps: int) -> float:
    return math.inf if step >= steps else low + (high - low) * (max(step, 0) / steps)


def _above(candidates: Buffer, column: str, threshold: float) -> np.ndarray:
    """Return the excess of each candidate's ``column`` over the threshold; infinity for NaN."""
    if threshold == math.inf:
        return np.zeros(len(candidates))
    values = candidates.column(column)
    if isinstance(values, Ragged):
        raise PlanError(
            f"curriculum: expected one number for each sample in {column!r}, got lists",
            candidates.step,
            "give each sample one number with ov.Meta",
        )
    difficulty = np.asarray(values, np.float64)
    return np.where(np.isnan(difficulty), math.inf, np.maximum(difficulty - threshold, 0.0))
