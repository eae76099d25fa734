"""Reader of plain text: one row per line, per paragraph or per file, with the column ``text``.

Lines of plain files are read in byte ranges without a scan. Other units, and compressed files, are
one chunk per file. The row of a unit is the byte offset of its start in the decompressed text.
Blank lines are not rows. A paragraph is a run of lines that are not blank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from overlord.sources.base import (
    NO_ROWS,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    make_chunks,
    missing_columns_error,
)
from overlord.sources.decompress import BrokenStream, TextLine
from overlord.sources.files import BLOCK
from overlord.sources.tables import BadRows
from overlord.sources.text_input import (
    BOM,
    COMPRESSIONS,
    check_mark,
    decoded,
    is_packed,
    lines_of,
    pieces_of,
    whole_file_chunk,
)

if TYPE_CHECKING:
    from overlord.sources.files import Files

COLUMN = "text"


class TextUnit(NamedTuple):
    """One row of a text file: its byte offset, and its bytes or the reason why it has none."""

    offset: int
    data: bytes
    problem: str = ""


class Text:
    """Format of text files in units of ``unit``: "line", "paragraph" or "file"."""

    suffixes = tuple(".txt" + packed for packed in COMPRESSIONS)
    indexed = False

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        whole = whole_file_chunk(file)
        if not file.size or self.unit != "line" or is_packed(file.path):
            return whole
        starts = range(0, file.size, options.chunk_bytes)
        stops = [min(start + options.chunk_bytes, file.size) for start in starts]
        return make_chunks(
            [(a, b, k, -1, b - a) for k, (a, b) in enumerate(zip(starts, stops, strict=True))]
        )

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return {COLUMN: "string"}

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        # A decompressor holds a window: 32 kB for gzip, usually at most 8 MB for zstd.
        return 2 * BLOCK if int(chunks.stop[i]) >= 0 else 2**21

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        if missing := [name for name in options.columns or () if name != COLUMN]:
            raise missing_columns_error(missing, {COLUMN: "string"})
        if int(chunks.unit[i]) < 0:
            units: Iterator[TextUnit] = iter([TextUnit(0, b"", NO_ROWS)])
        elif self.unit == "file":
            units = _whole(files, file, options)
        else:
            stop = int(chunks.stop[i])
            lines = lines_of(files, file, int(chunks.start[i]), None if stop < 0 else stop, options)
            units = _paragraphs(lines, options) if self.unit == "paragraph" else _filled(lines)
            if stop < 0:
                units = _at_least_one(units)
        rows: list[TextUnit] = []
        left = skip * options.slice_rows
        for unit in units:
            if left:
                left -= 1
                continue
            if len(rows) == options.slice_rows:
                full, rows = rows, [unit]
                yield self._slice(full, options, False)
                continue
            rows.append(unit)
        yield self._slice(rows, options, True)

    def _slice(self, units: Sequence[TextUnit], options: ReadOptions, last: bool) -> RawSlice:
        texts: list[str] = []
        bad: BadRows = []
        for k, unit in enumerate(units):
            text, reason = ("", unit.problem) if unit.problem else decoded(unit.data, self.unit)
            if reason:
                bad.append((k, reason))
            else:
                texts.append(text)
        table = pa.table({COLUMN: pa.array(texts, pa.large_string())})
        offsets = np.array([unit.offset for unit in units], np.int64)
        wanted = [COLUMN] if options.columns is None else list(options.columns)
        return RawSlice(offsets, table.select(wanted), bad, last)


def _filled(lines: Iterator[TextLine]) -> Iterator[TextUnit]:
    for offset, data, problem in lines:
        if problem or data.strip():
            yield TextUnit(offset, data.removesuffix(b"\r"), problem)


def _paragraphs(lines: Iterator[TextLine], options: ReadOptions) -> Iterator[TextUnit]:
    """Yield runs of lines that are not blank, joined by line breaks."""
    start, held, size, problem = 0, list[bytes](), 0, ""
    for offset, data, fault in lines:
        if not (fault or data.strip()):
            if held or problem:
                yield TextUnit(start, b"\n".join(held), problem)
            held, size, problem = [], 0, ""
            continue
        if not (held or problem):
            start = offset
        size += len(data) + 1
        if fault or size > options.max_sample_bytes:
            problem = problem or fault or _too_long("paragraph", options)
            held = []
        if not problem:
            held.append(data.removesuffix(b"\r"))
    if held or problem:
        yield TextUnit(start, b"\n".join(held), problem)


def _whole(files: Files, file: File, options: ReadOptions) -> Iterator[TextUnit]:
    """Yield the only row of a file."""
    held, size, problem = list[bytes](), 0, ""
    with files.open(file) as handle:
        try:
            for piece in pieces_of(handle, file):
                if not held:
                    check_mark(piece)
                size += len(piece)
                if size > options.max_sample_bytes:
                    problem = _too_long("file", options)
                    break
                held.append(piece)
        except BrokenStream as error:
            problem = str(error)
    data = b"" if problem else b"".join(held).removeprefix(BOM)
    yield TextUnit(0, data, problem or ("" if data.strip() else NO_ROWS))


def _too_long(unit: str, options: ReadOptions) -> str:
    limit = options.max_sample_bytes
    return f"expected a {unit} of at most max_sample_bytes={limit} bytes, got a longer one"


def _at_least_one(units: Iterator[TextUnit]) -> Iterator[TextUnit]:
    """Yield the units, or one unreadable unit if there are none."""
    first = next(units, None)
    yield first if first is not None else TextUnit(0, b"", NO_ROWS)
    yield from units
