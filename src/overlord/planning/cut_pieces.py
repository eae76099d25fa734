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
from overlord.sample import LOSS_RUNS, LOSS_WEIGHTS, Buffer, Column, Columns, Ragged, ranges


class Pieces(NamedTuple):
    """The pieces of a step, chunk after chunk."""

    sample: np.ndarray  # int64: row of the sample, as given to ``cut_pieces``
    offset: np.ndarray  # int64: tokens of the sample before the piece
    length: np.ndarray  # int64
    chunk: np.ndarray | None  # int64, ascending; None: the samples are cut without chunks
    end: np.ndarray  # int64, by sample: its tokens that steps have received, with this one


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
    """Return the buffer of a strategy: one row for each piece, in their order.

    The metadata ``loss_weights`` is that of the piece, from the runs of weights of its sample.
    """
    whole = pieces.end if pieces.chunk is None else samples.meta["tokens"]
    assert isinstance(whole, np.ndarray)
    remaining = whole.astype(np.int64)[pieces.sample] - pieces.offset - pieces.length
    runs = samples.meta.get(LOSS_RUNS)
    own = {n: c for n, c in samples.meta.items() if n not in (LOSS_WEIGHTS, LOSS_RUNS)}
    buffer = replace(samples, meta=own).take(pieces.sample)
    meta: dict[str, Column] = dict(buffer.meta) | {"tokens": pieces.length}
    if isinstance(runs, Ragged):
        ahead = remaining > 0 if samples.batch.labels == "shifted" else 0
        meta[LOSS_WEIGHTS] = weights_of_spans(
            runs, pieces.sample, pieces.offset + 1, pieces.offset + pieces.length + ahead
        )
    for array in (pieces.length, pieces.offset, pieces.chunk, remaining):
        if array is not None:
            array.flags.writeable = False
    return replace(
        buffer,
        meta=Columns(meta, samples.step),
        chunk=pieces.chunk,
        offset=pieces.offset,
        remaining=remaining,
    )


def weights_of_spans(
    runs: Ragged, sample: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> Ragged:
    """Return the sum of the weights of tokens ``first`` to ``stop - 1`` of samples.

    ``runs``: by sample, the lengths and weights of its runs of equal weights; empty: the sample has
    no weights. The result is a list for each span: its sum, or nothing if there are no weights.
    """
    a, b = int(runs.offsets[0]), int(runs.offsets[-1])
    length, weight = runs.values[a:b].reshape(-1, 2).T
    ends = np.append(0, np.cumsum(length.astype(np.int64)))  # of all samples, one after another
    before = (runs.offsets - a) // 2  # the number of runs before each sample
    weighed = np.diff(before)[sample] > 0
    begin = ends[before[sample[weighed]]]
    low, high = begin + first[weighed], begin + np.maximum(stop, first)[weighed]
    run = np.searchsorted(ends, low, side="right") - 1
    count = np.searchsorted(ends, high, side="left") - run
    at = ranges(run, count)
    tokens = np.minimum(ends[at + 1], np.repeat(high, count)) - np.maximum(
        ends[at], np.repeat(low, count)
    )
    some, sums = count > 0, np.zeros(len(count))
    if some.any():
        sums[some] = np.add.reduceat(tokens * weight[at], (np.cumsum(count) - count)[some])
    return Ragged(sums, np.append(0, np.cumsum(weighed)))
