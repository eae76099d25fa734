"""FSDP2 (``fully_shard``) with torch's distributed checkpoint."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from overlord.torch.recipes.checkpoint import load, save

__all__ = ["load", "save", "syncing"]


def syncing(model: Any, mb: Any) -> AbstractContextManager[Any]:
    """Let FSDP reduce gradients after the last microbatch of a step only; return a context.

    Gradients of a whole step are then unsharded. Leave it out where memory does not allow that:
    the sum of gradients is the same.
    """
    model.set_requires_gradient_sync(mb.is_last)
    return nullcontext()
