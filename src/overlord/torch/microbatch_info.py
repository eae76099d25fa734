"""Properties of a microbatch that the CPU needs.

They are computed before the copy to a device. Reading them from the device would wait for all work
that is queued there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

IGNORE = -100
SHIFTED, UNSHIFTED = "shifted", "unshifted"


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchInfo:
    """Sizes, layout and label convention of a microbatch; a number is -1 if it is unknown."""

    tokens: int = -1  # tokens of the un-sliced microbatch, including padding
    here: int = -1  # tokens in these arrays; fewer in a slice of CP
    longest: int = -1  # tokens of the longest document
    padded: bool = False  # rows of Batch(layout="padded")
    labels: str = ""  # the convention of the labels; empty if it is unknown
    continued: bool = False  # a document is a piece of a sample, with a label for its last token
    weighted: bool = False  # a loss weight is neither 0 nor 1

    @property
    def sliced(self) -> bool:
        """Whether the arrays are a slice of CP."""
        return -1 < self.here < self.tokens

    @staticmethod
    def of(microbatch: Mapping[str, Any]) -> MicrobatchInfo:
        """Read the properties from arrays or tensors; a ``TensorMicrobatch`` caches them."""
        known = getattr(microbatch, "facts", None)
        if isinstance(known, MicrobatchInfo):
            return known
        # A middle pipeline stage of the padded layout has only attention_mask.
        token_keys = [
            key
            for key in ("tokens", "labels", "position_ids", "loss_mask", "attention_mask")
            if key in microbatch
        ]
        first = microbatch[token_keys[0]] if token_keys else None
        arrays = {
            key: _array(microbatch[key])
            for key in ("tokens", "labels", "cu_seqlens", "cu_seqlens_padded")
            if key in microbatch
        }
        bounds = arrays.get("cu_seqlens_padded")
        facts = MicrobatchInfo(
            tokens=int(bounds[-1]) if bounds is not None and len(bounds) else -1,
            here=-1 if first is None else int(np.prod(tuple(first.shape))),
            longest=int(microbatch["max_seqlen"]) if "max_seqlen" in microbatch else -1,
            padded=first is not None and len(first.shape) == 2,
        )
        return MicrobatchInfo(
            tokens=facts.tokens,
            here=facts.here,
            longest=facts.longest,
            padded=facts.padded,
            labels=(labels := _labels(arrays, facts.sliced)),
            continued=labels == SHIFTED and not facts.sliced and _labelled_ends(arrays),
            weighted="loss_mask" in microbatch and _is_weighted(_array(microbatch["loss_mask"])),
        )


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu()) if hasattr(values, "detach") else np.asarray(values)


def _is_weighted(mask: np.ndarray) -> bool:
    return bool(((mask != 0) & (mask != 1)).any())


def _labels(arrays: Mapping[str, np.ndarray], sliced: bool) -> str:
    """Return the convention of the labels: ``SHIFTED``, ``UNSHIFTED``, or empty if unknown.

    A label that differs from its token was shifted. If no label differs (a document may repeat one
    token), the ends of documents decide. Shifted labels have none for the last token of a document,
    unshifted labels none for the first.
    """
    if "labels" not in arrays:
        return ""
    labels = arrays["labels"].reshape(-1)
    has = labels != IGNORE
    if not has.any():
        return ""
    if "tokens" in arrays and (labels[has] != arrays["tokens"].reshape(-1)[has]).any():
        return SHIFTED
    if not sliced and "cu_seqlens" in arrays and "cu_seqlens_padded" in arrays:
        length, start = np.diff(arrays["cu_seqlens"]), arrays["cu_seqlens_padded"][:-1]
        if has[start[length > 1]].any():
            return SHIFTED
        if _labelled_ends(arrays):
            return UNSHIFTED
    return UNSHIFTED if "tokens" in arrays else ""


def _labelled_ends(arrays: Mapping[str, np.ndarray]) -> bool:
    """Return whether the last token of a document of several tokens has a label."""
    if not {"labels", "cu_seqlens", "cu_seqlens_padded"} <= arrays.keys():
        return False
    length, start = np.diff(arrays["cu_seqlens"]), arrays["cu_seqlens_padded"][:-1]
    ends = (start + length - 1)[length > 1]
    return bool((arrays["labels"].reshape(-1)[ends] != IGNORE).any())
