"""Reader of CSV and TSV by RFC 4180: fields may be quoted, quotes doubled, line breaks quoted.

A file is one chunk, since only a scan from its start tells which line breaks are quoted. The row
number is the byte offset of the row's first line in the decompressed text. All values are text as
written: a type that followed from the values would change a row with its neighbours.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from overlord.sources.base import (
    NO_ROWS,
    BadFile,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    check_refused,
    missing_columns_error,
)
from overlord.sources.decompress import TextLine
from overlord.sources.tables import BadRows
from overlord.sources.text_input import COMPRESSIONS, decoded, lines_of, whole_file_chunk

if TYPE_CHECKING:
    from overlord.sources.files import Files

_FIELD_LIMIT = 2**31 - 1  # the length of a row is bounded by max_sample_bytes


class CsvRow(NamedTuple):
    """One row: the byte offset of its first line, and its fields or the reason why it has none."""

    offset: int
    fields: list[str]
    problem: str = ""


class Csv:
    """Format of rows with one delimiter, with or without a header."""

    indexed = False

    def __init__(
        self, name: str, delimiter: str, *, header: bool = True, suffix: str = ".csv"
    ) -> None:
        self.name, self.delimiter, self.header = name, delimiter, header
        self.suffixes = tuple(suffix + packed for packed in COMPRESSIONS)

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        return whole_file_chunk(file)

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return None

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        # A decompressor holds a window: 32 kB for gzip, usually at most 8 MB for zstd.
        return 2**21

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        if int(chunks.unit[i]) < 0:
            nothing = [] if skip else [CsvRow(0, [], NO_ROWS)]
            yield _slice(nothing, options.columns or (), options.columns or (), True)
            return
        rows = _rows(lines_of(files, file, 0, None, options), self.delimiter, options)
        head = [row for row in [next(rows, None)] if row is not None]
        while head and head[-1].problem and not self.header:
            if (row := next(rows, None)) is None:
                break
            head.append(row)
        names = self._names(head[-1] if head else None, options)
        if not self.header:
            rows = chain(head, rows)
        rows = _checked(rows, len(names))
        wanted = names if options.columns is None else options.columns
        left, held = skip * options.slice_rows, list[CsvRow]()
        for row in rows:
            if left:
                left -= 1
                continue
            if len(held) == options.slice_rows:
                full, held = held, [row]
                yield _slice(full, names, wanted, False)
                continue
            held.append(row)
        yield _slice(held, names, wanted, True)

    def _names(self, first: CsvRow | None, options: ReadOptions) -> Sequence[str]:
        """Return the names of the columns. Raises BadFile if a requested one is missing."""
        if first is None or (first.problem and not self.header):
            return options.columns or ()
        if first.problem:
            raise BadFile(
                f"expected a header in the first row, got a broken row: {first.problem}",
                f"repair the row, or set format={self.name + '-no-header'!r}",
            )
        names = first.fields if self.header else [f"f{k}" for k in range(len(first.fields))]
        if twice := sorted({name for name in names if names.count(name) > 1 or not name}):
            raise BadFile(
                f"expected different names in the header, got {twice[0]!r} twice or empty",
                f"rename the column, or set format={self.name + '-no-header'!r}",
            )
        check_refused(names, options)
        if missing := [name for name in options.columns or () if name not in names]:
            raise missing_columns_error(missing, dict.fromkeys(names, "string"))
        return names


class _TooLong(Exception):
    """Raised inside a row that exceeds ``max_sample_bytes``."""


class _Source:
    """The lines of a file as the csv module reads them, with the extent of the current row."""

    def __init__(self, lines: Iterator[TextLine], limit: int) -> None:
        self._lines, self._limit = lines, limit
        self.start, self.size, self.problem = -1, 0, ""

    def begin(self) -> None:
        self.start, self.size, self.problem = -1, 0, ""

    def __iter__(self) -> _Source:
        return self

    def __next__(self) -> str:
        offset, data, problem = next(self._lines)
        if self.start < 0:
            self.start = offset
        self.size += len(data) + 1
        if self.size > self._limit:
            # Only a quoted line break makes a row of several lines: this line began in quotes. The
            # rest of the row is dropped, so that its lines are never read as rows.
            while data.count(b'"') % 2 == 0 and (line := next(self._lines, None)) is not None:
                data = line.data
            raise _TooLong
        text, fault = ("", problem) if problem else decoded(data, "line")
        if fault and not self.problem:
            self.problem = fault
        # The quotes of an unreadable line still count.
        return (data.decode(errors="replace") if fault else text) + "\n"


def _rows(lines: Iterator[TextLine], delimiter: str, options: ReadOptions) -> Iterator[CsvRow]:
    """Yield the rows; blank lines between rows are skipped."""
    if csv.field_size_limit() < _FIELD_LIMIT:  # process-wide; the default is 128 kB
        csv.field_size_limit(_FIELD_LIMIT)
    source = _Source(lines, options.max_sample_bytes + 1)
    reader = csv.reader(source, delimiter=delimiter, strict=True)
    while True:
        source.begin()
        fields: list[str] = []
        problem = ""
        try:
            fields = next(reader)
        except StopIteration:
            return
        except _TooLong:
            problem = (
                f"expected a row of at most max_sample_bytes={options.max_sample_bytes} bytes, "
                "got a longer one; check its quotes"
            )
        except csv.Error as error:
            problem = f"expected a valid row, got: {error}; check its quotes"
        problem = source.problem or problem
        if fields or problem:
            yield CsvRow(source.start, fields, problem)


def _checked(rows: Iterator[CsvRow], width: int) -> Iterator[CsvRow]:
    """Yield the rows, those of another number of fields as unreadable; at least one row."""
    nothing = True
    for row in rows:
        nothing = False
        if not row.problem and len(row.fields) != width:
            got = len(row.fields)
            row = CsvRow(row.offset, [], f"expected {width} fields as in the first row, got {got}")
        yield row
    if nothing:
        yield CsvRow(0, [], NO_ROWS)


def _slice(
    rows: Sequence[CsvRow], names: Sequence[str], wanted: Sequence[str], last: bool
) -> RawSlice:
    bad: BadRows = [(k, row.problem) for k, row in enumerate(rows) if row.problem]
    good = [row.fields for row in rows if not row.problem]
    at = {name: k for k, name in enumerate(names)}
    # One column gives the number of rows where none is requested.
    chosen = list(wanted) or list(names[:1])
    table = pa.table(
        {
            name: pa.array([fields[at[name]] for fields in good], pa.large_string())
            for name in chosen
        }
    )
    offsets = np.array([row.offset for row in rows], np.int64)
    return RawSlice(offsets, table.select(list(wanted)), bad, last)
