"""Execution of one loader's reads and evaluations: windows of chunks, transforms, and their cost.

A ``SourceReader`` executes one command at a time. Its lock protects the identity of the read in
progress, since another thread may give that read up.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from overlord.checks import describe_error
from overlord.content import Content
from overlord.errors import (
    DataStall,
    OverlordError,
    SourceError,
    StorageError,
    TransformError,
    WouldBlock,
)
from overlord.loader.loader import next_read
from overlord.loader.running_code import RunningUserCode
from overlord.loader.samples import SourceOrder
from overlord.loader.windows import Window, already_drawn, by_window, long_documents, sample_block
from overlord.messages.data import (
    BlockReady,
    Evaluate,
    LongDocuments,
    Read,
    SampleBlock,
    WindowReady,
    WindowsReady,
)
from overlord.sample import take_rows
from overlord.sources.base import RawSlice, ReadOptions, rows_within
from overlord.sources.index import Index
from overlord.sources.retry import CLOCK, Clock
from overlord.sources.tables import compact, rows_of
from overlord.sources.timeouts import TIMEOUTS
from overlord.transforms.base import Block, RowIds, StagedRows, failed_block, merge_blocks

READS = 64  # number of recent reads whose durations are kept
# A read takes the rest of a group if it is this many times the rows that are needed, or less: the
# rest is in memory with them, and to read it later costs another round trip.
SPARE = 2.5
READ_BYTES = 2**21  # of ids, after which a read continues with no other window: some 5 ms


class Stages(Protocol):
    """Transforms of a source: in this process (`Pipeline`) or in another (`TransformWorker`)."""

    def slice_stage(self, table: pa.Table, ids: RowIds) -> StagedRows: ...
    def row_stage(self, table: pa.Table) -> Block: ...


def core_s(stages: Stages) -> float:
    """Return the CPU seconds of the calling thread so far, plus those of a ``TransformWorker``."""
    child_s: float = getattr(stages, "core_s", float)()
    return time.thread_time() + child_s


class ChunkSource(Protocol):
    """Reader of raw slices (`sources.chunk_reader.ChunkReader`)."""

    index: Index
    options: ReadOptions

    def slices(self, chunk: int, t: int, n: int) -> RawSlice: ...


@dataclass(slots=True)
class ReaderStats:
    """Cost of reading and transforming a source so far: the P of (P, T, M) in the paper."""

    read_s: float = 0.0
    # Seconds of transforms of whole slices, which run when a window is opened and are not reading.
    staged_s: float = 0.0
    transform_s: float = 0.0  # seconds of transforms of rows, on demand
    # CPU seconds of the three durations above. The rest is waiting for other threads and storage.
    read_busy_s: float = 0.0
    staged_busy_s: float = 0.0
    transform_busy_s: float = 0.0
    rows: int = 0  # rows of all windows that were opened
    evaluated: int = 0  # rows that were turned into samples
    samples: int = 0
    tokens: int = 0
    windows: int = 0
    raw_bytes: int = 0  # bytes of the open window
    # Seconds of the most recent reads.
    reads: deque[float] = field(default_factory=lambda: deque(maxlen=READS))
    image_bytes_in: int = 0  # bytes of image files so far
    image_bytes_out: int = 0  # bytes of their pixels, decoded here or later

    @property
    def evaluated_fraction(self) -> float:
        """Fraction of the read rows that were evaluated.

        Rows that are not evaluated yet do not count as a cost of the samples. With many loaders and
        a small share of the mixture they would be most of the cost.
        """
        return self.evaluated / self.rows if self.rows else 0.0

    @property
    def work(self) -> tuple[float, float]:
        """Cost of the samples so far: CPU seconds and wall-clock seconds."""
        wall_s, cpu_s = self.read_s + self.staged_s, self.read_busy_s + self.staged_busy_s
        return (
            cpu_s * self.evaluated_fraction + self.transform_busy_s,
            wall_s * self.evaluated_fraction + self.transform_s,
        )

    @property
    def sample_seconds(self) -> tuple[float, float]:
        """Wall-clock seconds of the samples so far: reading and transforming."""
        return (
            self.read_s * self.evaluated_fraction,
            self.staged_s * self.evaluated_fraction + self.transform_s,
        )

    @property
    def latency(self) -> tuple[float, float]:
        """Median and 95th percentile of the seconds of recent reads; zeros before the first."""
        if not self.reads:
            return 0.0, 0.0
        reads = sorted(self.reads)
        return reads[len(reads) // 2], reads[-1 - len(reads) // 20]

    @property
    def images(self) -> dict[str, int] | None:
        """Bytes of image files and of their pixels; None if the source has no images.

        Their ratio decides where images are decoded.
        """
        return (
            {"bytes_in": self.image_bytes_in, "bytes_out": self.image_bytes_out}
            if self.image_bytes_out
            else None
        )


@dataclass(slots=True, eq=False)
class SourceReader:
    """Executor of reads, which open a window, and of evaluations, which return a block of it."""

    order: SourceOrder
    chunks: ChunkSource
    stages: Stages
    stats: ReaderStats = field(default_factory=ReaderStats)
    clock: Clock = CLOCK
    _code: RunningUserCode | None = None
    _window: Window | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # Identity of the read in progress; the result of a read with another identity is dropped.
    _read_id: object = None
    _singly: bool = False  # windows are read one by one: some have more than rows of ids

    # Status queries of other threads while a read is in progress.

    @property
    def waits(self) -> SourceReader | None:
        """This reader if its reads may wait for storage or user code, else None."""
        return self if getattr(self.chunks, "may_wait", False) or self._has_user_code else None

    @property
    def evaluation_waits(self) -> SourceReader | None:
        """This reader if its evaluations may wait for another process, else None."""
        return self if getattr(self.stages, "separate_process", False) else None

    @property
    def _has_user_code(self) -> bool:
        stages = getattr(self.stages, "has_slice_stage", False) or getattr(
            self.stages, "separate_process", False
        )
        return bool(stages or getattr(self.chunks, "user_code", ""))

    @property
    def many(self) -> bool:
        """Whether reads mostly wait for responses of an object store, not for a CPU core."""
        return bool(getattr(self.chunks, "is_remote", False))

    @property
    def activity(self) -> str:
        """Description of a slow read or of slow user code in progress; empty if there is none."""
        text: str = getattr(self.chunks, "activity", str)()
        if (
            text
            or (code := self._code) is None
            or (seconds := self.clock.now() - code.began) < TIMEOUTS.slow_s
        ):
            return text
        return code.describe(self.chunks if code.what else self.stages, seconds)

    @contextmanager
    def _running(self, row: np.ndarray, file: int = -1, what: str = "") -> Iterator[None]:
        path = self.chunks.index.files[file].path if file >= 0 else ""
        self._code = code = RunningUserCode(
            self.clock.now(), threading.get_ident(), what, path, row, self.chunks.index.row_unit
        )
        try:
            yield
        except DataStall as stall:  # from a transform process, which has no names of files
            raise DataStall(f"{stall.waiting_for}{code.location()}", stall.seconds) from None
        finally:
            self._code = None

    @property
    def quick(self) -> bool:
        """Whether no read can hang: all opened files are on local disks, and there is no user code.

        User code may hang on any row, however fast it was before.
        """
        return bool(getattr(self.chunks, "never_hangs", False)) and not self._has_user_code

    def no_wait(self) -> AbstractContextManager[None]:
        """Return a context in which a failing read raises ``WouldBlock`` instead of retrying."""
        manager: AbstractContextManager[None] = getattr(self.chunks, "no_wait", nullcontext)()
        return manager

    def overdue(self) -> Exception | None:
        """Return the error of the read in progress if it hangs beyond its deadline, else None.

        The read is then given up: its result will be dropped.
        """
        error: Exception | None = getattr(self.chunks, "stalled", lambda: None)()
        if error is not None:
            with self._lock:
                self._read_id = None
        return error

    def read(self, command: Read) -> WindowReady:
        """Open the window of a command."""
        window, over, read_id = self._timed_open(command, 1)
        return self._hold(window, over, read_id)

    def read_on(self, command: Read) -> WindowReady | tuple[WindowsReady, list[Content]]:
        """Open the window of a command; evaluate it and read on if evaluation costs little.

        Rows of ids cost little. The result then has all windows that were read, and their payload.
        """
        found, contents = list[tuple[WindowReady, BlockReady]](), list[Content]()
        lacking, room, groups = command.ahead
        coming, limit = deque(groups), room - READ_BYTES
        while True:
            n = self._windows_at_once(command, lacking, room)
            try:
                window, over, read_id = self._timed_open(command, n)
            except Exception:
                if not found:
                    raise
                break  # the next read fails at this window, or succeeds
            block = self._plain_block(window)
            if block is None:
                if found:
                    break
                if n > 1 and len(window.key) > (rows := self.chunks.options.slice_rows):
                    self._singly, window, over = True, window.first_rows(rows), ()
                return self._hold(window, over, read_id)
            with self._lock:
                self._refuse_given_up(read_id)
            ready, content = self._evaluated(window, block, over, n)
            found += ready
            contents.append(content)
            lacking -= len(content)
            room -= sum(block.nbytes for _, block in ready)
            following = next_read(command, over, len(ready), coming)
            if following is None or room <= max(0, limit):
                break
            if lacking <= 0 and not self._is_spare(following, len(window.key), room):
                break
            command = following
        return WindowsReady(tuple(found)), contents

    def _windows_at_once(self, command: Read, lacking: int, room: int) -> int:
        """Return the number of windows to read as one: several if their rows are consecutive."""
        if self._singly or not getattr(self.stages, "only_ids", False):
            return 1
        if self.order.shuffle or len(command.chunks) != 1 or command.after is not None:
            return 1
        if (partial := self.order.partial) is not None and command.epoch == partial.epoch:
            return 1
        step = self.chunks.options.slice_rows
        left, nbytes = self._left(command, command.window)
        most = room * left // max(1, nbytes)
        rows = min(-(-max(lacking, 1) // step) * step, most)
        return max(1, -(-left // step) if left <= min(rows * SPARE, most) else rows // step)

    def _is_spare(self, following: Read, rows: int, room: int) -> bool:
        """Return whether to read the rest of a group after ``rows`` rows, although none lacks."""
        if not following.window:
            return False
        left, nbytes = self._left(following, following.window)
        return 0 < left <= rows * (SPARE - 1) and nbytes <= room

    def _left(self, command: Read, window: int) -> tuple[int, int]:
        """Return the rows and bytes of a command's chunks from a window on, as far as known."""
        chunks, rows, nbytes = self.chunks.index.chunks, 0, 0
        for chunk in command.chunks:
            if (of_chunk := chunks.rows.item(chunk)) > 0:
                left = max(0, of_chunk - window * self.chunks.options.slice_rows)
                rows, nbytes = rows + left, nbytes + chunks.nbytes.item(chunk) * left // of_chunk
        return rows, nbytes

    def _timed_open(self, command: Read, n: int) -> tuple[Window, tuple[int, ...], object]:
        """Open n windows of a command as one, and add their cost to the statistics.

        Return the window, the exhausted chunks, and the identity of the read.
        """
        start, busy = time.perf_counter(), core_s(self.stages)
        with self._lock:
            read_id = self._read_id = object()
        staged = np.zeros(2)
        try:
            window, over = self._open(command, staged, n)
        except (OverlordError, MemoryError, WouldBlock):
            raise
        except Exception as error:  # an unexpected error must name its source
            raise SourceError(
                self.order.name, f"could not be read: {describe_error(error)}"
            ) from error
        stats, took = self.stats, time.perf_counter() - start
        stats.windows += 1
        stats.rows += len(window.key)
        stats.reads.append(took)
        stats.read_s += took - float(staged[0])
        stats.read_busy_s += core_s(self.stages) - busy - float(staged[1])
        stats.staged_s += float(staged[0])
        stats.staged_busy_s += float(staged[1])
        return window, over, read_id

    def _refuse_given_up(self, read_id: object) -> None:
        """Raise ``StorageError`` if a read was given up meanwhile. Call with the lock held."""
        if self._read_id is not read_id:
            raise StorageError(
                self.order.name,
                "expected a read within its deadline, got the result of a read that was given up; "
                "check the disk or the mount",
            )

    def _hold(self, window: Window, over: tuple[int, ...], read_id: object) -> WindowReady:
        """Keep an open window for evaluations, unless its read was given up meanwhile."""
        with self._lock:
            self._refuse_given_up(read_id)
            self._window = window
        self.stats.raw_bytes = sum(t.nbytes for t in window.tables)
        rows = len(window.key)
        return WindowReady(rows, over, self.stats.raw_bytes, 0 if rows else window.dropped)

    def _open(self, command: Read, spent: np.ndarray, n: int = 1) -> tuple[Window, tuple[int, ...]]:
        """Read n windows as one and run the slice stage; return the window, and exhausted chunks.

        The cost of the slice stage is added to ``spent`` (wall-clock, CPU seconds).
        """
        tables: list[pa.Table] = []
        rows, files, ats, reasons, over = [], [], [], list[str](), list[int]()
        held = dropped = 0
        kept: np.ndarray | slice
        for chunk in command.chunks:
            number = int(self.chunks.index.chunks.file[chunk])
            raw = self._within_epoch(self._slice(chunk, command.window, n), command, chunk)
            if raw.last:
                over.append(chunk)
            if not len(raw.row):
                continue
            if self._stage_is_plain(raw):
                kept, where, table = slice(None), np.arange(held, held + len(raw.row)), raw.table
            else:
                start = time.perf_counter(), core_s(self.stages)
                with self._running(raw.row, number):
                    kept, where, staged = self._stage_slice(
                        raw, RowIds(command.epoch, number, raw.row), reasons
                    )
                spent += time.perf_counter() - start[0], core_s(self.stages) - start[1]
                dropped, table = dropped + staged.dropped, staged.table
                where = np.where(where >= 0, where + held, where) if held else where
            rows.append(raw.row[kept])
            files.append(np.full(len(rows[-1]), number, np.int64))
            ats.append(where)
            tables.append(table)
            held += table.num_rows
        if not rows:
            empty = np.zeros(0, np.int64)
            keys = empty.astype(np.uint64)
            return Window(keys, empty, empty, empty, [], [], dropped, None), tuple(over)
        key, file, row, at = self.order.in_stream_order(
            command.epoch, command.after, files, rows, ats
        )
        joined = self._join_tables(tables)
        window = Window(key, file, row, at, joined, reasons, dropped, command.after)
        if len(joined) == 1 and (blocks_of := getattr(self.stages, "blocks_of", None)) is not None:
            window.block_of = blocks_of(joined[0])
        return window, tuple(over)

    def _stage_is_plain(self, raw: RawSlice) -> bool:
        """Return whether the slice stage returns a slice unchanged."""
        passes = getattr(self.stages, "passes", None)
        return passes is not None and not raw.bad and passes(raw.table)

    def _plain_block(self, window: Window) -> Block | None:
        """Return the block of a whole window if it is cheap: its samples are rows of ids.

        Return None if rows failed, or if samples were drawn before.
        """
        if window.block_of is None or window.reasons or not len(window.key):
            return None
        if window.after is not None:
            return None
        start, busy = time.perf_counter(), core_s(self.stages)
        block = window.block_of(window.at)
        if block.bad:
            return None
        self.stats.transform_s += time.perf_counter() - start
        self.stats.transform_busy_s += core_s(self.stages) - busy
        return block

    def _evaluated(
        self, window: Window, block: Block, over: tuple[int, ...], n: int
    ) -> tuple[list[tuple[WindowReady, BlockReady]], Content]:
        """Return the events of n windows that were read as one, and their payload."""
        start, index, part = time.perf_counter(), block.index, block.part
        n_rows, content = len(window.key), Content(block.tokens)
        key, file, row = window.key, window.file, window.row
        long = None
        if len(block.long):
            at = block.long
            long = LongDocuments(key[at], file[at], row[at], block.lost)
        if len(index) < n_rows or part.any():  # not one sample of each row
            key, file, row = key[index], file[index], row[index]
        none, no_rows = key[:0], row[:0]
        found = SampleBlock(key, file, row, part, block.meta, none, no_rows, no_rows, (), 0, long)
        nbytes = content.nbytes
        stats = self.stats
        stats.evaluated += n_rows
        stats.samples += len(index)
        stats.tokens += nbytes // max(1, content.tokens.itemsize)
        took = time.perf_counter() - start
        stats.transform_s += took
        if n == 1:
            ready = BlockReady(found, n_rows, nbytes, took)
            return [(WindowReady(n_rows, over), ready)], content
        stats.windows += -(-n_rows // self.chunks.options.slice_rows) - 1
        return by_window(found, block, n_rows, self.chunks.options.slice_rows, over), content

    def _slice(self, chunk: int, t: int, n: int) -> RawSlice:
        """Return slices t to ``t + n - 1`` of a chunk as one, or slice t alone.

        A dataset's code is reported as running meanwhile.
        """
        chunks: Any = self.chunks
        if not (code := getattr(chunks, "user_code", "")):
            return self.chunks.slices(chunk, t, n)
        file = int(chunks.index.chunks.file[chunk])
        with self._running(chunks.rows_of_slice(chunk, t), file, what=code):
            return self.chunks.slices(chunk, t, 1)

    def _within_epoch(self, raw: RawSlice, command: Read, chunk: int) -> RawSlice:
        """Return a slice without the rows that a partial epoch leaves out."""
        partial = self.order.partial
        if partial is None or command.epoch != partial.epoch:
            return raw
        file = int(self.chunks.index.chunks.file[chunk])
        key = self.order.row_keys(command.epoch, np.full(len(raw.row), file), raw.row)
        group, window = command.group, command.window
        kept = partial.kept(group, window, chunk, (file, raw.row, key))
        over = raw.last or partial.is_last(group, window)
        return replace(raw, last=over) if kept.all() else rows_within(raw, kept, over)

    def _join_tables(self, tables: list[pa.Table]) -> list[pa.Table]:
        """Return the tables of the slices joined into one.

        A slice may be a view, which must not keep much of its row group alive. Slices of JSONL may
        differ in the type of a column: these stay separate tables.
        """
        if len(tables) > 1:
            try:
                return [pa.concat_tables(tables, promote_options="permissive").combine_chunks()]
            except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
                return [compact(table) for table in tables]
        table = tables[0]
        # A view of half of a row group may keep the other half alive. A copy would cost more than
        # that memory, and the other half is read soon.
        if table.get_total_buffer_size() > 2.5 * table.nbytes + 4096:
            return [compact(table)]
        if all(column.num_chunks == 1 for column in table.itercolumns()):
            return [table]
        return [table.combine_chunks()]

    def _stage_slice(
        self, raw: RawSlice, ids: RowIds, reasons: list[str]
    ) -> tuple[np.ndarray, np.ndarray, StagedRows]:
        """Run the slice stage on one slice; add the reasons of failed rows to ``reasons``.

        Return the raw rows that no filter dropped, the table position of each, and the staged rows.
        A failed row has the position -1 - n, where n is the index of its reason.
        """
        bad = dict(raw.bad)
        if not bad:
            staged = self.stages.slice_stage(raw.table, ids)
            readable = np.arange(len(raw.row))
            if not staged.bad and len(staged.index) == len(readable):  # the usual case
                return readable, readable, staged
        else:
            readable = np.flatnonzero(~np.isin(np.arange(len(raw.row)), list(bad)))
            staged = self.stages.slice_stage(
                raw.table, RowIds(ids.epoch, ids.file, raw.row[readable])
            )
        at = np.full(len(raw.row), np.iinfo(np.int64).min)
        at[readable[staged.index]] = np.arange(len(staged.index))
        for where, reason in [*bad.items(), *((int(readable[j]), why) for j, why in staged.bad)]:
            reasons.append(reason)
            at[where] = -len(reasons)
        kept = np.flatnonzero(at > np.iinfo(np.int64).min)
        return kept, at[kept], staged

    def evaluate(self, command: Evaluate) -> tuple[BlockReady, Content]:
        window = self._window
        assert window is not None, "expected an open window, got evaluate() before read()"
        start, busy = time.perf_counter(), core_s(self.stages)
        a, b = window.position, min(window.position + command.rows, len(window.key))
        window.position = b
        key, file, row, at = window.key[a:b], window.file[a:b], window.row[a:b], window.at[a:b]
        good = np.flatnonzero(at >= 0)
        with self._running(row):
            block = self._block(window, at[good])
        index, part = block.index, block.part
        content, meta = Content(block.tokens, block.items, block.weights), dict(block.meta)
        if window.after is not None and a == 0:
            keep = np.flatnonzero(
                ~already_drawn(file[good][index], row[good][index], part, window.after)
            )
            if len(keep) < len(index):
                index, part, content, meta = (
                    index[keep],
                    part[keep],
                    content.take(keep),
                    {n: take_rows(c, keep) for n, c in meta.items()},
                )
        samples = sample_block(window, key, file, row, at, good, index, part, meta, block.bad)
        if len(block.long):
            samples = replace(
                samples,
                long=long_documents(
                    key, file, row, good[block.long], block.lost, window.after if a == 0 else None
                ),
            )
        window.dropped = 0
        if b == len(window.key):
            self._window = None
            self.stats.raw_bytes = 0
        took = time.perf_counter() - start
        self.stats.evaluated += b - a
        self.stats.samples += len(samples)
        self.stats.tokens += int(content.tokens.offsets[-1] - content.tokens.offsets[0])
        self.stats.image_bytes_in += block.image_bytes_in
        self.stats.image_bytes_out += block.image_bytes_out
        self.stats.transform_s += took
        self.stats.transform_busy_s += core_s(self.stages) - busy
        return BlockReady(samples, b - a, content.nbytes, took), content

    def _block(self, window: Window, at: np.ndarray) -> Block:
        """Turn the rows ``at`` of the window's tables into samples, without a copy of ids."""
        if window.block_of is None or not len(at):
            return self._row_stage(window.tables, at)
        return window.block_of(at)

    def _row_stage(self, tables: list[pa.Table], at: np.ndarray) -> Block:
        """Turn the rows ``at`` of the joined tables into samples.

        If the transforms reject a table as a whole, its rows fail, but no others. The outcome of a
        row must not depend on the rows that a loader reads with it.
        """
        blocks, first = [], 0
        for table in tables:
            mine = (
                np.flatnonzero((at >= first) & (at < first + table.num_rows))
                if len(tables) > 1
                else np.arange(len(at))
            )
            try:
                block = self.stages.row_stage(rows_of(table, at[mine] - first))
            except TransformError as error:
                block = failed_block(len(mine), str(error))
            blocks.append((mine, block))
            first += table.num_rows
        return blocks[0][1] if len(blocks) == 1 else merge_blocks(blocks)
