"""Batches of Hugging Face models: the keys of the flattening collator, or padded rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlord.constructor.sample_documents import NO_GROUP
from overlord.errors import JobError
from overlord.torch.adapters.labels import converted, need, refuse_weights
from overlord.torch.microbatch_info import IGNORE, UNSHIFTED
from overlord.torch.tensor_step import as_tensor

# Key of the vision models -> key of a microbatch.
IMAGE_KEYS = {"pixel_values": "pixel_values", "image_grid_thw": "grid_thw"}
GROUPED = ("group_ids", "roles", "prompt_lengths")  # keys of samples of several documents


def flattened(
    mb: Mapping[str, Any],
    *,
    seq_idx: bool = False,
    mask: bool | torch.dtype = False,
    kernel: bool = True,
    no_cache: bool = True,
    given: str | None = None,
    weighted: bool = False,
) -> dict[str, Any]:
    """Return the arguments of ``model(**flattened(mb))``: all documents in one row, [1, tokens].

    Labels are unshifted, and positions start at 0 in every document. ``kernel``: add
    ``cu_seq_lens_q/k`` and ``max_length_q/k`` for flash attention; other kinds ignore them.
    ``no_cache``: add ``use_cache=False``. Without it models with eager or SDPA attention create a
    cache in training too, then ignore positions, and mix documents silently. ``seq_idx``: for
    layers with a state (Mamba, gated delta). ``mask``: add a four-dimensional mask for attention
    that ignores positions; True for float32, or the dtype of the model. ``given``: the job's
    ``Batch.labels``; None: detect the convention from the labels. ``weighted``: the caller weighs
    the losses by ``mb["loss_mask"]``. Without it, weights other than 0 and 1 are refused.
    """
    facts = need(
        mb,
        ("tokens", "position_ids", "labels", "loss_mask", "cu_seqlens_padded", "max_seqlen"),
        "huggingface.flattened",
    )
    if not weighted:
        refuse_weights(facts, "huggingface.flattened")
    labels, _ = converted(mb, UNSHIFTED, given)
    tokens, bounds = as_tensor(mb["tokens"]), as_tensor(mb["cu_seqlens_padded"])
    made: dict[str, Any] = {
        "input_ids": tokens[None],
        "labels": labels[None],
        "position_ids": as_tensor(mb["position_ids"])[None],
    }
    if kernel:
        made |= {
            "cu_seq_lens_q": bounds,
            "cu_seq_lens_k": bounds,
            "max_length_q": facts.longest,
            "max_length_k": facts.longest,
        }
    made |= {name: as_tensor(mb[key]) for name, key in IMAGE_KEYS.items() if key in mb}
    if no_cache:
        made["use_cache"] = False
    if seq_idx:
        made["seq_idx"] = documents(bounds, len(tokens)).to(torch.int32)[None]
    if mask:
        made["attention_mask"] = block_mask(
            bounds, len(tokens), torch.float32 if mask is True else mask
        )
    return made


def padded(
    mb: Mapping[str, Any], *, given: str | None = None, weighted: bool = False
) -> dict[str, torch.Tensor]:
    """Return a microbatch of ``Batch(layout="padded")`` under Hugging Face keys, [rows, context].

    The keys are ``input_ids``, ``attention_mask``, ``position_ids`` and unshifted ``labels``.
    ``weighted``: as in ``flattened``.
    """
    facts = need(
        mb,
        ("tokens", "position_ids", "labels", "loss_mask", "attention_mask"),
        "huggingface.padded",
        padded=True,
    )
    if not weighted:
        refuse_weights(facts, "huggingface.padded")
    labels, _ = converted(mb, UNSHIFTED, given)
    named = {
        "input_ids": "tokens",
        "attention_mask": "attention_mask",
        "position_ids": "position_ids",
    }
    return {name: as_tensor(mb[key]) for name, key in named.items()} | {"labels": labels}


def preference(mb: Mapping[str, Any], *, given: str | None = None) -> dict[str, torch.Tensor]:
    """Return the pairs of a microbatch as rows, in the form of TRL's preference collator.

    Row i of the first half is a chosen response with its prompt, row i of the second half the
    rejected one. The keys are ``input_ids``, ``attention_mask`` and ``completion_mask``, padded at
    the end to the longest document, and the values of ``Pair(values=)``, row by row. ``given``: the
    job's ``Batch.labels``; None: detect the convention from the labels. Raise ``JobError`` for
    samples that are not pairs.
    """
    keys = ("tokens", "labels", "loss_mask", "cu_seqlens", "cu_seqlens_padded", *GROUPED)
    facts = need(mb, keys, "huggingface.preference", padded=True)
    refuse_weights(facts, "huggingface.preference")
    labels, _ = converted(mb, UNSHIFTED, given)
    lengths, bounds, roles = (
        as_tensor(mb[key]).to(torch.int64) for key in ("cu_seqlens", "cu_seqlens_padded", "roles")
    )
    number = torch.arange(len(roles), device=roles.device)
    empty = len(roles) == 1 and int(as_tensor(mb["group_ids"])[0]) == NO_GROUP
    number = number[:0] if empty else number
    if len(number) % 2 or not torch.equal(roles[: len(number)], number % 2):
        problem = "expected pairs, got samples with other documents; use a job of Pair sources"
        raise JobError([problem], "huggingface.preference")
    order = torch.cat((number[::2], number[1::2]))
    size = lengths.diff()[order]
    place = torch.arange(int(size.max()) if len(size) else 0, device=roles.device)
    mask = place < size[:, None]
    at = torch.where(mask, bounds[order][:, None] + place, 0)
    made = {
        "input_ids": torch.where(mask, as_tensor(mb["tokens"]).reshape(-1)[at], 0),
        "attention_mask": mask.to(torch.int64),
        "completion_mask": (mask & (labels.reshape(-1)[at] != IGNORE)).to(torch.int64),
    }
    others = {*keys, "position_ids", "attention_mask", "source_ids", "max_seqlen"}
    return made | {key: as_tensor(mb[key])[order] for key in mb if key not in others}


def documents(bounds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the index of the document of each token, int64 [tokens]."""
    return document_of(torch.arange(tokens, device=bounds.device), bounds)


def document_of(at: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """Return the index of the document at each position of a microbatch."""
    return torch.searchsorted(bounds[1:].to(torch.int64), at.to(torch.int64), right=True)


def block_mask(
    bounds: torch.Tensor, tokens: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return an additive attention mask, [1, 1, tokens, tokens].

    It is 0 for the same or an earlier token of the same document, else the lowest number of the
    dtype. Its size grows with the square of the tokens.
    """
    document = documents(bounds, tokens)
    at = torch.arange(tokens, device=bounds.device)
    sees = (document[:, None] == document[None, :]) & (at[:, None] >= at[None, :])
    return torch.zeros(sees.shape, dtype=dtype, device=bounds.device).masked_fill_(
        ~sees, torch.finfo(dtype).min
    )[None, None]
