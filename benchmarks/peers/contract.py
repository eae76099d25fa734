"""The required content of every cell's steps, checked on the first step.

A loader that omits something would look fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

NO_LABEL = -100
PAGE = 4096

DTYPES = {
    "tokens": np.int64,
    "position_ids": np.int64,
    "labels": np.int64,
    "loss_mask": np.float32,
    "cu_seqlens": np.int32,
    "cu_seqlens_padded": np.int32,
    "max_seqlen": np.int32,
    "source_ids": np.int32,
}


def as_numpy(value: Any) -> np.ndarray:
    return value.numpy() if hasattr(value, "numpy") else np.asarray(value)


def check_microbatch(microbatch: Mapping[str, Any], context: int, n_sources: int) -> None:
    """Raise with the name of the first rule that a microbatch violates."""
    arrays = {}
    for key, dtype in DTYPES.items():
        _rule(key in microbatch, f"key {key!r} is missing")
        arrays[key] = as_numpy(microbatch[key])
        _rule(
            arrays[key].dtype == dtype, f"{key} is {arrays[key].dtype}, expected {np.dtype(dtype)}"
        )
    tokens, bounds, padded = (
        arrays["tokens"],
        arrays["cu_seqlens"].astype(np.int64),
        arrays["cu_seqlens_padded"].astype(np.int64),
    )
    n, lengths = len(bounds) - 1, np.diff(bounds)
    _rule(n >= 1 and bounds[0] == 0 and (lengths > 0).all(), "cu_seqlens does not rise from 0")
    _rule(
        len(padded) == n + 1 and padded[0] == 0 and (np.diff(padded) >= lengths).all(),
        "cu_seqlens_padded cuts into documents",
    )
    _rule(
        padded[-1] <= len(tokens) <= context,
        f"{len(tokens)} tokens for documents of {padded[-1]} in a context of {context}",
    )
    for key in ("position_ids", "labels", "loss_mask"):
        _rule(arrays[key].shape == tokens.shape, f"{key} and tokens differ in shape")
    _rule(
        int(arrays["max_seqlen"].max()) == lengths.max(), "max_seqlen is not the longest document"
    )
    source = arrays["source_ids"]
    _rule(
        len(source) == n and source.min() >= 0 and source.max() < n_sources,
        "source_ids do not name a source for each document",
    )
    for start, length in zip(padded[:-1].tolist(), lengths.tolist(), strict=True):
        _check_document(arrays, slice(start, start + length), length)
    _rule(
        arrays["loss_mask"].sum() == (lengths - 1).sum(),
        "loss_mask counts a token that has no label",
    )


def _check_document(arrays: Mapping[str, np.ndarray], at: slice, length: int) -> None:
    labels, mask = arrays["labels"][at], arrays["loss_mask"][at]
    _rule(
        np.array_equal(arrays["position_ids"][at], np.arange(length)),
        "positions do not restart with each document",
    )
    _rule(
        np.array_equal(labels[:-1], arrays["tokens"][at][1:]),
        "labels are not the tokens one place on",
    )
    _rule(
        labels[-1] == NO_LABEL and mask[-1] == 0 and (mask[:-1] == 1).all(),
        "a document's last token has a label or a loss",
    )


def real_tokens(microbatch: Mapping[str, Any]) -> int:
    """Return the number of tokens without padding."""
    return int(microbatch["cu_seqlens"][-1])


def touch(microbatch: Mapping[str, Any]) -> int:
    """Access every array, as a trainer that copies it to its device; return the bytes."""
    return sum(microbatch[key].nbytes for key in DTYPES)


def read_pages(microbatch: Mapping[str, Any]) -> int:
    """Access every array and read a byte of every page; return the bytes.

    The first access maps the memory of another process.
    """
    for key in DTYPES:
        value = as_numpy(microbatch[key])
        if value.nbytes >= PAGE:
            value.view(np.uint8)[::PAGE].max()
    return touch(microbatch)


def _rule(holds: bool, broken: str) -> None:
    if not holds:
        raise AssertionError(f"batch contract: {broken}")
