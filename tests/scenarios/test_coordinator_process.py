"""With a journal the coordinator is a process like others: it may be killed or stopped at any
moment, and the stream is that of one process.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

import overlord as ov
from overlord.cluster.launcher import Launcher
from overlord.errors import ActorLost, JobError, PlanError
from overlord.messages.control import EndOfJob
from tests.fatal_functions import FATAL_STEP, HaltingStrategy, HeldUp, Stuck, deadly
from tests.internals import (
    COORDINATOR_READY,
    COORDINATOR_REPLACED,
    COORDINATOR_RESTARTS,
    COORDINATOR_WAITS,
    incarnation_of,
    launcher_of,
    loop_of,
    running_job,
    runtime_of,
)
from tests.journal_faults import recovered
from tests.processes import (
    EXITED,
    KILLED,
    WAIT_S,
    WORKER_RUNTIME,
    Played,
    halt,
    launch,
    left_after,
    plain,
    play,
    program,
    run,
    runs,
    until,
    workers_of,
    written,
)
from tests.properties.test_combined import LAG
from tests.properties.test_feedback import Chaser, trainer
from tests.scenarios.test_process import APART as HOSTS
from tests.scenarios.test_process import SCENES, job, rows, source
from tests.worlds import folder

pytestmark = pytest.mark.timeout(4 * WAIT_S)

APART: dict[str, Any] = dict(HOSTS)
STEPS = 40
SOON_S = 10.0  # a coordinator is there again in less than a second; machines are noisy


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=STEPS), "local")


@pytest.fixture
def journal(tmp_path: Path) -> str:
    return str(tmp_path / "journal")


def planner_of(session: ov.Session) -> int:
    [pid] = [a["pid"] for a in session.metrics()["actors"] if a["role"] == "planner"]
    assert isinstance(pid, int)
    return pid


def mended(session: ov.Session, n: int, part: str = "") -> list[dict[str, Any]]:
    """What was lost and is there again: so many rows at least. Who is back works before it is told
    of.
    """

    def told() -> list[dict[str, Any]]:
        return [row for row in session.metrics()["recoveries"] if part in ("", row["part"])]

    until(lambda: len(told()) >= n)
    return told()


def killed(*names: str) -> Callable[[ov.Session], None]:
    """Kills the coordinator and these workers, at once, as far as that can be."""

    def act(session: ov.Session) -> None:
        pids = [planner_of(session), *(workers_of(session)[name] for name in names)]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    return act


# without faults


@pytest.mark.parametrize("name", list(SCENES)[:4])
def test_a_small_world_is_the_same_with_a_coordinator_elsewhere(name: str, journal: str) -> None:
    scene = SCENES[name]
    with folder() as directory:
        made, _, said = scene.job(directory)
        options = {
            "prefetch": 1 + scene.salt % (LAG - 2),
            "loaders": dict.fromkeys(made.names, 1 + scene.salt % 2),
        }
        alone = run(made, "local", said=said, report=trainer(scene.salt), **options)
        apart = run(
            replace(made, journal=journal),
            "process",
            said=said,
            report=trainer(scene.salt),
            **options,
            **APART,
        )
    assert len(alone.states) > 2
    assert apart == alone


def test_the_coordinator_is_listed_with_its_process_and_goes_with_the_session(
    alone: Played, journal: str
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        pid, hosts = planner_of(session), workers_of(session)
        assert pid not in {os.getpid(), *hosts.values()}
        assert play(session) == alone
        with pytest.raises(
            JobError,
            match="expected the name of a process of this job, got 'x'; there are planner, constructor-worker/0",
        ):
            session.kill("x")
    assert WORKER_RUNTIME == "ray" or not left_after(
        [pid, *hosts.values()], SOON_S
    )  # there they wait for the next one of their name


def test_what_is_asked_of_a_coordinator_elsewhere_is_what_one_here_says(journal: str) -> None:
    made = job(until=20)
    with launch(made, "local") as here, launch(replace(made, journal=journal), **APART) as there:
        for session in (here, there):
            play(session, steps=6)
            until(
                lambda s=session: loop_of(s).call(lambda: runtime_of(s).planner.next_step, "") == 10
            )  # type: ignore[misc]
        assert there.plan(4).digest() == here.plan(4).digest()
        assert str(there.explain(4)) == str(here.explain(4))
        assert there.quarantine() == here.quarantine()
        with pytest.raises(
            PlanError, match="expected a kept step, got step 100; kept steps: 0 to 9"
        ):
            there.plan(100)
        one, other = here.metrics(), there.metrics()
        same = ("planned_steps", "samples", "tokens", "mix", "feedback")
        assert {key: other[key] for key in same} == {key: one[key] for key in same}
        assert there.summary_buffer().batch == here.summary_buffer().batch
        there.kill("planner")  # steps that nobody took are planned again, and known again
        until(
            lambda: loop_of(there).call(lambda: runtime_of(there).plans.steps(), "") == [6, 7, 8, 9]
        )
        assert there.plan(8).digest() == here.plan(8).digest()


def test_a_launch_that_refuses_code_leaves_no_journal_behind(journal: str) -> None:
    lock = threading.Lock()
    with pytest.raises(JobError, match=r"strategy: variable 'lock': .*cannot be sent"):
        launch(job(strategy=lambda buffer, place: deadly(buffer, lock), journal=journal))
    assert not Path(journal).exists() or not list(Path(journal).glob("*.ovj"))


# kills


@pytest.mark.parametrize("prefetch", [1, 4])
def test_a_coordinator_that_is_killed_again_and_again_leaves_the_stream_as_it_is(
    alone: Played, journal: str, prefetch: int
) -> None:
    moments = dict.fromkeys((0, 1, 7, 8, 9, 25, STEPS - 1), killed())
    with launch(job(until=STEPS, journal=journal), prefetch=prefetch, **APART) as session:
        first = planner_of(session)
        assert play(session, act=moments) == alone
        assert planner_of(session) != first
        told = mended(session, len(moments), "planner")
        assert len(told) == len(moments)
        assert {r["reason"] for r in told} == {KILLED}
        assert all(abs(r["step"] - k) <= prefetch + 1 for k, r in zip(moments, told, strict=True))
        assert session.metrics()["journal"]["plans"] > STEPS // 2, (
            "what planners before the last one wrote is counted too"
        )


@pytest.mark.parametrize(
    "others",
    [
        ["loader-worker/1"],
        ["constructor-worker/1"],
        ["loader-worker/0", "loader-worker/1", "loader-worker/2", "constructor-worker/0"],
    ],
    ids=["a loader host", "a constructor host", "nearly all"],
)
def test_workers_that_die_with_the_coordinator_come_back_with_it(
    alone: Played, journal: str, others: list[str]
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        assert play(session, act={5: killed(*others), 20: killed(*others)}) == alone
        assert sorted(row["part"] for row in mended(session, 2 * (1 + len(others)))) == sorted(
            ["planner", *others] * 2
        )


def test_coordinator_and_workers_are_killed_at_random_while_ranks_train_side_by_side(
    alone: Played, journal: str
) -> None:
    random = Random(7)
    with launch(job(until=STEPS, journal=journal), max_restarts=50, **APART) as session:
        clients = [session.client(rank) for rank in range(2)]
        got: dict[int, list[Any]] = {0: [], 1: []}

        def train(rank: int) -> None:
            for step in clients[rank]:
                got[rank].append(written(step))
                time.sleep(0.02)

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        deaths = 0
        while any(thread.is_alive() for thread in threads) and deaths < 12:
            handles = [
                launcher_of(session).coordinator,
                *launcher_of(session).workers.handles.values(),
            ]
            for handle in random.sample(handles, random.choice((1, 1, 2))):
                try:
                    os.kill(handle.pid, signal.SIGKILL)
                except (
                    ProcessLookupError,
                    TypeError,
                ):  # gone; or on its way: Ray has not said where it is
                    continue
                deaths += 1
            time.sleep(random.random() * 0.3)
        for thread in threads:
            thread.join(60)
        assert got == alone.steps
        assert deaths > 3


def test_a_coordinator_that_dies_the_moment_it_is_there_is_missed_too(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, struck = COORDINATOR_READY.real, list[int]()

    def strike(launcher: Launcher) -> None:
        if incarnation_of(launcher) and not struck:
            struck.append(incarnation_of(launcher))
            launcher.control.kill(launcher.coordinator)  # type: ignore[arg-type]
        ready(launcher)

    COORDINATOR_READY.replace(monkeypatch, strike)
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        assert play(session, act={5: killed()}) == alone
    assert struck == [1]


def test_a_coordinator_that_hangs_is_replaced_and_when_it_wakes_it_is_no_more(
    alone: Played, journal: str
) -> None:
    with launch(job(until=STEPS, journal=journal), lost_after_s=1.0, **APART) as session:
        before = play(session, steps=6)
        zombie = planner_of(session)
        halt(zombie)
        got = play(session)
        for rank, steps in got.steps.items():
            assert before.steps[rank] + steps == alone.steps[rank]
        assert planner_of(session) != zombie
        assert not runs(zombie), "there is one who writes the journal"


def test_workers_that_hang_with_the_coordinator_are_waited_for_at_the_same_time_and_by_name(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaits, seen = COORDINATOR_WAITS.real, threading.Event()

    def waits(launcher: Launcher, names: list[str]) -> None:
        """They are named until it was seen: that may be for less than a second."""
        awaits(launcher, names)
        assert not names or seen.wait(WAIT_S)

    COORDINATOR_WAITS.replace(monkeypatch, waits)
    with launch(job(until=STEPS, journal=journal), lost_after_s=1.2, **APART) as session:
        before, hosts = play(session, steps=6), workers_of(session)
        until(
            lambda: recovered(journal).next_step == 6 + running_job(session).options.prefetch
        )  # it has nothing to do
        for pid in [planner_of(session), *hosts.values()]:
            halt(pid)
        until(
            lambda: all(
                name in running_job(session).waiting_for(0).partition("and waits for ")[2]
                for name in hosts
            )
        )
        seen.set()
        got = play(session)
        assert {
            rank: before.steps[rank] + steps for rank, steps in got.steps.items()
        } == alone.steps
        rows = mended(session, 1 + len(hosts))
        assert {row["part"]: row["reason"] for row in rows} == dict.fromkeys(
            ["planner", *hosts], "it answered nothing for 1.2 s"
        )
        assert len(rows) == 1 + len(hosts), (
            "each once: no planner was lost by waiting for the others"
        )


def test_when_no_coordinator_comes_any_more_clients_of_a_constructor_worker_that_hangs_hear_it_too(
    journal: str,
) -> None:
    with launch(
        job(until=STEPS, journal=journal),
        lost_after_s=1.5,
        max_restarts=0,
        stall_limit_s=4 * WAIT_S,
        **APART,
    ) as session:
        play(session, steps=6)
        planner, host = planner_of(session), workers_of(session)["constructor-worker/1"]
        halt(host)
        os.kill(planner, signal.SIGKILL)  # before it misses the other
        start = time.monotonic()
        for rank in range(2):
            with pytest.raises(ActorLost, match="planner is lost: "):
                for _ in session.client(rank):
                    pass
        assert time.monotonic() - start < WAIT_S, "long before it would be a stall"


def test_a_constructor_worker_that_hangs_is_named_and_not_the_coordinator(
    alone: Played, journal: str
) -> None:
    with launch(job(until=STEPS, journal=journal), lost_after_s=WAIT_S, **APART) as session:
        before, pid = play(session, steps=6), workers_of(session)["constructor-worker/0"]
        halt(pid)
        until(
            lambda: running_job(session).waiting_for(0).startswith("constructor-worker/0, which ")
        )
        os.kill(pid, signal.SIGCONT)
        got = play(session)
        assert {
            rank: before.steps[rank] + steps for rank, steps in got.steps.items()
        } == alone.steps


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that is stuck has time to say so: its process may be late to answer. One that never
    does is never replaced.
    """
    end = COORDINATOR_REPLACED.real
    COORDINATOR_REPLACED.replace(
        monkeypatch,
        lambda launcher, planner, why: "it answered nothing" in why or end(launcher, planner, why),
    )
    monkeypatch.setattr("overlord.cluster.launcher.ACTIVITY_S", WAIT_S)


@pytest.mark.usefixtures("patient")
def test_a_coordinator_whose_strategy_does_not_come_to_an_end_is_replaced(
    alone: Played, journal: str, tmp_path: Path
) -> None:
    made = job(strategy=Stuck(tmp_path / "stuck"), until=STEPS, journal=journal)
    with launch(made, lost_after_s=0.7, **APART) as session:
        got = play(session)
        assert (got.steps, got.error) == (alone.steps, "")
        words = "its event loop was blocked for 0.7 s: "
        until(
            lambda: any(row["reason"].startswith(words) for row in session.metrics()["recoveries"])
        )


@pytest.mark.usefixtures("patient")
def test_a_coordinator_that_is_stuck_every_time_ends_the_job_with_that(
    journal: str, tmp_path: Path
) -> None:
    made = job(strategy=Stuck(tmp_path / "stuck", always=True), until=STEPS, journal=journal)
    with launch(made, lost_after_s=0.6, max_restarts=1, **APART) as session:
        error = play(session).error
        for words in (
            f"its event loop was blocked for 0.6 s: step {FATAL_STEP}, in Stuck.__call__",
            "fatal_functions.py",
            "started again 1 time, ",
            "raise max_restarts",
        ):
            assert words in error


def test_a_coordinator_that_is_stopped_while_it_is_started_is_given_up_and_started_again(
    alone: Played, journal: str, tmp_path: Path
) -> None:
    flag = tmp_path / "stop"

    def strike(session: ov.Session) -> None:
        flag.touch()
        session.kill("planner")

    with launch(
        job(strategy=HaltingStrategy(flag), until=STEPS, journal=journal), lost_after_s=0.8, **APART
    ) as session:
        got = play(session, act={6: strike})
        assert (got.steps, got.error) == (alone.steps, "")
        words = "it was stopped for 0.8 s while it was being started"
        until(lambda: words in {row["reason"] for row in session.metrics()["recoveries"]})


def test_a_coordinator_whose_journal_hangs_is_left_alone_and_says_what_it_waits_for(
    journal: str, tmp_path: Path
) -> None:
    flag, lost_after_s = tmp_path / "hangs", 1.4
    with launch(
        job(mixture=HeldUp(flag), until=STEPS, journal=journal), lost_after_s=lost_after_s, **APART
    ) as session:
        before = planner_of(session)
        flag.touch()
        sayer = threading.Thread(target=session.skip, args=([30],))
        sayer.start()
        until(lambda: runtime_of(session).waiting_for(0) == "an event to be written to the journal")
        time.sleep(1.5 * lost_after_s)
        until(lambda: runtime_of(session).waiting_for(0) == "an event to be written to the journal")
        flag.unlink()
        sayer.join()
        assert [step[0] for step in play(session).steps[0]] == [k for k in range(STEPS) if k != 30]
        assert planner_of(session) == before


def test_a_coordinator_that_cannot_be_kept_alive_ends_the_job_with_what_it_died_of(
    journal: str,
) -> None:
    made = job(strategy=deadly, until=STEPS, journal=journal)
    with launch(made, max_restarts=2, **APART) as session:
        got = play(session)
        assert got.error.startswith(
            f"ActorLost('planner', '{EXITED}; all ranks took the steps up to "
        )
        assert "started again 2 times" in got.error
        assert all(
            numbers == list(range(len(numbers))) and len(numbers) <= FATAL_STEP
            for numbers in got.numbers
        )
        with pytest.raises(ActorLost, match=f"planner is lost: {EXITED}"):
            session.set_mixture({"a": 1.0})


# what is said and asked while it is gone


def test_clients_go_on_with_what_they_have_and_then_wait_for_the_coordinator_by_name(
    alone: Played, journal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    again, seen = COORDINATOR_RESTARTS.real, threading.Event()

    def waits(launcher: Launcher, reason: str) -> None:
        """Until what is said meanwhile was seen."""
        assert seen.wait(WAIT_S)
        again(launcher, reason)

    COORDINATOR_RESTARTS.replace(monkeypatch, waits)
    with launch(job(until=STEPS, journal=journal), prefetch=2, **APART) as session:
        before = play(session, steps=4)
        clients = [session.client(rank) for rank in range(2)]
        until(lambda: min(len(client.queue) for client in clients) == 2)
        os.kill(planner_of(session), signal.SIGKILL)
        until(
            lambda: (
                running_job(session).waiting_for(0)
                == f"the coordinator, which is being restarted ({KILLED})"
            )
        )
        seen.set()
        for step in (4, 5):
            for rank, client in enumerate(clients):
                assert written(next(client)) == alone.steps[rank][step]
        after = play(session)
        for rank, steps in alone.steps.items():
            assert before.steps[rank] + steps[4:6] + after.steps[rank] == steps


def test_states_can_be_saved_while_the_coordinator_is_gone(alone: Played, journal: str) -> None:
    with launch(job(until=STEPS, journal=journal), lost_after_s=600.0, **APART) as session:
        play(session, steps=4)
        clients = [session.client(rank) for rank in range(2)]
        until(lambda: min(len(client.queue) for client in clients) >= 2)
        pid = planner_of(session)
        halt(pid)
        savers = [session.state_dict, *(client.state_dict for client in clients)]
        assert [plain(save()) for save in savers] == [alone.states[3]] * 3
        for client in clients:
            next(client)
        assert [plain(save()) for save in savers] == [alone.states[4]] * 3
        os.kill(pid, signal.SIGCONT)
        assert play(session).steps[0] == alone.steps[0][5:]


def test_events_and_reports_that_are_said_when_the_coordinator_dies_count_as_if_it_had_not(
    journal: str,
) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=LAG, until=STEPS)
    said: dict[int, Callable[[ov.Session], Any]] = {
        4: lambda s: s.skip([12, 13]),
        9: lambda s: s.set_mixture({"a": 1.0, "b": 1.0}, at=20),
        15: lambda s: s.set_mixture({"c": 1.0, "b": 2.0}, at=30),
    }

    def with_kill(act: Callable[[ov.Session], Any]) -> Callable[[ov.Session], None]:
        def do(session: ov.Session) -> None:
            os.kill(planner_of(session), signal.SIGKILL)
            act(session)

        return do

    options = {"prefetch": 3, "report": trainer(4)}
    calm = run(made, "local", act=said, **options)
    wild = run(
        replace(made, journal=journal),
        "process",
        act={k: with_kill(a) for k, a in said.items()},
        **options,
        **APART,
    )
    assert wild == calm


def _losses(rank: int, step: int) -> dict[str, float]:
    return {
        f"loss/{name}": ((step * 7 + rank * 3 + i * 5) % 11) / 4 for i, name in enumerate("abc")
    }


def _take(clients: list[ov.Client], n: int) -> list[list[Any]]:
    """Steps of all ranks in turn, each reported: what was in them, without the rest that a mesh
    decides.
    """
    taken = []
    for _ in range(n):
        steps = [next(client) for client in clients]
        for client, step in zip(clients, steps, strict=True):
            client.report(step.step, _losses(client.rank, step.step))
        taken.append(sorted({sample[0] for step in steps for mb in step for sample in mb.samples}))
    return taken


@pytest.mark.parametrize("killed", [False, True], ids=["alive", "killed"])
def test_a_report_counts_though_its_rank_takes_the_steps_that_are_here_before_the_coordinator_hears_of_it(
    journal: str, killed: bool
) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=STEPS)

    def through(
        session: ov.Session, meanwhile: Callable[[ov.Session], None]
    ) -> tuple[list[list[Any]], dict[str, int]]:
        clients = [session.client(rank) for rank in range(2)]
        taken = _take(clients, 5)
        for _ in range(3):
            until(lambda: min(len(client.queue) for client in clients) >= 2)
            meanwhile(session)
            taken += _take(clients, 6)
        return taken, session.metrics()["feedback"]

    def keep_busy(session: ov.Session) -> None:
        if killed:
            os.kill(planner_of(session), signal.SIGKILL)
        loop_of(session).post(lambda: time.sleep(0.3))  # by whose way reports go

    with (
        launch(made, "local", prefetch=4) as here,
        launch(replace(made, journal=journal), prefetch=4, **APART) as there,
    ):
        calm, _ = through(here, lambda session: None)
        wild, became = through(there, keep_busy)
    assert wild == calm
    assert became["late"] == 0


def test_reports_that_a_stopped_coordinator_has_not_heard_count_when_the_mesh_changes(
    journal: str,
) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=STEPS)

    def through(session: ov.Session, meanwhile: Callable[[ov.Session], None]) -> list[list[Any]]:
        clients = [session.client(rank) for rank in range(2)]
        taken = _take(clients, 5)
        until(lambda: min(len(client.queue) for client in clients) >= 2)
        meanwhile(session)
        taken += _take(clients, 2)
        assert session.reshard(ov.ClientPlaceTree(tp=2)) == 7
        return taken + _take(clients, 16)

    with (
        launch(made, "local", prefetch=4) as here,
        launch(replace(made, journal=journal), prefetch=4, lost_after_s=600.0, **APART) as there,
    ):
        calm = through(here, lambda session: None)
        assert through(there, lambda session: halt(planner_of(session))) == calm


def test_reports_that_no_coordinator_hears_any_more_are_in_the_states_that_are_saved(
    journal: str,
) -> None:
    made = job(mixture=Chaser(("a", "b", "c")), feedback_lag=6, until=STEPS)
    with launch(replace(made, journal=journal), prefetch=4, max_restarts=0, **APART) as session:
        clients = [session.client(rank) for rank in range(2)]
        _take(clients, 5)
        until(lambda: min(len(client.queue) for client in clients) >= 2)
        os.kill(planner_of(session), signal.SIGKILL)
        until(lambda: isinstance(runtime_of(session).planner.finished, EndOfJob))
        _take(clients, 2)
        state = session.state_dict()
    assert {int(step): sorted(ranks) for step, ranks in state["reports"].items()} == {
        step: ["0", "1"] for step in range(1, 7)
    }
    with (
        launch(made, "local", prefetch=4) as calm,
        launch(made, "local", prefetch=4, resume=state) as again,
    ):
        whole, rest = (
            _take([session.client(rank) for rank in range(2)], n)
            for session, n in ((calm, 23), (again, 16))
        )
    assert rest == whole[7:]


def test_a_source_that_joined_and_one_that_moved_are_where_they_were_after_the_coordinator_died(
    journal: str,
) -> None:
    def join(session: ov.Session) -> None:
        session.add_source(source("late", 50, 5000), at=14)

    def move(session: ov.Session) -> None:
        session.move("a", "loader-worker/1")

    made = job(until=30)
    calm = run(made, "local", act={3: join})
    with launch(replace(made, journal=journal), **APART) as session:
        assert (
            play(session, act={2: move, 3: join, 4: killed(), 20: killed("loader-worker/3")})
            == calm
        )
        where = {a["name"]: a["pid"] for a in session.metrics()["actors"] if a["role"] == "loader"}
        assert where["loader/a/0"] == workers_of(session)["loader-worker/1"]
        assert where["loader/late/3"] == workers_of(session)["loader-worker/3"]


def test_plans_explanations_and_bad_rows_after_the_coordinator_was_replaced(journal: str) -> None:
    bad = ov.Source(
        "bad",
        rows(60, 3000),
        transforms=[ov.Map(_picky, rows=True), ov.Tokens("tokens")],
        epochs=None,
    )
    made = job(sources=[source("a", 60, 0), bad], until=STEPS)
    with launch(made, "local") as here, launch(replace(made, journal=journal), **APART) as there:
        calm, wild = play(here), play(there, act={8: killed(), 21: killed("loader-worker/0")})
        assert wild == calm
        assert len(calm.quarantine) > 5
        for step in (28, STEPS - 1):
            assert there.plan(step).digest() == here.plan(step).digest()
            assert str(there.explain(step)) == str(here.explain(step))
        assert (
            there.metrics()["sources"]["bad"]["quarantined"]
            == here.metrics()["sources"]["bad"]["quarantined"]
        )


@pytest.mark.parametrize("on_long", ["truncate", "drop"])
def test_lost_tokens_are_counted_once_and_warned_of_once_though_the_coordinator_and_a_loader_worker_died(
    on_long: str, journal: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = job(until=STEPS, batch=ov.Batch(samples=10, context=4, microbatches=2), on_long=on_long)
    counts = ("cut", "cut_tokens", "dropped", "dropped_tokens")
    with launch(made, "local") as here, launch(replace(made, journal=journal), **APART) as there:
        calm = play(here)
        caplog.clear()
        assert play(there, act={8: killed(), 21: killed("loader-worker/0")}) == calm
        lost, seen = (
            {n: [s[c] for c in counts] for n, s in session.metrics()["sources"].items()}
            for session in (here, there)
        )
    assert seen == lost
    assert all(sum(found) > 20 for found in lost.values())
    said = [r.getMessage() for r in caplog.records if f"on_long={on_long!r}" in r.getMessage()]
    assert sorted(words.split(": ")[1] for words in said) == [
        "source 'a'",
        "source 'b'",
        "source 'c'",
    ]


def _picky(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] % 9 == 4:
        raise ValueError("a row like this")
    return row


def test_a_session_that_is_moved_to_a_state_has_another_coordinator_which_can_die_too(
    alone: Played, journal: str
) -> None:
    with launch(job(until=STEPS, journal=journal), **APART) as session:
        play(session, steps=9)
        state = session.state_dict()
        play(session, steps=5)
        session.load_state_dict(state)
        got = play(session, act={3: killed(), 10: killed("constructor-worker/0")})
        assert got.steps == {rank: steps[9:] for rank, steps in alone.steps.items()}


# other processes


SERVED = """
    import sys
    import overlord as ov
    from tests.scenarios.test_process import job
    from tests.processes import workers_of
    from tests.scenarios.test_coordinator_process import planner_of

    def main():
        session = ov.launch(job(until={steps}, journal={journal!r}), runtime="process", constructor_hosts=2)
        served = session.serve()
        print(served.address, served.token, flush=True)
        while True:
            print(planner_of(session), *workers_of(session).values(), flush=True)
            if sys.stdin.readline().strip() == "close":
                break
        session.close()
"""


def test_connected_clients_notice_nothing_and_nothing_outlives_the_launching_process(
    tmp_path: Path, alone: Played, journal: str
) -> None:
    with program(tmp_path, SERVED.format(steps=STEPS, journal=journal)) as server:
        address, token = server.line().split()
        planner, *hosts = map(int, server.line().split())
        clients = [ov.connect(address, rank, token, stall_limit_s=30.0) for rank in range(2)]
        got: dict[int, list[Any]] = {0: [], 1: []}
        for k in range(30):
            if k in (4, 5, 17):
                os.kill(planner, signal.SIGKILL)
            for rank, client in enumerate(clients):
                got[rank].append(written(next(client)))
            if k in (4, 16):
                server.say("who")
                planner, *hosts = map(int, server.line().split())
        assert got == {rank: steps[:30] for rank, steps in alone.steps.items()}
        assert plain(clients[0].state_dict()) == alone.states[29]
        server.say("who")
        planner, *hosts = map(int, server.line().split())
        server.process.kill()
        assert not left_after([planner, *hosts], SOON_S)


def test_the_whole_job_goes_on_from_the_journal_its_planner_wrote(
    alone: Played, journal: str
) -> None:
    made = job(until=STEPS, journal=journal)
    with launch(made, **APART) as session:
        before = play(session, steps=11, act={6: killed()})
        until(
            lambda: recovered(journal).acked == 10
        )  # who leaves has a second to say so, which may be too short
    with launch(made, resume="auto", **APART) as session:
        after = play(session, act={4: killed()})
    for rank in range(2):
        assert before.steps[rank] + after.steps[rank] == alone.steps[rank]
