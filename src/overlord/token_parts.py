"""Parts of token ranges on ranks that share a unit: a document, or a whole microbatch. Pure.

A unit of L tokens on d holders has n chunks; chunk c begins at floor(c * L / n). With ``folded``
n is 2d and holder k has chunks k and 2d-1-k, one after the other: slices of context parallelism
and pieces on rings. Else n is d and holder k has chunk k. A *part* of a range is what one holder
has of it without a gap.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class TokenParts(NamedTuple):
    """The parts of token ranges, range after range, each in the order of tokens."""

    range: np.ndarray  # int64: number of the range
    holder: np.ndarray  # int64: position of the rank that has the part, from 0 to d-1
    first: np.ndarray  # int64: tokens of the range before the part
    length: np.ndarray  # int64: tokens of the part; 0 only for an empty range
    inside: np.ndarray  # int64: tokens of the unit that the holder has before the part


def token_parts(
    start: np.ndarray,
    count: np.ndarray,
    length: np.ndarray,
    d: int | np.ndarray,
    *,
    folded: bool = True,
) -> TokenParts:
    """Return the parts of token ranges.

    Range i is ``count[i]`` tokens from ``start[i]`` on, in a unit of ``length[i]`` tokens, which is
    at least 1. ``d``: the number of holders, one for all ranges or one for each. An empty range has
    one empty part.
    """
    start, count, length = (np.asarray(a, np.int64) for a in (start, count, length))
    holders = np.broadcast_to(np.asarray(d, np.int64), start.shape)
    chunks = 2 * holders if folded else holders
    lowest = _chunk_of(start, length, chunks)
    highest = _chunk_of(start + np.maximum(count, 1) - 1, length, chunks)
    n = highest - lowest + 1
    number = np.repeat(np.arange(len(start)), n)
    chunk = np.arange(len(number)) - np.repeat(np.cumsum(n) - n, n) + lowest[number]
    held, total, size = holders[number], chunks[number], length[number]
    begin, end = _bound(chunk, size, total), _bound(chunk + 1, size, total)
    first = np.maximum(begin, start[number])
    last = np.minimum(end, (start + count)[number])
    kept = (last > first) | (count == 0)[number]  # no part of the empty chunks of a short unit
    second = folded & (chunk >= held)
    holder = np.where(second, 2 * held - 1 - chunk, chunk)
    before = np.where(second, _bound(holder + 1, size, total) - _bound(holder, size, total), 0)
    return TokenParts(
        range=number[kept],
        holder=holder[kept],
        first=(first - start[number])[kept],
        length=np.maximum(last - first, 0)[kept],
        inside=(before + first - begin)[kept],
    )


class Documents(NamedTuple):
    """Where ranges of tokens lie in packed microbatches, by range."""

    begin: np.ndarray  # int64: first token of the range's document in its whole microbatch
    size: np.ndarray  # int64: tokens of the document, with padding
    total: np.ndarray  # int64: tokens of the microbatch


def slice_parts(
    start: np.ndarray,
    count: np.ndarray,
    documents: Documents,
    cp: int,
    split: str,
    *,
    by_row: bool = False,
) -> TokenParts:
    """Return the parts of token ranges on the ``cp`` slices of their microbatches.

    ``start`` counts from the beginning of the document, ``inside`` of the result from that of the
    slice. ``split``: as ``Batch.cp_split``; ``by_row``: a row of a padded microbatch is a document.
    """
    begin, size, total = documents
    if not by_row and split != "zigzag":  # the microbatch is divided as a whole
        begin, size, start = np.zeros_like(begin), total, begin + start
    number, holder, first, length, inside = token_parts(
        start, count, size, cp, folded=split != "contiguous"
    )
    return TokenParts(number, holder, first, length, begin[number] // cp + inside)


def _bound(chunk: np.ndarray, length: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Return floor(chunk * length / chunks), without overflow."""
    whole, rest = np.divmod(length, chunks)
    found: np.ndarray = whole * chunk + rest * chunk // chunks
    return found


def _chunk_of(token: np.ndarray, length: np.ndarray, chunks: np.ndarray) -> np.ndarray:
    """Return the last chunk that begins at or before each token; the last one for later tokens."""
    found: np.ndarray = ((token + 1) * chunks - 1) // length
    return np.minimum(found, chunks - 1)
