"""Segments of a journal: the layout of one, and the chain of all. Pure: no file is opened."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from overlord.errors import JournalError
from overlord.journal.record import (
    DAMAGED,
    NEWER,
    SECTOR,
    Fault,
    PlacedRecord,
    Record,
    scan,
    unwritten,
)

# ----------------------------------------------------------------------------
# A segment: a header that identifies the writer, then records.
#
# Segments are numbered 0, 1, 2, ... and the name is the number alone. With the generation of the
# writer in the name, two writers could each create "the next" segment. With the number alone only
# one can create it, and the other detects that it was replaced.

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
            raise ValueError(
                "journal header: expected printable texts as job, launch and fingerprint, got "
                f"{wrong[0]!r:.60}; remove line breaks and control characters"
            )


@dataclass(frozen=True, slots=True)
class After:
    """The end of the records before a segment: byte ``end`` of segment ``ordinal``.

    Bytes after it, and segments in between, do not count.
    """

    ordinal: int  # -1: no segment precedes
    end: int
    torn: int  # bytes after the end, at the time when this was written


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentHeader:
    """The header of one segment.

    It holds everything needed to read the segment, to verify it, and to identify its writer.
    """

    ordinal: int
    generation: int  # raised each time that a writer opens the journal
    opened: int  # the first segment of this generation, which fenced off earlier writers
    journal: str  # random id of the journal: segments of two journals cannot be mixed up
    claim: str  # random id of the writer
    job: str
    fingerprint: dict[str, str]
    after: After
    writer: str  # process id and machine of the writer, for errors
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
            f"journal header: expected at most {MAX_HEADER_BYTES} bytes, got {len(text)}; use "
            "digests as entries of the fingerprint"
        )
    start = _START.pack(MAGIC, VERSION, 0, len(text))
    return start + _CRCS.pack(zlib.crc32(start), zlib.crc32(text)) + text


def seed_of(data: bytes) -> int:
    """Return the seed of the checksums of all records after this header."""
    return zlib.crc32(data)


def open_header(data: bytes, segment: str) -> Opened | Fault | None:
    """Return the header of a segment, or its fault; None if the bytes end before the header.

    A header with a sector that was never written also counts as cut off.
    """
    if len(data) < PREFIX_BYTES:
        return None
    magic, version, zero, size = _START.unpack_from(data)
    start_crc, text_crc = _CRCS.unpack_from(data, _START.size)
    if zlib.crc32(data[: _START.size]) != start_crc:
        what = (
            f"expected a segment that starts with {MAGIC.hex()} and a valid checksum, got "
            f"{data[:PREFIX_BYTES].hex()}"
        )
        return None if unwritten(data[:SECTOR], 0) else Fault(segment, 0, what)
    if magic != MAGIC or zero or size > MAX_HEADER_BYTES:
        return Fault(
            segment,
            0,
            f"expected {MAGIC!r}, a reserved 0 and at most {MAX_HEADER_BYTES} bytes of header, "
            f"got {magic!r}, {zero} and {size}",
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
    """Return a header from JSON; raise an error unless every field has its type.

    The errors are ``ValueError``, ``TypeError`` and ``KeyError``.
    """
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
        raise ValueError(f"expected a whole number from {least} to 2**63 - 1, got {value!r:.40}")
    return value


# ----------------------------------------------------------------------------
# The chain of segments: the records that count, the writes that were cut off, and the faults.
#
# Every segment records where the records before it end. So the bytes after the last acknowledged
# append of a writer stay unchanged and are ignored. They may be half a record, a failed append, or
# a segment without a header. A loss of acknowledged bytes is always detected.

PRUNED = ".pruned"  # kind of the note that earlier segments are pruned
MISSING = (
    "segments were removed: restore them from a copy, or resume the trainers' state with a new "
    "journal"
)


@dataclass(frozen=True, slots=True)
class Truncation:
    """Bytes at the end of a segment that do not belong to the log.

    A write was cut off there, or failed.
    """

    segment: str
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return (
            f"{self.segment}, byte {self.offset}: {self.nbytes} bytes of a write that did not "
            "finish are ignored"
        )


@dataclass(slots=True)
class SegmentData:
    """One segment that was read: its header, records and faults."""

    name: str
    ordinal: int
    nbytes: int
    header: SegmentHeader | None  # None: cut off, or damaged
    begin: int = 0
    records: list[PlacedRecord] = field(default_factory=list)
    end: int = 0
    torn: int = 0
    faults: list[Fault] = field(default_factory=list)
    void: bool = False  # a later segment excludes it

    @property
    def opens(self) -> bool:
        """Whether this is the first segment of its writer, which fenced off earlier writers."""
        return self.header is not None and self.header.opened == self.ordinal

    @property
    def top(self) -> int | None:
        """The highest number among records that are not notes."""
        return max((p.record.number for p in self.records if not p.record.is_note), default=None)

    def close_at(self, end: int) -> None:
        """Drop records and faults after byte ``end``, which a later segment's header records.

        Add a fault if no whole record ends there.
        """
        known = {self.begin, *(p.end for p in self.records)}
        self.faults = [fault for fault in self.faults if fault.offset < end]
        self.records = [p for p in self.records if p.end <= end]
        if end not in known and not self.faults:
            what = (
                f"expected whole records up to byte {end}, as the next segment records, got them "
                f"up to byte {self.end}"
            )
            self.faults.append(Fault(self.name, self.end, what))
        self.end, self.torn = end, max(0, self.nbytes - end)


def read_segment(name: str, data: bytes) -> SegmentData:
    """Return the header, records and faults of one segment, whatever the other segments contain."""
    segment = SegmentData(name, ordinal_of(name), len(data), None)
    found = open_header(data, name)
    if isinstance(found, Opened):
        segment.header, segment.begin = found.header, found.end
        segment.records, segment.end, segment.torn, segment.faults = scan(
            data, found.end, found.seed, name
        )
        if found.header.ordinal != segment.ordinal:
            what = (
                f"expected segment {segment.ordinal}, as it is named, got segment "
                f"{found.header.ordinal}"
            )
            segment.faults.insert(0, Fault(name, 0, what, "a file was renamed: restore its name"))
    elif found is None:
        segment.torn = len(data)
    else:
        segment.faults.append(found)
    return segment


class SegmentChain:
    """The chain of a log's segments, which are fed in order."""

    def __init__(self) -> None:
        self.segments: list[SegmentData] = []
        self.faults: list[Fault] = []  # between segments

    def feed(self, name: str, data: bytes) -> None:
        segment = read_segment(name, data)
        if self.segments and segment.ordinal != self.segments[-1].ordinal + 1:
            missing = name_of(self.segments[-1].ordinal + 1)
            what = f"expected {missing} before it, got no such segment"
            self.faults.append(Fault(name, 0, what, MISSING))
        if segment.header is not None:
            self._link(segment, segment.header)
        self.segments.append(segment)

    def _link(self, segment: SegmentData, header: SegmentHeader) -> None:
        before = self.last
        if before is not None and before.header is not None:
            was = before.header
            if header.journal != was.journal:
                what = (
                    f"expected a segment of journal {was.journal} (job {was.job!r}), got one "
                    f"of {header.journal} (job {header.job!r})"
                )
                segment.faults.append(
                    Fault(
                        segment.name,
                        0,
                        what,
                        "segments of two journals are in one place: move those of the other one "
                        "away",
                    )
                )
                return
            if header.generation < was.generation:
                what = f"expected generation {was.generation} or later, got {header.generation}"
                segment.faults.append(Fault(segment.name, 0, what, DAMAGED))
        for other in self.segments:
            if header.after.ordinal < other.ordinal:
                other.void = True
            elif other.ordinal == header.after.ordinal:
                other.close_at(header.after.end)

    @property
    def last(self) -> SegmentData | None:
        """The last segment with a whole header that no later segment excludes; None if none has."""
        whole = (p for p in reversed(self.segments) if p.header is not None and not p.void)
        return next(whole, None)

    def settle(self) -> Reading:
        """Return the result of reading all segments that were fed."""
        kept = self._kept()
        unpruned = [p for p in self.segments if p.ordinal >= kept]
        faults = [f for f in self.faults if ordinal_of(f.segment) > kept]
        if unpruned and unpruned[0].ordinal > kept:
            what = f"expected {name_of(kept)} as the first segment, got no such segment"
            faults.insert(0, Fault(unpruned[0].name, 0, what, MISSING))
        counted = [p for p in unpruned if not p.void]
        last = self.last
        for segment in counted:
            # Only the last segment may lack its header: its writer may be creating it.
            if (
                segment.header is None
                and not segment.faults
                and last is not None
                and segment.ordinal < last.ordinal
            ):
                what = f"expected a whole header, got {segment.nbytes} bytes of one"
                segment.faults.append(Fault(segment.name, 0, what))
        faults += [fault for p in counted for fault in p.faults]
        faults.sort(key=lambda f: (f.segment, f.offset))
        cuts = [Truncation(p.name, p.end, p.torn) for p in counted if p.torn] + [
            Truncation(p.name, 0, p.nbytes) for p in unpruned if p.void
        ]
        return Reading(
            unpruned,
            faults,
            sorted(cuts, key=lambda c: c.segment),
            [p for p in self.segments if p.ordinal < kept],
        )

    def _kept(self) -> int:
        """Return the number of the first segment that is not pruned; 0 without a note of pruning.

        A note that cannot be decoded is added to the faults of its segment.
        """
        kept = 0
        for segment in self.segments:
            for placed in segment.records:
                if placed.record.kind == PRUNED and not segment.void:
                    try:
                        kept = max(kept, kept_from(placed.record))
                    except JournalError as error:
                        segment.faults.append(
                            Fault(segment.name, placed.start, error.problem, error.remedy)
                        )
        return kept


def pruned(before: int, kept: int) -> Record:
    """Return the note that records before a number, and segments before ``kept``, are pruned."""
    return Record.of(PRUNED, before, {"kept": kept})


def kept_from(note: Record) -> int:
    body: Any = note.body
    if not isinstance(body, dict) or type(body.get("kept")) is not int or body["kept"] < 0:
        raise JournalError(
            note.where, f"expected a note with the number of a segment, got {body!r:.60}", NEWER
        )
    return int(body["kept"])


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a journal: segments, faults, truncations, pruned segments."""

    parts: list[SegmentData]
    faults: list[Fault]
    cuts: list[Truncation]
    doomed: list[SegmentData]  # segments that were pruned and not yet removed

    @property
    def records(self) -> list[Record]:
        """All records of the log in order, without its own notes."""
        return [
            p.record
            for part in self.parts
            if not part.void
            for p in part.records
            if not p.record.is_note
        ]

    @property
    def last(self) -> SegmentData | None:
        return next((p for p in reversed(self.parts) if p.header is not None and not p.void), None)

    @property
    def header(self) -> SegmentHeader | None:
        return self.last.header if self.last else None

    @property
    def generation(self) -> int:
        """The highest generation of all segments, also of void ones: none is used twice."""
        return max((p.header.generation for p in self.parts if p.header is not None), default=0)

    @property
    def after(self) -> After:
        """The end of the records before the next segment."""
        last = self.last
        return NOTHING_BEFORE if last is None else After(last.ordinal, last.end, last.torn)

    @property
    def next_ordinal(self) -> int:
        return self.parts[-1].ordinal + 1 if self.parts else 0
