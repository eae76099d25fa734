"""Result of inspecting one source: files, rows, schema, sampled documents and failures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    pass

if TYPE_CHECKING:
    pass


@dataclass(slots=True, kw_only=True)
class SourceReport:
    """What was found. ``failures``: why the job could not use this source, or a file of it, as it
    is.
    """

    name: str
    format: str = ""
    files: int = 0
    chunks: int = 0
    rows: int | None = None  # None: unknown until read
    nbytes: int = 0
    schema: dict[str, str] = field(default_factory=dict)
    sampled_files: int = 0
    sampled_rows: int = 0
    tokens: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # of the sampled documents, before on_long cuts any
    image_ends: np.ndarray = field(
        default_factory=lambda: np.zeros(0, np.int64)
    )  # where the last image of each ends; 0: it has none
    longer: int = 0  # documents that on_long deals with
    all_tokens: int = 0  # of all sampled documents
    lost: int = 0  # of these, how many on_long cuts or drops
    dropped: int = 0  # by a Filter
    bad: dict[str, int] = field(default_factory=dict)  # reason -> rows
    failures: list[str] = field(default_factory=list)

    @property
    def bad_rows(self) -> int:
        return sum(self.bad.values())

    def reasons(self) -> list[str]:
        often = sorted(self.bad.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{n} row{'s' * (n > 1)}: {reason}" for reason, n in often[:REASONS]]
        return shown + (
            [f"and {len(often) - REASONS} other reasons"] if len(often) > REASONS else []
        )


REASONS = 3  # of bad rows that are told, the most frequent first
