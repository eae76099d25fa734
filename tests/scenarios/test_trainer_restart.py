"""A trainer that dies and is started again asks again: its rank gets every step it had not taken,
none twice, and others notice nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

import overlord as ov
from overlord.client.remote_queue import RemoteStepQueue
from overlord.errors import LinkRefused, OverlordError
from overlord.serving.session_server import ServedAddress
from overlord.transport.connection import CLOSES, open_connection
from tests.internals import QUEUE_CONNECTS, running_job, runtime_of
from tests.processes import WORKER_RUNTIME, halt, until, workers_of
from tests.scenarios.test_serving import found, runtimes, trainer
from tests.unit.test_session import content, job, launch, take, whole_run

pytestmark = pytest.mark.timeout(200)

TAKE_AND_DIE = """
got = [(step.step, [mb["tokens"].tolist() for mb in step]) for step in (next(client) for _ in range({n}))]
print(json.dumps(got), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""

TAKE = """
for step in client:
    print(json.dumps((step.step, [mb["tokens"].tolist() for mb in step])), flush=True)
    time.sleep({pause})
client.close()
"""


def died(process: subprocess.Popen[str]) -> list[Any]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    got: list[Any] = json.loads(out)
    return got


def as_json(steps: list[Any]) -> list[Any]:
    found: list[Any] = json.loads(json.dumps(steps))
    return found


@runtimes
def test_a_rank_that_ran_ahead_of_the_others_goes_on_behind_the_last_step_it_took(
    runtime: str,
) -> None:
    """The session hears how far a rank is when the slowest has moved on, and the slowest has
    not.
    """
    wanted = [as_json(whole_run(job(n=60), rank)) for rank in range(2)]
    with launch(job(n=60), runtime=runtime, prefetch=4) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as slow:
            got = [died(trainer(served, 1, TAKE_AND_DIE.format(n=n))) for n in (1, 2, 1)]
            assert [[step for step, _ in steps] for steps in got] == [[0], [1, 2], [3]]
            thread = threading.Thread(
                target=lambda: got.append(found(trainer(served, 1, "got = " + ALL)))
            )
            thread.start()
            assert [as_json(content(step)) for step in slow] == wanted[0]
            thread.join(60)
        assert [step for steps in got for step in steps] == wanted[1]


ALL = """[(step.step, [mb["tokens"].tolist() for mb in step]) for step in client]
client.close()
print(json.dumps(got))
"""


def lines(process: subprocess.Popen[str]) -> Iterator[Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.endswith("\n"):  # else it was killed in the middle of it
            yield json.loads(line)


@runtimes
def test_a_trainer_that_is_killed_at_any_moment_misses_nothing_but_what_it_held(
    runtime: str,
) -> None:
    """A step is taken when it is handed to the trainer: with one killed just then its last step is
    gone, and no other.
    """
    made, chance, kills = (
        job(n=800, dp=1),
        Random(5),
        5,
    )  # more steps than those take that are killed late
    wanted = as_json(whole_run(made, 0))
    got: list[list[Any]] = []
    with launch(made, runtime=runtime) as session:
        served = session.serve()
        for k in range(kills + 1):
            process = trainer(served, 0, TAKE.format(pause=0.0 if k == kills else 0.002))
            got.append([])
            for step in lines(process):
                got[-1].append(step)
                if k < kills and len(got[-1]) == 1:
                    time.sleep(chance.random() * 0.02)
                    os.kill(process.pid, signal.SIGKILL)
            process.communicate(timeout=30)
    steps = [step for part in got for step, _ in part]
    assert steps == sorted(set(steps)), "none twice"
    assert len(steps) >= len(wanted) - kills
    assert [s for part in got for s in part] == [wanted[step] for step in steps]
    for part in filter(
        None, got
    ):  # should one have taken all there was, those behind it were refused
        assert [step for step, _ in part] == list(range(part[0][0], part[0][0] + len(part))), (
            "within a life none is missing"
        )


@runtimes
def test_steps_that_were_sent_to_the_one_that_died_are_sent_to_the_next(runtime: str) -> None:
    wanted = whole_run(job(n=60, dp=1), 0)
    with launch(job(n=60, dp=1), runtime=runtime, prefetch=4, build_ahead=4) as session:
        served = session.serve()
        first = ov.connect(served, 0, served.token)
        got = take(first, 2)
        until(lambda: len(first.queue) == 4)  # they are in its process
        with ov.connect(served, 0, served.token) as second:
            assert got + take(second, len(wanted) - 2) == wanted
        with pytest.raises(OverlordError, match="another client of this rank connected"):
            take(first, 5)


def hello(session: ov.Session, served: ServedAddress, rank: int, next_step: int) -> None:
    address, token = running_job(session).remote_ranks.constructor_address(rank)
    open_connection(
        address,
        token or served.token,
        {"role": "client", "rank": rank, "next": next_step, "generation": 0},
        timeout_s=10,
    )


@runtimes
def test_who_asks_for_steps_that_are_gone_is_told_to_load_a_state_everywhere(runtime: str) -> None:
    with launch(
        job(n=60), runtime=runtime, stall_limit_s=60
    ) as session:  # new processes are started meanwhile
        served = session.serve()
        clients = [ov.connect(served, rank, served.token) for rank in range(2)]
        old = clients[1].state_dict()
        for client in clients:
            take(client, 3)
        until(lambda: session.state_dict()["step"] == 3)
        with pytest.raises(
            LinkRefused,
            match=r"rank 1: .* got step 1, which was taken .* load a saved state on every rank",
        ):
            hello(session, served, 1, 1)
        again = ov.connect(served, 1, served.token)
        again.load_state_dict(old)  # it moves the session, and the others must follow
        with pytest.raises(
            OverlordError,
            match="another rank rewound the session to a saved state; load the same state on "
            "this rank",
        ):
            take(clients[0], 5)
        clients[0].load_state_dict(old)
        assert [take(client, 1)[0][0] for client in (clients[0], again)] == [0, 0]
        for client in (clients[0], again):
            client.close()


@runtimes
def test_who_connects_while_another_rank_moves_the_session_gets_its_steps(
    runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was sent to a constructor that closes, and the next one is not known yet."""
    wanted = [as_json(whole_run(job(n=60), rank)) for rank in range(2)]
    with launch(job(n=60), runtime=runtime, prefetch=4, stall_limit_s=60) as session:
        served, start = session.serve(), session.state_dict()
        first = ov.connect(served, 0, served.token)
        next(first)
        link, once = QUEUE_CONNECTS.real, [LinkRefused("the old one", CLOSES)]

        def closing(box: RemoteStepQueue, timeout_s: float) -> None:
            if once:
                refused = once.pop()
                first.load_state_dict(start)
                raise refused
            link(box, timeout_s)

        QUEUE_CONNECTS.replace(monkeypatch, closing)
        second = ov.connect(served, 1, served.token)
        second.load_state_dict(start)
        got: list[list[Any]] = [[], []]
        for steps in zip(first, second, strict=True):
            for rank, step in enumerate(steps):
                got[rank].append(content(step))
        assert [as_json(steps) for steps in got] == wanted
        first.close()
        second.close()


def test_who_comes_again_while_its_constructor_worker_stands_still_goes_on_when_that_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was told to begin at a step that is kept no longer, and ended by that, though nothing was
    lost.
    """
    monkeypatch.setattr("overlord.session.cluster_runtime.TAKEN_S", 0.2)
    wanted = [as_json(whole_run(job(n=60), rank)) for rank in range(2)]
    with launch(
        job(n=60),
        runtime=WORKER_RUNTIME,
        constructor_hosts=1,
        prefetch=4,
        build_ahead=4,
        lost_after_s=60.0,
    ) as session:
        served = session.serve()
        other = ov.connect(served, 1, served.token)
        got = died(
            trainer(served, 0, TAKE_AND_DIE.format(n=3))
        )  # rank 1 takes nothing: what rank 0 took is told to nobody
        pid, taken_by = (
            workers_of(session)["constructor-worker/0"],
            type(runtime_of(session)).taken_by,
        )  # type: ignore[attr-defined]
        asked: list[int] = []

        def counted(host: Any, rank: int) -> Any:
            asked.append(rank)
            return taken_by(host, rank)

        monkeypatch.setattr(type(runtime_of(session)), "taken_by", counted)
        halt(pid)
        with ThreadPoolExecutor(2) as beside:
            try:
                coming = beside.submit(ov.connect, served, 0, served.token)
                until(lambda: len(asked) >= 2)
            finally:
                os.kill(pid, signal.SIGCONT)
            again = coming.result(60)
            rest = beside.submit(take, again, len(wanted[0]) - 3)
            assert as_json(take(other, len(wanted[1]))) == wanted[1]
            assert got + as_json(rest.result(60)) == wanted[0]
        for client in (again, other):
            client.close()
