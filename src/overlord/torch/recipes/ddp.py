"""``DistributedDataParallel``: when to synchronise gradients, and checkpoints of one file."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from overlord.client.world import process_groups


def syncing(model: Any, mb: Any) -> AbstractContextManager[Any]:
    """Return a context for forward and backward of a microbatch.

    DDP averages gradients over ranks after the last microbatch of a step only.
    """
    return nullcontext() if mb.is_last or not hasattr(model, "no_sync") else model.no_sync()


def save(path: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any) -> None:
    """Write model, optimizer and the position in the data to one file, atomically, on rank 0."""
    dist, target = process_groups(), Path(path)
    if dist is None or dist.get_rank() == 0:
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        parts = {"model": model, "optimizer": optimizer, "data": loader}
        torch.save({name: part.state_dict() for name, part in parts.items()}, partial)
        os.replace(partial, target)


def load(path: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any) -> bool:
    """Load what ``save`` wrote, on every rank; return False if there is no file.

    The number of ranks may differ from the saved one.
    """
    if not Path(path).exists():
        return False
    saved = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["data"])
    return True
