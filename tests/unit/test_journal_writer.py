"""Who writes beside the rest: whatever goes wrong there is told to all who wait, and what is
durable counts.
"""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from overlord.errors import JournalError
from overlord.journal import log, storage
from overlord.journal.log import JournalLog
from overlord.journal.write_ahead import AppendThread
from tests.internals import JOURNAL_SYNCS, join_writer
from tests.journals import JOB, Memory, numbers, plan

pytestmark = pytest.mark.timeout(200)


class Told:
    """Counts what it is told, and can be waited for."""

    def __init__(self) -> None:
        self._times = threading.Semaphore(0)

    def __call__(self) -> None:
        self._times.release()

    def once(self) -> bool:
        return self._times.acquire(timeout=30)


def _stale(fd: int) -> Any:
    raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _no_memory(*args: Any) -> bytes:
    raise MemoryError("no room for 3 GiB")


def test_a_file_that_its_server_has_lost_is_a_failure_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with JournalLog.create(tmp_path, JOB) as made:
        made.append([plan(0)])
        monkeypatch.setattr(storage.os, "fstat", _stale)
        monkeypatch.setattr(storage.os, "close", _closing_stale(os.close))
        says = (
            rf"{tmp_path}/000000000000.ovj: could not be checked before an append at byte \d+: "
            r".*\(ESTALE\); the server .* resume"
        )
        with pytest.raises(JournalError, match=says):
            made.append([plan(1)])
        monkeypatch.undo()
        made.append([plan(2)])  # in a segment of its own
    assert numbers(tmp_path) == [0, 2]


def _closing_stale(real: Any) -> Any:
    def close(fd: int) -> None:
        real(fd)
        _stale(fd)

    return close


@pytest.mark.parametrize("beside", [True, False])
def test_whatever_is_raised_while_it_writes_is_told_to_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told = Told()
    with JournalLog.create(tmp_path, JOB) as made:
        writer = AppendThread(made, told if beside else None)
        writer.wait(writer.put([plan(0)]))
        assert not beside or told.once()
        monkeypatch.setattr(log, "pack", _no_memory)
        says = (
            rf"journal {tmp_path}: an append failed: MemoryError: no room for 3 GiB; fix the cause "
            r"\(the traceback is in the log\), and resume: all that was acknowledged is kept"
        )
        with pytest.raises(JournalError, match=says):
            writer.wait(writer.put([plan(1)]), 30)
        assert not beside or told.once()
        assert isinstance(writer.failed, JournalError)
        assert isinstance(writer.failed.__cause__, MemoryError)
        monkeypatch.undo()
        with pytest.raises(JournalError, match="no room for 3 GiB"):
            writer.put([plan(2)])
        assert writer.done == 1
        assert writer.close(30)
    assert numbers(tmp_path) == [0]
    assert "Traceback" in caplog.text
    assert "_no_memory" in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_an_append_that_outlasts_the_closing_lets_go_of_the_journal_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    under_way, gate, real = threading.Event(), threading.Event(), JOURNAL_SYNCS.real

    def slow(fd: int) -> None:
        under_way.set()
        assert gate.wait(30)
        _stale(fd) if fails else real(fd)

    writer = AppendThread(JournalLog.create(tmp_path, JOB), lambda: None)
    writer.wait(writer.put([plan(0)]))
    JOURNAL_SYNCS.replace(monkeypatch, slow)
    writer.put([plan(1)])
    assert under_way.wait(30)
    writer.put([plan(2)])
    assert not writer.close(0.01)
    with pytest.raises(JournalError, match="writes to it"):
        JournalLog.open(tmp_path, JOB)
    gate.set()
    join_writer(writer, 30)
    assert writer.close(30), "a second time"
    monkeypatch.undo()
    again, found = JournalLog.open(tmp_path, JOB)
    with again:
        assert [record.number for record in found] in ([[0], [0, 1]] if fails else [[0, 1, 2]])


# pruning


def _refused(self: Path, missing_ok: bool = False) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def _three_segments(path: Path) -> JournalLog:
    made = JournalLog.create(path, JOB)
    for k in range(3):
        made.append([plan(k)])
        made.roll()
    return made


def segments(path: Path) -> int:
    return len(list(path.glob("*.ovj")))


def test_a_refused_removal_is_logged_once_and_tried_again_and_nothing_is_lost_or_read_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _three_segments(tmp_path) as made:
        writer = AppendThread(made)
        monkeypatch.setattr(storage.Path, "unlink", _refused)
        for k, before in ((3, 1), (4, 2), (5, None)):
            writer.wait(writer.put([plan(k)], before=before))
            assert numbers(tmp_path) == [n for n in range(k + 1) if n >= (before or 2)]
        assert (writer.failed, segments(tmp_path)) == (None, 4)
        (warned,) = [r.getMessage() for r in caplog.records if r.name == "overlord"]
        assert warned == (
            f"journal {tmp_path}/000000000000.ovj: 1 pruned segments stay: could not be removed: "
            "Operation not permitted (EPERM); let the job remove them (in a store: DeleteObject). "
            "The job continues, the journal grows, and the next pruning tries again"
        )
        assert writer.unpruned == warned.replace("1 pruned", "2 pruned", 1)
        monkeypatch.undo()
        writer.put([plan(6)])
        assert segments(tmp_path) == 4
        writer.put([], before=2)
        assert (writer.unpruned, segments(tmp_path), numbers(tmp_path)) == ("", 2, [2, 3, 4, 5, 6])


def test_what_could_not_be_removed_goes_when_the_next_writer_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _three_segments(tmp_path) as made:
        monkeypatch.setattr(storage.Path, "unlink", _refused)
        AppendThread(made).put([plan(3)], before=2)
    monkeypatch.undo()
    again, found = JournalLog.open(tmp_path, JOB)
    with again:
        assert [record.number for record in found] == [2, 3]
        assert segments(tmp_path) == 5
        AppendThread(again).put([], before=0)
        assert (segments(tmp_path), numbers(tmp_path)) == (3, [2, 3])


def test_who_waits_does_not_wait_for_a_removal_and_a_refused_one_does_not_end_the_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, gate = Told(), threading.Event()

    def slow(self: Path, missing_ok: bool = False) -> None:
        assert gate.wait(30)
        _refused(self)

    with _three_segments(tmp_path) as made:
        writer = AppendThread(made, told)
        monkeypatch.setattr(storage.Path, "unlink", slow)
        writer.wait(writer.put([plan(3)], before=2), 30)
        assert told.once()
        gate.set()
        writer.wait(writer.put([plan(4)]), 30)
        assert writer.close(30)
        assert "could not be removed" in writer.unpruned
    assert numbers(tmp_path) == [2, 3, 4]


def test_a_pruning_note_that_cannot_be_written_is_a_failure_and_earlier_records_count() -> None:
    place = Memory()
    made = JournalLog.create(place, JOB)
    for k in range(3):
        made.append([plan(k)])
        made.roll()
    writer = AppendThread(made)
    place.fault = lambda data: 0 if _bare(b".pruned") in data else None
    with pytest.raises(JournalError, match="EIO"):
        writer.put([plan(3)], before=2)
    writer.wait(1)
    assert (writer.done, writer.unpruned) == (1, "")
    with pytest.raises(JournalError, match="EIO"):
        writer.put([plan(4)])
    assert numbers(place) == [0, 1, 2, 3]


def _bare(text: bytes) -> bytes:
    """As it stands in a record: every byte XOR a5."""
    return bytes(byte ^ 0xA5 for byte in text)


class Unanswering(Memory):
    """A store that takes what is written, and does not answer when something is to be removed."""

    def __init__(self) -> None:
        super().__init__(whole=True)
        self.asked, self.answers = threading.Event(), threading.Event()

    def remove(self, names: Any) -> None:
        self.asked.set()
        assert self.answers.wait(30)
        super().remove(names)


def test_plans_do_not_wait_for_a_store_that_does_not_answer_when_something_is_to_be_removed() -> (
    None
):
    place = Unanswering()
    with JournalLog.create(place, JOB) as made:
        writer = AppendThread(made, lambda: None)
        writer.wait(writer.put([plan(0)]))
        writer.put([plan(1)], rolls=True, before=1)
        assert place.asked.wait(30)
        writer.wait(writer.put([plan(2)]), 10)
        writer.wait(writer.put([plan(3)], before=3), 10)
        place.answers.set()
        assert writer.close(10)
    assert numbers(place)[-1] == 3
    assert "000000000001.ovj" not in place.files, "what held the first plan"
