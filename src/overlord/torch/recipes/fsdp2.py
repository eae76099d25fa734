"""FSDP2 (``fully_shard``) with torch's distributed checkpoint."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def syncing(model: Any, mb: Any) -> AbstractContextManager[Any]:
    """Let FSDP reduce gradients after the last microbatch of a step only; return a context.

    Gradients of a whole step are then unsharded. Leave it out where memory does not allow that:
    the sum of gradients is the same.
    """
    model.set_requires_gradient_sync(mb.is_last)
    return nullcontext()


def save(folder: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any) -> None:
    """Write model, optimizer and the position in the data as one distributed checkpoint."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "data": loader}, checkpoint_id=folder)


def load(folder: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any) -> bool:
    """Load what ``save`` wrote; return False if there is no whole checkpoint.

    The number of ranks may differ from the saved one.
    """
    if not os.path.exists(os.path.join(folder, ".metadata")):  # written last
        return False
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments, "data": loader}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return True
