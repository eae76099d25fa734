"""Bytes of an MDS shard, plain or compressed, read front to back in bounded pieces.

A compressed shard is decompressed as it is read, so memory holds the samples of a slice and not the
shard. Snappy is the exception: its format has no end of a piece, so the shard is held whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa

from overlord.sources.base import BadFile, is_storage_fault, short_read
from overlord.sources.files import BLOCK

if TYPE_CHECKING:
    from overlord.sources.mds_index import Shard

# Codecs of Arrow by the name of a compression in the index.
CODECS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "bz2": "bz2", "snappy": "snappy"}
SNAPPY_RATIO = 64  # bytes that one byte of snappy can become, at most
_BROKEN = (pa.ArrowException, OSError, ValueError, MemoryError, EOFError)


class BrokenShard(Exception):
    """Raised where a shard cannot be decompressed, or its offsets are invalid.

    The data are at fault, never storage.
    """


class ShardBytes(Protocol):
    """Bytes of a shard; each read begins at or after the end of the one before."""

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the bytes from ``start`` up to ``stop``. Raises BrokenShard."""
        ...


class PlainBytes:
    """Bytes of a shard that is stored as it is."""

    def __init__(self, handle: pa.NativeFile):
        self._handle = handle

    def read(self, start: int, stop: int) -> np.ndarray:
        if start == stop:
            return np.zeros(0, np.uint8)
        self._handle.seek(start)
        buffer = self._handle.read_buffer(stop - start)
        if buffer.size < stop - start:
            raise short_read(stop - start - buffer.size)
        return np.frombuffer(buffer, np.uint8)


class PackedBytes:
    """Bytes of a compressed shard, from an iterator over its decompressed pieces."""

    def __init__(self, pieces: Iterator[bytes | memoryview]):
        self._pieces, self._at = pieces, 0
        self._held: list[np.ndarray] = []  # from ``_at`` on

    def read(self, start: int, stop: int) -> np.ndarray:
        self._drop(start)
        end = self._at + sum(map(len, self._held))
        while end < stop:
            end += self._pull()
            self._drop(start)
        data = np.concatenate([np.zeros(0, np.uint8), *self._held])
        self._held = [data]
        return data[start - self._at : stop - self._at]

    def _pull(self) -> int:
        try:
            piece = next(self._pieces, b"")
        except _BROKEN as error:
            if is_storage_fault(error):
                raise
            raise BrokenShard(f"expected valid compressed data, got: {_text(error)}") from error
        if not len(piece):
            raise BrokenShard("expected more compressed data, got its end: it is truncated")
        self._held.append(np.frombuffer(piece, np.uint8))
        return len(piece)

    def _drop(self, start: int) -> None:
        """Drop the pieces before ``start``."""
        while self._held and self._at + len(self._held[0]) <= start:
            self._at += len(self._held.pop(0))


def packed_bytes(handle: pa.NativeFile, size: int, shard: Shard) -> PackedBytes:
    """Return the bytes of a compressed shard; ``size``: of the compressed file. Raises BadFile."""
    check_codec(shard.compression)
    return PackedBytes(_unpacked(handle, size, shard))


def check_codec(compression: str) -> None:
    """Raise BadFile if a compression is unknown, or missing in the installed pyarrow."""
    if compression not in CODECS:
        raise BadFile(
            f"expected a compression of {', '.join(CODECS)}, got {compression!r:.40}",
            "write the dataset again with one of them",
        )
    if not pa.Codec.is_available(CODECS[compression]):
        raise BadFile(
            f"expected a pyarrow with {CODECS[compression]} to read shards compressed with "
            f"{compression}, got one without",
            "pip install --force-reinstall pyarrow: its wheels have every codec",
        )


def _unpacked(handle: pa.NativeFile, size: int, shard: Shard) -> Iterator[bytes | memoryview]:
    """Yield the decompressed bytes of a shard in pieces."""
    codec = CODECS[shard.compression]
    if codec == "snappy":
        if shard.nbytes > SNAPPY_RATIO * size:
            raise ValueError(f"{size} bytes of snappy cannot become {shard.nbytes}")
        data = handle.read(size)
        if len(data) < size:
            raise short_read(size - len(data))
        yield memoryview(pa.decompress(data, shard.nbytes, codec=codec))
        return
    with pa.CompressedInputStream(handle, codec) as text:
        while piece := text.read(BLOCK):
            yield piece


def _text(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def read_offsets(data: ShardBytes, shard: Shard) -> np.ndarray:
    """Return the first byte of each sample, then the end. Raises BrokenShard.

    The offsets must be in order, and end with the shard: no sample is lost, and none read twice.
    """
    n, head = shard.samples, 4 * (shard.samples + 2)
    words = data.read(0, head).copy().view("<u4").astype(np.int64)
    if int(words[0]) != n:
        raise BrokenShard(f"expected {n} samples as in index.json, got {words[0]}")
    offsets = words[1:]
    if int(offsets[0]) < head or int(offsets[-1]) != shard.nbytes:
        raise BrokenShard(
            f"expected samples from byte {head} or later to byte {shard.nbytes}, got offsets from "
            f"{offsets[0]} to {offsets[-1]}"
        )
    if bool((wrong := offsets[1:] < offsets[:-1]).any()):
        k = int(np.argmax(wrong))
        raise BrokenShard(
            f"expected offsets in order, got {offsets[k]} for sample {k} and {offsets[k + 1]} "
            "after it"
        )
    return offsets
