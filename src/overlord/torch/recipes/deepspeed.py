"""DeepSpeed: a loss that its accumulation leaves right, and checkpoints with the position."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from overlord.errors import JobError
from overlord.torch.loss import Head
from overlord.torch.step_share import microbatch_loss

KEY = "overlord"


def loss(engine: Any, logits: torch.Tensor, mb: Any, *, head: Head | None = None) -> torch.Tensor:
    """Return the loss of a microbatch for ``engine.backward``.

    DeepSpeed divides it by the accumulation steps and averages gradients over ranks. The result is
    the mean over the tokens of the whole step. Raise ``JobError`` if the optimizer would not step
    exactly after the last microbatch of a step. ``logits``, ``head``: as in ``microbatch_loss``.
    """
    n = engine.gradient_accumulation_steps()
    if engine.is_gradient_accumulation_boundary() != mb.is_last:
        raise JobError(
            [
                f"gradient_accumulation_steps: expected Batch.microbatches of the job, got {n}; "
                "set it in the configuration of deepspeed.initialize"
            ],
            "deepspeed",
        )
    return n * microbatch_loss(logits, mb, dp_size=engine.dp_world_size, head=head)


def save(folder: str | os.PathLike[str], engine: Any, loader: Any) -> None:
    """Write a checkpoint of DeepSpeed with the position in the data; every rank calls it."""
    engine.save_checkpoint(str(folder), client_state={KEY: loader.state_dict()})


def load(folder: str | os.PathLike[str], engine: Any, loader: Any) -> bool:
    """Load the last checkpoint of ``save``, on every rank; return False if there is none."""
    if not (Path(folder) / "latest").exists():
        return False
    _, state = engine.load_checkpoint(str(folder))
    if KEY not in state:
        raise JobError(
            ["expected the position of the data in client_state, got a checkpoint without one"],
            "deepspeed",
        )
    loader.load_state_dict(state[KEY])
    return True
