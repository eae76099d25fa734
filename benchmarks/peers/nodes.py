"""torchdata.nodes, configured for speed.

Every rank is a process. With one worker, sources, weighted sampler, encoder and packer run in one
background thread of it; more workers are threads that encode. Reading and encoding release the
interpreter lock, so a worker process would only add a pipe.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchdata.nodes import (
        BaseNode,
        Batcher,
        IterableWrapper,
        Loader,
        Mapper,
        MultiNodeWeightedSampler,
        ParallelMapper,
        Prefetcher,
        StopCriteria,
    )

from corpus import Corpus
from peers.kernel import (
    CHUNK_ROWS,
    SHUFFLED_ROWS,
    Encoder,
    Microbatch,
    Packer,
    RowBuffer,
    SourceRows,
)
from peers.work import Work

# microbatches; the default of 1 asks all sources for their state at every one, and costs far more
SNAPSHOT_EVERY = 256


class Tagged:
    """One pass over the rows of a source, each with the number of the source.

    Packing needs the number, and the sampler does not return it.
    """

    def __init__(self, rows: SourceRows, number: int):
        self.rows, self.number = rows, number

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        number = self.number
        return ((number, row) for row in self.rows)


class PackNode(BaseNode[Microbatch]):
    """Packs encoded chunks.

    Its state omits the open microbatch: the benchmark never restores it.
    """

    def __init__(self, source: BaseNode, context: int):
        super().__init__()
        self.source, self.context = source, context

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self.source.reset(initial_state["source"] if initial_state else None)
        self.packer = Packer(self.context)
        self.full: list[Microbatch] = []

    def next(self) -> Microbatch:
        while not self.full:
            documents, sources = next(self.source)
            self.full = list(self.packer.add(documents, sources))[::-1]
        return self.full.pop()

    def get_state(self) -> dict[str, Any]:
        return {"source": self.source.state_dict()}


def prepare(work: Work) -> None:
    torch.set_num_threads(1)


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    encode = Encoder(corpus, work.job, work.context)
    rng = np.random.default_rng([work.seed, work.rank])
    buffer = RowBuffer(SHUFFLED_ROWS, rng)

    def exchange(chunk: list[tuple[int, Any]]) -> tuple[Sequence[Any], Sequence[int]]:
        sources, rows = zip(*chunk, strict=True)
        if work.shuffle:
            sources, rows = buffer.exchange(sources, rows)
        return rows, sources

    def encode_chunk(chunk: tuple[Sequence[Any], Sequence[int]]) -> tuple[list[Any], Sequence[int]]:
        return encode(chunk[0]), chunk[1]

    readers = (
        SourceRows(source, work.column, work.rank, work.processes, rng if work.shuffle else None)
        for source in corpus.sources
    )
    nodes = {
        source.name: IterableWrapper(Tagged(rows, i))
        for i, (source, rows) in enumerate(zip(corpus.sources, readers, strict=True))
    }
    weights = {
        source.name: float(w) for source, w in zip(corpus.sources, corpus.weights, strict=True)
    }
    node: Any = MultiNodeWeightedSampler(
        nodes,
        weights,
        StopCriteria.CYCLE_FOREVER,
        rank=work.rank,
        world_size=work.processes,
        seed=work.seed,
    )
    node = Mapper(Batcher(node, CHUNK_ROWS), exchange)
    if work.workers > 1:
        node = ParallelMapper(
            node, encode_chunk, work.workers, method="thread", snapshot_frequency=SNAPSHOT_EVERY
        )
    else:
        node = Mapper(node, encode_chunk)
    node = PackNode(node, work.context)
    if work.workers:
        node = Prefetcher(
            node, prefetch_factor=work.microbatches, snapshot_frequency=SNAPSHOT_EVERY
        )
    return iter(Loader(node))
