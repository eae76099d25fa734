"""Parquet: a chunk is a row group; only footers are read for the index.

Two ways to read a row group, chosen by its size alone so that every machine reads alike:

- small: read whole once, hand out slices as views; the loader copies what it keeps. An open iterator holds 2 to 3 times a small row group.
- large: decode slice by slice through a buffered stream. What is held is a page and a read buffer per column and the
  slice itself, whatever the size of the row group (``benchmarks/row_group_memory.py``). A page is what cannot be read
  in part: pyarrow closes one at 1 MB, but looks only every 1024 rows, so rows of 20 kB make pages of 20 MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from overlord.sources import columns as cols
from overlord.sources.base import BadFile, Chunks, File, RawSlice, ReadOptions, is_fault, lacks_columns, make_chunks, no_rows_chunk
from overlord.sources.lru import Lru
from overlord.sources.readahead import joined

if TYPE_CHECKING:
    from overlord.sources.files import Files

SMALL_ROW_GROUP = 4 * 2**20  # bytes of the needed columns, decoded
READ_BUFFER = 2**16  # bytes per column; 64 kB and 1 MB read equally fast, and this is held per open column
PAGE = 2**20  # what writers aim at for one page

# Far above any real file (a footer of 100 MB parses), far below what a hostile one could make the parser allocate.
_LIMITS = {"thrift_string_size_limit": 2**27, "thrift_container_size_limit": 2**22}
_REMEDY = "the file is cut short or no Parquet file; write it again or leave it out"
_BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError)

_FOOTERS: Lru[File, Any] = Lru(max_items=1024, max_bytes=2**26)


class Parquet:
    name = "parquet"
    suffixes = (".parquet", ".pq")
    indexed = True

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        footer = _footer(files, file)
        rows = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
        if sum(rows) != footer.num_rows or min(rows, default=0) < 0:
            raise BadFile(f"the footer contradicts itself: {footer.num_rows} rows, but its row groups have {sum(rows)}", _REMEDY)
        wanted = _column_ids(footer, options)
        if not footer.num_rows:
            return no_rows_chunk()
        out, first = [], 0
        for g, n in enumerate(rows):
            group = footer.row_group(g)
            nbytes = group.total_byte_size if wanted is None else sum(group.column(j).total_uncompressed_size for j in wanted)
            out.append((first, first + n, g, n, nbytes))
            first += n
        return make_chunks(out)

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return {f.name: str(f.type) for f in _footer(files, file).schema.to_arrow_schema()}

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        nbytes, rows = int(chunks.nbytes[i]), max(1, int(chunks.rows[i]))
        if nbytes <= SMALL_ROW_GROUP:
            return nbytes
        open_columns = len(options.columns) if options.columns else 4
        return open_columns * (READ_BUFFER + 2 * PAGE) + nbytes * min(options.slice_rows, rows) // rows

    def read(self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0) -> Iterator[RawSlice]:
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
        done, group, reason, looked_again = skip * step, int(chunks.unit[i]), "", False
        tables = _slices(files, file, footer, group, int(chunks.nbytes[i]), options, skip)
        while done < rows and not reason:
            want = min(step, rows - done)
            try:
                table, bad = cols.sound(_next(tables, want), options.max_sample_bytes)
            except _BROKEN as error:
                if is_fault(error):
                    raise
                files.check_readable(file, *_byte_range(footer, group, file))  # raises if the disk is at fault
                if looked_again:
                    reason = f"row group {group} is corrupt: {_first_line(error)}"
                    break
                looked_again = True  # the disk may have been at fault for a moment
                tables = _slices(files, file, footer, group, int(chunks.nbytes[i]), options, done // step)
                continue
            done += want
            yield cols.slice_of(first + done - want, want, table, bad, done == rows)
        # The count of rows is known, so what cannot be decoded is still accounted for, row by row.
        for at in range(done, rows, step):
            n = min(step, rows - at)
            yield cols.lost(first + at, n, _blank(footer, options), reason, at + n == rows)


def _next(tables: Iterator[pa.Table], want: int) -> pa.Table:
    table = next(tables, None)
    if table is None or table.num_rows != want:
        raise ValueError(f"wanted {want} rows here, found {0 if table is None else table.num_rows}")
    return table


def _blank(footer: Any, options: ReadOptions) -> pa.Table:
    """No rows, with the columns that there would be."""
    return _select(footer.schema.to_arrow_schema().empty_table(), options)


def _slices(files: Files, file: File, footer: Any, group: int, nbytes: int, options: ReadOptions, skip: int) -> Iterator[pa.Table]:
    """Tables of ``slice_rows`` rows from slice ``skip`` on; the last may be shorter. Raises what pyarrow raises."""
    step = options.slice_rows
    if nbytes <= SMALL_ROW_GROUP:
        try:
            with _open(files, file, footer, joined(_byte_ranges(files, footer, group, options))) as reader:
                whole = _select(reader.read_row_group(group, columns=_names(options), use_threads=False), options)
        except _BROKEN as error:
            if is_fault(error):
                raise
            # the other way may still give the rows before the broken page
        else:
            if whole.num_rows <= step:
                yield whole
            else:
                for at in range(skip * step, whole.num_rows, step):
                    yield whole.slice(at, step)
            return
    with _open(files, file, footer, _byte_ranges(files, footer, group, options)) as reader:
        batches = reader.iter_batches(batch_size=step, row_groups=[group], columns=_names(options), use_threads=False)
        for t, table in enumerate(_regroup(batches, step)):
            if t >= skip:
                yield _select(table, options)


def _regroup(batches: Iterator[pa.RecordBatch], step: int) -> Iterator[pa.Table]:
    """Tables of exactly ``step`` rows: a reader may give shorter batches where a column's text passes 2 GB."""
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
def _open(files: Files, file: File, footer: Any, ranges: Sequence[tuple[int, int]]) -> Iterator[pq.ParquetFile]:
    with files.open(file, ranges) as handle:  # a ParquetFile does not close what it was handed
        yield pq.ParquetFile(handle, metadata=footer, pre_buffer=False, buffer_size=READ_BUFFER, page_checksum_verification=True, **_LIMITS)


def _footer(files: Files, file: File) -> Any:
    """The parsed footer, kept: a file of a thousand row groups is opened a thousand times."""
    if (footer := _FOOTERS.get(file)) is not None:
        return footer
    if file.size < 12:
        raise BadFile(f"wanted a Parquet file, found {file.size} bytes", _REMEDY)
    handle = files.open(file)
    try:
        with pq.ParquetFile(handle, pre_buffer=False, **_LIMITS) as reader:
            footer = reader.metadata
            [f.name for f in footer.schema.to_arrow_schema()]  # fails here and not later where names or types make no sense
    except _BROKEN as error:
        if is_fault(error):
            raise
        handle.seek(file.size - 4)
        found = handle.read(4)
        if found != b"PAR1":
            raise BadFile(f"wanted the mark PAR1 at the end, found {found!r}", _REMEDY) from error
        raise BadFile(f"the footer cannot be read: {_first_line(error)}", _REMEDY) from error
    finally:
        handle.close()
    _FOOTERS.put(file, footer, footer.serialized_size)
    return footer


def forget_footers(files: Iterable[File]) -> None:
    """Let go of the footers of these files: whoever measures what they take wants them read again."""
    mine = set(files)
    _FOOTERS.clear(mine.__contains__)


def _column_ids(footer: Any, options: ReadOptions) -> list[int] | None:
    """Leaf columns under the needed ones; names that the file lacks are a BadFile that lists what it has."""
    if options.columns is None:
        return None
    known = footer.schema.to_arrow_schema()
    if missing := [c for c in options.columns if c not in known.names]:
        raise lacks_columns(missing, {field.name: str(field.type) for field in known})
    wanted = set(options.columns)
    paths = [footer.schema.column(j).path for j in range(len(footer.schema))]
    return [j for j, path in enumerate(paths) if path in wanted or path.split(".")[0] in wanted]


def _byte_ranges(files: Files, footer: Any, group: int, options: ReadOptions) -> list[tuple[int, int]]:
    """Where the needed columns of a row group lie; a disk need not be told."""
    if files.local:
        return []
    ids = _column_ids(footer, options)
    found = [footer.row_group(group).column(j) for j in (range(footer.num_columns) if ids is None else ids)]
    starts = [c.dictionary_page_offset or c.data_page_offset for c in found]
    return [(a, a + c.total_compressed_size) for a, c in zip(starts, found, strict=True) if c.total_compressed_size > 0]


def _byte_range(footer: Any, group: int, file: File) -> tuple[int, int]:
    """Where a row group lies in its file; all of the file if the footer talks nonsense."""
    found = [footer.row_group(group).column(j) for j in range(footer.num_columns)]
    start = min((c.dictionary_page_offset or c.data_page_offset for c in found), default=0)
    stop = start + sum(c.total_compressed_size for c in found)
    return (start, stop) if 0 <= start < stop <= file.size else (0, file.size)


def _names(options: ReadOptions) -> list[str] | None:
    return None if options.columns is None else list(options.columns)


def _select(table: pa.Table, options: ReadOptions) -> pa.Table:
    return table if options.columns is None else table.select(list(options.columns))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
