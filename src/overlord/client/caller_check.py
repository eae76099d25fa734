"""Detect trainers that drop or prefetch items of an iterator, on the call stack of ``iter()``.

Some trainers wrap a loader. A wrapper may pass on only every n-th item, or take items ahead of the
training step. The loader's own methods cannot detect that. Class names are compared as text, so
that no trainer is imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from overlord.errors import JobError

# Accelerate and transformers: wrappers that distribute one stream over all processes.
SHARING = ("IterableDatasetShard", "DataLoaderDispatcher")
SKIPPING = "SkipDataLoader"  # skips the items that it counts as trained, on resume
LIGHTNING = "_PrefetchDataFetcher"  # takes items ahead if the loader has no length
ACCELERATE = "DataLoaderShard"  # takes one item ahead to detect the last one

# A function that returns the number of items that the trainer holds ahead of the training step;
# called at the request of the first item.
Ahead = Callable[[], int]


def callers() -> Iterator[Any]:
    """Yield ``self`` of every method on the call stack, innermost first."""
    frame = inspect.currentframe()
    while frame is not None:
        if "self" in frame.f_locals:
            yield frame.f_locals["self"]
        frame = frame.f_back


def refuse_sharing(where: str) -> None:
    """Raise ``JobError`` if a caller is a wrapper that distributes one stream over all processes.

    The items of this iterator are all for this rank, and the wrapper would drop most of them.
    """
    for caller in callers():
        if (name := type(caller).__name__) not in SHARING:
            continue
        holder = caller if hasattr(caller, "num_processes") else getattr(caller, "state", None)
        if (processes := getattr(holder, "num_processes", 1)) > 1:
            raise JobError(
                [
                    f"expected a trainer that passes every item to this rank, got {name}, which "
                    f"distributes the items over {processes} processes; pass "
                    "overlord.torch.Loader(job) to the trainer, which it does not wrap"
                ],
                where,
            )


def refuse_collating(where: str) -> None:
    """Raise ``JobError`` if a caller is a DataLoader that would form batches of items."""
    for caller in callers():
        size = getattr(getattr(caller, "_index_sampler", None), "batch_size", None)
        if size is not None and size > 1:
            raise JobError(
                [
                    f"batch_size: expected None in the DataLoader, got {size}; an item is a batch "
                    "already: pass overlord.torch.Loader(job) to the trainer. In the Trainer of "
                    "transformers: overlord.torch.recipes.huggingface.use(trainer, loader)"
                ],
                where,
            )


def refuse_skipping(where: str, loaded: bool) -> None:
    """Raise ``JobError`` if a caller skips items of a loader that has loaded a state.

    The state is after the trained items already, so others would be skipped.
    """
    for caller in callers() if loaded else ():
        if type(caller).__name__ == SKIPPING and getattr(caller, "skip_batches", 0) > 0:
            raise JobError(
                [
                    "expected one way to resume, got a loaded state and a trainer that skips "
                    f"{caller.skip_batches} items more; pass "
                    "TrainingArguments(ignore_data_skip=True)"
                ],
                where,
            )


def nothing_ahead() -> int:
    """Return 0, for a trainer that takes no item ahead."""
    return 0


def taken_ahead() -> Ahead:
    """Return a function that counts the items the calling trainer holds ahead of training."""
    for caller in callers():
        name = type(caller).__name__
        if name == LIGHTNING:
            return lambda fetcher=caller: fetcher.prefetch_batches if fetcher.length is None else 0  # type: ignore[misc]
        if name == ACCELERATE:
            return lambda shard=caller: 0 if shard.use_stateful_dataloader else 1  # type: ignore[misc]
    return nothing_ahead


def refuse_ahead(where: str) -> None:
    """Raise ``JobError`` if a caller takes items ahead of training: a resume would skip them."""
    for caller in callers():
        if type(caller).__name__ == LIGHTNING:
            raise JobError(
                [
                    "expected an overlord.torch.Loader in this trainer, got a "
                    f"{where}: {LIGHTNING} takes steps before it "
                    "trains on them, and a resume would skip them; pass "
                    "overlord.torch.Loader(job), or Loader(client)"
                ],
                where,
            )
