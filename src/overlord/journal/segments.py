"""The segments of a journal in order, as one log.

This module finds the records that count, the writes that were cut off, and the faults. It touches
no file. Every segment records where the records before it end. So the bytes after a writer's last
acknowledged append are left as they are and never read again. They may be half a record, a failed
append, or a segment without a header. Acknowledged bytes cannot go missing unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from overlord.errors import JournalError
from overlord.journal.record import DAMAGED, NEWER, Fault, PlacedRecord, Record, scan
from overlord.journal.segment import (
    NOTHING_BEFORE,
    After,
    Opened,
    SegmentHeader,
    name_of,
    open_header,
    ordinal_of,
)

PRUNED = ".pruned"  # the kind of the note that segments before one are pruned
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
            "finish are left out"
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
    void: bool = False  # a later segment leaves it out

    @property
    def opens(self) -> bool:
        """Whether a writer fenced off the writers before it with this segment."""
        return self.header is not None and self.header.opened == self.ordinal

    @property
    def top(self) -> int | None:
        """The highest number among records that are not notes."""
        return max((p.record.number for p in self.records if not p.record.is_note), default=None)

    def close_at(self, end: int) -> None:
        """Truncate the segment at the end that its successor records."""
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
    """Read one segment, without its neighbours."""
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
    """A chain that links segments, fed in order, into one log."""

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
        """The last segment that is whole and not void."""
        whole = (p for p in reversed(self.segments) if p.header is not None and not p.void)
        return next(whole, None)

    def settle(self) -> Reading:
        """Return the log of all segments that were fed."""
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
        """Return the first segment that is not pruned, by the notes in the segments."""
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
            note.where, "expected the number of a segment in the note, got something else", NEWER
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
