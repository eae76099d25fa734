"""What each worker process of Ray runs first, so that the script of the page is recorded there."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import overlord.torch.loader
from tests.trainers.script_world import RecordingLoader


def record() -> None:
    """Replace the loader, and kill the first group of workers only."""
    if "TRAINERS_OUT" not in os.environ:
        return
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    overlord.torch.loader.Loader = RecordingLoader  # type: ignore[misc]
    killed = Path(os.environ["TRAINERS_OUT"], "train-0")
    if killed.exists():
        os.environ["TRAINERS_KILL"] = "0"
