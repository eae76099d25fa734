"""The arrays of a bucket that each rank receives: a cp slice, its stage's keys, all, or none.

    split="zigzag"        every document in 2*cp chunks; rank r has chunks r and 2*cp-1-r, so that
                          causal attention costs all ranks the same
    split="zigzag_whole"  the whole microbatch in 2*cp chunks, assigned as in "zigzag"
    split="contiguous"    the whole microbatch in cp equal runs
    split="none"          every cp rank receives the whole microbatch: for trainers that slice it

In the padded layout the sequence dimension is sliced, row by row. There a row is a document, and
both zigzags are equal.

A constructor never slices whole microbatches: it builds slices directly (``runs.build_slices``),
from the runs that ``pieces`` lists. Slicing whole microbatches costs 3 to 40 ns per token. Building
slices costs 0.4 to 6 ns per token more than building the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from overlord.constructor.pack import BatchArrays
from overlord.constructor.runs import cp_runs
from overlord.plan.view import View
from overlord.sample import ranges

PER_TOKEN = ("tokens", "position_ids", "labels", "loss_mask", "attention_mask")  # sliced along cp
# Never sliced, even if an array has as many rows as the microbatch has tokens.
WHOLE = frozenset(
    {
        "cu_seqlens",
        "cu_seqlens_padded",
        "max_seqlen",
        "source_ids",
        "group_ids",
        "roles",
        "prompt_lengths",
        "pixel_values",
        "grid_thw",
        "image_cu_seqlens",
        "item_ids",
        "send_lens",
        "send_rows",
        "send_splits",
        "recv_splits",
        "recv_perm",
        "out_lens",
        "recv_rows",
        "image_token_index",
        "image_microbatch",
    }
)


# Views of one microbatch.


def slice_index(cu_seqlens_padded: np.ndarray, cp: int, cp_rank: int, split: str) -> np.ndarray:
    """Return the indices of a cp rank's tokens in the packed microbatch, in slice order: int64.

    Raise ``ValueError`` if a document or the microbatch cannot be divided by the split.
    """
    start, length = cp_runs(
        _units(np.asarray(cu_seqlens_padded, np.int64), split), cp, [cp_rank], split
    )
    return ranges(start, length)


def narrow(arrays: Mapping[str, np.ndarray], view: View) -> dict[str, np.ndarray]:
    """Return the part of a microbatch in this view.

    ``arrays``: the whole microbatch, or one that is already sliced and keeps its slices. Keys that
    a ``constructor_do_plan`` hook adds are in every stage. Keys with an entry per token are sliced
    like tokens. Raise ``ValueError`` if the arrays cannot be sliced.
    """
    kept = {key: array for key, array in arrays.items() if view.has(key)}
    if not view.sliced or not kept:
        return kept
    ends = np.asarray(arrays["cu_seqlens_padded"])
    shape = _shape(arrays, ends)
    if wrong := [
        key
        for key in PER_TOKEN
        if key in kept and kept[key].shape not in (shape, (*shape[:-1], shape[-1] // view.cp))
    ]:
        raise ValueError(
            f"{wrong[0]!r}: expected the shape {list(shape)}, got {list(kept[wrong[0]].shape)}"
        )
    if len(shape) == 2:
        columns = _columns(shape[1], view)
        return {
            key: array[:, columns] if _is_per_token(key, array, shape) else array
            for key, array in kept.items()
        }
    index = slice_index(ends, view.cp, view.cp_rank, view.split)
    return {
        key: array[index] if _is_per_token(key, array, shape) else array
        for key, array in kept.items()
    }


def join(slices: Sequence[Mapping[str, np.ndarray]], split: str) -> dict[str, np.ndarray]:
    """Return the microbatch of the slices of all cp ranks, given in the order of ranks."""
    whole, cp = dict(slices[0]), len(slices)
    if cp == 1 or split == "none":
        return whole
    ends = np.asarray(whole["cu_seqlens_padded"])
    given = next(whole[key].shape for key in PER_TOKEN if key in whole)
    part = (
        given[:2] if "attention_mask" in whole and whole["attention_mask"].ndim == 2 else given[:1]
    )
    for key in [key for key, array in whole.items() if _is_per_token(key, array, part)]:
        pieces = [s[key] for s in slices]
        if len(part) == 2:
            at = np.concatenate(
                [
                    np.arange(part[1] * cp)[
                        _columns(part[1] * cp, View(cp=cp, cp_rank=r, split=split))
                    ]
                    for r in range(cp)
                ]
            )
            whole[key] = np.empty((part[0], part[1] * cp, *pieces[0].shape[2:]), pieces[0].dtype)
            whole[key][:, at] = np.concatenate(pieces, axis=1)
        else:
            whole[key] = np.empty((int(ends[-1]), *pieces[0].shape[1:]), pieces[0].dtype)
            for r, piece in enumerate(pieces):
                whole[key][slice_index(ends, cp, r, split)] = piece
    return whole


def _shape(arrays: Mapping[str, np.ndarray], ends: np.ndarray) -> tuple[int, ...]:
    """Return the shape of a per-token array before slicing."""
    if (mask := arrays.get("attention_mask")) is not None and mask.ndim == 2:
        return (mask.shape[0], int(ends[-1]) // max(1, mask.shape[0]))
    return (int(ends[-1]),)


def _is_per_token(key: str, array: np.ndarray, shape: tuple[int, ...]) -> bool:
    return key not in WHOLE and array.shape[: len(shape)] == shape


# Views of all microbatches of a step.


def slice_arrays(batch: BatchArrays, view: View) -> BatchArrays:
    """Return the concatenated microbatches in a view.

    Arrays that are not sliced along cp are shared.
    """
    kept = of_stage(batch, view)
    if not view.sliced:
        return kept
    padded = batch.arrays["tokens"].ndim == 2
    units = (
        np.array([0, batch.arrays["tokens"].shape[1]])
        if padded
        else _batch_units(batch, view.split)
    )
    index = ranges(*cp_runs(units, view.cp, [view.cp_rank], view.split))
    arrays, starts = {}, []
    for (key, array), rows in zip(kept.arrays.items(), kept.starts, strict=True):
        cut_here = key in PER_TOKEN
        arrays[key] = (np.take(array, index, axis=1 if padded else 0)) if cut_here else array
        arrays[key].flags.writeable = False
        starts.append([row // view.cp for row in rows] if cut_here and not padded else rows)
    return BatchArrays(arrays, starts, kept.single)


def of_stage(batch: BatchArrays, view: View) -> BatchArrays:
    """Return only the keys of a view."""
    return batch.only(view.has)


def _units(ends: np.ndarray, split: str) -> np.ndarray:
    """Return the bounds of the units that are divided evenly: documents, or the microbatch."""
    return ends if split == "zigzag" else ends[[0, -1]]


def _batch_units(batch: BatchArrays, split: str) -> np.ndarray:
    """Return the bounds of the evenly divided units, for concatenated microbatches."""
    starts = dict(zip(batch.arrays, batch.starts, strict=True))
    if split != "zigzag":
        return np.array(starts["tokens"])
    sums, at = batch.arrays["cu_seqlens_padded"], starts["cu_seqlens_padded"]
    steps = np.diff(sums.astype(np.int64))
    within = np.ones(len(steps), bool)
    # Leave out the difference between the last sum of a microbatch and the first of the next.
    within[np.array(at[1:-1], np.int64) - 1] = False
    return np.concatenate([[0], np.cumsum(steps[within])])


def _columns(context: int, view: View) -> np.ndarray:
    return slice_index(np.array([0, context]), view.cp, view.cp_rank, view.split)
