"""torch's DataLoader as training uses it.

Every rank is a process with a DataLoader of one or more workers. Each worker opens all sources,
mixes, encodes and packs. ``torch`` sends tensors in the default way, each in its own shared memory.
``torch-numpy`` sends numpy arrays through the pipe, which is cheaper for arrays of this size and
rarely used.
"""

from __future__ import annotations

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
        worker, of = get_worker_info().id, self.work.workers
        reader = replace(
            self.work, rank=self.work.rank * of + worker, processes=self.work.processes * of
        )
        return mixed_microbatches(self.corpus, reader)


def prepare(work: Work) -> None:
    torch.set_num_threads(1)


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    options: dict[str, Any] = {"collate_fn": as_they_are} if work.peer == "torch-numpy" else {}
    # A step of microbatches ahead; batch_size=None since the dataset yields whole microbatches.
    ahead = max(1, work.microbatches // work.workers)
    return iter(
        DataLoader(
            Packed(corpus, work),
            batch_size=None,
            num_workers=work.workers,
            prefetch_factor=ahead,
            **options,
        )
    )


def as_they_are(microbatch: Microbatch) -> Microbatch:
    return microbatch
