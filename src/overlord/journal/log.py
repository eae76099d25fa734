"""The log: records that are durable when ``append`` returns, read back after a crash exactly as far
as they were written.

One writer, one thread at a time; nothing here waits but for the disk or the store. A writer never
goes on in a segment of another one: it begins its own, whose header says where the records before
it end. So nothing that was once read is ever changed.
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
from overlord.journal.segment import (
    NOTHING_BEFORE,
    After,
    Header,
    Opened,
    SegmentHeader,
    header_bytes,
    name_of,
    open_header,
    seed_of,
)
from overlord.journal.segments import Reading, SegmentChain, Truncation, pruned
from overlord.journal.storage import JournalStorage, NameTaken, place_of, whoami
from overlord.version import __version__

SEGMENT_BYTES = 2**24  # read whole when the journal is opened, and what pruning frees at a time
# of what another process may disturb: a list that changes while it is read, a number that is taken
TRIES = 10
T = TypeVar("T")
Where = str | os.PathLike[str] | JournalStorage


@dataclass(slots=True)
class _Tip:
    """The segment that is being appended to."""

    name: str
    ordinal: int
    seed: int
    begin: int
    end: int  # acknowledged up to here


@dataclass(slots=True)
class _Kept:
    """A segment that is there, and the highest number in it (None: no records)."""

    name: str
    ordinal: int
    top: int | None
    opens: bool = False  # a writer shut out those before it by this one


class JournalLog:
    """A journal open for writing. After an append that failed the next one begins a new segment,
    which leaves the failed one out.
    """

    def __init__(
        self,
        place: JournalStorage,
        header: Header,
        journal: str,
        generation: int,
        reading: Reading | None,
        segment_bytes: int,
    ):
        """Not for callers: see ``create`` and ``open``."""
        self.generation = generation
        self.segment_bytes = segment_bytes
        self.cuts: list[Truncation] = (
            reading.cuts if reading else []
        )  # what was left out when it was opened
        self._place, self._header, self._journal = place, header, journal
        self._claim, self._writer = token_hex(8), whoami()
        self._after: After = reading.after if reading else NOTHING_BEFORE
        self._next = reading.next_ordinal if reading else 0
        self._opened = self._next
        self._kept = (
            [_Kept(p.name, p.ordinal, None if p.void else p.top, p.opens) for p in reading.parts]
            if reading
            else []
        )
        self._doomed = (
            [p.name for p in reading.doomed if not (p.opens and place.whole)] if reading else []
        )
        self._tip: _Tip | None = None
        self._ended: JournalError | None = None

    # opening

    @classmethod
    def create(
        cls, where: Where, header: Header, *, segment_bytes: int = SEGMENT_BYTES
    ) -> JournalLog:
        """A new journal; refused where there is one."""
        place = _place(where)
        return _closing(place, lambda: cls._create(place, header, segment_bytes))

    @classmethod
    def _create(cls, place: JournalStorage, header: Header, segment_bytes: int) -> JournalLog:
        place.hold()
        if place.names():
            what = f"expected an empty journal, got {summary(_load(place))}"
            raise JournalError(
                place.shown,
                what,
                'go on from it with resume="auto", or give the job another journal',
            )
        log = cls(place, header, token_hex(8), 1, None, segment_bytes)
        log._begin([], claiming=True)
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
        """A journal and its records so far; a new one where there is none. Older writers are shut
        out.

        A journal of another job is a ``StateMismatch``; ``allow`` names parts of the fingerprint
        that may differ. ``goes_on``: only if the last writer was of the launch that the header
        names; else nobody is shut out, and it is a ``JournalTaken``.
        """
        place = _place(where)
        return _closing(place, lambda: cls._open(place, header, allow, goes_on, segment_bytes))

    @classmethod
    def _open(
        cls,
        place: JournalStorage,
        header: Header,
        allow: Collection[str],
        goes_on: bool,
        segment_bytes: int,
    ) -> tuple[JournalLog, list[Record]]:
        place.hold()
        for tries_left in reversed(range(TRIES)):
            reading = _load(place)
            if reading.faults:
                raise _damaged(place, reading)
            found = reading.header
            if found is not None:
                _same_job(found, header, allow)
                if (
                    goes_on and found.launch != header.launch
                ):  # one that takes the next number behind this look is found by the next look
                    raise _of_another_launch(place, found)
                place.settle(name_of(reading.after.ordinal))
            log = cls(
                place,
                header,
                found.journal if found else token_hex(8),
                reading.generation + 1,
                reading,
                segment_bytes,
            )
            try:
                log._begin([], claiming=True)
            except NameTaken:  # somebody appended after we had read: it is read, too
                if not tries_left:
                    raise JournalError(
                        place.shown,
                        f"another writer took the next segment, {TRIES} times",
                        "stop the other writer first",
                    ) from None
                continue
            return log, reading.records
        raise AssertionError("the last try returns or raises")

    # writing

    def append(self, records: Sequence[Record], *, anew: bool = False) -> None:
        """Durable when it returns, with one sync for all. If it raises, they may be read back or
        not, but each whole or not at all.

        ``anew``: they begin a segment, and once they are durable nothing before it is wanted,
        whatever its numbers; ``sweep`` removes it.
        """
        if notes := [record.kind for record in records if record.is_note]:
            raise ValueError(f"expected records of the caller, got the log's own {notes[0]!r}")
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
            or self._place.whole
            or (tip.end >= self.segment_bytes and tip.end > tip.begin)
        ):
            self._begin(records, anew=anew)
            return
        data = pack(records, tip.end, tip.seed)
        self._tip = None  # whatever happens now, a segment in doubt is not written again
        self._place.append(tip.name, data, tip.end)
        tip.end += len(data)
        self._tip, self._after = tip, After(tip.ordinal, tip.end, 0)
        self._note_numbers(records)

    def _begin(
        self, records: Sequence[Record], *, claiming: bool = False, anew: bool = False
    ) -> None:
        """A new segment with these records in it. That all before it goes is noted behind them, in
        the same append: where that is cut, the note is not there without them, and what lies before
        still counts.
        """
        self._tip = None
        for _ in range(TRIES):
            name, head = name_of(self._next), header_bytes(self._segment_header())
            seed = seed_of(head)
            notes = [pruned(records[-1].number, self._next)] if anew else []
            data = head + pack([*records, *notes], len(head), seed)
            try:
                self._place.create(name, data)
                break
            except NameTaken as taken:
                if not self._is_ours(taken) and claiming:
                    raise
                if not self._is_ours(taken):
                    self._ended = self._replaced(taken)
                    raise self._ended from None
                self._kept.append(_Kept(name, self._next, None))
                # an append of ours that failed, and yet is there: the next segment leaves it out
                self._next += 1
        else:
            raise JournalError(
                self._place.shown,
                f"{TRIES} segments from earlier tries are in the way",
                "resume the job",
            )
        if claiming:
            self._place.prove(name, data)
        self._tip = _Tip(name, self._next, seed, len(head), len(data))
        self._after = After(self._next, len(data), 0)
        self._kept.append(_Kept(name, self._next, None, claiming))
        self._next += 1
        self._note_numbers(records)
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
        return (
            not self._place.whole
        )  # under the lock, what has no whole header is what our own failed write left

    def _replaced(self, taken: NameTaken) -> JournalError:
        found = open_header(taken.data, taken.name)
        who = (
            f"{found.header.writer} with generation {found.header.generation}"
            if isinstance(found, Opened)
            else "another writer"
        )
        what = f"{who} has taken over; this is {self._writer} with generation {self.generation}"
        return JournalTaken(
            f"{self._place.shown}/{taken.name}",
            what,
            "stop this process: nothing it writes counts any more",
        )

    def _note_numbers(self, records: Iterable[Record]) -> None:
        numbers = [record.number for record in records if not record.is_note]
        if numbers:
            kept = self._kept[-1]
            kept.top = max(numbers) if kept.top is None else max(kept.top, *numbers)

    def roll(self) -> None:
        """The next append begins a new segment: before a snapshot, so that all before it can be
        pruned.
        """
        self._tip = None

    def prune(self, before: int) -> int:
        """Removes segments from the oldest on, as long as all their records have lower numbers; the
        one being written stays. Returns how many ended: from here on they are not read, also where
        the place refuses to remove them.
        """
        ended = self.give_up(before)
        self.sweep()
        return ended

    def give_up(self, before: int) -> int:
        """The first half of it: that they are no longer wanted is noted durably. A segment that is
        gone without a note was lost.
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
        """The oldest so many were given up. Of a store's those stay for ever by which writers were
        shut out: one that wakes late must find its next number taken.
        """
        self._doomed += [
            kept.name for kept in self._kept[:n] if not (kept.opens and self._place.whole)
        ]
        del self._kept[:n]

    def sweep(self) -> None:
        """The second half: what was given up goes, also what an earlier writer did not remove. What
        is refused is tried again next time.
        """
        doomed = list(self._doomed)  # more may be given up meanwhile
        if doomed:
            self._place.remove(doomed)
            del self._doomed[: len(doomed)]

    @property
    def removes_slowly(self) -> bool:
        """It asks a store, which may not answer for long."""
        return self._place.whole

    @property
    def doomed(self) -> int:
        """Segments that were given up and are still there."""
        return len(self._doomed)

    @property
    def shown(self) -> str:
        """Where it is, for people."""
        return self._place.shown

    @property
    def segments(self) -> int:
        return len(self._kept)

    def close(self) -> None:
        """Lets go of the journal. Nothing is lost without it."""
        self._tip = None
        self._place.close()
        self._ended = self._ended or JournalError(
            self._place.shown, "it was closed", "open it again"
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


def read(where: Where) -> Reading:
    """All of a journal, faults and all, whether or not somebody writes to it."""
    place = _place(where)
    reading = _load(place)
    if not reading.parts:
        raise JournalError(place.shown, "expected a journal, got no segment", "check the name")
    return reading


def read_all(where: Where) -> list[Record]:
    """The records of a journal; a fault is an error."""
    place = _place(where)
    reading = read(place)
    if reading.faults:
        raise _damaged(place, reading)
    return reading.records


def read_if_any(where: Where) -> list[Record]:
    """Return the records of a journal without holding it; an empty list where there is no journal.
    A fault is an error.
    """
    place = _place(where)
    reading = _load(place)
    if reading.faults:
        raise _damaged(place, reading)
    return reading.records


def _load(place: JournalStorage) -> Reading:
    for _ in range(TRIES):
        chain = SegmentChain()
        try:
            for name, data in place.fetch(place.names()):
                chain.feed(name, data)
            return chain.settle()
        except FileNotFoundError:
            continue  # pruned meanwhile
    raise JournalError(
        place.shown, f"its segments changed while they were read, {TRIES} times", "try again"
    )


def summary(reading: Reading) -> str:
    """What a journal holds, in one line."""
    records, header = reading.records, reading.header
    last = f", the last with number {records[-1].number}" if records else ""
    whose = (
        f" of job {header.job!r}, generation {header.generation} by {header.writer}"
        if header
        else ""
    )
    wrong = f", and {len(reading.faults)} faults" if reading.faults else ""
    return f"{len(records)} records{last}{whose}, in {len(reading.parts)} segments{wrong}"


def _damaged(place: JournalStorage, reading: Reading) -> JournalError:
    error = reading.faults[0].as_error(place.shown)
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
            "the journal is another job's: give this one a journal of its own, or mend the job",
        )


def _of_another_launch(place: JournalStorage, found: SegmentHeader) -> JournalTaken:
    what = (
        f"{found.writer} with generation {found.generation} has taken over: another launch of "
        "this job has gone on with its journal"
    )
    remedy = (
        "stop this job: nothing it does counts any more; to have it instead of the other, "
        'stop that one and launch with resume="auto"'
    )
    return JournalTaken(f"{place.shown}/{name_of(found.ordinal)}", what, remedy)


def _place(where: Where) -> JournalStorage:
    return place_of(where) if isinstance(where, str | os.PathLike) else where


def _closing(place: JournalStorage, opening: Callable[[], T]) -> T:
    """A place that could not be opened must not stay locked."""
    try:
        return opening()
    except NameTaken as taken:
        place.close()
        raise JournalError(
            f"{place.shown}/{taken.name}",
            "another writer made it at the same time",
            "stop the other writer first",
        ) from None
    except BaseException:
        place.close()
        raise
