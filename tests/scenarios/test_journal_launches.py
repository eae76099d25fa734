"""Two launches of one job on one journal: whoever came later has it, and the other does not take it
back, whatever it loses.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cluster.launcher import Launcher
from overlord.errors import JournalError, JournalTaken
from overlord.session.cluster_runtime import ClusterRuntime
from tests.internals import COORDINATOR_RESTARTS
from tests.journal_faults import recovered
from tests.processes import WAIT_S, WORKER_RUNTIME, Played, launch, play, run, until, workers_of
from tests.scenarios.test_coordinator_process import planner_of
from tests.scenarios.test_process import APART as HOSTS
from tests.scenarios.test_process import job
from tests.stores import BUCKET, Proxy

pytestmark = pytest.mark.timeout(4 * WAIT_S)

STEPS = 24
APART: dict[str, Any] = {**HOSTS, "prefetch": 2, "stall_limit_s": WAIT_S}
TAKEN = (
    r"has taken over: another launch of this job has continued its journal; stop this "
    r'job.*resume="auto"'
)
_count = iter(range(1000))


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=STEPS), "local")


@pytest.fixture
def store(proxy: Proxy) -> str:
    pytest.importorskip("obstore")
    return f"s3://{BUCKET}/launches/{next(_count)}"


def at_rest(journal: str) -> None:
    """Whoever took six steps of a job writes no more: else it would find at its next plan that
    another has the journal.
    """
    until(lambda: recovered(journal).next_step == 6 + APART["prefetch"])


def rest(session: ov.Session) -> tuple[dict[int, list[int]], list[Exception]]:
    """The steps that each rank still gets, and what it ends with."""
    got, ends = {rank: list[int]() for rank in range(2)}, list[Exception]()
    for rank, steps in got.items():
        try:
            steps.extend(step.step for step in session.client(rank))
        except Exception as error:
            ends.append(error)
    return got, ends


@pytest.mark.parametrize(
    "lost", [(), ("constructor-worker/0",)], ids=["planner", "planner and a constructor host"]
)
def test_a_job_whose_planner_is_lost_does_not_take_its_journal_back(
    alone: Played, store: str, lost: tuple[str, ...]
) -> None:
    made = job(until=STEPS, journal=store)
    with launch(made, **APART) as old:
        play(old, steps=6)
        at_rest(store)
        with launch(made, resume="auto", **APART) as new:
            assert new.resumed is not None
            first = new.resumed.step
            before = play(new, steps=4)
            for pid in [planner_of(old), *(workers_of(old)[name] for name in lost)]:
                os.kill(pid, signal.SIGKILL)
            got, ends = rest(old)
            assert [type(end) for end in ends] == [JournalTaken] * 2, ends
            assert str(planner_of(new)) in str(ends[0]), "it says who has it"
            with pytest.raises(JournalTaken, match=TAKEN):
                raise ends[1]
            for steps in got.values():
                assert steps == list(range(6, 6 + len(steps))), "none is left out"
            behind = play(new)
            until(
                lambda: recovered(store).acked == STEPS - 1
            )  # who leaves has a second to say so, which may be too short
        assert not behind.error
        assert {r: before.steps[r] + behind.steps[r] for r in range(2)} == alone.behind(first - 1)
    assert recovered(store).acked == STEPS - 1


@pytest.mark.parametrize("move", ["load_state_dict", "reshard"])
def test_a_session_that_is_moved_does_not_take_its_journal_back(
    alone: Played, store: str, move: str
) -> None:
    made = job(until=STEPS, journal=store)
    with launch(made, **APART) as old:
        play(old, steps=6)
        at_rest(store)
        saved = old.state_dict()
        with launch(made, resume="auto", **APART) as new:
            before = play(new, steps=4)
            with pytest.raises(JournalTaken, match=TAKEN):
                old.load_state_dict(saved) if move == "load_state_dict" else old.reshard(
                    ov.ClientPlaceTree(dp=1)
                )
            behind = play(new)
        assert not behind.error
        assert [s[0] for s in before.steps[0] + behind.steps[0]][-1] == STEPS - 1


def test_a_session_in_one_process_does_not_take_its_journal_back_either(store: str) -> None:
    made = job(until=STEPS, journal=store)
    with launch(made, "local", prefetch=2) as old:
        play(old, steps=6)
        at_rest(store)
        saved = old.state_dict()
        with launch(made, "local", resume="auto", prefetch=2) as new:
            play(new, steps=4)
            with pytest.raises(JournalTaken, match="has taken over"):
                old.load_state_dict(saved)
            assert not play(new).error


def test_of_two_that_begin_a_journal_at_once_the_second_is_refused(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found it empty; nothing is written before their planners open it."""
    made, others = job(until=STEPS, journal=store), list[ov.Session]()
    begin = ClusterRuntime.begin_journal

    def late(runtime: ClusterRuntime, start: Any, prepared: Any) -> None:
        monkeypatch.setattr(ClusterRuntime, "begin_journal", begin)
        others.append(launch(made, **APART))
        begin(runtime, start, prepared)

    monkeypatch.setattr(ClusterRuntime, "begin_journal", late)
    with pytest.raises(JournalTaken, match=TAKEN):
        launch(made, **APART)
    with others[0] as first:
        assert not play(first).error


def in_between(patch: pytest.MonkeyPatch, what: Callable[[], None]) -> None:
    """Done when a coordinator is gone, and before another is started."""
    again, todo = COORDINATOR_RESTARTS.real, [what]

    def start(launcher: Launcher, reason: str) -> None:
        while todo:
            todo.pop()()
        again(launcher, reason)

    COORDINATOR_RESTARTS.replace(patch, start)


@pytest.mark.parametrize("ended", [False, True], ids=["runs", "has ended"])
def test_a_launch_that_takes_the_lock_when_a_coordinator_is_lost_keeps_the_journal(
    alone: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: bool
) -> None:
    made, others = job(until=STEPS, journal=str(tmp_path)), list[ov.Session]()

    def takes() -> None:
        others.append(launch(made, resume="auto", **APART))
        if ended:
            play(others[0], steps=2)
            others[0].close()

    with launch(made, **APART) as old:
        play(old, steps=6)
        in_between(monkeypatch, takes)
        os.kill(planner_of(old), signal.SIGKILL)
        got, ends = rest(old)
        assert [isinstance(end, JournalError) for end in ends] == [True] * 2, ends
        with pytest.raises(
            JournalError,
            match=TAKEN if ended else r"process \d+ on \S+ writes to it; stop that process first",
        ):
            raise ends[0]
        for steps in got.values():
            assert steps == list(range(6, 6 + len(steps)))
        if not ended:
            with others[0] as new:
                assert new.resumed is not None
                assert play(new).steps == alone.behind(new.resumed.step - 1)


def test_launches_one_after_the_other_go_on_and_so_do_their_planners(
    alone: Played, store: str
) -> None:
    made, first = job(until=STEPS, journal=store), 0
    for n in (4, 9, None):
        with launch(made, WORKER_RUNTIME, resume="auto", **APART) as session:
            assert session.resumed is not None
            first = session.resumed.step
            played = play(
                session,
                steps=n,
                act={2: lambda session: os.kill(planner_of(session), signal.SIGKILL)},
            )
            assert not played.error
    assert played.steps == alone.behind(first - 1)
