"""Frames by example: the layout byte by byte, views instead of copies, and the text of every
refusal.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Any

import numpy as np
import pytest

from overlord.errors import FrameError
from overlord.transport.frame import (
    ALIGN,
    MAX_COLUMNS,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    frame_bytes,
    pack,
    size_of,
    unpack,
)
from tests.frames import joined, with_crc

# the layout


def test_a_frame_is_laid_out_as_the_page_on_the_channel_says():
    frame = joined(
        b"head", [np.array([1, 2, 3], "<i4"), np.zeros((2, 0), bool), np.array(2.5, "<f8")]
    )
    start = struct.pack("<4sHHIIQI", b"OVFR", 1, 0, 3, 4, 392, 0)
    table = struct.pack("<BB6xQQ8Q", 3, 1, 320, 12, 3, 0, 0, 0, 0, 0, 0, 0)
    table += struct.pack("<BB6xQQ8Q", 0, 2, 384, 0, 2, 0, 0, 0, 0, 0, 0, 0)
    table += struct.pack("<BB6xQQ8Q", 11, 0, 384, 8, 0, 0, 0, 0, 0, 0, 0, 0)
    crc = struct.pack("<I", zlib.crc32(start + table + b"head"))
    assert frame == start + crc + table + b"head" + bytes(20) + struct.pack("<3i", 1, 2, 3) + bytes(
        52
    ) + struct.pack("<d", 2.5)


def test_columns_are_not_copied_when_packed_and_are_views_of_the_buffer_when_unpacked():
    column = np.arange(1000)
    pieces = pack(b"", [column])
    column[0] = 77
    buffer = np.frombuffer(b"".join(pieces), np.uint8).copy()
    found = unpack(buffer).columns[0]
    assert found[0] == 77
    assert np.shares_memory(found, buffer)
    assert not found.flags.writeable
    assert buffer.flags.writeable


def test_an_unpacked_column_keeps_its_buffer_alive():
    buffer = np.frombuffer(joined(b"", [np.arange(1000)]), np.uint8).copy()
    column = unpack(buffer).columns[0]
    del buffer
    assert column.sum() == 499_500


def test_every_column_starts_at_a_multiple_of_64_bytes():
    frame = np.frombuffer(
        joined(b"abc", [np.zeros(n, np.uint8) for n in (1, 63, 64, 65, 0, 7)]), np.uint8
    )
    base = frame.__array_interface__["data"][0]
    assert {(c.__array_interface__["data"][0] - base) % ALIGN for c in unpack(frame).columns} == {0}


def test_the_size_is_known_before_a_frame_is_made_and_told_by_its_first_bytes():
    header, columns = b"some header", [np.zeros(n, np.float32) for n in (0, 1, 100)]
    frame = joined(header, columns)
    assert size_of(header, columns) == len(frame) == frame_bytes(frame[:PREFIX_BYTES])


@pytest.mark.parametrize(
    "make",
    [
        bytes,
        bytearray,
        memoryview,
        lambda b: np.frombuffer(b, np.uint8),
        lambda b: np.frombuffer(b, "<u4"),
    ],
)
def test_a_frame_may_come_in_any_buffer(make: Any):
    frame = joined(b"1234", [np.array([7, 8, 9], np.int32)])
    assert unpack(make(frame)).columns[0].tolist() == [7, 8, 9]


# error texts


def test_another_version_is_refused_with_both_numbers():
    frame = joined(b"", [])
    with pytest.raises(
        FrameError, match="expected version 1, got version 7; run the same version of Overlord"
    ):
        unpack(with_crc(frame[:4] + b"\7\0" + frame[6:]))


@pytest.mark.parametrize(
    ("at", "bytes_", "words"),
    [
        (0, b"HTTP", "expected a frame that starts with b'OVFR', got b'HTTP'"),
        (6, b"\1", "reserved"),
        (24, b"\1", "reserved"),
        (8, struct.pack("<I", MAX_COLUMNS + 1), "at most 65536 columns"),
        (12, struct.pack("<I", MAX_HEADER_BYTES + 1), "bytes of header"),
        (16, struct.pack("<Q", MAX_FRAME_BYTES + 1), f"{MAX_FRAME_BYTES} bytes in all"),
        (
            16,
            struct.pack("<Q", 10),
            "expected room for 1 columns and 2 bytes of header, got 10 bytes",
        ),
        (16, struct.pack("<Q", 128), "expected 128 bytes, as the frame states, got 136"),
        (28, b"????", "expected checksum 3f3f3f3f"),
        (120, b"?", "checksum"),
    ],
)
def test_a_damaged_start_is_refused_in_words(at: int, bytes_: bytes, words: str):
    frame = joined(b"hi", [np.arange(1)])
    with pytest.raises(FrameError, match=re.escape(words)):
        unpack(frame[:at] + bytes_ + frame[at + len(bytes_) :])


def entry(
    code: int = 4, dims: int = 1, offset: int = 128, nbytes: int = 8, shape: tuple[int, ...] = (1,)
) -> bytes:
    return struct.pack("<BB6xQQ8Q", code, dims, offset, nbytes, *shape, *(0,) * (8 - len(shape)))


@pytest.mark.parametrize(
    "lie",
    [
        entry()[:7] + b"\1" + entry()[8:],
        entry(code=12),
        entry(code=255),
        entry(dims=9),
        entry(dims=2),
        entry(dims=0),
        entry(dims=1, shape=(1, 1)),
        entry(offset=0),
        entry(offset=64),
        entry(offset=192),
        entry(offset=129),
        entry(offset=2**64 - 64),
        entry(nbytes=16, shape=(2,)),
        entry(nbytes=0),
        entry(nbytes=2**64 - 8, shape=(2**61 - 1,)),
        entry(shape=(2**61 + 1,)),
        entry(dims=2, shape=(2**32, 2**32), nbytes=0),
        entry(dims=3, shape=(2**63, 0, 2**63), nbytes=0),
        entry(shape=(0,), nbytes=0),
    ],
    ids=lambda lie: lie.hex()[:40],
)
def test_a_table_that_lies_is_refused_though_its_checksum_is_right(lie: bytes):
    frame = joined(b"hi", [np.arange(1)])
    assert frame[PREFIX_BYTES : PREFIX_BYTES + 88] == entry(), (
        "the lies differ from the truth in one thing each"
    )
    with pytest.raises(FrameError, match=r"column|end of the last"):
        unpack(with_crc(frame[:PREFIX_BYTES] + lie + frame[PREFIX_BYTES + 88 :]))


def test_columns_that_overlap_are_refused():
    frame = joined(b"", [np.arange(8), np.arange(8)])
    second = PREFIX_BYTES + 88
    first_offset = frame[PREFIX_BYTES + 8 : PREFIX_BYTES + 16]
    with pytest.raises(FrameError, match="column 1"):
        unpack(with_crc(frame[: second + 8] + first_offset + frame[second + 16 :]))


@pytest.mark.parametrize(
    "buffer", ["text", 3, None, np.zeros(0, np.uint8), np.zeros((64, 64), np.uint8)[:, ::2], b""]
)
def test_what_is_no_buffer_of_bytes_is_no_frame(buffer: Any):
    with pytest.raises(FrameError, match="expected"):
        unpack(buffer)


@pytest.mark.parametrize(
    "column",
    [
        np.array(["x"]),
        np.array([None]),
        np.zeros(2, ">i4"),
        np.zeros(2, complex),
        np.zeros((4, 4)).T[1:],
        np.zeros((1,) * 9),
    ],
)
def test_an_array_that_no_frame_can_carry_is_refused_by_its_number(column: np.ndarray):
    with pytest.raises(FrameError, match="column 1: expected an array"):
        pack(b"", [np.zeros(1), column])


def test_what_is_too_much_for_a_frame_is_refused_when_packed():
    with pytest.raises(FrameError, match="send large data as numpy arrays"):
        pack(bytes(MAX_HEADER_BYTES + 1), [])
    with pytest.raises(FrameError, match="many small arrays as one"):
        pack(b"", [np.zeros(0)] * (MAX_COLUMNS + 1))
    with pytest.raises(FrameError, match="send the value in parts"):
        pack(
            b"",
            [
                np.broadcast_to(np.zeros(1, np.uint8), (MAX_FRAME_BYTES,))[:0],
                *[np.empty(2**30, np.uint8)] * 4,
            ],
        )
