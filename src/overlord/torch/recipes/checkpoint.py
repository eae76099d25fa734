"""Checkpoints of torch's DCP with model, optimizer and the position in the data."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

COMPLETE = ".metadata"  # the file that DCP writes last


def write(
    folder: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any, **how: Any
) -> None:
    """Write one checkpoint. ``how``: further arguments of ``dcp.save``."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "data": loader}
    dcp.save(state, checkpoint_id=folder, **how)


def read(
    folder: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any, **how: Any
) -> None:
    """Load one checkpoint. ``how``: further arguments of ``dcp.load``."""
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "data": loader}
    dcp.load(state, checkpoint_id=folder, **how)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def save(
    folder: str | os.PathLike[str], step: int, model: Any, optimizer: Any, loader: Any
) -> None:
    """Write model, optimizer and the position in the data to ``folder/step``; every rank calls it.

    Earlier checkpoints stay: a crash while one is written leaves the one before.
    """
    write(Path(folder) / str(step), model, optimizer, loader)


def load(folder: str | os.PathLike[str], model: Any, optimizer: Any, loader: Any) -> int:
    """Load the last whole checkpoint of ``save``, on every rank; return the next step, or 0.

    The number of ranks may differ from the saved one.
    """
    if (step := last_step(folder, COMPLETE)) is None:
        return 0
    read(Path(folder) / str(step), model, optimizer, loader)
    return step + 1


def last_step(folder: str | os.PathLike[str], complete: str) -> int | None:
    """Return the largest step whose folder has the file ``complete``; None if there is none."""
    steps = [int(path.name) for path in Path(folder).glob("[0-9]*") if (path / complete).exists()]
    return max(steps, default=None)
