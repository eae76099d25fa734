"""Batches of Megatron-Core in its packed (THD) layout, with ``PackedSeqParams``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch

from overlord import ring
from overlord.errors import JobError
from overlord.plan.view import SPLITS
from overlord.torch.adapters import thd
from overlord.torch.adapters.huggingface import document_of
from overlord.torch.adapters.labels import converted, has_keys
from overlord.torch.microbatch_info import SHIFTED, MicrobatchInfo
from overlord.torch.tensor_step import TensorMicrobatch, as_tensor

TOKEN_KEYS = ("tokens", "position_ids", "labels", "loss_mask")


@dataclass(slots=True, kw_only=True)
class PackedSeqParams:
    """The fields of Megatron-Core's class of this name, if it is not installed.

    Attention reads the fields by name.
    """

    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    local_cp_size: int | None = None
    cp_group: Any = None
    total_tokens: int | None = None
    seq_idx: torch.Tensor | None = None


class Batch(NamedTuple):
    """The result of Megatron's ``get_batch`` for packed sequences, in its order."""

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    packed_seq_params: Any
    padding_mask: torch.Tensor | None


def packed(mb: Mapping[str, Any], *, given: str | None = None) -> dict[str, Any]:
    """Return the dict that Megatron's data iterator yields, with the keys of this rank's stage.

    Tensors are flat, ``max_seqlen`` is an int32 scalar on the CPU, labels are shifted. The tensors
    are already sliced for CP if the job slices; then do not slice again. Pieces of a hybrid job
    have ``local_cp_size``, the ranks of their ring; a ring for which Megatron has no group is
    refused (``groups="power_of_two"``).
    """
    return thd.packed(mb, "megatron.packed", given)


def packed_seq_params(mb: Mapping[str, Any], *, true_lengths: bool = False, **more: Any) -> Any:
    """Return the ``PackedSeqParams`` of a microbatch.

    The class is Megatron's if it can be imported, otherwise ours with the same fields. As in
    Megatron, all four ``cu_seqlens`` are the padded ones, which Transformer Engine expects;
    ``true_lengths`` puts the true ones into ``cu_seqlens_q`` and ``cu_seqlens_kv``. They describe
    the whole microbatch, also on a slice of CP. ``more``: other fields; ``local_cp_size`` is that
    of a hybrid job unless it is given.
    """
    if "local_cp_size" in mb:
        more = {"local_cp_size": int(mb["local_cp_size"]), **more}
    has_keys(mb, ("cu_seqlens", "cu_seqlens_padded", "max_seqlen"), "megatron.packed_seq_params")
    bounds, longest = as_tensor(mb["cu_seqlens_padded"]), int(mb["max_seqlen"])
    lengths = as_tensor(mb["cu_seqlens"]) if true_lengths else bounds
    return _class()(
        qkv_format="thd",
        cu_seqlens_q=lengths,
        cu_seqlens_kv=lengths,
        cu_seqlens_q_padded=bounds,
        cu_seqlens_kv_padded=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **more,
    )


def padding_mask(
    mb: Mapping[str, Any],
    index: Any = None,
    *,
    cp: tuple[int, int] | None = None,
    cp_split: str = "zigzag",
) -> torch.Tensor:
    """Return a mask that is True on padding, [1, tokens]; mixtures of experts skip padding.

    It needs no tokens, so every stage can create it. For a slice of context parallelism give ``cp``
    (number of ranks, this rank) and the job's ``cp_split``. Or give ``index``: the position in the
    whole microbatch of each token of the slice (``overlord.constructor.rank_views.slice_index``).
    """
    has_keys(mb, ("cu_seqlens", "cu_seqlens_padded"), "megatron.padding_mask")
    lengths, bounds = (
        as_tensor(mb["cu_seqlens"]).to(torch.int64),
        as_tensor(mb["cu_seqlens_padded"]).to(torch.int64),
    )
    if index is not None:
        at = torch.as_tensor(index, device=bounds.device)
    else:
        at = _slice_positions(bounds, MicrobatchInfo.of(mb), (1, 0) if cp is None else cp, cp_split)
    document = document_of(at, bounds)
    return (at - bounds[:-1][document] >= lengths.diff()[document])[None]


def _slice_positions(
    bounds: torch.Tensor, facts: MicrobatchInfo, cp: tuple[int, int], split: str
) -> torch.Tensor:
    """Return the position in the whole microbatch of each token of a slice.

    This runs on the device of the bounds, without a synchronization.
    """
    ranks, rank = _checked(cp, split, facts)
    # Not sliced: also if each CP rank has microbatches of its own.
    if ranks == 1 or split == "none" or facts.here == facts.tokens:
        return torch.arange(facts.tokens, device=bounds.device)
    t = torch.arange(facts.tokens // ranks, device=bounds.device)
    if split == "contiguous":
        return t + rank * len(t)
    # Starts of documents in the slice.
    starts = (bounds if split == "zigzag" else torch.stack((bounds[0], bounds[-1]))) // ranks
    document = document_of(t, starts)
    at, half = t - starts[document], starts.diff()[document] // 2
    return (
        starts[document] * ranks + at + half * torch.where(at < half, rank, 2 * (ranks - 1) - rank)
    )


def _checked(cp: tuple[int, int], split: str, facts: MicrobatchInfo) -> tuple[int, int]:
    ranks, rank = cp
    if not 0 <= rank < ranks:
        raise JobError(
            [f"cp: expected (number of ranks, this rank from 0), got {cp!r}"],
            "megatron.padding_mask",
        )
    if split not in SPLITS:
        raise JobError(
            [f"cp_split: expected one of {', '.join(SPLITS)}, got {split!r}"],
            "megatron.padding_mask",
        )
    if facts.sliced and (split == "none" or facts.here * ranks != facts.tokens):
        raise JobError(
            [
                f"cp: expected values that give a slice of {facts.here} of {facts.tokens} tokens, "
                f"got {cp!r} with cp_split={split!r}; "
                "give this rank's place along cp, and the job's Batch.cp_split"
            ],
            "megatron.padding_mask",
        )
    return ranks, rank


def get_batch(
    iterator: Iterator[Mapping[str, Any]] | None,
    *,
    cp: tuple[int, int] | None = None,
    cp_split: str = "zigzag",
    device: torch.device | str | None = None,
    given: str | None = None,
    **more: Any,
) -> Batch:
    """Return the next microbatch as Megatron's forward step unpacks it.

    Tensors are [1, tokens]; None for keys that this stage does not have. ``iterator``:
    ``microbatches()`` of a client, a ``DevicePrefetcher`` or a ``BroadcastClient``. Every rank has
    one, also TP ranks that another rank serves. The trainer need not broadcast or slice.

    ``cp``: (number of ranks along context parallelism, this rank); (1, 0) if microbatches are not
    sliced. ``cp_split``: the job's ``Batch.cp_split``. With them every rank of every stage has its
    ``padding_mask``. Without ``cp`` it is None on ranks that do not hold all tokens: on slices, and
    on middle stages. ``more``: other fields of ``PackedSeqParams``.
    """
    if iterator is None:
        raise JobError(
            [
                "expected an iterator of microbatches on every rank, got None; "
                "give client.microbatches()"
            ],
            "megatron.get_batch",
        )
    mb = next(iterator)
    mb = mb if isinstance(mb, TensorMicrobatch) else TensorMicrobatch.of(mb)
    mb = mb if device is None else mb.to(device)
    if mb.facts.padded:
        return _rows(mb, given)
    made = packed(mb, given=given)
    index = _ring_index(mb)
    known = index is not None or cp is not None or mb.facts.here == mb.facts.tokens
    mask = padding_mask(mb, index, cp=cp, cp_split=cp_split) if known else None
    found = {key: made[key][None] if key in made else None for key in TOKEN_KEYS}
    params = packed_seq_params(mb, **more)
    return Batch(
        found["tokens"],
        found["labels"],
        found["loss_mask"],
        None,
        found["position_ids"],
        params,
        mask,
    )


def _ring_index(mb: Mapping[str, Any]) -> np.ndarray | None:
    """Return the tokens of the whole microbatch that a rank of a ring holds; None without one."""
    if "cp_ranks" not in mb:
        return None
    bounds = np.concatenate(([0], np.cumsum(np.asarray(mb["document_lengths"]))))
    return ring.token_index(bounds, int(mb["local_cp_size"]), int(mb["cp_rank"]))


def _rows(mb: Mapping[str, Any], given: str | None) -> Batch:
    """Return a batch of the padded layout, [rows, context], without masks.

    Attention is causal, so padding at the end of a row needs no mask.
    """
    found: dict[str, Any] = {key: as_tensor(mb[key]) if key in mb else None for key in TOKEN_KEYS}
    if "labels" in mb:
        found["labels"], found["loss_mask"] = converted(mb, SHIFTED, given)
    return Batch(
        found["tokens"],
        found["labels"],
        found["loss_mask"],
        None,
        found["position_ids"],
        None,
        None,
    )


def _class() -> Any:
    try:
        return import_module("megatron.core.packed_seq_params").PackedSeqParams
    except (ImportError, AttributeError):
        return PackedSeqParams
