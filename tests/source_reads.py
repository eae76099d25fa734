"""Reading of a whole source through the index and the cache of open chunks, for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.sources.base import ReadOptions
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.index import Index, build_index


@dataclass
class Everything:
    index: Index
    rows: list[dict[str, Any]] = field(default_factory=list)  # readable ones
    ids: list[tuple[int, int]] = field(default_factory=list)  # (file, row) of all
    reasons: list[tuple[int, str]] = field(default_factory=list)  # (row, reason) of unreadable ones


def read_all(
    path: Any, format: str | None = None, cache: OpenChunkCache | None = None, **options: Any
) -> Everything:
    """Read every slice of every chunk in order, and check the rules of any slice."""
    wanted = ReadOptions(**options)
    index = build_index("src", path, format, wanted)
    reader, out = ChunkReader(index, wanted, cache or OpenChunkCache()), Everything(index)
    for chunk in range(len(index.chunks)):
        t, last = 0, False
        while not last:
            raw = reader.slice(chunk, t)
            assert raw.row.dtype == np.int64
            assert len(raw.row) == raw.table.num_rows + len(raw.bad)
            assert len(raw.row) == wanted.slice_rows or raw.last
            assert [i for i, _ in raw.bad] == sorted({i for i, _ in raw.bad})
            out.rows += raw.table.to_pylist()
            out.ids += [(reader.file_of(chunk), int(r)) for r in raw.row]
            out.reasons += [(int(raw.row[i]), reason) for i, reason in raw.bad]
            t, last = t + 1, raw.last
    reader.close()
    return out
