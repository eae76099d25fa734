"""Who writes beside the rest: whatever goes wrong there is told to all who wait, and what is durable counts."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from overlord.errors import JournalError
from overlord.journal import directory, log
from overlord.journal.log import Log
from overlord.journal.writer import Writer
from tests.journals import JOB, numbers, plan

pytestmark = pytest.mark.timeout(60)


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


def test_a_file_that_its_server_has_lost_is_a_failure_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Log.create(tmp_path, JOB) as made:
        made.append([plan(0)])
        monkeypatch.setattr(directory.os, "fstat", _stale)
        monkeypatch.setattr(directory.os, "close", _closing_stale(os.close))
        says = rf"{tmp_path}/000000000000.ovj: could not be looked at before an append at byte \d+: .*\(ESTALE\); the server .* resume"
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
    with Log.create(tmp_path, JOB) as made:
        writer = Writer(made, told if beside else None)
        writer.wait(writer.put([plan(0)]))
        assert not beside or told.once()
        monkeypatch.setattr(log, "pack", _no_memory)
        says = rf"journal {tmp_path}: wanted an append, found MemoryError: no room for 3 GiB; .*acknowledged is kept: mend that, and resume"
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
