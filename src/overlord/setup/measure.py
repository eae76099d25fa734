"""Measuring a source: its real reader and its real transforms on a few slices, within bounds on
rows and seconds.

Seconds are by the clock, and beside them what cores were busy with of them, here and in a worker
process: cores are what is divided among sources, and the rest is what storage, or a transform that
asks somebody else, lets one wait for.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.hashing import digest
from overlord.loader.reader import SourceReader, Stages, core_s
from overlord.messages.loader import Evaluate, Read
from overlord.process.memory import pss_bytes
from overlord.sample import Content
from overlord.scaling.profile import SourceProfile
from overlord.setup.prepared_job import ReaderSpec
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.parquet import SMALL_ROW_GROUP, forget_footers
from overlord.transforms.base import Block, RowIds, StagedRows
from overlord.transforms.transform_process import TransformWorker

BLOCK = 64  # rows that are transformed between two looks at the clock
TRANSFERS = 4  # times that samples are handed over, to be seen above the clock's grain

Clock = Callable[[], np.ndarray]  # seconds by the clock, and of cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How much of a source is looked at. ``memory``: whether it is measured too, which takes the
    process to itself.
    """

    rows: int = 2048
    seconds: float = 2.0
    memory: bool = True


def fingerprint_of(kit: ReaderSpec) -> str:
    """Return a digest of all that costs depend on: files, transforms, the size of a slice, the
    context and ``on_long``.
    """
    pipeline = kit.pipeline
    return digest(
        kit.index.fingerprint,
        pipeline.fingerprint,
        str(kit.read.slice_rows),
        str(pipeline.context),
        pipeline.on_long,
    )


def machine() -> str:
    """What seconds were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        model = next(
            (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), ""
        )
    except OSError:
        model = ""
    return f"{model or platform.machine()}, {os.cpu_count() or 1} cores"


@dataclass(slots=True)
class _Timed:
    """Stages that say how long user code took, which runs while a window is opened and is no
    reading, and how many rows it dropped.
    """

    stages: Stages
    clock: Clock
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(2))
    dropped: int = 0

    def slice_stage(self, table: pa.Table, ids: RowIds) -> StagedRows:
        start = self.clock()
        try:
            staged = self.stages.slice_stage(table, ids)
            self.dropped += staged.dropped
            return staged
        finally:
            self.seconds = self.seconds + self.clock() - start

    def row_stage(self, table: pa.Table) -> Block:
        return self.stages.row_stage(table)


def measure(
    kit: ReaderSpec, bounds: Bounds, over: Callable[[], bool] = lambda: False
) -> SourceProfile:
    """The profile of one source; without samples where none came within the bounds. ``over``:
    whether to stop before they are reached. What is wrong with the source is raised as reading it
    would.
    """
    cache = OpenChunkCache(max_open=64)
    worker = TransformWorker(kit.pipeline) if kit.processes else None
    try:
        slice_rows = max(1, min(kit.read.slice_rows, bounds.rows))
        chunks = ChunkReader(kit.index, replace(kit.read, slice_rows=slice_rows), cache)
        probe = _Probe(kit, chunks, worker or kit.pipeline, bounds, over)
        probe.run()
        return probe.profile(_file_bytes(kit, bounds) if bounds.memory and probe.samples else 0)
    finally:
        cache.close()
        if worker is not None:
            worker.close()


class _Probe:
    """Windows of single chunks in stream order, until the bounds are reached, and what they
    took.
    """

    def __init__(
        self,
        kit: ReaderSpec,
        chunks: ChunkReader,
        stages: Stages,
        bounds: Bounds,
        over: Callable[[], bool],
    ):
        self._kit, self._bounds, self._over = kit, bounds, over
        self._clock: Clock = lambda: np.array([time.perf_counter(), core_s(stages)])
        self._stages = _Timed(stages, self._clock)
        self._reader = SourceReader(kit.order, chunks, self._stages)
        self._began = time.perf_counter()
        self._pieces: list[Content] = []
        self.samples = self._tokens = self._evaluated = self._raw_bytes = 0
        self._rows = self._covered = 0  # raw rows that were read, and that what was read pays for
        self._read_s = self._transform_s = np.zeros(2)

    def run(self) -> None:
        for chunk in self._kit.order.chunk_order(0).tolist():
            t, last = 0, False
            while not last and self._rows < self._bounds.rows and not self._late():
                last = self._window(chunk, t)
                t += 1
            if not last:
                return

    def _late(self) -> bool:
        return time.perf_counter() - self._began >= self._bounds.seconds or self._over()

    def _window(self, chunk: int, t: int) -> bool:
        """One slice of a chunk, read and transformed. Whether it was the last one."""
        start, before, dropped = self._clock(), self._stages.seconds, self._stages.dropped
        window = self._reader.read(Read(0, 0, 0, t, (chunk,)))
        staged = self._stages.seconds - before
        self._read_s = self._read_s + self._clock() - start - staged
        self._transform_s = self._transform_s + staged
        rows = window.rows + self._stages.dropped - dropped
        self._rows += rows
        self._covered += (
            rows
            if not self._whole(chunk)
            else int(self._kit.index.chunks.rows[chunk])
            if not t
            else 0
        )
        self._raw_bytes += window.nbytes
        left = min(window.rows, self._bounds.rows - self._evaluated)
        while left > 0 and not self._late():
            left -= self._evaluate(left)
        return chunk in window.over

    def _whole(self, chunk: int) -> bool:
        """Whether the first slice of a chunk pays for all of them: small row groups are decoded in
        one go.
        """
        return (
            self._kit.index.format == "parquet"
            and 0 <= int(self._kit.index.chunks.nbytes[chunk]) <= SMALL_ROW_GROUP
        )

    def _evaluate(self, most: int) -> int:
        start = self._clock()
        evaluated, content = self._reader.evaluate(Evaluate(0, min(BLOCK, most)))
        self._transform_s = self._transform_s + self._clock() - start
        self._evaluated += evaluated.rows
        self.samples += len(content)
        self._tokens += int(content.tokens.offsets[-1] - content.tokens.offsets[0])
        self._pieces.append(content)
        return evaluated.rows

    def profile(self, file_bytes: int) -> SourceProfile:
        kit, n, fingerprint = self._kit, self.samples, fingerprint_of(self._kit)
        if not n:
            return SourceProfile(
                name=kit.index.source,
                fingerprint=fingerprint,
                samples=0,
                read_s=0.0,
                transform_s=0.0,
                tokens=0.0,
            )
        window = min(kit.order.group_size, len(kit.index.chunks)) * kit.read.slice_rows
        window = min(window, kit.index.rows) if kit.index.rows is not None else window
        row_bytes = (
            self._raw_bytes / self._rows + sum(p.nbytes for p in self._pieces) / self._evaluated
        )
        read = np.maximum(0.0, self._read_s) / max(1, self._covered) * self._rows / n * self._part
        transform = np.maximum(0.0, self._transform_s) / n
        return SourceProfile(
            name=kit.index.source,
            fingerprint=fingerprint,
            samples=n,
            tokens=self._tokens / n,
            read_s=float(read[0]),
            transform_s=float(transform[0]),
            core_s=float(read[1] + transform[1]),
            transfer_s=_transfer_s(self._pieces),
            buffer_bytes=round(row_bytes * window),
            file_bytes=file_bytes,
        )

    @property
    def _part(self) -> float:
        """Of the rows that were read, those that were looked at: time may be up in the middle of a
        window.
        """
        kept = self._rows - self._stages.dropped
        return self._evaluated / kept if kept else 1.0


def _transfer_s(pieces: list[Content]) -> float:
    """What it takes to pick samples and lay them side by side for whoever builds: the copy into a
    slot, without what wakes the other.
    """
    content = Content.concat(pieces)
    rows = np.arange(len(content))[::-1]
    start = time.thread_time()
    for _ in range(TRANSFERS):
        content.take(rows)
    return max(0.0, time.thread_time() - start) / TRANSFERS / max(1, len(content))


# memory


def _file_bytes(kit: ReaderSpec, bounds: Bounds) -> int:
    """What stays in memory while the chunks of a group are open between two slices: footers,
    handles, decompressors, decoded row groups. Measured: what allocators have given out before and
    after, all rows dropped.
    """
    cache = OpenChunkCache(max_open=1024)
    reader, began, opened = ChunkReader(kit.index, kit.read, cache), time.perf_counter(), 0
    chunks = kit.order.chunk_order(0)[: kit.order.group_size].tolist()
    try:
        forget_footers(kit.index.files)
        before = heap_bytes()
        for chunk in chunks:
            reader.slice(chunk, 0)
            opened += 1
            if time.perf_counter() - began > bounds.seconds:
                break
        gc.collect()
        return round(max(0, heap_bytes() - before) * len(chunks) / opened)
    finally:
        cache.close()


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (n, ctypes.c_size_t)
        for n in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def heap_bytes() -> int:
    """Bytes that allocators of this process have given out; all its memory where the C library does
    not tell.
    """
    try:
        mallinfo2: Any = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return pss_bytes()
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    arrow = 0 if pa.default_memory_pool().backend_name == "system" else pa.total_allocated_bytes()
    return int(found.uordblks + found.hblkhd + arrow)
