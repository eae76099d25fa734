"""``DistributedDataParallel``: when to synchronise gradients, and distributed checkpoints."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from overlord.torch.recipes.checkpoint import load, save

__all__ = ["load", "save", "syncing"]


def syncing(model: Any, mb: Any) -> AbstractContextManager[Any]:
    """Return a context for forward and backward of a microbatch.

    DDP averages gradients over ranks after the last microbatch of a step only.
    """
    return nullcontext() if mb.is_last or not hasattr(model, "no_sync") else model.no_sync()
