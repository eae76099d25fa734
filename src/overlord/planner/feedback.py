"""What trainers report, and when a plan may use it.

Plan t sees the reports of step t - ``feedback_lag`` alone, so that the prefetch window never decides what a schedule knew.
Values stay apart by rank until then and are joined without regard to who came first: equal reports, equal stream.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from overlord.errors import JobError
from overlord.messages import Report

MAX_METRICS = 4096  # of one report: loss and tokens of two thousand sources
MAX_NAME = 200
LARGEST = 1e100  # of a value: a product of two and a sum over all ranks stay finite
SHOWN = 5  # problems that one error lists


def checked(rank: int, step: Any, metrics: Any, next_step: int) -> Report:
    """A report, or every problem with it. ``next_step``: the first that the rank was not handed.

    A value that is infinite or no number is left out: a run that diverges must not end because it said so.
    """
    where = f"report of rank {rank}"
    try:
        number = operator.index(step)
    except TypeError:
        raise JobError([f"wanted the number of a step, found {step!r}"], where) from None
    if not 0 <= number < next_step:
        handed = f"the last one handed out is {next_step - 1}" if next_step else "none was handed out yet"
        raise JobError([f"step {number} was not handed to this rank; {handed}"], where)
    if not isinstance(metrics, Mapping):
        raise JobError([f"wanted a mapping of metric name to number, found {metrics!r}"], where)
    if len(metrics) > MAX_METRICS:
        raise JobError([f"wanted at most {MAX_METRICS} metrics, found {len(metrics)}"], where)
    values = {name: _number(value) for name, value in metrics.items()}
    problems = [p for name, value in values.items() for p in _problems(name, value, metrics[name])]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise JobError(problems[:SHOWN] + more, f"{where}, step {number}")
    return Report(number, rank, {name: value for name, value in values.items() if value is not None and math.isfinite(value)})


def promised(report: Report, next_step: int, lag: int, prefetch: int) -> bool:
    """Whether no plan that uses it can have been made when a rank says it that was not handed ``next_step`` yet: planning is at most
    ``prefetch`` steps ahead of that rank."""
    return report.step + lag >= next_step + prefetch


def _problems(name: Any, value: float | None, given: Any) -> list[str]:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return [f"wanted a metric name of 1 to {MAX_NAME} characters, found {name!r:.{MAX_NAME}}"]
    if value is None or (math.isfinite(value) and abs(value) > LARGEST):
        return [f"{name}: wanted a finite number (at most {LARGEST:g}), found {given!r:.80}"]
    return [f"{name}: wanted a number of tokens, found {given!r:.80}"] if name.startswith("tokens/") and value < 0 else []


def _number(value: Any) -> float | None:
    """A number, or a scalar of whatever array library, as a float."""
    try:
        value = value.item() if hasattr(value, "item") else value
        return float(value) if isinstance(value, (int, float, np.floating)) and not isinstance(value, bool) else None
    except (TypeError, ValueError, RuntimeError, OverflowError):  # an array of several values; a whole number beyond all floats
        return None


def reduced(reports: Iterable[Report]) -> dict[str, float]:
    """One value for every metric of a step: the mean over the ranks that gave it, by their ``tokens/<source>`` where all gave
    those; token counts themselves are summed. Exactly rounded sums, so the order of the ranks does not matter."""
    ranks = list(reports)
    names = sorted({name for r in ranks for name in r.metrics})
    return {name: _joined(name, [r.metrics for r in ranks if name in r.metrics]) for name in names}


def _joined(name: str, ranks: list[Mapping[str, float]]) -> float:
    kind, _, source = name.partition("/")
    values = [r[name] for r in ranks]
    if kind == "tokens" and source:
        return math.fsum(values)
    tokens = [r[f"tokens/{source}"] for r in ranks if f"tokens/{source}" in r] if source else []
    most = max(tokens, default=0.0)
    if len(tokens) < len(values) or not most > 0:
        return math.fsum(values) / len(values)
    shares = [t / most for t in tokens]  # so that no product is too small to be told from nothing
    return math.fsum(v * t for v, t in zip(values, shares, strict=True)) / math.fsum(shares)


class Feedback:
    """Reports on their way to the plans that use them."""

    def __init__(self, lag: int, takes: bool, reports: Iterable[Report] = (), floor: int = 0):
        self._lag, self.takes, self._floor = lag, takes, floor
        self._steps: dict[int, dict[int, Report]] = {}
        self._counts: Counter[str] = Counter()
        for report in reports if takes else ():
            self._steps.setdefault(report.step, {})[report.rank] = report

    def in_time(self, report: Report, planned: int) -> bool:
        """Whether the plan that uses it is still to come, ``planned`` being the last step whose weights were asked for."""
        return self.takes and report.step + self._lag > planned

    def add(self, report: Report, planned: int) -> None:
        self._counts["received"] += 1
        if self.in_time(report, planned):
            self._steps.setdefault(report.step, {})[report.rank] = report  # the last word of a rank counts
        elif self.takes:
            self._counts["late"] += 1

    def use(self, step: int, skipped: bool) -> dict[str, float]:
        """What the plan of a step is told, which nothing that comes later can change.

        Where a step was ``skipped`` meanwhile nothing is: planning then runs ahead of what trainers can have said, by as much
        as they happen to be fast.
        """
        reports = self._steps.pop(step - self._lag, {})
        if step >= self._floor:  # else it is counted already
            self._counts["late" if skipped else "used"] += len(reports)
        if skipped:
            return {}
        return reduced(reports[rank] for rank in sorted(reports))

    def adopt(self, before: Feedback) -> None:
        """Count on where another left off."""
        self._counts = Counter(before._counts)

    def pending(self) -> tuple[Report, ...]:
        return tuple(self._steps[step][rank] for step in sorted(self._steps) for rank in sorted(self._steps[step]))

    def counts(self) -> dict[str, int]:
        return {**{name: self._counts[name] for name in ("received", "used", "late")}, "pending": sum(map(len, self._steps.values()))}
