"""Measure a source: run its real reader and transforms on a few slices.

Rows and seconds are bounded. Wall-clock seconds and CPU seconds are measured, in this process and
in the transform process. Only CPU seconds need a core. In the other seconds the source waits for
storage, or for a service that a transform calls.
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

from overlord.content import Content
from overlord.loader.reader import SourceReader, Stages, core_s
from overlord.messages.data import Evaluate, Read
from overlord.process.resources import pss_bytes
from overlord.scaling.profile import SourceProfile
from overlord.setup.prepared_job import ReaderSpec
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.parquet import SMALL_ROW_GROUP, forget_footers
from overlord.transforms.base import Block, RowIds, StagedRows
from overlord.transforms.transform_process import TransformWorker

BLOCK = 64  # rows that are transformed between two readings of the clock
TRANSFERS = 4  # copies of all samples: the time of one may be below the clock's resolution

Clock = Callable[[], np.ndarray]  # returns wall-clock seconds and CPU seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds on the measurement of one source.

    ``memory``: also measure its memory, which needs a process without other work.
    """

    rows: int = 2048
    seconds: float = 2.0
    memory: bool = True


def machine() -> str:
    """Return a description of this machine: model and number of its CPU cores."""
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
    """Stages with a count of the seconds of the slice stage, and of the rows that it dropped.

    The slice stage runs while a window is opened, and its time does not count as reading.
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
    spec: ReaderSpec, bounds: Bounds, over: Callable[[], bool] = lambda: False
) -> SourceProfile:
    """Return the profile of one source; it has no samples if none were read within the bounds.

    ``over`` returns whether to stop before the bounds are reached. Errors of the source are raised
    as by its reader.
    """
    cache = OpenChunkCache(max_open=64)
    worker = TransformWorker(spec.pipeline) if spec.processes else None
    try:
        slice_rows = max(1, min(spec.read.slice_rows, bounds.rows))
        chunks = ChunkReader(spec.index, replace(spec.read, slice_rows=slice_rows), cache)
        probe = _Probe(spec, chunks, worker or spec.pipeline, bounds, over)
        probe.run()
        return probe.profile(_file_bytes(spec, bounds) if bounds.memory and probe.samples else 0)
    finally:
        cache.close()
        if worker is not None:
            worker.close()


class _Probe:
    """A measurement of chunks in stream order, which sums their costs until the bounds."""

    def __init__(
        self,
        spec: ReaderSpec,
        chunks: ChunkReader,
        stages: Stages,
        bounds: Bounds,
        over: Callable[[], bool],
    ):
        self._spec, self._bounds, self._over = spec, bounds, over
        self._clock: Clock = lambda: np.array([time.perf_counter(), core_s(stages)])
        self._stages = _Timed(stages, self._clock)
        self._reader = SourceReader(replace(spec.order, partial=None), chunks, self._stages)
        self._began = time.perf_counter()
        self._pieces: list[Content] = []
        self.samples = self._tokens = self._evaluated = self._raw_bytes = 0
        self._rows = self._covered = 0  # raw rows read, and raw rows whose read time is counted
        self._read_s = self._transform_s = np.zeros(2)

    def run(self) -> None:
        for chunk in self._spec.order.chunk_order(0).tolist():
            t, last = 0, False
            while not last and self._rows < self._bounds.rows and not self._is_over():
                last = self._window(chunk, t)
                t += 1
            if not last:
                return

    def _is_over(self) -> bool:
        return time.perf_counter() - self._began >= self._bounds.seconds or self._over()

    def _window(self, chunk: int, t: int) -> bool:
        """Read and transform slice ``t`` of a chunk; return whether it was the chunk's last one."""
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
            else int(self._spec.index.chunks.rows[chunk])
            if not t
            else 0
        )
        self._raw_bytes += window.nbytes
        left = min(window.rows, self._bounds.rows - self._evaluated)
        while left > 0 and not self._is_over():
            left -= self._evaluate(left)
        return chunk in window.over

    def _whole(self, chunk: int) -> bool:
        """Return whether reading the first slice of a chunk reads all of it.

        Small row groups are decoded at once.
        """
        return (
            self._spec.index.format == "parquet"
            and 0 <= int(self._spec.index.chunks.nbytes[chunk]) <= SMALL_ROW_GROUP
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
        spec, n, fingerprint = self._spec, self.samples, self._spec.cost_fingerprint
        if not n:
            return SourceProfile(
                name=spec.index.source,
                fingerprint=fingerprint,
                samples=0,
                read_s=0.0,
                transform_s=0.0,
                tokens=0.0,
            )
        window = min(spec.order.group_size, len(spec.index.chunks)) * spec.read.slice_rows
        window = min(window, spec.index.rows) if spec.index.rows is not None else window
        row_bytes = (
            self._raw_bytes / self._rows + sum(p.nbytes for p in self._pieces) / self._evaluated
        )
        read = (
            np.maximum(0.0, self._read_s)
            / max(1, self._covered)
            * self._rows
            / n
            * self._evaluated_fraction
        )
        transform = np.maximum(0.0, self._transform_s) / n
        return SourceProfile(
            name=spec.index.source,
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
    def _evaluated_fraction(self) -> float:
        """The fraction of the rows read that were transformed.

        The bounds may be reached in the middle of a window.
        """
        kept = self._rows - self._stages.dropped
        return self._evaluated / kept if kept else 1.0


def _transfer_s(pieces: list[Content]) -> float:
    """Return the CPU seconds to copy one sample for the constructor."""
    content = Content.concat(pieces)
    rows = np.arange(len(content))[::-1]
    start = time.thread_time()
    for _ in range(TRANSFERS):
        content.take(rows)
    return max(0.0, time.thread_time() - start) / TRANSFERS / max(1, len(content))


# memory


def _file_bytes(spec: ReaderSpec, bounds: Bounds) -> int:
    """Return the bytes that open chunks of a group hold between two slices.

    These are footers, handles, decompressors and decoded row groups. The result is the growth of
    allocated memory after the chunks are opened and their rows dropped.
    """
    cache = OpenChunkCache(max_open=1024)
    reader, began, opened = ChunkReader(spec.index, spec.read, cache), time.perf_counter(), 0
    chunks = spec.order.chunk_order(0)[: spec.order.group_size].tolist()
    try:
        forget_footers(spec.index.files)
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
    """Return the allocated bytes of this process.

    If the C library does not count them, return all memory of the process.
    """
    try:
        mallinfo2: Any = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return pss_bytes()
    mallinfo2.restype = _Mallinfo
    found = mallinfo2()
    arrow = 0 if pa.default_memory_pool().backend_name == "system" else pa.total_allocated_bytes()
    return int(found.uordblks + found.hblkhd + arrow)
