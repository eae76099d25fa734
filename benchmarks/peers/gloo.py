"""The process group of the ranks of a cell, for loaders that need one."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from peers.work import Work


def join(work: Work) -> None:
    """Join the ranks of the cell, which meet at a file, and set what a launcher of torch sets."""
    meeting = Path(os.environ["CELL_FOLDER"]) / "ranks"
    ranks = {"RANK": work.rank, "LOCAL_RANK": work.rank}
    sizes = {"WORLD_SIZE": work.processes, "LOCAL_WORLD_SIZE": work.processes}
    os.environ.update({name: str(value) for name, value in (ranks | sizes).items()})
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=work.rank, world_size=work.processes
    )
