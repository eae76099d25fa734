"""Files that fail under a running job, for real: gone, moved away, cut short, overwritten, not what
they were. The same stream, or an error that names the file.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.errors import StorageError
from overlord.messages.control import Refill, SourceLost
from tests.corpus import write_rows
from tests.internals import LOCAL_FILES, loop_of, runtime_of
from tests.mounts import fail, hang, let_go, mounted
from tests.processes import RUNTIMES, WORKER_RUNTIME, until, workers_of
from tests.store_jobs import BIG, FORMATS, delivered, in_order, source

pytestmark = pytest.mark.timeout(200)
SET_ASIDE = ".aside"
Break = Callable[[Path], Callable[[], None]]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("corpora")
    for format in FORMATS:
        write_rows(root / format, format, BIG[:800], files=3, row_group_size=100, batch_rows=60)
    return {format: root / format for format in FORMATS}


@pytest.fixture(scope="module")
def undisturbed(corpora: dict[str, Path]) -> dict[str, list[Any]]:
    found = {}
    for format, where in corpora.items():
        with ov.launch(in_order(str(where), format)) as session:
            found[format] = delivered(session.client(0))
    return found


@pytest.fixture
def files(corpora: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A copy of a corpus to be broken. Times are kept: they tell a file from its replacement."""
    return lambda format: Path(shutil.copytree(corpora[format], tmp_path / "data" / format))


# ways to break all files of a directory; each returns what mends them


def each(act: Callable[[Path], Callable[[], None]]) -> Break:
    def every(where: Path) -> Callable[[], None]:
        back = [act(path) for path in sorted(where.iterdir())]
        # The last first: when the one that is being read is well, so are those that come next.
        return lambda: [mend() for mend in reversed(back)] and None  # type: ignore[func-returns-value]

    return every


def set_aside(path: Path) -> Path:
    aside = path.with_name(f"{SET_ASIDE}-{path.name}")
    path.rename(aside)
    return aside


def removed(path: Path) -> Callable[[], None]:
    aside = set_aside(path)
    return lambda: aside.rename(path) and None  # type: ignore[func-returns-value]


def copied_back(path: Path) -> Callable[[], None]:
    """Its place on the disk is another one afterwards."""
    kept = path.with_name(f"{SET_ASIDE}-{path.name}")
    shutil.copy2(path, kept)
    path.unlink()
    return lambda: shutil.copy2(kept, path) and None  # type: ignore[func-returns-value]


def made_a_directory(path: Path) -> Callable[[], None]:
    aside = set_aside(path)
    path.mkdir()

    def mend() -> None:
        path.rmdir()
        aside.rename(path)

    return mend


def made_a_dangling_link(path: Path) -> Callable[[], None]:
    aside = set_aside(path)
    path.symlink_to("nowhere")
    return lambda: aside.replace(path) and None  # type: ignore[func-returns-value]


def made_a_pipe(path: Path) -> Callable[[], None]:
    """Opened, it would hang for ever."""
    aside = set_aside(path)
    os.mkfifo(path)
    return lambda: aside.replace(path) and None  # type: ignore[func-returns-value]


def rewritten(change: Callable[[bytes], bytes]) -> Callable[[Path], Callable[[], None]]:
    def act(path: Path) -> Callable[[], None]:
        stat, data = path.stat(), path.read_bytes()
        path.write_bytes(change(data))

        def mend() -> None:
            path.write_bytes(data)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

        return mend

    return act


def unplugged(where: Path) -> Callable[[], None]:
    """The directory itself goes, as a mount does."""
    aside = set_aside(where)
    return lambda: aside.rename(where) and None  # type: ignore[func-returns-value]


FAULTS: dict[str, tuple[Break, str]] = {
    "removed": (each(removed), "gone"),
    "copied back": (each(copied_back), "gone"),
    "unplugged": (unplugged, "gone"),
    "a directory": (each(made_a_directory), "changed"),
    "a dangling link": (each(made_a_dangling_link), "gone"),
    "a pipe": (each(made_a_pipe), "changed"),
    "truncated": (each(rewritten(lambda data: data[: len(data) // 2])), "changed"),
    "emptied": (each(rewritten(lambda data: b"")), "changed"),
    "other bytes": (each(rewritten(lambda data: data[::-1])), "changed"),
    "longer": (each(rewritten(lambda data: data + data)), "changed"),
}


def trouble(session: ov.Session) -> dict[str, Any]:
    """At nothing while the worker that reads does not answer."""
    found: dict[str, Any] = session.metrics()["sources"]["web"]["storage"]
    return found


def trouble_there_was(session: ov.Session) -> dict[str, Any]:
    found: dict[str, Any] = until(lambda: (now := trouble(session))["errors"] and now)
    return found


@contextmanager
def mended_later(
    session: ov.Session, mend: Callable[[], None], kind: str, tries: int = 2
) -> Iterator[None]:
    """Mends when the job has been seen to try again, and to have met what was broken: first a file
    is gone, whatever takes its place.
    """

    def work() -> None:
        try:
            until(
                lambda: (
                    (found := trouble(session))["retries"] >= tries and found["errors"].get(kind)
                )
            )
        finally:
            mend()

    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


RUNS = [(fault, format, "local") for fault in FAULTS for format in FORMATS]
RUNS += [
    (fault, format, WORKER_RUNTIME)
    for fault, format in zip(("removed", "a pipe", "truncated", "unplugged"), FORMATS, strict=True)
]


@pytest.mark.parametrize(
    ("fault", "format", "runtime"), RUNS, ids=["-".join(r).replace(" ", "_") for r in RUNS]
)
def test_files_that_fail_for_a_while_cost_time_and_nothing_else(
    files: Callable[[str], Path],
    undisturbed: dict[str, list[Any]],
    caplog: pytest.LogCaptureFixture,
    fault: str,
    format: str,
    runtime: str,
) -> None:
    where, (act, kind) = files(format), FAULTS[fault]
    with ov.launch(
        in_order(str(where), format), runtime=runtime, stall_limit_s=60, prefetch=1, read_ahead=1
    ) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        mend = act(where)
        with mended_later(session, mend, kind):
            got += list(client)
        found = trouble_there_was(session)
        assert session.quarantine() == []
    assert delivered(got) == undisturbed[format]
    assert set(found["errors"]) <= {
        kind,
        "gone",
        "changed",
    }  # while several files are broken one by one, or mended
    assert kind in found["errors"]
    assert found["retries"] == sum(found["errors"].values())
    assert found["waited_s"] > 0
    assert found["given_up"] == 0
    if runtime == "local":
        said = [r.message for r in caplog.records if r.levelno >= logging.WARNING]
        assert [("retrying for" in s, "recovered after" in s) for s in said] == [
            (True, False),
            (False, True),
        ], said


# a mount: what a real disk cannot be made to do

MOUNT_FAULTS = ("EIO", "ESTALE", "ENOTCONN", "ETIMEDOUT", "EACCES", "short")


@pytest.fixture
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All files are on a mount that fails as these say."""
    mount = mounted(tmp_path / "switches")
    LOCAL_FILES.replace(monkeypatch, lambda: mount)
    return tmp_path / "switches"


MOUNTED = [(fault, format, "local") for fault in ("EIO", "short") for format in FORMATS]
MOUNTED += [(fault, FORMATS[k % 4], "local") for k, fault in enumerate(MOUNT_FAULTS[1:-1])] + [
    ("ESTALE", "tar", WORKER_RUNTIME)
]


@pytest.mark.parametrize(
    ("fault", "format", "runtime"), MOUNTED, ids=["-".join(r) for r in MOUNTED]
)
def test_a_mount_that_fails_for_a_while_costs_time_and_nothing_else(
    corpora: dict[str, Path],
    undisturbed: dict[str, list[Any]],
    switches: Path,
    fault: str,
    format: str,
    runtime: str,
) -> None:
    with ov.launch(
        in_order(str(corpora[format]), format),
        runtime=runtime,
        stall_limit_s=60,
        prefetch=1,
        read_ahead=1,
    ) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        fail(switches, fault, 3)
        got += list(client)
        found = trouble_there_was(session)
        assert session.quarantine() == []
    assert delivered(got) == undisturbed[format]
    kind = {"EACCES": "denied", "short": "short read"}.get(fault, fault)
    assert set(found["errors"]) == {kind}
    assert 0 < found["retries"] <= 3
    assert found["given_up"] == 0


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_read_that_hangs_is_named_by_who_waits_for_it_and_goes_on_when_it_can(
    corpora: dict[str, Path], undisturbed: dict[str, list[Any]], switches: Path, runtime: str
) -> None:
    said = list[str]()
    made = in_order(str(corpora["parquet"]), "parquet")
    options = {
        "stall_limit_s": 60,
        "stall_warn_s": 0.2,
        "on_stall": lambda words, seconds: said.append(words),
    }
    with ov.launch(made, runtime=runtime, prefetch=1, read_ahead=1, **options) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        hang(switches)

        def free() -> None:
            try:
                until(
                    lambda: any(
                        "is reading" in a["state"] or a["state"].startswith("reading /")
                        for a in session.metrics()["actors"]
                    )
                )
                until(lambda: any("reading /" in words for words in said))
            finally:
                let_go(switches)

        thread = threading.Thread(target=free)
        thread.start()
        got += list(client)
        thread.join()
        until(lambda: trouble(session)["waited_s"] >= 1)
    assert delivered(got) == undisturbed["parquet"]
    named = (
        rf"loader/web/0 is reading {re.escape(str(corpora['parquet']))}/part-\d+\.parquet for \d+ s"
    )
    assert any(re.search(named, words) for words in said), said


def test_when_the_worker_of_files_that_are_gone_is_lost_too_whoever_waits_is_told_of_the_file(
    files: Callable[[str], Path], undisturbed: dict[str, list[Any]]
) -> None:
    said, where = list[str](), files("parquet")
    options = {
        "stall_limit_s": 60,
        "stall_warn_s": 0.2,
        "on_stall": lambda words, seconds: said.append(words),
    }
    with ov.launch(
        in_order(str(where), "parquet"), runtime=WORKER_RUNTIME, prefetch=4, read_ahead=1, **options
    ) as session:
        client = session.client(0)
        got, mend = [next(client), next(client)], unplugged(where)
        session.kill("loader-worker/0")
        steps: list[ov.Step] = []
        thread = threading.Thread(target=lambda: steps.extend(client))
        thread.start()
        try:
            until(lambda: any("trying to read" in words for words in said))
        finally:
            mend()
            thread.join()
    assert delivered([*got, *steps]) == undisturbed["parquet"]
    named = rf"samples that step \d+ draws: .* trying to read {re.escape(str(where))}/part-\d+\.parquet for .* in loader-worker/0"
    assert any(re.search(named, words) for words in said), said
    assert not any("a worker was lost" in words for words in said), said


# giving up


def take_all(client: ov.Client, got: list[ov.Step]) -> None:
    for step in client:
        got.append(step)


def lasting(
    made: ov.Job, act: Callable[[], object], runtime: str = "local"
) -> tuple[StorageError, dict[str, Any], list[Any]]:
    """Takes some steps, breaks something, and goes on until the job ends with an error."""
    with ov.launch(made, runtime=runtime, stall_limit_s=60, prefetch=1, read_ahead=1) as session:
        client = session.client(0)
        got = [next(client), next(client)]
        act()
        with pytest.raises(StorageError) as caught:
            take_all(client, got)
        assert session.quarantine() == []
        return caught.value, trouble_there_was(session), delivered(got)


LASTING = [
    (
        "removed",
        "tar",
        r"the file disappeared after the source was indexed \(No such file or directory\) after \d+ attempts in .* s .*; restore it",
    ),
    (
        "a directory",
        "tar",
        r"expected a file, got a directory after \d+ attempts .*restore|put the file back",
    ),
    (
        "truncated",
        "arrow",
        r"the file changed since the source was indexed: expected \d+ bytes of .*, got \d+ bytes of .*\(seen: changed x\d+\)",
    ),
]


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(
    ("fault", "format", "says"), LASTING, ids=[f"{fault}-{format}" for fault, format, _ in LASTING]
)
def test_files_that_stay_broken_end_the_job_with_what_was_tried(
    files: Callable[[str], Path],
    undisturbed: dict[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    format: str,
    says: str,
    runtime: str,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = files(format)
    error, found, got = lasting(
        in_order(str(where), format), lambda: FAULTS[fault][0](where), runtime
    )
    assert error.source == "web"
    assert re.fullmatch(rf"{re.escape(str(where))}/part-\d+\.{format}", error.path)
    assert re.search(says, str(error)), str(error)
    assert found["given_up"] == 1
    assert found["errors"][FAULTS[fault][1]] >= 2
    assert got == undisturbed[format][: len(got)]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_read_that_never_ends_is_given_up_and_what_it_finds_later_is_dropped(
    corpora: dict[str, Path],
    undisturbed: dict[str, list[Any]],
    switches: Path,
    monkeypatch: pytest.MonkeyPatch,
    runtime: str,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    made = in_order(str(corpora["jsonl.zst"]), "jsonl.zst")
    with ov.launch(made, runtime=runtime, stall_limit_s=60, prefetch=1, read_ahead=1) as session:
        client = session.client(0)
        got, saved = [next(client), next(client)], client.state_dict()
        hang(switches)
        try:
            with pytest.raises(
                StorageError,
                match=r"expected a read to end within \d+ s, got no end for \d+\.\d s; check the disk or the mount",
            ) as caught:
                take_all(client, got)
            assert re.search(r"part-\d+\.jsonl\.zst$", caught.value.path)
            found = trouble_there_was(session)
            assert found["errors"] == {"stalled": 1}
            assert found["given_up"] == 1
            assert found["waited_s"] > 0
        finally:
            let_go(switches)
        assert delivered(got) == undisturbed["jsonl.zst"][: len(got)]
        if runtime == "local":  # with the mount well again the same session goes on
            client.load_state_dict(saved)
            assert delivered(client) == undisturbed["jsonl.zst"][2:]


def test_mounts_that_hang_hold_up_their_own_sources_only(
    corpora: dict[str, Path], switches: Path, tmp_path: Path
) -> None:
    """More of them than there are threads."""
    hung = [
        source(
            f"hung{k}", str(shutil.copytree(corpora["tar"], tmp_path / f"{k}")), "tar", weight=0.0
        )
        for k in range(4)
    ]
    good = source("good", str(corpora["parquet"]), "parquet", shuffle=False)
    made = in_order("", "tar")
    made = replace(made, sources=[good, *hung], mixture=None, until=12)
    with ov.launch(made, workers=2, stall_limit_s=60, prefetch=1, read_ahead=1) as session:
        client = session.client(0)
        next(client)
        hang(switches, tmp_path)
        try:
            for k in range(4):
                loop_of(session).call(
                    lambda k=k: runtime_of(session).run([Refill(1 + k, 1, 1)]), "refill"
                )  # type: ignore[misc]
            until(
                lambda: (
                    sum(
                        "hung" in a["name"] and "reading" in a["state"]
                        for a in session.metrics()["actors"]
                    )
                    == 4
                )
            )
            assert len(list(client)) == 11
        finally:
            let_go(switches)


# leaving


def mixed(where: Path, corpora: dict[str, Path], **changes: Any) -> ov.Job:
    web = source("web", str(where), "parquet", shuffle=False, on_lost="leave")
    code = source("code", str(corpora["arrow"]), "arrow", shuffle=False)
    return replace(in_order("", "tar"), sources=[web, code], **changes)


def take_until_left(
    session: ov.Session, where: Path
) -> tuple[list[ov.Step], dict[str, Any], Callable[[], None]]:
    """Unplugs a source and takes steps until it has left, no faster than they are planned: of the
    last before it left none is taken.
    """
    client, got, told = session.client(0), list[ov.Step](), None
    got += [next(client), next(client)]
    until(lambda: session.metrics()["planned_steps"] >= 6)
    mend = unplugged(where)
    while told is None:
        got.append(next(client))
        until(
            lambda: (
                (m := session.metrics())["sources"]["web"].get("lost")
                or m["planned_steps"] >= got[-1].step + 5
            )
        )
        told = session.metrics()["sources"]["web"].get("lost")
    assert got[-1].step + 1 < told["step"]
    return got, told, mend


@pytest.mark.parametrize(
    ("runtime", "journal"),
    [("local", False), ("local", True), (WORKER_RUNTIME, False), (WORKER_RUNTIME, True)],
)
def test_a_source_that_may_leave_does_so_at_a_step_of_the_log_and_every_run_after_does_the_same(
    files: Callable[[str], Path],
    corpora: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runtime: str,
    journal: bool,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = files("parquet")
    made = mixed(where, corpora, journal=str(tmp_path / "journal") if journal else None)
    with ov.launch(made, runtime=runtime, stall_limit_s=60, read_ahead=1) as session:
        got, told, mend = take_until_left(session, where)
        client, first = session.client(0), got[-1].step
        states = {first: client.state_dict()}
        for step in client:
            got.append(step)
            states[step.step] = client.state_dict()
        assert session.metrics()["sources"]["web"]["lost"] == told
        assert session.quarantine() == []
    live, lost = delivered(got), told["step"]
    assert "the file disappeared" in told["reason"]
    taken = [sum(sample[0] == "web" for sample, _ in step) for step in live]
    assert 0 < first < lost - 1
    assert all(taken[:lost])
    assert not any(taken[lost:])
    assert (
        len([row for step in live for row in step if row[0][0] == "code"]) == 800
    )  # the other source gives all it has
    # as if nothing had been: a run that is resumed or replayed leaves at the same step all the same
    mend()
    monkeypatch.delenv("OVERLORD_STORE_DEADLINE_S")
    replayed = ov.simulate(
        replace(made, journal=None), events=[SourceLost(lost, "web", told["reason"])]
    )
    assert delivered(replayed.steps[0]) == live
    assert all(
        any(e["event"] == "source_lost" for e in state["events"]) for state in states.values()
    )  # those of steps before it, too
    with ov.launch(
        replace(made, journal=None), runtime=runtime, resume=states[first], stall_limit_s=60
    ) as session:
        assert delivered(session.client(0)) == live[first + 1 :]
        assert session.metrics()["sources"]["web"]["lost"] == told


@pytest.mark.parametrize("still", ["there again", "not there", "half there"])
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_journal_remembers_who_left_when_everything_is_killed_and_does_not_need_it_to_be_there(
    files: Callable[[str], Path],
    corpora: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    still: str,
    runtime: str,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = files("parquet")
    made = mixed(where, corpora, journal=str(tmp_path / "journal"))
    with ov.launch(made, stall_limit_s=60) as session:
        client = session.client(0)
        got, mend = [next(client), next(client)], unplugged(where)
        got += [next(client) for _ in range(10)]
        lost = until(lambda: session.metrics()["sources"]["web"].get("lost"))["step"]
        crashed = shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    if still != "not there":
        mend()
    if still == "half there":
        min(where.iterdir()).unlink()
    with ov.launch(
        replace(made, journal=str(crashed)), runtime=runtime, resume="auto", stall_limit_s=60
    ) as session:
        client = session.client(0)
        got = got[: session.resumed.step] + list(client)
        assert session.metrics()["sources"]["web"]["lost"]["step"] == lost
        saved = client.state_dict()
    if still == "not there":
        with ov.launch(replace(made, journal=None), resume=saved) as session:
            assert list(session.client(0)) == []
        mend()
    if still == "half there":
        return
    replayed = ov.simulate(replace(made, journal=None), events=[SourceLost(lost, "web", "")])
    assert delivered(got) == delivered(replayed.steps[0])


@pytest.mark.parametrize("journal", [False, True])
def test_a_source_that_left_stays_away_when_workers_are_lost_and_all_rolls_back(
    files: Callable[[str], Path],
    corpora: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    journal: bool,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = files("parquet")
    made = mixed(where, corpora, journal=str(tmp_path / "journal") if journal else None)
    with ov.launch(made, runtime=WORKER_RUNTIME, stall_limit_s=60) as session:
        client = session.client(0)
        got, mend = [next(client), next(client)], unplugged(where)
        lost = 10**6
        while (
            got[-1].step <= lost
        ):  # the steps with samples of it are taken, or their files would be needed again
            got.append(next(client))
            lost = session.metrics()["sources"]["web"].get("lost", {}).get("step", lost)
        victims = [name for name in workers_of(session) if name.startswith("loader-worker/")] + (
            ["planner"] if journal else []
        )
        for name in victims:
            session.kill(name)
        got += list(client)
        assert session.metrics()["recoveries"]
    mend()
    replayed = ov.simulate(replace(made, journal=None), events=[SourceLost(lost, "web", "")])
    assert delivered(got) == delivered(replayed.steps[0])


def test_steps_before_it_left_come_again_with_it_and_those_behind_without(
    files: Callable[[str], Path], corpora: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has taken a step of after it left when all rolls back; loaders that live have its last
    samples in memory.
    """
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = files("parquet")
    made = mixed(where, corpora)
    with ov.launch(made, runtime=WORKER_RUNTIME, stall_limit_s=60) as session:
        got, told, mend = take_until_left(session, where)
        session.kill("constructor-worker/0")
        got += list(session.client(0))
        assert session.metrics()["recoveries"]
    mend()
    replayed = ov.simulate(made, events=[SourceLost(told["step"], "web", "")])
    assert delivered(got) == delivered(replayed.steps[0])


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_journal_has_the_event_before_a_step_is_planned_with_it(
    files: Callable[[str], Path],
    corpora: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    runtime: str,
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.5")
    where = files("parquet")
    made = mixed(where, corpora, journal=str(tmp_path / "journal"))
    with ov.launch(made, runtime=runtime, stall_limit_s=60) as session:
        got, told, mend = take_until_left(session, where)
        crashed = shutil.copytree(tmp_path / "journal", tmp_path / "crashed")
    mend()
    with ov.launch(
        replace(made, journal=str(crashed)), runtime=runtime, resume="auto", stall_limit_s=60
    ) as session:
        assert session.resumed.step < told["step"]
        got = got[: session.resumed.step] + list(session.client(0))
    replayed = ov.simulate(
        replace(made, journal=None), events=[SourceLost(told["step"], "web", "")]
    )
    assert delivered(got) == delivered(replayed.steps[0])


# at launch


def test_a_mount_that_stumbles_when_a_job_is_launched_gets_another_try(
    corpora: dict[str, Path], switches: Path
) -> None:
    fail(switches, "EIO", 2)
    with ov.launch(
        in_order(str(corpora["arrow"]), "arrow"), cache_dir=switches.parent / "cache"
    ) as session:
        next(session.client(0))
    assert not (switches / "EIO").exists()


def test_a_mount_that_hangs_when_a_job_is_launched_is_named(
    corpora: dict[str, Path], switches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLORD_STORE_DEADLINE_S", "0.3")
    hang(switches)
    try:
        with pytest.raises(
            StorageError,
            match=r"source 'web', .*part-\d+\.arrow: expected a response of storage, got none for \d+ s; check the disk or the mount",
        ):
            ov.launch(in_order(str(corpora["arrow"]), "arrow"), cache_dir=switches.parent / "cache")
    finally:
        let_go(switches)
