"""Ray Train: checkpoints of a ``TorchTrainer`` that hold the position in the data."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from overlord.torch.recipes.checkpoint import read, write


def report(metrics: Mapping[str, Any], model: Any, optimizer: Any, loader: Any) -> None:
    """Report metrics with a checkpoint of model, optimizer and position; every rank calls it.

    Each rank writes its part in its own folder, and Ray merges them into one checkpoint.
    """
    train = import_module("ray.train")
    with tempfile.TemporaryDirectory() as folder:
        write(folder, model, optimizer, loader)
        train.report(dict(metrics), checkpoint=train.Checkpoint.from_directory(folder))


def restore(model: Any, optimizer: Any, loader: Any) -> bool:
    """Load the last reported checkpoint, on every rank; return False if there is none.

    The number of workers may differ from the saved one.
    """
    last = import_module("ray.train").get_checkpoint()
    if last is None:
        return False
    with last.as_directory() as folder:
        read(folder, model, optimizer, loader)
    return True
