"""Stable orders of arrays by small integer keys, and positions of rows within their key."""

from __future__ import annotations

import numpy as np


def by_key(keys: np.ndarray, bound: int) -> np.ndarray:
    """Stable order by rising whole number below ``bound``."""
    if len(keys) < RADIX_FROM:
        return np.argsort(keys, kind="stable")
    return _radix(np.ascontiguousarray(keys, np.uint64), -(-max(1, (bound - 1).bit_length()) // 16))


def number_inside(keys: np.ndarray, bound: int, dtype: type = np.int64) -> np.ndarray:
    """Which of the items with its key each is, in the given order: 0, 1, ..."""
    order, counts = by_key(keys, bound), np.bincount(keys, minlength=bound)
    number: np.ndarray = np.empty(len(keys), dtype)
    number[order] = np.arange(len(keys)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number


def _radix(keys: np.ndarray, digits: int) -> np.ndarray:
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
    """Items by sample, then by offset, then by number."""
    if len(sample) < 2 or _is_sorted(sample, offset):
        return np.arange(len(sample))
    return np.lexsort((offset, sample))


def _is_sorted(sample: np.ndarray, offset: np.ndarray) -> bool:
    return bool(
        (
            (sample[1:] > sample[:-1]) | ((sample[1:] == sample[:-1]) & (offset[1:] >= offset[:-1]))
        ).all()
    )


RADIX_FROM = 2048  # below this one stable argsort is cheaper than four passes
