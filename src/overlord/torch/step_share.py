"""The share of one microbatch in the loss of its step, from what the microbatch carries."""

from __future__ import annotations

from typing import Any

import torch

from overlord.client.world import process_groups
from overlord.errors import JobError
from overlord.torch.adapters.labels import converted
from overlord.torch.loss import Head, token_loss
from overlord.torch.microbatch_info import SHIFTED, UNSHIFTED, MicrobatchInfo
from overlord.torch.tensor_step import as_tensor


def shifted_labels(logits: torch.Tensor, mb: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return labels and loss mask that fit logits, or losses per token, on their device.

    Logits of a position predict the next token, so their labels are shifted. Losses per token have
    the labels of the microbatch.
    """
    labels, mask = as_tensor(mb["labels"]), mb.get("loss_mask")
    if logits.numel() != labels.numel() and MicrobatchInfo.of(mb).labels == UNSHIFTED:
        labels, mask = converted(mb, SHIFTED)
    return labels.to(logits.device), None if mask is None else as_tensor(mask).to(logits.device)


def microbatch_loss(
    logits: torch.Tensor,
    mb: Any,
    *,
    gradients: str = "mean",
    dp_size: int | None = None,
    head: Head | None = None,
) -> torch.Tensor:
    """Return the share of a microbatch in the loss of its step: ``token_loss`` of what it carries.

    Call ``backward()`` on each, and do not divide by the number of microbatches. ``logits``: as in
    ``token_loss``. ``mb``: a microbatch of a ``Loader``, or of its steps. ``gradients``: ``"mean"``
    if the trainer averages gradients over ``dp_size`` ranks, as DDP and FSDP do; by default over
    all ranks of the process group. ``"sum"`` if it sums them. ``head``: as in ``token_losses``.
    """
    if (tokens := getattr(mb, "global_valid_tokens", None)) is None:
        raise JobError(
            [
                f"expected a microbatch of a Loader, got {type(mb).__name__} without "
                "global_valid_tokens; leave transform= out and convert in the training step"
            ],
            "microbatch_loss",
        )
    labels, mask = shifted_labels(logits, mb)
    dist = process_groups()
    known = dp_size or (1 if dist is None else dist.get_world_size())
    return token_loss(
        logits, labels, tokens, gradients=gradients, dp_size=known, loss_mask=mask, head=head
    )
