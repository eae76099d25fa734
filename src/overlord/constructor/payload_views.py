"""Microbatches whose token ids stay in the payload of their step until the first access.

A trainer in the process of the constructor needs no message. Its microbatches have the per-document
arrays, and views of the payload that the loaders read. The first access of a microbatch copies its
ids once, from the memory of the reader to the array ``tokens``, with those of the next
microbatches. The arrays are small enough for a CPU cache, and their memory is reused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from overlord.constructor.pack import (
    IGNORE,
    TOKEN_BYTES,
    BatchArrays,
    Documents,
    Layout,
    allocate_arrays,
    fill_targets,
    numbers,
    with_document_arrays,
)
from overlord.content import RaggedParts
from overlord.mesh import Batch
from overlord.sample import Ragged, ranges

NONE = np.zeros(0, np.int64)


# Tokens that are expanded at once. Their arrays fit the second cache of a core, and the calls into
# numpy cost little per token.
TOGETHER = 2**15


@dataclass(frozen=True, slots=True, eq=False)
class PayloadViews:
    """The documents of consecutive microbatches, as views of the payload.

    Document d is ``pieces[piece[d]][start[d]:stop[d]]``, followed by padding. Microbatch m has the
    documents ``first[m]`` to ``first[m + 1] - 1``, and the tokens ``tokens[m]`` to
    ``tokens[m + 1] - 1``.
    """

    pieces: list[np.ndarray]
    piece: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    size: np.ndarray  # int64: tokens of each document with padding
    content: np.ndarray  # int64: tokens of each document
    padded: bool  # whether some document has padding
    first: list[int]
    tokens: list[int]
    next_ids: np.ndarray | None  # label of the last token of each document; -1: none
    pad_id: int

    def nbytes(self, first: int, stop: int) -> int:
        """Return the bytes of the ids of microbatches ``first`` to ``stop - 1``."""
        return (self.tokens[stop] - self.tokens[first]) * self.pieces[0].itemsize

    def copy(self, first: int, stop: int, out: np.ndarray) -> np.ndarray:
        """Copy the ids of microbatches ``first`` to ``stop - 1``, with padding, to ``out``."""
        d, e, pieces = self.first[first], self.first[stop], self.pieces
        columns = (column[d:e].tolist() for column in (self.piece, self.start, self.stop))
        documents = [pieces[k][a:b] for k, a, b in zip(*columns, strict=True)]
        if self.padded:
            holes = (self.size[d:e] - self.content[d:e]).tolist()
            pad = np.full(max(holes, default=0), self.pad_id, np.min_scalar_type(self.pad_id))
            padding = [pad[:n] for n in holes]
            documents = list(chain.from_iterable(zip(documents, padding, strict=True)))
        if documents:
            np.concatenate(documents, out=out, casting="same_kind")
        return out

    def ids(self, first: int, stop: int) -> np.ndarray:
        """Return a copy of the ids of microbatches ``first`` to ``stop - 1``, to be sent."""
        kinds = [piece.dtype for piece in self.pieces]
        if self.padded:
            kinds.append(np.min_scalar_type(self.pad_id))
        total = self.tokens[stop] - self.tokens[first]
        return self.copy(first, stop, np.empty(total, np.result_type(*kinds)))

    def runs(self, first: int, stop: int) -> list[tuple[int, int]]:
        """Divide microbatches ``first`` to ``stop - 1`` into runs of at most ``TOGETHER`` tokens.

        A run has at least one microbatch.
        """
        runs, begin = list[tuple[int, int]](), first
        for m in range(first + 1, stop + 1):
            if m == stop or self.tokens[m + 1] - self.tokens[begin] > TOGETHER:
                runs.append((begin, m))
                begin = m
        return runs

    def expand(
        self, first: int, stop: int, labels: str, allocate: Callable[[int], np.ndarray], room: int
    ) -> list[dict[str, np.ndarray]]:
        """Return the per-token arrays of microbatches ``first`` to ``stop - 1``, read-only.

        ``labels``: their convention. ``room``: least number of tokens to allocate.
        """
        d, e, before = self.first[first], self.first[stop], self.tokens[first]
        total = self.tokens[stop] - before
        arrays = allocate_arrays(total, lambda nbytes: allocate(max(nbytes, TOKEN_BYTES * room)))
        size, content = self.size[d:e], self.content[d:e]
        ends = size.cumsum()
        offset = ends - size
        tokens = self.copy(first, stop, arrays["tokens"])
        np.subtract(numbers(total)[:total], offset.repeat(size), out=arrays["position_ids"])
        if self.padded or labels != "shifted":
            layout = Layout(offset, content, content, size)
            holes = ranges(offset + content, size - content)
            fill_targets(arrays, NONE, holes, offset, offset, layout, labels)
        else:  # as ``fill_targets``, with fewer calls
            ends -= 1
            arrays["labels"][:-1] = tokens[1:]
            arrays["labels"][ends] = IGNORE
            arrays["loss_mask"].fill(1)
            arrays["loss_mask"][ends] = 0
        if self.next_ids is not None and labels == "shifted":
            known = np.flatnonzero(self.next_ids[d:e] >= 0)
            ends = (offset + content)[known] - 1
            arrays["labels"][ends] = self.next_ids[d:e][known]
            arrays["loss_mask"][ends] = 1
        for array in arrays.values():
            array.flags.writeable = False
        bounds = list(pairwise(at - before for at in self.tokens[first : stop + 1]))
        return [{key: array[a:b] for key, array in arrays.items()} for a, b in bounds]


def build_views(
    payload: Ragged, docs: Documents, batch: Batch, rows: np.ndarray | None = None
) -> tuple[BatchArrays, PayloadViews]:
    """Return the per-document arrays of microbatches, and the views of their ids.

    ``rows``: the payload row of each document, if it is known. An entry for each empty microbatch
    may be missing; then the rows are searched for.
    """
    if isinstance(payload, RaggedParts) and len(payload):
        # Starts count over all joined values; a document is inside one row of the payload.
        known = rows is not None and len(rows) == len(docs.start)
        row = rows if known else payload.offsets[1:-1].searchsorted(docs.start, side="right")
        assert row is not None
        pieces, piece = payload.pieces, payload.piece[row]
        start = docs.start - payload.offsets[row] + payload.starts[row]
    else:
        pieces, piece, start = [payload.values], np.zeros(len(docs.start), np.int64), docs.start
    stop = start + docs.content
    next_ids = None
    if docs.continues is not None:
        next_ids = np.full(len(docs.start), -1, np.int64)
        for d in np.flatnonzero(docs.continues).tolist():
            next_ids[d] = pieces[piece[d]][stop[d]]
    views = PayloadViews(
        pieces,
        piece,
        start,
        stop,
        docs.size,
        docs.content,
        bool((docs.size > docs.content).any()),
        docs.first.tolist(),
        np.append(0, np.cumsum(docs.size))[docs.first].tolist(),
        next_ids,
        batch.pad_id,
    )
    return with_document_arrays(docs, {}, 1, batch, next_ids=next_ids), views
