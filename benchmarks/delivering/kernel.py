"""The work of an image-text job without a framework.

It reads rows, tokenizes, decodes, resizes, normalises, makes patches and packs. Headers, grids,
decoding and pixels are the package's own functions. So cells differ only in the code around them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import overlord as ov
from delivering.case import Case
from delivering.pictures import Pictures
from overlord.transforms.image_decode import decode
from overlord.transforms.image_header import header
from overlord.transforms.image_items import Prefix, patchify
from peers.kernel import READ_ROWS, Packer

PLACEHOLDER = 3
IMAGES = {"column": "image", "placeholder": PLACEHOLDER}
Microbatch = dict[str, np.ndarray]


class Rows:
    """The rows of one source for one reader, epoch after epoch: caption and image file.

    Rows are in file order. Readers take row groups in turn.
    """

    def __init__(self, file: str, column: str, reader: int, readers: int):
        self.file, self.column, self.reader, self.readers = file, column, reader, readers

    def __iter__(self) -> Iterator[tuple[Any, np.ndarray]]:
        while True:
            with pq.ParquetFile(self.file) as file:
                groups = list(range(file.num_row_groups))[self.reader :: self.readers]
                for batch in file.iter_batches(
                    READ_ROWS, row_groups=groups, columns=[self.column, "image"], use_threads=False
                ):
                    yield from zip(batch.column(0).to_pylist(), views(batch.column(1)), strict=True)


def views(array: pa.Array) -> list[np.ndarray]:
    """Return a binary column as views, without copies."""
    _, starts, held = array.buffers()
    at, data = (
        np.frombuffer(starts, np.int32)[array.offset : array.offset + len(array) + 1].tolist(),
        np.frombuffer(held, np.uint8),
    )
    return [data[a:b] for a, b in itertools.pairwise(at)]


class Captions:
    """Tokenizes many captions at once."""

    def __init__(self, tokenizer: Path | None):
        self.tokenizer: Any = None
        if tokenizer is not None:
            from tokenizers import Tokenizer

            self.tokenizer = Tokenizer.from_file(str(tokenizer))
            self.tokenizer.no_padding()
            self.tokenizer.no_truncation()

    def __call__(self, captions: list[Any]) -> list[np.ndarray]:
        if self.tokenizer is None:
            return [np.asarray(ids, np.int32) for ids in captions]
        return [np.array(e.ids, np.int32) for e in self.tokenizer.encode_batch_fast(captions)]


class Pixels:
    """The pixels of a step in one array that all steps reuse.

    Fresh memory costs more than filling it.
    """

    def __init__(self) -> None:
        self.memory = np.empty(0, np.float32)

    def __call__(self, prefixes: list[Prefix], files: list[np.ndarray]) -> np.ndarray:
        rows, dim = [p.shape[0] for p in prefixes], prefixes[0].shape[1]
        if sum(rows) * dim > len(self.memory):
            self.memory = np.empty(sum(rows) * dim * 5 // 4, np.float32)
        out, at = self.memory[: sum(rows) * dim].reshape(-1, dim), 0
        for prefix, file, n in zip(prefixes, files, rows, strict=True):
            patchify(decode(file, prefix), prefix, out[at : at + n])
            at += n
        return out


def picture_steps(
    case: Case,
    pictures: Pictures,
    tokenizer: Path | None,
    samples: int,
    reader: int = 0,
    readers: int = 1,
) -> Iterator[tuple[list[Microbatch], Microbatch]]:
    """Yield microbatches and encoder part of steps with ``n`` samples, without end."""
    column = "tokens" if tokenizer is None else "text"
    streams = [iter(Rows(file, column, reader, readers)) for file in pictures.files]
    encode, pixels, spec = Captions(tokenizer), Pixels(), ov.Images(**IMAGES)
    rng = np.random.default_rng([case.seed, reader])
    while True:
        drawn = rng.integers(0, len(streams), samples).tolist()
        captions, files = zip(*(next(streams[s]) for s in drawn), strict=True)
        prefixes = [spec.plan(header(file, spec.limits)) for file in files]
        documents = [
            np.concatenate([np.full(p.shape[0] // spec.merge**2, PLACEHOLDER, np.int32), ids])[
                : case.context
            ]
            for p, ids in zip(prefixes, encode(list(captions)), strict=True)
        ]
        packer = Packer(case.context)
        microbatches = [*packer.add(documents, drawn), packer.build()]
        yield (
            microbatches,
            {
                "pixel_values": pixels(prefixes, list(files)),
                "grid_thw": np.array([p.grid for p in prefixes], np.int64),
            },
        )
