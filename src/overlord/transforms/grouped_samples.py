"""Samples of several documents from rows with their ids: lengths within the bounds of a microbatch.

A document has at most ``limit`` tokens. All documents of a sample share one microbatch, in which
each also has a reserve for padding. The longest documents of a sample that does not fit are cut to
one length. A response without a token left makes the row unusable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from overlord.documents import LENGTHS, PROMPTS, reserve, sums
from overlord.sample import Ragged, ranges
from overlord.sources.tables import numpy_of
from overlord.transforms.columns import HIDDEN, Bad, RowFrame, column, lists


class Limits(NamedTuple):
    """The bounds of documents and samples, and the treatment of longer ones."""

    document: int  # tokens of a document
    room: int  # tokens of all documents of a sample, with their reserve
    on_long: str


@dataclass(frozen=True, slots=True, eq=False)
class GroupedSamples:
    """Samples made from rows. Row numbers refer to the frame."""

    row: np.ndarray  # int64: row of every sample
    tokens: Ragged  # starts at 0, without unused values
    lengths: Ragged  # int64: tokens of each document
    prompts: Ragged  # int64: tokens of the prompt of each document
    weights: Ragged | None  # loss weights, with the offsets of ``tokens``
    long: np.ndarray  # int64: rows that lost tokens
    lost: np.ndarray  # int64: number of tokens that each lost


def grouped_samples(
    frame: RowFrame, tokens: Ragged, weights: Ragged | None, bad: Bad, limits: Limits
) -> GroupedSamples:
    """Return the samples of a frame's rows; unusable rows are recorded in the frame as bad."""
    rows = np.arange(len(tokens))
    lengths = column_by_document(frame.table, LENGTHS, rows)
    prompts = column_by_document(frame.table, PROMPTS, rows)
    whole = sums(lengths)
    for i in np.flatnonzero(whole != tokens.lengths).tolist():
        text = f"expected {whole[i]} tokens in its documents, got {tokens.lengths[i]}"
        bad.setdefault(i, f"{text}; no transform may change their number")
    # a row whose lengths are wrong has no documents
    ok = np.array([i for i in range(len(rows)) if i not in bad], np.int64)
    lengths, prompts = lengths.take(ok), prompts.take(ok)
    size = fitted_lengths(lengths, limits.document, limits.room)
    kept = Ragged(size, lengths.offsets)
    fit = sums(kept)
    late = _unusable(kept, prompts, lengths, fit, limits)
    bad = bad | {int(ok[i]): reason for i, reason in late.items()}
    frame.record_bad(bad)
    lost = whole[ok] - fit
    usable = np.array([i for i in range(len(ok)) if i not in late], np.int64)
    losing = usable[lost[usable] > 0]
    long, gone = ok[losing], lost[losing]
    if limits.on_long == "drop":
        gone = whole[long]
        usable = usable[lost[usable] == 0]
    row = ok[usable]
    first = _starts(tokens, row, lengths.take(usable))
    sizes = kept.take(usable)
    offsets = np.concatenate(([0], np.cumsum(sums(sizes)))).astype(np.int64)
    at = ranges(first, sizes.values)
    losses = None if weights is None else Ragged(_of(weights, tokens, row, at), offsets)
    return GroupedSamples(
        row, Ragged(tokens.values[at], offsets), sizes, prompts.take(usable), losses, long, gone
    )


def column_by_document(table: pa.Table, name: str, rows: np.ndarray) -> Ragged:
    """Return the values of documents of some rows, from an internal column of lists."""
    flat, offsets = lists(column(table, HIDDEN + name, "values of documents"))
    return Ragged(numpy_of(flat), offsets).take(rows)


def fitted_lengths(lengths: Ragged, limit: int, room: int) -> np.ndarray:
    """Return the tokens of every document after cuts, sample after sample: int64.

    The longest documents of a sample that does not fit into ``room`` are cut to one length, the
    largest with which it fits.
    """
    counts = lengths.lengths
    flat = np.minimum(lengths.values, limit)
    row = np.repeat(np.arange(len(counts)), counts)
    space = np.maximum(room - counts * reserve(room, counts), 0)
    order = np.lexsort((flat, row))
    ascending = flat[order]
    starts = np.cumsum(counts) - counts
    running = np.concatenate(([0], np.cumsum(ascending)))
    before = running[:-1] - running[starts][row]
    left = counts[row] - (np.arange(len(row)) - starts[row])  # this document and longer ones
    level = np.maximum((space[row] - before) // left, 0)
    cut = np.flatnonzero(level < ascending)
    caps = np.full(len(counts), limit)
    cut_rows, first = np.unique(row[cut], return_index=True)
    caps[cut_rows] = level[cut[first]]
    found: np.ndarray = np.minimum(flat, caps[row])
    return found


def _unusable(
    kept: Ragged, prompts: Ragged, lengths: Ragged, fit: np.ndarray, limits: Limits
) -> Bad:
    """Return the samples that cannot be used, with their reasons."""
    bad: Bad = {}
    row = np.repeat(np.arange(len(kept)), kept.lengths)
    if limits.on_long == "quarantine":
        for i in np.flatnonzero(fit != sums(lengths)).tolist():
            room = f"{limits.room} for all with their padding"
            listed = ", ".join(map(str, lengths[i][:8].tolist()))
            bad[i] = (
                f"expected documents of at most {limits.document} tokens and {room}, got {listed}"
            )
        return bad
    if limits.on_long == "drop":
        cut = np.flatnonzero(fit != sums(lengths))
        row = np.where(np.isin(row, cut), -1, row)
    for d in np.flatnonzero((row >= 0) & (kept.values <= prompts.values)).tolist():
        i = int(row[d])
        bad.setdefault(
            i,
            f"document {d - int(kept.offsets[i])}: expected a token of the response within "
            f"{kept.values[d]} tokens, got a prompt of {prompts.values[d]}",
        )
    return bad


def _starts(tokens: Ragged, row: np.ndarray, lengths: Ragged) -> np.ndarray:
    """Return the first token of every document in the values of ``tokens``."""
    before = np.cumsum(lengths.values) - lengths.values
    counts = lengths.lengths
    first = np.cumsum(counts) - counts
    return np.repeat(tokens.offsets[:-1][row] - before[first], counts) + before


def _of(weights: Ragged, tokens: Ragged, row: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Return the weights of tokens at positions ``at`` of the values of ``tokens``."""
    shift = int(weights.offsets[0] - tokens.offsets[0])
    found: np.ndarray = weights.values[at + shift]
    return found
