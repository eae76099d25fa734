"""The reports of a rank that plans or states may still need."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from overlord.messages.control import Report, SentReport

log = logging.getLogger("overlord")

REPORTS_UNUSED = "reports are not used: the mixture has neither a state nor takes_feedback = True"


def warn_of_lost_values(report: Report, lost: int) -> None:
    """Warn of the values of a report that are not finite."""
    log.warning(
        "rank %d, step %d: %d reported values ignored: expected finite numbers",
        report.rank,
        report.step,
        lost,
    )


# Reports are kept for this multiple of ``feedback_lag`` steps: states of slower ranks need them.
KEPT_LAGS = 2


class KeptReports:
    """The last reports of one rank, by step. Pure.

    A rank's last report of a step counts, so an earlier one is dropped, unless the last may be too
    late. ``lag`` is the job's ``feedback_lag``.
    """

    def __init__(self, lag: int):
        self._kept_steps = KEPT_LAGS * lag
        self._reports: dict[tuple[int, bool], SentReport] = {}

    def add(self, sent: SentReport) -> None:
        """Keep a report; do nothing if it is kept already."""
        key = sent.report.step, sent.in_time
        if (former := self._reports.get(key)) is None or former.number < sent.number:
            self._reports[key] = sent

    def drop_passed(self, taken: int) -> None:
        """Drop the reports that no plan or state needs once the rank has taken step ``taken``."""
        oldest = taken - self._kept_steps
        if any(step < oldest for step, _ in self._reports):
            self._reports = {k: sent for k, sent in self._reports.items() if k[0] >= oldest}

    def after(self, number: int = 0) -> tuple[SentReport, ...]:
        """Return the reports with a higher number, in the order of their numbers."""
        found = (sent for sent in self._reports.values() if sent.number > number)
        return tuple(sorted(found, key=lambda sent: sent.number))

    def clear(self) -> None:
        self._reports.clear()


class ReportSender:
    """The reports of a client: numbered, and kept until plans and states no longer need them.

    ``client`` distinguishes the clients that a rank has one after the other. ``used`` is whether a
    report was added, so that a client of a job without reports asks for none. Runs on: any thread.
    """

    def __init__(self, lag: int, client: int = 0):
        self._lock = threading.Lock()
        self._number, self._kept = client << 32, KeptReports(lag)
        self.used = False

    def add(self, report: Report, in_time: bool) -> SentReport:
        """Number a report, and keep it."""
        with self._lock:
            self._number += 1
            self.used = True
            sent = SentReport(self._number, report, in_time)
            self._kept.add(sent)
            return sent

    def kept(self, after: int = 0) -> tuple[SentReport, ...]:
        """Return the kept reports with a number above ``after``."""
        with self._lock:
            return self._kept.after(after)

    def drop_passed(self, taken: int) -> None:
        """Drop the reports that no plan or state needs once the rank has taken step ``taken``."""
        with self._lock:
            self._kept.drop_passed(taken)

    def clear(self) -> None:
        """Drop all reports: the session was rewound to a step before them."""
        with self._lock:
            self._kept.clear()


class KnownReports(NamedTuple):
    """The reports that a planner has received in time, and the last number of each rank.

    It has applied all reports of a rank up to that number, those that came too late included.
    """

    reports: Sequence[Report] = ()
    applied: Mapping[int, int] = MappingProxyType({})

    def with_pending(self, sent: Iterable[SentReport]) -> KnownReports:
        """Return these reports, and those of ``sent`` that the planner will receive in time."""
        more = [
            one.report
            for one in sent
            if one.in_time and one.number > self.applied.get(one.report.rank, 0)
        ]
        return self._replace(reports=[*self.reports, *more])
