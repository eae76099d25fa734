"""The payload of documents as arrays: tokens, items such as images, and loss weights.

The tokens of a source of ids stay in the memory that Arrow decoded: they are spans of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from overlord.sample import Ragged

# ----------------------------------------------------------------------------
# Ragged columns whose rows are spans of other memory, copied at the first access.


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


# ----------------------------------------------------------------------------
# Documents with their items and weights.


class Items(NamedTuple):
    """Items of documents, such as images: the bytes of each item, document by document."""

    bytes: Ragged  # uint8, item after item
    counts: np.ndarray  # int64: items of each document

    @property
    def first(self) -> np.ndarray:
        """The number of each document's first item, then the total: int64 [documents + 1]."""
        first = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=first[1:])
        return first

    def slice(self, start: int, stop: int) -> Items:
        """Return the items of documents ``start`` to ``stop - 1``, as views."""
        counts = self.counts[start:stop]
        before = int(self.counts[:start].sum())
        return Items(self.bytes.slice(before, before + int(counts.sum())), counts)

    def take(self, documents: np.ndarray) -> Items:
        """Return a copy of the items of the chosen documents, in the given order."""
        return Scattered([self.bytes], self.counts).take(documents)

    @staticmethod
    def none(documents: int) -> Items:
        return Items(
            Ragged(np.zeros(0, np.uint8), np.zeros(1, np.int64)), np.zeros(documents, np.int64)
        )

    @staticmethod
    def concat(parts: Sequence[Items]) -> Items:
        if not parts:
            return Items.none(0)
        some = [p.bytes for p in parts if len(p.bytes)] or [parts[0].bytes]
        return Items(Ragged.concat(some), np.concatenate([p.counts for p in parts]))


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """The payload of documents: tokens, items such as images, and loss weights of the tokens.

    ``items`` and ``weights`` are None if no document has any. ``weights`` has the offsets of
    ``tokens``.
    """

    tokens: Ragged
    items: Items | None = None
    weights: Ragged | None = None  # uint8 if all are 0 or 1, else float32

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return (
            self.tokens.nbytes
            + (0 if self.items is None else self.items.bytes.nbytes)
            + (0 if self.weights is None else self.weights.nbytes)
        )

    def bytes_before(self, document: int) -> int:
        """Return the bytes of the documents before ``document``."""
        if self.items is not None or self.weights is not None:
            return self.slice(0, document).nbytes
        offsets = self.tokens.offsets
        return (offsets.item(document) - offsets.item(0)) * self.tokens.itemsize

    def adjacent(self) -> Content:
        """Return the documents with adjacent tokens, copied if they are spans of other memory."""
        if not isinstance(self.tokens, RaggedSpans):
            return self
        return Content(self.tokens.compact(), self.items, self.weights)

    def slice(self, start: int, stop: int) -> Content:
        """Return documents ``start`` to ``stop - 1`` as views, without a copy."""
        return Content(
            self.tokens.slice(start, stop),
            None if self.items is None else self.items.slice(start, stop),
            None if self.weights is None else self.weights.slice(start, stop),
        )

    def compact(self) -> Content:
        """Return a copy of the documents, so that the memory they are views of can be freed."""
        items = (
            None
            if self.items is None
            else Items(self.items.bytes.compact(), self.items.counts.copy())
        )
        weights = None if self.weights is None else self.weights.compact()
        return Content(self.tokens.compact(), items, weights)

    def take(self, documents: np.ndarray) -> Content:
        """Return a copy of the chosen documents, in the given order."""
        return Content(
            self.tokens.take(documents),
            None if self.items is None else self.items.take(documents),
            None if self.weights is None else self.weights.take(documents),
        )

    def take_items(self, rows: np.ndarray) -> Ragged:
        """Return a copy of the chosen items, in the given order.

        ``rows`` counts items over all documents.
        """
        return (self.items or Items.none(len(self))).bytes.take(rows)

    @staticmethod
    def pick(parts: Sequence[Content], documents: np.ndarray) -> Content:
        """Return a copy of the chosen documents of several contents, in the given order.

        ``documents`` counts over all contents. Items are copied once, whatever the number of
        contents.
        """
        tokens = Ragged.concat([p.tokens for p in parts]).take(documents)
        weights = Content.weights_of(parts)
        return Content(
            tokens,
            None if (scattered := Scattered.of(parts)) is None else scattered.take(documents),
            None if weights is None else weights.take(documents),
        )

    @staticmethod
    def concat(parts: Sequence[Content]) -> Content:
        """Return the documents of all contents, in order; a single content itself, without a copy.

        ``parts`` must not be empty. If only some contents have items, the documents of the others
        get none.
        """
        if len(parts) == 1:
            return parts[0]
        tokens, items = Ragged.concat([p.tokens for p in parts]), None
        if any(p.items is not None for p in parts):
            items = Items.concat(
                [Items.none(len(p)) if p.items is None else p.items for p in parts]
            )
        return Content(tokens, items, Content.weights_of(parts))

    @staticmethod
    def weights_of(parts: Sequence[Content]) -> Ragged | None:
        """Return the weights of several contents, joined as their tokens are; None if none has any.

        The tokens of a content without weights have the weight 1.
        """
        if all(p.weights is None for p in parts):
            return None
        return Ragged.concat(
            [ones_like(p.tokens) if p.weights is None else p.weights for p in parts]
        )


class Scattered:
    """The items of several contents, as one column without a copy."""

    def __init__(self, parts: Sequence[Ragged], counts: np.ndarray):
        self.parts, self.counts = parts, counts  # items of each document
        self._bounds = [0, *np.cumsum([len(p) for p in parts]).tolist()]

    @staticmethod
    def of(parts: Sequence[Content]) -> Scattered | None:
        """Return the items of several contents; None if ``items`` is None in all of them."""
        if all(p.items is None for p in parts):
            return None
        counts = [np.zeros(len(p), np.int64) if p.items is None else p.items.counts for p in parts]
        return Scattered(
            [p.items.bytes for p in parts if p.items is not None and len(p.items.bytes)],
            np.concatenate(counts),
        )

    def __len__(self) -> int:
        return self._bounds[-1]

    def __getitem__(self, i: int) -> np.ndarray:
        k = bisect_right(self._bounds, i) - 1
        return self.parts[k][i - self._bounds[k]]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    @property
    def first(self) -> np.ndarray:
        """The number of each document's first item, then the total: int64 [documents + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    def rows(self, documents: np.ndarray) -> np.ndarray:
        """Return the item numbers of all items of these documents, document by document: int64."""
        counts = self.counts[documents]
        ends = np.cumsum(counts)
        return np.repeat(self.first[documents] - ends + counts, counts) + np.arange(
            int(counts.sum())
        )

    def take(self, documents: np.ndarray) -> Items:
        return Items(
            Ragged.from_rows([self[i] for i in self.rows(documents).tolist()], np.uint8),
            self.counts[documents],
        )


def ones_like(tokens: Ragged) -> Ragged:
    """Return the weight 1 for every token."""
    offsets = tokens.offsets - tokens.offsets[0]
    return Ragged(np.ones(int(offsets[-1]), np.uint8), offsets)
