"""``Job.journal`` and ``resume="auto"``: who is let in, where a job goes on, and what is said when
a journal cannot be written.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.journal import job_journal, storage
from overlord.journal.checkpoint import Interval, changes, samples_of, snapshot
from overlord.journal.record import Record
from overlord.journal.storage import DirectoryStorage, refusal
from overlord.journal.timeouts import Timeouts
from tests.internals import (
    JOURNAL_SYNCS,
    JOURNAL_WRITES,
    generation_of,
    join_writer,
    journal_writer_of,
    loop_of,
    pending_appends,
    running_job,
    runtime_of,
)
from tests.journal_faults import recovered
from tests.processes import until

pytestmark = pytest.mark.timeout(200)
ROWS = {
    name: [{"tokens": [1 + k % 90] * (1 + (k * n) % 17)} for k in range(200)]
    for n, name in ((3, "a"), (5, "b"), (7, "c"))
}


class Rows:
    def __init__(self, name: str):
        self.name = self.fingerprint = name

    def __len__(self) -> int:
        return len(ROWS[self.name])

    def __getitem__(self, i: int) -> dict[str, Any]:
        return ROWS[self.name][i]


def source(name: str) -> ov.Source:
    return ov.Source.from_dataset(name, Rows(name), transforms=[ov.Tokens("tokens")])


def job(journal: Path | str | None, *names: str, **changes: Any) -> ov.Job:
    given = {
        "batch": ov.Batch(samples=8, context=64),
        "sources": [source(n) for n in names or ("a", "b")],
        "name": "resumed",
        "seed": 5,
    }
    return ov.Job(journal=None if journal is None else str(journal), **{**given, **changes})


def take(session: ov.Session, n: int) -> list[tuple[int, str]]:
    client = session.client(0)
    return [(step.step, step.plan_digest) for _, step in zip(range(n), client, strict=False)]


@pytest.fixture(scope="module")
def undisturbed() -> list[tuple[int, str]]:
    with ov.launch(job(None)) as session:
        return take(session, 40)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Journals are opened again by the process that closed them: a sync that takes longer than a
    second must not be in the way.
    """
    monkeypatch.setattr(job_journal, "TIMEOUTS", Timeouts(close_s=30.0))


# who is let in


def test_a_fresh_launch_on_a_journal_that_is_not_empty_is_refused_and_says_how_to_go_on(
    tmp_path: Path,
) -> None:
    with ov.launch(job(tmp_path)) as session:
        assert session.resumed is None
        take(session, 2)
    with pytest.raises(
        ov.JournalError,
        match=r'expected an empty journal, got \d+ records.*continue it with resume="auto"',
    ):
        ov.launch(job(tmp_path))
    with ov.launch(job(tmp_path), resume="auto") as session:
        assert session.resumed is not None
        assert session.resumed.step == 2


def test_a_launch_that_fails_leaves_no_journal_behind(tmp_path: Path) -> None:
    with pytest.raises(ov.SourceError):
        ov.launch(job(tmp_path, sources=[ov.Source("x", str(tmp_path / "none/*.parquet"))]))
    with ov.launch(job(tmp_path)) as session:
        assert len(take(session, 2)) == 2


def test_two_jobs_cannot_write_to_one_journal(tmp_path: Path) -> None:
    with ov.launch(job(tmp_path)) as session:
        take(session, 1)
        for resume in (None, "auto"):
            with pytest.raises(
                ov.JournalError,
                match=rf"process {os.getpid()} on .* writes to it; stop that process first",
            ):
                ov.launch(job(tmp_path), resume=resume)
        assert len(take(session, 3)) == 3


def test_an_empty_journal_is_begun_by_resume_auto(tmp_path: Path) -> None:
    with ov.launch(job(tmp_path / "new"), resume="auto") as session:
        assert (session.resumed.step, session.resumed.why) == (0, "the journal has no step yet")
        assert take(session, 1)[0][0] == 0


def test_the_journal_of_another_job_is_refused_by_the_parts_that_differ(tmp_path: Path) -> None:
    with ov.launch(job(tmp_path)) as session:
        take(session, 2)
        state = session.state_dict()
    with pytest.raises(ov.StateMismatch) as caught:
        ov.launch(job(tmp_path, seed=6), resume="auto")
    assert caught.value.differences == {"seed": ("5", "6")}
    for resume in ("auto", state):  # of the batch a digest is kept: what is in it is said
        with pytest.raises(
            ov.StateMismatch,
            match=r"batch: saved .*, a digest of samples, .*got .*, which is samples=4, "
            r"tokens=None",
        ) as caught:
            ov.launch(job(tmp_path, batch=ov.Batch(samples=4, context=64)), resume=resume)
        assert list(caught.value.differences) == ["batch"]
    with pytest.raises(ov.StateMismatch) as caught:
        ov.launch(job(tmp_path, name="other"), resume="auto")
    assert caught.value.differences == {"job": ("resumed", "other")}
    with ov.launch(job(tmp_path / "new", seed=6)) as session:
        take(session, 2)
        other = session.state_dict()
    with pytest.raises(ov.StateMismatch, match="the journal belongs to another job"):
        ov.launch(job(tmp_path, seed=6), resume=other)
    with ov.launch(job(tmp_path), resume=state) as session:  # and nobody holds it
        assert take(session, 1)[0][0] == 2


def test_what_is_wrong_with_a_journal_or_with_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(ov.JobError, match="journal: expected a directory or a store's URI, got 7"):
        replace(job(None), journal=7)
    with pytest.raises(ov.JobError, match="expected a URI without secrets"):
        job("s3://bucket/j?secret_access_key=abc")
    with pytest.raises(
        ov.JobError, match="'auto' continues from the job's journal, and it has none"
    ):
        ov.launch(job(None), resume="auto")
    assert replace(job(None), journal=tmp_path).journal == str(tmp_path)


# where it goes on


def test_it_goes_on_behind_the_last_step_that_all_ranks_took_and_says_so(
    tmp_path: Path, undisturbed: list[tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    wide = {"place": ov.ClientPlaceTree(dp=2)}
    with ov.launch(job(tmp_path, **wide)) as session:
        clients = [session.client(rank) for rank in range(2)]
        for _ in range(3):
            first = [next(client) for client in clients]
        next(clients[0])
        assert [step.step for step in first] == [2, 2]
    with (
        caplog.at_level(logging.INFO, "overlord"),
        ov.launch(job(tmp_path, **wide), resume="auto") as session,
    ):
        assert session.resumed.step == 3
        clients = [session.client(rank) for rank in range(2)]
        assert [next(client).step for client in clients] == [3, 3]
    why = (
        r"job 'resumed' resumed at step 3: step 2 is the last that all ranks took; "
        r"steps up to \d+ were planned, and are replanned unchanged"
    )
    assert any(re.search(why, record.getMessage()) for record in caplog.records)


def test_trainers_that_bring_their_own_state_win_and_the_journal_begins_anew_there(
    tmp_path: Path, undisturbed: list[tuple[int, str]]
) -> None:
    with ov.launch(job(tmp_path)) as session:
        take(session, 3)
        state = session.state_dict()
        take(session, 5)
    with ov.launch(job(tmp_path), resume=state) as session:
        assert session.resumed.why.startswith("it is the position of the given state")
        assert take(session, 2) == undisturbed[3:5]
    with ov.launch(job(tmp_path), resume="auto") as session:
        assert take(session, 2) == undisturbed[5:7]


def test_a_session_that_is_moved_to_an_older_state_is_gone_on_from_there(
    tmp_path: Path, undisturbed: list[tuple[int, str]]
) -> None:
    with ov.launch(job(tmp_path)) as session:
        take(session, 2)
        state = session.state_dict()
        session.set_mixture({"a": 1.0, "b": 9.0})
        take(session, 9)
        session.load_state_dict(state)
        assert take(session, 4) == undisturbed[2:6]
    with ov.launch(job(tmp_path), resume="auto") as session:
        assert take(session, 4) == undisturbed[6:10]


@pytest.mark.parametrize("planned", [0, 3])
def test_what_was_said_is_in_force_after_a_restart(tmp_path: Path, planned: int) -> None:
    def run(where: Path | None, restarts: bool) -> list[tuple[int, str]]:
        session = ov.launch(job(where))
        got = take(session, 2)
        session.set_mixture({"a": 1.0, "b": 9.0}, at=8 + planned)
        session.skip([9, 12])
        if restarts:
            session.close()
            session = ov.launch(job(where), resume="auto")
        got += take(session, 12)
        session.close()
        return got

    assert run(tmp_path, True) == run(None, False)


def test_a_source_that_joined_is_listed_last_and_goes_on(tmp_path: Path) -> None:
    def run(where: Path | None, restarts: bool) -> list[tuple[int, str]]:
        session = ov.launch(job(where))
        got = take(session, 2)
        session.add_source(source("c"), at=8)
        for k in (2, 8) if restarts else (10,):
            if restarts:
                session.close()
                session = ov.launch(job(where, "a", "b", "c", mixture=None), resume="auto")
            got += take(session, k)
        session.close()
        return got

    assert run(tmp_path, True) == run(None, False)
    with pytest.raises(
        ov.StateMismatch, match=r"list the sources added in mid-run \(c\) last in Job.sources"
    ):
        ov.launch(job(tmp_path), resume="auto")


def test_another_mesh_gets_the_same_samples_and_goes_on_from_the_same_journal(
    tmp_path: Path,
) -> None:
    def samples(step: ov.Step) -> list[Any]:
        return sorted(tuple(step.info.sample_id(i)) for i in range(len(step.info)))

    with ov.launch(job(None)) as session:
        wanted = [samples(step) for _, step in zip(range(9), session.client(0), strict=False)]
    got = []
    for k, dp in enumerate((1, 2, 2, 1)):
        with ov.launch(
            job(tmp_path, place=ov.ClientPlaceTree(dp=dp)), resume="auto" if k else None
        ) as session:
            clients = [session.client(rank) for rank in range(dp)]
            for _ in range(2):
                got += [samples(step) for step in [next(client) for client in clients][:1]]
    assert got == wanted[:8]


def test_a_strategy_that_is_no_function_of_its_input_is_found_out(tmp_path: Path) -> None:
    shift = [0]

    def moody(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        return (
            ov.DGraph.from_buffer(buffer, place)
            .mix()
            .distribute("DP")
            .balance("greedy" if shift[0] else "none")
            .plan()
        )

    wide = {
        "place": ov.ClientPlaceTree(dp=2),
        "strategy": moody,
        "batch": ov.Batch(samples=8, context=64, microbatches=2),
    }
    with ov.launch(job(tmp_path, **wide)) as session:
        clients = [session.client(rank) for rank in range(2)]
        [next(client) for client in clients]
    shift[0] = 1
    with ov.launch(job(tmp_path, **wide), resume="auto") as session:
        clients = [session.client(rank) for rank in range(2)]
        with pytest.raises(ov.PlanError, match="expected the plan in the journal"):
            next(clients[0])


# disks


def _full(monkeypatch: pytest.MonkeyPatch, after: int) -> list[int]:
    """From that write on there is no room."""
    real, left = JOURNAL_WRITES.real, [after]

    def write(self: DirectoryStorage, name: str, data: bytes, at: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise refusal(name, "append", OSError(errno.ENOSPC, "No space left on device"))
        real(self, name, data, at)

    JOURNAL_WRITES.replace(monkeypatch, write)
    return left


def test_a_step_written_just_before_the_disk_was_full_is_delivered_though_it_was_not_known_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop is busy when one plan becomes durable, and hears of that when the next one has
    failed already.
    """
    real, busy, go, plans = (JOURNAL_WRITES.real, threading.Event(), threading.Event(), list[int]())

    def is_busy() -> None:
        busy.set()
        assert go.wait(30)

    def one_waits() -> bool:
        """Behind this write. Not where all that may be planned is in it: then it is written, and
        the next one is looked at.
        """
        deadline = time.monotonic() + 0.2
        while not (found := pending_appends(session) > 0) and time.monotonic() < deadline:
            time.sleep(0.005)
        return found

    def write(self: DirectoryStorage, name: str, data: bytes, at: int) -> None:
        if busy.is_set():
            raise refusal(name, "append", OSError(errno.ENOSPC, "No space left on device"))
        plans.append(len(data))
        if len(plans) >= 6 and one_waits():
            loop_of(session).post(is_busy)
            assert busy.wait(30)
        real(self, name, data, at)

    got: list[int] = []
    with ov.launch(job(tmp_path), prefetch=3) as session:
        JOURNAL_WRITES.replace(monkeypatch, write)

        def drain() -> None:
            with pytest.raises(ov.JournalError, match="ENOSPC"):
                got.extend(step.step for step in session.client(0))

        trainer = threading.Thread(target=drain)
        trainer.start()
        until(lambda: running_job(session).journal.failed)
        go.set()
        trainer.join(30)
    assert got == list(range(recovered(tmp_path).next_step)), "what the journal has, and no more"
    assert got


@pytest.mark.parametrize("after", [2, 3, 5, 8])
def test_a_full_disk_ends_the_job_before_the_step_and_with_room_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, undisturbed: list[tuple[int, str]]
) -> None:
    left = _full(monkeypatch, after)
    got: list[list[tuple[int, str]]] = [[], []]
    ends: list[Exception] = []
    threads: list[threading.Thread] = []

    def drain(client: ov.Client, into: list[tuple[int, str]]) -> None:
        try:
            into += ((step.step, step.plan_digest) for step in client)
        except ov.JournalError as error:
            ends.append(error)

    wide = {"place": ov.ClientPlaceTree(dp=2)}
    with ov.launch(job(None, **wide)) as session:
        whole = [
            (step.step, step.plan_digest)
            for _, step in zip(range(20), session.client(0), strict=False)
        ]
    with ov.launch(job(tmp_path, **wide), prefetch=2) as session:
        clients = [session.client(rank) for rank in range(2)]
        for client in clients:
            threads.append(threading.Thread(target=drain, args=(client, got[client.rank])))
            threads[-1].start()
        for thread in threads:
            thread.join(30)
        assert [str(error) for error in ends if "free some space" in str(error)] == [
            str(ends[0])
        ] * 2
        with pytest.raises(ov.JournalError, match="ENOSPC"):
            session.set_mixture({"a": 1.0, "b": 2.0})
        assert "ENOSPC" in session.metrics()["journal"]["failed"]
    assert got[0] == got[1] == whole[: len(got[0])]
    assert len(got[0]) < 20
    left[0] = 10**9
    found = recovered(tmp_path)
    assert found.next_step >= len(got[0])
    with ov.launch(job(tmp_path, **wide), resume="auto") as session:
        clients = [session.client(rank) for rank in range(2)]
        step, _ = [next(client) for client in clients]
        assert (step.step, step.plan_digest) == whole[found.acked + 1]


def test_an_event_that_could_not_be_written_did_not_happen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ov.launch(job(tmp_path)) as session:
        take(session, 2)
        JOURNAL_SYNCS.replace(monkeypatch, _failing)
        with pytest.raises(ov.JournalError, match="EIO"):
            session.set_mixture({"a": 1.0, "b": 2.0})
        with pytest.raises(ov.JournalError, match="EIO"):
            take(session, 20)
    monkeypatch.undo()
    with ov.launch(job(tmp_path), resume="auto") as session:
        assert len(take(session, 3)) == 3


def _failing(fd: int) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_disk_that_takes_its_time_holds_up_steps_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, real = threading.Event(), JOURNAL_SYNCS.real

    def slow(fd: int) -> None:
        assert gate.wait(30)
        real(fd)

    with ov.launch(
        job(tmp_path), prefetch=2, stall_warn_s=0.05, on_stall=lambda words, s: stalls.append(words)
    ) as session:
        stalls: list[str] = []
        got = take(session, 1)
        JOURNAL_SYNCS.replace(monkeypatch, slow)
        done: list[Any] = []
        reader = threading.Thread(target=lambda: done.append(take(session, 6)))
        reader.start()
        while not any("to be written to the journal" in words for words in stalls):
            assert reader.is_alive()
        assert session.metrics()["journal"]["plans"] > 0  # who asks is answered meanwhile
        gate.set()
        reader.join(30)
        assert [step for step, _ in got + done[0]] == list(range(7))


def test_a_disk_that_takes_longer_than_the_closing_is_let_go_of_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, gate, real = threading.Event(), threading.Event(), JOURNAL_SYNCS.real

    def slow(fd: int) -> None:
        under_way.set()
        assert gate.wait(30)
        real(fd)

    def drain() -> None:
        with pytest.raises(ov.OverlordError, match="closed"):
            next(session.client(0))

    with ov.launch(job(tmp_path)) as session:
        monkeypatch.setattr(job_journal, "TIMEOUTS", Timeouts(close_s=0.01))
        JOURNAL_SYNCS.replace(monkeypatch, slow)
        trainer = threading.Thread(target=drain)
        trainer.start()
        assert under_way.wait(30)
    trainer.join(30)
    with pytest.raises(ov.JournalError, match="writes to it"):
        ov.launch(job(tmp_path), resume="auto")
    gate.set()
    join_writer(journal_writer_of(session), 30)
    with ov.launch(job(tmp_path), resume="auto") as session:
        assert take(session, 1)[0][0] == 0


def test_a_directory_that_lets_nothing_be_removed_is_reported_and_the_job_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[tuple[int, str]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(job_journal, "SEGMENT_BYTES", 400)
    monkeypatch.setattr(job_journal, "Interval", lambda: Interval(ratio=4, most_plans=3))
    monkeypatch.setattr(storage.Path, "unlink", _not_allowed)
    with ov.launch(job(tmp_path)) as session:
        assert take(session, 39) == undisturbed[:39]
        figures = session.metrics()["journal"]
        assert "could not be removed: Operation not permitted (EPERM)" in figures["unpruned"]
        assert "failed" not in figures
    assert len([r for r in caplog.records if "could not be removed" in r.getMessage()]) == 1
    assert len(recovered(tmp_path).planned) < 20, "what was pruned is not read"
    with ov.launch(job(tmp_path), resume="auto") as session:
        assert take(session, 1) == undisturbed[39:]


def _not_allowed(self: Path, missing_ok: bool = False) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


# what is written


def test_old_segments_go_and_snapshots_are_seldom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_journal, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(job_journal, "Interval", lambda: Interval(ratio=4, most_plans=1000))
    with ov.launch(job(tmp_path)) as session:
        take(session, 200)
        figures = session.metrics()["journal"]
    assert 5 < figures["snapshots"] < 60
    assert len(list(tmp_path.glob("*.ovj"))) < 12
    found = recovered(tmp_path)
    assert (found.acked, len(found.planned) < 60) == (199, True)


def test_snapshots_are_due_when_the_plans_since_cost_more_than_they_do() -> None:
    often = Interval(ratio=10, most_bytes=10_000, most_plans=100)
    assert not often.due(500, 4999, 50)
    assert often.due(500, 5000, 50)
    assert often.due(5000, 10_000, 5)
    assert often.due(500, 100, 100)


def test_a_plan_says_how_many_samples_each_source_gave(tmp_path: Path) -> None:
    with ov.launch(job(tmp_path)) as session:
        client = session.client(0)
        step = next(client)
        stage = runtime_of(session).plans[0]
        before = generation_of(session).start
        wanted = [
            sum(1 for i in range(len(stage.plan)) if stage.plan.source[i] == k) for k in range(2)
        ]
        assert samples_of(changes(before, stage.after)).tolist() == wanted
        assert step.step == 0


def test_a_state_of_300_sources_is_small_as_json_and_smaller_in_the_journal(tmp_path: Path) -> None:
    names = [f"source-{i:03d}" for i in range(300)]

    class Named(Rows):
        def __init__(self, name: str):
            super().__init__("abc"[int(name[-1]) % 3])
            self.fingerprint = name

    sources = [
        ov.Source.from_dataset(n, Named(n), transforms=[ov.Tokens("tokens")], weight=1 + i % 7)
        for i, n in enumerate(names)
    ]
    with ov.launch(
        job(tmp_path, sources=sources, batch=ov.Batch(samples=600, context=512))
    ) as session:
        take(session, 20)
        state = session.state_dict()
        wanted = generation_of(session).prepared.fingerprint
    assert len(json.dumps(state)) < 2**16
    assert state["fingerprint"] != wanted  # what is common to all is said once
    found = recovered(tmp_path)
    assert found.fingerprint == wanted
    entry = snapshot(found.front(), found.acked)
    assert len(Record.of(entry.kind, entry.number, entry.body).data) < 20_000
    with ov.launch(
        job(None, sources=sources, batch=ov.Batch(samples=600, context=512)), resume=state
    ) as session:
        assert take(session, 1)[0][0] == 20
