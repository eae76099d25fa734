"""Reader of selected rows of Arrow record batches, by plain reads.

Arrow reads a batch whole or from a memory-mapped file. A mapped page that cannot be read kills the
process, for example after the file was truncated or its mount failed. This module decodes a batch
over *blank memory*: anonymous pages that are never touched. The addresses of the decoded buffers
then give the byte range of any rows of a column in the file. A batch that Arrow decompresses or
converts while decoding is read whole.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from overlord.sources.base import short_read

SMALL = 2**17  # bodies up to this many bytes are read at once
TYPICAL_META = 2**12  # the metadata of most messages is shorter, so one read is enough
MAX_META = 2**26  # limit of an allocation whose size comes from the file
BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, EOFError)
ReadRange = Callable[[pa.Buffer, int, int], pa.Buffer]  # (buffer, start, stop) -> these bytes


class UnsupportedLayout(Exception):
    """Raised for a column type that cannot be read row by row, and for invalid offsets."""


class Feed:
    """File object from which Arrow's decoder reads the metadata and the body of one message.

    The decoder receives blank memory instead of a large body.

    A Feed must not reference its owner: the garbage collector cannot free a cycle through C++.
    """

    closed = False

    def __init__(self, handle: pa.NativeFile, start: int, stop: int):
        self._handle, self._stop = handle, stop
        # Offset of the next read; offset of the body; metadata before the body.
        self.at, self.body, self.meta = (start, start, b"")
        self.whole = False  # the body is read from the file
        self._pages = mmap.mmap(-1, 1)
        self.blank = pa.py_buffer(self._pages)

    def begin(self, start: int, whole: bool) -> None:
        """Read the metadata of the message at ``start``; the decoder reads this message next.

        ``whole``: the decoder receives the body from the file, never blank memory. Raises
        ValueError if the metadata is too long.
        """
        head, left = self.fetch(start, TYPICAL_META), self._stop - start
        # Versions before 0.15 write no continuation marker.
        prefix = 8 if head[:4] == b"\xff\xff\xff\xff" else 4
        end = prefix + max(0, int.from_bytes(head[prefix - 4 : prefix], "little", signed=True))
        if end > min(MAX_META, left):
            raise ValueError(
                f"expected at most {min(MAX_META, left)} bytes of metadata at byte {start}, "
                f"got {end}"
            )
        self.meta = (
            head[:end]
            if end <= len(head)
            else head + self.fetch(start + len(head), end - len(head))
        )
        self.at, self.body, self.whole = start, start + end, whole

    def insert(self, start: int, data: bytes) -> None:
        """Make the decoder read ``data`` next, then the file from ``start`` on."""
        self.meta, self.at, self.body, self.whole = data, start - len(data), start, True

    def read(self, n: int) -> Any:
        at, n = self.at, min(n, self._stop - self.at)
        self.at += n
        if at < self.body:
            first = at - self.body + len(self.meta)
            return self.meta[first : first + n]
        if n <= SMALL or self.whole:
            self.whole = True
            return self.fetch(at, n)
        if self.blank.size < n:
            self._pages = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.blank = pa.py_buffer(self._pages)
        return self.blank.slice(0, n)

    @contextmanager
    def filled(self, ranges: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Copy ranges (offset, length) of the body into the blank memory; zero them on exit."""
        ranges = list(ranges)
        for at, n in ranges:
            self._pages[at : at + n] = self.fetch(self.body + at, n)
        yield
        for at, n in ranges:
            self._pages[at : at + n] = bytes(n)

    def fetch(self, at: int, n: int) -> bytes:
        """Return n bytes of the file at ``at``; fewer only where the messages end.

        Raises StorageUnreachable if the file is shorter than its indexed size.
        """
        n = min(n, self._stop - at)
        data: bytes = self._handle.read_at(n, at)
        if len(data) < n:
            raise short_read(n - len(data))
        return data


class Messages:
    """The messages of an IPC stream between two offsets of a file."""

    def __init__(self, handle: pa.NativeFile, start: int, stop: int):
        self._feed, self._stop = Feed(handle, start, stop), stop
        self._source = pa.PythonFile(self._feed, mode="r")

    def batches(self, schema: pa.Schema, columns: Sequence[str] | None) -> Iterator[BatchLocation]:
        """Yield the record batches in file order. Raises one of BROKEN if the bytes are invalid."""
        feed = self._feed
        while (start := feed.at) < self._stop:
            try:
                message = self._message(start)
            except EOFError:  # the end-of-stream marker
                return
            if message.type != "record batch":
                continue
            batch = (
                self._small(message, schema, columns)
                if feed.whole
                else self._over_blank(message, schema, columns, start)
            )
            if batch is None:
                yield from self._with_pyarrow(start, schema, columns)
                return
            yield batch

    def _message(self, start: int, whole: bool = False) -> Any:
        self._feed.begin(start, whole)
        return pa.ipc.read_message(self._source)

    def _small(
        self, message: Any, schema: pa.Schema, columns: Sequence[str] | None
    ) -> BatchLocation | None:
        try:
            return BatchLocation(checked(pa.ipc.read_record_batch(message, schema), columns))
        except BROKEN:
            return None  # the requested columns may still be valid

    def _over_blank(
        self, message: Any, schema: pa.Schema, columns: Sequence[str] | None, start: int
    ) -> BatchLocation | None:
        """Return the batch over blank memory, or None if its rows cannot be read individually.

        Arrow decompresses or converts such a batch while decoding, or the batch is invalid.
        """
        feed, body = self._feed, self._feed.body
        first, stop = feed.blank.address, feed.blank.address + feed.blank.size
        try:
            batch = pa.ipc.read_record_batch(message, schema)
            # Compare buffer sizes first: access to an array with wrong sizes ends the process.
            batch.validate()
            used = (
                b for column in batch.columns for b in column.buffers() if b is not None and b.size
            )
            if not all(first <= b.address and b.address + b.size <= stop for b in used):
                return None
            batch = selected(batch, columns)
            ends = [
                (buffer.address - first + at, n)
                for column in batch.columns
                for buffer, at, n in end_offsets(column)
            ]
        except (UnsupportedLayout, *BROKEN):
            return None
        with feed.filled(ends):
            batch.validate()

        def get(buffer: pa.Buffer, a: int, b: int) -> pa.Buffer:
            return pa.py_buffer(feed.fetch(body + buffer.address - first + a, b - a))

        def whole() -> pa.RecordBatch:
            return selected(
                pa.ipc.read_record_batch(self._message(start, whole=True), schema), columns
            )

        return BatchLocation(batch, get, whole)

    def _with_pyarrow(
        self, start: int, schema: pa.Schema, columns: Sequence[str] | None
    ) -> Iterator[BatchLocation]:
        """Yield all batches from ``start`` on, read whole by pyarrow.

        pyarrow decompresses only the requested columns.
        """
        self._feed.insert(start, schema.serialize().to_pybytes())
        wanted = [schema.get_field_index(name) for name in columns or ()]
        reader = pa.ipc.open_stream(
            self._source, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted)
        )
        for batch in reader:
            yield BatchLocation(checked(batch, columns))


def checked(batch: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    """Return the requested columns. Raises ArrowInvalid for wrong sizes or outermost offsets.

    Inner offsets are validated later, slice by slice.
    """
    batch = selected(batch, columns)
    batch.validate()
    return batch


def selected(batch: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    return batch if columns is None else batch.select(list(columns))


def _in_memory(buffer: pa.Buffer, a: int, b: int) -> pa.Buffer:
    return buffer.slice(a, b - a)


class BatchLocation:
    """Columns of a record batch, in memory or over blank memory.

    ``get`` reads a range of a buffer. ``whole`` reads the complete batch; it is None if the batch
    is already in memory.
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        get: ReadRange = _in_memory,
        whole: Callable[[], pa.RecordBatch] | None = None,
    ) -> None:
        self._batch, self._get, self._whole = batch, get, whole
        self.num_rows: int = batch.num_rows

    def rows(self, first: int, stop: int) -> pa.RecordBatch:
        try:
            arrays = [rows_of(column, first, stop, self._get) for column in self._batch.columns]
        except UnsupportedLayout:
            if self._whole is None:
                # The validation of the slice finds the broken rows (tables.without_invalid_rows).
                return self._batch.slice(first, stop - first)
            self._batch, self._get, self._whole = self._whole(), _in_memory, None
            return self.rows(first, stop)
        return (
            pa.RecordBatch.from_arrays(arrays, schema=self._batch.schema)
            if arrays
            else self._batch.slice(first, stop - first)
        )


def rows_of(array: pa.Array, first: int, stop: int, get: ReadRange) -> pa.Array:
    """Return the rows from ``first`` up to ``stop`` of an array; ``get`` reads the needed bytes.

    The array must begin at the start of its buffers. Nested arrays of the result hold only the
    values of these rows. Otherwise one broken value would make every row of a batch appear broken.
    Raises UnsupportedLayout.
    """
    kind, buffers = array.type, array.buffers()
    if first == stop or pt.is_null(kind):
        return pa.nulls(stop - first, kind)
    if not pt.is_struct(kind) and (len(buffers) < 2 or buffers[1] is None):
        raise UnsupportedLayout
    # validity bits begin at a whole byte, so all buffers are read from that row on
    start = first & ~7
    valid = (
        get(buffers[0], start // 8, -(-stop // 8))
        if array.null_count and buffers[0] is not None
        else None
    )
    parts, children = [valid], list[pa.Array]()
    if _is_fixed(kind):
        parts.append(get(buffers[1], start * kind.bit_width // 8, -(-stop * kind.bit_width // 8)))
    elif pt.is_struct(kind):
        children = [rows_of(array.field(k), start, stop, get) for k in range(kind.num_fields)]
    elif number := _offsets_of(kind):
        width = number.itemsize
        offsets = np.frombuffer(get(buffers[1], start * width, (stop + 1) * width), number)
        a, b = int(offsets[0]), int(offsets[-1])
        size = (
            len(array.values)
            if _is_list(kind)
            else buffers[2].size
            if buffers[2] is not None
            else 0
        )
        if a < 0 or b > size or (offsets[1:] < offsets[:-1]).any():
            raise UnsupportedLayout
        parts.append(pa.py_buffer(offsets - offsets[0]))
        if _is_list(kind):
            children = [rows_of(array.values, a, b, get)]
        else:
            parts.append(get(buffers[2], a, b) if b > a else pa.py_buffer(b""))
    else:
        raise UnsupportedLayout
    return pa.Array.from_buffers(kind, stop - start, parts, children=children or None).slice(
        first - start
    )


def end_offsets(array: pa.Array) -> Iterator[tuple[pa.Buffer, int, int]]:
    """Yield the location of the first and last offset of a column and of its nested arrays.

    A location is (buffer, byte offset in the buffer, number of bytes). Raises UnsupportedLayout.
    """
    kind = array.type
    if pt.is_struct(kind):
        for k in range(kind.num_fields):
            yield from end_offsets(array.field(k))
    elif number := _offsets_of(kind):
        buffer, last = array.buffers()[1], len(array) * number.itemsize
        if buffer is not None and buffer.size >= last + number.itemsize:
            yield from ((buffer, 0, number.itemsize), (buffer, last, number.itemsize))
        if _is_list(kind):
            yield from end_offsets(array.values)
    elif not (_is_fixed(kind) or pt.is_null(kind)):
        raise UnsupportedLayout


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind))


def _offsets_of(kind: pa.DataType) -> np.dtype[Any] | None:
    """Return the numpy type of the offsets, or None if the values have a fixed length."""
    if pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_large_list(kind):
        return np.dtype(np.int64)
    return (
        np.dtype(np.int32) if pt.is_string(kind) or pt.is_binary(kind) or pt.is_list(kind) else None
    )
