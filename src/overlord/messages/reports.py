"""Validation of the metrics that a trainer reports, for the client and the planner."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any

import numpy as np

from overlord.errors import JobError
from overlord.messages.control import Report

MAX_METRICS = 4096  # limit of one report: losses and tokens of two thousand sources
MAX_NAME = 200  # characters of a metric name
LARGEST = 1e100  # limit of a value: a product of two values and a sum over all ranks stay finite
SHOWN = 5  # problems that one error lists


def checked(rank: int, step: Any, metrics: Any, next_step: int) -> Report:
    """Return a valid report, or raise with every problem.

    ``next_step``: the first step that the rank has not taken. A value that is infinite or NaN is
    left out: a run that diverges must not end because of its report.
    """
    where = f"report of rank {rank}"
    try:
        number = operator.index(step)
    except TypeError:
        raise JobError([f"expected the number of a step, got {step!r}"], where) from None
    if not 0 <= number < next_step:
        taken = f"steps up to {next_step - 1} are taken" if next_step else "no step is taken yet"
        problem = f"expected a step that this rank has taken, got step {number}; {taken}"
        raise JobError([problem], where)
    if not isinstance(metrics, Mapping):
        raise JobError([f"expected a mapping of metric name to number, got {metrics!r}"], where)
    if len(metrics) > MAX_METRICS:
        raise JobError([f"expected at most {MAX_METRICS} metrics, got {len(metrics)}"], where)
    values = {name: _number(value) for name, value in metrics.items()}
    problems = [p for name, value in values.items() for p in _problems(name, value, metrics[name])]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise JobError(problems[:SHOWN] + more, f"{where}, step {number}")
    return Report(
        number,
        rank,
        {
            name: value
            for name, value in values.items()
            if value is not None and math.isfinite(value)
        },
    )


def _problems(name: Any, value: float | None, given: Any) -> list[str]:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return [f"expected a metric name of 1 to {MAX_NAME} characters, got {name!r:.{MAX_NAME}}"]
    if value is None or (math.isfinite(value) and abs(value) > LARGEST):
        return [f"{name}: expected a finite number (at most {LARGEST:g}), got {given!r:.80}"]
    return (
        [f"{name}: expected a number of tokens, got {given!r:.80}"]
        if name.startswith("tokens/") and value < 0
        else []
    )


def _number(value: Any) -> float | None:
    """Return a number or a scalar of any array library as a float; None if it is neither."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return (
            float(value)
            if isinstance(value, (int, float, np.floating)) and not isinstance(value, bool)
            else None
        )
    # an array of several values, or a whole number too large for a float
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
