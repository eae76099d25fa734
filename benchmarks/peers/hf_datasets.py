"""Hugging Face datasets, from Arrow files in memory maps.

Each source is an iterable dataset with a shard for every worker of every rank, as its documentation
recommends for speed: ``to_iterable_dataset``, ``interleave_datasets``, ``split_dataset_by_node``. A
worker of torch's DataLoader encodes and packs. Arrays go through the pipe, the cheaper way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset

from corpus import Corpus, SourceFiles
from peers import torch_loader
from peers.conversion import folders
from peers.kernel import SHUFFLED_ROWS, Microbatch, packed_rows
from peers.work import Work

FORMAT = "arrow"


def write_source(folder: Path, source: SourceFiles, number: int, column: str) -> None:
    rows = pa.concat_tables(pq.read_table(file, columns=[column]) for file in source.files)
    rows = rows.append_column("source", pa.array(np.full(len(rows), number, np.int32)))
    datasets.disable_progress_bars()
    datasets.Dataset(datasets.table.InMemoryTable(rows)).save_to_disk(str(folder))


class Packed(IterableDataset):
    """A mixed dataset, encoded and packed by the worker that iterates over it."""

    def __init__(self, mixed: Any, corpus: Corpus, work: Work):
        self.mixed, self.corpus, self.work = mixed, corpus, work

    def __iter__(self) -> Iterator[Microbatch]:
        column = self.work.column
        rows = ((row["source"], row[column]) for row in self.mixed)
        return packed_rows(rows, self.corpus, self.work)


def prepare(work: Work) -> None:
    torch.set_num_threads(1)
    datasets.disable_progress_bars()


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    shards = work.processes * max(1, work.workers)
    sources = [
        datasets.load_from_disk(str(folder)).to_iterable_dataset(num_shards=shards).repeat(None)
        for folder in folders(corpus, FORMAT, work.column)
    ]
    mixed = datasets.interleave_datasets(
        sources, probabilities=corpus.weights.tolist(), seed=work.seed
    )
    if work.shuffle:
        mixed = mixed.shuffle(seed=work.seed, buffer_size=SHUFFLED_ROWS)
    mixed = split_dataset_by_node(mixed.with_format("numpy"), work.rank, work.processes)
    return torch_loader.load(Packed(mixed, corpus, work), work)
