"""Reader of JSON lines: plain files in byte ranges (no scan), .gz and .zst as one stream each.

A line is a row if it is a JSON object by RFC 8259 in UTF-8. Blank lines are skipped. Any other line
is an unreadable row, even if a lenient parser could read part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from overlord.checks import pip_install
from overlord.sources import tables as cols
from overlord.sources.base import (
    NO_ROWS,
    BadFile,
    Chunks,
    File,
    RawSlice,
    ReadOptions,
    make_chunks,
    no_rows_chunk,
)
from overlord.sources.decompress import TextLine, gunzip, read_plain, split_lines, unzstd
from overlord.sources.files import BLOCK

if TYPE_CHECKING:
    from overlord.sources.files import Files

_UNPACK = {".gz": gunzip, ".zst": unzstd}
_BOM = b"\xef\xbb\xbf"


class Jsonl:
    name = "jsonl"
    suffixes = tuple(a + b for a in (".jsonl", ".ndjson", ".json") for b in ("", ".gz", ".zst"))
    indexed = False

    def chunks(self, files: Files, file: File, options: ReadOptions) -> Chunks:
        if not file.size:
            return no_rows_chunk()
        if _suffix(file.path) == ".zst" and find_spec("zstandard") is None:
            raise BadFile(
                "expected the package zstandard to read .zst files, got none", pip_install("zstd")
            )
        if _suffix(file.path) in _UNPACK:
            return make_chunks([(0, -1, 0, -1, file.size)])
        starts = range(0, file.size, options.chunk_bytes)
        stops = [min(s + options.chunk_bytes, file.size) for s in starts]
        return make_chunks(
            [(a, b, k, -1, b - a) for k, (a, b) in enumerate(zip(starts, stops, strict=True))]
        )

    def schema(self, files: Files, file: File, options: ReadOptions) -> dict[str, str] | None:
        return None

    def held_bytes(self, chunks: Chunks, i: int, options: ReadOptions) -> int:
        # A decompressor holds a window: 32 kB for gzip, usually at most 8 MB for zstd.
        return 2 * BLOCK if int(chunks.stop[i]) >= 0 else 2**21

    def read(
        self, files: Files, file: File, chunks: Chunks, i: int, options: ReadOptions, skip: int = 0
    ) -> Iterator[RawSlice]:
        if int(chunks.unit[i]) < 0:
            rows = [TextLine(0, b"", NO_ROWS)] if not skip else []
            yield _slice(rows, options, True)
            return
        with files.open(file) as handle:
            yield from _slices(_lines(handle, file, chunks, i, options), options, skip)


def _lines(
    handle: pa.NativeFile, file: File, chunks: Chunks, i: int, options: ReadOptions
) -> Iterator[TextLine]:
    start, stop, limit = int(chunks.start[i]), int(chunks.stop[i]), options.max_sample_bytes
    unpack = _UNPACK.get(_suffix(file.path))
    if unpack is None:
        handle.seek(max(0, start - 1))
        yield from split_lines(read_plain(handle, file.size), start, stop, limit, partial=start > 0)
        return
    nothing = True
    for line in split_lines(unpack(handle, file.size), 0, None, limit, partial=False):
        nothing = False
        yield line
    if nothing:
        yield TextLine(0, b"", NO_ROWS)


def _slices(lines: Iterator[TextLine], options: ReadOptions, skip: int) -> Iterator[RawSlice]:
    """Yield slices of ``slice_rows`` rows, starting at slice ``skip``; skip blank lines.

    A full slice is held until the next row is read, so that the last slice can be marked.
    """
    step, left = options.slice_rows, skip * options.slice_rows
    rows: list[TextLine] = []
    for line in lines:
        if line.data[:1] != b"{" and not line.problem and not line.data.strip():
            continue
        if left:
            left -= 1
            continue
        if len(rows) == step:
            out, rows = _slice(rows, options, False), [line]
            yield out
            continue
        rows.append(line)
    yield _slice(rows, options, True)


def _slice(rows: Sequence[TextLine], options: ReadOptions, last: bool) -> RawSlice:
    offsets = np.array([line.offset for line in rows], np.int64)
    names = (
        None
        if options.columns is None
        else (*options.columns, *(c for c in options.refused if c not in options.columns))
    )
    values, bad = _decode(rows, names)
    good = len(rows) - len(bad)
    if names is None:
        columns = cols.columns_of(values, None)
    else:
        columns = {name: [getattr(v, f"f{k}") for v in values] for k, name in enumerate(names)}
    cols.check_values(columns, options)
    table, misfits = cols.table_of(columns, good, decoded=True)
    if misfits:
        # Misfits are numbered among the readable rows only: translate them to rows of the slice.
        numbers = np.delete(np.arange(len(rows)), [i for i, _ in bad])
        bad = sorted(bad + [(int(numbers[i]), reason) for i, reason in misfits])
    return RawSlice(offsets, table, bad, last)


def _decode(
    rows: Sequence[TextLine], columns: tuple[str, ...] | None
) -> tuple[list[Any], cols.BadRows]:
    decode = _decoder(columns).decode
    values, bad = [], []
    for i, (offset, data, problem) in enumerate(rows):
        if problem:
            bad.append((i, problem))
            continue
        try:
            if not data.isascii():
                data.decode()  # the decoder does not validate fields that it skips
                if offset == 0 and data.startswith(_BOM):
                    data = data[3:]
            values.append(decode(data))
        except (ValueError, RecursionError) as error:
            bad.append((i, _reason(error)))
    return values, bad


@lru_cache(maxsize=1024)
def _decoder(columns: tuple[str, ...] | None) -> msgspec.json.Decoder[Any]:
    """Return a decoder of lines to dicts, or to structs with the fields f0, f1, ... of ``columns``.

    The decoder of structs builds no objects for the other fields of a line.
    """
    if columns is None:
        return msgspec.json.Decoder(dict)
    fields = [(f"f{k}", Any, None) for k in range(len(columns))]
    kind = msgspec.defstruct(
        "Row", fields, rename={f"f{k}": name for k, name in enumerate(columns)}, gc=False
    )
    return msgspec.json.Decoder(kind)


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return (
            f"expected UTF-8, got 0x{error.object[error.start]:02x} at byte "
            f"{error.start} of the line"
        )
    if isinstance(error, RecursionError):
        return "expected valid JSON, got one that is nested too deeply"
    text = str(error)
    if text.startswith("Expected `object`"):
        return f"expected a JSON object on the line, got {text.rpartition('got ')[2]}"
    return f"expected valid JSON, got: {text.removeprefix('JSON is malformed: ')}"


def _suffix(path: str) -> str:
    return "." + path.rpartition(".")[2].lower()
