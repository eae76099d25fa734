"""Runs of documents that a rank gets under context parallelism, and their arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from overlord.constructor.pack import (
    BatchArrays,
    Documents,
    Layout,
    documents,
    per_token_arrays,
    with_document_arrays,
)
from overlord.mesh import Batch
from overlord.sample import ranges


def pieces(
    size: np.ndarray,
    first: np.ndarray,
    cp: int,
    cp_ranks: Sequence[int],
    split: str,
    *,
    by_row: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the slices of some cp ranks as runs of documents, rank after rank.

    The results are the document number, the offset in the document and the length of each run.
    ``size``: tokens of each document with padding; documents are concatenated. ``first``: number of
    the first document of each microbatch. ``by_row``: slice each document by itself.
    """
    ends = np.cumsum(size)
    bounds = np.append(0, ends)
    if by_row or split == "zigzag":
        start, length = cp_runs(bounds, cp, cp_ranks, split)
        doc = np.tile(
            np.repeat(np.arange(len(size)), len(start) // (len(size) * len(cp_ranks))),
            len(cp_ranks),
        )
        return doc, start - bounds[doc], length
    start, length = cp_runs(bounds[first], cp, cp_ranks, split)
    opens, closes = (
        np.searchsorted(ends, start, side="right"),
        np.searchsorted(ends, start + length, side="left"),
    )
    doc = ranges(opens, closes - opens + 1)
    run = np.repeat(np.arange(len(start)), closes - opens + 1)
    begins = np.maximum(start[run], bounds[doc])
    return doc, begins - bounds[doc], np.minimum((start + length)[run], ends[doc]) - begins


def cp_runs(
    bounds: np.ndarray, cp: int, ranks: Sequence[int], split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return start and length of the runs of some cp ranks, rank after rank.

    ``bounds``: the bounds of the units that are divided evenly. Raise ``ValueError`` for a unit
    that cannot be divided.
    """
    pieces = (
        {"zigzag": 2 * cp, "zigzag_whole": 2 * cp, "contiguous": cp, "none": 1}[split]
        if cp > 1
        else 1
    )
    start, size = bounds[:-1], np.diff(bounds)
    if (size % pieces).any():
        what = "a document" if split == "zigzag" else "a microbatch"
        raise ValueError(
            f"expected {what} of a multiple of {pieces} tokens for cp={cp}, cp_split={split!r}, "
            f"got {int(size[size % pieces > 0][0])}"
        )
    chunk = size // pieces
    if pieces == 1:
        numbers = np.zeros((len(ranks), 1), np.int64)
    elif pieces == cp:
        numbers = np.array([[r] for r in ranks])
    else:
        numbers = np.array([[r, 2 * cp - 1 - r] for r in ranks])
    starts = start[None, :, None] + numbers[:, None, :] * chunk[None, :, None]
    return starts.reshape(-1), np.broadcast_to(chunk[None, :, None], starts.shape).reshape(-1)


def build_slices(
    values: np.ndarray,
    start: np.ndarray,
    length: np.ndarray,
    microbatch: np.ndarray,
    n_microbatches: int,
    source: np.ndarray,
    batch: Batch,
    multiple: int,
    allocate: Callable[[int], np.ndarray],
    cp: int,
    cp_ranks: Sequence[int],
    weights: np.ndarray | None = None,
    continues: np.ndarray | None = None,
) -> list[BatchArrays]:
    """Build the slices of some context-parallel ranks without building the whole.

    The result equals ``rank_views.slice_arrays`` of ``build_arrays``, one batch per rank in
    ``cp_ranks``. Slices are concatenated rank after rank in one allocation. A run of a document is
    filled like a document, so the cost is hardly higher.
    """
    docs = documents(start, length, microbatch, n_microbatches, source, batch, multiple, continues)
    by_row = batch.layout == "padded"
    doc, base, size = pieces(docs.size, docs.first, cp, cp_ranks, batch.cp_split, by_row=by_row)
    arrays = run_arrays(values, docs, doc, base, size, batch, allocate, weights)
    n = len(cp_ranks)
    return [
        with_document_arrays(
            docs, {key: array.reshape(n, -1)[i] for key, array in arrays.items()}, cp, batch
        )
        for i in range(n)
    ]


def run_arrays(
    values: np.ndarray,
    docs: Documents,
    doc: np.ndarray,
    base: np.ndarray,
    size: np.ndarray,
    batch: Batch,
    allocate: Callable[[int], np.ndarray],
    weights: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Build the per-token arrays of runs of documents, one after another.

    Run i is ``size[i]`` tokens, at least one, of document ``doc[i]`` from token ``base[i]`` on.
    """
    left = docs.content[doc] - base
    on = left > size
    if docs.continues is not None:
        on |= docs.continues[doc] & (left > 0)
    layout = Layout(
        docs.start[doc],
        np.clip(left, 0, size),
        np.clip(docs.true[doc] - base, 0, size),
        size,
        base,
        on,
    )
    return per_token_arrays(values, weights, layout, int(size.sum()), batch, allocate)
