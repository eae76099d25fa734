"""Stories of jobs without constructors: loader hosts send to clients, each builds for itself, and
the stream is what it always is.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

import overlord as ov
from overlord.client.direct import DirectInbox, OwnConstructor
from overlord.errors import ActorLost, JobError, LinkRefused, OverlordError
from overlord.transport.connect import dial
from overlord.transport.connection import CLOSES
from tests.processes import WAIT_S, stalls_for, until
from tests.scenarios.test_serving import TAKE_ALL, as_json, closing, found, join_all, trainer
from tests.unit.test_session import content, in_thread, job, launch, rest, rows, take, whole_run

pytestmark = pytest.mark.timeout(200)
WORLD = ov.ClientPlaceTree(dp=2, tp=2)


def direct(made: ov.Job, **options: Any) -> ov.Session:
    return launch(
        made,
        **{"runtime": "process", "constructors": False, "stall_limit_s": 2 * WAIT_S, **options},
    )


def marked(samples: ov.Popped) -> ov.Ragged:
    return ov.Ragged(samples.tokens.values + 1, samples.tokens.offsets)


def remade(assembly: ov.Assembly) -> list[Any]:
    return list(assembly.build())


def side_by_side(clients: list[ov.Client]) -> Iterator[tuple[ov.Step, ...]]:
    """Step after step, to the end of all."""
    return zip(*clients, strict=False)


def contents(clients: list[ov.Client]) -> list[list[Any]]:
    """Of each to its end."""
    steps = [[content(s) for s in row] for row in side_by_side(clients)]
    return [[row[rank] for row in steps] for rank in range(len(clients))]


# The stream


@pytest.mark.parametrize(
    "changes",
    [{}, {"look_ahead": 3}, {"hooks": [ov.loader_do_plan(marked)]}],
    ids=["plain", "look-ahead", "hook"],
)
def test_every_rank_of_every_group_gets_what_it_gets_with_constructors(
    changes: dict[str, Any],
) -> None:
    made = job(n=60, place=WORLD, **changes)

    def seen(step: ov.Step) -> tuple[Any, ...]:
        return (
            content(step),
            [mb.samples for mb in step],
            step.plan_digest,
            step.global_valid_tokens,
        )

    def all_of_it(**options: Any) -> list[Any]:
        with launch(made, stall_limit_s=2 * WAIT_S, **options) as session:
            clients = [session.client(r) for r in range(4)]
            return [[seen(step) for step in row] for row in side_by_side(clients)]

    assert all_of_it(runtime="process", constructors=False, broadcast=False) == all_of_it(
        broadcast=False
    )


def test_trainers_in_other_processes_build_for_themselves_beside_one_in_the_sessions() -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with direct(job(n=60)) as session:
        here = session.client(0)
        there = trainer(session.serve(), 1, TAKE_ALL)
        assert rest(here) == wanted[0]
        assert found(there) == as_json(wanted[1])


def test_a_source_that_joins_reaches_every_client() -> None:
    made = job(n=40)
    more = ov.Source("c", rows(40, 2000), transforms=[ov.Tokens("tokens")], epochs=1, weight=2.0)
    days = []
    for start in (launch, direct):
        with start(made) as session:
            clients = [session.client(r) for r in range(2)]
            session.add_source(more, at=4)
            days.append(contents(clients))
    assert days[0] == days[1]
    assert len(days[0][0]) > 40 * 2 // 8


# Who is there


def test_no_step_is_planned_before_all_are_there_and_the_missing_are_named() -> None:
    with direct(job(n=60)) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token, stall_limit_s=0.3) as first:
            stalls_for(
                first,
                "the clients of ranks 1: without constructors no step is planned before "
                "all have come",
            )
            first._limit_s = 2 * WAIT_S
            assert session.metrics()["planned_steps"] == 0
            with ov.connect(served, 1, served.token) as second:
                assert [content(next(second))[0], content(next(first))[0]] == [0, 0]


def test_the_slowest_rank_is_named_to_any_other() -> None:
    with direct(job(place=WORLD), broadcast=False) as session:
        clients = [session.client(r) for r in range(4)]
        for client in clients[:3]:
            take(client, 3)
        for client in clients[:3]:
            client._limit_s = 0.1
            stalls_for(client, "rank 3, which holds 3 steps")


def test_before_the_first_step_a_second_client_of_a_rank_takes_the_place_of_the_first() -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with direct(job(n=60)) as session:
        served = session.serve()
        first = ov.connect(served, 0, served.token)
        clients = join_all(served, 2)
        with pytest.raises(OverlordError, match="another client of this rank has connected"):
            next(first)
        assert contents(clients) == wanted
        closing(clients)


def test_when_a_client_leaves_the_others_go_on_without_it() -> None:
    wanted = whole_run(job(n=60), 0)
    with direct(job(n=60)) as session:
        stays, leaves = session.client(0), session.client(1)
        got = take(stays, 2)
        leaves.close()
        assert got + rest(stays) == wanted
        until(lambda: session.metrics()["transfer"]["loader-host/0"].get("links") == 1)


def killed(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)
    process.wait(WAIT_S)


def test_a_client_that_is_killed_ends_the_job_by_name_and_a_state_brings_all_back() -> None:
    made = job(n=60)
    wanted = [whole_run(made, rank) for rank in range(2)]
    with direct(made) as session:
        served = session.serve()
        with ov.connect(served, 0, served.token) as client:
            there = trainer(
                served, 1, "next(client); next(client); print('took', flush=True); time.sleep(60)"
            )
            assert there.stdout is not None
            assert take(client, 2) == wanted[0][:2]
            state = client.state_dict()
            assert there.stdout.readline() == "took\n"
            killed(there)
            got: list[Any] = []
            with pytest.raises(ActorLost, match="client/1 is lost"):
                got += [content(step) for step in client]
            assert got == wanted[0][2 : 2 + len(got)], "what had been sent is taken first"
            again = ov.connect(served, 1, served.token)
            with pytest.raises(
                OverlordError, match="the steps that were sent to this rank are gone"
            ):
                next(again)
            again.load_state_dict(json.loads(json.dumps(state)))
            client.load_state_dict(state)
            assert contents([client, again]) == [w[2:] for w in wanted]
            again.close()


def test_a_loader_host_that_is_killed_is_named_to_every_client() -> None:
    with direct(job(n=4000)) as session:
        clients = [session.client(r) for r in range(2)]
        for client in clients:
            take(client, 2)
        threads = [in_thread(lambda client=client: rest(client)) for client in clients]
        session.kill("loader-host/0")
        for thread, got in threads:
            thread.join(WAIT_S)
            assert isinstance(got[0], ActorLost), got
            assert got[0].name == "loader-host/0"
        with pytest.raises(JobError, match="a client lives in its trainer's process"):
            session.kill("client/0")


# States


def test_ranks_go_back_to_a_state_one_after_another() -> None:
    with direct(job(n=60)) as session:
        clients = join_all(session.serve(), 2)
        take(clients[0], 2), take(clients[1], 2)
        state = clients[0].state_dict()
        assert clients[1].state_dict() == state
        wanted = [take(c, 3) for c in clients]
        clients[0].load_state_dict(state)
        with pytest.raises(OverlordError, match="another rank moved the session"):
            rest(clients[1])
        clients[1].load_state_dict(state)
        clients[1].load_state_dict(state)  # it stands there already, and keeps what it was sent
        assert [take(c, 3) for c in clients] == wanted
        closing(clients)


def closing_once(monkeypatch: pytest.MonkeyPatch) -> list[LinkRefused]:
    """The next one who dials finds a planner that closes, since the session is being moved; where
    it is then is told a moment later.
    """
    once, dials = [LinkRefused("the old one", CLOSES)], OwnConstructor._dial

    def closing(own: OwnConstructor, address: str, token: str) -> Any:
        if once:
            raise once.pop()
        return dials(own, address, token)

    monkeypatch.setattr(OwnConstructor, "_dial", closing)
    return once


def test_a_rank_whose_planner_closes_asks_again_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with direct(job(n=60)) as session:
        clients = join_all(session.serve(), 2)
        take(clients[0], 2), take(clients[1], 2)
        state = clients[0].state_dict()
        wanted = [take(c, 3) for c in clients]
        once = closing_once(monkeypatch)
        clients[1]._inbox._own._link.close()  # type: ignore[attr-defined]
        with pytest.raises(
            OverlordError, match="load a saved state"
        ):  # of the planner, which is still the same
            rest(clients[1])
        assert once == []
        for client in clients:
            client.load_state_dict(state)
        assert [take(c, 3) for c in clients] == wanted
        closing(clients)


def test_who_connects_while_another_rank_moves_the_session_gets_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with direct(job(n=60)) as session:
        served = session.serve()
        once = closing_once(monkeypatch)
        clients = join_all(served, 2)
        assert once == []
        assert contents(clients) == wanted
        closing(clients)


def test_a_session_that_is_moved_moves_its_clients_wherever_they_are() -> None:
    with direct(job(n=60)) as session:
        here = session.client(0)
        served = session.serve()
        with ov.connect(served, 1, served.token) as there:
            clients = [here, there]
            for client in clients:
                take(client, 2)
            state = here.state_dict()
            wanted = [take(c, 3) for c in clients]
            session.load_state_dict(state)
            threads = [in_thread(lambda c=c: take(c, 3)) for c in clients]
            for thread, _ in threads:
                thread.join(WAIT_S)
            assert [got for _, (got,) in threads] == wanted
            assert here.state_dict() == there.state_dict() != state


# What it costs


def test_links_and_bytes_grow_with_the_ranks_of_a_group() -> None:
    def cost(**options: Any) -> tuple[int, int]:
        with launch(
            job(n=60, place=WORLD), runtime="process", hosts=2, stall_limit_s=2 * WAIT_S, **options
        ) as session:
            for row in side_by_side([session.client(r) for r in range(4)]):
                assert len({step.step for step in row}) == 1
            transfer = until(lambda: all_of(session.metrics()["transfer"]))
            loaders = [row for name, row in transfer.items() if name.startswith("loader-host/")]
            clients = {name: row for name, row in transfer.items() if name.startswith("client/")}
            if not options["constructors"]:
                assert set(clients) == {f"client/{r}" for r in range(4)}
                assert all(
                    row["links"] == len(loaders) + 1 and row["pss"] > 0 for row in clients.values()
                )
                assert sum(row["received_bytes"] for row in clients.values()) == sum(
                    row["sent_bytes"] for row in loaders
                )
            return sum(row["links"] for row in loaders) // len(loaders), sum(
                row["sent_bytes"] for row in loaders
            )

    def all_of(transfer: dict[str, dict[str, int]]) -> dict[str, dict[str, int]] | None:
        """When all have told: of one that stands for a moment the row is empty."""
        return transfer if all("links" in row for row in transfer.values()) else None

    links, nbytes = cost(constructors=True, constructor_hosts=2)
    assert (links, nbytes > 0) == (2, True)
    assert cost(constructors=False, broadcast=False) == (4, 2 * nbytes)
    assert cost(constructors=False) == (4, nbytes), "payload goes to the ranks that fetch"


# What cannot be


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"constructors": False},
            "constructors: False is for runtime='process', where it is measured; in one "
            "process there is no hop",
        ),
        ({"constructors": 0, "runtime": "process"}, "constructors: expected True or False, got 0"),
    ],
)
def test_what_cannot_be_is_said_at_launch(options: dict[str, Any], says: str) -> None:
    with pytest.raises(JobError) as refused:
        ov.launch(job(), **options)
    assert says in str(refused.value)


def test_clients_live_on_the_machine_of_the_session() -> None:
    with direct(job()) as session:
        with pytest.raises(
            JobError,
            match="host: without constructors payload goes to clients through shared memory",
        ):
            session.serve(host="0.0.0.0")
        assert session.serve().address.startswith("overlord://127.0.0.1:")


def test_constructor_hooks_need_constructors() -> None:
    with pytest.raises(
        JobError, match="code does not travel to them: leave out the job's constructor_do_plan"
    ):
        direct(job(hooks=[ov.constructor_do_plan(remade)]))


# Links that come twice, or not at all


def test_a_client_that_is_announced_twice_before_the_first_step_is_sent_all_of_it() -> None:
    wanted = [whole_run(job(n=60), rank) for rank in range(2)]
    with direct(job(n=60)) as session:
        clients = [session.client(r) for r in range(2)]
        host: Any = session._host
        for rank in range(
            2
        ):  # as when its link to the planner was cut, or a source joined at that moment
            session._pump.ask(lambda rank=rank: host._came(host._constructors[rank]), "the pump")
        assert contents(clients) == wanted


def test_a_client_that_no_loader_host_can_reach_ends_the_job_by_name() -> None:
    with direct(job(n=60)) as session:
        served = session.serve()
        address, token = session._host.address_for(1)  # type: ignore[attr-defined]
        hello = {
            "role": "constructor",
            "rank": 1,
            "generation": 0,
            "address": "overlord://127.0.0.1:0/nobody0000000000",
            "pid": os.getpid(),
        }
        link, _ = dial(address, token, hello, timeout_s=WAIT_S)
        with (
            link,
            ov.connect(served, 0, served.token) as client,
            pytest.raises(ActorLost, match="client/1 is lost"),
        ):
            rest(client)


def test_a_client_that_is_closed_while_it_looks_for_the_planner_leaves_no_link_behind() -> None:
    with direct(job(dp=1)) as session:
        address, token = session._host.address_for(0)  # type: ignore[attr-defined]
        boxes: list[DirectInbox] = []

        def where(generation: int) -> tuple[str, str]:
            boxes[0].end(OverlordError("closed"), drop=True)
            return address, token

        boxes.append(DirectInbox(rank=0, address=address, token=token, where=where, generation=0))
        own = boxes[0]._own
        assert own is not None
        first = own._link
        own._find_again(OverlordError("the link broke"))
        assert own._link is not first
        with pytest.raises(ActorLost):
            own._link.recv(WAIT_S)


def test_why_a_rank_waits_can_be_asked_though_its_client_never_came() -> None:
    with direct(job(dp=1)) as session:
        assert session._why(0) == "client/0, which is not there"
