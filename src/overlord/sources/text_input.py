"""Input shared by the readers of plain text: compression, chunks and the check of the encoding."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

from overlord.checks import pip_install
from overlord.sources.base import BadFile, Chunks, File, ReadOptions, make_chunks, no_rows_chunk
from overlord.sources.decompress import TextLine, gunzip, read_plain, split_lines, unzstd

if TYPE_CHECKING:
    import pyarrow as pa

    from overlord.sources.files import Files

COMPRESSIONS = ("", ".gz", ".zst")
BOM = b"\xef\xbb\xbf"
_UNPACK = {".gz": gunzip, ".zst": unzstd}
_OTHER_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


def is_packed(path: str) -> bool:
    return path.lower().endswith(COMPRESSIONS[1:])


def whole_file_chunk(file: File) -> Chunks:
    """Return the single chunk of a text file. Raises BadFile if zstandard is missing."""
    if not file.size:
        return no_rows_chunk()
    if file.path.lower().endswith(".zst") and find_spec("zstandard") is None:
        raise BadFile(
            "expected the package zstandard to read .zst files, got none", pip_install("zstd")
        )
    return make_chunks([(0, -1, 0, -1, file.size)])


def pieces_of(handle: pa.NativeFile, file: File) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file. Raises BrokenStream for invalid compression."""
    unpack = _UNPACK.get("." + file.path.lower().rpartition(".")[2], read_plain)
    return unpack(handle, file.size)


def check_mark(start: bytes) -> None:
    """Raise BadFile if the first bytes of a file are the mark of another encoding."""
    if (other := _OTHER_MARKS.get(start[:2])) is not None:
        raise BadFile(
            f"expected UTF-8, got the byte order mark of {other}",
            f"convert the file: iconv -f {other} -t UTF-8",
        )


def lines_of(
    files: Files, file: File, start: int, stop: int | None, options: ReadOptions
) -> Iterator[TextLine]:
    """Yield the lines that start in [start, stop); ``stop`` None is the end.

    The byte order mark of UTF-8 is removed. Compressed files have only one range.
    """
    with files.open(file) as handle:
        if start:
            handle.seek(start - 1)
        lines = split_lines(
            pieces_of(handle, file), start, stop, options.max_sample_bytes, partial=start > 0
        )
        for line in lines:
            if line.offset == 0:
                check_mark(line.data)
                if line.data.startswith(BOM):
                    line = TextLine(0, line.data[len(BOM) :], line.problem)
            yield line


def decoded(data: bytes, what: str) -> tuple[str, str]:
    """Return a text and an empty reason, or an empty text and the reason why it is unreadable."""
    try:
        return data.decode(), ""
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        reason = f"expected UTF-8, got 0x{byte:02x} at byte {error.start} of the {what}"
        return "", f"{reason}; convert the file with iconv"
