"""Acknowledgements that wait for reports, where the mixture learns from what trainers report.

Reports arrive through the launching process, acknowledgements directly from constructor workers. A
step counts as acknowledged once all earlier reports are here: otherwise a plan could be made
without a report that was sent in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from overlord.messages.control import Consumed


class ReportBarrier:
    """Holds acknowledgements until the launching process has forwarded earlier reports.

    ``ask(mark)`` requests an answer that follows them; ``release(mark)`` receives it. Marks of an
    earlier coordinator are ignored, so each starts at another ``first``. Without ``learns`` nothing
    is held, nor where the coordinator runs in the launching process. Runs on: event loop.
    """

    def __init__(
        self, learns: bool = False, ask: Callable[[int], None] = lambda mark: None, first: int = 0
    ):
        self.learns, self._ask, self._mark = learns, ask, first
        self._unsure: list[Consumed] = []
        self._n_asked = 0  # of them, those that the last request was made for

    def add(self, taken: Iterable[Consumed]) -> None:
        """Hold acknowledgements without a request; ``ask`` follows."""
        self._unsure += taken

    def hold(self, taken: list[Consumed]) -> list[Consumed]:
        """Return the acknowledgements that count now: all, where no report is waited for."""
        if not self.learns:
            return taken
        if taken:
            self._unsure += taken
            self.ask()
        return []

    def ask(self) -> None:
        """Request the mark after all earlier reports, unless a request is under way."""
        if self._unsure and not self._n_asked:
            self._n_asked, self._mark = len(self._unsure), self._mark + 1
            self._ask(self._mark)

    def release(self, mark: int) -> list[Consumed] | None:
        """Return the acknowledgements that a mark releases; None for an unknown mark."""
        if mark != self._mark or not self._n_asked:
            return None
        sure, self._unsure = self._unsure[: self._n_asked], self._unsure[self._n_asked :]
        self._n_asked = 0
        self.ask()
        return sure
