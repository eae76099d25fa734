"""The payload of documents as arrays: tokens, items such as images, and loss weights."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from overlord.ragged_spans import RaggedSpans
from overlord.sample import Ragged


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
