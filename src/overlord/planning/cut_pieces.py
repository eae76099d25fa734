"""Cut the samples of a step into chunks of equal length, as one stream of tokens. Pure.

The parts of samples that a step takes are ordered and concatenated, and every ``context`` tokens
are one chunk. A *piece* is the part of one sample in one chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from overlord.hashing import position_in_key
from overlord.sample import Buffer


class Pieces(NamedTuple):
    """The pieces of a step, chunk after chunk."""

    sample: np.ndarray  # int64: row of the sample, as given to ``cut_pieces``
    offset: np.ndarray  # int64: tokens of the sample before the piece
    length: np.ndarray  # int64
    chunk: np.ndarray  # int64, rising
    end: np.ndarray  # int64, by sample: its tokens that steps have received


def cut_pieces(
    source: np.ndarray, tokens: np.ndarray, cut: Sequence[int], wanted: Sequence[int], context: int
) -> Pieces:
    """Return the pieces of samples, which are listed source by source in stream order.

    ``cut[i]``: tokens of the first sample of source i that earlier steps have received.
    ``wanted[i]``: tokens of source i in this step. Tokens a to b of t of a source have the position
    (a + b)/2t, as in ``step_order``.
    """
    tokens = tokens.astype(np.int64)
    rank = position_in_key(source, len(wanted))
    start = np.where(rank == 0, np.asarray([*cut] or [0] * len(wanted), np.int64)[source], 0)
    left = tokens - start
    ends = np.cumsum(left)
    before = ends - left
    before -= before[np.flatnonzero(rank == 0)][np.cumsum(rank == 0) - 1]
    total = np.asarray(wanted, np.int64)[source]
    length = np.minimum(left, total - before)
    order = np.argsort((2 * before + length) / (2 * total), kind="stable")
    stop = np.cumsum(length[order])
    begin = stop - length[order]
    first = begin // context
    n = (stop - 1) // context - first + 1
    at = np.repeat(np.arange(len(order)), n)
    chunk = first[at] + np.arange(len(at)) - np.repeat(np.cumsum(n) - n, n)
    a = np.maximum(begin[at], chunk * context)
    b = np.minimum(stop[at], (chunk + 1) * context)
    sample = order[at]
    return Pieces(sample, start[sample] + a - begin[at], b - a, chunk, start + length)


def piece_buffer(samples: Buffer, pieces: Pieces) -> Buffer:
    """Return the buffer of a strategy: one row for each piece, chunk after chunk."""
    whole = samples.meta["tokens"]
    assert isinstance(whole, np.ndarray)
    buffer = samples.take(pieces.sample)
    meta = dict(buffer.meta) | {"tokens": pieces.length}
    remaining = whole.astype(np.int64)[pieces.sample] - pieces.offset - pieces.length
    for array in (pieces.length, pieces.offset, pieces.chunk, remaining):
        array.flags.writeable = False
    return replace(buffer, meta=meta, chunk=pieces.chunk, offset=pieces.offset, remaining=remaining)
