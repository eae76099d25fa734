"""Frames by hand, for the tests of frames and of what travels in them."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import msgspec
import numpy as np

from overlord.transport.codec import decode, encode
from overlord.transport.frame import PREFIX_BYTES, pack, unpack


def joined(header: bytes, columns: list[np.ndarray]) -> bytes:
    return b"".join(bytes(piece) for piece in pack(header, columns))


def sent(value: Any) -> Any:
    """A value over the wire and back."""
    return decode(*unpack(joined(*encode(value))))


def tree(value: Any) -> bytes:
    """A header by hand."""
    return msgspec.msgpack.encode(value)


def with_crc(frame: bytes) -> bytes:
    """The frame with the checksum it ought to have."""
    columns, header = struct.unpack_from("<II", frame, 8)
    end = PREFIX_BYTES + 88 * columns + header
    return (
        frame[:28]
        + struct.pack("<I", zlib.crc32(frame[32:end], zlib.crc32(frame[:28])))
        + frame[32:]
    )
