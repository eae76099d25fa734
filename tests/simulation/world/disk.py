"""The disk, or the store, that the journal of a simulated job lies on. It outlives processes; what
was being written may not.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator, Sequence

from overlord.errors import JournalError
from overlord.journal.log import JournalLog
from overlord.journal.storage import NameTaken, refusal
from overlord.journal.write_ahead import AppendThread
from tests.simulation.world.world import Killed, Process

WRITE_S = 0.002  # median


def writer_of(process: Process) -> Callable[[JournalLog, Callable[[], None] | None], AppendThread]:
    """Return how a process of the world makes the writer of its journal, without a thread.

    It writes some time later; a caller that waits for an append has it written at once.
    """

    def later(turn: Callable[[], None]) -> None:
        process.world.at(process.world.delay(WRITE_S), turn, process)

    return lambda log, on_change: AppendThread(log, on_change, later)


class SimDisk:
    """Segments by name. ``store``: objects are written whole or not at all, never over another, and
    nobody is locked out.
    """

    def __init__(self, chance: random.Random, *, store: bool):
        self.chance, self.store = chance, store
        self.segments: dict[str, bytes] = {}
        self.holder: Process | None = None
        self.full = False
        self.tears = False  # the next write is cut short, with the process that writes

    def place(self, process: Process) -> SimPlace:
        return SimPlace(self, process)


class SimPlace:
    """The disk as one process has it; ``journal/storage.py`` says what each word means."""

    shown = "the simulated disk"
    # Journals name their writer. Where a write is torn depends on how long it is, and that must not
    # depend on the process that simulates.
    writer = "process 12345 on vm"

    def __init__(self, disk: SimDisk, process: Process):
        self._disk, self._process = disk, process
        self.whole = disk.store

    def hold(self) -> None:
        holder = self._disk.holder
        if not self.whole and holder is not None and holder.alive and holder is not self._process:
            raise JournalError(self.shown, f"{holder.name} writes to it", "stop it first")
        self._disk.holder = self._process

    def names(self) -> list[str]:
        return sorted(self._disk.segments)

    def fetch(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        for name in names:
            if name not in self._disk.segments:
                raise FileNotFoundError(name)
            yield name, self._disk.segments[name]

    def settle(self, name: str) -> None:
        """What can be read is there for good."""

    def create(self, name: str, data: bytes) -> None:
        if name in self._disk.segments:
            raise NameTaken(name, self._disk.segments[name])
        self._write(name, b"", data)

    def check_exclusive(self, name: str, data: bytes) -> None:
        """A second one is refused, as everywhere here."""

    def append(self, name: str, data: bytes, at: int) -> None:
        self._write(name, self._disk.segments[name][:at], data)

    def _write(self, name: str, before: bytes, data: bytes) -> None:
        disk = self._disk
        written = data
        if disk.full or disk.tears:
            n = disk.chance.choice((0, disk.chance.randrange(len(data) + 1), len(data)))
            written = data[:n] if not disk.store else data if n == len(data) else b""
        if written or not disk.store:
            disk.segments[name] = before + written
        if disk.tears:
            disk.tears = False
            self._process.kill()
            raise Killed
        if disk.full:
            raise refusal(
                self.shown, f"write {name}", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            )

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            self._disk.segments.pop(name, None)

    def close(self) -> None:
        if self._disk.holder is self._process:
            self._disk.holder = None
