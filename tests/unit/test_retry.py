"""Trying again: how often, how long, what is counted and what is said. Time is made up."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.concurrency.event_loop import EventLoop, ThreadExecutor
from overlord.errors import SourceError, StorageError
from overlord.loader.reader import SourceReader
from overlord.loader.samples import SourceOrder
from overlord.messages.data import Read
from overlord.sources.base import BadFile, File, ReadOptions, StorageUnreachable
from overlord.sources.chunk_reader import ChunkReader, OpenChunkCache
from overlord.sources.index import build_index
from overlord.sources.retry import (
    DISKS,
    Clock,
    Failure,
    StorageStats,
    check_same_file,
    classify_file_error,
    file_give_up_error,
    file_system_kind,
    retry_call,
)
from overlord.sources.timeouts import TIMEOUTS
from overlord.transforms.pipeline import Pipeline
from tests.corpus import write_rows
from tests.internals import open_window, replace_format, run_inline_below
from tests.processes import until


class Time:
    """It passes when somebody sleeps, or a try takes some."""

    def __init__(self, chance: float = 1.0) -> None:
        self.now, self.pauses, self._chance, self.worked = 0.0, list[float](), chance, 0.0

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    @property
    def clock(self) -> Clock:
        return Clock(
            lambda: self.now,
            self.sleep,
            lambda: self._chance,
            lambda thread: self.worked,
            lambda: self.worked,
        )


def trying(
    time: Time, fails: int, error: Exception, took_s: float = 0.0
) -> tuple[Any, StorageStats]:
    stats, left = StorageStats("web", time.clock), [fails]

    def once() -> str:
        time.now += took_s
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "bytes"

    try:
        return retry_call(
            once,
            classify_file_error,
            path="a.parquet",
            operation="read",
            stats=stats,
            give_up_error=file_give_up_error,
        ), stats
    except Exception as found:
        return found, stats


def test_pauses_double_up_to_the_longest_and_all_fit_into_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "60")
    time = Time()
    found, stats = trying(time, 10**6, OSError(errno.EIO, "no"))
    assert time.pauses[:8] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, TIMEOUTS.longest_pause_s]
    assert set(time.pauses[7:-1]) == {TIMEOUTS.longest_pause_s}
    assert time.now == pytest.approx(60), "the last try is at the deadline"
    assert isinstance(found, StorageUnreachable)
    assert (
        str(found)
        == f"could not be read: Input/output error after {len(time.pauses) + 1} attempts in "
        f"{time.now:.1f} s (seen: EIO x{len(time.pauses) + 1})"
    )
    assert stats.problem_metrics() == {
        "retries": len(time.pauses),
        "errors": {"EIO": len(time.pauses) + 1},
        "waited_s": time.now,
        "given_up": 1,
    }


@given(st.floats(0, 1), st.integers(0, 30), st.floats(0, 5))
def test_whatever_chance_says_the_answer_is_the_same_as_long_as_it_comes_in_time(
    chance: float, fails: int, took_s: float
) -> None:
    time = Time(chance)
    found, stats = trying(time, fails, OSError(errno.ESTALE, "no"), took_s)
    assert time.now <= 120 + took_s
    if found != "bytes":
        assert time.now + 2 * TIMEOUTS.longest_pause_s + took_s > 120  # it was not given up early
        return
    assert stats.problem_metrics()["errors"] == ({"ESTALE": fails} if fails else {})
    assert stats.retries == fails
    assert all(a <= 0.1 * 2**k and a <= TIMEOUTS.longest_pause_s for k, a in enumerate(time.pauses))


def test_it_is_said_once_that_something_is_tried_again_and_once_that_it_is_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "overlord"):
        assert trying(Time(), 5, OSError(errno.ENOENT, "no"))[0] == "bytes"
        assert trying(Time(), 0, OSError(errno.ENOENT, "no"))[0] == "bytes"
    assert [r.message for r in caplog.records] == [
        "source 'web', a.parquet: the file disappeared after the source was indexed (No such "
        "file or directory); "
        "retrying for up to 120 s",
        "source 'web', a.parquet: recovered after 3.1 s (6 attempts)",
    ]


@pytest.mark.parametrize(
    "error", [BadFile("no Parquet"), ValueError("no sense"), OSError("a decoder's"), KeyError("x")]
)
def test_what_is_wrong_with_the_data_is_not_tried_again(error: Exception) -> None:
    time = Time()
    found, stats = trying(time, 1, error)
    assert found is error
    assert (time.pauses, stats.problem_metrics()["errors"]) == ([], {})


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, "gone"),
        (errno.ENOTDIR, "gone"),
        (errno.EACCES, "denied"),
        (errno.EPERM, "denied"),
        (errno.EIO, "EIO"),
        (errno.ESTALE, "ESTALE"),
        (errno.ENOTCONN, "ENOTCONN"),
        (errno.EMFILE, "EMFILE"),
        (errno.ENOMEM, "ENOMEM"),
    ],
)
def test_what_the_system_says_may_pass_and_is_counted_by_its_kind(number: int, kind: str) -> None:
    found = classify_file_error(OSError(number, "no"))
    assert found is not None
    assert (found.kind, found.tries > 100) == (kind, True)
    assert found.remedy


def test_what_is_under_way_counts_as_waited(tmp_path: Path) -> None:
    time = Time()
    stats = StorageStats("web", time.clock)
    attempt = stats.begin("a.parquet")
    time.now = 0.9
    assert stats.problem_metrics()["waited_s"] == 0
    time.now, time.worked = 8.0, 1.0  # a second of it was work
    assert stats.problem_metrics()["waited_s"] == 7
    attempt.failures.append(Failure("EIO", "no"))
    stats.end(attempt)
    stats.end(attempt)
    assert (stats.problem_metrics()["waited_s"], stats.oldest()) == (7, None)
    assert pickle.loads(pickle.dumps(stats)).source == "web"


# the same file


def indexed(path: Path) -> File:
    stat = path.stat()
    return File(str(path), stat.st_size, stat.st_mtime_ns)


def test_a_file_is_the_same_as_long_as_size_and_time_are(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"12345")
    os.utime(path, ns=(0, 1_234_567_891_234_567_891))
    file = indexed(path)
    check_same_file(file)
    for ns in (
        1_234_567_891_234_567_000,
        1_234_567_891_234_000_000,
        1_234_567_891_000_000_000,
    ):  # as tools copy times
        os.utime(path, ns=(0, ns))
        check_same_file(file)
    os.utime(path, ns=(0, 1_234_567_891_234_567_892))
    with pytest.raises(
        StorageUnreachable,
        match=r"expected 5 bytes of 2009-02-13 23:31:31\.234567891, "
        r"got 5 bytes of 2009-02-13 23:31:31\.234567892",
    ):
        check_same_file(file)
    path.write_bytes(b"123456")
    os.utime(path, ns=(0, file.mtime_ns))
    with pytest.raises(StorageUnreachable, match=r"expected 5 bytes of .*, got 6 bytes of"):
        check_same_file(file)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        check_same_file(file)


# reads that hang


class Slow:
    """The file of a mount that does not answer before it is told to."""

    def __init__(self) -> None:
        self.go, self.entered = threading.Event(), threading.Event()


def hanging(tmp_path: Path, time: Time, slow: Slow) -> SourceReader:
    options = ReadOptions(slice_rows=8, columns=("tokens",))
    index = build_index(
        "web",
        write_rows(tmp_path, "parquet", [{"tokens": [k]} for k in range(16)], files=1),
        None,
        options,
    )
    chunks = ChunkReader(index, options, OpenChunkCache(), time.clock)

    class Hanging:
        def __init__(self, real: Any):
            self.held_bytes, self._real = real.held_bytes, real

        def read(self, *args: Any) -> Any:
            slow.entered.set()
            assert slow.go.wait(30)
            return self._real.read(*args)

    replace_format(chunks, Hanging)
    order = SourceOrder(name="web", n_chunks=1, seed=0, shuffle=False, shuffle_chunks=1)
    return SourceReader(order, chunks, Pipeline("web", [], seed=0, context=8, on_long="truncate"))


def test_a_hung_read_is_reported_and_given_up_after_its_deadline_and_dropped_when_it_ends(
    tmp_path: Path,
) -> None:
    time, slow = Time(), Slow()
    reader, loop, told = hanging(tmp_path, time, slow), EventLoop("test"), list[Any]()
    executor = ThreadExecutor(1, loop)
    loop.start(lambda error: told.append(error))
    try:
        executor.submit(
            "read",
            lambda: reader.read(Read(0, 0, 0, 0, (0,))),
            lambda *outcome: told.append(outcome),
            waits=reader.waits,
        )
        assert slow.entered.wait(30)
        assert reader.activity == ""
        time.now = 12.0
        assert reader.activity == f"reading {reader.chunks.index.files[0].path} for 12 s"
        time.worked, time.now = (
            150.0,
            200.0,
        )  # it unpacks something large: that is no reason to give up
        assert reader.overdue() is None
        time.now = 322.0
        until(lambda: told)
        [(outcome, error)] = told
        assert outcome is None
        assert isinstance(error, StorageError)
        assert "got no end for 122.0 s" in str(error)
        assert reader.activity == ""
        slow.go.set()  # the answer comes at last: nobody hears of it, and the reader is as it was
        loop.call(lambda: None, "the event loop")
        executor.submit("more", lambda: "more", lambda *outcome: told.append(outcome))
        until(lambda: len(told) == 2)
        assert told[1] == ("more", None)
        assert open_window(reader) is None
        assert reader.read(Read(0, 0, 0, 0, (0,))).rows == 8
    finally:
        slow.go.set()
        executor.close()
        loop.stop()


def test_a_thread_that_hangs_is_replaced(tmp_path: Path) -> None:
    time, slow = Time(), Slow()
    reader, loop, told = hanging(tmp_path, time, slow), EventLoop("test"), list[Any]()
    executor = ThreadExecutor(1, loop, inline_s=0.0)
    loop.start(lambda error: told.append(error))
    try:
        executor.submit(
            "read",
            lambda: reader.read(Read(0, 0, 0, 0, (0,))),
            lambda *outcome: told.append(outcome),
            waits=reader.waits,
        )
        assert slow.entered.wait(30)
        executor.submit("other", lambda: "done", lambda *outcome: told.append(outcome))
        until(lambda: told)
        assert told == [("done", None)]
    finally:
        slow.go.set()
        executor.close()
        loop.stop()


def test_short_reads_of_a_disk_are_done_at_once_and_one_that_fails_is_left_to_a_thread(
    tmp_path: Path,
) -> None:
    slow = Slow()
    slow.go.set()
    reader, loop, told = hanging(tmp_path, Time(), slow), EventLoop("test"), list[Any]()
    file = Path(reader.chunks.index.files[0].path)
    executor = ThreadExecutor(1, loop, inline_read_s=0.9)
    loop.start(lambda error: told.append(error))
    where: list[str] = []

    def read(t: int) -> Any:
        where.append(threading.current_thread().name)
        return reader.read(Read(0, 0, 0, t, (0,)))

    def ask(t: int, n: int) -> Any:
        def submit() -> None:
            executor.submit(
                "read", lambda: read(t), lambda *outcome: told.append(outcome), waits=reader.waits
            )

        loop.call(submit, "the event loop")
        until(lambda: len(told) == n)
        return told[-1]

    try:
        assert ask(0, 1)[0].rows == 8  # nobody knows yet how long it takes
        run_inline_below(executor, 60.0)  # short, on a machine that stands for some seconds
        assert ask(1, 2)[0].rows == 8
        hidden = file.rename(file.with_suffix(".away"))
        back = lambda seconds: hidden.rename(file)  # noqa: E731 the file comes back while somebody waits for it
        reader.chunks.stats.clock = replace(reader.chunks.stats.clock, sleep=back)  # type: ignore[attr-defined]
        assert ask(0, 3)[0].rows == 8
        assert where == [
            "overlord-worker-0",
            "overlord-loop-test",
            "overlord-loop-test",
            "overlord-worker-0",
        ]
        assert reader.chunks.stats.errors == {"gone": 2}  # type: ignore[attr-defined]
    finally:
        executor.close()
        loop.stop()


@pytest.mark.parametrize(
    ("kind", "disk"),
    [("ext4", True), ("overlay", True), ("nfs4", False), ("fuse.s3fs", False), ("lustre", False)],
)
def test_only_disks_of_this_machine_are_known_to_answer(kind: str, disk: bool) -> None:
    mounts = (
        "22 1 0:31 / / rw - tmpfs none rw\n36 22 0:45 / /data\\040two rw,noatime shared:1 - "
        f"{kind} host:/x rw\nbroken line"
    )
    assert file_system_kind(os.makedev(0, 45), mounts) == kind
    assert (kind in DISKS) is disk
    assert file_system_kind(os.makedev(8, 1), mounts) == ""


def test_a_storage_error_is_a_source_error() -> None:
    assert isinstance(
        pickle.loads(pickle.dumps(StorageError("web", "gone", "a", "b"))), SourceError
    )
