"""Batches of Megatron-Core with dynamic context parallelism, from pieces of hybrid plans.

Megatron has process groups for aligned blocks of 2^i ranks of the axis dp x cp, and finds the group
of a microbatch by its size, ``local_cp_size``. So plans need ``groups="power_of_two"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from overlord.errors import JobError
from overlord.torch.adapters.labels import converted, has_keys
from overlord.torch.microbatch_info import SHIFTED
from overlord.torch.tensor_step import as_tensor

ADAPTER = "dynamic_cp.packed"
REMEDY = 'plan with .split(groups="power_of_two")'


def packed(mb: Mapping[str, Any], *, given: str | None = None) -> dict[str, torch.Tensor]:
    """Return the packed (THD) dict of a microbatch, with ``local_cp_size``, as flat tensors.

    ``mb`` has pieces of documents on the ring ``cp_ranks``, at ``cp_rank``; without these keys the
    ring has one rank. The result has ``cu_seqlens``, ``cu_seqlens_padded`` and ``max_seqlen`` of
    whole documents, and the token arrays of this rank's pipeline stage. They are cut already: do
    not slice them for context parallelism again. ``given``: the job's ``Batch.labels``; None: the
    labels are shifted. Raise ``JobError`` for a ring other than an aligned block of 2^i ranks,
    and for documents without equal chunks.
    """
    has_keys(mb, ("cu_seqlens_padded",), ADAPTER)
    size = _ring_size(mb)
    bounds = as_tensor(mb["cu_seqlens_padded"]).to(torch.int32)
    lengths = np.diff(_host(mb["cu_seqlens_padded"]))
    _check_chunks(mb, lengths, size)
    longest = int(mb["max_seqlen"]) if "max_seqlen" in mb else int(lengths.max(initial=0))
    made = {
        "cu_seqlens": as_tensor(mb["cu_seqlens"]).to(torch.int32) if "cu_seqlens" in mb else bounds,
        "cu_seqlens_padded": bounds,
        "max_seqlen": torch.tensor(longest, dtype=torch.int32),
        "local_cp_size": torch.tensor(size, dtype=torch.int32),
    }
    made |= {key: as_tensor(mb[key]) for key in ("tokens", "position_ids") if key in mb}
    if "labels" in mb:
        has_keys(mb, ("loss_mask",), ADAPTER)
        labels, mask = converted(mb, SHIFTED, given or SHIFTED)
        made |= {"labels": labels, "loss_mask": mask}
    return made


def _ring_size(mb: Mapping[str, Any]) -> int:
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
            ADAPTER,
        )
    position = int(mb["cp_rank"])
    if not 0 <= position < d:
        raise JobError([f"cp_rank: expected 0 to {d - 1}, got {position}; {REMEDY}"], ADAPTER)
    return d


def _check_chunks(mb: Mapping[str, Any], lengths: np.ndarray, size: int) -> None:
    """Raise ``JobError`` unless documents have equal chunks, and arrays the tokens of one rank."""
    if size > 1 and (lengths % (2 * size)).any():
        wrong = int(lengths[(lengths % (2 * size)) > 0][0])
        raise JobError(
            [
                f"cu_seqlens_padded: expected documents padded to a multiple of {2 * size} tokens "
                f"for {size} ranks, got one of {wrong}; {REMEDY}"
            ],
            ADAPTER,
        )
    here = int(lengths.sum()) // size
    for key in ("tokens", "position_ids", "labels", "loss_mask"):
        if key in mb and len(mb[key]) != here:
            raise JobError(
                [
                    f"{key}: expected the {here} tokens of one of {size} ranks, got "
                    f"{len(mb[key])}; give the microbatch as it is delivered"
                ],
                ADAPTER,
            )


def _host(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
