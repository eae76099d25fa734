"""Streaming (the maintained fork, streaming-community) over MDS files.

Every source is a stream with its proportion. Samples are shuffled with ``py1e``, its default. In
order they are in stratified batches, since otherwise one stream would follow another. The dataset
encodes and packs in the workers of torch's DataLoader. Arrays go through the pipe, the cheaper way. An epoch is longer than the run, since between epochs all workers wait for each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corpus import Corpus, SourceFiles
from peers import torch_loader
from peers.absent import allow_missing
from peers.conversion import folders
from peers.gloo import join
from peers.kernel import CHUNK_ROWS, Microbatch, SourceRows, packed_rows
from peers.work import Work

allow_missing()

from streaming import MDSWriter, Stream, StreamingDataset  # noqa: E402
from streaming.base.util import clean_stale_shared_memory  # noqa: E402

FORMAT = "mds"
TYPES = {"text": "str", "tokens": "ndarray:int32"}
MORE = 2.0  # times the tokens of the run are in an epoch
TOKENS_PER_WORD = {"null": 1.0, "tokenized": 1.4}


def write_source(folder: Path, source: SourceFiles, number: int, column: str) -> None:
    columns = {column: TYPES[column], "source": "int32"}
    with MDSWriter(out=str(folder), columns=columns) as out:
        for row in SourceRows(source, column, 0, 1):
            out.write({column: row, "source": np.int32(number)})


class Packed(StreamingDataset):
    """All streams, mixed and shuffled by the library, encoded and packed."""

    def __init__(self, corpus: Corpus, work: Work):
        self.corpus, self.work = corpus, work
        streams = [
            Stream(local=str(folder), proportion=float(weight))
            for folder, weight in zip(
                folders(corpus, FORMAT, work.column), corpus.weights, strict=True
            )
        ]
        super().__init__(
            streams=streams,
            shuffle=work.shuffle,
            shuffle_seed=work.seed,
            batch_size=batch_rows(corpus, work),
            batching_method="random" if work.shuffle else "stratified",
            num_canonical_nodes=1,
            epoch_size=samples_of(corpus, work),
        )

    def __iter__(self) -> Iterator[Microbatch]:
        column = self.work.column
        rows = ((int(row["source"]), row[column]) for row in super().__iter__())
        return packed_rows(rows, self.corpus, self.work)


def batch_rows(corpus: Corpus, work: Work) -> int:
    """Return the rows of a batch of a rank; one that is stratified has rows of every stream."""
    fewest = 1.0 / (float(corpus.weights.min()) * work.processes)
    return CHUNK_ROWS if work.shuffle else max(CHUNK_ROWS, math.ceil(2 * fewest))


def samples_of(corpus: Corpus, work: Work) -> int:
    """Return the samples of an epoch that is longer than the run."""
    words = sum(
        weight * source.words / source.rows
        for source, weight in zip(corpus.sources, corpus.weights, strict=True)
    )
    step = work.context * work.microbatches * work.ranks  # read ahead at the end
    return int(MORE * (work.tokens + 2 * step) / (words * TOKENS_PER_WORD[work.job]))


def prepare(work: Work) -> None:
    torch.set_num_threads(1)
    join(work)
    clean_stale_shared_memory()  # what killed runs left; it waits for all ranks
    os.environ.setdefault("STREAMING_LOG_LEVEL", "ERROR")


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    return torch_loader.load(Packed(corpus, work), work)
