"""Runs of documents that a rank gets under context parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

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
