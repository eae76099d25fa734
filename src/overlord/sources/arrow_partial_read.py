"""Rows of Arrow's record batches by plain reads: of a batch that is large, only those that are
wanted.

Arrow takes a batch whole, or out of a file that is mapped: and a mapped page that cannot be had,
since the file was cut short or its mount fails, ends the process. Here a batch is decoded over
nothing, memory that is never touched: where its buffers would lie tells what to read for some rows
of some columns. What Arrow unpacks or converts while it decodes is read whole.
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

SMALL = 2**17  # bytes of a body that is read at once
USUAL_META = 2**12  # most messages' metadata are shorter: one read for each
MAX_META = 2**26  # nothing larger is allocated on the word of a file
BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, EOFError)
Get = Callable[[pa.Buffer, int, int], pa.Buffer]  # these bytes of a buffer


class Unusual(Exception):
    """Rows of a rare type, or offsets that make no sense."""


class Feed:
    """What Arrow's decoder reads a message from: its metadata, then its body, or as many bytes of
    nothing. It must not know who holds it: a circle by way of C++ is never collected.
    """

    closed = False

    def __init__(self, handle: pa.NativeFile, start: int, stop: int):
        self._handle, self._stop = handle, stop
        self.at, self.body, self.meta = (
            start,
            start,
            b"",
        )  # of the next read; where a body begins; what stands before it
        self.whole = False  # the body is really read
        self._pages = mmap.mmap(-1, 1)
        self.nothing = pa.py_buffer(self._pages)

    def begin(self, start: int, whole: bool) -> None:
        """The message at this place is read next."""
        head, left = self.take(start, USUAL_META), self._stop - start
        prefix = (
            8 if head[:4] == b"\xff\xff\xff\xff" else 4
        )  # before version 0.15 there was no mark
        end = prefix + max(0, int.from_bytes(head[prefix - 4 : prefix], "little", signed=True))
        if end > min(MAX_META, left):
            raise ValueError(f"expected {end} bytes of metadata at byte {start}, got {left}")
        self.meta = (
            head[:end] if end <= len(head) else head + self.take(start + len(head), end - len(head))
        )
        self.at, self.body, self.whole = start, start + end, whole

    def insert(self, start: int, data: bytes) -> None:
        """These bytes are read next, then all from this place on."""
        self.meta, self.at, self.body, self.whole = data, start - len(data), start, True

    def read(self, n: int) -> Any:
        at, n = self.at, min(n, self._stop - self.at)
        self.at += n
        if at < self.body:
            first = at - self.body + len(self.meta)
            return self.meta[first : first + n]
        if n <= SMALL or self.whole:
            self.whole = True
            return self.take(at, n)
        if self.nothing.size < n:
            self._pages = mmap.mmap(-1, n, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self.nothing = pa.py_buffer(self._pages)
        return self.nothing.slice(0, n)

    @contextmanager
    def shown(self, places: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Some bytes of the body stand where they belong meanwhile: (offset, how many)."""
        places = list(places)
        for at, n in places:
            self._pages[at : at + n] = self.take(self.body + at, n)
        yield
        for at, n in places:
            self._pages[at : at + n] = bytes(n)

    def take(self, at: int, n: int) -> bytes:
        """Fewer only where the messages end."""
        n = min(n, self._stop - at)
        data: bytes = self._handle.read_at(n, at)
        if len(data) < n:
            raise short_read(n - len(data))
        return data


class Messages:
    """The messages of a stream, from one place in a file to another."""

    def __init__(self, handle: pa.NativeFile, start: int, stop: int):
        self._feed, self._stop = Feed(handle, start, stop), stop
        self._source = pa.PythonFile(self._feed, mode="r")

    def batches(self, schema: pa.Schema, columns: Sequence[str] | None) -> Iterator[BatchLocation]:
        """Raises one of BROKEN where bytes make no sense."""
        feed = self._feed
        while (start := feed.at) < self._stop:
            try:
                message = self._message(start)
            except EOFError:  # the end mark
                return
            if message.type != "record batch":
                continue
            batch = (
                self._small(message, schema, columns)
                if feed.whole
                else self._over_nothing(message, schema, columns, start)
            )
            if batch is None:
                yield from self._unpacked(start, schema, columns)
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
            return None  # the wanted columns may be good

    def _over_nothing(
        self, message: Any, schema: pa.Schema, columns: Sequence[str] | None, start: int
    ) -> BatchLocation | None:
        """A batch whose rows can be read by themselves; None: Arrow wants its bytes."""
        feed, body = self._feed, self._feed.body
        first, stop = feed.nothing.address, feed.nothing.address + feed.nothing.size
        try:
            batch = pa.ipc.read_record_batch(message, schema)
            # sizes; to look into an array that has others than it says ends the process
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
                for buffer, at, n in ends_of(column)
            ]
        except (Unusual, *BROKEN):
            return None
        with feed.shown(ends):
            batch.validate()

        def get(buffer: pa.Buffer, a: int, b: int) -> pa.Buffer:
            return pa.py_buffer(feed.take(body + buffer.address - first + a, b - a))

        def whole() -> pa.RecordBatch:
            return selected(
                pa.ipc.read_record_batch(self._message(start, whole=True), schema), columns
            )

        return BatchLocation(batch, get, whole)

    def _unpacked(
        self, start: int, schema: pa.Schema, columns: Sequence[str] | None
    ) -> Iterator[BatchLocation]:
        """All from here on by pyarrow's reader, which unpacks no other columns."""
        self._feed.insert(start, schema.serialize().to_pybytes())
        wanted = [schema.get_field_index(name) for name in columns or ()]
        reader = pa.ipc.open_stream(
            self._source, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=wanted)
        )
        for batch in reader:
            yield BatchLocation(checked(batch, columns))


def checked(batch: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    """The wanted columns, if sizes and outermost offsets fit; what is between is checked slice by
    slice.
    """
    batch = selected(batch, columns)
    batch.validate()
    return batch


def selected(batch: pa.RecordBatch, columns: Sequence[str] | None) -> pa.RecordBatch:
    return batch if columns is None else batch.select(list(columns))


def _in_memory(buffer: pa.Buffer, a: int, b: int) -> pa.Buffer:
    return buffer.slice(a, b - a)


class BatchLocation:
    """Columns of a record batch, in memory or over nothing (``get`` reads their buffers, ``whole``
    all of it).
    """

    def __init__(
        self,
        batch: pa.RecordBatch,
        get: Get = _in_memory,
        whole: Callable[[], pa.RecordBatch] | None = None,
    ) -> None:
        self._batch, self._get, self._whole = batch, get, whole
        self.num_rows: int = batch.num_rows

    def rows(self, first: int, stop: int) -> pa.RecordBatch:
        try:
            arrays = [rows_of(column, first, stop, self._get) for column in self._batch.columns]
        except Unusual:
            if self._whole is None:
                return self._batch.slice(
                    first, stop - first
                )  # whoever checks the rows says which are broken
            self._batch, self._get, self._whole = self._whole(), _in_memory, None
            return self.rows(first, stop)
        return (
            pa.RecordBatch.from_arrays(arrays, schema=self._batch.schema)
            if arrays
            else self._batch.slice(first, stop - first)
        )


def rows_of(array: pa.Array, first: int, stop: int, get: Get) -> pa.Array:
    """Some rows of an array that begins where its buffers do. Nested ones hold just what these rows
    need, or one broken value would make all rows of a batch look broken.
    """
    kind, buffers = array.type, array.buffers()
    if first == stop or pt.is_null(kind):
        return pa.nulls(stop - first, kind)
    if not pt.is_struct(kind) and (len(buffers) < 2 or buffers[1] is None):
        raise Unusual
    start = first & ~7  # bits are read from a whole byte on, and all else from the same row on
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
            raise Unusual
        parts.append(pa.py_buffer(offsets - offsets[0]))
        if _is_list(kind):
            children = [rows_of(array.values, a, b, get)]
        else:
            parts.append(get(buffers[2], a, b) if b > a else pa.py_buffer(b""))
    else:
        raise Unusual
    return pa.Array.from_buffers(kind, stop - start, parts, children=children or None).slice(
        first - start
    )


def ends_of(array: pa.Array) -> Iterator[tuple[pa.Buffer, int, int]]:
    """Where the first and the last offset of a column are (buffer, offset in it, bytes), and of all
    that is nested in it.
    """
    kind = array.type
    if pt.is_struct(kind):
        for k in range(kind.num_fields):
            yield from ends_of(array.field(k))
    elif number := _offsets_of(kind):
        buffer, last = array.buffers()[1], len(array) * number.itemsize
        if buffer is not None and buffer.size >= last + number.itemsize:
            yield from ((buffer, 0, number.itemsize), (buffer, last, number.itemsize))
        if _is_list(kind):
            yield from ends_of(array.values)
    elif not (_is_fixed(kind) or pt.is_null(kind)):
        raise Unusual


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pt.is_primitive(kind) or pt.is_decimal(kind) or pt.is_fixed_size_binary(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind))


def _offsets_of(kind: pa.DataType) -> np.dtype[Any] | None:
    """The type of offsets, where values or items have a length of their own."""
    if pt.is_large_string(kind) or pt.is_large_binary(kind) or pt.is_large_list(kind):
        return np.dtype(np.int64)
    return (
        np.dtype(np.int32) if pt.is_string(kind) or pt.is_binary(kind) or pt.is_list(kind) else None
    )
