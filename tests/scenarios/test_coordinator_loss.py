"""What a coordinator was told, or was about to tell, when it died; and other losses while nothing
is settled: nobody may miss anything.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cluster.job_sources import PlannerJob
from overlord.cluster.launcher import Launcher
from overlord.cluster.rebalance import FIRST_SCALED
from overlord.cluster.worker_factory import WorkerFactory
from overlord.errors import ActorLost, DataStall, OverlordError, PlanError
from overlord.messages.control import EndOfJob, SourceLost
from overlord.serving.session_api import call
from overlord.session.cluster_runtime import ClusterRuntime
from overlord.session.served_ranks import ServedRanks
from tests import journal_faults
from tests.internals import (
    COORDINATOR_READY,
    COORDINATOR_STARTS,
    QUEUE_ASKS_AGAIN,
    SESSION_RECEIVES,
    forget_addresses,
    generation_of,
    is_closed,
    is_ready,
    launcher_of,
    loop_of,
    running_job,
    runtime_of,
)
from tests.journal_faults import recovered
from tests.processes import WAIT_S, WORKER_RUNTIME, Played, halt, launch, play, run, until, written
from tests.scenarios import test_scaling as scaling
from tests.scenarios.test_process import APART as HOSTS
from tests.scenarios.test_process import job, source

pytestmark = pytest.mark.timeout(4 * WAIT_S)

STEPS = 24
APART: dict[str, Any] = {**HOSTS, "stall_limit_s": WAIT_S}
THREE = ov.ClientPlaceTree(dp=3)


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=STEPS), "local")


@pytest.fixture(scope="module")
def three() -> Played:
    return run(job(until=STEPS, place=THREE), "local")


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def take(clients: list[ov.Client], n: int, got: dict[int, list[Any]]) -> None:
    for _ in range(n):
        for client in clients:
            got[client.rank].append(written(next(client)))


def connected(session: ov.Session) -> list[ov.Client]:
    served = session.serve()
    return [ov.connect(served, rank, served.token, stall_limit_s=WAIT_S) for rank in range(2)]


# the beginning of a session that is moved


def dies_before_it_is_written(patch: pytest.MonkeyPatch) -> None:
    write = ClusterRuntime.begin_journal

    def dies(engine: ClusterRuntime, start: Any, prepared: Any) -> None:
        engine.kill("planner")
        write(engine, start, prepared)

    patch.setattr(ClusterRuntime, "begin_journal", dies)


def dies_while_it_starts(patch: pytest.MonkeyPatch) -> None:
    ready, todo = COORDINATOR_READY.real, ["once"]

    def dies(launcher: Launcher) -> None:
        if todo:
            todo.clear()
            assert launcher.coordinator is not None
            launcher.control.kill(launcher.coordinator)
        ready(launcher)

    COORDINATOR_READY.replace(patch, dies)


def dies_when_it_is_written(patch: pytest.MonkeyPatch) -> None:
    """Another planner is there before the answer is."""
    ask, todo = Launcher.ask, ["once"]

    def dies(launcher: Launcher, method: str, *args: Any, **settings: Any) -> Any:
        answer = ask(launcher, method, *args, **settings)
        if method == "open_journal" and todo:
            todo.clear()
            planner = launcher.coordinator
            assert planner is not None
            launcher.control.kill(planner)
            until(lambda: launcher.coordinator is not planner and is_ready(launcher))
        return answer

    patch.setattr(Launcher, "ask", dies)


def test_a_state_is_loaded_however_long_another_coordinator_takes_that_waits_for_a_worker(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the answer of a coordinator is waited for: the one that comes in its place gives
    up a worker that stands still first.
    """
    write = ClusterRuntime.begin_journal

    def dies(engine: ClusterRuntime, start: Any, prepared: Any) -> None:
        pid = launcher_of(engine).workers.handles["loader-worker/0"].pid
        assert pid is not None
        halt(pid)
        engine.kill("planner")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(Launcher.ask.__kwdefaults__, "timeout_s", 1.0)
            write(engine, start, prepared)

    with launch(job(until=STEPS, journal=journal), **APART, lost_after_s=3.0) as session:
        clients = [session.client(rank) for rank in range(2)]
        take(clients, 2, {0: [], 1: []})
        saved = clients[0].state_dict()
        take(clients, 3, {0: [], 1: []})
        with monkeypatch.context() as patch:
            patch.setattr(ClusterRuntime, "begin_journal", dies)
            session.load_state_dict(saved)
        assert play(session).steps == alone.behind(1)


@pytest.mark.parametrize(
    "dies", [dies_while_it_starts, dies_before_it_is_written, dies_when_it_is_written]
)
def test_a_coordinator_that_is_lost_while_a_state_is_loaded_begins_at_that_state(
    alone: Played,
    journal: str,
    monkeypatch: pytest.MonkeyPatch,
    dies: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = [session.client(rank) for rank in range(2)]
        take(clients, 2, {0: [], 1: []})
        saved = clients[0].state_dict()
        take(clients, 5, {0: [], 1: []})
        with monkeypatch.context() as patch:
            dies(patch)
            session.load_state_dict(saved)
        assert play(session).steps == alone.behind(1)
        until(
            lambda: recovered(journal).acked == STEPS - 1
        )  # who leaves has a second to say so, which may be too short
    with launch(job(until=STEPS, journal=journal), resume="auto", **APART) as session:
        assert session.resumed is not None
        assert session.resumed.step == STEPS, (
            "the journal, too, knows of the session that was moved"
        )


@pytest.mark.parametrize(
    "dies", [dies_while_it_starts, dies_before_it_is_written, dies_when_it_is_written]
)
def test_a_coordinator_that_is_lost_while_the_mesh_is_changed_begins_with_the_new_one(
    three: Played,
    journal: str,
    monkeypatch: pytest.MonkeyPatch,
    dies: Callable[[pytest.MonkeyPatch], None],
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        take([session.client(rank) for rank in range(2)], 5, {0: [], 1: []})
        with monkeypatch.context() as patch:
            dies(patch)
            assert session.reshard(THREE) == 5
        assert play(session).steps == three.behind(4)


def test_a_coordinator_that_is_lost_while_the_job_is_launched_begins_at_its_beginning(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        dies_when_it_is_written(patch)
        session = launch(job(until=STEPS, journal=journal), **APART)
    with session:
        assert play(session) == alone


# what it had heard


def replaced_when(patch: pytest.MonkeyPatch, session: ov.Session) -> Callable[[], None]:
    """Kills the coordinator; another comes once the function that this returns is called."""
    start, go = COORDINATOR_STARTS.real, threading.Event()

    def waits(launcher: Launcher) -> int:
        assert go.wait(WAIT_S)
        return start(launcher)

    COORDINATOR_STARTS.replace(patch, waits)
    launcher = launcher_of(session)
    session.kill("planner")
    until(lambda: not is_ready(launcher))
    return go.set


def test_how_far_connected_ranks_are_is_known_though_the_coordinator_died_that_was_told(
    three: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand at a barrier, and say nothing any more: who changes the mesh must know that they
    do.
    """
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        got: dict[int, list[Any]] = {rank: [] for rank in range(3)}
        take(clients, 4, got)
        with monkeypatch.context() as patch:
            until(lambda: all(len(client.queue) >= 2 for client in clients))
            replace_it = replaced_when(patch, session)
            take(clients, 1, got)
            replace_it()
            assert session.reshard(THREE, at=5, timeout_s=WAIT_S) == 5
        served = session.serve()
        clients.append(ov.connect(served, 2, served.token, stall_limit_s=WAIT_S))
        got = {rank: [] for rank in range(3)}
        take(clients, STEPS - 5, got)
        for client in clients:
            client.close()
    assert got == three.behind(4)


def test_a_step_that_a_coordinator_planned_and_did_not_live_to_tell_of_is_told_by_the_next(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who serves connected ranks must know the state behind it: a rank that comes again goes on
    from there.
    """
    heard, deaf = SESSION_RECEIVES.real, [True]

    def hears(engine: ClusterRuntime, event: tuple[Any, ...]) -> None:
        if not (deaf and event[0] == "staged" and event[1] >= 4):
            heard(engine, event)

    SESSION_RECEIVES.replace(monkeypatch, hears)
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        take(clients, 4, {0: [], 1: []})
        until(lambda: all(len(client.queue) >= 2 for client in clients))
        replace_it = replaced_when(monkeypatch, session)
        take(clients, 1, {0: [], 1: []})
        take(clients[:1], 1, {0: []})
        deaf.clear()
        replace_it()
        until(
            lambda: (
                [client.position.step for client in running_job(session).clients.values()] == [6, 5]
            )
        )
        assert session.state_dict()["step"] == 5
        for client in clients:
            client.close()


def test_the_end_that_a_coordinator_told_of_counts_no_more_when_the_next_does_not_find_it(
    journal: str,
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        take([session.client(rank) for rank in range(2)], 2, {0: [], 1: []})
        runtime_of(session).planner.finished = EndOfJob(
            9, ActorLost("constructor-worker/0", "it is said")
        )
        session.kill("planner")
        until(lambda: runtime_of(session).planner.finished is None)


def test_a_source_that_left_is_known_though_the_coordinator_died_that_wrote_it_down(
    journal: str,
) -> None:
    made = job(journal=journal)
    made = replace(
        made, sources=[replace(made.sources[0], on_lost="leave"), *made.sources[1:]], until=STEPS
    )
    with launch(made, **APART) as session:
        clients = [session.client(rank) for rank in range(2)]
        take(clients, 2, {0: [], 1: []})
        event = SourceLost(runtime_of(session).planner.open_step + 3, "a", "a test says so")
        # it is written; who asks for it by itself tells of it then
        runtime_of(session).event(event, running_job(session).next_event())
        assert "lost" not in session.metrics()["sources"]["a"]
        session.kill("planner")
        until(lambda: session.metrics()["sources"]["a"].get("lost"))
        assert session.metrics()["sources"]["a"]["lost"] == {
            "step": event.at,
            "reason": event.reason,
        }
        take(clients, STEPS - 2, {0: [], 1: []})


# who takes part


def test_a_rank_that_leaves_while_another_coordinator_is_long_in_coming_is_not_waited_for(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, go = COORDINATOR_READY.real, threading.Event()

    def waits(launcher: Launcher) -> None:
        assert go.wait(WAIT_S)
        ready(launcher)

    with launch(job(until=STEPS, journal=journal), **APART) as session:
        staying, leaving = (session.client(rank) for rank in range(2))
        got: dict[int, list[Any]] = {0: [], 1: []}
        take([staying, leaving], 3, got)
        COORDINATOR_READY.replace(monkeypatch, waits)
        assert Launcher.ask.__kwdefaults__ is not None
        first = launcher_of(session).coordinator
        session.kill("planner")
        until(
            lambda: launcher_of(session).coordinator is not first
        )  # what it is started with is known by now
        with monkeypatch.context() as patch:
            patch.setitem(Launcher.ask.__kwdefaults__, "timeout_s", 0.2)  # else one waits for 25 s
            leaving.close()
            loop_of(session).call(lambda: None, "what was asked of the planner to be given up")
        go.set()
        take([staying], STEPS - 3, got)
    assert got[0] == alone.steps[0]


def test_a_worker_that_could_not_be_started_for_a_source_is_not_missed_by_the_next_coordinator(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, tried = WorkerFactory.loader_worker, list[int]()

    def refuses(recipes: WorkerFactory, h: int, *args: Any) -> Any:
        if h < FIRST_SCALED:
            return start(recipes, h, *args)
        tried.append(h)
        raise OverlordError("there is no room")

    monkeypatch.setattr(WorkerFactory, "loader_worker", refuses)
    with launch(scaling.job(journal=journal), **scaling.ONE) as session:
        clients = [session.client(rank) for rank in range(2)]
        got: dict[int, list[Any]] = {0: [], 1: []}
        take(clients, 3, got)
        assert session.scale("heavy", 2)
        until(lambda: tried)
        until(lambda: FIRST_SCALED not in launcher_of(session).workers.sources_of)
        for at in (12, 20):
            session.kill("planner")
            take(clients, at - len(got[0]), got)
        assert tried == [FIRST_SCALED]
        take(clients, 40 - len(got[0]), got)
    assert got == run(scaling.job(), "local").steps


# constructors


def test_a_constructor_that_is_lost_while_a_session_that_serves_is_moved_holds_up_nobody_for_good(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    furnish, killed = ServedRanks.follow, list[Any]()

    def dies(serving: ServedRanks, host: Any, **settings: Any) -> None:
        if isinstance(host, ClusterRuntime) and not killed:
            killed.append(handle := launcher_of(host).workers.handles["constructor-worker/0"])
            host.kill("constructor-worker/0")
            until(lambda: not handle.alive)
        furnish(serving, host, **settings)

    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        take(clients, 1, {0: [], 1: []})
        saved = clients[0].state_dict()
        take(clients, 3, {0: [], 1: []})
        monkeypatch.setattr(ServedRanks, "follow", dies)
        session.load_state_dict(saved)
        assert killed
        assert [next(client).step for client in clients] == [1, 1], (
            "though they have later ones of before, and no constructor to ask"
        )
        session.load_state_dict(saved)
        got: dict[int, list[Any]] = {0: [], 1: []}
        take(clients, STEPS - 1, got)
        for client in clients:
            client.close()
    assert got == alone.behind(0)


def test_what_was_started_for_a_move_that_fails_goes_with_it(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = list[ClusterRuntime]()

    def fails(serving: ServedRanks, host: Any, **settings: Any) -> None:
        made.append(host)
        raise DataStall("a test that says so", 0.0)

    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        take(clients, 1, {0: [], 1: []})
        with monkeypatch.context() as patch:
            patch.setattr(ServedRanks, "follow", fails)
            with pytest.raises(DataStall, match="a test that says so"):
                session.load_state_dict(session.state_dict())
        assert is_closed(made[0])
        with launch(
            job(until=STEPS, journal=journal), resume="auto", **APART
        ) as again:  # its journal is free
            take([again.client(rank) for rank in range(2)], 2, {0: [], 1: []})
        for client in clients:
            client.close()


def test_ranks_that_one_thread_of_another_process_plays_in_turn_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All use up what they have before another constructor is there, and no coordinator knows what
    they took.
    """
    made = job(until=STEPS, place=THREE, journal=str(tmp_path / "journal"))
    calm = run(replace(made, journal=None), "local")
    with launch(
        made, prefetch=3, build_ahead=4, constructor_hosts=1, stall_limit_s=WAIT_S
    ) as session:
        served = session.serve()
        clients = [ov.connect(served, rank, served.token) for rank in range(3)]
        got: dict[int, list[Any]] = {rank: [] for rank in range(3)}
        take(clients, 1, got)
        until(lambda: [len(client.queue) for client in clients] == [3, 3, 3])
        with monkeypatch.context() as patch:
            QUEUE_ASKS_AGAIN.replace(patch, lambda box: None)
            for pid in [
                a["pid"]
                for a in session.metrics()["actors"]
                if a["name"] in ("planner", "constructor-worker/0")
            ]:
                os.kill(pid, signal.SIGKILL)
            take(clients, 3, got)
        take(clients, STEPS - 4, got)
        for client in clients:
            client.close()
    assert got == calm.steps


# states that ranks load one after the other


def test_a_rank_that_has_not_loaded_the_state_yet_takes_part_only_when_it_has_whatever_is_lost_meanwhile(
    alone: Played, journal: str
) -> None:
    """What is lost goes back, and counts all ranks as far as the state: also those that are to load
    it.
    """
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        take(clients, 2, {0: [], 1: []})
        saved = clients[0].state_dict()
        take(clients, 3, {0: [], 1: []})
        clients[0].load_state_dict(saved)
        for name in ("constructor-worker/1", "planner"):
            before = len(session.metrics()["recoveries"])
            session.kill(name)
            until(lambda n=before: len(session.metrics()["recoveries"]) > n)  # type: ignore[misc]
        served = session.serve()
        clients[1].mark_failed()  # its trainer crashed, and was started again
        clients[1].close()
        clients[1] = ov.connect(served, 1, served.token, stall_limit_s=WAIT_S)
        assert clients[1].state_dict()["step"] == 2
        clients[1].load_state_dict(saved)
        got: dict[int, list[Any]] = {0: [], 1: []}
        take(clients, STEPS - 2, got)
        assert generation_of(session).number == 1, "the session was moved once"
        for client in clients:
            client.close()
    assert got == alone.behind(1)


def test_a_state_that_is_loaded_twice_since_the_answer_was_lost_moves_the_session_once(
    journal: str,
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        take(clients, 2, {0: [], 1: []})
        saved = clients[0].state_dict()
        take(clients, 1, {0: [], 1: []})
        serving = running_job(session).remote_ranks
        assert serving is not None
        request = {"ask": "rewind", "state": saved, "allow": (), "took": (0, 2)}
        assert call(serving, 1, request)["generation"] == 1
        clients[0].load_state_dict(saved)
        take(clients[:1], 2, {0: []})
        until(lambda: generation_of(session).acked)
        assert call(serving, 1, request)["generation"] == 1
        assert generation_of(session).number == 1
        for client in clients:
            client.close()


# constructors that are long in coming


def test_who_asks_where_a_constructor_is_that_is_being_started_is_answered_soon_and_it_is_asked_once(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        clients = connected(session)
        engine = runtime_of(session)
        assert isinstance(engine, ClusterRuntime)
        forget_addresses(engine)
        call, asked = launcher_of(engine).control.call, list[Any]()

        def silent(host: Any, method: str, *args: Any) -> Any:
            if method != "listen":
                return call(host, method, *args)
            asked.append(Future())
            return asked[-1]

        monkeypatch.setattr(launcher_of(engine).control, "call", silent)
        for _ in range(3):
            with pytest.raises(DataStall, match="constructor-worker/0 to be started again"):
                engine.outside(0)
        [answer] = asked
        answer.set_result("overlord://here")
        assert engine.outside(0) == ("overlord://here", "")
        for client in clients:
            client.close()


def test_a_source_that_could_not_join_is_not_in_the_journal_of_the_next_coordinator(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(until=STEPS, journal=journal)
    with launch(made, **APART) as session:
        clients = [session.client(rank) for rank in range(2)]
        take(clients, 2, {0: [], 1: []})
        with monkeypatch.context() as patch:
            patch.setattr(ClusterRuntime, "add_source", refuses)
            with pytest.raises(PlanError, match="it is planned already"):
                session.add_source(source("late", 30, 5000))
        assert launcher_of(session).prepared.job.names == made.names, (
            "what the next planner begins with, and writes down"
        )
        more = PlannerJob(generation_of(session).prepared.with_source(source("late", 30, 5000)))
        assert (
            more.first(3, generation_of(session).prepared.fingerprint).fingerprint
            == generation_of(session).prepared.fingerprint
        )  # of one that dies meanwhile
        session.kill("planner")
        take(clients, 12, {0: [], 1: []})
        until(lambda: recovered(journal).acked == 13)
    with launch(made, resume="auto", **APART) as session:
        assert session.resumed is not None
        assert session.resumed.step == 14


def refuses(*args: Any, **options: Any) -> None:
    raise PlanError("it is planned already", 3)


def test_that_the_last_steps_were_taken_is_written_though_no_plan_comes_behind_them(
    tmp_path: Path, journal: str
) -> None:
    """With a schedule that learns the coordinator counts a step when the reports before it have
    come. A job that is killed when all is trained has nothing to do again.
    """
    made, seen = journal_faults.job(tmp_path, journal), list[Any]()
    journal_faults.train(
        made,
        seen.append,
        runtime=WORKER_RUNTIME,
        then=lambda session: until(lambda: recovered(journal).acked == journal_faults.STEPS - 1),
    )
    assert [row[1] for row in seen if row[0] == "step"][-1] == journal_faults.STEPS - 1
