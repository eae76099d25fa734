"""A constructor worker dies under its trainers: they go on from the steps they have, wait for the
next with a named reason, and get what they would have got.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import overlord as ov
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.serving.session_server import ServedAddress
from tests.coordinators import coordinator_of, launch_here
from tests.images import job as job_with_images
from tests.internals import (
    QUEUE_ASKS_AGAIN,
    drop_connection,
    forget_control,
    runtime_of,
    set_stall,
    worker_starter_of,
)
from tests.processes import (
    KILLED,
    WAIT_S,
    Played,
    halt,
    launch,
    play,
    run,
    runs,
    stalls_for,
    until,
    workers_of,
    written,
)
from tests.scenarios.test_images import BROKEN
from tests.scenarios.test_process import job

pytestmark = pytest.mark.timeout(4 * WAIT_S)

STEPS = 40


@pytest.fixture(scope="module")
def calm() -> Played:
    return run(job(until=STEPS), "local")


@pytest.fixture
def session() -> Iterator[ov.Session]:
    with launch_here(
        job(until=STEPS), constructor_hosts=2, sources_per_host=2, hosts=2, build_ahead=4
    ) as made:
        yield made


def kill(session: ov.Session, name: str) -> None:
    pid = until(
        lambda: runs(found := workers_of(session)[name]) and found
    )  # it may just be replaced
    os.kill(pid, signal.SIGKILL)


def trains(client: ov.Client, got: list[Any], act: dict[int, Callable[[], None]]) -> None:
    """Until the end. What is due at a step is done when it was taken."""
    for step in client:
        got.append(written(step))
        act.get(step.step, lambda: None)()
    client.close()


def side_by_side(
    clients: list[ov.Client], acts: dict[int, Callable[[], None]]
) -> dict[int, list[Any]]:
    """All ranks train; the first one does what is due."""
    got: dict[int, list[Any]] = {client.rank: [] for client in clients}
    threads = [
        threading.Thread(target=trains, args=(c, got[c.rank], acts if c.rank == 0 else {}))
        for c in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    return got


def connected(served: ServedAddress) -> list[ov.Client]:
    return [ov.connect(served, rank, served.token, stall_limit_s=30.0) for rank in range(2)]


@pytest.mark.parametrize("seed", range(3))
def test_connected_trainers_get_every_step_once_whenever_their_constructors_die(
    session: ov.Session, calm: Played, seed: int
) -> None:
    chance = Random(seed)
    deaths = sorted(chance.sample(range(STEPS - 4), 3))
    acts = {
        step: partial(kill, session, f"constructor-worker/{chance.randrange(2)}") for step in deaths
    }
    assert side_by_side(connected(session.serve()), acts) == calm.steps  # type: ignore[arg-type]


class Gate:
    """Holds back whoever starts a constructor worker."""

    def __init__(self, session: ov.Session, monkeypatch: pytest.MonkeyPatch):
        starter: Any = worker_starter_of(coordinator_of(session)[0])
        self._start, self._open = starter.constructor, threading.Event()
        monkeypatch.setattr(starter, "constructor", self._wait)

    def _wait(self, c: int) -> Any:
        assert self._open.wait(60)
        return self._start(c)

    def open(self) -> None:
        self._open.set()


@pytest.mark.parametrize("inside", [True, False], ids=["in the session's process", "connected"])
def test_while_it_is_replaced_a_trainer_has_its_prefetched_steps_and_then_a_named_reason(
    session: ov.Session, calm: Played, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    clients = [session.client(rank) for rank in range(2)] if inside else connected(session.serve())
    for client in clients:
        set_stall(
            client, warn_s=0.05, limit_s=30.0, on_stall=lambda words, seconds: said.append(words)
        )
    got = {client.rank: [written(next(client))] for client in clients}
    until(lambda: min(len(client.queue) for client in clients) == 4)
    gate = Gate(session, monkeypatch)
    kill(session, "constructor-worker/0")
    until(lambda: coordinator_of(session)[0].pool.constructors[0].lost)
    for client in clients:
        got[client.rank] += [written(next(client)) for _ in range(4)]
    waits = threading.Thread(target=lambda: got[0].extend([written(next(clients[0]))]))
    waits.start()
    until(
        lambda: [
            w
            for w in said
            if all(part in w for part in ("constructor-worker/0", KILLED, "being restarted"))
        ]
    )
    gate.open()
    waits.join(30)
    got[0] += [written(next(clients[0]))]
    got[1] += [written(next(clients[1])) for _ in range(2)]
    assert got == {rank: steps[:7] for rank, steps in calm.steps.items()}


def test_who_connects_while_it_is_replaced_is_served_when_it_is_there(
    session: ov.Session, calm: Played, monkeypatch: pytest.MonkeyPatch
) -> None:
    served, gate = session.serve(), Gate(session, monkeypatch)
    kill(session, "constructor-worker/0")
    until(lambda: coordinator_of(session)[0].pool.constructors[0].lost)
    clients = connected(served)
    set_stall(clients[0], limit_s=0.2)
    stalls_for(clients[0], "constructor-worker/0 to be started again")
    set_stall(clients[0], limit_s=WAIT_S)
    gate.open()
    assert side_by_side(clients, {}) == calm.steps


def taken_by(session: ov.Session, rank: int) -> int | None:
    """None while the worker of its constructor does not say so."""
    with contextlib.suppress(DataStall):
        return runtime_of(session).taken_by(rank)  # type: ignore[attr-defined,no-any-return]
    return None


def test_a_trainer_and_its_constructor_that_die_together(session: ov.Session, calm: Played) -> None:
    served = session.serve()
    first, other = connected(served)
    got = {0: [written(next(first)) for _ in range(3)], 1: [written(next(other)) for _ in range(2)]}
    until(lambda: taken_by(session, 0) == 2)
    drop_connection(first.queue)
    forget_control(first)
    kill(session, "constructor-worker/0")
    again = ov.connect(served, 0, served.token, stall_limit_s=30.0)
    rest = side_by_side([again, other], {})
    assert rest[0][0][0] in (2, 3), "behind the last step that anyone who lives knows to be taken"
    assert got[0][: rest[0][0][0]] + rest[0] == calm.steps[0]
    assert got[1] + rest[1] == calm.steps[1]


def test_one_that_is_stopped_is_replaced_and_hands_out_nothing_when_it_wakes(calm: Played) -> None:
    with launch(
        job(until=STEPS), constructor_hosts=2, lost_after_s=2.5
    ) as session:  # others may stand for so long
        stopped: list[int] = []

        def stop() -> None:
            stopped.append(workers_of(session)["constructor-worker/1"])
            halt(stopped[0])

        got = side_by_side(connected(session.serve()), {5: stop})
        assert got == calm.steps
        assert [r["part"] for r in session.metrics()["recoveries"]] == ["constructor-worker/1"]


def test_one_that_dies_again_and_again_is_given_up_and_its_clients_hear_of_what(
    calm: Played,
) -> None:
    with launch(job(until=STEPS), lost_after_s=30.0, max_restarts=2) as session:
        clients = connected(session.serve())
        got = [written(next(client)) for client in clients]
        assert got == [calm.steps[rank][0] for rank in range(2)]
        gave_up = threading.Event()

        def act() -> None:
            while not gave_up.is_set():
                with contextlib.suppress(
                    ProcessLookupError, OverlordError
                ):  # it may just be replaced
                    os.kill(workers_of(session)["constructor-worker/0"], signal.SIGKILL)
                gave_up.wait(0.05)

        killer = threading.Thread(target=act)
        killer.start()
        try:
            with pytest.raises(ActorLost, match=f"constructor-worker/0 is lost: {KILLED}"):
                deque(clients[0], maxlen=0)
        finally:
            gave_up.set()
            killer.join()


def test_images_that_cannot_be_decoded_are_listed_once_though_their_step_is_built_twice(
    tmp_path: Path,
) -> None:
    made = job_with_images(tmp_path, until=10, broken=BROKEN)
    alone = run(made, "local")
    assert alone.quarantine
    with launch(made, constructor_hosts=1) as session:
        got = play(session, act={k: lambda s: kill(s, "constructor-worker/0") for k in (2, 5)})
        assert got.steps == alone.steps
        # What a worker had built and not told of when it died is told by nobody, if trainers have
        # taken it: it is for the record only.
        listed = session.quarantine()
        assert [q for q in alone.quarantine if q in listed] == listed


def test_serving_waits_for_a_worker_that_does_not_answer_and_holds_up_nobody() -> None:
    with launch(job(until=STEPS), lost_after_s=2 * WAIT_S) as session:
        pid = workers_of(session)["constructor-worker/0"]
        halt(pid)
        served: list[ServedAddress] = []
        thread = threading.Thread(target=lambda: served.append(session.serve()))
        thread.start()
        try:
            asked = threading.Thread(target=session.state_dict)
            asked.start()
            asked.join(WAIT_S / 2)
            assert not asked.is_alive(), "whoever asks the session for something else is answered"
            assert not served
        finally:
            os.kill(pid, signal.SIGCONT)
        thread.join(30)
        assert served


def test_ranks_that_one_thread_plays_in_turn_do_not_wait_for_each_other_when_all_have_lost_their_constructor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All use up what they have before another constructor is there. The first waits for the next
    step; nobody asks the others, and no step is planned before the new constructor knows what they
    have taken.
    """
    made = job(until=30, place=ov.ClientPlaceTree(dp=3), journal=str(tmp_path / "journal"))
    calm = run(replace(made, journal=None), "local")
    with launch(
        made, prefetch=3, build_ahead=4, constructor_hosts=1, stall_limit_s=20.0
    ) as session:
        clients = [session.client(rank) for rank in range(3)]
        got = {rank: [written(next(client))] for rank, client in enumerate(clients)}
        until(lambda: [len(client.queue) for client in clients] == [3, 3, 3])
        with monkeypatch.context() as patch:
            QUEUE_ASKS_AGAIN.replace(patch, lambda box: None)
            for pid in [
                a["pid"]
                for a in session.metrics()["actors"]
                if a["name"] in ("planner", "constructor-worker/0")
            ]:
                os.kill(pid, signal.SIGKILL)
            for _ in range(3):
                for rank, client in enumerate(clients):
                    got[rank].append(written(next(client)))
        for _ in range(30 - 4):
            for rank, client in enumerate(clients):
                got[rank].append(written(next(client)))
    assert got == calm.steps
