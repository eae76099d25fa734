"""What people tell a coordinator in a process of its own, and what becomes of it when its answer is
late, lost, or overtaken.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.client.remote_queue import RemoteStepQueue
from overlord.cluster.launcher import Launcher
from overlord.cluster.worker_factory import WorkerFactory
from overlord.errors import ActorLost, DataStall, JournalError, OverlordError
from overlord.messages.control import Report, SentReport
from overlord.messages.launcher import PlacementChanged
from overlord.serving.session_api import call
from tests.internals import (
    COORDINATOR_AWAITED,
    LAUNCHER_EXECUTES,
    incarnation_of,
    is_ready,
    launcher_of,
    running_job,
)
from tests.journal_faults import recovered
from tests.processes import WAIT_S, halt, launch, play, run, until
from tests.properties.test_feedback import Chaser
from tests.scenarios.test_coordinator_loss import APART, take
from tests.scenarios.test_process import job, source

pytestmark = pytest.mark.timeout(4 * WAIT_S)

Ask = Callable[..., Any]


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def asked(
    patch: pytest.MonkeyPatch, wanted: str, act: Callable[[Launcher, Callable[..., Any]], Any]
) -> list[str]:
    """The first time that the coordinator is asked this, ``act`` does so; it is given what would be
    done. Returns what is left to do.
    """
    ask, todo = Launcher.ask, [wanted]

    def asks(launcher: Launcher, method: str, *args: Any, **settings: Any) -> Any:
        if method not in todo:
            return ask(launcher, method, *args, **settings)
        todo.clear()
        return act(launcher, lambda **more: ask(launcher, method, *args, **settings, **more))

    patch.setattr(Launcher, "ask", asks)
    return todo


def replaced(launcher: Launcher) -> None:
    """The planner is killed, and another is there."""
    old = launcher.coordinator
    assert old is not None
    launcher.control.kill(old)
    until(lambda: launcher.coordinator is not old and is_ready(launcher))


@contextlib.contextmanager
def training(
    clients: list[ov.Client], begins: threading.Event | None = None
) -> Iterator[list[int]]:
    """Steps are taken in a thread of their own until this is left; their numbers."""
    over, taken, errors = threading.Event(), [], list[BaseException]()

    def train() -> None:
        try:
            assert begins is None or begins.wait(WAIT_S)
            while not over.is_set():
                steps = [next(client) for client in clients]
                taken.append(steps[0].step)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield taken
    finally:
        over.set()
        thread.join(WAIT_S)
    assert errors == []


def clients_of(session: ov.Session) -> list[ov.Client]:
    return [session.client(rank) for rank in range(2)]


def ahead(clients: list[ov.Client], n: int) -> None:
    take(clients, n, {0: [], 1: []})


def at_rest(session: ov.Session, journal: str, *, taken: int) -> int:
    """All is planned and written that may be: the first step that is not."""
    first = taken + running_job(session).options.prefetch
    until(lambda: recovered(journal).next_step == first)
    return first


# overtaken


def test_a_source_whose_step_was_planned_before_it_could_join_joins_at_the_next(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error that spoke of an actor "expected already", in one of four calls while
    trainers ran.
    """

    def late(launcher: Launcher, go: Callable[[], Any]) -> Any:
        first = int(launcher.ask("open_step"))
        until(lambda: int(launcher.ask("open_step")) > first + 1)
        return go()

    with (
        launch(job(until=100_000, journal=journal), **APART) as session,
        training(clients_of(session)) as taken,
    ):
        until(lambda: len(taken) > 2)
        with monkeypatch.context() as patch:
            todo = asked(patch, "add_source", late)
            at = session.add_source(source("d", 30, 5000))
        assert not todo
        until(lambda: taken[-1] > at + 4)
        assert "d" in session.metrics()["sources"]


def test_where_a_source_that_joined_is_read_is_known_once(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner tells of it, too, and may be heard first: then its loaders counted twice, and the
    next source got a worker of others.
    """
    heard = threading.Event()
    do = LAUNCHER_EXECUTES.real

    def hears(launcher: Launcher, planner: Any, event: Any) -> None:
        do(launcher, planner, event)
        if isinstance(event, PlacementChanged):
            heard.set()

    def slowly(launcher: Launcher, go: Callable[[], Any]) -> Any:
        answer = go()
        assert heard.wait(WAIT_S)
        return answer

    with launch(job(until=60, journal=journal), **APART) as session:
        clients, launcher = clients_of(session), launcher_of(session)
        ahead(clients, 3)
        with monkeypatch.context() as patch:
            LAUNCHER_EXECUTES.replace(patch, hears)
            asked(patch, "add_source", slowly)
            session.add_source(source("d", 30, 5000))
        assert (
            len(launcher.workers.placement.host_of) == sum(launcher.workers.placement.loaders) == 4
        )
        replaced(launcher)
        ahead(clients, 5)
        session.add_source(source("e", 30, 7000))
        ahead(clients, 20)


# given up


def stalled(launcher: Launcher, go: Callable[..., Any]) -> Any:
    """It stands still, for longer than its answer is waited for, and goes on then."""
    planner = launcher.coordinator
    assert planner is not None
    assert planner.pid is not None
    halt(planner.pid)
    try:
        return go(timeout_s=1.0)
    finally:
        os.kill(planner.pid, signal.SIGCONT)


def test_a_mixture_that_was_given_up_and_changed_all_the_same_is_in_states(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch(job(until=40, journal=journal), **APART, lost_after_s=WAIT_S) as session:
        clients, launcher = clients_of(session), launcher_of(session)
        ahead(clients, 3)
        with monkeypatch.context() as patch:
            asked(patch, "event", stalled)
            with pytest.raises(DataStall) as given_up:
                session.set_mixture({"a": 1.0, "b": 0.0, "c": 0.0}, at=20)
        assert "may still apply the event" in "".join(given_up.value.__notes__)
        until(lambda: launcher.ask("last_event"))
        until(lambda: session.state_dict()["events"])
        saved = clients[0].state_dict()
        lived = play(session)
    assert run(replace(job(until=40), journal=None), "local", resume=saved).steps == lived.steps


def test_a_source_that_was_given_up_and_joined_all_the_same_is_part_of_the_job(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch(job(until=40, journal=journal), **APART, lost_after_s=WAIT_S) as session:
        clients = clients_of(session)
        ahead(clients, 3)
        with monkeypatch.context() as patch:
            asked(patch, "add_source", stalled)
            with pytest.raises(DataStall):
                session.add_source(source("d", 30, 5000))
        until(lambda: "d" in session.job.names)
        ahead(clients, 8)
        assert "d" in clients[0].state_dict()["cursors"]
        assert "d" in session.metrics()["sources"]
        with pytest.raises(OverlordError, match="'d'"):
            session.add_source(source("d", 30, 5000))
        ahead(clients, 4)


def test_what_is_said_behind_something_that_was_given_up_comes_behind_it(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two changes for one step the last one counts, in states as in the coordinator; and sources
    that join have numbers.
    """
    with launch(job(until=40, journal=journal), **APART, lost_after_s=WAIT_S) as session:
        clients = clients_of(session)
        ahead(clients, 3)
        for what, act in (
            ("event", lambda: session.set_mixture({"a": 1.0, "b": 0.0, "c": 0.0}, at=30)),
            ("add_source", lambda: session.add_source(source("d", 30, 5000), at=26)),
        ):
            with monkeypatch.context() as patch:
                asked(patch, what, stalled)
                with pytest.raises(DataStall):
                    act()
            if what == "event":
                session.set_mixture({"a": 0.0, "b": 1.0, "c": 1.0}, at=30)
        session.set_mixture({"a": 0.0, "b": 1.0}, at=34)
        session.add_source(source("e", 30, 7000), at=28)
        assert session.job.names == ("a", "b", "c", "d", "e")
        assert list(session.metrics()["sources"]) == ["a", "b", "c", "d", "e"]
        saved = clients[0].state_dict()
        assert [event["at"] for event in saved["events"] if "weights" in event] == [30, 30, 34]
        assert set(saved["events"][-1]["weights"]) == {"a", "b", "c", "d"}, (
            "e is one that it does not name"
        )
        lived = play(session)
    with_both = [*job().sources, source("d", 30, 5000), source("e", 30, 7000)]
    assert run(job(until=40, sources=with_both), "local", resume=saved).steps == lived.steps


def test_a_state_is_saved_while_a_source_joins(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator's states have it at once, the session hears of it a moment later."""
    with launch(job(until=40, journal=journal), **APART) as session:
        clients = clients_of(session)
        ahead(clients, 3)
        saved = []

        def meanwhile(launcher: Launcher, go: Callable[[], Any]) -> Any:
            answer = go()
            ahead(clients, 8)
            saved.append(clients[0].state_dict())
            return answer

        with monkeypatch.context() as patch:
            asked(patch, "add_source", meanwhile)
            session.add_source(source("d", 30, 5000))
        assert [list(state["cursors"]) for state in saved] == [["a", "b", "c", "d"]]


# lost


def say(rank: int, step: int) -> dict[str, float]:
    return {"loss/a": 1.0 + step % 5 + 3 * rank, "loss/b": 0.5 * (1 + step % 3), "loss/c": 0.25}


def test_a_report_that_a_coordinator_accepted_and_died_with_is_told_to_the_next(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=30)
    calm = run(made, "local", report=say, prefetch=4)
    todo = ["once"]

    with launch(replace(made, journal=journal), **APART, prefetch=4) as session:
        launcher, report = launcher_of(session), RemoteStepQueue.report

        def dies(queue: RemoteStepQueue, sent: Report, in_time: bool) -> None:
            report(queue, sent, in_time)
            if (sent.step, sent.rank) == (9, 1) and todo:
                todo.clear()
                until(lambda: sent in launcher.ask("reports")[0])
                old = launcher.coordinator
                assert old is not None
                launcher.control.kill(old)
                until(lambda: launcher.coordinator is not old)  # it is told what is known by now

        monkeypatch.setattr(RemoteStepQueue, "report", dies)
        assert play(session, report=say).steps == calm.steps
        assert session.metrics()["feedback"]["late"] == 0
    assert not todo


@pytest.mark.parametrize("lost", ["constructor-worker/0", "planner"])
def test_a_report_counts_once_whatever_is_lost_while_it_is_on_its_way(
    journal: str, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """What a client sent is with a constructor worker that dies, or is sent again to a coordinator
    that has it already.
    """
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=30)
    calm = run(made, "local", report=say, prefetch=4)
    report, todo = RemoteStepQueue.report, [4, 11, 18]

    with launch(replace(made, journal=journal), **APART, prefetch=4) as session:
        launcher = launcher_of(session)

        def dies(queue: RemoteStepQueue, sent: Report, in_time: bool) -> None:
            report(queue, sent, in_time)
            if todo and sent.rank == 0 and sent.step == todo[0]:
                todo.pop(0)
                named = {"planner": launcher.coordinator, **launcher.workers.handles}
                os.kill(named[lost].pid, signal.SIGKILL)  # type: ignore[union-attr, arg-type]

        monkeypatch.setattr(RemoteStepQueue, "report", dies)
        assert play(session, report=say).steps == calm.steps
        counts = session.metrics()["feedback"]
    assert not todo
    assert counts["late"] == 0
    assert counts["received"] <= 2 * 30


def test_a_report_of_a_rank_whose_steps_are_broadcast_counts_once(journal: str) -> None:
    """It has no step queue: it sends all that it keeps to the session, each time."""
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=30, journal=journal)
    with launch(made, **APART) as session:
        session.serve()
        serving = running_job(session).remote_ranks
        assert serving is not None
        sent = [SentReport(n, Report(n, 1, say(1, n)), in_time=False) for n in (1, 2, 3)]
        for last in (1, 2, 2, 3):
            request = {"ask": "report", "reports": sent[:last]}
            call(serving, 1, request, broadcast=True)  # type: ignore[arg-type]
        with pytest.raises(OverlordError, match="expected a request of"):
            call(serving, 1, request)  # type: ignore[arg-type]
        assert session.metrics()["feedback"]["received"] == 3
        launcher = launcher_of(session)
        assert launcher.ask("reports") == ([one.report for one in sent], {1: 3})


def test_the_last_report_of_a_client_counts_though_its_constructor_dies_before_it_is_closed(
    journal: str,
) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=30, journal=journal)
    with launch(made, **APART) as session:
        clients = clients_of(session)
        ahead(clients, 3)
        os.kill(launcher_of(session).workers.handles["constructor-worker/0"].pid, signal.SIGKILL)
        until(lambda: launcher_of(session).ask("open_step") is not None)
        last = clients[0].queue
        until(lambda: len(last) >= 0 and bool(last.connection_problem))  # type: ignore[attr-defined]
        clients[0].report(2, say(0, 2))
        clients[0].close()
        until(lambda: session.metrics()["feedback"]["received"] == 1)


def test_a_skip_that_was_written_and_passed_before_it_was_answered_has_happened(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch(job(until=60, journal=journal), **APART) as session:
        clients, launcher = clients_of(session), launcher_of(session)
        ahead(clients, 3)
        first = at_rest(session, journal, taken=3)
        get, wait, killed, lost = (
            launcher.control.get,
            COORDINATOR_AWAITED.real,
            list[Any](),
            threading.Event(),
        )
        with training(clients, lost) as taken:

            def dies(future: Any, timeout_s: float) -> Any:
                """When it has done what it was asked, and before its answer is here."""
                value = get(future, timeout_s)
                if getattr(future, "method", "") == "event" and not killed:
                    killed.append(launcher.coordinator)
                    launcher.control.kill(killed[0])
                    lost.set()
                    raise ActorLost("planner", "killed by signal 9")
                return value

            def waits(launcher: Launcher, deadline: float, timeout_s: float) -> Any:
                found = wait(launcher, deadline, timeout_s)
                if killed and threading.current_thread().name.startswith("overlord-loop"):
                    until(lambda: taken and taken[-1] > first + 2)
                return found

            with monkeypatch.context() as patch:
                patch.setattr(launcher.control, "get", dies)
                COORDINATOR_AWAITED.replace(patch, waits)
                session.skip([first + 1])
            until(lambda: taken[-1] > first + 4)
    assert killed
    assert first + 1 not in taken
    assert first + 2 in taken


@pytest.mark.parametrize("restarts", [1, 3])
def test_a_coordinator_that_is_lost_while_a_worker_is_started_for_it_is_followed_by_one(
    journal: str, monkeypatch: pytest.MonkeyPatch, restarts: int
) -> None:
    """The worker was not known yet when the next coordinator was made, which asked for it again,
    and ended: its name was taken.
    """
    start, todo = WorkerFactory.loader_worker, ["once"]
    with launch(job(until=30, journal=journal), **APART, max_restarts=restarts) as session:
        clients, launcher = clients_of(session), launcher_of(session)
        ahead(clients, 3)

        def dies(*args: Any) -> Any:
            host = start(*args)
            if todo:
                todo.clear()
                old = launcher.coordinator
                assert old is not None
                assert old.pid is not None
                os.kill(old.pid, signal.SIGKILL)
                until(lambda: not is_ready(launcher))
                with contextlib.suppress(
                    AssertionError
                ):  # the next one is not made before this one is known
                    until(lambda: launcher.coordinator is not old, 1.0)
            return host

        monkeypatch.setattr(WorkerFactory, "loader_worker", dies)
        session.kill("loader-worker/0")
        ahead(clients, 20)
        assert not todo
        assert incarnation_of(launcher) == 1


def test_a_worker_that_is_being_started_for_a_source_to_join_outlives_the_coordinator(
    journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next coordinator has nothing to do with it yet: it gave it up when it did not answer, as
    one that hangs.
    """
    start = WorkerFactory.loader_worker

    with launch(job(until=60, journal=journal), **APART, lost_after_s=8.0) as session:
        clients, launcher = clients_of(session), launcher_of(session)
        ahead(clients, 3)

        def slowly(*args: Any) -> Any:
            host = start(*args)
            pid = until(lambda: host.pid)
            halt(pid)
            threading.Thread(target=meanwhile, args=(pid,), daemon=True).start()
            return host

        def meanwhile(pid: int) -> None:
            until(lambda: "loader-worker/3" in launcher.workers.handles)
            replaced(launcher)
            os.kill(pid, signal.SIGCONT)

        with monkeypatch.context() as patch:
            patch.setattr(WorkerFactory, "loader_worker", slowly)
            session.add_source(source("d", 30, 5000))
        assert incarnation_of(launcher) == 1
        ahead(clients, 10)


def test_a_source_that_cannot_be_written_ends_the_job_with_words_and_nothing_else_breaks(
    journal: str,
) -> None:
    with launch(job(until=60, journal=journal), **APART) as session:
        clients = clients_of(session)
        ahead(clients, 3)
        at_rest(session, journal, taken=3)
        with sorted(Path(journal).glob("*.ovj"))[-1].open("ab") as file:
            file.write(b"x")
        with pytest.raises(JournalError):
            session.add_source(source("d", 30, 5000))
        assert session.metrics()["sources"]
        with pytest.raises(JournalError):
            ahead(clients, 30)
        assert session.metrics()["sources"]
