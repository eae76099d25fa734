"""User code that runs in a loader: which code, on which rows, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RunningUserCode:
    """User code that is running or may be running.

    User code cannot be interrupted, so it is reported while a step waits for it.
    """

    began: float  # clock time
    thread: int  # identifier of the thread that called it
    what: str  # label of a dataset that yields rows; "": transforms, whose stages name themselves
    path: str  # file of the rows; "": several files
    row: np.ndarray  # rows that it processes, or the first and the last; empty if unknown
    unit: str = "row"  # of these numbers: "row", or "byte" for offsets

    def describe(self, code: Any, seconds: float) -> str:
        """Return the code, its row and the seconds so far; ``code``: the chunks or the stages."""
        name, row = getattr(code, "running", lambda thread: ("", -1))(self.thread)
        return f"in {self.what or name or 'transforms'} for {seconds:.0f} s" + self.location(row)

    def location(self, row: int = -1) -> str:
        if not len(self.row):
            return ""
        if not self.path:  # rows of several files, shuffled
            return f", with {len(self.row)} rows"
        first, last = (row, row) if row >= 0 else (self.row.min(), self.row.max())
        return (
            f", with {self.unit} {first} of {self.path}"
            if first == last
            else f", with {self.unit}s {first} to {last} of {self.path}"
        )
