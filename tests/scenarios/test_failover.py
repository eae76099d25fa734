"""Parts of a job that are killed, stopped or keep dying: trainers see the stream of the run that
nobody disturbed, to the byte.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cluster.supervisor import TICKS
from overlord.cluster.worker_pool import WorkerPool
from overlord.concurrency.platform import Platform
from overlord.errors import ActorLost
from overlord.planning.strategies import resolve
from tests import images as pictures
from tests.coordinators import coordinator_of, launch_here
from tests.fatal_functions import Halting, Slow
from tests.internals import (
    WORKER_RESTARTED,
    WORKER_RESTARTS,
    heartbeats_by,
    launcher_of,
    running_job,
    runtime_of,
    starting_workers,
)
from tests.processes import (
    EXITED,
    KILLED,
    WAIT_S,
    WORKER_RUNTIME,
    Played,
    halt,
    launch,
    left_after,
    play,
    run,
    runs,
    until,
    workers_of,
)
from tests.properties.test_combined import LAG
from tests.properties.test_feedback import trainer
from tests.scenarios.test_images import BROKEN, counted, marked
from tests.scenarios.test_process import SCENES, job, rows, source
from tests.worlds import folder

pytestmark = pytest.mark.timeout(4 * WAIT_S)

STEPS = 40
APART = {
    "sources_per_host": 1,
    "hosts": 4,
    "constructor_hosts": 2,
}  # three loader workers, two constructor workers
EVERYONE = (
    "constructor-worker/0",
    "constructor-worker/1",
    "loader-worker/0",
    "loader-worker/1",
    "loader-worker/2",
)


@pytest.fixture(scope="module")
def calm() -> Played:
    return run(job(until=STEPS), "local")


def killing(*names: str) -> Callable[[ov.Session], None]:
    """Kills these of a session's processes that run just then, all at once."""

    def act(session: ov.Session) -> None:
        pids = [pid for name, pid in workers_of(session).items() if name in names and runs(pid)]
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert not left_after(pids, WAIT_S)

    return act


def recovered(session: ov.Session) -> list[str]:
    return [r["part"] for r in session.metrics()["recoveries"]]


@pytest.mark.parametrize(
    "names",
    [EVERYONE[:1], EVERYONE[:2], EVERYONE[2:3], EVERYONE[3:], EVERYONE[2:], EVERYONE],
    ids="+".join,
)
def test_whoever_is_killed_nobody_notices(calm: Played, names: tuple[str, ...]) -> None:
    with launch(job(until=STEPS), **APART) as session:
        got = play(session, act={9: killing(*names)})
        until(lambda: sorted(recovered(session)) == sorted(names))
        told = session.metrics()["recoveries"]
        assert {r["reason"] for r in told} == {KILLED}
        assert len({r["step"] for r in told}) == 1, "one way back for all"
        until(
            lambda: all(
                a["state"] == "running" for a in session.metrics()["actors"] if a["role"] == "host"
            )
        )
        pids = list(workers_of(session).values())
    assert got == calm
    assert WORKER_RUNTIME == "ray" or not left_after(
        pids, WAIT_S
    )  # there they wait for the next one of their name


def test_all_are_killed_again_and_again(calm: Played) -> None:
    with launch(job(until=STEPS), **APART) as session:
        assert play(session, act={k: killing(*EVERYONE) for k in (0, 1, 2, 15, 16, 39)}) == calm


@pytest.mark.parametrize("names", [EVERYONE[2:4], EVERYONE[1:3]], ids="+".join)
def test_before_anyone_has_asked_for_a_step(
    calm: Played, names: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with launch_here(job(until=STEPS), **APART) as session:
        killing(*names)(session)
        assert play(session) == calm
    assert any(r.message.startswith("rolled back to the beginning: ") for r in caplog.records), (
        caplog.text
    )


def test_when_the_last_step_was_planned_the_end_is_found_again(calm: Played) -> None:
    with launch(job(until=STEPS), prefetch=4, **APART) as session:
        got = play(session, act={STEPS - 2: killing(*EVERYONE), STEPS: killing(*EVERYONE)})
        assert got == calm


def missing(session: ov.Session, name: str) -> bool:
    return any(name in a["name"] and a["state"] != "running" for a in session.metrics()["actors"])


def test_one_dies_while_others_are_being_started(calm: Played) -> None:
    def more(session: ov.Session) -> None:
        before = len(recovered(session))
        killing("loader-worker/0", "constructor-worker/1")(session)
        until(
            lambda: missing(session, "constructor-worker/1") or len(recovered(session)) > before
        )  # it may be back before it is looked for
        killing("loader-worker/1", "constructor-worker/0")(session)

    with launch(job(until=STEPS), **APART) as session:
        assert play(session, act={5: more, 20: more}) == calm
        assert {"loader-worker/0", "constructor-worker/1"} <= set(recovered(session))


LOST_AFTER_S = 8 * WAIT_S  # where only the time of a test makes silences so long


class Later(Platform):
    """A machine whose time goes on when a test says so."""

    ahead_s = 0.0

    def now(self) -> float:
        return super().now() + self.ahead_s


def time_passes(session: ov.Session, but: Sequence[int] = ()) -> None:
    """Three times as much as anyone may be silent, tick by tick, each when all have answered the
    one before, but for those with these pids: nobody else is missed because the machine is slow.
    """
    runtime, loop = coordinator_of(session)
    clock = Later()
    beat = heartbeats_by(runtime.recovery, clock.now)

    def answered() -> bool:
        there = [
            r
            for r in (*runtime.pool.workers(), *runtime.pool.restarted.values())
            if not r.lost and r.heartbeat is not None
        ]
        return all(r.heartbeat.done() for r in there if r.handle.pid not in but)

    for _ in range(3 * TICKS):
        clock.ahead_s += LOST_AFTER_S / TICKS
        loop.call(beat, "the event loop")
        until(answered)


def test_a_worker_that_hangs_is_killed_and_replaced(calm: Played) -> None:
    """One stopped process wakes only to be killed: SIGKILL needs no consent."""
    stopped: list[int] = []

    def stop(session: ov.Session) -> None:
        stopped.extend(
            workers_of(session)[name] for name in ("loader-worker/1", "constructor-worker/0")
        )
        for pid in stopped:
            halt(pid)
        time_passes(session, but=stopped)

    with launch_here(job(until=STEPS), lost_after_s=LOST_AFTER_S, **APART) as session:
        assert play(session, act={9: stop}) == calm
        told = {r["part"]: r["reason"] for r in session.metrics()["recoveries"]}
        assert set(told) == {"loader-worker/1", "constructor-worker/0"}
        assert all("it answered nothing for" in reason for reason in told.values())
        assert not left_after(stopped, WAIT_S)


@pytest.mark.parametrize("journaled", [False, True], ids=["without a journal", "with a journal"])
def test_a_worker_that_is_stopped_while_it_is_started_is_given_up_and_started_again(
    tmp_path: Path, journaled: bool
) -> None:
    flag = tmp_path / "stop"
    halting = ov.Source(
        "a",
        rows(60, 0),
        transforms=[ov.Map(Halting(flag), rows=True), ov.Tokens("tokens")],
        epochs=None,
    )
    made = job(
        sources=[halting, source("b", 90, 1000)],
        until=20,
        journal=str(tmp_path / "journal") if journaled else None,
    )

    def strike(session: ov.Session) -> None:
        flag.touch()
        session.kill("loader-worker/0")

    calm = run(replace(made, journal=None), "local")
    # Who stands for a moment, others too, is started again: that is no end.
    with launch(
        made, lost_after_s=0.6 if WORKER_RUNTIME == "process" else 4.0, max_restarts=20, **APART
    ) as session:
        assert play(session, act={6: strike}) == calm
        assert not flag.exists()
        assert "loader-worker/0" in {row["part"] for row in session.metrics()["recoveries"]}


def test_who_is_back_first_is_not_missed_while_it_waits_for_one_that_takes_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Longer than anyone may be silent: that one opens its sources, from a store that is slow,
    perhaps.
    """
    flag = tmp_path / "slow"
    slow = ov.Source(
        "a",
        rows(60, 0),
        transforms=[ov.Map(Slow(flag), rows=True), ov.Tokens("tokens")],
        epochs=None,
    )
    made = job(sources=[slow, source("b", 90, 1000)], until=20)

    def strike(session: ov.Session) -> None:
        runtime, _ = coordinator_of(session)
        flag.touch()
        killing("constructor-worker/0", "loader-worker/0")(session)
        until(
            lambda: (
                "constructor-worker/0" in runtime.pool.restarted
                and "loader-worker/0"
                in [handle.name for handle in starting_workers(launcher_of(session))]
            )
        )
        time_passes(session)
        assert list(runtime.pool.restarted) == ["constructor-worker/0"], (
            "the other one is not there yet"
        )
        flag.unlink()

    calm = run(made, "local")
    with launch_here(made, lost_after_s=LOST_AFTER_S, **APART) as session:
        assert play(session, act={6: strike}) == calm
        assert sorted(recovered(session)) == ["constructor-worker/0", "loader-worker/0"]
    assert "answered nothing" not in caplog.text


def test_a_worker_that_is_stopped_for_a_moment_is_left_alone(calm: Played) -> None:
    def pause(session: ov.Session) -> None:
        pid = workers_of(session)["loader-worker/1"]
        halt(pid)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)

    with launch(job(until=STEPS), lost_after_s=30.0, **APART) as session:
        assert play(session, act={9: pause}) == calm
        assert recovered(session) == []


@pytest.mark.parametrize("name", SCENES)
def test_with_look_ahead_feedback_events_and_sources_that_join(name: str) -> None:
    scene = SCENES[name]
    with folder() as directory:
        made, _, said = scene.job(directory)
        options = {
            "prefetch": 1 + scene.salt % (LAG - 2),
            "loaders": dict.fromkeys(made.names, 1 + scene.salt % 2),
        }
        alone = run(made, "local", said=said, report=trainer(scene.salt), **options)
        everyone = (*EVERYONE, "loader-worker/3", "loader-worker/4", "loader-worker/5")
        acts = {1: killing(*everyone[2:]), 2: killing("loader-worker/0", "constructor-worker/1")}
        hit = run(
            made, "process", said=said, report=trainer(scene.salt), act=acts, **options, **APART
        )
    assert len(alone.states) > 2
    assert hit == alone


@pytest.mark.parametrize("shadows", ["none", "all"])
def test_with_images_some_broken_hooks_and_transforms_in_processes_of_their_own(
    tmp_path: Path, shadows: str
) -> None:
    hooks = [ov.loader_do_plan(marked), ov.constructor_do_plan(counted)]
    given = pictures.sources(tmp_path, broken=BROKEN)
    apart = [
        ov.Source(s.name, s.uri, transforms=s.transforms, epochs=None, workers="processes")
        for s in given
    ]
    made = pictures.job(tmp_path, sources=apart, hooks=hooks, until=8, broken=BROKEN)
    alone = run(made, "local")
    acts = {2: killing(*EVERYONE[:3]), 4: killing("loader-worker/1"), 6: killing(*EVERYONE)}
    with launch(made, shadows=shadows, **APART) as session:
        assert play(session, act=acts).steps == alone.steps
        found = (
            session.quarantine()
        )  # a constructor worker that was killed may have had no time to tell what it found
        assert found == [row for row in alone.quarantine if row in found], (
            "each once, though steps were built again"
        )
        workers = until(
            lambda: [
                row["worker_pid"]
                for row in runtime_of(session).metrics()["loaders"]
                if row["worker_pid"]
            ]
        )
    assert alone.quarantine
    assert not left_after(workers, WAIT_S)


def test_what_is_said_between_two_deaths_counts(calm: Played) -> None:
    """Events, a source that joins, one that moves: said while parts are being started, and while
    steps are planned again.
    """

    def say(session: ov.Session) -> None:
        session.set_mixture({"a": 1.0, "b": 3.0}, at=14)

    def add(session: ov.Session) -> None:
        session.skip([18])
        session.add_source(source("d", 30, 5000), at=20)

    def hit(*names: str, then: Callable[[ov.Session], None]) -> Callable[[ov.Session], None]:
        return lambda session: (killing(*names)(session), then(session))[1]  # type: ignore[func-returns-value]

    made = job(until=STEPS)
    alone = run(made, "local", act={6: say, 10: add})
    with launch(made, **APART) as session:

        def move(session: ov.Session) -> None:
            until(lambda: _moved(session))

        acts = {
            6: hit("loader-worker/0", then=say),
            10: hit("constructor-worker/0", "loader-worker/1", then=add),
            12: killing("loader-worker/3"),
            25: hit("loader-worker/2", then=move),
            27: killing("loader-worker/0", "loader-worker/1"),
            30: killing("loader-worker/3"),
        }
        got = play(session, act=acts)
    assert got.steps == alone.steps
    assert got == alone


def _moved(session: ov.Session) -> bool:
    """Where it is to move to may just be being started."""
    with contextlib.suppress(ov.JobError):
        session.move("a", "loader-worker/1")
        return True
    return False


def test_a_worker_that_keeps_dying_ends_the_job_with_what_it_died_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sources = [
        ov.Source(
            "m",
            rows(60, 0),
            transforms=[ov.Map(ends_later, rows=True), ov.Tokens("tokens")],
            epochs=None,
        )
    ]
    with launch_here(job(sources=[*sources, source("a", 60, 1000)]), max_restarts=2) as session:
        got = play(session)
        for words in (
            f"ActorLost('loader-worker/0', '{EXITED}; it reads m",
            "started again 2 times",
            "raise max_restarts",
        ):
            assert words in got.error
        lost = [
            r.getMessage()
            for r in caplog.records
            if r.levelname == "WARNING" and " lost: " in r.getMessage()
        ]
        assert ["restarting it" in message for message in lost] == [True] * (len(lost) - 1) + [
            False
        ], "the last time it is not"
        assert len(set(map(tuple, got.numbers))) == 1
        with pytest.raises(ActorLost, match=f"loader-worker/0 is lost: {EXITED}"):
            next(session.client(1))


def ends_later(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] == 41:
        os._exit(3)
    return row


def test_a_strategy_that_is_no_function_of_its_input_is_reported() -> None:
    with launch(job(until=STEPS, strategy=Moody()), **APART) as session:
        got = play(session, act={9: killing("loader-worker/1")})
    assert "PlanError" in got.error
    assert "expected the first plan" in got.error


class Moody:
    """Places a step otherwise when it is asked for a second time."""

    def __init__(self) -> None:
        self.asked: set[int] = set()

    def __call__(self, buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        plan = resolve("vanilla")(buffer, place)
        turned = (
            replace(plan.main, bucket=1 - plan.main.bucket)
            if buffer.step in self.asked
            else plan.main
        )
        self.asked.add(buffer.step)
        return replace(plan, modules={"backbone": turned})


def test_plans_and_metrics_know_each_step_once(calm: Played) -> None:
    with launch(job(until=STEPS), **APART) as session:
        play(session, act={9: killing("loader-worker/1"), 20: killing("constructor-worker/0")})
        steps = [stage.plan.step for stage in runtime_of(session).plans]
        assert steps == sorted(set(steps)) == list(range(STEPS))


# standbys


def test_standbys_take_over_at_once_and_new_ones_are_built(calm: Played) -> None:
    with launch(job(until=STEPS), shadows="all", **APART) as session:
        until(
            lambda: (
                {row["source"] for row in session.metrics()["shadows"]} == set(session.job.names)
            )
        )

        def hit(*names: str) -> Callable[[ov.Session], None]:
            """When all loaders have a standby."""

            def act(session: ov.Session) -> None:
                until(lambda: len(session.metrics()["shadows"]) == 3)
                killing(*names)(session)

            return act

        acts = {
            9: hit("loader-worker/0"),
            15: hit("loader-worker/1"),
            21: hit("loader-worker/2"),
            30: hit("loader-worker/0", "constructor-worker/1"),
        }
        assert play(session, act=acts) == calm
        told = session.metrics()["recoveries"]
        assert sum(r["part"].startswith("loader-worker") for r in told) == 4
        assert until(lambda: session.metrics()["memory"].get("shadows")) > 0


@pytest.mark.parametrize(
    "names",
    [
        ("loader-worker/0", "loader-worker/1"),
        ("loader-worker/0", "loader-worker/1", "loader-worker/2"),
        EVERYONE,
    ],
    ids="+".join,
)
def test_whoever_dies_with_its_standby_is_read_again(calm: Played, names: tuple[str, ...]) -> None:
    with launch(job(until=STEPS), shadows="all", **APART) as session:
        assert play(session, act={k: killing(*names) for k in (3, 9, 10, 25)}) == calm


def test_a_source_that_moves_to_where_it_is_followed(calm: Played) -> None:
    def move(session: ov.Session) -> None:
        followed = until(
            lambda: {row["source"]: row["pid"] for row in session.metrics()["shadows"]}.get("a")
        )
        [there] = [name for name, pid in workers_of(session).items() if pid == followed]
        session.move("a", there)
        assert until(
            lambda: [r["pid"] for r in session.metrics()["shadows"] if r["source"] == "a"]
        ) != [followed]

    with launch(job(until=STEPS), shadows="all", **APART) as session:
        names = list(workers_of(session))
        assert (
            play(
                session,
                act={5: move, 8: killing(names[0]), 14: killing(names[1]), 20: killing(names[2])},
            )
            == calm
        )


def test_heavy_sources_alone_have_a_standby(calm: Played) -> None:
    with launch(job(until=STEPS), shadows="heavy", **APART) as session:
        found = {row["source"] for row in until(lambda: session.metrics()["shadows"])}
        assert found < set(session.job.names)
        assert play(session, act={9: killing(*EVERYONE[2:4])}) == calm


def held_back(patch: pytest.MonkeyPatch, *names: str) -> tuple[list[str], threading.Event]:
    """Workers that are started again: who is there, and what those of these names wait for."""
    start, is_there, there, go = (
        WORKER_RESTARTS.real,
        WORKER_RESTARTED.real,
        list[str](),
        threading.Event(),
    )

    def waits(pool: WorkerPool, h: int, incarnation: int) -> Any:
        if f"loader-worker/{h}" in names:
            assert go.wait(3 * WAIT_S)
        return start(pool, h, incarnation)

    def notes(pool: WorkerPool, worker: Any) -> None:
        is_there(pool, worker)
        there.append(worker.name)

    WORKER_RESTARTS.replace(patch, waits)
    WORKER_RESTARTED.replace(patch, notes)
    return there, go


def test_one_with_standbys_that_is_back_before_one_without_waits_for_it(
    calm: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loaders are still counted as its own: it is told nothing before all roll back."""
    with launch_here(
        job(until=STEPS), shadows="heavy", build_ahead=4, stall_limit_s=WAIT_S, **APART
    ) as session:
        until(lambda: session.metrics()["shadows"])
        runtime, _ = coordinator_of(session)
        followers = {
            h: {runtime.standby.worker_of[k] for k in runtime.placement.loaders_on(h)}
            for h in range(3)
            if runtime.standby.covers(h, runtime.pool.living())
        }
        alone, covered = next(
            (h, c)
            for h in range(3)
            if h not in followers
            for c, by in followers.items()
            if h not in by
        )
        light, heavy = f"loader-worker/{alone}", f"loader-worker/{covered}"
        there, go = held_back(monkeypatch, light)

        def hit(session: ov.Session) -> None:
            until(
                lambda: (
                    min(len(client.queue) for client in running_job(session).clients.values()) == 4
                )
            )  # all that comes before `on`
            killing(light)(session)
            until(lambda: runtime.pool.loaders[alone].lost)
            killing(heavy)(session)
            until(lambda: heavy in there)

        def on(session: ov.Session) -> None:
            go.set()
            until(lambda: light in there)

        assert play(session, act={9: hit, 12: on}) == calm
        assert sorted(there) == sorted([light, heavy]), "nobody died once more"


def test_a_source_that_moves_to_where_it_is_followed_while_a_worker_is_away(
    calm: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others get standbys by that, too, and those are told."""
    with launch_here(job(until=STEPS), shadows="all", stall_limit_s=WAIT_S, **APART) as session:
        until(lambda: len(session.metrics()["shadows"]) == 3)
        runtime, _ = coordinator_of(session)
        homes, where = runtime.placement.worker_of.tolist(), dict(runtime.standby.worker_of)
        away, moved = next(
            (h, loader)
            for h in homes
            for loader, to in where.items()
            if h not in (to, homes[loader])
        )
        there, go = held_back(monkeypatch, f"loader-worker/{away}")

        def hit(session: ov.Session) -> None:
            killing(f"loader-worker/{away}")(session)
            until(
                lambda: f"loader-worker/{away}" in recovered(session)
            )  # its stand-by has taken over
            session.move(session.job.names[moved], f"loader-worker/{where[moved]}")
            until(lambda: runtime.placement.worker(moved) == where[moved])
            assert len(runtime.standby.worker_of) > 1, "others have one since, too"

        def on(session: ov.Session) -> None:
            go.set()
            until(lambda: there)

        assert play(session, act={9: hit, 16: on}) == calm
        assert there == [f"loader-worker/{away}"], "nobody died once more"
