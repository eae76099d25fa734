"""Checks and iteration inside worker processes of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import get_worker_info

from overlord.client.world import world_here
from overlord.errors import JobError


class InWorker:
    """An iterator in a worker process that exits the worker at the first request after an error.

    torch keeps a worker whose iterator raised. When the garbage collector frees the loader, torch
    then waits five seconds for each such worker.
    """

    def __init__(self, items: Iterator[Any]):
        self._items, self._failed = items, False

    def __iter__(self) -> InWorker:
        return self

    def __next__(self) -> Any:
        if self._failed:
            # torch's queue holds the error and is flushed at exit; torch reports any other exit
            # status as a crash.
            raise SystemExit(0)
        try:
            return next(self._items)
        except StopIteration:
            raise
        except Exception:
            self._failed = True
            raise


def world_size() -> int:
    """Return the world size of this process; 1 if it is not part of a distributed job."""
    here = world_here("Dataset")
    return 1 if here is None else here.size


def refuse_workers(has_job: bool, ranks: int) -> None:
    """Raise ``JobError`` for workers that would repeat the job's steps or end its session.

    ``ranks``: the world size of the process that started the worker.
    """
    info = get_worker_info()
    if info.num_workers > 1:
        raise JobError(
            [
                f"num_workers: expected 0 or 1, got {info.num_workers}; each worker would "
                "launch the whole job and deliver every step again. "
                "Loaders and constructors of a session work in parallel: see "
                "launch(loaders=, workers=, runtime=)"
            ],
            "Dataset",
        )
    if not has_job:
        raise JobError(
            [
                "num_workers: expected 0 with a client, got 1; a session does not "
                "survive a fork. Give the Job, which is then launched in "
                "the worker, or use num_workers=0: steps are prefetched either way"
            ],
            "Dataset",
        )
    if (size := max(ranks, world_size())) > 1:
        raise JobError(
            [
                f"num_workers: expected 0 where ranks share a session (WORLD_SIZE={size}), "
                "got 1; rank 0's worker "
                "would end, and the session with it, while others still take steps. "
                "Steps are prefetched without workers too"
            ],
            "Dataset",
        )
