"""The log: records that are durable when ``append`` returns.

After a crash the log reads back exactly the records that were written. A log has one writer, which
uses it from one thread at a time. Calls wait only for the disk or the store. A writer never appends
to a segment of another writer. It begins its own segment, whose header records where the records
before it end. So records that were read once never change.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from secrets import token_hex
from types import TracebackType
from typing import Self, TypeVar

from overlord.errors import JournalError, JournalTaken, StateMismatch
from overlord.journal.record import Record, pack
from overlord.journal.segments import (
    NOTHING_BEFORE,
    After,
    Header,
    Opened,
    Reading,
    SegmentChain,
    SegmentHeader,
    Truncation,
    header_bytes,
    name_of,
    open_header,
    pruned,
    seed_of,
)
from overlord.journal.storage import JournalStorage, NameTaken, storage_of
from overlord.version import __version__

SEGMENT_BYTES = 2**24  # a segment is read whole, and pruning frees one segment at a time
# Attempts of an operation that another process may disturb. It may change the list of segments
# during a read, or create the segment with the next number.
TRIES = 10
T = TypeVar("T")
Where = str | os.PathLike[str] | JournalStorage


@dataclass(slots=True)
class _Tip:
    """The segment to which records are appended."""

    name: str
    ordinal: int
    seed: int
    begin: int
    end: int  # the end of the acknowledged bytes


@dataclass(slots=True)
class _Kept:
    """A segment that is not pruned, and the highest number in it (None: no records)."""

    name: str
    ordinal: int
    top: int | None
    opens: bool = False  # the first segment of its writer, which fenced off earlier writers


class JournalLog:
    """A journal open for writing.

    After a failed append the next one begins a new segment, whose header excludes the failed one.
    """

    def __init__(
        self,
        storage: JournalStorage,
        header: Header,
        journal: str,
        generation: int,
        reading: Reading | None,
        segment_bytes: int,
    ):
        """Initialize the log; use ``create`` or ``open`` instead."""
        self.generation = generation
        self.segment_bytes = segment_bytes
        # bytes that do not count, as found when the journal was opened
        self.cuts: list[Truncation] = reading.cuts if reading else []
        self._storage, self._header, self._journal = storage, header, journal
        self._claim, self._writer = token_hex(8), storage.writer
        self._after: After = reading.after if reading else NOTHING_BEFORE
        self._next = reading.next_ordinal if reading else 0
        self._opened = self._next
        self._kept = (
            [_Kept(p.name, p.ordinal, None if p.void else p.top, p.opens) for p in reading.parts]
            if reading
            else []
        )
        self._doomed = (
            [p.name for p in reading.doomed if not (p.opens and storage.whole)] if reading else []
        )
        self._tip: _Tip | None = None
        self._ended: JournalError | None = None

    # opening

    @classmethod
    def create(
        cls, where: Where, header: Header, *, segment_bytes: int = SEGMENT_BYTES
    ) -> JournalLog:
        """Create a journal; raise ``JournalError`` if the storage already has segments."""
        storage = _storage_of(where)
        return _closing(storage, lambda: cls._create(storage, header, segment_bytes))

    @classmethod
    def _create(cls, storage: JournalStorage, header: Header, segment_bytes: int) -> JournalLog:
        storage.hold()
        if storage.names():
            what = f"expected an empty journal, got {summary(_load(storage))}"
            raise JournalError(
                storage.shown,
                what,
                'continue it with resume="auto", or give the job another journal',
            )
        log = cls(storage, header, token_hex(8), 1, None, segment_bytes)
        log.claim()
        return log

    @classmethod
    def open(
        cls,
        where: Where,
        header: Header,
        *,
        allow: Collection[str] = (),
        goes_on: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> tuple[JournalLog, list[Record]]:
        """Open or create a journal, fence off older writers, and return it with its records.

        Raise ``StateMismatch`` for a journal of another job; ``allow`` names entries of the
        fingerprint that may differ. With ``goes_on`` the last writer must be of the header's
        launch: if not, raise ``JournalTaken``, and fence off no writer. Raise ``JournalError`` for
        a damaged journal.
        """
        storage = _storage_of(where)
        return _closing(storage, lambda: cls._open(storage, header, allow, goes_on, segment_bytes))

    @classmethod
    def _open(
        cls,
        storage: JournalStorage,
        header: Header,
        allow: Collection[str],
        goes_on: bool,
        segment_bytes: int,
    ) -> tuple[JournalLog, list[Record]]:
        storage.hold()
        for tries_left in reversed(range(TRIES)):
            reading = _load(storage)
            if reading.faults:
                raise _damaged(storage, reading)
            found = reading.header
            if found is not None:
                _same_job(found, header, allow)
                # A writer that takes the next number after this check is found by the next attempt.
                if goes_on and found.launch != header.launch:
                    raise _of_another_launch(storage, found)
                storage.settle(name_of(reading.after.ordinal))
            log = cls(
                storage,
                header,
                found.journal if found else token_hex(8),
                reading.generation + 1,
                reading,
                segment_bytes,
            )
            try:
                log.claim()
            except NameTaken:  # another writer appended after the read: read that, too
                if not tries_left:
                    raise JournalError(
                        storage.shown,
                        f"expected a free segment number, got {TRIES} in a row that another writer "
                        "took first",
                        "stop the other writer first",
                    ) from None
                continue
            return log, reading.records
        raise AssertionError("the last try returns or raises")

    # writing

    def claim(self) -> None:
        """Begin the first segment of this writer, which fences off older writers."""
        self._begin([], claiming=True)

    def append(self, records: Sequence[Record], *, anew: bool = False) -> None:
        """Write records with one sync; they are durable on return.

        After an error each record may be read back or not, but never a part of one. With ``anew``
        the records begin a segment. Once they are durable all earlier segments are pruned,
        whatever their numbers; ``sweep`` removes them.
        """
        if notes := [record.kind for record in records if record.is_note]:
            raise ValueError(
                f"append: expected records of a kind without a leading dot, got {notes[0]!r}; "
                "rename the kind"
            )
        self._write(records, anew)

    def _write(self, records: Sequence[Record], anew: bool = False) -> None:
        if self._ended is not None:
            raise self._ended
        if not records:
            return
        tip = self._tip
        if (
            tip is None
            or anew
            or self._storage.whole
            or (tip.end >= self.segment_bytes and tip.end > tip.begin)
        ):
            self._begin(records, anew=anew)
            return
        data = pack(records, tip.end, tip.seed)
        self._tip = None  # if this append fails, nothing is appended to its segment again
        self._storage.append(tip.name, data, tip.end)
        tip.end += len(data)
        self._tip, self._after = tip, After(tip.ordinal, tip.end, 0)
        self._raise_top(records)

    def _begin(
        self, records: Sequence[Record], *, claiming: bool = False, anew: bool = False
    ) -> None:
        """Begin a new segment with these records.

        With ``anew`` a note after them, in the same append, prunes all earlier segments. If the
        append is cut off, the note does not exist without the records, and older segments count.
        """
        self._tip = None
        for _ in range(TRIES):
            name, head = name_of(self._next), header_bytes(self._segment_header())
            seed = seed_of(head)
            notes = [pruned(records[-1].number, self._next)] if anew else []
            data = head + pack([*records, *notes], len(head), seed)
            try:
                self._storage.create(name, data)
                break
            except NameTaken as taken:
                if not self._is_ours(taken) and claiming:
                    raise
                if not self._is_ours(taken):
                    self._ended = self._replaced(taken)
                    raise self._ended from None
                self._kept.append(_Kept(name, self._next, None))
                # The append that failed before has created this segment after all. The next
                # segment excludes it.
                self._next += 1
        else:
            raise JournalError(
                self._storage.shown,
                f"expected a free segment number, got {TRIES} in a row that failed appends of "
                "this writer took",
                "check the disk or the store, then resume the job",
            )
        if claiming:
            self._storage.check_exclusive(name, data)
        self._tip = _Tip(name, self._next, seed, len(head), len(data))
        self._after = After(self._next, len(data), 0)
        self._kept.append(_Kept(name, self._next, None, claiming))
        self._next += 1
        self._raise_top(records)
        if anew:
            self._drop(len(self._kept) - 1)

    def _segment_header(self) -> SegmentHeader:
        return SegmentHeader(
            ordinal=self._next,
            generation=self.generation,
            opened=self._opened,
            journal=self._journal,
            claim=self._claim,
            job=self._header.job,
            fingerprint=dict(self._header.fingerprint),
            after=self._after,
            writer=self._writer,
            version=__version__,
            launch=self._header.launch,
        )

    def _is_ours(self, taken: NameTaken) -> bool:
        found = open_header(taken.data, taken.name)
        if isinstance(found, Opened):
            return found.header.claim == self._claim
        # Only this writer has the lock, so a segment without a whole header is its failed write.
        return not self._storage.whole

    def _replaced(self, taken: NameTaken) -> JournalError:
        found = open_header(taken.data, taken.name)
        writer = (
            f"{found.header.writer} with generation {found.header.generation}"
            if isinstance(found, Opened)
            else "another writer"
        )
        what = f"{writer} has taken over; this is {self._writer} with generation {self.generation}"
        return JournalTaken(
            f"{self._storage.shown}/{taken.name}",
            what,
            "stop this process: its writes no longer count",
        )

    def _raise_top(self, records: Iterable[Record]) -> None:
        numbers = [record.number for record in records if not record.is_note]
        if numbers:
            kept = self._kept[-1]
            kept.top = max(numbers) if kept.top is None else max(kept.top, *numbers)

    def roll(self) -> None:
        """Let the next append begin a new segment.

        It is called before a snapshot, so that all segments before it can be pruned.
        """
        self._tip = None

    def prune(self, before: int) -> int:
        """Prune and remove the oldest segments whose records all have numbers below ``before``.

        The segment being written stays. Return the number of pruned segments. They are no longer
        read, even if the storage refuses to remove them.
        """
        n_pruned = self.mark_pruned(before)
        self.sweep()
        return n_pruned

    def mark_pruned(self, before: int) -> int:
        """Write a durable note that the oldest segments no longer count; return their number.

        These are the segments whose records all have numbers below ``before``. ``sweep`` removes
        them. A segment that is missing without such a note counts as lost.
        """
        going = []
        for kept in self._kept:
            if (self._tip is not None and kept.ordinal == self._tip.ordinal) or not (
                kept.top is None or kept.top < before
            ):
                break
            going.append(kept)
        if going:
            first = next((kept.ordinal for kept in self._kept[len(going) :]), self._next)
            self._write([pruned(before, first)])
            self._drop(len(going))
        return len(going)

    def _drop(self, n: int) -> None:
        """Move the ``n`` oldest segments to those that ``sweep`` removes.

        In a store the first segment of each writer is never removed: a fenced-off writer that
        resumes late must find its next number taken.
        """
        self._doomed += [
            kept.name for kept in self._kept[:n] if not (kept.opens and self._storage.whole)
        ]
        del self._kept[:n]

    def sweep(self) -> None:
        """Remove pruned segments, including those of earlier writers.

        The next call retries a removal that the storage refused.
        """
        doomed = list(self._doomed)  # more may be pruned meanwhile
        if doomed:
            self._storage.remove(doomed)
            del self._doomed[: len(doomed)]

    @property
    def removes_slowly(self) -> bool:
        """Whether removals are requests to a store, which may take long."""
        return self._storage.whole

    @property
    def doomed(self) -> int:
        """The number of pruned segments that are not yet removed."""
        return len(self._doomed)

    @property
    def shown(self) -> str:
        """The location of the journal, as text without secrets."""
        return self._storage.shown

    @property
    def segments(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Release the journal; later appends raise ``JournalError``.

        Acknowledged records are durable even without this call.
        """
        self._tip = None
        self._storage.close()
        self._ended = self._ended or JournalError(
            self._storage.shown, "expected an open journal, got a closed one", "open it again"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# reading


def read(where: Where, progress: Callable[[int, int], None] = lambda done, total: None) -> Reading:
    """Read a whole journal with its faults; a job may write to it meanwhile.

    ``progress`` is called with (segments read, total). Raise ``JournalError`` if there is no
    segment.
    """
    storage = _storage_of(where)
    reading = _load(storage, progress)
    if not reading.parts:
        raise JournalError(
            storage.shown, "expected a journal, got no segment", "check the path or URI"
        )
    return reading


def read_all(where: Where) -> list[Record]:
    """Return the records of a journal; raise ``JournalError`` if it has a fault or no segment."""
    storage = _storage_of(where)
    reading = read(storage)
    if reading.faults:
        raise _damaged(storage, reading)
    return reading.records


def read_if_any(where: Where) -> list[Record]:
    """Return the records of a journal without holding it; empty if there is no journal.

    Raise ``JournalError`` if the journal has a fault.
    """
    storage = _storage_of(where)
    reading = _load(storage)
    if reading.faults:
        raise _damaged(storage, reading)
    return reading.records


def _load(
    storage: JournalStorage, progress: Callable[[int, int], None] = lambda done, total: None
) -> Reading:
    for _ in range(TRIES):
        chain = SegmentChain()
        try:
            names = storage.names()
            for done, (name, data) in enumerate(storage.fetch(names)):
                chain.feed(name, data)
                progress(done + 1, len(names))
            return chain.settle()
        except FileNotFoundError:
            continue  # pruned meanwhile
    raise JournalError(
        storage.shown,
        f"expected the same segments during a whole read, got a changed list {TRIES} times",
        "read it again",
    )


def summary(reading: Reading) -> str:
    """Return the contents of a journal in one line."""
    records, header = reading.records, reading.header
    last = f", the last with number {records[-1].number}" if records else ""
    job = (
        f" of job {header.job!r}, generation {header.generation} by {header.writer}"
        if header
        else ""
    )
    faults = f", and {len(reading.faults)} faults" if reading.faults else ""
    return f"{len(records)} records{last}{job}, in {len(reading.parts)} segments{faults}"


def _damaged(storage: JournalStorage, reading: Reading) -> JournalError:
    error = reading.faults[0].as_error(storage.shown)
    more = len(reading.faults) - 1
    remedy = f"{error.remedy}; `overlord journal verify` lists all" + (
        f" (there are {more} more)" if more else ""
    )
    return JournalError(error.path, error.problem, remedy)


def _same_job(found: SegmentHeader, wanted: Header, allow: Collection[str]) -> None:
    saved, given = (
        {"job": found.job, **found.fingerprint},
        {"job": wanted.job, **wanted.fingerprint},
    )
    differ = {
        part: (saved.get(part, "nothing"), given.get(part, "nothing"))
        for part in sorted({*saved, *given})
        if part not in allow and saved.get(part) != given.get(part)
    }
    if differ:
        raise StateMismatch(
            differ,
            "give this job its own journal, or correct the job",
            "the journal belongs to another job",
        )


def _of_another_launch(storage: JournalStorage, found: SegmentHeader) -> JournalTaken:
    what = (
        f"{found.writer} with generation {found.generation} has taken over: another launch of "
        "this job has continued its journal"
    )
    remedy = (
        "stop this job: its writes no longer count; to run it instead of the other, "
        'stop that one and launch with resume="auto"'
    )
    return JournalTaken(f"{storage.shown}/{name_of(found.ordinal)}", what, remedy)


def _storage_of(where: Where) -> JournalStorage:
    return storage_of(where) if isinstance(where, str | os.PathLike) else where


def _closing(storage: JournalStorage, opening: Callable[[], T]) -> T:
    """Return the result of ``opening``; close the storage if it raises.

    A segment that another writer created meanwhile is a ``JournalError``.
    """
    try:
        return opening()
    except NameTaken as taken:
        storage.close()
        raise JournalError(
            f"{storage.shown}/{taken.name}",
            "expected a new segment, got one that another writer created at the same time",
            "stop the other writer first",
        ) from None
    except BaseException:
        storage.close()
        raise
