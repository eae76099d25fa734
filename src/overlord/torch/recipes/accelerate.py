"""Accelerate: a loss that its gradient accumulation and its averages leave right."""

from __future__ import annotations

from typing import Any

import torch

from overlord.errors import JobError
from overlord.torch.loss import Head
from overlord.torch.step_share import microbatch_loss


def loss(
    accelerator: Any, logits: torch.Tensor, mb: Any, *, head: Head | None = None
) -> torch.Tensor:
    """Return the loss of a microbatch for ``accelerator.backward``, inside ``accumulate``.

    Accelerate divides it by the accumulation steps and averages gradients over processes. The
    result is the mean over the tokens of the whole step. Raise ``JobError`` if the optimizer would
    not step exactly after the last microbatch of a step. ``logits``, ``head``: as in
    ``microbatch_loss``.
    """
    n = accelerator.gradient_accumulation_steps
    if accelerator.sync_gradients != mb.is_last:
        raise JobError(
            [
                f"gradient_accumulation_steps: expected Batch.microbatches of the job, got {n}; "
                "write Accelerator(gradient_accumulation_steps=job.batch.microbatches), and call "
                "this inside `with accelerator.accumulate(model)`"
            ],
            "accelerate",
        )
    return n * microbatch_loss(logits, mb, dp_size=accelerator.num_processes, head=head)
