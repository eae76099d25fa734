"""Packed (THD) dict of Megatron-Core: whole microbatches, slices, and pieces of hybrid plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from overlord.errors import JobError
from overlord.torch.adapters.labels import converted, has_keys, need
from overlord.torch.microbatch_info import SHIFTED
from overlord.torch.tensor_step import as_tensor

REMEDY = 'plan with .split(groups="power_of_two")'


def packed(
    mb: Mapping[str, Any], adapter: str, given: str | None, *, dynamic: bool = False
) -> dict[str, torch.Tensor]:
    """Return the packed dict of a microbatch as flat tensors, with the keys of its stage.

    Bounds are those of whole documents. With ``cp_ranks`` the microbatch has pieces, and the dict
    has ``local_cp_size``, by which Megatron finds the group of the ring. ``dynamic``: it always has
    this key. Samples of several documents add the keys that group them. ``given``: the job's
    ``Batch.labels``; None: that of the microbatch. Raise ``JobError`` for a ring without a group
    (an aligned block of 2^i ranks), and for documents without equal chunks.
    """
    if dynamic or "cp_ranks" in mb:
        has_keys(mb, ("cu_seqlens_padded",), adapter)
        ring = {"local_cp_size": torch.tensor(_ring_size(mb, adapter), dtype=torch.int32)}
        _check_chunks(mb, _lengths(mb), int(ring["local_cp_size"]), adapter)
    else:
        need(mb, ("cu_seqlens_padded",), adapter, whole=False)
        ring = {}
    bounds = as_tensor(mb["cu_seqlens_padded"]).to(torch.int32)
    longest = mb["max_seqlen"] if "max_seqlen" in mb else _lengths(mb).max(initial=0)
    made = {
        "cu_seqlens": as_tensor(mb["cu_seqlens"]).to(torch.int32) if "cu_seqlens" in mb else bounds,
        "cu_seqlens_padded": bounds,
        "max_seqlen": torch.tensor(int(longest), dtype=torch.int32),
        **ring,
    }
    made |= {key: as_tensor(mb[key]) for key in ("tokens", "position_ids") if key in mb}
    if "labels" in mb:
        has_keys(mb, ("loss_mask",), adapter)
        made["labels"], made["loss_mask"] = converted(mb, SHIFTED, given)
    grouped = ("group_ids", "roles", "prompt_lengths")
    return made | {key: as_tensor(mb[key]) for key in grouped if key in mb}


def _lengths(mb: Mapping[str, Any]) -> np.ndarray:
    return np.diff(_host(mb["cu_seqlens_padded"]))


def _ring_size(mb: Mapping[str, Any], adapter: str) -> int:
    """Return the number of ranks of a microbatch's ring, which must be an aligned block."""
    if "cp_ranks" not in mb:
        return 1
    ranks = _host(mb["cp_ranks"]).reshape(-1)
    d, first = len(ranks), int(ranks[0]) if len(ranks) else 0
    if not d or d & (d - 1) or first % d or not np.array_equal(ranks, first + np.arange(d)):
        raise JobError(
            [
                "cp_ranks: expected an aligned block of 2^i consecutive ranks, got "
                f"{ranks.tolist()}; {REMEDY}"
            ],
            adapter,
        )
    position = int(mb["cp_rank"])
    if not 0 <= position < d:
        raise JobError([f"cp_rank: expected 0 to {d - 1}, got {position}; {REMEDY}"], adapter)
    return d


def _check_chunks(mb: Mapping[str, Any], lengths: np.ndarray, size: int, adapter: str) -> None:
    """Raise ``JobError`` unless documents have equal chunks, and arrays the tokens of one rank."""
    if size > 1 and (lengths % (2 * size)).any():
        wrong = int(lengths[(lengths % (2 * size)) > 0][0])
        raise JobError(
            [
                f"cu_seqlens_padded: expected documents padded to a multiple of {2 * size} tokens "
                f"for {size} ranks, got one of {wrong}; {REMEDY}"
            ],
            adapter,
        )
    here = int(lengths.sum()) // size
    for key in ("tokens", "position_ids", "labels", "loss_mask"):
        if key in mb and len(mb[key]) != here:
            raise JobError(
                [
                    f"{key}: expected the {here} tokens of one of {size} ranks, got "
                    f"{len(mb[key])}; give the microbatch as it is delivered"
                ],
                adapter,
            )


def _host(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
