"""Clients of a job in processes: who takes part, who is slow, who waits for what, and what people
are told of it all.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.errors import DataStall, OverlordError
from tests.internals import running_job, set_stall
from tests.processes import (
    RUNTIMES,
    WAIT_S,
    Played,
    halt,
    heard,
    launch,
    play,
    run,
    until,
    workers_left,
    workers_of,
    written,
)
from tests.scenarios.test_process import job, rows, source

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=200), "local")


def test_ranks_without_a_client_hold_up_nobody_and_cost_nothing() -> None:
    made = job(place=ov.ClientPlaceTree(dp=3), until=9)
    alone = run(made, "local")
    with launch(made, constructor_hosts=3) as session:
        assert play(session, ranks=[2]).steps == {2: alone.steps[2]}
        memory = heard(session)["memory"]
        assert memory["staged"] == 0, "documents of the others went nowhere"
        with pytest.raises(
            OverlordError, match=r"rank 0: expected client\(\) before the first step"
        ):
            session.client(0)


def test_a_client_that_leaves_in_mid_run_is_waited_for_no_more() -> None:
    made = job(until=12)
    alone = run(made, "local")
    with launch(made, prefetch=2, constructor_hosts=2) as session:
        clients = [session.client(rank) for rank in range(2)]
        first = [[written(next(client)) for client in clients] for _ in range(3)]
        assert list(map(list, zip(*first, strict=True))) == [alone.steps[r][:3] for r in range(2)]
        clients[1].close()
        assert [written(step) for step in clients[0]] == alone.steps[0][3:]
        with pytest.raises(OverlordError, match="the client of rank 1 is closed"):
            next(clients[1])


def stalls(session: ov.Session, client: ov.Client, words: str) -> None:
    """It gets nothing and can say why; who is asked for that may be late in saying it."""
    set_stall(client, limit_s=0.5)
    with pytest.raises(DataStall):
        next(client)
    set_stall(client, limit_s=WAIT_S)
    until(lambda: re.search(words, running_job(session).waiting_for(client.rank)))


@pytest.mark.parametrize(
    "place",
    [ov.ClientPlaceTree(dp=3), ov.ClientPlaceTree(dp=1, tp=3)],
    ids=["of another group", "of the same group"],
)
def test_a_slow_rank_holds_up_others_at_the_end_of_the_window_and_they_can_say_who(
    place: ov.ClientPlaceTree,
) -> None:
    made = job(place=place)
    alone = run(made, "local")
    with launch(made, prefetch=3) as session:
        clients = [session.client(rank) for rank in range(3)]
        got = {
            0: [written(next(clients[0])) for _ in range(3)],
            1: [written(next(clients[1]))],
            2: [written(next(clients[2]))],
        }
        got[0].append(written(next(clients[0])))
        stalls(
            session,
            clients[0],
            r"rank [12], which holds 3 steps it has not taken \(it took step 0 last\)",
        )
        got[1] += [written(next(clients[1])) for _ in range(3)]
        stalls(
            session,
            clients[1],
            r"rank 2, which holds 3 steps it has not taken \(it took step 0 last\)",
        )
        held = heard(session)["memory"]
        assert held["slabs"] <= 5 * 2**16, "steps are kept once, and no more than the window has"
        for _ in range(17):
            got[2].append(written(next(clients[2])))
            for rank in (0, 1):
                if len(got[rank]) < 18:
                    got[rank].append(written(next(clients[rank])))
        assert got == alone.steps
        assert heard(session)["memory"]["slabs"] <= 5 * 2**16, "slots are filled again"


class Gate:
    """A map that waits until a file is there; a module's class, so that it can be sent."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __call__(self, columns: Any) -> Any:
        while not Path(self.path).exists():
            time.sleep(0.02)
        return columns


def gated(path: Path, **changes: Any) -> ov.Job:
    slow = ov.Source(
        "slow", rows(40, 0), transforms=[ov.Map(Gate(path)), ov.Tokens("tokens")], epochs=1
    )
    return job(sources=[source("a", 60, 1000), slow, source("b", 60, 2000)], until=4, **changes)


def test_who_waits_is_told_for_which_source_in_which_process(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    said: list[str] = []
    with launch(
        gated(gate),
        sources_per_host=1,
        hosts=4,
        stall_warn_s=0.2,
        stall_limit_s=1.0,
        on_stall=lambda w, s: said.append(w),
    ) as session:
        client = session.client(0)
        with pytest.raises(DataStall) as stall:
            next(client)
        where = next(a["pid"] for a in session.metrics()["actors"] if a["name"] == "loader/slow/1")
        host = next(name for name, pid in workers_of(session).items() if pid == where)
        inside = r"loader/slow/1 is in Map\(Gate\) for \d+ s, with rows 0 to 7 "
        now = until(
            lambda: (
                found if re.search(inside, found := running_job(session).waiting_for(0)) else None
            )
        )
        asked = [
            words for words in (stall.value.waiting_for, *said) if "loader/slow/1 is" in words
        ]  # its worker had answered in time
        for words in (now, *asked):
            assert "samples that step 0 draws" in words
            assert "source 'slow'" in words
            assert re.search(rf"loader/slow/1 is reading|{inside}", words), (
                "from a second on in what"
            )
            assert f" in {host}" in words
        assert (stall.value.step, stall.value.rank) == (0, 0)
        assert said
        gate.touch()
        set_stall(client, limit_s=WAIT_S)
        assert next(client).step == 0, "a stall is no end"


def test_questions_are_answered_while_a_trainer_waits(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    with launch(gated(gate), sources_per_host=1, hosts=4) as session:
        clients = [session.client(rank) for rank in range(2)]
        got: list[list[Any]] = [[], []]
        threads = [
            threading.Thread(target=lambda r=r: got[r].extend(map(written, clients[r])))
            for r in range(2)
        ]
        for thread in threads:
            thread.start()
        until(
            lambda: any(
                a["state"].startswith(("reading", "in Map")) for a in session.metrics()["actors"]
            )
        )
        before = time.monotonic()
        assert [len(client.queue) for client in clients] == [0, 0]
        for _ in range(20):
            session.metrics()
            session.summary_buffer()
        gate.touch()
        for thread in threads:
            thread.join(30)
        assert time.monotonic() - before < 20, (
            "whoever asks waits for no step, and no step for whoever asks"
        )
    assert got == list(run(gated(gate), "local").steps.values())


def test_metrics_tell_of_every_process() -> None:
    made = job()
    with launch(
        made, sources_per_host=1, hosts=4, constructor_hosts=2, loaders={"b": 2}
    ) as session:
        play(session, steps=6)
        found = heard(session)
        hosts = {a["name"]: a for a in found["actors"] if a["role"] == "host"}
        assert sorted(hosts) == [
            "constructor-worker/0",
            "constructor-worker/1",
            *(f"loader-worker/{h}" for h in range(4)),
        ]
        assert {a["state"] for a in hosts.values()} == {"running"}
        pids = {a["pid"] for a in hosts.values()}
        assert len(pids) == 6
        of_role = {
            role: {a["pid"] for a in found["actors"] if a["role"] == role}
            for role in ("loader", "constructor")
        }
        assert of_role["loader"] == {
            a["pid"] for name, a in hosts.items() if name.startswith("loader")
        }
        assert of_role["constructor"] == {
            a["pid"] for name, a in hosts.items() if name.startswith("constructor")
        }
        assert all(s["read_s"] > 0 for s in found["sources"].values())
        memory = found["memory"]
        assert memory["pss"] > sum(2**20 for _ in pids)
        assert memory["slabs"] > 0
        assert memory["sending"] > 0
        assert memory["ready"] > 0
        assert found["files"]["reads"] > 0, "of all processes together"
        assert {r: c["steps"] for r, c in found["clients"].items()} == {0: 6, 1: 6}


def test_a_worker_that_hangs_is_named_and_nothing_is_missing_in_what_is_told(alone: Played) -> None:
    with launch(job(until=200), sources_per_host=1, hosts=4) as session:
        session.move("b", "loader-worker/0")
        first, hosts = play(session, steps=2), workers_of(session)
        halt(hosts["loader-worker/0"])
        clients = [session.client(rank) for rank in range(2)]
        try:
            for client in clients:
                set_stall(client, limit_s=1.5)
            then = play(session)
            assert "DataStall" in then.error
            until(
                lambda: re.search(
                    "more of source 'b'|payload of loader-worker/0",
                    running_job(session).waiting_for(0) + running_job(session).waiting_for(1),
                )
            )
            loaders = {
                a["name"]: a["state"] for a in session.metrics()["actors"] if a["role"] == "loader"
            }
            assert list(loaders) == ["loader/a/0", "loader/b/1", "loader/c/2"]
            assert loaders["loader/b/1"] == "unknown: loader-worker/0 does not answer"
            assert session.graph(1).loader[0] in loaders
        finally:
            os.kill(hosts["loader-worker/0"], signal.SIGCONT)
        for client in clients:
            set_stall(client, limit_s=WAIT_S)
        done = play(session, steps=3)
        for rank, steps in alone.steps.items():
            got = first.steps[rank] + then.steps[rank] + done.steps[rank]
            assert got == steps[: len(got)]


def test_metrics_tell_of_clients_elsewhere() -> None:
    with launch(job(), build_ahead=3) as session:
        served = session.serve()
        clients = [ov.connect(served.address, rank, served.token) for rank in range(2)]
        for _ in range(3):
            for client in clients:
                next(client)
        until(
            lambda: (
                {r: (c["steps"], c["ready"]) for r, c in session.metrics()["clients"].items()}
                == {0: (3, 3), 1: (3, 3)}
            )
        )
        assert all(c["waited_s"] > 0 for c in session.metrics()["clients"].values())
        for client in clients:
            client.close()


def test_plans_graphs_and_explanations_are_those_of_one_process() -> None:
    made = job()
    answers = []
    for runtime in RUNTIMES:
        with launch(made, runtime, loaders={"b": 2}, sources_per_host=1, hosts=4) as session:
            play(session, steps=4)
            graph, plan = session.graph(3), session.plan(3)
            known = session.summary_buffer()
            assert len(known)
            answers.append(
                (
                    plan.digest(),
                    str(session.explain(3)),
                    str(session.explain(plan.sample_id(0))),
                    [graph.loader[i] for i in range(len(plan))],
                )
            )
    assert answers[0] == answers[1]


def test_two_sessions_in_one_process_and_one_launched_in_a_thread() -> None:
    made, other = job(until=6), job(until=6, seed=12)
    outcome: list[Any] = []

    def third() -> None:
        with launch(other) as session:
            outcome.append(play(session))

    thread = threading.Thread(target=third)
    with launch(made) as one, launch(other) as two:
        thread.start()
        assert workers_of(one).keys() == workers_of(two).keys()
        assert not set(workers_of(one).values()) & set(workers_of(two).values())
        clients = [s.client(rank) for s in (one, two) for rank in range(2)]
        got = [[written(step) for step in steps] for steps in zip(*clients, strict=True)]
        left = [*workers_of(one).values(), *workers_of(two).values()]
    thread.join(30)
    wanted = [run(made, "local"), run(other, "local")]
    assert [[g[i] for g in got] for i in range(4)] == [
        steps for w in wanted for steps in w.steps.values()
    ]
    assert outcome == [wanted[1]]
    assert not workers_left(left, 2.0)


def test_a_long_run_uses_the_memory_of_a_short_one() -> None:
    made = job(until=120, batch=ov.Batch(samples=60, context=32))
    with launch(made, hosts=1) as session:  # each worker has a window of its own
        clients = [session.client(rank) for rank in range(2)]
        seen = []
        for k, steps in enumerate(zip(*clients, strict=True)):
            assert [step.step for step in steps] == [k, k]
            if k in (20, 119):
                seen.append(heard(session)["memory"])
    slot, window = 2**16, 4 + 2  # a step is smaller than the smallest slot
    assert all(
        0 < memory[what] <= window * slot for memory in seen for what in ("slabs", "sending")
    ), seen


def test_whoever_keeps_all_it_gets_stops_nobody() -> None:
    made = job(until=40)
    with launch(made) as session:
        clients = [session.client(rank) for rank in range(2)]
        kept: list[list[ov.Step]] = [[], []]
        for steps in zip(*clients, strict=True):
            for rank, step in enumerate(steps):
                kept[rank].append(step)
        got = {rank: [written(step) for step in kept[rank]] for rank in range(2)}
    assert got == run(made, "local").steps
    assert {rank: [written(step) for step in kept[rank]] for rank in range(2)} == got, (
        "and what was got stays when the session is closed"
    )


@pytest.mark.parametrize(
    "keeps", [False, True], ids=["hand back all they get", "keep all they get"]
)
def test_less_shared_memory_than_the_window_needs_stops_nobody_whose_trainers(keeps: bool) -> None:
    made = job(until=30)
    alone = run(made, "local")
    with launch(made, ring_bytes=4 * 2**16, stall_limit_s=10) as session:
        clients, kept = [session.client(rank) for rank in range(2)], list[Any]()
        for i in range(30):
            steps = [next(client) for client in clients]
            assert [written(step) for step in steps] == [alone.steps[rank][i] for rank in range(2)]
            kept += [list(step) for step in steps] if keeps else []
