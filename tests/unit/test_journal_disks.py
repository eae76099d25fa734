"""Disks that fail under the journal: what is kept, what is said, and that nothing is taken for
durable which is not.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from overlord.errors import JournalError
from overlord.journal import storage
from overlord.journal.log import JournalLog, read
from overlord.journal.segments import name_of
from overlord.journal.verify import verify
from tests.internals import JOURNAL_SYNCS
from tests.journals import JOB, numbers, plan


@pytest.mark.parametrize("call", ["append", "create"])
def test_a_sync_that_fails_gives_the_segment_up_for_good(tmp_path, monkeypatch, call):
    """The kernel may have thrown the bytes away and say nothing the second time."""
    real = JOURNAL_SYNCS.real
    with JournalLog.create(tmp_path, JOB) as log:
        log.append([plan(0)])
        if call == "create":
            log.roll()
        size = (tmp_path / name_of(0)).stat().st_size
        JOURNAL_SYNCS.replace(monkeypatch, _failing(errno.EIO))
        with pytest.raises(
            JournalError,
            match=r"make them durable: Input/output error \(EIO\); the disk fails: copy the journal",
        ):
            log.append([plan(1)])
        JOURNAL_SYNCS.replace(monkeypatch, real)
        after = (tmp_path / name_of(0)).stat().st_size
        assert (after > size) == (call == "append")
        log.append([plan(2)])
        assert (tmp_path / name_of(0)).stat().st_size == after
        assert log.segments == 2
    assert numbers(tmp_path) == [0, 2]
    assert [cut.offset for cut in read(tmp_path).cuts] == ([size] if call == "append" else [])


def _failing(number: int):
    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@contextmanager
def tiny(path: Path, options: str = "size=64k") -> Iterator[Path]:
    """A file system of its own, where this process may mount one."""
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@contextmanager
def file_limit(path: Path, nbytes: int = 40_000) -> Iterator[Path]:
    """No file may grow beyond that; Python ignores the signal, so that the write says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _fill(log: JournalLog, done: list[int]) -> None:
    for k in range(100):
        log.append([plan(k, 3000)])
        done.append(k)


@pytest.mark.parametrize(
    ("limit", "says"),
    [(tiny, r"No space left on device \(ENOSPC\); free some space"), (file_limit, r"\(EFBIG\)")],
)
def test_on_a_full_disk_all_that_was_acknowledged_is_kept_and_the_log_goes_on_when_there_is_room(
    tmp_path, limit, says
):
    with limit(tmp_path / "disk") as disk:
        disk.mkdir(exist_ok=True)
        (disk / "ballast").write_bytes(bytes(12_000))
        done: list[int] = []
        with JournalLog.create(disk / "j", JOB) as log:
            with pytest.raises(
                JournalError, match=rf"could not append 3\d\d\d bytes at byte \d+: .*{says}"
            ):
                _fill(log, done)
            assert len(done) > 5
            assert (numbers(disk / "j"), read(disk / "j").faults) == (done, [])
            if limit is tiny:
                with pytest.raises(JournalError, match="ENOSPC"):
                    log.append([plan(100, 5000)])  # not even a new segment
                (disk / "ballast").unlink()
            log.append([plan(101, 3000)])
            assert numbers(disk / "j") == [*done, 101]
        log, before = JournalLog.open(disk / "j", JOB)
        assert [record.number for record in before] == [*done, 101]
        log.close()


def test_a_directory_that_cannot_be_written_is_told_at_once(tmp_path):
    with tiny(tmp_path / "disk") as disk:
        with JournalLog.create(disk / "j", JOB) as log:
            log.append([plan(0)])
            subprocess.run(
                ["mount", "-o", "remount,ro", str(disk)], check=False, capture_output=True
            )  # refused while a file is open
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for path in ("new", "j"):
            with pytest.raises(
                JournalError,
                match=r"Read-only file system \(EROFS\); let the job write there, or give it another",
            ):
                JournalLog.open(disk / path, JOB)
        assert numbers(disk / "j") == [0]
        assert verify(disk / "j").faults == ()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_permission_is_told_at_once(tmp_path):
    (tmp_path / "j").mkdir(mode=0o555)
    with pytest.raises(JournalError, match=r"\(EACCES\); let the job write there"):
        JournalLog.create(tmp_path / "j", JOB)


def test_a_file_where_the_directory_should_be_is_reported(tmp_path):
    (tmp_path / "j").write_text("")
    with pytest.raises(JournalError, match=r"\(EEXIST\); name a directory"):
        JournalLog.create(tmp_path / "j", JOB)


def test_what_is_acknowledged_was_synced_and_what_is_gone_on_from_too(tmp_path, monkeypatch):
    """In this order: what a segment holds, then that it is there. A writer that was killed may have
    written what no disk has yet.
    """
    synced: list[str] = []
    for module, call in ((storage.os, "fsync"), (storage, "_sync_data")):
        monkeypatch.setattr(module, call, _noting(getattr(module, call), synced))

    def since() -> list[str]:
        found, synced[:] = list(synced), []
        return found

    with JournalLog.create(tmp_path / "a" / "j", JOB) as log:
        assert since() == [
            tmp_path.name,
            "a",
            name_of(0),
            "j",
        ]  # each new directory in the one above
        log.append([plan(0), plan(1)])
        assert since() == [name_of(0)]
        log.roll()
        log.append([plan(2)])
        assert since() == [name_of(1), "j"]
        log.prune(2)
        assert since() == [name_of(1), "j"]
    log, _ = JournalLog.open(tmp_path / "a" / "j", JOB)
    log.close()
    assert since() == [name_of(1), "j", name_of(2), "j"]


def _noting(call: Callable[[int], None], synced: list[str]) -> Callable[[int], None]:
    def noted(fd: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
        call(fd)

    return noted
