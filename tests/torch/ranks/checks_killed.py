"""A fetcher that dies without a word: those it serves say so, and do not wait for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from overlord.errors import ActorLost
from tests.torch.ranks.checks_ends import joined


def those_whom_a_dead_fetcher_served_are_told(out: Path) -> None:
    client = joined()
    next(client)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == 3:
        try:
            next(client)
        except ActorLost as lost:
            (out / "said").write_text(str(lost))
    os._exit(0)


CHECKS: dict[str, Callable[[Path], None]] = {"killed": those_whom_a_dead_fetcher_served_are_told}
