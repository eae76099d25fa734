"""torch's DataLoader as training uses it, and torchdata's StatefulDataLoader in its place.

Every rank is a process with a DataLoader of some workers, or of none. Each worker opens all sources,
mixes, encodes and packs. ``torch`` sends tensors in the default way, each in its own shared memory.
``torch-numpy`` sends numpy arrays through the pipe, which is cheaper for arrays of this size and
rarely used. ``stateful`` sends tensors, and keeps its state at every microbatch, as is its default.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from corpus import Corpus
from peers.kernel import Microbatch, mixed_microbatches
from peers.work import Work


class Packed(IterableDataset):
    """All sources, mixed and packed, for one worker of one rank."""

    def __init__(self, corpus: Corpus, work: Work):
        self.corpus, self.work = corpus, work

    def __iter__(self) -> Iterator[Microbatch]:
        info = get_worker_info()
        worker, of = (info.id, info.num_workers) if info else (0, 1)
        reader = replace(
            self.work, rank=self.work.rank * of + worker, processes=self.work.processes * of
        )
        return mixed_microbatches(self.corpus, reader)


def prepare(work: Work) -> None:
    torch.set_num_threads(1)
    loader_class(work)


def loader_class(work: Work) -> Any:
    if work.peer != "stateful":
        return DataLoader
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchdata.stateful_dataloader import StatefulDataLoader
    return StatefulDataLoader


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    return load(Packed(corpus, work), work, as_arrays=work.peer == "torch-numpy")


def load(dataset: Any, work: Work, *, as_arrays: bool = True, **options: Any) -> Iterator[Any]:
    """Return the microbatches of a dataset, a step of them ahead.

    ``batch_size=None``, since the dataset yields whole microbatches.
    """
    if work.workers:
        options["prefetch_factor"] = max(1, work.microbatches // work.workers)
    if as_arrays:
        options["collate_fn"] = as_they_are
    return iter(loader_class(work)(dataset, batch_size=None, num_workers=work.workers, **options))


def as_they_are(microbatch: Microbatch) -> Microbatch:
    return microbatch
