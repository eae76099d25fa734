"""Samples of several documents, such as a chosen and a rejected response to one prompt.

The tokens of such a sample are those of its documents, one after another. A column with values by
document has one row for each sample, and one value for each of its documents. A row without values
belongs to a sample that is one document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from overlord.sample import Ragged, no_items, ranges

LENGTHS = "document_lengths"  # metadata: int64, tokens of each document
PROMPTS = "prompt_lengths"  # metadata: int64, tokens of the prompt that begins each document
MOST_PADDING = 127  # tokens: 8 cp ranks and 8 tp ranks pad to a multiple of 128
SHARE = 32  # at most one 32nd of a microbatch is reserved for padding


@dataclass(frozen=True, slots=True, eq=False)
class SampleDocuments:
    """The documents of some samples of a step, and values of each document by name."""

    number: np.ndarray  # int64: number of each sample in the step, in the order of the draw
    lengths: Ragged  # int64: tokens of each document
    columns: Mapping[str, Ragged]  # by name; a sample may have no values

    def __len__(self) -> int:
        return len(self.number)

    @property
    def counts(self) -> np.ndarray:
        """The number of documents of each sample: int64."""
        return np.maximum(self.lengths.lengths, 1)

    def take(self, rows: np.ndarray) -> SampleDocuments:
        """Return the documents of the chosen samples, in the given order."""
        columns = {name: column.take(rows) for name, column in self.columns.items()}
        return replace(
            self, number=self.number[rows], lengths=self.lengths.take(rows), columns=columns
        )

    def sizes(self, tokens: np.ndarray) -> np.ndarray:
        """Return the tokens of every document, sample after sample; ``tokens``: of the samples."""
        return by_document(self.lengths, tokens, self.lengths)

    def values(self, name: str) -> np.ndarray:
        """Return a column as one array with a value for each document, sample after sample.

        A document without a value has NaN, and one without a prompt a prompt of 0 tokens.
        """
        column = self.columns[name]
        missing = np.full(len(self), 0) if name == PROMPTS else np.full(len(self), np.nan)
        return by_document(self.lengths, missing, column)

    def problem(self, tokens: np.ndarray) -> str:
        """Return why these documents do not fit samples of so many tokens; "" if they do."""
        n = len(tokens)
        if len(self.number) != n or len(self.lengths) != n:
            return f"expected documents of {n} samples, got those of {len(self.lengths)}"
        flat = _flat(self.lengths)
        if len(flat) and int(flat.min()) < 1:
            return f"expected documents of at least one token, got one of {int(flat.min())}"
        some, counts = self.lengths.lengths > 0, self.counts
        total = sums(self.lengths)
        if wrong := np.flatnonzero(some & (total != tokens)).tolist():
            i = wrong[0]
            return f"expected documents of {tokens[i]} tokens in all, got {total[i]}"
        for name, column in self.columns.items():
            held = column.lengths if len(column) == n else np.full(n, -1)
            if wrong := np.flatnonzero((held != 0) & (held != counts)).tolist():
                i = wrong[0]
                return f"{name}: expected {counts[i]} values, one for each document, got {held[i]}"
        return ""


def documents_of(
    columns: Mapping[str, object], names: tuple[str, ...], rows: int
) -> SampleDocuments:
    """Return the documents of samples from their metadata ``columns``.

    ``names``: the columns with values by document. A missing one has no values.
    """

    def column(name: str) -> Ragged:
        found = columns.get(name)
        kind = np.int64 if name in (LENGTHS, PROMPTS) else np.float64
        return found if isinstance(found, Ragged) else no_items(rows, kind)

    return SampleDocuments(np.arange(rows), column(LENGTHS), {name: column(name) for name in names})


def by_document(lengths: Ragged, single: np.ndarray, column: Ragged) -> np.ndarray:
    """Return the values of a column document by document, sample after sample.

    ``single``: the value of each sample for documents that the column lacks.
    """
    counts = np.maximum(lengths.lengths, 1)
    found = np.repeat(single, counts).astype(
        np.promote_types(single.dtype, column.values.dtype), copy=False
    )
    held = column.lengths == counts
    first = np.cumsum(counts) - counts
    found[ranges(first[held], counts[held])] = _flat(column.take(np.flatnonzero(held)))
    return found


def sums(column: Ragged) -> np.ndarray:
    """Return the sum of the values of every row; 0 for a row without values."""
    running = np.concatenate(([0], np.cumsum(_flat(column))))
    at = column.offsets - column.offsets[0]
    found: np.ndarray = running[at[1:]] - running[at[:-1]]
    return found


def padded_sizes(tokens: np.ndarray, lengths: Ragged | None, multiple: int) -> np.ndarray:
    """Return the tokens of samples whose documents are padded to a multiple: int64."""
    wide = tokens.astype(np.int64, copy=False)
    if multiple == 1:
        return wide
    found: np.ndarray = -(-wide // multiple) * multiple
    if lengths is None or not len(lengths.values):
        return found
    padded = Ragged(-(-_flat(lengths) // multiple) * multiple, lengths.offsets - lengths.offsets[0])
    return np.where(lengths.lengths > 0, sums(padded), found)


def reserve(room: int, documents: np.ndarray) -> np.ndarray:
    """Return the tokens that each document of a sample leaves free in a microbatch.

    ``documents``: documents of the sample. The mesh may pad a document by as many tokens. The
    reserve must not depend on the mesh, since a sample has the same tokens on all of them.
    """
    found: np.ndarray = np.minimum(MOST_PADDING, room // (SHARE * np.maximum(documents, 1)))
    return np.where(documents > 1, found, 0)


def _flat(column: Ragged) -> np.ndarray:
    return column.values[column.offsets[0] : column.offsets[-1]]
