"""Reader for the Arrow IPC file and stream formats, as Hugging Face datasets writes them.

A chunk is the whole file. A file without a valid footer is read as a stream, which begins after the
magic bytes. A truncated file is therefore readable up to its end. Of a local file only the
requested rows are read (``arrow_partial_read.py``), so memory holds a slice and not a batch. Of
other files, and of files with dictionaries, whole batches are read. Files are never memory-mapped:
an unreadable mapped page kills the process, whereas a failing read raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from overlord.sources import tables as cols
from overlord.sources.arrow_partial_read import BROKEN, BatchLocation, Messages, checked
from overlord.sources.base import (
    NO_ROWS,
    BadFile,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    check_refused,
    is_storage_fault,
    make_chunks,
    missing_columns_error,
    no_rows_chunk,
)

if TYPE_CHECKING:
    from overlord.sources.files import Files

MAGIC = b"ARROW1"
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)
_REMEDY = "rewrite the file or exclude it: it is truncated or not an Arrow IPC file"


class Arrow:
    name = "arrow"
    suffixes = (".arrow", ".ipc", ".feather")
    indexed = True

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        known = self.schema(files, file, options) or {}
        if missing := [c for c in options.columns or () if c not in known]:
            raise missing_columns_error(missing, known)
        check_refused(known, options)
        with ExitStack() as stack:
            first = next(
                b
                for b in _batches(_open(files, file, stack), files, file, options)
                if isinstance(b, str) or b.num_rows
            )
        return (
            no_rows_chunk()
            if isinstance(first, str) and first == NO_ROWS
            else make_chunks([(0, -1, 0, -1, file.size)])
        )

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        if not file.size:
            raise BadFile("expected an Arrow IPC file, got 0 bytes", _REMEDY)
        with ExitStack() as stack:
            return {f.name: str(f.type) for f in _open(files, file, stack).reader.schema}

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        return 2**22  # estimate for a batch that is read whole; partial reads hold almost nothing

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        if int(chunks.unit[i]) < 0:
            yield cols.no_rows(options, skip)
            return
        at, n, step = 0, 0, options.slice_rows
        # Pieces of the current slice; a text stands for one unreadable row and is its reason.
        held: list[pa.RecordBatch | str] = []
        with ExitStack() as stack:
            for item in _batches(_open(files, file, stack), files, file, options):
                taken, size = 0, 1 if isinstance(item, str) else item.num_rows
                while taken < size:
                    if n == step:  # more rows follow the full slice, so it is not the last
                        if at >= skip * step:
                            yield _slice(at, held, options, False)
                        at, n, held = at + n, 0, []
                    m = min(step - n, size - taken)
                    if at >= skip * step:
                        held.append(item if isinstance(item, str) else item.rows(taken, taken + m))
                    n, taken = n + m, taken + m
            if at >= skip * step:
                yield _slice(at, held, options, True)
            else:
                yield cols.slice_of(at + n, 0, cols.empty(0, options.columns), [], True)


@dataclass(frozen=True, slots=True)
class OpenArrowFile:
    reader: Any  # pyarrow's RecordBatchFileReader or RecordBatchStreamReader
    truncated: bool  # the footer or the end-of-stream marker is missing
    partial: Messages | None  # None if only whole batches can be read


def _open(files: Files, file: File, stack: ExitStack) -> OpenArrowFile:
    """Open the file by its footer if that is valid, else as a stream. Raises BadFile.

    A truncated file has a stream after its magic bytes.
    """
    source = stack.enter_context(files.open(file))
    head, tail = source.read_at(8, 0), source.read_at(8, max(0, file.size - 8))
    source.seek(0)
    try:
        if head[:6] == MAGIC and tail[2:] == MAGIC:
            try:
                reader = _with_column_names(pa.ipc.open_file(source, options=_OPTIONS))
                footer = int.from_bytes(source.read_at(4, file.size - 10), "little")
                return OpenArrowFile(
                    reader,
                    False,
                    _partial_reader(files, source, 8, file.size - 10 - footer, reader.schema),
                )
            except BROKEN as error:
                if is_storage_fault(error):
                    raise
                # the footer is broken, but the batches may still be readable as a stream
        source.seek(start := 8 if head[:6] == MAGIC else 0)
        reader = _with_column_names(pa.ipc.open_stream(source, options=_OPTIONS))
        return OpenArrowFile(
            reader,
            start > 0 or tail != END_OF_STREAM,
            _partial_reader(files, source, start, file.size, reader.schema),
        )
    except BROKEN as error:
        if is_storage_fault(error):
            raise
        files.check_readable(file)
        raise BadFile(
            f"expected Arrow IPC, got a file that begins with {head!r}: {_first_line(error)}",
            _REMEDY,
        ) from error


def _with_column_names(reader: Any) -> Any:
    """Return the reader. Raises UnicodeDecodeError if the name of a column is not UTF-8.

    No later step would detect such a name.
    """
    [f.name for f in reader.schema]
    return reader


def _partial_reader(
    files: Files, source: pa.NativeFile, start: int, stop: int, schema: pa.Schema
) -> Messages | None:
    """Return a reader of single rows, or None if whole batches must be read.

    On remote storage a few long reads are faster than many short ones. Only pyarrow's readers
    decode dictionaries.
    """
    return (
        Messages(source, start, stop)
        if files.local and not any(_has_dictionary(field.type) for field in schema)
        else None
    )


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return bool(pa.types.is_dictionary(kind)) or any(
        _has_dictionary(kind.field(k).type) for k in range(kind.num_fields)
    )


def _batches(
    file_reader: OpenArrowFile, files: Files, file: File, options: ReadOptions
) -> Iterator[BatchLocation | str]:
    """Yield record batches, then an error text if the file is damaged, truncated or empty."""
    reader, rows, n = file_reader.reader, 0, 0
    count = getattr(reader, "num_record_batches", None)
    try:
        for batch in (
            _whole_batches(reader, count, options)
            if file_reader.partial is None
            else file_reader.partial.batches(reader.schema, options.columns)
        ):
            rows, n = rows + batch.num_rows, n + 1
            yield batch
        if count is not None and n != count:
            raise ValueError(f"expected {count} batches, got {n}")
    except BROKEN as error:
        if is_storage_fault(error):
            raise
        files.check_readable(file)  # raises OSError if the storage is at fault
        yield f"expected valid Arrow data, got: {_first_line(error)}"
        return
    if file_reader.truncated:
        yield "expected the end-of-stream marker of Arrow, got the end of the file: it is truncated"
    elif not rows:
        yield NO_ROWS


def _whole_batches(reader: Any, count: int | None, options: ReadOptions) -> Iterator[BatchLocation]:
    for batch in reader if count is None else map(reader.get_batch, range(count)):
        yield BatchLocation(checked(batch, options.columns))


def _slice(at: int, held: list[pa.RecordBatch | str], options: ReadOptions, last: bool) -> RawSlice:
    batches = [piece for piece in held if not isinstance(piece, str)]
    n = sum(piece.num_rows for piece in batches)
    lost = [(n, piece) for piece in held if isinstance(piece, str)]  # at most one, at the end
    if not batches:
        return cols.slice_of(at, len(lost), cols.empty(0, options.columns), lost, last)
    table, bad = cols.without_invalid_rows(
        pa.Table.from_batches(batches), options.max_sample_bytes, every_column=True
    )
    return cols.slice_of(at, n + len(lost), cols.compact(table), bad + lost, last)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
