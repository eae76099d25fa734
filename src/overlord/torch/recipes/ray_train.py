"""Ray Train: checkpoints of a ``TorchTrainer`` that hold the position in the data."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import ray.train

from overlord.torch.recipes import ddp

FILE = "checkpoint.pt"


def report(metrics: Mapping[str, Any], model: Any, optimizer: Any, loader: Any) -> None:
    """Report metrics with a checkpoint of model, optimizer and position; every rank calls it.

    Rank 0 writes the checkpoint: the position is the same on every rank.
    """
    first = ray.train.get_context().get_world_rank() == 0
    with tempfile.TemporaryDirectory() as folder:
        ddp.save(os.path.join(folder, FILE), model, optimizer, loader)
        checkpoint = ray.train.Checkpoint.from_directory(folder) if first else None
        ray.train.report(dict(metrics), checkpoint=checkpoint)


def restore(model: Any, optimizer: Any, loader: Any) -> bool:
    """Load the last reported checkpoint, on every rank; return False if there is none.

    The number of workers may differ from the saved one.
    """
    last = ray.train.get_checkpoint()
    if last is None:
        return False
    with last.as_directory() as folder:
        return ddp.load(os.path.join(folder, FILE), model, optimizer, loader)
