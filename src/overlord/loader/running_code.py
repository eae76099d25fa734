"""Code of a user's while it runs in a loader: which, with what, and for how long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class RunningUserCode:
    """Code of a user's that runs now, or might: nobody can end it, so it is named while it is
    waited for.
    """

    began: float
    thread: int
    what: str  # rows of a Python object; "": a transform, which knows itself
    path: str
    row: np.ndarray  # with which rows of it

    def words(self, stages: Any, seconds: float) -> str:
        what, row = (
            (self.what, -1)
            if self.what
            else getattr(stages, "running", lambda thread: ("", -1))(self.thread)
        )
        return f"in {what or 'transforms'} for {seconds:.0f} s" + self.where(row)

    def where(self, row: int = -1) -> str:
        if not len(self.row):
            return ""
        if not self.path:  # of several files, and shuffled
            return f", with {len(self.row)} rows"
        first, last = (row, row) if row >= 0 else (self.row.min(), self.row.max())
        return (
            f", with row {first} of {self.path}"
            if first == last
            else f", with rows {first} to {last} of {self.path}"
        )
