"""Decompression in bounded pieces, and splitting of pieces into lines.

At most one piece and one line are held in memory.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from overlord.sources.base import short_read
from overlord.sources.files import BLOCK

if TYPE_CHECKING:
    import pyarrow as pa

# Bytes that are decompressed at once. A zstd block of 4 bytes can expand to 128 kB, so hostile
# data expand to at most 32 MB.
ZSTD_FEED = 1024


class BrokenStream(Exception):
    """Raised where compressed data end early or become invalid.

    The data are at fault, never storage.
    """


class Unpacker(Protocol):
    """A decompressor of zlib."""

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes: ...


class TextLine(NamedTuple):
    offset: int  # offset of its first byte in the (decompressed) text
    data: bytes  # without the line break; empty if there is a problem
    problem: str = ""  # reason why the line is unreadable; empty if it is readable


def read_plain(handle: pa.NativeFile, size: int) -> Iterator[bytes]:
    """Yield the bytes of a file from its current position to its end.

    Raises StorageUnreachable if the file ends before ``size``, its indexed size.
    """
    while block := handle.read(BLOCK):
        yield block
    if (at := handle.tell()) < size:
        raise short_read(size - at)


def gunzip(handle: pa.NativeFile, size: int) -> Iterator[bytes]:
    """Yield the text of a .gz file, member after member.

    Raises BrokenStream, after all valid text, if the data are invalid or truncated.
    """
    unpacker, inside = zlib.decompressobj(31), False
    for data in read_plain(handle, size):
        while data:
            if unpacker.eof:
                unpacker, inside = zlib.decompressobj(31), False
            # Some writers pad with zeros after a member.
            if not inside and not (data := data.lstrip(b"\0")):
                break
            inside, before = True, unpacker.copy()
            try:
                out = unpacker.decompress(data, BLOCK)
            except zlib.error as error:
                yield from _salvage(before, data)
                raise BrokenStream(f"expected valid gzip data, got: {error}") from error
            if out:
                yield out
            data = unpacker.unused_data if unpacker.eof else unpacker.unconsumed_tail
    if inside and not unpacker.eof:
        while out := unpacker.decompress(b"", BLOCK):
            yield out
        if not unpacker.eof:
            raise BrokenStream(
                "expected the end of the gzip data, got the end of the file: it is truncated"
            )


def _salvage(unpacker: Unpacker, data: bytes) -> Iterator[bytes]:
    """Yield the text of ``data`` up to its first invalid byte.

    zlib returns nothing of the piece in which it fails, so the bytes are passed one by one.
    """
    out = b""
    try:
        for i in range(len(data)):
            out += unpacker.decompress(data[i : i + 1])
            if len(out) >= BLOCK:
                yield out
                out = b""
    except zlib.error:
        pass
    if out:
        yield out


def unzstd(handle: pa.NativeFile, size: int) -> Iterator[bytes]:
    """Yield the text of a .zst file, frame after frame.

    Raises BrokenStream, after all valid text, if the data are invalid or truncated.
    """
    import zstandard  # an extra; the index refuses such files without it

    unpacker, inside = zstandard.ZstdDecompressor().decompressobj(), False
    for block in read_plain(handle, size):
        for at in range(0, len(block), ZSTD_FEED):
            data = block[at : at + ZSTD_FEED]
            while data:
                if unpacker.eof:
                    unpacker = zstandard.ZstdDecompressor().decompressobj()
                inside = True
                try:
                    out = unpacker.decompress(data)
                except zstandard.ZstdError as error:
                    raise BrokenStream(f"expected valid zstd data, got: {error}") from error
                if out:
                    yield out
                data = unpacker.unused_data if unpacker.eof else b""
    if inside and not unpacker.eof:
        raise BrokenStream(
            "expected the end of the zstd data, got the end of the file: it is truncated"
        )


def split_lines(
    pieces: Iterator[bytes], start: int, stop: int | None, limit: int, partial: bool
) -> Iterator[TextLine]:
    """Yield the lines that start in [start, stop), blank ones included.

    ``stop`` None: the end. ``pieces`` begin at ``start``, or one byte before if ``partial``. With
    ``partial`` the text up to the first line break belongs to the previous line and is dropped. A
    line of more than ``limit`` bytes has a problem instead of its data. Broken compression ends
    the lines with an empty line that has the problem.
    """
    at = start - 1 if partial else start  # start of the current line
    pos, held, size, dropping = at, list[bytes](), 0, partial
    try:
        for piece in pieces:
            first, *rest = piece.split(b"\n")
            pos += len(piece)
            size += len(first)
            if not dropping:
                held.append(first)
            if size > limit:
                dropping, held = True, []
            if rest:
                if not (partial and at < start):
                    yield _line(at, held, size, limit)
                at += size + 1
                for data in rest[:-1]:
                    if stop is not None and at >= stop:
                        return
                    yield _line(at, [data], len(data), limit)
                    at += len(data) + 1
                held, size, dropping = [rest[-1]], len(rest[-1]), len(rest[-1]) > limit
            if stop is not None and (at >= stop or (dropping and pos >= stop)):
                # the current line starts outside the range, or is the last and too long
                break
    except BrokenStream as error:
        if stop is None or at < stop:
            yield TextLine(at, b"", str(error))
        return
    if size and at >= start and (stop is None or at < stop):
        yield _line(at, held, size, limit)


def _line(at: int, held: list[bytes], size: int, limit: int) -> TextLine:
    if size > limit:
        problem = f"expected a line of at most max_sample_bytes={limit} bytes, got a longer one"
        return TextLine(at, b"", problem)
    return TextLine(at, held[0] if len(held) == 1 else b"".join(held))
