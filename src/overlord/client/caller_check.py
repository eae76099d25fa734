"""Recognise trainers that change what an iterator yields, on the call stack of ``iter()``.

Some trainers wrap a loader. A wrapper passes on every n-th item only, or takes items ahead of the
training step. The loader's own methods cannot detect that. Class names are compared as text, so
that no trainer is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from overlord.errors import JobError

# Accelerate and transformers: one stream, dealt out to all processes
SHARING = ("IterableDatasetShard", "DataLoaderDispatcher")
LIGHTNING = "_PrefetchDataFetcher"  # takes items ahead where the loader has no length
ACCELERATE = "DataLoaderShard"  # takes one item ahead to detect the last one

# returns the number of items that the trainer holds ahead of the training step; called with the
# first item
Ahead = Callable[[], int]


def callers() -> Iterator[Any]:
    """Yield ``self`` of every method on the call stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def refuse_sharing(where: str) -> None:
    """Refuse a wrapper that deals one stream out to all processes.

    These items are this rank's own, and the wrapper would drop most of them.
    """
    for caller in callers():
        if (name := type(caller).__name__) not in SHARING:
            continue
        holder = caller if hasattr(caller, "num_processes") else getattr(caller, "state", None)
        if (processes := getattr(holder, "num_processes", 1)) > 1:
            raise JobError(
                [
                    f"expected every item to reach this rank, got {name}, which deals the "
                    f"items of one stream out to {processes} processes; "
                    "each rank has a stream of its own: give the trainer "
                    "overlord.torch.StatefulLoader(job), which it leaves as it is"
                ],
                where,
            )


def nothing_ahead() -> int:
    """Return 0: no item is taken ahead."""
    return 0


def taken_ahead() -> Ahead:
    """Return how many items the calling trainer holds before it trains on them."""
    for caller in callers():
        name = type(caller).__name__
        if name == LIGHTNING:
            return lambda fetcher=caller: fetcher.prefetch_batches if fetcher.length is None else 0  # type: ignore[misc]
        if name == ACCELERATE:
            return lambda shard=caller: 0 if shard.use_stateful_dataloader else 1  # type: ignore[misc]
    return nothing_ahead


def refuse_ahead(where: str) -> None:
    """Refuse a trainer that takes items ahead and saves the state of the stream.

    A resume would skip these items.
    """
    for caller in callers():
        if type(caller).__name__ == LIGHTNING:
            raise JobError(
                [
                    "expected an overlord.torch.StatefulLoader in this trainer, got a "
                    f"{where}: {LIGHTNING} takes steps before it "
                    "trains on them, and a resume would skip them; give it "
                    "StatefulLoader(job), or StatefulLoader(client)"
                ],
                where,
            )
