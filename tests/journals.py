"""Helpers for tests of the journal: a storage in memory that fails on command."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from overlord.journal.log import JournalLog, Where, read_all
from overlord.journal.record import Record
from overlord.journal.segments import Header, Reading, SegmentChain
from overlord.journal.storage import NameTaken, process_label, refusal

JOB = Header(job="demo", fingerprint={"draw": "exact-1", "web": "abc"})


class Memory:
    """A storage that holds segments as bytes.

    ``fault`` is called before every write. It returns how many bytes arrive before the write fails;
    None: the write succeeds.
    """

    def __init__(self, whole: bool = False):
        self.shown, self.whole, self.writer = "memory", whole, process_label()
        self.files: dict[str, bytes] = {}
        self.fault: Callable[[bytes], int | None] = lambda data: None
        self.stays = False  # a segment that could not be created is not removed

    def hold(self) -> None: ...
    def close(self) -> None: ...
    def settle(self, name: str) -> None: ...
    def check_exclusive(self, name: str, data: bytes) -> None: ...

    def names(self) -> list[str]:
        return sorted(self.files)

    def fetch(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        yield from ((name, self.files[name]) for name in names)

    def create(self, name: str, data: bytes) -> None:
        if name in self.files:
            raise NameTaken(name, self.files[name])
        try:
            self._write(name, data)
        except Exception:
            if not self.stays:
                del self.files[name]
            raise

    def append(self, name: str, data: bytes, at: int) -> None:
        assert len(self.files[name]) == at, "an append to what is not as it was left"
        self._write(name, data)

    def _write(self, name: str, data: bytes) -> None:
        arrive = self.fault(data)
        self.files[name] = self.files.get(name, b"") + data[:arrive]
        if arrive is not None:
            raise refusal(name, "write", OSError(errno.EIO, "Input/output error"))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self.files.pop(name, None)

    def copy(self) -> Memory:
        made = Memory(self.whole)
        made.files = dict(self.files)
        return made


def written(appends: Sequence[Sequence[Record]], segment_bytes: int = 2**24) -> Memory:
    """Return a journal with these appends."""
    place = Memory()
    log = JournalLog.create(place, JOB, segment_bytes=segment_bytes)
    for records in appends:
        log.append(records)
    return place


def reading(files: dict[str, bytes]) -> Reading:
    chain = SegmentChain()
    for name in sorted(files):
        chain.feed(name, files[name])
    return chain.settle()


def plain(records: Sequence[Record]) -> list[tuple[str, int, Any]]:
    return [(record.kind, record.number, record.body) for record in records]


def plan(number: int, nbytes: int = 20) -> Record:
    return Record.of("plan", number, bytes([number % 251]) * nbytes)


def numbers(where: Where) -> list[int]:
    return [record.number for record in read_all(where)]
