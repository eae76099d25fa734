"""What a file format must offer, and the shapes that travel from it to the loader.

A *chunk* is what opens alone (``docs/stream.md``). A format lists the chunks of a file without reading its data, and
reads one chunk front to back in slices of raw rows. Nothing here knows of seeds, shuffling or transforms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.sources.files import Files


@dataclass(frozen=True, slots=True)
class File:
    """One file of a source, as the listing saw it. A change of size or time makes cached index entries stale."""

    path: str
    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of a source in listing order, one row each."""

    file: np.ndarray  # int32: ordinal of the file
    start: np.ndarray  # int64: first row (or first byte, for plain JSONL)
    stop: np.ndarray  # int64: one past the last row (or byte); -1: until the end of the file
    unit: np.ndarray  # int32: the format's own number of the chunk inside its file (row group, shard)
    rows: np.ndarray  # int64: raw rows; -1 where only reading tells
    nbytes: np.ndarray  # int64: bytes in memory when read whole, as far as the file says

    def __len__(self) -> int:
        return len(self.file)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How a source is read; every field comes from the job."""

    slice_rows: int = 256
    chunk_bytes: int = 2**23
    max_sample_bytes: int = 2**26
    columns: tuple[str, ...] | None = None  # None: all


@dataclass(slots=True, eq=False)
class RawSlice:
    """Raw rows of one slice, in file order. ``table`` holds the readable ones only, in the same order."""

    row: np.ndarray  # int64: the `row` of every raw row, unreadable ones included
    table: pa.Table  # len(row) - len(bad) rows
    bad: list[tuple[int, str]] = field(default_factory=list)  # (index into row, reason), ascending
    last: bool = False  # no raw row of the chunk comes after this slice


class Format(Protocol):
    """A file format. Instances are stateless; one serves all sources and threads."""

    name: str

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        """The chunks of one file (column `file` left 0). Raises SourceError-worthy OSError or ValueError on a bad file."""
        ...

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        """Column name -> type, where the file says so without reading data; else None."""
        ...

    def read(self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions) -> Iterator[RawSlice]:
        """Chunk i front to back: every slice but the last holds ``slice_rows`` raw rows; at least one slice, the final one with ``last``."""
        ...


def concat_chunks(parts: Sequence[Chunks]) -> Chunks:
    """Chunks of several files as one table; the k-th part gets file ordinal k."""
    names = ("start", "stop", "unit", "rows", "nbytes")
    file = np.repeat(np.arange(len(parts), dtype=np.int32), [len(p) for p in parts])
    return Chunks(file, *(np.concatenate([getattr(p, n) for p in parts]) for n in names))
