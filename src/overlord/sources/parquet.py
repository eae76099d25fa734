"""Reader of Parquet: a chunk is a row group; the index reads only footers.

A footer is not trusted. ``parquet_footer.py`` reads row groups and columns from its bytes. pyarrow
gets the footer to decode data, where it reports errors instead of aborting. Do not call getters of
``FileMetaData.row_group(...)`` here: on a hostile footer they end the process.

A row group is read in one of two ways. Its size alone decides, so every machine reads it equally:

- small: read whole once and return slices as views; the loader copies the rows it keeps. An open
  iterator holds 2 to 3 times a small row group.
- large: decode slice by slice through a buffered stream. An open iterator holds a page and a read
  buffer per column and the slice itself, whatever the size of the row group
  (``benchmarks/row_group_memory.py``). A page cannot be read in part. When pyarrow writes, it
  closes a page at 1 MB, but checks only every 1024 rows: rows of 20 kB make pages of 20 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.sources import tables as cols
from overlord.sources.base import (
    BadFile,
    Chunks,
    File,
    Lru,
    RawSlice,
    ReadOptions,
    check_refused,
    is_storage_fault,
    make_chunks,
    missing_columns_error,
    no_rows_chunk,
    short_read,
)
from overlord.sources.parquet_footer import BrokenFooter, ParquetLayout, parse

if TYPE_CHECKING:
    from overlord.sources.files import Files

SMALL_ROW_GROUP = 4 * 2**20  # bytes of the needed columns, decoded
# Bytes of the read buffer of an open column; 64 kB and 1 MB read equally fast.
READ_BUFFER = 2**16
GAP = 2**16  # ranges at most this many bytes apart are merged
PAGE = 2**20  # size that writers aim at for one page

# Limits far above any real file (a footer of 100 MB is accepted), and far below the memory that a
# hostile file could make the parser allocate.
_LIMITS = {"thrift_string_size_limit": 2**27, "thrift_container_size_limit": 2**22}
_TAIL = 2**16  # bytes of the first read from the end; most footers are shorter
_MARK, _ENCRYPTED_MARK = b"PAR1", b"PARE"
_REMEDY = "rewrite the file or exclude it: it is truncated or not a Parquet file"
_BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)

_DECRYPT = "rewrite the file without encryption, or select columns that are not encrypted"
_COLUMN_BYTES = 200  # approximate size of one column of one row group in a ParquetLayout


@dataclass(frozen=True, slots=True)
class _Footer:
    """A parsed Parquet footer."""

    metadata: Any  # pyarrow's FileMetaData
    # None for local files. Other files need byte ranges with every row group, for read-ahead.
    layout: ParquetLayout | None
    texts: frozenset[str]  # columns that hold text, whose encoding must be validated

    @property
    def nbytes(self) -> int:
        columns = (
            len(self.layout.leaves) * len(self.layout.groups) if self.layout is not None else 0
        )
        return int(self.metadata.serialized_size) + columns * _COLUMN_BYTES


_FOOTERS: Lru[File, _Footer] = Lru(max_items=1024, max_bytes=2**26)


class Parquet:
    name = "parquet"
    suffixes = (".parquet", ".pq")
    indexed = True

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        known, layout = _types_and_layout(files, file)
        wanted = _column_ids(known, layout, options)
        check_refused(known, options)
        if hidden := [
            c for c in layout.encrypted if options.columns is None or c in options.columns
        ]:
            raise BadFile(
                f"expected readable columns, got encrypted ones: {', '.join(map(repr, hidden))}",
                _DECRYPT,
            )
        if not layout.rows:
            return no_rows_chunk()
        out, first = [], 0
        for g, group in enumerate(layout.groups):
            nbytes = (
                group.nbytes
                if wanted is None
                else sum(group.columns[j].uncompressed for j in wanted)
            )
            out.append((first, first + group.rows, g, group.rows, nbytes))
            first += group.rows
        return make_chunks(out)

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return _types(_footer(files, file).metadata)

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        nbytes, rows = int(chunks.nbytes[i]), max(1, int(chunks.rows[i]))
        if nbytes <= SMALL_ROW_GROUP:
            return nbytes
        open_columns = len(options.columns) if options.columns else 4
        return (
            open_columns * (READ_BUFFER + 2 * PAGE) + nbytes * min(options.slice_rows, rows) // rows
        )

    def whole(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions
    ) -> pa.Table | None:
        group, nbytes = int(chunks.unit[i]), int(chunks.nbytes[i])
        if group < 0 or nbytes > min(SMALL_ROW_GROUP, options.max_sample_bytes):
            return None
        try:
            footer = _footer(files, file)
            if footer.texts and not footer.texts.isdisjoint(options.columns or footer.texts):
                return None
            table = _whole(files, file, footer, group, options)
        except _BROKEN as error:  # BadFile is a ValueError
            if is_storage_fault(error):
                raise
            return None
        valid = table.get_total_buffer_size() <= options.max_sample_bytes
        return table if valid and table.num_rows == int(chunks.rows[i]) else None

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        first, rows, step = int(chunks.start[i]), int(chunks.rows[i]), options.slice_rows
        if int(chunks.unit[i]) < 0:
            yield cols.no_rows(options, skip)
            return
        try:
            footer = _footer(files, file)
        except BadFile:
            files.check_readable(file)
            raise
        if skip * step >= rows:
            yield cols.slice_of(first + rows, 0, _blank(footer, options), [], True)
            return
        done, group, reason, retried = skip * step, int(chunks.unit[i]), "", False
        tables = _slices(files, file, footer, group, int(chunks.nbytes[i]), options, skip)
        while done < rows and not reason:
            want = min(step, rows - done)
            try:
                table, bad = cols.without_invalid_rows(
                    _next(tables, want), options.max_sample_bytes
                )
            except _BROKEN as error:
                if is_storage_fault(error):
                    raise
                # Raises OSError if the storage is at fault.
                files.check_readable(file, *_byte_range(files, file, group))
                if retried:
                    reason = f"row group {group}: expected valid data, got: {_first_line(error)}"
                    break
                retried = True  # the fault of storage may have been transient
                tables = _slices(
                    files, file, footer, group, int(chunks.nbytes[i]), options, done // step
                )
                continue
            done += want
            yield cols.slice_of(first + done - want, want, table, bad, done == rows)
        # The number of rows is known, so rows that cannot be decoded are still accounted for one by
        # one.
        for at in range(done, rows, step):
            n = min(step, rows - at)
            yield cols.unreadable_slice(
                first + at, n, _blank(footer, options), reason, at + n == rows
            )


def _next(tables: Iterator[pa.Table], want: int) -> pa.Table:
    table = next(tables, None)
    if table is None or table.num_rows != want:
        raise ValueError(
            f"expected {want} rows in the slice, got {0 if table is None else table.num_rows}"
        )
    return table


def _blank(footer: _Footer, options: ReadOptions) -> pa.Table:
    """Return an empty table with the requested columns of the file."""
    return _select(footer.metadata.schema.to_arrow_schema().empty_table(), options)


def _slices(
    files: Files,
    file: File,
    footer: _Footer,
    group: int,
    nbytes: int,
    options: ReadOptions,
    skip: int,
) -> Iterator[pa.Table]:
    """Yield tables of ``slice_rows`` rows of a row group, starting at slice ``skip``.

    The last table may be shorter. Raises pyarrow's errors, and OSError if storage fails.
    """
    step = options.slice_rows
    if nbytes <= SMALL_ROW_GROUP:
        try:
            whole = _whole(files, file, footer, group, options)
        except _BROKEN as error:
            if is_storage_fault(error):
                raise
            # decoding slice by slice, below, may still return the rows before the broken page
        else:
            if whole.num_rows <= step:
                yield whole
            else:
                for at in range(skip * step, whole.num_rows, step):
                    yield whole.slice(at, step)
            return
    with _open(files, file, footer, _byte_ranges(footer, file, group, options)) as reader:
        batches = reader.iter_batches(
            batch_size=step, row_groups=[group], columns=_names(options), use_threads=False
        )
        for t, table in enumerate(_regroup(batches, step)):
            if t >= skip:
                yield _select(table, options)


def _whole(files: Files, file: File, footer: _Footer, group: int, options: ReadOptions) -> pa.Table:
    """Return the requested columns of a row group. Raises pyarrow's errors and OSError."""
    ranges = merged(_byte_ranges(footer, file, group, options)) if footer.layout else []
    names = _names(options)
    with files.open(file, ranges) as handle:
        reader = _reader(handle, footer)
        table = reader.read_row_group(group, columns=names, use_threads=False)
    return table if names is not None and table.column_names == names else _select(table, options)


def _regroup(batches: Iterator[pa.RecordBatch], step: int) -> Iterator[pa.Table]:
    """Yield the rows of ``batches`` in tables of ``step`` rows; only the last may be shorter.

    pyarrow returns shorter batches where the text of a column exceeds 2 GB.
    """
    held: list[pa.RecordBatch] = []
    n = 0
    for batch in batches:
        if not n and batch.num_rows == step:
            yield pa.Table.from_batches([batch])
            continue
        held.append(batch)
        n += batch.num_rows
        while n >= step:
            table = pa.Table.from_batches(held)
            yield table.slice(0, step)
            n -= step
            held[:] = table.slice(step).to_batches() if n else []
    if n:
        yield pa.Table.from_batches(held)


@contextmanager
def _open(
    files: Files, file: File, footer: _Footer, ranges: Sequence[tuple[int, int]]
) -> Iterator[pq.ParquetFile]:
    with files.open(file, ranges) as handle:  # a ParquetFile does not close the file it was given
        yield _reader(handle, footer)


def _reader(handle: pa.NativeFile, footer: _Footer) -> pq.ParquetFile:
    return pq.ParquetFile(
        handle,
        metadata=footer.metadata,
        pre_buffer=False,
        buffer_size=READ_BUFFER,
        page_checksum_verification=True,
        **_LIMITS,
    )


def _footer(files: Files, file: File) -> _Footer:
    """Return the parsed footer of a file. Raises BadFile.

    Footers are cached, since a file of a thousand row groups is opened a thousand times.
    """
    if (footer := _FOOTERS.get(file)) is not None:
        return footer
    data = _footer_bytes(files, file)
    return _cached(file, _metadata(data), None if files.local else _layout(data))


def _types_and_layout(files: Files, file: File) -> tuple[dict[str, str], ParquetLayout]:
    """Return the types of the columns by name, and the layout of a file.

    Raises BadFile if the footer is invalid, or if pyarrow and ``parquet_footer.py`` disagree.
    """
    data = _footer_bytes(files, file)
    metadata, layout = _metadata(data), _layout(data)
    theirs = (metadata.num_rows, metadata.num_row_groups, metadata.num_columns)
    if (ours := (layout.rows, len(layout.groups), len(layout.leaves))) != theirs:
        problem = (
            "expected an unambiguous footer, got one that is read in two ways: {} rows, {} row "
            "groups and {} columns by pyarrow, {}, {} and {} by this package"
        )
        raise BadFile(problem.format(*theirs, *ours), _REMEDY)
    _cached(file, metadata, None if files.local else layout)
    return _types(metadata), layout


def _types(metadata: Any) -> dict[str, str]:
    """Return the type of every column by name."""
    return {field.name: str(field.type) for field in metadata.schema.to_arrow_schema()}


def _cached(file: File, metadata: Any, layout: ParquetLayout | None) -> _Footer:
    schema = metadata.schema.to_arrow_schema()
    footer = _Footer(metadata, layout, frozenset(f.name for f in schema if cols.has_text(f.type)))
    _FOOTERS.put(file, footer, footer.nbytes)
    return footer


def _footer_bytes(files: Files, file: File) -> bytes:
    """Return the bytes of the footer, without the length and the magic bytes that follow it.

    Raises BadFile if the length or the magic bytes are invalid.
    """
    if file.size < 12:
        raise BadFile(f"expected a Parquet file, got {file.size} bytes", _REMEDY)
    with files.open(file) as handle:
        tail = _bytes_at(handle, max(0, file.size - _TAIL), file.size)
        if (mark := tail[-4:]) == _ENCRYPTED_MARK:
            raise BadFile(
                "expected a readable footer, got an encrypted one",
                "rewrite the file without encryption",
            )
        if mark != _MARK:
            raise BadFile(f"expected the magic bytes PAR1 at the end, got {mark!r}", _REMEDY)
        size = int.from_bytes(tail[-8:-4], "little")
        if size > file.size - 8:
            raise BadFile(
                f"expected a footer of at most {file.size - 8} bytes, got a length of {size}",
                _REMEDY,
            )
        if size + 8 > len(tail):
            tail = _bytes_at(handle, file.size - 8 - size, file.size)
    return tail[-8 - size : -8]


def _bytes_at(handle: pa.NativeFile, start: int, stop: int) -> bytes:
    data: bytes = handle.read_at(stop - start, start)
    if len(data) < stop - start:
        raise short_read(stop - start - len(data))
    return data


def _metadata(footer: bytes) -> Any:
    """Return the footer as pyarrow's FileMetaData. Raises BadFile."""
    held = pa.BufferReader(b"".join((footer, len(footer).to_bytes(4, "little"), _MARK)))
    try:
        with pq.ParquetFile(held, pre_buffer=False, **_LIMITS) as reader:
            metadata = reader.metadata
            # Invalid names or types fail here and not later.
            [f.name for f in metadata.schema.to_arrow_schema()]
    except _BROKEN as error:
        raise BadFile(f"expected a valid footer, got: {_first_line(error)}", _REMEDY) from error
    return metadata


def _layout(footer: bytes) -> ParquetLayout:
    try:
        return parse(footer)
    except BrokenFooter as error:
        raise BadFile(str(error), _REMEDY) from error


def forget_footers(files: Iterable[File]) -> None:
    """Drop the cached footers of these files, so that a memory measurement reads them again."""
    mine = set(files)
    _FOOTERS.clear(mine.__contains__)


def _column_ids(
    known: Mapping[str, str], layout: ParquetLayout, options: ReadOptions
) -> list[int] | None:
    """Return the numbers of the leaves of the requested columns; None if all are requested.

    Raises BadFile, which lists the existing columns, if a requested column is missing.
    """
    if options.columns is None:
        return None
    if missing := [c for c in options.columns if c not in known]:
        raise missing_columns_error(missing, known)
    wanted = set(options.columns)
    return [j for j, leaf in enumerate(layout.leaves) if leaf in wanted]


def _byte_ranges(
    footer: _Footer, file: File, group: int, options: ReadOptions
) -> list[tuple[int, int]]:
    """Return the byte ranges of the requested columns of a row group; [] for a local file."""
    if (layout := footer.layout) is None:
        return []
    wanted = None if options.columns is None else set(options.columns)
    columns = [
        c
        for leaf, c in zip(layout.leaves, layout.groups[group].columns, strict=True)
        if wanted is None or leaf in wanted
    ]
    ranges = [(c.start, c.start + c.compressed) for c in columns]
    # Ranges outside the file are left out: pyarrow requests them itself, and fails there.
    return [(a, b) for a, b in ranges if 0 <= a < b <= file.size]


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges sorted, with ranges at most ``GAP`` bytes apart merged."""
    out: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if out and start - out[-1][1] <= GAP:
            out[-1] = (out[-1][0], max(stop, out[-1][1]))
        else:
            out.append((start, stop))
    return out


def _byte_range(files: Files, file: File, group: int) -> tuple[int, int]:
    """Return the byte range of a row group, or of the whole file if the footer is invalid."""
    try:
        layout = _layout(_footer_bytes(files, file))
    except BadFile:
        return 0, file.size
    columns = layout.groups[group].columns if group < len(layout.groups) else []
    start = min((c.start for c in columns), default=0)
    stop = start + sum(c.compressed for c in columns)
    return (start, stop) if 0 <= start < stop <= file.size else (0, file.size)


def _names(options: ReadOptions) -> list[str] | None:
    return None if options.columns is None else list(options.columns)


def _select(table: pa.Table, options: ReadOptions) -> pa.Table:
    return table if options.columns is None else table.select(list(options.columns))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
