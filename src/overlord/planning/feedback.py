"""Reports of trainers, and the plans that use them.

Plan t uses the reports of step t - ``feedback_lag`` alone, so that the prefetch window never
decides what a schedule receives. Values are stored by rank until then and joined whatever their
order of arrival: equal reports give equal streams.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from overlord.messages.control import Report

COUNTS = ("received", "used", "late")


def promised(report: Report, next_step: int, lag: int, prefetch: int) -> bool:
    """Return whether no plan that uses the report can exist yet.

    The rank that sends it has not taken ``next_step``, and planning is at most ``prefetch`` steps
    ahead of that rank.
    """
    return report.step + lag >= next_step + prefetch


def reduced(reports: Iterable[Report]) -> dict[str, float]:
    """Return one value for every metric of a step: the mean over the ranks that gave it.

    It is weighted by ``tokens/<source>`` if all gave those; token counts themselves are summed.
    Sums are exactly rounded, so the order of the ranks does not matter.
    """
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
    shares = [t / most for t in tokens]  # so that no product underflows
    return math.fsum(v * t for v, t in zip(values, shares, strict=True)) / math.fsum(shares)


class Feedback:
    """Stores reports until the plans that use them."""

    def __init__(self, lag: int, takes: bool, reports: Iterable[Report] = (), floor: int = 0):
        self._lag, self.takes, self._floor = lag, takes, floor
        self._steps: dict[int, dict[int, Report]] = {}
        self._counts: Counter[str] = Counter()
        for report in reports if takes else ():
            self._steps.setdefault(report.step, {})[report.rank] = report

    def in_time(self, report: Report, planned: int) -> bool:
        """Return whether the plan that uses a report is still to come.

        ``planned``: the last step with known weights.
        """
        return self.takes and report.step + self._lag > planned

    def add(self, report: Report, planned: int) -> None:
        self._counts["received"] += 1
        if self.in_time(report, planned):
            # the last report of a rank counts
            self._steps.setdefault(report.step, {})[report.rank] = report
        elif self.takes:
            self._counts["late"] += 1

    def use(self, step: int, skipped: bool) -> dict[str, float]:
        """Return the feedback for the plan of a step; later reports cannot change it.

        If a step was ``skipped`` meanwhile, the feedback is empty. Planning then runs ahead of the
        reports, by an amount that depends on the speed of the trainers.
        """
        reports = self._steps.pop(step - self._lag, {})
        if step >= self._floor:  # otherwise it is counted already
            self._counts["late" if skipped else "used"] += len(reports)
        if skipped:
            return {}
        return reduced(reports[rank] for rank in sorted(reports))

    def adopt(self, before: Feedback) -> None:
        """Continue the counts of the previous planner."""
        self._counts = Counter({name: n for name, n in before.counts().items() if name in COUNTS})

    def pending(self) -> tuple[Report, ...]:
        return tuple(
            self._steps[step][rank]
            for step in sorted(self._steps)
            for rank in sorted(self._steps[step])
        )

    def counts(self) -> dict[str, int]:
        return {
            **{name: self._counts[name] for name in COUNTS},
            "pending": sum(map(len, self._steps.values())),
        }
