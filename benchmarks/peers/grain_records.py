"""Grain over ArrayRecord files, which its documentation recommends for random access.

Each source is a ``MapDataset`` that repeats, shuffled globally or in order. They are mixed by weight
and sliced for the rank. As many threads as is the default read and encode chunks of rows; worker
processes, if there are any, also pack. Threads that read single rows cost eight times the CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from corpus import Corpus, SourceFiles
from peers.conversion import folders
from peers.kernel import CHUNK_ROWS, Encoder, Microbatch, Packer, SourceRows
from peers.work import Work

FORMAT = "array-record"
FILE = "rows.array_record"
CHUNKS_AHEAD = 8  # of its read buffer: about the 500 rows that are its default


def write_source(folder: Path, source: SourceFiles, number: int, column: str) -> None:
    # One record in a group, as its documentation recommends for random access.
    writer = ArrayRecordWriter(str(folder / FILE), "group_size:1")
    for row in SourceRows(source, column, 0, 1):
        writer.write(row.encode() if isinstance(row, str) else row.astype(np.int32).tobytes())
    writer.close()


class Row(grain.transforms.Map):
    """Decodes a record, and adds the number of its source."""

    def __init__(self, number: int, column: str):
        self.number, self.text = number, column == "text"

    def map(self, record: bytes) -> tuple[int, Any]:
        return self.number, record.decode() if self.text else np.frombuffer(record, np.int32)


class Encode(grain.transforms.Map):
    """Encodes a chunk of rows; the tokenizer is loaded where it is used."""

    def __init__(self, corpus: Corpus, work: Work):
        self.given = corpus, work.job, work.context
        self.encoder: Encoder | None = None

    def map(self, chunk: list[tuple[int, Any]]) -> tuple[list[np.ndarray], tuple[int, ...]]:
        self.encoder = self.encoder or Encoder(*self.given)
        sources, rows = zip(*chunk, strict=True)
        return self.encoder(rows), sources


class Packed(grain.IterDataset):
    """Microbatches of encoded chunks."""

    def __init__(self, chunks: grain.IterDataset, context: int):
        super().__init__(chunks)
        self.chunks, self.context = chunks, context

    def __iter__(self) -> PackedIterator:
        return PackedIterator(iter(self.chunks), self.context)


class PackedIterator(grain.DatasetIterator):
    """Packs chunks by next-fit.

    Its state omits the open microbatch: the benchmark never restores it.
    """

    def __init__(self, parent: grain.DatasetIterator, context: int):
        super().__init__(parent)
        self.chunks, self.packer = parent, Packer(context)
        self.full: list[Microbatch] = []

    def __next__(self) -> Microbatch:
        while not self.full:
            self.full = list(self.packer.add(*next(self.chunks)))[::-1]
        return self.full.pop()

    def get_state(self) -> dict[str, Any]:
        return {"chunks": self.chunks.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self.chunks.set_state(state["chunks"])


def prepare(work: Work) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)


def source_of(folder: Path, number: int, work: Work) -> grain.MapDataset:
    records = grain.sources.ArrayRecordDataSource([str(folder / FILE)])
    rows = grain.MapDataset.source(records).seed(work.seed + number)
    if work.shuffle:
        rows = rows.shuffle()
    return rows.repeat().map(Row(number, work.column))


def microbatches(corpus: Corpus, work: Work) -> Iterator[Any]:
    sources = [
        source_of(folder, number, work)
        for number, folder in enumerate(folders(corpus, FORMAT, work.column))
    ]
    mixed = grain.MapDataset.mix(sources, corpus.weights.tolist())
    chunks = mixed[work.rank :: work.processes].batch(CHUNK_ROWS, batch_fn=list)
    encoded = chunks.map(Encode(corpus, work)).to_iter_dataset(
        grain.ReadOptions(prefetch_buffer_size=CHUNKS_AHEAD)
    )
    packed = Packed(encoded, work.context)
    ahead = max(1, work.microbatches // max(1, work.workers))
    return iter(
        packed.mp_prefetch(
            grain.MultiprocessingOptions(num_workers=work.workers, per_worker_buffer_size=ahead)
        )
    )
