"""Split, truncate or drop documents longer than the context (``Job.on_long``)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from overlord.content import RaggedSpans, spans_of
from overlord.sample import Ragged


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Samples made from rows of ids. Row numbers refer to the input rows."""

    row: np.ndarray  # int64: row of every sample
    part: np.ndarray  # int32: number of the piece within its row
    size: np.ndarray  # int64: tokens
    tokens: Ragged  # with weights: starts at 0, without unused values
    weights: Ragged | None = None  # loss weights, with the offsets of ``tokens``


def too_long(lengths: np.ndarray, context: int) -> dict[int, str]:
    """Return the rows of more than ``context`` tokens, each with its reason for the quarantine."""
    return {
        int(i): f"expected at most context={context} tokens, got {lengths[i]}"
        for i in np.flatnonzero(lengths > context)
    }


def lost_tokens(lengths: np.ndarray, context: int, on_long: str) -> np.ndarray:
    """Return the number of tokens that each row loses.

    "truncate" loses the tokens beyond the context, and "drop" all tokens of a longer row. Other
    values of ``on_long`` lose none.
    """
    if on_long == "truncate":
        return np.maximum(lengths - context, 0)
    return np.where(lengths > context, lengths, 0) if on_long == "drop" else np.zeros_like(lengths)


def split_rows(
    tokens: Ragged, keep: np.ndarray, context: int, on_long: str, weights: Ragged | None = None
) -> Pieces:
    """Turn the rows ``keep`` into samples of at most ``context`` tokens, with their weights.

    The caller has left out of ``keep`` the rows that "quarantine" or "drop" rejects.
    """
    spans = spans_of(tokens)
    starts, lengths = spans.starts[keep], tokens.lengths[keep]
    pieces = np.ones(len(keep), np.int64)
    if on_long == "truncate":
        lengths = np.minimum(lengths, context)
    elif on_long == "split":
        pieces = -(-lengths // context)
    kept = np.repeat(np.arange(len(keep)), pieces)  # per sample: its row among the kept ones
    part = np.arange(len(kept)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    size = np.minimum(lengths[kept] - part * context, context)
    row, numbers = keep[kept], part.astype(np.int32)
    if weights is None:
        first = starts[kept] + part * context
        return Pieces(row, numbers, size, RaggedSpans(spans.held, first, first + size))
    offsets = np.zeros(len(kept) + 1, np.int64)
    np.cumsum(size, out=offsets[1:])
    ids = Ragged(_gather(spans.held, starts, lengths), offsets)
    kept_weights = _gather(weights.values, weights.offsets[:-1][keep], lengths)
    return Pieces(row, numbers, size, ids, Ragged(kept_weights, offsets))


def _gather(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the values of the ranges (start, length), joined in order.

    Adjacent ranges are copied as one run. If there is only one run, the result is a view.
    """
    if not len(starts):
        return values[:0]
    stops = starts + lengths
    breaks = np.flatnonzero(starts[1:] != stops[:-1])
    first, last = starts[np.r_[0, breaks + 1]], stops[np.r_[breaks, len(stops) - 1]]
    runs = [values[a:b] for a, b in zip(first.tolist(), last.tolist(), strict=True)]
    return runs[0] if len(runs) == 1 else np.concatenate(runs)
