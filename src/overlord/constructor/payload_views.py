"""Microbatches whose token ids stay in the payload of their step until the first access.

A trainer in the process of the constructor needs no message. Its microbatches have the per-document
arrays, and views of the payload that the loaders read. The first access of a microbatch copies its
ids once, from the memory of the reader to the array ``tokens`` (``compact.expand``). That array is
small enough for the CPU cache, and its memory is reused for the next microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np

from overlord.constructor.batch_arrays import BatchArrays
from overlord.constructor.pack import Documents, with_document_arrays
from overlord.mesh import Batch
from overlord.sample import Ragged, RaggedParts


@dataclass(frozen=True, slots=True, eq=False)
class PayloadViews:
    """The documents of consecutive microbatches, as views of the payload.

    Document d is ``pieces[k][start:stop]`` with (k, start, stop) = ``spans[d]``, followed by
    ``holes[d]`` times ``pad_id``. Microbatch m has the documents ``first[m]`` to
    ``first[m + 1] - 1``, and the tokens ``tokens[m]`` to ``tokens[m + 1] - 1``.
    """

    pieces: list[np.ndarray]
    spans: list[tuple[int, int, int]]
    holes: list[int] | None  # None: no document has padding
    first: list[int]
    tokens: list[int]
    pad_id: int

    def nbytes(self, first: int, stop: int) -> int:
        """Return the bytes of the ids of microbatches ``first`` to ``stop - 1``."""
        return (self.tokens[stop] - self.tokens[first]) * self.pieces[0].itemsize

    def copy(self, first: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Copy the ids of microbatches ``first`` to ``stop - 1``, with padding, to ``out``."""
        d, e, pieces = self.first[first], self.first[stop], self.pieces
        documents = [pieces[k][a:b] for k, a, b in self.spans[d:e]]
        if self.holes is not None:
            holes = self.holes[d:e]
            pad = np.full(max(holes, default=0), self.pad_id, np.min_scalar_type(self.pad_id))
            padding = [pad[:n] for n in holes]
            documents = list(chain.from_iterable(zip(documents, padding, strict=True)))
        if documents:
            np.concatenate(documents, out=out, casting="same_kind")
        return out

    def ids(self, first: int, stop: int) -> np.ndarray:
        """Return a copy of the ids of microbatches ``first`` to ``stop - 1``, to be sent."""
        kinds = [piece.dtype for piece in self.pieces]
        if self.holes is not None:
            kinds.append(np.min_scalar_type(self.pad_id))
        total = self.tokens[stop] - self.tokens[first]
        return self.copy(first, stop, np.empty(total, np.result_type(*kinds)))


def build_views(
    payload: Ragged | RaggedParts, docs: Documents, batch: Batch
) -> tuple[BatchArrays, PayloadViews]:
    """Return the per-document arrays of microbatches, and the views of their ids."""
    if isinstance(payload, RaggedParts):
        pieces, bounds = payload.pieces, payload.bounds
        piece = np.searchsorted(bounds[1:-1], docs.start, side="right")
        start = docs.start - bounds[piece]
    else:
        pieces, piece, start = [payload.values], np.zeros(len(docs.start), np.int64), docs.start
    holes = docs.size - docs.content
    next_ids = None
    if docs.continues is not None:
        next_ids = np.full(len(docs.start), -1, np.int64)
        on = docs.continues
        next_ids[on] = payload.joined.values[(docs.start + docs.content)[on]]
    views = PayloadViews(
        pieces,
        list(zip(piece.tolist(), start.tolist(), (start + docs.content).tolist(), strict=True)),
        holes.tolist() if holes.any() else None,
        docs.first.tolist(),
        np.append(0, np.cumsum(docs.size))[docs.first].tolist(),
        batch.pad_id,
    )
    return with_document_arrays(docs, {}, 1, batch, next_ids=next_ids), views
