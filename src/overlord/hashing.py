"""Keyed hashes: the only source of order and randomness in the stream.

Everything that looks random (chunk order, row order, random draws) is a pure function of a key. The
key is derived from (purpose, seed, names, epoch), so any machine can compute any part of the stream
without the parts before it. The functions are fixed for good: changing one changes every user's
data order.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np

U64 = np.uint64
_GOLDEN, _M1, _M2 = U64(0x9E3779B97F4A7C15), U64(0xBF58476D1CE4E5B9), U64(0x94D049BB133111EB)


def key64(*parts: str | int) -> int:
    """Return a 64-bit key of a purpose and its names.

    It is BLAKE2b of 8 bytes over the parts joined by U+001F, as a little-endian number.
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def mix64(x: np.ndarray) -> np.ndarray:
    """Apply the step and the finaliser of splitmix64 to uint64 arrays (wrapping arithmetic)."""
    x = x + _GOLDEN
    x = (x ^ (x >> U64(30))) * _M1
    x = (x ^ (x >> U64(27))) * _M2
    return x ^ (x >> U64(31))


def keyed_hash(key: int, *columns: Any) -> np.ndarray:
    """Return one uint64 per row: ``h = key``, then ``h = mix64(h ^ column)`` for each column."""
    h = np.full(
        np.broadcast(*columns).shape if len(columns) > 1 else np.shape(columns[0]), key, dtype=U64
    )
    for column in columns:
        h = mix64(h ^ np.asarray(column).astype(np.int64, copy=False).view(U64))
    return h


def digest(*parts: str | bytes | np.ndarray) -> str:
    """Return a fingerprint of ordered parts: 32 hexadecimal digits.

    Lengths are hashed too, so it depends on the bounds of the parts. A text and its UTF-8 bytes
    have the same fingerprint.
    """
    h = blake2b(digest_size=16)
    for part in parts:
        body: Any
        if isinstance(part, np.ndarray):
            head = f"{part.dtype.str}{part.shape}".encode()
            body = np.ascontiguousarray(part).reshape(-1).view(np.uint8)  # hashed without a copy
        else:
            head, body = b"s", part.encode() if isinstance(part, str) else part
        h.update(len(head).to_bytes(8, "little") + head + len(body).to_bytes(8, "little"))
        h.update(body)
    return h.hexdigest()


# ----------------------------------------------------------------------------
# Stable orders of arrays by small integer keys, and positions of rows within their key.

RADIX_FROM = 2048  # below this one stable argsort is cheaper than four passes


def order_by_key(keys: np.ndarray, bound: int) -> np.ndarray:
    """Return the indices that sort keys stably; keys are integers from 0 to ``bound - 1``."""
    if len(keys) < RADIX_FROM:
        return np.argsort(keys, kind="stable")
    return radix_order(
        np.ascontiguousarray(keys, np.uint64), -(-max(1, (bound - 1).bit_length()) // 16)
    )


def position_in_key(keys: np.ndarray, bound: int, dtype: type = np.int64) -> np.ndarray:
    """Return the position of each item, from 0 on, among the items with the same key."""
    order, counts = order_by_key(keys, bound), np.bincount(keys, minlength=bound)
    number: np.ndarray = np.empty(len(keys), dtype)
    number[order] = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number


def radix_order(keys: np.ndarray, digits: int) -> np.ndarray:
    """Return the indices that stably sort uint64 keys of ``digits`` 16-bit digits, at least one."""
    order = None
    for i in range(digits):
        digit = (keys >> np.uint64(16 * i)).astype(np.uint16)
        if order is None:
            order = np.argsort(digit, kind="stable")
        elif len(digit) and (digit != digit[0]).any():
            order = order[np.argsort(digit[order], kind="stable")]
    assert order is not None
    return order


def in_documents(sample: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Return the indices that stably sort items by sample, then by offset."""
    if len(sample) < 2 or _is_sorted(sample, offset):
        return np.arange(len(sample))
    return np.lexsort((offset, sample))


def _is_sorted(sample: np.ndarray, offset: np.ndarray) -> bool:
    return bool(
        (
            (sample[1:] > sample[:-1]) | ((sample[1:] == sample[:-1]) & (offset[1:] >= offset[:-1]))
        ).all()
    )
