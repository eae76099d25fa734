"""Stories of sessions that serve: clients in other processes get what those of the session's own
process get, errors included.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.client.control_client import ControlClient
from overlord.client.remote_queue import RemoteStepQueue
from overlord.errors import (
    ActorLost,
    DataStall,
    JobError,
    LinkRefused,
    OverlordError,
    StateMismatch,
)
from overlord.messages.data import EndOfStream, StepAck
from overlord.serving.session_server import ServedAddress
from overlord.serving.step_publisher import StepPublisher
from overlord.transport.connection import TIMEOUT, Connection, open_connection
from overlord.transport.server import Server
from tests.internals import (
    connection_of,
    control_connection_of,
    receive,
    running_job,
    set_stall,
    sever,
)
from tests.processes import RUNTIMES, WAIT_S, WORKER_RUNTIME, halt
from tests.unit import test_session as stories
from tests.unit.test_session import (
    content,
    impatient,
    in_thread,
    job,
    launch,
    rest,
    take,
    whole_run,
)

pytestmark = pytest.mark.timeout(200)
ROOT = Path(__file__).resolve().parents[2]
runtimes = pytest.mark.parametrize("runtime", RUNTIMES)


def by_tcp(address: str) -> str:
    """The same server under a key that no local socket has: only TCP reaches it."""
    return address.rsplit("/", 1)[0] + "/elsewhere"


def join_all(
    served: ServedAddress, world: int, tcp: bool = False, **options: Any
) -> list[ov.Client]:
    address = by_tcp(served.address) if tcp else served.address
    return [
        ov.connect(address, rank, served.token, timeout_s=20, **options) for rank in range(world)
    ]


@pytest.fixture
def leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever closes its client waits until that was heard, however long it takes."""
    monkeypatch.setattr("overlord.client.connect.DETACH_S", WAIT_S)


def closing(clients: list[ov.Client]) -> None:
    for client in clients:
        client.close()


def trainer(served: ServedAddress, rank: int, body: str, **env: str) -> subprocess.Popen[str]:
    """A process that trains: ``client`` is its client, what it prints as JSON is what it found; its
    input ends when it is waited for.
    """
    text = (
        "import json, os, signal, sys, time\nimport overlord as ov\nclient = ov.connect()\n"
        + textwrap.dedent(body)
    )
    own = {
        "PYTHONPATH": str(ROOT / "src"),
        "OVERLORD_ADDRESS": served.address,
        "OVERLORD_TOKEN": served.token,
        "RANK": str(rank),
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", text], env={**os.environ, **own, **env}, **pipes)


TAKE_ALL = """
got = [(step.step, [mb["tokens"].tolist() for mb in step]) for step in client]
client.close()
print(json.dumps(got))
"""


def found(process: subprocess.Popen[str]) -> Any:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(out)


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


# What is delivered


@runtimes
def test_trainers_in_other_processes_get_what_clients_of_the_session_get(runtime: str) -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with launch(job(n=60), runtime=runtime) as session:
        served = session.serve()
        trainers = [trainer(served, rank, TAKE_ALL) for rank in range(2)]
        assert [found(t) for t in trainers] == as_json(wanted)


def everything(step: ov.Step) -> Any:
    return (
        content(step),
        [mb.samples for mb in step],
        step.plan_digest,
        step.global_valid_tokens,
        [sorted(mb) for mb in step],
    )


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
def test_both_ways_give_the_same_steps_with_their_samples(tcp: bool) -> None:
    made = job(n=60, dp=3)
    with launch(made) as session:
        clients = [session.client(r) for r in range(3)]
        wanted = [[everything(step) for step in row] for row in zip(*clients, strict=True)]
    with launch(made) as session:
        clients = join_all(session.serve(), 3, tcp)
        got = [[everything(step) for step in row] for row in zip(*clients, strict=True)]
        closing(clients)
    assert got == wanted


@runtimes
def test_a_rank_of_this_process_and_one_of_another_are_served_side_by_side(runtime: str) -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with launch(job(n=60), runtime=runtime) as session:
        here = session.client(0)
        there = trainer(session.serve(), 1, TAKE_ALL)
        assert rest(here) == wanted[0]
        assert found(there) == as_json(wanted[1])


@runtimes
def test_a_client_of_this_process_may_take_its_seat_after_others_have_connected(
    runtime: str,
) -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with launch(job(n=60), runtime=runtime) as session:
        served = session.serve()
        with ov.connect(served, 1, served.token) as there:
            first = take(there, 2)
            thread, got = in_thread(lambda: rest(session.client(0)))
            assert first + rest(there) == wanted[1]
            thread.join(20)
            assert got == [wanted[0]]
            with pytest.raises(
                OverlordError,
                match="rank 1: expected a rank without a connected client, got one of process",
            ):
                session.client(1)


def test_a_seat_may_be_taken_when_planning_has_begun_and_nothing_has_come() -> None:
    gate = threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        assert gate.wait(20)
        yield from ({"tokens": [i, i + 1]} for i in range(40))

    made = job(sources=[ov.Source.from_factory("late", rows, transforms=[ov.Tokens()], epochs=1)])
    with launch(made) as session:
        served = session.serve()
        with ov.connect(served, 1, served.token) as there:
            thread, got = in_thread(lambda: rest(there))
            while not running_job(session).begun:
                time.sleep(0.01)
            here = session.client(0)
            gate.set()
            steps = rest(here)
            thread.join(20)
            assert len(got[0]) == len(steps) > 2


def test_ranks_of_one_group_share_one_assembly() -> None:
    made = job(n=60, place=ov.ClientPlaceTree(dp=2, tp=2))
    with launch(made, broadcast=False) as session:
        served = session.serve()
        delivery = running_job(session).remote_ranks.server.publisher  # type: ignore[union-attr]
        assert isinstance(delivery, StepPublisher)
        clients = join_all(served, 4)
        first = [content(next(c)) for c in clients]
        assert first[0] == first[1]
        assert first[2] == first[3]
        assert first[0] != first[2]
        steps = [[content(s) for s in row] for row in zip(*clients, strict=True)]
        assert all(row[0] == row[1] and row[2] == row[3] for row in steps)
        assert delivery.n_made == 2 * (1 + len(steps)), "one for each group and step"
        closing(clients)


@runtimes
def test_what_a_client_gets_is_the_memory_its_constructor_wrote(runtime: str) -> None:
    with launch(job(dp=1), runtime=runtime) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            steps = [next(client) for _ in range(4)]
            link = connection_of(client.queue)
            assert link.remote_mapped >= 1
            assert link.remote_held >= 1
            assert link.copied == 0
            large = ("tokens", "labels", "position_ids", "loss_mask")
            assert len({id(_root(mb[name])) for mb in steps[0] for name in large}) == 1, (
                "views of one slot"
            )


def _root(array: Any) -> Any:
    while getattr(array, "base", None) is not None and hasattr(array.base, "dtype"):
        array = array.base
    return array


def test_arrays_are_read_only_and_outlive_client_and_session() -> None:
    with launch(job(dp=1)) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            step = next(client)
            before = content(step)
            with pytest.raises(ValueError, match="read-only"):
                step[0]["tokens"][0] = 1
            take(client, 10)
    assert content(step) == before


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
def test_a_trainer_that_keeps_every_step_is_served_to_the_end(tcp: bool) -> None:
    wanted = whole_run(job(n=400, dp=1))
    with launch(job(n=400, dp=1)) as session:
        clients = join_all(session.serve(), 1, tcp)
        kept = list(clients[0])
        assert [content(step) for step in kept] == wanted
        closing(clients)


# Who is there


@runtimes
def test_an_absent_rank_is_named_and_holds_the_others_at_the_window(runtime: str) -> None:
    with launch(job(dp=3), prefetch=3, runtime=runtime) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            assert len(take(client, 3)) == 3
            with impatient(client), pytest.raises(DataStall) as stalled:
                next(client)
            assert (
                "rank 1, which has not connected yet; rank 2, which has not connected yet"
                in str(stalled.value)
            )
            assert (stalled.value.step, stalled.value.rank) == (3, 0)
            with (
                ov.connect(served, 1, served.token) as one,
                ov.connect(served, 2, served.token) as two,
            ):
                take(one, 1), take(two, 1)
                assert take(client, 1)[0][0] == 3


def test_a_rank_that_went_away_is_named_and_may_come_again() -> None:
    with launch(job(n=60), prefetch=3) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            dead = trainer(
                served, 1, "next(client), next(client)\nos.kill(os.getpid(), signal.SIGKILL)"
            )
            assert dead.wait(30) == -signal.SIGKILL
            dead.communicate()
            take(client, 5)
            wait_until(lambda: not running_job(session).clients[1].there)  # type: ignore[attr-defined]
            with (
                impatient(client),
                pytest.raises(
                    DataStall, match=r"rank 1, whose client \(process \d+\) disconnected \d+ s ago"
                ),
            ):
                next(client)
            again = ov.connect(served, 1, served.token)
            assert take(again, 2) == whole_run(job(n=60), 1)[2:4], (
                "it goes on behind the last step its rank took"
            )
            take(client, 1)
            again.close()


def train_until(served: ServedAddress, end: BaseException, first: int) -> None:
    """Rank 1 takes two steps, and leaves its block by an exception."""
    with ov.connect(served, 1, served.token) as client:
        assert [step for step, *_ in take(client, 2)] == [first, first + 1]
        raise end


def test_a_trainer_that_crashes_inside_its_block_has_not_left_and_may_come_again(
    leaves: None,
) -> None:
    with launch(job(n=60), prefetch=3) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            with pytest.raises(ZeroDivisionError):
                train_until(served, ZeroDivisionError(), 0)
            take(client, 5)
            wait_until(lambda: not running_job(session).clients[1].there)  # type: ignore[attr-defined]
            with impatient(client), pytest.raises(DataStall, match="rank 1, whose client"):
                next(client)
            with pytest.raises(SystemExit):
                train_until(
                    served, SystemExit(0), 2
                )  # it goes on behind the last step its rank took
            take(client, 2)  # who ends with code 0 has left, and is not waited for
            with pytest.raises(LinkRefused, match="whose client was closed"):
                ov.connect(served, 1, served.token)


def wait_until(so: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.01)


def test_a_second_client_of_a_rank_takes_the_place_of_the_first() -> None:
    with launch(job(dp=1), prefetch=2) as session:
        served = session.serve()
        first = ov.connect(served, 0, served.token)
        take(first, 1)
        second = ov.connect(served, 0, served.token)
        assert take(second, 3)[0][0] == 1
        with pytest.raises(OverlordError, match="another client of this rank connected"):
            rest(first)
        with pytest.raises(OverlordError, match="another client of this rank connected"):
            first.state_dict()
        second.close()


def test_whoever_does_not_belong_is_refused_in_words(leaves: None) -> None:
    with launch(job()) as session:
        session.client(0)
        served = session.serve()
        with pytest.raises(LinkRefused, match="wrong token"):
            ov.connect(served, 1, "guessed")
        with pytest.raises(LinkRefused, match="rank"):
            ov.connect(served, 7, served.token)
        with pytest.raises(LinkRefused, match=r"rank 0: .* got one of the session's own process"):
            ov.connect(served, 0, served.token)
        with ov.connect(served, 1, served.token):
            pass
        with pytest.raises(LinkRefused, match=r"rank 1: .* whose client was closed"):
            ov.connect(served, 1, served.token)


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OVERLORD_ADDRESS", "OVERLORD_TOKEN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(JobError) as missing:
        ov.connect()
    assert len(missing.value.problems) == 3


def test_nobody_at_the_address_is_said_within_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ActorLost, match=r"could not be reached for \d\.\d s"):
        ov.connect(f"overlord://127.0.0.1:{port}/nobody", 0, "x", timeout_s=0.3)


def test_serving_is_asked_for_before_the_first_step() -> None:
    with launch(job()) as session:
        take(session.client(0), 1)
        with pytest.raises(OverlordError, match="before iterating"):
            session.serve()
    with launch(job()) as session, pytest.raises(JobError, match="rank"):
        session.serve(ranks=[0, 9])


def test_what_is_served_prints_as_two_lines_and_is_the_address_as_text() -> None:
    with launch(job()) as session:
        served = session.serve(token="secret")
        assert str(served).splitlines() == [
            f"OVERLORD_ADDRESS={served.address}",
            "OVERLORD_TOKEN=secret",
        ]
        assert f"{served}" == served == served.address
        assert served.address.startswith("overlord://127.0.0.1:")
        assert session.serve() is served, "asked again it is the same"
        assert session.serve(token="secret", ranks=range(session.job.place.world_size)) is served
        with pytest.raises(
            JobError, match=r"port, token: expected the values of the first serve\(\), at overlord:"
        ):
            session.serve(port=5, token="other")


# State and reports, as in one process

OTHERWISE = {  # stories of the session's own clients that do not hold for connected ones, by design
    "test_a_client_that_comes_after_the_first_step_is_refused",
    "test_a_rank_alone_is_served_at_its_own_pace",  # all ranks are expected
    "test_the_end_stays_the_end_and_iterating_again_gives_nothing",
    "test_the_last_client_leaves_and_the_session_still_closes",
    "test_an_event_before_the_first_step_is_in_the_state_too",
    "test_every_step_may_be_skipped",  # planning begins with the connection
    "test_a_client_that_closes_while_the_first_step_is_asked_for_holds_nobody_up",
    # it looks into the boxes
    "test_a_session_closed_while_it_is_moved_to_a_state_leaves_nobody_waiting",
    # the session hears of a step a moment after it was taken
    "test_the_state_of_a_session_stays_where_its_last_client_left_it",
    "test_what_was_found_can_be_asked_for_after_the_session_has_ended",
    "test_an_error_stays_the_error",  # they leave ranks out
    "test_closing_a_session_wakes_who_waits_in_it",
    "test_a_client_in_a_forked_process_says_so_at_once",
}
STORIES = [
    name
    for name, story in vars(stories).items()
    if name.startswith("test_")
    and not inspect.signature(story).parameters
    and "session.client(" in inspect.getsource(story)
    and name not in OTHERWISE
]


@pytest.mark.parametrize("name", STORIES)
def test_a_story_of_the_sessions_own_clients_holds_for_connected_ones(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ov.Session.client
    made: dict[tuple[int, int], ov.Client] = {}

    def client(session: ov.Session, rank: int = 0) -> ov.Client:
        if running_job(session).closed or session.job.place.rank_problem(rank):
            return own(session, rank)
        if (id(session), rank) not in made:
            served = session.serve()
            made[id(session), rank] = ov.connect(
                served, rank, served.token, timeout_s=20, reconnect_s=20
            )
        return made[id(session), rank]

    monkeypatch.setattr(ov.Session, "client", client)
    vars(stories)[name]()
    closing(list(made.values()))


@runtimes
def test_rank_after_rank_loads_a_state_and_all_go_on_from_it(runtime: str) -> None:
    with launch(job(n=60), runtime=runtime) as session:
        served = session.serve()
        clients = join_all(served, 2)
        take(clients[0], 2), take(clients[1], 2)
        state = clients[0].state_dict()
        assert clients[1].state_dict() == state == json.loads(json.dumps(state))
        wanted = [take(c, 3) for c in clients]
        clients[0].load_state_dict(state)
        with pytest.raises(OverlordError, match="another rank rewound the session"):
            rest(clients[1])
        with pytest.raises(OverlordError, match="another rank rewound the session"):
            clients[1].state_dict()
        first = take(clients[0], 2)
        clients[1].load_state_dict(state)
        assert [first + take(clients[0], 1), take(clients[1], 3)] == wanted
        closing(clients)


def test_a_session_that_is_moved_moves_its_connected_clients_too() -> None:
    with launch(job(n=60)) as session:
        clients = join_all(session.serve(), 2)
        wanted = [
            first + second
            for first, second in zip(
                [take(c, 2) for c in clients], [take(c, 2) for c in clients], strict=True
            )
        ]
        wait_until(lambda: session.state_dict()["step"] == 4)
        state = session.state_dict()
        session.load_state_dict(start := _at(job(n=60), 1))
        assert clients[0].state_dict() == start
        assert [take(c, 3) for c in clients] == [w[1:] for w in wanted]
        wait_until(lambda: session.state_dict() == state)
        closing(clients)


@runtimes
def test_a_step_of_before_the_session_was_rewound_is_not_delivered_after_it(runtime: str) -> None:
    with launch(job(n=60), runtime=runtime) as session:
        clients = join_all(session.serve(), 2)
        start = session.state_dict()
        wanted = [take(c, 3) for c in clients]
        wait_until(lambda: all(len(client.queue) for client in clients))
        session.load_state_dict(start)
        assert [take(c, 3) for c in clients] == wanted
        closing(clients)


@runtimes
def test_clients_that_came_to_the_end_go_on_when_the_session_is_rewound(runtime: str) -> None:
    with launch(job(n=60), runtime=runtime) as session:
        clients = join_all(session.serve(), 2)
        take(clients[0], 2), take(clients[1], 2)
        state = clients[0].state_dict()
        behind = [[content(step) for step in row] for row in zip(*clients, strict=False)]
        session.load_state_dict(state)
        assert [[content(step) for step in row] for row in zip(*clients, strict=False)] == behind
        closing(clients)


def _at(made: ov.Job, step: int) -> dict[str, Any]:
    with launch(made) as session:
        clients = [session.client(r) for r in range(made.place.world_size)]
        for client in clients:
            take(client, step)
        return session.state_dict()


def test_a_state_of_another_job_is_refused_with_its_parts() -> None:
    other = _at(job(seed=4), 1)
    with launch(job(dp=1)) as session:
        clients = join_all(session.serve(), 1)
        with pytest.raises(StateMismatch) as here:
            clients[0].load_state_dict(other)
        assert "seed" in here.value.differences
        for damaged in ({}, "text", {"version": object()}):
            with pytest.raises(StateMismatch) as refused:
                clients[0].load_state_dict(damaged)  # type: ignore[arg-type]
            assert "saved damaged" not in str(refused.value)
        assert take(clients[0], 1)[0][0] == 0, "a refused state changes nothing"
        closing(clients)


def test_reports_travel_and_wrong_ones_are_told_where_they_are_said() -> None:
    with launch(job(dp=1)) as session:
        clients = join_all(session.serve(), 1)
        take(clients[0], 2)
        clients[0].report(1, {"loss/a": 2.0, "loss/b": float("nan")})
        with pytest.raises(JobError, match="expected a step that this rank has taken, got step 5"):
            clients[0].report(5, {"loss/a": 1.0})
        with pytest.raises(JobError, match="expected a finite number"):
            clients[0].report(1, {"loss/a": "much"})  # type: ignore[dict-item]
        assert session.metrics()["feedback"]["invalid"] == 3
        closing(clients)


def test_a_connected_client_counts_in_the_metrics(leaves: None) -> None:
    with launch(job(dp=1)) as session:
        clients = join_all(session.serve(), 1)
        take(clients[0], 3)
        wait_until(lambda: session.metrics()["clients"][0]["steps"] == 3)
        assert session.state_dict() == clients[0].state_dict()
        closing(clients)
        assert session.metrics()["clients"] == {}
        assert session.state_dict()["step"] == 3


def test_the_metrics_say_in_which_process_a_connected_client_lives_and_whether_it_is_there() -> (
    None
):
    def row() -> tuple[Any, str]:
        return next(
            (a["pid"], a["state"]) for a in session.metrics()["actors"] if a["name"] == "client/0"
        )

    with launch(job(dp=1)) as session:
        served = session.serve()
        assert row() == (None, "not connected yet")
        there = trainer(
            served, 0, "next(client)\nprint(json.dumps(1), flush=True)\nsys.stdin.read()"
        )
        wait_until(lambda: row() == (there.pid, "connected"))
        there.kill()
        there.communicate()
        wait_until(lambda: row() == (None, "disconnected"))


@runtimes
def test_the_last_step_of_a_client_that_leaves_at_once_is_in_the_sessions_state(
    runtime: str, leaves: None
) -> None:
    with launch(job(n=400, dp=2), runtime=runtime) as session:
        clients = join_all(session.serve(), 2)
        for _ in range(5):
            take(clients[0], 1), take(clients[1], 1)
        closing(clients)
        assert session.state_dict()["step"] == 5


# The end


@pytest.mark.parametrize(
    ("runtime", "tcp"), [("local", False), ("local", True), (WORKER_RUNTIME, False)]
)
def test_closing_the_session_ends_its_clients_with_that_reason(runtime: str, tcp: bool) -> None:
    session = launch(job(dp=1), prefetch=2, runtime=runtime)
    clients = join_all(session.serve(), 1, tcp)
    take(clients[0], 1)
    session.close()
    start = time.monotonic()
    with pytest.raises(OverlordError, match="the session is closed"):
        rest(clients[0])
    with pytest.raises(OverlordError, match="the session is closed"):
        clients[0].state_dict()
    clients[0].close()
    assert time.monotonic() - start < 30, "and nobody tried for long, which is a minute"


def test_an_error_of_the_job_reaches_every_trainer_as_it_is() -> None:
    def bad(buffer: Any, place: Any) -> Any:
        raise KeyError("no such thing")

    with launch(job(strategy=bad)) as session:
        for client in join_all(session.serve(), 2):
            with pytest.raises(KeyError, match="no such thing"):
                next(client)
            client.close()


def test_a_client_of_a_forked_process_says_so_and_its_end_harms_nobody() -> None:
    with launch(job(dp=1)) as session:
        served = session.serve()
        body = """
        next(client)
        pid = os.fork()
        if not pid:
            try:
                next(client)
            except ov.OverlordError as error:
                client.close()
                os._exit(17 if "does not survive a fork" in str(error) else 18)
            os._exit(19)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        print(json.dumps([code, next(client).step]))
        client.close()
        """
        assert found(trainer(served, 0, body)) == [17, 1]


# Cuts


def test_a_connection_that_is_cut_loses_nothing_and_repeats_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = whole_run(job(n=60, dp=1))
    with launch(job(n=60, dp=1)) as session:
        served = session.serve()
        client = ov.connect(served, 0, served.token)
        got = []
        with caplog.at_level(logging.WARNING, "overlord"):
            for step in client:
                got.append(content(step))
                if (link := connection_of(client.queue)) is not None:
                    sever(link)
                if step.step % 3 == 0:
                    assert client.state_dict()["step"] == step.step + 1
                    cut_control(client)
        assert got == wanted
        client.close()


def cut_control(client: ov.Client) -> None:
    sever(control_connection_of(client))


def raw(served: ServedAddress, **hello: Any) -> Connection:
    """A data connection without a client."""
    return open_connection(
        served.address,
        served.token,
        {"role": "client", "rank": 0, "next": 0, "generation": 0, **hello},
        timeout_s=20,
    )[0]


def test_what_a_client_says_of_itself_is_not_believed_before_it_is_checked() -> None:
    with launch(job(n=60, dp=1), prefetch=3) as session:
        served = session.serve()
        with pytest.raises(LinkRefused, match="another rank rewound the session"):
            raw(served, generation=5)
        with pytest.raises(LinkRefused, match="expected a whole number as 'next' of a hello"):
            raw(served, next="soon")
        ov.connect(served, 0, served.token).queue.end(None)  # it begins
        link = raw(served)
        link.send(StepAck(10**6))
        handed = [link.recv(10) for _ in range(3)]
        assert [h.info.step for h in handed] == [0, 1, 2]
        assert link.recv(0.2) is TIMEOUT, "a step that was never sent cannot have been taken"
        link.send(StepAck(0))
        assert link.recv(10).info.step == 3
        link.close()
        with pytest.raises(LinkRefused, match="got step 0, which was taken and is not kept"):
            raw(served)


@runtimes
def test_no_token_travels_to_a_client_which_has_one(runtime: str) -> None:
    with launch(job(n=20, dp=1), runtime=runtime) as session:
        served = session.serve()
        assert served.token not in repr(served)
        asking = ControlClient(served.address, served.token, 0, timeout_s=10)
        said = asking.ask("start", timeout_s=10)
        assert said["token"] == ""
        assert served.token not in repr(said)
        asking.close()
        assert next(ov.connect(served, 0, served.token)).step == 0


def test_a_step_taken_before_the_session_was_rewound_counts_for_nothing_after_it() -> None:
    with launch(job(n=60, dp=1), prefetch=3) as session:
        served, start = session.serve(), session.state_dict()
        ov.connect(served, 0, served.token).queue.end(None)  # it begins
        link = raw(served)
        assert [link.recv(10).info.step for _ in range(3)] == [0, 1, 2]
        session.load_state_dict(start)
        assert link.recv(10)["moved"] == 1
        assert [link.recv(10).info.step for _ in range(3)] == [0, 1, 2]
        link.send(StepAck(1, generation=0))  # it was on its way
        assert link.recv(0.2) is TIMEOUT
        assert session.state_dict() == start
        link.send(StepAck(0, generation=1))
        assert link.recv(10).info.step == 3
        link.close()


def test_a_step_that_comes_twice_is_taken_once() -> None:
    with launch(job(n=60, dp=1), prefetch=3) as session:
        served = session.serve()
        client = ov.connect(served, 0, served.token)
        client.queue.end(None)
        link = raw(served)
        handed = [link.recv(10) for _ in range(3)]

        def repeat(there: Any, hello: dict[str, Any]) -> dict[str, Any]:
            for step in (0, 0, 1, 0, 1, 2, 2):
                there.send(handed[step])
            there.send(EndOfStream())
            return {}

        with Server(token="x", on_open=repeat, on_message=lambda there, value: None) as server:
            box = RemoteStepQueue(
                rank=0,
                address=server.address,
                token="x",
                where=lambda generation: (server.address, "x"),
                next_step=0,
            )
            assert [box.get(10)[0].step for _ in range(3)] == [0, 1, 2]  # type: ignore[index]
            with pytest.raises(StopIteration):
                box.get(10)
            receive(box, handed[2])
            assert len(box) == 0, "not even when all that came before was handed out"
            box.end(None)
        link.close()
        client.close()


SERVER = """
import json, sys
sys.path.insert(0, {root!r})
import overlord as ov
from tests.unit.test_session import job
with ov.launch(job(n=60, dp=1), prefetch=4) as session:
    served = session.serve()
    print(json.dumps([served.address, served.token]), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_session() -> Iterator[tuple[subprocess.Popen[str], ServedAddress]]:
    """A session in another process, to be killed."""
    command = [sys.executable, "-c", SERVER.format(root=str(ROOT))]
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    yield process, ServedAddress(*json.loads(process.stdout.readline()))
    process.kill()
    process.communicate()


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
def test_steps_that_were_sent_are_taken_after_the_kill_and_then_the_loss_is_named(
    other_session: Any, tcp: bool
) -> None:
    process, served = other_session
    wanted = whole_run(job(n=60, dp=1))
    [client] = join_all(served, 1, tcp, reconnect_s=0.5)
    assert take(client, 2) == wanted[:2]
    wait_until(lambda: len(client.queue) == 4)
    process.kill()
    process.wait(20)
    assert take(client, 4) == wanted[2:6], "what was prefetched stays readable"
    with pytest.raises(ActorLost) as lost:
        next(client)
    for part in (
        "the constructor of rank 0",
        served.address.split("/")[2],
        "step 6 was expected",
        "s while",
    ):
        assert part in str(lost.value)
    client.close()


def test_a_stall_is_explained_though_the_control_server_does_not_answer(other_session: Any) -> None:
    process, served = other_session
    heard: list[tuple[str, float]] = []

    def on_stall(words: str, seconds: float) -> None:
        heard.append((words, seconds))
        set_stall(client, limit_s=0.0)  # it has been told of once, and is not waited for any longer

    client = ov.connect(served, 0, served.token, on_stall=on_stall)
    take(client, 1)
    halt(process.pid)
    set_stall(client, warn_s=0.2)  # and not before: the first step may take long on a busy machine
    try:
        with pytest.raises(DataStall) as stalled:
            rest(client)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert "the session's control server at" in str(stalled.value)
    assert "returned no reason" in str(stalled.value)
    assert heard
    assert heard[0][1] >= 0.2
    assert "control server" in heard[0][0]
    client.close()


# The watchdog


def test_a_trainer_may_end_a_stall_by_itself() -> None:
    class Enough(Exception):
        pass

    def on_stall(words: str, seconds: float) -> None:
        if "rank 1" in words:  # else who knows it did not answer in time, and is asked again
            raise Enough(words)

    with launch(job(), prefetch=2, on_stall=on_stall) as session:
        here, behind = session.client(0), session.client(1)
        take(here, 2)
        wait_until(lambda: len(behind.queue) == 2)
        set_stall(
            here, warn_s=0.1
        )  # and not before: steps that come may take longer on a busy machine
        with pytest.raises(Enough, match="rank 1, which holds 2 steps"):
            next(here)
    with launch(job(), prefetch=2) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token, on_stall=on_stall) as there:
            take(there, 2)
            set_stall(there, warn_s=0.1)
            with pytest.raises(Enough, match="rank 1, which has not connected yet"):
                next(there)


def test_a_slow_source_and_its_loader_are_named_to_a_connected_client() -> None:
    gate, reads = threading.Event(), threading.Event()

    class Slow:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, i: int) -> dict[str, Any]:
            reads.set()
            gate.wait(20)
            return {"tokens": [i]}

    made = job(
        dp=1, sources=[ov.Source("slow", Slow(), transforms=[ov.Tokens("tokens")], epochs=1)]
    )
    with launch(made) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            assert reads.wait(20)
            with (
                impatient(client, 0.5),
                pytest.raises(DataStall, match=r"source 'slow'.*loader/slow/0 is reading"),
            ):
                next(client)
            gate.set()


# What a trainer pays


def test_a_connected_trainer_pays_next_to_nothing() -> None:
    body = """
    heavy = [m for m in ("pyarrow", "torch", "yaml", "pydantic", "click", "rich", "multiprocessing") if m in sys.modules]
    import threading
    take = [next(client).step for _ in range(3)]
    print(json.dumps([heavy, threading.active_count(), take]))
    client.close()
    """
    with launch(job(dp=1)) as session:
        served = session.serve()
        assert found(trainer(served, 0, body)) == [[], 1, [0, 1, 2]]


# torchrun

JOIN = """
import hashlib, json, os, sys
sys.path.insert(0, {root!r})
import overlord as ov
from tests.unit.test_session import job
if __name__ == "__main__":
    made = job(n=60, place=ov.ClientPlaceTree(dp=2), {changes})
    out = open({out!r} + "/" + os.environ["RANK"], "w")
    try:
        with ov.join(made, stall_limit_s=30) as client:
            digest = hashlib.sha256()
            steps = [digest.update(mb["tokens"].tobytes()) for step in client for mb in step]
            json.dump([client.rank, len(steps), digest.hexdigest(), client.session is not None], out)
    except ov.OverlordError as error:
        json.dump([type(error).__name__, str(error)], out)
        out.close()
        sys.exit(3)
    out.close()
"""


def torchrun(tmp_path: Path, changes: str) -> tuple[int, list[Any]]:
    """Two processes under torchrun; what each wrote."""
    script = tmp_path / "train.py"
    script.write_text(JOIN.format(root=str(ROOT), changes=changes, out=str(tmp_path)))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
    ]
    own = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env={**os.environ, **own}, capture_output=True, text=True, timeout=160, check=False
    )
    written = [tmp_path / str(rank) for rank in range(2)]
    return done.returncode, [
        json.loads(path.read_text() or "null") if path.exists() else done.stderr for path in written
    ]


@pytest.mark.timeout(180)
def test_under_torchrun_one_rank_serves_and_every_rank_gets_its_share(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, got = torchrun(tmp_path, "")
    wanted = []
    for rank in range(2):
        with launch(job(n=60)) as session:
            rows = list(zip(session.client(0), session.client(1), strict=True))
        digest, steps = hashlib.sha256(), 0
        for row in rows:
            for mb in row[rank]:
                digest.update(mb["tokens"].tobytes())
                steps += 1
        wanted.append([rank, steps, digest.hexdigest(), rank == 0])
    assert (code, got) == (0, wanted)


@pytest.mark.timeout(180)
def test_under_torchrun_a_launch_that_fails_ends_every_rank_with_its_error(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code, got = torchrun(
        tmp_path,
        "sources=[ov.Source('gone', '/nowhere/*.parquet', transforms=[ov.Tokens('tokens')])]",
    )
    assert code != 0
    assert [g[0] for g in got] == ["SourceError"] * 2
    assert got[0] == got[1]
    assert "expected a pattern that matches files" in got[0][1]


def test_a_world_of_another_size_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(JobError, match="expected the 3 ranks of WORLD_SIZE, got 2"):
        ov.join(job())


def test_without_torchrun_joining_is_launching(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with ov.join(job(n=40, dp=1)) as client:
        assert rest(client) == whole_run(job(n=40, dp=1))
        session = client.session
        assert session is not None
    with pytest.raises(OverlordError, match="the session is closed"):
        session.serve()


# The command line


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"tokens": [k] * (1 + k % 5)}) + "\n" for k in range(40)))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"""name: served
sources:
  a:
    uri: {data}
    epochs: 1
    transforms:
      - tokens: {{column: tokens}}
batch: {{samples: 8, context: 64}}
place: {{dp: 2}}
"""
    )
    return path


def overlord(*args: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "overlord.cli.main", *args],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def printed(process: subprocess.Popen[str]) -> ServedAddress:
    assert process.stdout is not None
    lines = dict(process.stdout.readline().strip().split("=", 1) for _ in range(2))
    return ServedAddress(lines["OVERLORD_ADDRESS"], lines["OVERLORD_TOKEN"])


def test_the_command_serves_a_job_to_its_end(job_file: Path) -> None:
    state = job_file.with_name("state.json")
    process = overlord(
        "serve", str(job_file), "--save", str(state), OVERLORD_TOKEN="from-the-environment"
    )
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("OVERLORD_ADDRESS=")
    served = ServedAddress(
        address, "from-the-environment"
    )  # which is not printed: whoever gave it has it
    trainers = [trainer(served, rank, TAKE_ALL) for rank in range(2)]
    steps = [[step for step, _ in found(t)] for t in trainers]
    out, err = process.communicate(timeout=30)
    assert (process.returncode, steps) == (0, [list(range(5))] * 2), err
    assert "from-the-environment" not in out + err
    assert json.loads(state.read_text())["step"] == 5


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_or_sigterm_ends_the_command_within_a_second_and_saves(
    job_file: Path, number: signal.Signals, code: int
) -> None:
    state = job_file.with_name("state.json")
    process = overlord("serve", str(job_file), "--save", str(state))
    served = printed(process)
    client = ov.connect(served, 0, served.token)
    take(client, 2)
    start = time.monotonic()
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert time.monotonic() - start < 20, "a second, on a machine that does nothing else"
    assert json.loads(state.read_text())["step"] == 0, "the step that all took: rank 1 took none"
    with pytest.raises(OverlordError, match="the session is closed"):
        rest(client)
    client.close()


def test_a_hello_of_another_kind_is_refused() -> None:
    with launch(job()) as session:
        served = session.serve()
        for hello in (
            {},
            {"role": "control"},
            {"role": "control", "rank": "0"},
            {"role": "client", "rank": 9, "next": 0},
        ):
            with pytest.raises(LinkRefused):
                open_connection(served.address, served.token, hello, timeout_s=20)
        with ov.connect(served, 0, served.token) as client:
            assert take(client, 1)[0][0] == 0
