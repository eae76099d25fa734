"""Conversion of records to bytes and back. Pure; bytes that are read are never executed.

The layout of a record:

mark | version, form, length of kind, 0 | number | start of the append | length | checksum of kind
and body | checksum of head | kind | body

The head's checksum begins with that of the segment's header and the record's own position. So a
record is valid in one position only: none can be moved, swapped or copied from another journal. The
length is in the head, and is used only if the head's checksum is right.

After the mark every byte is stored XOR 0xA5. A disk that lost power returns zeros where it never
wrote. Bodies are full of zeros too (columns of plans); stored as they are, they could not be
distinguished from those.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

from overlord.errors import FrameError, JournalError
from overlord.transport.codec import decode, encode
from overlord.transport.frame import pack as pack_frame
from overlord.transport.frame import unpack as unpack_frame

MARK = b"\xf5OVR"
VERSION = 1
BYTES, VALUE = 0, 1  # forms of a body: raw bytes; a frame of the transport
MAX_BODY_BYTES = 2**30
SECTOR = 512  # bytes that a disk writes whole or not at all
FEWEST_ZEROS = 4  # zeros that prove an unwritten piece of a sector; fewer may be data

# version, form, bytes of the kind, 0, number, start of the append, bytes of the body, their
# checksum
_HEAD = struct.Struct("<BBBBqQII")
_CRC, _POSITION = struct.Struct("<I"), struct.Struct("<Q")
HEAD_BYTES = len(MARK) + _HEAD.size + _CRC.size
_CRC_AT = len(MARK) + _HEAD.size
_MASK = bytes(byte ^ 0xA5 for byte in range(256))
_KIND = re.compile(r"\.?[a-z][a-z0-9_-]{0,31}")
DAMAGED = (
    "the bytes were changed after they were written: restore the segment from a copy, or "
    "resume the trainers' state with a new journal"
)
_OR_CUT = (
    "; if the machine lost power during this write, the record was never acknowledged, and "
    "`truncate -s {}` on the segment drops it"
)
NEWER = "it was written by another version of Overlord: read it with that one"


@dataclass(frozen=True, slots=True)
class Record:
    """One record of the log.

    ``data`` is the body as bytes. It is encoded when the record is created, so later changes by the
    caller are not written.
    """

    kind: str  # a kind that begins with a dot is a note of the log itself
    number: int  # usually a step; several records may have the same, and numbers may decrease
    data: bytes
    form: int = BYTES
    where: str = field(default="", compare=False)  # segment and byte, of a record that was read

    def __post_init__(self) -> None:
        if not _KIND.fullmatch(self.kind):
            raise ValueError(
                "record: expected a kind of 1 to 32 characters of a-z, 0-9, '_' and '-' that "
                f"begins with a letter, got {self.kind!r:.60}"
            )
        if not -(2**63) <= self.number < 2**63:
            raise ValueError(
                f"record {self.kind}: expected a number from -2**63 to 2**63 - 1, got {self.number}"
            )
        if len(self.data) > MAX_BODY_BYTES:
            raise ValueError(
                f"record {self.kind} {self.number}: expected a body of at most {MAX_BODY_BYTES} "
                f"bytes, got {len(self.data)}; write it as several records"
            )

    @staticmethod
    def of(kind: str, number: int, body: Any) -> Record:
        """Return a record with an encoded body.

        Bytes are stored unchanged; the codec of the transport must support other values.
        """
        if isinstance(body, bytes):
            return Record(kind, number, body)
        return Record(kind, number, b"".join(pack_frame(*encode(body))), VALUE)

    @property
    def is_note(self) -> bool:
        return self.kind.startswith(".")

    @property
    def body(self) -> Any:
        """The value that was given to ``of``, decoded at each call. Arrays are read-only."""
        if self.form == BYTES:
            return self.data
        try:
            frame = unpack_frame(self.data)
            return decode(frame.header, frame.columns)
        except FrameError as error:
            what = (
                f"expected a body of {self.kind!r} {self.number} that this version can decode, got "
                f"another: {error}"
            )
            raise JournalError(self.where or "record", what, NEWER) from error


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a segment: its bytes are damaged, missing, misplaced or of another version."""

    segment: str
    offset: int
    problem: str  # what was expected, and what was read
    remedy: str = DAMAGED

    def __str__(self) -> str:
        return f"{self.segment}, byte {self.offset}: {self.problem}; {self.remedy}"

    def as_error(self, where: str) -> JournalError:
        return JournalError(
            f"{where}/{self.segment}", f"byte {self.offset}: {self.problem}", self.remedy
        )


class PlacedRecord(NamedTuple):
    """A record and its position in the segment."""

    start: int
    end: int
    record: Record


class Scan(NamedTuple):
    """The content of a segment after its header.

    Records end at byte ``end``. ``torn`` bytes follow, of a write that was cut off.
    """

    records: list[PlacedRecord]
    end: int
    torn: int
    faults: list[Fault]


class _Head(NamedTuple):
    version: int
    form: int
    kind_bytes: int
    zero: int
    number: int
    append_at: int
    body_bytes: int
    crc: int


def pack(records: Iterable[Record], at: int, seed: int) -> bytes:
    """Return the bytes of records that are appended together at a position of a segment.

    ``seed`` is the checksum of the segment's header.
    """
    pieces, position = [], at
    for record in records:
        kind = record.kind.encode()
        crc = zlib.crc32(record.data, zlib.crc32(kind))
        head = _HEAD.pack(
            VERSION, record.form, len(kind), 0, record.number, at, len(record.data), crc
        )
        stored = b"".join((head, _CRC.pack(_head_crc(head, position, seed)), kind, record.data))
        pieces += [MARK, stored.translate(_MASK)]
        position += len(MARK) + len(stored)
    return b"".join(pieces)


def scan(data: bytes, start: int, seed: int, segment: str) -> Scan:
    """Read all records of a segment's bytes, from position ``start`` on.

    After a fault the scan continues with the next whole record, so that all faults are listed.
    ``seed`` is the checksum of the segment's header, ``segment`` its name.
    """
    records, faults, at = list[PlacedRecord](), list[Fault](), start
    while at < len(data):
        found = _read(data, at, seed, segment)
        if isinstance(found, PlacedRecord):
            records.append(found)
            at = found.end
            continue
        later = _next_head(data, at + 1, seed) if found else -1
        # A later append proves that this one was acknowledged. Without a later one, an unwritten
        # sector (zeros) proves that it was not.
        acknowledged = later >= 0 and _head_at(data, later).append_at > at
        if found is None or (not acknowledged and unwritten(data, at)):
            return Scan(records, at, len(data) - at, faults)
        faults.append(
            found if acknowledged else replace(found, remedy=found.remedy + _OR_CUT.format(at))
        )
        at = later if later >= 0 else len(data)
    return Scan(records, at, 0, faults)


def _read(data: bytes, at: int, seed: int, segment: str) -> PlacedRecord | Fault | None:
    """Return the record at a position, or its fault; None if the bytes end before it does."""
    if len(data) - at < HEAD_BYTES:
        return None
    if data[at : at + len(MARK)] != MARK:
        return Fault(
            segment,
            at,
            f"expected a record that starts with {MARK.hex()}, got "
            f"{data[at : at + len(MARK)].hex()}",
        )
    head, wanted, found = (
        _head_at(data, at),
        _stored_crc(data, at),
        _head_crc(_unmasked_head(data, at), at, seed),
    )
    if wanted != found:
        return Fault(
            segment, at, f"expected a record's head with checksum {wanted:08x}, got {found:08x}"
        )
    if head.version != VERSION or head.form not in (BYTES, VALUE) or head.zero:
        what = (
            f"expected a record of version {VERSION}, form {BYTES} or {VALUE} and a reserved byte "
            f"of 0, got {head.version}, {head.form} and {head.zero}"
        )
        return Fault(segment, at, what, NEWER)
    end = at + HEAD_BYTES + head.kind_bytes + head.body_bytes
    if end > len(data):
        return None
    rest = data[at + HEAD_BYTES : end].translate(_MASK)
    if (crc := zlib.crc32(rest)) != head.crc:
        return Fault(
            segment,
            at,
            f"expected {len(rest)} bytes with checksum {head.crc:08x} in record "
            f"{head.number}, got {crc:08x}",
        )
    kind = rest[: head.kind_bytes].decode("ascii", "replace")
    try:
        return PlacedRecord(
            at,
            end,
            Record(kind, head.number, rest[head.kind_bytes :], head.form, f"{segment}, byte {at}"),
        )
    except ValueError as error:  # whole, but this version does not write such a record
        return Fault(segment, at, str(error), NEWER)


def _head_crc(head: bytes, position: int, seed: int) -> int:
    return zlib.crc32(head, zlib.crc32(_POSITION.pack(position), seed))


def _unmasked_head(data: bytes, at: int) -> bytes:
    return data[at + len(MARK) : at + _CRC_AT].translate(_MASK)


def _stored_crc(data: bytes, at: int) -> int:
    (crc,) = _CRC.unpack(data[at + _CRC_AT : at + HEAD_BYTES].translate(_MASK))
    return int(crc)


def _head_at(data: bytes, at: int) -> _Head:
    return _Head(*_HEAD.unpack(_unmasked_head(data, at)))


def _next_head(data: bytes, at: int, seed: int) -> int:
    """Return the position of the next whole head; -1 if there is none."""
    while (at := data.find(MARK, at)) >= 0 and at + HEAD_BYTES <= len(data):
        if _stored_crc(data, at) == _head_crc(_unmasked_head(data, at), at, seed):
            return at
        at += 1
    return -1


def unwritten(data: bytes, start: int) -> bool:
    """Return whether a sector, or the part of one after ``start``, holds only zeros.

    Such a sector was never written, although the file is long enough. Parts of fewer than
    ``FEWEST_ZEROS`` bytes do not count.
    """
    bounds = [start, *range((start // SECTOR + 1) * SECTOR, len(data), SECTOR), len(data)]
    return any(b - a >= FEWEST_ZEROS and not any(data[a:b]) for a, b in pairwise(bounds))
