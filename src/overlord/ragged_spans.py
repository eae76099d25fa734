"""Ragged columns whose rows are spans of other memory, copied at the first access."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from overlord.sample import Ragged


class RaggedSpans(Ragged):
    """A ragged column whose rows are anywhere in an array: row i is ``held[starts[i]:stops[i]]``.

    ``values`` and ``offsets`` are those of a copy with adjacent rows, made at the first access.
    """

    __slots__ = ("_copy_of_rows", "_offsets", "held", "starts", "stops")
    __setattr__ = object.__setattr__  # a frozen dataclass refuses attributes of subclasses

    def __init__(self, held: np.ndarray, starts: np.ndarray, stops: np.ndarray):
        self.held, self.starts, self.stops = held, starts, stops
        self._offsets: np.ndarray | None = None
        self._copy_of_rows: np.ndarray | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows alone, as a column of adjacent rows."""
        return Ragged, (self.values, self.offsets)

    @property
    def offsets(self) -> np.ndarray:
        if self._offsets is None:
            self._offsets = _offsets_of(self.lengths)
        return self._offsets

    @property
    def values(self) -> np.ndarray:
        if self._copy_of_rows is None:
            self._copy_of_rows = _joined([self.held], np.zeros(len(self), np.int64), self)
        return self._copy_of_rows

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, i: int) -> np.ndarray:
        return self.held[self.starts[i] : self.stops[i]]

    @property
    def lengths(self) -> np.ndarray:
        return self.stops - self.starts

    @property
    def itemsize(self) -> int:
        return self.held.itemsize

    @property
    def nbytes(self) -> int:
        return self.offsets.item(-1) * self.held.itemsize  # a sum for each query would cost more

    def slice(self, start: int, stop: int) -> Ragged:
        return RaggedSpans(self.held, self.starts[start:stop], self.stops[start:stop])

    def compact(self) -> Ragged:
        return Ragged(self.values, self.offsets)

    def take(self, rows: np.ndarray) -> Ragged:
        return RaggedSpans(self.held, self.starts[rows], self.stops[rows]).compact()


class RaggedParts(Ragged):
    """Several ragged columns as one, in the order of the parts.

    ``values`` and ``offsets`` are those of ``Ragged.concat(parts)``. The values are copied at the
    first access. Row i is ``pieces[piece[i]][starts[i]:stops[i]]``.
    """

    __slots__ = ("_copy_of_rows", "_offsets", "piece", "pieces", "starts", "stops")
    __setattr__ = object.__setattr__

    def __init__(self, parts: Sequence[Ragged]):
        """``parts`` must not be empty."""
        spans = [spans_of(part) for part in parts]
        self.pieces = [s.held for s in spans]
        self.starts = np.concatenate([s.starts for s in spans])
        self.stops = np.concatenate([s.stops for s in spans])
        self.piece = np.repeat(np.arange(len(spans)), [len(s.starts) for s in spans])
        self._offsets = _offsets_of(self.stops - self.starts)
        self._copy_of_rows: np.ndarray | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the rows alone, as a column of adjacent rows."""
        return Ragged, (self.values, self.offsets)

    @property
    def offsets(self) -> np.ndarray:
        return self._offsets

    @property
    def values(self) -> np.ndarray:
        if self._copy_of_rows is None:
            self._copy_of_rows = _joined(self.pieces, self.piece, self)
        return self._copy_of_rows

    @property
    def nbytes(self) -> int:
        counts = np.bincount(self.piece, self.stops - self.starts, len(self.pieces))
        sizes = np.array([piece.itemsize for piece in self.pieces])
        return int((counts * sizes).sum())


def spans_of(rows: Ragged) -> RaggedSpans:
    """Return the rows of a column as spans of its values, without a copy."""
    if isinstance(rows, RaggedSpans):
        return rows
    return RaggedSpans(rows.values, rows.offsets[:-1], rows.offsets[1:])


def _offsets_of(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(out=offsets[1:])
    return offsets


def _joined(
    pieces: Sequence[np.ndarray], piece: np.ndarray, rows: RaggedSpans | RaggedParts
) -> np.ndarray:
    """Return a copy of the values of all rows, one row after another; adjacent rows as one run."""
    if not len(piece):
        return np.concatenate([held[:0] for held in pieces])
    breaks = (rows.starts[1:] != rows.stops[:-1]) | (piece[1:] != piece[:-1])
    first = np.append(0, np.flatnonzero(breaks) + 1)
    last = np.append(first[1:], len(piece)) - 1
    runs = zip(
        piece[first].tolist(), rows.starts[first].tolist(), rows.stops[last].tolist(), strict=True
    )
    # Also an empty array of each piece: the type depends on the columns, not on their rows.
    return np.concatenate([*(held[:0] for held in pieces), *(pieces[k][a:b] for k, a, b in runs)])
