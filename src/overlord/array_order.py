"""Stable orders of arrays by small integer keys, and positions of rows within their key."""

from __future__ import annotations

import numpy as np

RADIX_FROM = 2048  # below this one stable argsort is cheaper than four passes


def by_key(keys: np.ndarray, bound: int) -> np.ndarray:
    """Return a stable order by integer keys below ``bound``."""
    if len(keys) < RADIX_FROM:
        return np.argsort(keys, kind="stable")
    return radix_order(
        np.ascontiguousarray(keys, np.uint64), -(-max(1, (bound - 1).bit_length()) // 16)
    )


def number_inside(keys: np.ndarray, bound: int, dtype: type = np.int64) -> np.ndarray:
    """Return the position of each item among the items with its key, in the given order."""
    order, counts = by_key(keys, bound), np.bincount(keys, minlength=bound)
    number: np.ndarray = np.empty(len(keys), dtype)
    number[order] = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number


def radix_order(keys: np.ndarray, digits: int) -> np.ndarray:
    """Return a stable order by uint64 keys of ``digits`` 16-bit digits."""
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
    """Return the stable order of items by sample, then by offset."""
    if len(sample) < 2 or _is_sorted(sample, offset):
        return np.arange(len(sample))
    return np.lexsort((offset, sample))


def _is_sorted(sample: np.ndarray, offset: np.ndarray) -> bool:
    return bool(
        (
            (sample[1:] > sample[:-1]) | ((sample[1:] == sample[:-1]) & (offset[1:] >= offset[:-1]))
        ).all()
    )
