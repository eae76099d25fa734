"""The impure half of a loader: reads windows of chunks, runs transforms, measures what it costs.

One piece of work at a time per reader (the core sees to that), so there are no locks here.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from overlord.errors import OverlordError, SourceError
from overlord.loader.order import SourceOrder
from overlord.messages import Cursor, Evaluate, Evaluated, Found, Read, WindowRead
from overlord.sample import Ragged
from overlord.sources.base import RawSlice
from overlord.sources.index import Index
from overlord.transforms.base import Block, RowIds, Staged


class Stages(Protocol):
    """The transforms of a source, in this process (`Pipeline`) or in another (`TransformWorker`)."""

    def slice_stage(self, table: pa.Table, ids: RowIds) -> Staged: ...
    def row_stage(self, table: pa.Table) -> Block: ...


class Chunked(Protocol):
    """Where raw slices come from (`sources.handles.ChunkReader`)."""

    index: Index

    def slice(self, chunk: int, t: int) -> RawSlice: ...


@dataclass(slots=True, eq=False)
class _Window:
    """An open window: its rows in stream order, readable or not."""

    key: np.ndarray
    file: np.ndarray
    row: np.ndarray
    at: np.ndarray  # row of the table, or -1 - n for the n-th reason
    table: pa.Table
    reasons: list[str]
    dropped: int
    after: Cursor | None
    position: int = 0


@dataclass(slots=True)
class ReaderStats:
    """What reading and transforming a source has cost so far: the P of the paper's (P, T, M)."""

    read_s: float = 0.0
    transform_s: float = 0.0
    rows: int = 0
    samples: int = 0
    windows: int = 0
    raw_bytes: int = 0  # of the window open now


@dataclass(slots=True, eq=False)
class SourceReader:
    """Turns Read and Evaluate commands into outcomes; the payload of a block is returned beside its metadata."""

    order: SourceOrder
    chunks: Chunked
    stages: Stages
    stats: ReaderStats = field(default_factory=ReaderStats)
    _window: _Window | None = None

    def read(self, command: Read) -> WindowRead:
        start = time.perf_counter()
        try:
            window, over = self._open(command)
        except (OverlordError, MemoryError):
            raise
        except Exception as error:  # a reader's surprise must name its source, or nobody finds it
            raise SourceError(self.order.name, f"reading failed: {type(error).__name__}: {error}") from error
        self._window = window
        self.stats.raw_bytes = window.table.nbytes
        self.stats.windows += 1
        self.stats.rows += len(window.key)
        self.stats.read_s += time.perf_counter() - start
        return WindowRead(len(window.key), over, self.stats.raw_bytes)

    def _open(self, command: Read) -> tuple[_Window, tuple[int, ...]]:
        tables, rows, files, ats, reasons, over = [], [], [], [], [], []
        held = dropped = 0
        for chunk in command.chunks:
            raw = self.chunks.slice(chunk, command.window)
            if raw.last:
                over.append(chunk)
            if not len(raw.row):
                continue
            file = int(self.chunks.index.chunks.file[chunk])
            kept, at, staged = self._stage_slice(raw, RowIds(command.epoch, file, raw.row), reasons)
            dropped += staged.dropped
            rows.append(raw.row[kept])
            files.append(np.full(len(kept), file, np.int64))
            ats.append(np.where(at >= 0, at + held, at))
            tables.append(staged.table)
            held += staged.table.num_rows
        if not rows:
            empty = np.zeros(0, np.int64)
            return _Window(empty.astype(np.uint64), empty, empty, empty, pa.table({}), [], dropped, None), tuple(over)
        table = _concat(tables)
        file, row, at = np.concatenate(files), np.concatenate(rows), np.concatenate(ats)
        key = self.order.row_keys(command.epoch, file, row)
        order = np.lexsort((row, file, key))
        if command.after is not None:
            order = order[_not_before(key[order], file[order], row[order], command.after, self.order, command.epoch)]
        return _Window(key[order], file[order], row[order], at[order], table, reasons, dropped, command.after), tuple(over)

    def _stage_slice(self, raw: RawSlice, ids: RowIds, reasons: list[str]) -> tuple[np.ndarray, np.ndarray, Staged]:
        """Run the slice stage. Returns the raw rows that are left (samples to be, or failures), and where each is."""
        bad = dict(raw.bad)
        readable = np.flatnonzero(~np.isin(np.arange(len(raw.row)), list(bad))) if bad else np.arange(len(raw.row))
        staged = self.stages.slice_stage(raw.table, RowIds(ids.epoch, ids.file, raw.row[readable]))
        at = np.full(len(raw.row), np.iinfo(np.int64).min)
        at[readable[staged.index]] = np.arange(len(staged.index))
        for where, reason in [*bad.items(), *((int(readable[j]), why) for j, why in staged.bad)]:
            reasons.append(reason)
            at[where] = -len(reasons)
        kept = np.flatnonzero(at > np.iinfo(np.int64).min)
        return kept, at[kept], staged

    def evaluate(self, command: Evaluate) -> tuple[Evaluated, Ragged]:
        window = self._window
        assert window is not None, "evaluate before read"
        start = time.perf_counter()
        a, b = window.position, min(window.position + command.rows, len(window.key))
        window.position = b
        key, file, row, at = window.key[a:b], window.file[a:b], window.row[a:b], window.at[a:b]
        good = np.flatnonzero(at >= 0)
        block = self.stages.row_stage(_rows(window.table, at[good]))
        index, part, tokens, meta = block.index, block.part, block.tokens, dict(block.meta)
        if window.after is not None and a == 0:
            keep = np.flatnonzero(~_already_drawn(file[good][index], row[good][index], part, window.after))
            if len(keep) < len(index):
                index, part, tokens, meta = index[keep], part[keep], tokens.take(keep), {n: c[keep] for n, c in meta.items()}
        found = self._found(key, file, row, at, good, index, part, meta, block.bad, window)
        window.dropped = 0
        if b == len(window.key):
            self._window = None
            self.stats.raw_bytes = 0
        took = time.perf_counter() - start
        self.stats.samples += len(found)
        self.stats.transform_s += took
        return Evaluated(found, b - a, tokens.nbytes, took), tokens

    def _found(
        self, key: np.ndarray, file: np.ndarray, row: np.ndarray, at: np.ndarray, good: np.ndarray, index: np.ndarray,
        part: np.ndarray, meta: dict[str, Any], failed: list[tuple[int, str]], window: _Window,
    ) -> Found:  # fmt: skip
        why = {int(j): window.reasons[-1 - int(at[j])] for j in np.flatnonzero(at < 0)}
        why.update((int(good[j]), reason) for j, reason in failed)
        bad = np.array(sorted(why), np.int64)
        where = good[index]
        return Found(
            key[where], file[where], row[where], part, meta,
            key[bad], file[bad], row[bad], tuple(why[j] for j in bad.tolist()), window.dropped,
        )  # fmt: skip


def _concat(tables: list[pa.Table]) -> pa.Table:
    """One table in memory of its own. Slices of JSONL may disagree on a column that is null or whole-numbered in some."""
    if len(tables) > 1:
        tables = [pa.concat_tables(tables, promote_options="permissive")]
    return tables[0].combine_chunks()


def _rows(table: pa.Table, at: np.ndarray) -> pa.Table:
    """Chosen rows of a table; a run of consecutive ones (unshuffled sources) is a view."""
    if len(at) and int(at[-1]) - int(at[0]) == len(at) - 1 and bool((at[1:] > at[:-1]).all()):
        return table.slice(int(at[0]), len(at))
    return table.take(pa.array(at))


def _not_before(key: np.ndarray, file: np.ndarray, row: np.ndarray, after: Cursor, order: SourceOrder, epoch: int) -> np.ndarray:
    """Which of the ordered rows stand at or behind the cursor. Its own row stays: pieces of it may be left."""
    limit = order.row_keys(epoch, np.array([after.file]), np.array([after.row]))[0]
    return (key > limit) | ((key == limit) & ((file > after.file) | ((file == after.file) & (row >= after.row))))


def _already_drawn(file: np.ndarray, row: np.ndarray, part: np.ndarray, after: Cursor) -> np.ndarray:
    return (file == after.file) & (row == after.row) & (part <= after.part)
