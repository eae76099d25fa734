"""Arrow IPC, file and stream format, as Hugging Face datasets writes it. A chunk is the whole file.

A file's footer is not needed: after its mark it holds the stream, so one that was cut short is read up to the cut.
Local files are mapped and pages that were read are given back, so that what is held is a slice and not a batch. A mapped page that
cannot be had (the file was cut short, the mount fails) ends the process, where a read only fails: bytes are read before they are touched.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.sources import columns as cols
from overlord.sources.base import (
    NO_ROWS,
    BadFile,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    Unreachable,
    is_fault,
    make_chunks,
    no_rows_chunk,
    short_read,
)
from overlord.sources.filefaults import UNDER_RUN
from overlord.sources.files import BLOCK

if TYPE_CHECKING:
    from overlord.sources.files import Files

MAGIC = b"ARROW1"
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
GIVE_BACK_EVERY = 4  # slices
MARGIN = 2**16  # bytes read on either side of where rows are expected
_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError, EOFError)
_REMEDY = "the file is cut short or no Arrow IPC file; write it again or leave it out"


class Arrow:
    name = "arrow"
    suffixes = (".arrow", ".ipc", ".feather")
    indexed = True

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        known = list(self.schema(files, file, options) or ())
        if missing := [c for c in options.columns or () if c not in known]:
            raise BadFile(
                f"wanted the column{'s' * (len(missing) > 1)} {', '.join(map(repr, missing))}, found {', '.join(known) or 'none'}",
                "name a column that every file has, or write the file again",
            )
        with ExitStack() as stack:
            found = next(b for b in _batches(_open(files, file, stack), files, file, options) if isinstance(b, str) or b.num_rows)
        return no_rows_chunk() if isinstance(found, str) and found == NO_ROWS else make_chunks([(0, -1, 0, -1, file.size)])

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        if not file.size:
            raise BadFile("wanted an Arrow IPC file, found 0 bytes", _REMEDY)
        with ExitStack() as stack:
            return {f.name: str(f.type) for f in _open(files, file, stack).reader.schema}

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        return 2 * BLOCK + 4 * GIVE_BACK_EVERY * BLOCK

    def read(self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0) -> Iterator[RawSlice]:
        if int(chunks.unit[i]) < 0:
            yield cols.no_rows(options, skip)
            return
        at, n, step = 0, 0, options.slice_rows
        held: list[pa.RecordBatch | str] = []  # views that make up the slice in hand; a text is one lost row
        with ExitStack() as stack:
            opened = _open(files, file, stack)
            for item in _batches(opened, files, file, options):
                taken, size = 0, 1 if isinstance(item, str) else item.num_rows
                while taken < size:
                    if n == step:  # a row comes after the full slice, so that one is not the last
                        if at >= skip * step:
                            yield _slice(at, held, options, False)
                        opened.give_back(file.size)
                        at, n, held = at + n, 0, []
                    piece = item if isinstance(item, str) else item.slice(taken, step - n)
                    held.append(piece)
                    n, taken = n + (m := 1 if isinstance(piece, str) else piece.num_rows), taken + m
                    if not isinstance(item, str) and at >= skip * step:
                        opened.make_sure(item, taken - m, taken)
            if at >= skip * step:
                yield _slice(at, held, options, True)
            else:
                yield cols.slice_of(at + n, 0, cols.empty(0, options.columns), [], True)


class Opened:
    """An open file: its reader, the map behind it if there is one, and whether its end is missing."""

    def __init__(self, reader: Any, mapped: Mapped | None, cut: bool):
        self.reader, self.mapped, self.cut = reader, mapped, cut
        self.slices = 0

    def make_sure(self, batch: pa.RecordBatch, first: int, stop: int) -> None:
        """Raises if what these rows of a batch lie in cannot be read; to be asked before they are looked at."""
        if self.mapped is not None:
            self.mapped.make_sure(batch, first, stop)

    def give_back(self, size: int) -> None:
        """Lets pages go that were read; slices handed out are copies. Another read finds them in the page cache."""
        self.slices += 1
        if self.mapped is not None and self.slices % GIVE_BACK_EVERY == 0 and hasattr(mmap, "MADV_DONTNEED"):
            self.mapped.pages.madvise(mmap.MADV_DONTNEED)


class Mapped:
    """A file in memory, and its descriptor: a read through it fails where touching a page would end the process."""

    def __init__(self, file: File, stack: ExitStack):
        self._fd, self._size = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC), file.size
        stack.callback(os.close, self._fd)
        self._scratch = memoryview(bytearray(BLOCK))
        self.read(0, min(file.size, BLOCK))
        self.read(max(0, file.size - BLOCK), file.size)
        self.pages = mmap.mmap(self._fd, file.size, access=mmap.ACCESS_READ)
        self.buffer = pa.py_buffer(self.pages)

    def make_sure(self, batch: pa.RecordBatch, first: int, stop: int) -> None:
        """Reads where these rows are, or about where if their values differ in length: that is known only from their pages."""
        for column in batch.columns:
            for buffer in column.buffers():
                if buffer is None or not 0 <= (at := buffer.address - self.buffer.address) < self.buffer.size:
                    continue  # it was unpacked, and lies elsewhere
                a, b = buffer.size * first // batch.num_rows - MARGIN, buffer.size * stop // batch.num_rows + MARGIN
                self.read(at + max(0, a), at + min(buffer.size, b))

    def read(self, start: int, stop: int) -> None:
        """Reads these bytes and drops them; they lie in the page cache then."""
        if (found := os.fstat(self._fd).st_size) != self._size:
            raise Unreachable(f"the file changed while it was read: wanted {self._size} bytes, found {found}", UNDER_RUN, "changed")
        while start < stop:
            if not (n := os.preadv(self._fd, [self._scratch[: stop - start]], start)):
                raise short_read(self._size - start)
            start += n


def _open(files: Files, file: File, stack: ExitStack) -> Opened:
    """By the footer where there is one, else as a stream: what follows the mark of a cut file is one."""
    mapped: Mapped | None = None
    if files.local:
        mapped = Mapped(file, stack)
        source: Any = pa.BufferReader(mapped.buffer)
    else:
        source = stack.enter_context(files.open(file))
    head, tail = source.read_at(8, 0), source.read_at(8, max(0, file.size - 8))
    source.seek(0)
    try:
        if head[:6] == MAGIC and tail[2:] == MAGIC:
            try:
                return Opened(_named(pa.ipc.open_file(source, options=_OPTIONS)), mapped, False)
            except _BROKEN as error:
                if is_fault(error):
                    raise
                # what a broken footer leads to may still be read in order
        source.seek(8 if head[:6] == MAGIC else 0)
        reader = pa.ipc.open_stream(source, options=_OPTIONS)
        return Opened(_named(reader), mapped, head[:6] == MAGIC or tail != END_MARK)
    except _BROKEN as error:
        if is_fault(error):
            raise
        files.check_readable(file)
        raise BadFile(f"wanted Arrow IPC, found a file that begins with {head!r}: {_first_line(error)}", _REMEDY) from error


def _named(reader: Any) -> Any:
    """The reader, if its columns have names that can be read; broken ones are noticed nowhere else."""
    [f.name for f in reader.schema]
    return reader


def _batches(opened: Opened, files: Files, file: File, options: ReadOptions) -> Iterator[pa.RecordBatch | str]:
    """Record batches with the needed columns, then a text if rows were lost: how many, nobody knows."""
    reader, rows = opened.reader, 0
    try:
        count = getattr(reader, "num_record_batches", None)
        for batch in reader if count is None else map(reader.get_batch, range(count)):
            batch.validate()  # sizes of buffers; what is in them is checked slice by slice
            rows += batch.num_rows
            yield batch if options.columns is None else batch.select(list(options.columns))
    except _BROKEN as error:
        if is_fault(error):
            raise
        files.check_readable(file)  # raises if the disk is at fault
        yield f"the Arrow data is broken: {_first_line(error)}"
        return
    if opened.cut:
        yield "the Arrow data ends without its end mark: the file is cut short"
    elif not rows:
        yield NO_ROWS


def _slice(at: int, held: list[pa.RecordBatch | str], options: ReadOptions, last: bool) -> RawSlice:
    batches = [piece for piece in held if not isinstance(piece, str)]
    n = sum(piece.num_rows for piece in batches)
    lost = [(n, piece) for piece in held if isinstance(piece, str)]  # at most one, the last
    table, bad = cols.empty(0, options.columns), cols.Bad()
    if batches:
        table, bad = cols.sound(pa.Table.from_batches(batches), options.max_sample_bytes, every_column=True)
        table = cols.compact(table)
    return cols.slice_of(at, n + len(lost), table, bad + lost, last)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
