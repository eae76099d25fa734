"""Lightning: a loss that its gradient accumulation and its averages leave right."""

from __future__ import annotations

from typing import Any

import torch

from overlord.errors import JobError
from overlord.torch.loss import Head
from overlord.torch.step_share import microbatch_loss


def loss(trainer: Any, logits: torch.Tensor, mb: Any, *, head: Head | None = None) -> torch.Tensor:
    """Return the loss of a microbatch, for ``training_step`` to return.

    Lightning divides it by ``accumulate_grad_batches`` and averages gradients over ranks. The
    result is the mean over the tokens of the whole step. Raise ``JobError`` if the optimizer would
    not step exactly after the last microbatch of a step. ``logits``, ``head``: as in
    ``microbatch_loss``.
    """
    n = trainer.accumulate_grad_batches
    taken = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    if (taken % n == 0) != mb.is_last:
        raise JobError(
            [
                f"accumulate_grad_batches: expected the Batch.microbatches of the job, got {n}; "
                "write Trainer(accumulate_grad_batches=job.batch.microbatches)"
            ],
            "lightning",
        )
    return n * microbatch_loss(logits, mb, dp_size=trainer.world_size, head=head)
