"""torch's DataLoader as it is used in training: every rank is a process with a DataLoader and a worker of its own, and each
worker opens all sources, mixes, encodes and packs.

``torch`` hands out tensors the default way (each in its own piece of shared memory); ``torch-numpy`` passes numpy arrays through
the pipe instead, which is cheaper for arrays of this size and rarely seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from corpus import Corpus
from peers.kernel import Microbatch, Work, mixed_microbatches


class Packed(IterableDataset):
    """All sources, mixed and packed, for one rank."""

    def __init__(self, corpus: Corpus, work: Work):
        self.corpus, self.work = corpus, work

    def __iter__(self) -> Iterator[Microbatch]:
        return mixed_microbatches(self.corpus, self.work)


def prepare(work: Work) -> None:
    torch.set_num_threads(1)


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    options: dict[str, Any] = {"collate_fn": as_they_are} if work.peer == "torch-numpy" else {}
    # A step of microbatches ahead; batch_size=None since the dataset yields whole microbatches.
    loader = DataLoader(Packed(corpus, work), batch_size=None, num_workers=1, prefetch_factor=work.microbatches, **options)
    return iter(loader)


def as_they_are(microbatch: Microbatch) -> Microbatch:
    return microbatch
