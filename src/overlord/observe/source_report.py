"""The result of ``overlord inspect`` for one source."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from overlord.sample import Ragged, no_items

REASONS = 3  # reasons of bad rows that are named, the most frequent first


@dataclass(slots=True, kw_only=True)
class SourceReport:
    """The result of inspecting one source: files, rows, schema, sampled documents and failures.

    ``failures``: the reasons why the job cannot use this source, or one of its files.
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
    # Lengths of the sampled documents, before on_long truncates any.
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Tokens up to the end of the last image of each document; 0: it has no image.
    image_ends: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # Tokens of the documents of sampled samples, before on_long; empty: they are single documents.
    documents: Ragged = field(default_factory=lambda: no_items(0))
    longer: int = 0  # documents longer than the context
    all_tokens: int = 0  # of all sampled documents
    lost: int = 0  # tokens that on_long truncates or drops
    dropped: int = 0  # rows that a Filter dropped
    bad: dict[str, int] = field(default_factory=dict)  # reason -> rows
    # reason -> path, and number of the first such row that was sampled
    first_bad: dict[str, tuple[str, int]] = field(default_factory=dict)
    row_unit: str = "row"  # unit of row numbers: "row", or "byte" for offsets
    lines: dict[tuple[str, int], int] = field(default_factory=dict)  # line numbers of first_bad
    failures: list[str] = field(default_factory=list)

    @property
    def bad_rows(self) -> int:
        """The number of sampled rows that cannot be used."""
        return sum(self.bad.values())

    def bad_places(self) -> dict[str, str]:
        """Return the file and row, line or byte of the first sampled row of each reason."""
        return {
            reason: f"{path}, line {self.lines[path, row]}"
            if (path, row) in self.lines
            else f"{path}, {self.row_unit} {row}"
            for reason, (path, row) in self.first_bad.items()
        }

    def warnings(self) -> list[str]:
        """Return one text for each defect of the data that the job tolerates."""
        found = [f"source {self.name!r}: {reason}" for reason in self.reasons()]
        if self.lost:
            found.append(
                f"source {self.name!r}: {self.longer} documents are longer than max_document; "
                f"{self.lost} of {self.all_tokens} tokens are lost"
            )
        return found

    def reasons(self) -> list[str]:
        """Return lines of text with the REASONS most frequent reasons of bad rows."""
        often = sorted(self.bad.items(), key=lambda item: (-item[1], item[0]))
        places = self.bad_places()
        shown = [
            f"{n} row{'s' * (n > 1)}: {reason}"
            + (f"; the first: {places[reason]}" if reason in places else "")
            for reason, n in often[:REASONS]
        ]
        return shown + (
            [f"and {len(often) - REASONS} other reasons"] if len(often) > REASONS else []
        )
