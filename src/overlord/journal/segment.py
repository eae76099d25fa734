"""A segment: a sequence of records under one name, after a header that identifies the writer.

This module touches no file. Segments are numbered 0, 1, 2, ... and the number alone is the name. A
name that holds the writer's generation would let two writers each write "the next" segment. With
the number alone only one of them can create it, and the other detects that it has been replaced.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from overlord.journal.record import DAMAGED, NEWER, SECTOR, Fault, unwritten

MAGIC = b"OVJL"
VERSION = 2
MAX_HEADER_BYTES = 2**20
_START = struct.Struct("<4sHHI")  # magic, version, 0, bytes of the text
# Checksums of the start and of the text. The length is used only if the first is right.
_CRCS = struct.Struct("<II")
PREFIX_BYTES = _START.size + _CRCS.size
_NAME = re.compile(r"(\d{12})\.ovj")
SUFFIX = ".ovj"


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The job and launch of a journal.

    ``fingerprint`` has a digest for each entry of the job that must stay the same. ``launch`` is a
    random text that all writers of one launch share. A job whose writer is lost must not take its
    journal back from another launch.
    """

    job: str
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    launch: str = ""

    def __post_init__(self) -> None:
        if wrong := [
            text
            for text in (self.job, self.launch, *self.fingerprint, *self.fingerprint.values())
            if not _text(text)
        ]:
            raise ValueError(f"expected texts that can be printed, got {wrong[0]!r:.60}")


@dataclass(frozen=True, slots=True)
class After:
    """The end of the records before a segment: byte ``end`` of segment ``ordinal``.

    Bytes after it, and segments in between, do not count.
    """

    ordinal: int  # -1: there is no segment before
    end: int
    torn: int  # bytes after the end, at the time when this was written


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The header of one segment.

    It holds everything needed to read the segment, to verify it, and to identify its writer.
    """

    ordinal: int
    generation: int  # raised each time that a writer opens the journal
    opened: int  # the first segment of this generation, which fenced off the writers before
    journal: str  # random, drawn when the journal was created: segments of two cannot be mixed up
    claim: str  # random, drawn when the writer opened the journal
    job: str
    fingerprint: dict[str, str]
    after: After
    writer: str  # process and host, for people
    version: str  # of Overlord
    launch: str = ""  # of the writer; empty in journals from before this field existed


@dataclass(frozen=True, slots=True)
class Opened:
    """A header that was read, the position of the first record, and the seed of the checksums."""

    header: SegmentHeader
    end: int
    seed: int


NOTHING_BEFORE = After(-1, 0, 0)


def name_of(ordinal: int) -> str:
    return f"{ordinal:012d}{SUFFIX}"


def ordinal_of(name: str) -> int:
    """Return the number in the name of a segment; -1 for any other name."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else -1


def header_bytes(header: SegmentHeader) -> bytes:
    text = json.dumps(asdict(header), ensure_ascii=True, separators=(",", ":")).encode()
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"expected a header of at most {MAX_HEADER_BYTES} bytes, got {len(text)}: "
            "give digests, not whole texts"
        )
    start = _START.pack(MAGIC, VERSION, 0, len(text))
    return start + _CRCS.pack(zlib.crc32(start), zlib.crc32(text)) + text


def seed_of(data: bytes) -> int:
    """Return the seed of the checksums of all records after this header."""
    return zlib.crc32(data)


def open_header(data: bytes, segment: str) -> Opened | Fault | None:
    """Read the header of a segment; return None if the bytes end before the header does."""
    if len(data) < PREFIX_BYTES:
        return None
    magic, version, zero, size = _START.unpack_from(data)
    start_crc, text_crc = _CRCS.unpack_from(data, _START.size)
    if zlib.crc32(data[: _START.size]) != start_crc:
        what = (
            f"expected a segment that starts with {MAGIC.hex()} and a good checksum, got "
            f"{data[:PREFIX_BYTES].hex()}"
        )
        return None if unwritten(data[:SECTOR], 0) else Fault(segment, 0, what)
    if magic != MAGIC or zero or size > MAX_HEADER_BYTES:
        return Fault(
            segment,
            0,
            f"expected a segment of an Overlord journal, got one that starts with {magic!r}",
            DAMAGED,
        )
    if version != VERSION:
        return Fault(segment, 0, f"expected version {VERSION}, got version {version}", NEWER)
    end = PREFIX_BYTES + size
    if len(data) < end:
        return None
    text = data[PREFIX_BYTES:end]
    if (crc := zlib.crc32(text)) != text_crc:
        wrong = Fault(
            segment,
            0,
            f"expected a header of {size} bytes with checksum {text_crc:08x}, got {crc:08x}",
        )
        return None if unwritten(data[:end], 0) else wrong
    try:
        return Opened(_header(json.loads(text)), end, seed_of(data[:end]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return Fault(
            segment,
            0,
            f"expected the fields of a header, got others: {type(error).__name__}: {error}",
            NEWER,
        )


def _header(found: Any) -> SegmentHeader:
    """Return a header from JSON, with every field checked, because it comes from a file."""
    texts = {key: found[key] for key in ("journal", "claim", "job", "writer", "version")} | {
        "launch": found.get("launch", "")
    }
    fingerprint, after = found["fingerprint"], found["after"]
    if wrong := [key for key, value in texts.items() if not _text(value)]:
        raise TypeError(f"{wrong[0]}: expected a text, got {texts[wrong[0]]!r:.40}")
    if not isinstance(fingerprint, dict) or not all(
        _text(word) for part in fingerprint.items() for word in part
    ):
        raise TypeError(f"fingerprint: expected a map of texts, got {fingerprint!r:.40}")
    end = After(_whole(after["ordinal"], -1), _whole(after["end"]), _whole(after["torn"]))
    return SegmentHeader(
        ordinal=_whole(found["ordinal"]),
        generation=_whole(found["generation"]),
        opened=_whole(found["opened"]),
        fingerprint=fingerprint,
        after=end,
        **texts,
    )


def _text(value: Any) -> bool:
    """Return whether a value is a text that is safe to print to a terminal."""
    return isinstance(value, str) and value.isprintable()


def _whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 2**63:
        raise ValueError(f"expected a whole number from {least} on, got {value!r:.40}")
    return value
