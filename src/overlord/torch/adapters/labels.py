"""Conversion of labels between two conventions, document by document.

Shifted: the label of a token is the next token of its document (Megatron, torchtitan). Unshifted:
it is the token itself, and the model shifts (Hugging Face). Both have labels for the same
predictions, one position apart, so a conversion loses nothing. The exception are pieces of samples
(packing="concat"): only a shifted label can be the token after the piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from overlord.client.client import Microbatch
from overlord.errors import JobError
from overlord.torch.microbatch_info import IGNORE, SHIFTED, UNSHIFTED, MicrobatchInfo
from overlord.torch.tensor_step import TensorMicrobatch, as_tensor

CONVENTIONS = (SHIFTED, UNSHIFTED)


def converted(
    mb: Mapping[str, Any], wanted: str, given: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return labels and loss mask of a microbatch in the wanted convention.

    ``given``: the job's ``Batch.labels``; None: detect the convention from the labels. Raise
    ``JobError`` if a slice of CP would need a conversion.
    """
    for name, value in (("wanted", wanted), ("given", given or wanted)):
        if value not in CONVENTIONS:
            raise JobError(
                [f"{name}: expected a labels convention ({', '.join(CONVENTIONS)}), got {value!r}"],
                "labels",
            )
    facts = MicrobatchInfo.of(mb)
    labels, mask = as_tensor(mb["labels"]), as_tensor(mb["loss_mask"])
    has = given or facts.labels
    if not has and facts.sliced and wanted == UNSHIFTED:
        raise JobError([_NO_SLICES.format(have="labels", wanted=wanted)], "labels")
    if not has or has == wanted:  # there is no label, or labels have the wanted convention
        return labels, mask
    if facts.sliced:
        raise JobError([_NO_SLICES.format(have=f"{has} labels", wanted=wanted)], "labels")
    if facts.continued:
        raise JobError([_NO_PIECES.format(wanted=wanted)], "labels")
    return _moved(labels, mb, wanted, IGNORE), _moved(mask, mb, wanted, 0)


_NO_SLICES = (
    "expected a whole microbatch, got a slice (context parallelism); its {have} cannot "
    "become {wanted}, because neighbours of tokens are on other ranks. "
    "Set Batch(labels={wanted!r}) in the job: its labels are made before the slices"
)


_NO_PIECES = (
    "expected whole samples, got pieces (packing='concat') whose last label is a token of another "
    "microbatch, which cannot become {wanted}. Set Batch(labels={wanted!r}) in the job, which "
    "leaves these labels out of the loss and out of global_valid_tokens"
)


def _moved(values: torch.Tensor, mb: Mapping[str, Any], wanted: str, nothing: int) -> torch.Tensor:
    """Return values moved by one position; ``nothing`` replaces values of another document."""
    by = -1 if wanted == SHIFTED else 1
    moved = values.roll(by, dims=-1)
    if values.dim() == 2:
        moved[:, -1 if by < 0 else 0] = nothing
    else:
        bounds = as_tensor(mb["cu_seqlens_padded"]).to(device=values.device, dtype=torch.int64)
        # one place more: empty documents of a fixed shape begin behind the last token
        cut = torch.zeros(len(moved) + 1, dtype=torch.bool, device=values.device)
        cut[bounds[1:] - 1 if by < 0 else bounds[:-1]] = True
        moved.masked_fill_(cut[:-1], nothing)
    return moved


def refuse_weights(facts: MicrobatchInfo, adapter: str) -> None:
    """Raise ``JobError`` for loss weights that labels alone cannot express."""
    if facts.weighted:
        problem = (
            "expected loss weights of 0 and 1, since the model computes the loss from labels "
            "alone, got others; compute the loss from its logits: token_loss(..., "
            "loss_mask=mb['loss_mask'])"
        )
        raise JobError([problem], adapter)


def has_keys(mb: Mapping[str, Any], keys: tuple[str, ...], adapter: str) -> None:
    """Raise ``JobError`` if a microbatch lacks a key that an adapter needs.

    On a rank that another rank serves raise ``KeyError``, which names that rank.
    """
    missing = [key for key in keys if key not in mb]
    if missing and "cu_seqlens" not in mb and isinstance(mb, (Microbatch, TensorMicrobatch)):
        mb[missing[0]]  # on a rank that another serves: this KeyError names that rank
    if missing:
        why = (
            "set Batch(layout='padded')"
            if missing == ["attention_mask"]
            else "each pipeline stage has only its own keys"
        )
        found = f"got {', '.join(mb)}; {why}"
        raise JobError([f"expected {', '.join(missing)} in the microbatch, {found}"], adapter)


def need(
    mb: Mapping[str, Any],
    keys: tuple[str, ...],
    adapter: str,
    *,
    padded: bool = False,
    whole: bool = True,
) -> MicrobatchInfo:
    """Return the properties of a microbatch; raise ``JobError`` if the adapter cannot use it."""
    has_keys(mb, keys, adapter)
    facts = MicrobatchInfo.of(mb)
    if facts.padded and not padded:
        raise JobError(
            [
                "expected the packed layout, got rows of Batch(layout='padded'); set "
                "Batch(layout='packed')"
            ],
            adapter,
        )
    if whole and facts.sliced:
        raise JobError(
            [
                f"expected whole microbatches, got a slice of {facts.here} of "
                f"{facts.tokens} tokens (context parallelism); "
                "set Batch(cp_split='none'), and let the framework slice"
            ],
            adapter,
        )
    return facts
