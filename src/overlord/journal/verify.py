"""Verification of a journal: every byte is read, every record decoded, every fault listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from overlord.errors import JournalError
from overlord.journal.log import Where, read
from overlord.journal.segments import Reading


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalReport:
    """The contents and faults of a journal."""

    uri: str
    job: str
    generation: int
    writer: str  # the last writer
    segments: int
    nbytes: int
    records: int
    torn: int  # bytes after the last whole record: of a write that was cut off, or is in progress
    cuts: tuple[str, ...]  # each position where a write was cut off
    faults: tuple[str, ...]

    @property
    def first_fault(self) -> str:
        return self.faults[0] if self.faults else ""


def verify(uri: Where) -> JournalReport:
    """Read every byte of a journal and decode every record."""
    return report_of(str(uri), read(uri), decoding=True)


def report_of(
    uri: str,
    reading: Reading,
    decoding: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> JournalReport:
    """Return the contents and faults of a journal; ``decoding``: decode every record.

    ``progress`` is called with (records decoded, total).
    """
    header, last, faults = reading.header, reading.last, [str(fault) for fault in reading.faults]
    records = reading.records
    for done, record in enumerate(records if decoding else ()):
        progress(done, len(records))
        try:
            _ = record.body
        except JournalError as error:
            faults.append(f"{error.path}: {error.problem}; {error.remedy}")
    return JournalReport(
        uri=uri,
        job=header.job if header else "",
        generation=reading.generation,
        writer=header.writer if header else "",
        segments=len(reading.parts),
        nbytes=sum(part.nbytes for part in reading.parts),
        records=len(records),
        torn=last.torn if last else 0,
        cuts=tuple(map(str, reading.cuts)),
        faults=tuple(faults),
    )
