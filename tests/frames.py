"""Handmade frames, for the tests of frames and of the codec."""

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
    """Encode a value and decode it."""
    return decode(*unpack(joined(*encode(value))))


def tree(value: Any) -> bytes:
    """Return the header of a value."""
    return msgspec.msgpack.encode(value)


def with_crc(frame: bytes) -> bytes:
    """Return the frame with its correct checksum."""
    columns, header = struct.unpack_from("<II", frame, 8)
    end = PREFIX_BYTES + 88 * columns + header
    return (
        frame[:28]
        + struct.pack("<I", zlib.crc32(frame[32:end], zlib.crc32(frame[:28])))
        + frame[32:]
    )
