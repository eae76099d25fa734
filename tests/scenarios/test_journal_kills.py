"""Writers that are really killed, in the middle of what they do: every record they acknowledged is
there afterwards.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from overlord.errors import JournalError
from overlord.journal.log import JournalLog, read
from overlord.journal.record import Record
from tests.journals import JOB

pytestmark = pytest.mark.timeout(200)
KILLS = 30
NUMBER = struct.Struct("<q")


class Writer:
    """A process that says by a pipe what it has done. Forked, not spawned: thirty of them in a few
    seconds.
    """

    def __init__(self, body: Callable[[Callable[[int], None]], None]):
        self.out, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self.out)
                body(lambda number: os.write(told, NUMBER.pack(number)) and None)
                code = 0
            finally:
                os._exit(code)
        os.close(told)

    def said(self, n: int) -> list[int]:
        """The next n numbers; fewer where it ended."""
        found = []
        while len(found) < n and (data := os.read(self.out, NUMBER.size)):
            while len(data) < NUMBER.size:
                data += os.read(self.out, NUMBER.size - len(data))
            found += [n for (n,) in NUMBER.iter_unpack(data)]
        return found

    def kill(self) -> list[int]:
        """The rest of what it said."""
        os.kill(self.pid, signal.SIGKILL)
        rest = self.said(10**9)
        os.waitpid(self.pid, 0)
        os.close(self.out)
        return rest


def body_of(number: int) -> bytes:
    """Sizes from nothing to some hundred pages, so that kills fall into the middle of writes."""
    return random.Random(number).randbytes(
        random.Random(number).choice([0, 100, 5_000, 30_000, 200_000])
    )


def die_in_a_write(appends: int, rng: random.Random) -> None:
    """From now on in this process: after so many writes to files one gets to some byte of its data,
    and no further.
    """
    real, left = os.write, [appends]

    def write(fd: int, data: bytes | memoryview) -> int:
        left[0] -= len(data) > NUMBER.size  # what is told by the pipe does not count
        if left[0] < 0:
            real(fd, data[: rng.randrange(len(data))])
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, data)

    os.write = write  # type: ignore[assignment]


def write_for_ever(path: Path, tell: Callable[[int], None]) -> None:
    log, before = JournalLog.open(path, JOB, segment_bytes=400_000)
    number = before[-1].number + 1 if before else 0
    while True:
        log.append(
            [
                Record.of("plan", number, body_of(number)),
                Record.of("plan", number + 1, body_of(number + 1)),
            ]
        )
        tell(number + 1)
        number += 2
        if number % 16 == 0:
            log.prune(number - 20)


def test_every_acknowledged_record_survives_thirty_kills(tmp_path):
    rng, acknowledged, cuts = random.Random(5), -1, 0
    for k in range(KILLS):
        appends = rng.randrange(1, 6)

        def work(
            tell: Callable[[int], None], by_itself: bool = k % 2 == 0, appends: int = appends
        ) -> None:
            if by_itself:
                die_in_a_write(appends, rng)
            write_for_ever(tmp_path, tell)

        writer = Writer(work)
        said = writer.said(appends if k % 2 else 10**9)
        deadline = time.perf_counter() + rng.random() * 0.01  # some way into the next append
        while time.perf_counter() < deadline:
            pass
        acknowledged = max([acknowledged, *said, *writer.kill()])
        held = read(tmp_path)
        assert held.faults == []
        cuts += bool(held.cuts and held.cuts[-1].segment == held.parts[-1].name)
        found = held.records
        numbers = [record.number for record in found] or [-1]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert (
            acknowledged <= numbers[-1] <= acknowledged + 2
        )  # at most the append that was under way
        assert all(record.body == body_of(record.number) for record in found)
        acknowledged = numbers[-1]
    assert acknowledged > KILLS
    assert cuts >= KILLS // 3, "hardly a kill fell into a write"


def test_the_lock_names_its_holder_and_is_free_as_soon_as_that_is_dead(tmp_path):
    def hold(tell: Callable[[int], None]) -> None:
        log = JournalLog.create(tmp_path, JOB)
        log.append([Record.of("plan", 0, b"")])
        tell(0)
        signal.pause()

    writer = Writer(hold)
    assert writer.said(1) == [0]
    with pytest.raises(JournalError, match=rf"process {writer.pid} on \S+ writes to it"):
        JournalLog.open(tmp_path, JOB)
    writer.kill()
    log, before = JournalLog.open(tmp_path, JOB)
    assert (len(before), log.generation) == (1, 2)
    log.close()


def test_a_child_that_outlives_the_writer_does_not_keep_the_lock(tmp_path):
    def hold(tell: Callable[[int], None]) -> None:
        JournalLog.create(tmp_path, JOB).append([Record.of("plan", 0, b"")])
        if (child := os.fork()) == 0:
            time.sleep(30)
            os._exit(0)
        tell(child)
        signal.pause()

    writer = Writer(hold)
    (child,) = writer.said(1)
    try:
        os.kill(writer.pid, signal.SIGKILL)
        os.waitpid(writer.pid, 0)
        os.kill(child, 0)  # it lives
        log, before = JournalLog.open(tmp_path, JOB)
        assert len(before) == 1
        log.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(writer.out)
