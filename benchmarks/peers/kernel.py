"""The work itself: read a row, encode it, pack microbatches.

The bare loop and every peer call these functions. So cells differ only in the framework around
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice, pairwise
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from corpus import FILES, GROUPS_PER_FILE, Corpus, SourceFiles
from peers.contract import NO_LABEL
from peers.work import Work

READ_ROWS = 64  # rows a source's iterator decodes at a time
CHUNK_ROWS = 64  # rows of the mixed stream that are encoded together
SHUFFLED_ROWS = 1000  # of the mixed stream, in one buffer: the leanest shuffle that is in use

Microbatch = dict[str, np.ndarray]


class SourceRows:
    """The rows of one source, epoch after epoch, in file order; files are opened at first use.

    It reads every n-th row group of the source, counted over all files. So n readers share an epoch
    without overlap, and none decodes a row that it does not use. Readers beyond the number of row
    groups read all of them, and begin at one of them. To share groups, each would have to decode
    rows of the others.
    """

    def __init__(
        self,
        source: SourceFiles,
        column: str,
        reader: int,
        readers: int,
        order: np.random.Generator | None = None,
    ):
        groups = [(file, group) for file in range(FILES) for group in range(GROUPS_PER_FILE)]
        first = reader % len(groups)
        mine = (
            groups[reader::readers] if readers <= len(groups) else groups[first:] + groups[:first]
        )
        self.source, self.column, self.order = source, column, order
        self.parts = [
            (file, [group for _, group in part])
            for file, part in groupby(mine, key=lambda at: at[0])
        ]

    def epoch(self) -> Iterator[list[Any]]:
        """Yield the rows of one pass, up to READ_ROWS at a time: strings, or views of ids."""
        for f, groups in self._parts():
            with pq.ParquetFile(self.source.files[f]) as file:
                for batch in file.iter_batches(
                    READ_ROWS, row_groups=groups, columns=[self.column], use_threads=False
                ):
                    yield rows_of(batch.column(0))

    def _parts(self) -> list[tuple[int, list[int]]]:
        """Return the row groups of a pass: in file order, or one by one in a new order."""
        if self.order is None:
            return self.parts
        single = [(file, [group]) for file, groups in self.parts for group in groups]
        return [single[i] for i in self.order.permutation(len(single))]

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows of one pass."""
        for rows in self.epoch():
            yield from rows

    def forever(self) -> Iterator[Any]:
        while True:
            yield from self


def rows_of(column: Any) -> list[Any]:
    """Return a column as Python strings, or as numpy views of Arrow's memory."""
    if not hasattr(column, "flatten"):
        return column.to_pylist()
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()  # not flatten(): offsets count from the start of values
    bounds = offsets.tolist()
    return [values[a:b] for a, b in pairwise(bounds)]


class RowBuffer:
    """A shuffle buffer over the mixed stream: each new row replaces a random row, which leaves."""

    def __init__(self, rows: int, rng: np.random.Generator):
        self.size, self.rng = rows, rng
        self.held: list[tuple[int, Any]] = []

    def exchange(self, sources: Sequence[int], rows: Sequence[Any]) -> tuple[list[int], list[Any]]:
        """Add rows; return as many random ones, or none while the buffer fills."""
        left = []
        for source, row in zip(sources, rows, strict=True):
            kept = (
                row if isinstance(row, str) else row.copy()
            )  # a view would hold the decoded batch
            if len(self.held) < self.size:
                self.held.append((source, kept))
                continue
            at = int(self.rng.integers(self.size))
            left.append(self.held[at])
            self.held[at] = (source, kept)
        return [source for source, _ in left], [row for _, row in left]


class Encoder:
    """Encodes rows as token ids, truncated at the context."""

    def __init__(self, corpus: Corpus, job: str, context: int):
        self.context = context
        self.tokenizer: Any = None
        if job != "null":
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(corpus.tokenizer))
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def __call__(self, rows: Sequence[Any]) -> list[np.ndarray]:
        context = self.context
        if self.tokenizer is None:
            return [row[:context] for row in rows]
        return [np.array(e.ids[:context], np.int32) for e in self.tokenizer.encode_batch_fast(rows)]


class Packer:
    """Packs by next-fit: documents go into the open microbatch until one does not fit."""

    def __init__(self, context: int):
        self.context = context
        self.documents: list[np.ndarray] = []
        self.sources: list[int] = []
        self.filled = 0
        self.ramp = np.arange(context, dtype=np.int64)

    def add(self, documents: Iterable[np.ndarray], sources: Iterable[int]) -> Iterator[Microbatch]:
        """Add documents; yield every microbatch that becomes full."""
        for document, source in zip(documents, sources, strict=True):
            size = len(document)
            if self.filled + size > self.context:
                yield self.build()
                self.documents, self.sources, self.filled = [], [], 0
            self.documents.append(document)
            self.sources.append(source)
            self.filled += size

    def build(self) -> Microbatch:
        return arrays_of(self.documents, self.sources, self.ramp)


def arrays_of(
    documents: Sequence[np.ndarray], sources: Sequence[int], ramp: np.ndarray
) -> Microbatch:
    """Return the arrays of the batch contract.

    Without padding the two cumulative lengths are equal and may be one array.
    """
    lengths = np.fromiter(map(len, documents), np.int32, len(documents))
    bounds = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=bounds[1:])
    filled = int(bounds[-1])
    tokens = np.empty(filled, np.int64)
    np.concatenate(documents, out=tokens, casting="same_kind")
    last = bounds[1:] - 1
    labels = np.empty(filled, np.int64)
    labels[:-1] = tokens[1:]
    labels[last] = NO_LABEL
    loss_mask = np.ones(filled, np.float32)
    loss_mask[last] = 0.0
    return {
        "tokens": tokens,
        "position_ids": ramp[:filled] - np.repeat(bounds[:-1], lengths),
        "labels": labels,
        "loss_mask": loss_mask,
        "cu_seqlens": bounds,
        "cu_seqlens_padded": bounds,
        "max_seqlen": lengths.max(),
        "source_ids": np.array(sources, np.int32),
    }


def next_fit(sizes: Iterable[int], context: int) -> list[int]:
    """Return the first document of each microbatch that next-fit makes of a list of sizes."""
    firsts, filled = [0], 0
    for i, size in enumerate(sizes):
        if filled + size > context:
            firsts.append(i)
            filled = 0
        filled += size
    return firsts


def packed_rows(
    rows: Iterable[tuple[int, Any]], corpus: Corpus, work: Work
) -> Iterator[Microbatch]:
    """Encode and pack a mixed stream of rows, each with the number of its source."""
    encode, packer = Encoder(corpus, work.job, work.context), Packer(work.context)
    stream = iter(rows)
    while chunk := list(islice(stream, CHUNK_ROWS)):
        sources, encoded = zip(*chunk, strict=True)
        yield from packer.add(encode(encoded), sources)


def mixed_microbatches(corpus: Corpus, work: Work) -> Iterator[Microbatch]:
    """Yield the microbatches of the whole job without a framework, without end.

    It draws sources by weight, takes a row of each, encodes and packs.
    """
    n = len(corpus.sources)
    rng = np.random.default_rng([work.seed, work.rank])
    order = rng if work.shuffle else None
    streams = [
        SourceRows(source, work.column, work.rank, work.processes, order).forever()
        for source in corpus.sources
    ]
    encode, packer = Encoder(corpus, work.job, work.context), Packer(work.context)
    cumulative = np.cumsum(corpus.weights)
    buffer = RowBuffer(SHUFFLED_ROWS, rng) if work.shuffle else None
    while True:
        drawn = np.searchsorted(cumulative, rng.random(CHUNK_ROWS)).clip(max=n - 1).tolist()
        rows = [next(streams[source]) for source in drawn]
        if buffer is not None:
            drawn, rows = buffer.exchange(drawn, rows)
        yield from packer.add(encode(rows), drawn)
