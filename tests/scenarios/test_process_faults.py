"""What goes wrong in a job of several processes: everyone is told who died and how, at the same
step, and nothing is left behind.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import tempfile
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.errors import ActorLost, JobError, OverlordError, SourceError
from tests.internals import running_job
from tests.processes import (
    ASKED,
    EXITED,
    KILLED,
    Played,
    but_for_late,
    heard,
    launch,
    left_after,
    play,
    program,
    run,
    until,
    workers_left,
    workers_of,
    written,
)
from tests.scenarios.test_process import job, rows, source
from tests.sizes import part
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)

ENDS: dict[str, Any] = {"failover": False}  # a lost part ends the job
SOON_S = 20.0  # a death is told in tens of milliseconds; machines are noisy


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=200), "local", steps=40)


def rest_of(client: ov.Client) -> tuple[list[Any], Exception | None]:
    got = []
    try:
        for step in client:
            got.append(written(step))
    except Exception as error:
        return got, error
    return got, None


def ends_of(session: ov.Session) -> dict[int, tuple[list[Any], Exception | None]]:
    """All ranks train side by side until they end."""
    clients = [session.client(rank) for rank in range(2)]
    ends: dict[int, tuple[list[Any], Exception | None]] = {}
    threads = [
        threading.Thread(target=lambda c=c: ends.update({c.rank: rest_of(c)})) for c in clients
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return ends


# kills


@pytest.mark.parametrize("constructor_hosts", [1, 2])
def test_a_loader_worker_that_is_killed_ends_the_job_at_the_same_step_for_all(
    alone: Played, constructor_hosts: int
) -> None:
    with launch(
        job(until=200),
        sources_per_host=2,
        hosts=2,
        constructor_hosts=constructor_hosts,
        build_ahead=4,
        **ENDS,
    ) as session:
        before, hosts = play(session, steps=5), workers_of(session)
        until(lambda: min(len(session.client(rank).queue) for rank in range(2)) == 4)
        os.kill(hosts["loader-worker/1"], signal.SIGKILL)
        start = time.monotonic()
        ends = ends_of(session)
        assert time.monotonic() - start < SOON_S
        for rank, (steps, error) in ends.items():
            assert isinstance(error, ActorLost)
            assert (error.name, error.reason) == ("loader-worker/1", KILLED)
            assert before.steps[rank] + steps == alone.steps[rank][: 5 + len(steps)]
        assert len(ends[0][0]) == len(ends[1][0]) == 4, "what was complete was delivered, to all"
        states = {
            a["name"]: a["state"]
            for a in heard(session, lost=["loader-worker/1"])["actors"]
            if a["role"] == "host"
        }
        assert states.pop("loader-worker/1") == KILLED
        assert set(states.values()) == {"running"}
    assert not workers_left(list(hosts.values()), SOON_S)


@pytest.mark.parametrize("victim", ["loader-worker/0", "constructor-worker/1"])
def test_a_worker_that_is_killed_while_all_wait_for_it(alone: Played, victim: str) -> None:
    with launch(
        job(until=10**6), sources_per_host=2, hosts=2, constructor_hosts=2, **ENDS
    ) as session:
        hosts, clients = workers_of(session), [session.client(rank) for rank in range(2)]
        ends: dict[int, Any] = {}
        threads = [
            threading.Thread(target=lambda r=r: ends.update({r: rest_of(clients[r])}))
            for r in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: min(c.steps for c in clients) > 10)
        os.kill(hosts[victim], signal.SIGKILL)
        for thread in threads:
            thread.join(SOON_S)
        assert {rank: (e.name, e.reason) for rank, (_, e) in ends.items()} == dict.fromkeys(
            range(2), (victim, KILLED)
        )
        for rank, (steps, _) in ends.items():
            assert [step[0] for step in steps] == list(range(len(steps)))
            assert steps[:40] == alone.steps[rank][: len(steps)]


def test_clients_of_a_constructor_worker_that_is_killed_hand_out_what_they_have_and_all_others_end(
    alone: Played,
) -> None:
    with launch(job(until=200), constructor_hosts=2, build_ahead=4, **ENDS) as session:
        before, hosts = play(session, steps=5), workers_of(session)
        until(lambda: min(len(session.client(rank).queue) for rank in range(2)) == 4)
        session.kill("constructor-worker/1")
        start = time.monotonic()
        ends = ends_of(session)
        assert time.monotonic() - start < SOON_S
        for rank, (steps, error) in ends.items():
            assert isinstance(error, ActorLost)
            assert (error.name, error.reason) == ("constructor-worker/1", ASKED)
            assert before.steps[rank] + steps == alone.steps[rank][: 5 + len(steps)]
            assert len(steps) == 4, "the prefetch window was full"
        with pytest.raises(
            JobError,
            match="expected the name of a process of this job, got 'x'; there are planner, ",
        ):
            session.kill("x")
    assert not workers_left(list(hosts.values()), SOON_S)


SERVED = """
    import sys, time
    import overlord as ov
    from tests.scenarios.test_process import job
    from tests.processes import WORKER_RUNTIME, workers_of

    def main():
        session = ov.launch(job(until=200), runtime=WORKER_RUNTIME, constructor_hosts=2, build_ahead=4)
        served = session.serve()
        print(served.address, served.token, *workers_of(session).values(), flush=True)
        sys.stdin.readline()
        session.close()
        print("closed", flush=True)
"""


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_clients_elsewhere_outlive_the_session_with_what_they_have_and_nothing_else_does(
    tmp_path: Path, alone: Played, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(
        logging.CRITICAL, "overlord"
    )  # records of faults keep their frames, and those what they hold
    before = fds()
    with program(tmp_path, SERVED) as server:
        address, token, *pids = server.line().split()
        clients = [
            ov.connect(address, rank, token, reconnect_s=0.3, stall_limit_s=60.0)
            for rank in range(2)
        ]
        got = [[written(next(client)) for client in clients] for _ in range(5)]
        until(lambda: min(len(client.queue) for client in clients) == 4)
        server.process.kill()
        start = time.monotonic()
        assert not left_after(list(map(int, pids)), SOON_S), (
            "no process outlives the one that started it"
        )
        ends = [rest_of(client) for client in clients]
        assert time.monotonic() - start < 3 + SOON_S
    for rank, (steps, error) in enumerate(ends):
        assert [g[rank] for g in got] + steps == alone.steps[rank][:9]
        assert isinstance(error, ActorLost)
        assert "while step 9 was expected" in str(error)
    for client in clients:
        client.close()
    clients.clear()
    del got, steps, error, ends, client
    gc.collect()
    until(lambda: fds() <= before)
    assert "memfd:overlord" not in Path("/proc/self/maps").read_text(), (
        "no shared memory stays mapped"
    )


def test_a_session_that_closes_tells_clients_elsewhere(tmp_path: Path) -> None:
    with program(tmp_path, SERVED) as server:
        address, token, *pids = server.line().split()
        with ov.connect(address, 0, token, reconnect_s=5.0) as client:
            assert next(client).step == 0
            until(lambda: len(client.queue) == 3)
            server.say("")
            assert server.line() == "closed"
            steps, error = rest_of(client)
            assert [step[0] for step in steps] == [1, 2, 3]
            assert str(error) == "the session is closed; launch the job again to continue"
        assert not left_after(list(map(int, pids)), SOON_S)
        assert but_for_late(server.end()[2]) == ""


TRAINS = """
    import sys
    import overlord as ov
    from tests.scenarios.test_process import job
    from tests.processes import WORKER_RUNTIME, workers_of

    def main():
        {launch}
        print(*workers_of(session).values(), flush=True)
        for step in session.client(0):
            if step.step == {stop}:
                {then}
"""


def trains(launch: str, then: str, stop: int = 3) -> str:
    return TRAINS.format(launch=launch, stop=stop, then=then)


PLAIN = "session = ov.launch(job(until=10**6), runtime=WORKER_RUNTIME)"


def test_ctrl_c_ends_everything_at_once(tmp_path: Path) -> None:
    with program(tmp_path, scoped()) as trainer:
        pids = list(map(int, trainer.line().split()))
        assert trainer.line() == "trains"
        os.killpg(trainer.pid, signal.SIGINT)
        start = time.monotonic()
        code, _, err = trainer.end(SOON_S)
        assert time.monotonic() - start < SOON_S
        assert code != 0
        assert err.count("Traceback") == 1
        assert but_for_late(err).strip().endswith("KeyboardInterrupt")
        assert not left_after(pids, SOON_S)


def scoped() -> str:
    return """
    import overlord as ov
    from tests.scenarios.test_process import job
    from tests.processes import WORKER_RUNTIME, workers_of

    def main():
        with ov.launch(job(until=10**6), runtime=WORKER_RUNTIME) as session:
            print(*workers_of(session).values(), flush=True)
            for step in session.client(0):
                if step.step == 3:
                    print("trains", flush=True)
"""


@pytest.mark.parametrize(
    "then",
    part(
        ["return", "sys.exit(0)"],
        ["del session; return", "session.close(); session.close(); return"],
    ),
)
def test_a_program_that_just_ends_leaves_nothing_and_says_nothing(
    tmp_path: Path, then: str
) -> None:
    with program(tmp_path, trains(PLAIN, then)) as trainer:
        pids = list(map(int, trainer.line().split()))
        code, out, err = trainer.end()
        assert (code, out, but_for_late(err)) == (0, "", "")
        assert not left_after(pids, SOON_S)
    assert not [
        p
        for root in ("/tmp", tempfile.gettempdir())
        for p in Path(root).glob(f"ov-ray-{trainer.pid}-*")
    ], "nor files of a cluster"


def test_closing_ends_whoever_waits_in_another_thread(tmp_path: Path) -> None:
    made = job(place=ov.ClientPlaceTree(dp=2))
    session = launch(made, prefetch=1)
    clients, ended = [session.client(rank) for rank in range(2)], []
    next(clients[0])
    waiting = threading.Thread(
        target=lambda: ended.append(rest_of(clients[0]))
    )  # rank 1 takes nothing
    waiting.start()
    until(lambda: "rank 1" in running_job(session).waiting_for(0))
    hosts = list(workers_of(session).values())
    start = time.monotonic()
    session.close()
    session.close()
    waiting.join(SOON_S)
    assert time.monotonic() - start < SOON_S
    [(steps, error)] = ended
    assert steps == []
    assert str(error) == "the session is closed; launch the job again to continue"
    assert not workers_left(hosts, SOON_S)


def test_sessions_leave_no_open_file_and_no_thread() -> None:
    with launch(job(until=3)) as session:
        play(session)
    gc.collect()
    before, threads = fds(), threading.active_count()
    for _ in range(3):
        with launch(job(until=3), constructor_hosts=2) as session:
            play(session)
    del session
    gc.collect()
    until(lambda: fds() <= before)  # what a thread holds that is about to end
    until(lambda: threading.active_count() <= threads)


# code that cannot run there


class Broken:
    """Can be packed, but not opened: as a class of a module that the other process does not
    have.
    """

    def __call__(self, columns: Any) -> Any:
        return columns

    def __reduce__(self) -> Any:
        return _cannot, ()


def _cannot() -> Any:
    raise ImportError("no module named 'mine'")


def with_map(fn: Any, **settings: Any) -> ov.Source:
    return ov.Source(
        "m", rows(60, 0), transforms=[ov.Map(fn, **settings), ov.Tokens("tokens")], epochs=None
    )


def test_code_that_cannot_be_sent_is_refused_at_launch_and_leaves_nothing() -> None:
    before, lock = threading.active_count(), threading.Lock()
    with pytest.raises(
        JobError,
        match=r"source 'm': .*variable 'lock': an object of _thread.lock cannot be sent to another "
        r"process: .*create it in the function that uses it",
    ):
        launch(job(sources=[with_map(lambda columns: columns if lock else None)]))
    with pytest.raises(ImportError, match="no module named 'mine'"):
        launch(job(sources=[with_map(Broken())]))
    until(lambda: threading.active_count() <= before)


def test_a_tokenizer_that_is_missing_is_told_at_launch(tmp_path: Path) -> None:
    texts = ov.Source(
        "t", Rows([{"text": "one"}]), transforms=[ov.Tokenize(str(tmp_path / "none.json"), "text")]
    )
    with pytest.raises(OverlordError, match=r"source 't'.*none\.json"):
        launch(job(sources=[texts]))


def test_a_program_needs_no_guard_also_if_it_sends_what_it_defines(tmp_path: Path) -> None:
    with program(tmp_path, trains(PLAIN, "return"), guarded=False) as trainer:
        assert trainer.end()[0] == 0
    hooked = PLAIN.replace("until=10**6", "until=10**6, hooks=(ov.constructor_do_plan(mine),)")
    body = "def mine(assembly):\n    return assembly.build()\n" + textwrap.dedent(
        trains(hooked, "return")
    )
    with program(tmp_path, body, guarded=False) as trainer:
        assert trainer.end()[0] == 0


def test_a_source_that_cannot_be_opened_does_not_join_and_the_job_goes_on(alone: Played) -> None:
    with launch(job(until=200)) as session:
        first = play(session, steps=3)
        for _ in range(2):
            with pytest.raises(ImportError, match="no module named 'mine'"):
                session.add_source(with_map(Broken()))
        assert "m" not in session.metrics()["sources"]
        then = play(session, steps=10)
        assert {rank: first.steps[rank] + then.steps[rank] for rank in range(2)} == {
            rank: s[:13] for rank, s in alone.steps.items()
        }
        at = session.add_source(source("d", 30, 5000))
        late = play(session, steps=8 + at - 13)
        assert not late.error
        assert "d" in {
            p[0][0] for steps in late.steps.values() for step in steps for mb in step[4] for p in mb
        }


def ends_process(columns: Any) -> Any:
    os._exit(3)


def ends_later(row: dict[str, Any]) -> dict[str, Any]:
    if row["n"] == 41:
        os._exit(3)
    return row


def ends_program(columns: Any) -> Any:
    raise SystemExit("enough")


@pytest.mark.parametrize("fn", [ends_process, ends_later])
def test_a_transform_that_ends_its_process_ends_the_job_for_all(fn: Any) -> None:
    with launch(
        job(sources=[with_map(fn, rows=fn is ends_later), source("a", 60, 1000)]), hosts=1, **ENDS
    ) as session:
        ends = ends_of(session)
    assert {str(error) for _, error in ends.values()} == {f"loader-worker/0 is lost: {EXITED}"}
    assert len({len(steps) for steps, _ in ends.values()}) == 1


def test_a_transform_that_wants_to_end_the_program_is_an_error_of_its_source() -> None:
    with launch(job(sources=[with_map(ends_program), source("a", 60, 1000)])) as session:
        for steps, error in ends_of(session).values():
            assert steps == []
            assert isinstance(error, SourceError)
            assert "source 'm'" in str(error)
            assert "SystemExit: enough (at " in str(error)
            assert "in ends_program); a transform must not end the program" in str(error)
        heard(session)  # they live on
