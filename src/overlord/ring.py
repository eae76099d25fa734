"""Pieces of documents on a ring of ranks: zigzag chunks without padding. Pure.

A document of L tokens on a ring of d positions has 2d chunks. Chunk c begins at floor(c * L / 2d),
so the sizes of chunks differ by at most one token. Position k holds chunks k and 2d-1-k: causal
attention costs every position the same. Documents shorter than 2d leave some chunks empty.
"""

from __future__ import annotations

import numpy as np


def bounds(length: int, d: int) -> np.ndarray:
    """Return the first token of each of the 2d chunks, and the length: int64 [2d + 1]."""
    return _starts(np.array([length]), d, np.arange(2 * d + 1))[0]


def chunks(d: int, position: int) -> tuple[int, int]:
    """Return the two chunks of a ring position, in document order."""
    return position, 2 * d - 1 - position


def piece(length: int, d: int, position: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the two token ranges [start, stop) that a ring position holds of one document."""
    at = bounds(length, d).tolist()
    a, b = chunks(d, position)
    return (at[a], at[a + 1]), (at[b], at[b + 1])


def halves(lengths: np.ndarray, d: int) -> np.ndarray:
    """Return the sizes of both chunks of every position and document: int64 [2, d, documents]."""
    sizes = np.diff(_starts(np.asarray(lengths, np.int64), d, np.arange(2 * d + 1)), axis=1).T
    return np.stack((sizes[:d], sizes[: d - 1 : -1]))


def sizes(lengths: np.ndarray, d: np.ndarray, position: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each piece.

    Piece i belongs to a document of ``lengths[i]`` tokens and to ``position[i]`` of a ring of
    ``d[i]`` positions.
    """
    whole, rest = np.divmod(lengths, 2 * d)

    def start(chunk: np.ndarray) -> np.ndarray:
        return rest * chunk // (2 * d)

    other = 2 * d - 1 - position
    held: np.ndarray = 2 * whole + start(position + 1) - start(position)
    return held + start(other + 1) - start(other)


def runs(lengths: np.ndarray, d: np.ndarray, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token and the size of both chunks of pieces: int64 [pieces, 2] each.

    Element i: the piece of a document of ``lengths[i]`` tokens at a position of a ring of ``d[i]``.
    """
    whole, rest = np.divmod(np.asarray(lengths, np.int64)[:, None], 2 * d[:, None])
    chunk = np.stack((position, 2 * d - 1 - position), axis=1)
    start = whole * chunk + rest * chunk // (2 * d[:, None])
    end = whole * (chunk + 1) + rest * (chunk + 1) // (2 * d[:, None])
    return start, end - start


def padded(lengths: np.ndarray, d: int | np.ndarray, multiple: int = 1) -> np.ndarray:
    """Return lengths rounded up so that all chunks are equal, and multiples of ``multiple``."""
    unit = 2 * d * multiple
    return -(-np.asarray(lengths, np.int64) // unit) * unit


def local_bounds(cu_seqlens: np.ndarray, d: int, position: int) -> np.ndarray:
    """Return ``cu_seqlens_local``: bounds of one position's pieces, int32 [documents + 1].

    A piece is both chunks of a document. ``cu_seqlens``: bounds of the whole documents.
    """
    sizes = halves(np.diff(np.asarray(cu_seqlens, np.int64)), d)[:, position].sum(axis=0)
    return np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)


def token_index(cu_seqlens: np.ndarray, d: int, position: int) -> np.ndarray:
    """Return the indices in the packed buffer of the tokens that one position holds: int64.

    They are listed document by document, the first chunk before the second.
    """
    cu = np.asarray(cu_seqlens, np.int64)
    a, b = chunks(d, position)
    at = _starts(np.diff(cu), d, np.array([a, a + 1, b, b + 1])) + cu[:-1, None]
    starts, sizes = at[:, 0::2].ravel(), (at[:, 1::2] - at[:, 0::2]).ravel()
    ends = np.cumsum(sizes)
    return np.repeat(starts - (ends - sizes), sizes) + np.arange(int(sizes.sum()))


def _starts(lengths: np.ndarray, d: int, chunk: np.ndarray) -> np.ndarray:
    """Return floor(chunk * length / 2d) by [document, chunk], without overflow."""
    whole, rest = np.divmod(lengths.astype(np.int64)[:, None], 2 * d)
    return whole * chunk + rest * chunk // (2 * d)
