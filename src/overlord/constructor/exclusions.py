"""Tokens of documents that are not predicted: placeholders of images, and undecodable samples.

Exclusions are int64 [n, 5]: bucket, microbatch and slot of a sample in the plan, its first excluded
token, and the number of tokens, at most all that follow. The label of a token is at its own
position (unshifted), or at the position before it (shifted), which may be on another rank's slice
or piece.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from overlord.constructor.pack import IGNORE, BatchArrays
from overlord.plan.plan import Assignment
from overlord.plan.view import View
from overlord.sample import ranges
from overlord.token_parts import Documents, slice_parts, token_parts

EVERY = 2**40  # more tokens than any document has
NOTHING = (("labels", IGNORE), ("loss_mask", 0))


class Spans(NamedTuple):
    """Excluded tokens in the microbatches of one build, by range."""

    microbatch: np.ndarray  # int64: number in the build
    slot: np.ndarray  # int64: document of the microbatch
    first: np.ndarray  # int64: first token in the document
    length: np.ndarray  # int64


def whole_documents(homes: np.ndarray) -> np.ndarray:
    """Return exclusions of all tokens of documents; ``homes``: bucket, microbatch, slot."""
    found = np.zeros((len(homes), 5), np.int64)
    found[:, :3], found[:, 4] = homes, EVERY
    return found


def spans_of_pieces(
    excluded: np.ndarray, main: Assignment, samples: np.ndarray, bounds: np.ndarray
) -> Spans:
    """Return exclusions in microbatches of pieces, in which a sample may occur several times.

    ``samples``: rows of the plan, microbatch after microbatch; ``bounds``: those of each.
    """
    slots = max(int(main.slot.max(initial=0)), int(excluded[:, 2].max(initial=0))) + 1
    keys = main.bins() * slots + main.slot
    order = np.argsort(keys)
    wanted = (excluded[:, 0] * main.n_microbatches + excluded[:, 1]) * slots + excluded[:, 2]
    at = order[np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)]
    here = keys[at] == wanted
    rows, excluded = main.sample[at[here]], excluded[here]
    by_row = np.argsort(samples, kind="stable")
    low, high = (np.searchsorted(samples[by_row], rows, side=side) for side in ("left", "right"))
    entry = by_row[ranges(low, high - low)]
    first, count = np.repeat(excluded[:, 3:], high - low, axis=0).T
    microbatch = np.searchsorted(bounds, entry, side="right") - 1
    return Spans(microbatch, entry - bounds[microbatch], first, count)


def exclude(batch: BatchArrays, spans: Spans, view: View, convention: str) -> None:
    """Exclude the prediction of tokens, in place; ``batch`` is whole, or a slice along cp."""
    k, begin, size, total = _documents(batch, spans)
    first, count = _labels(spans, size, convention)
    padded = batch.arrays["labels"].ndim == 2
    split = view.split if view.cp > 1 else "contiguous"
    documents = Documents(begin, size, total)
    cut = slice_parts(first, count, documents, view.cp, split, by_row=padded)
    mine = cut.holder == view.cp_rank
    _erase(batch, k[cut.range[mine]], cut.inside[mine], cut.length[mine])


def exclude_from_pieces(batch: BatchArrays, spans: Spans, convention: str) -> None:
    """Exclude the prediction of tokens, in place; ``batch`` has pieces on rings."""
    k, _, size, _ = _documents(batch, spans)
    first, count = _labels(spans, size, convention)
    starts = dict(zip(batch.arrays, batch.starts, strict=True))
    local = batch.arrays["cu_seqlens_local"][np.array(starts["cu_seqlens_local"])[k] + spans.slot]
    cut = token_parts(first, count, size, batch.arrays["local_cp_size"].astype(np.int64)[k])
    mine = cut.holder == batch.arrays["cp_rank"][k[cut.range]]
    at = cut.range[mine]
    _erase(batch, k[at], local.astype(np.int64)[at] + cut.inside[mine], cut.length[mine])


def _documents(
    batch: BatchArrays, spans: Spans
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return microbatch, first token and size of the documents, and tokens of microbatches."""
    starts = dict(zip(batch.arrays, batch.starts, strict=True))["cu_seqlens_padded"]
    sums, at = batch.arrays["cu_seqlens_padded"].astype(np.int64), np.array(starts)
    opens = at[spans.microbatch] + spans.slot
    assert (opens + 1 < at[spans.microbatch + 1]).all(), "expected documents of the microbatch"
    begin = sums[opens]
    return spans.microbatch, begin, sums[opens + 1] - begin, sums[at[spans.microbatch + 1] - 1]


def _labels(spans: Spans, size: np.ndarray, convention: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the first label and the number of labels of excluded tokens, in their document.

    The first token of a document has no label.
    """
    first, count = spans.first, np.minimum(spans.length, size - spans.first)
    if convention == "shifted":
        return np.maximum(first - 1, 0), count - (first == 0)
    return first, count


def _erase(batch: BatchArrays, k: np.ndarray, position: np.ndarray, count: np.ndarray) -> None:
    """Remove labels from ``position`` on in the flattened arrays of microbatches ``k``."""
    starts = dict(zip(batch.arrays, batch.starts, strict=True))
    for name, nothing in NOTHING:
        array = batch.arrays[name]
        array.flags.writeable = True
        width = array.shape[1] if array.ndim == 2 else 1
        array.reshape(-1)[ranges(np.array(starts[name])[k] * width + position, count)] = nothing
        array.flags.writeable = False
