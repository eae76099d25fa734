"""Another mesh in mid-run: the same samples in every step, none lost, none twice, on every runtime
that can.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import overlord as ov
from overlord.cluster import worker_pool
from overlord.errors import DataStall, JobError, OverlordError, PlanError
from overlord.session import reshard
from overlord.session.reshard import paused_at_one_step
from overlord.session.rewind import begin_generation
from tests.internals import generation_of, running_job
from tests.processes import WAIT_S, launch, until
from tests.scenarios.test_process import job as small_job
from tests.sizes import on_runtimes

RUNTIMES = ("local", "process", "ray")


def job(**changes: Any) -> ov.Job:
    return small_job(**{"until": 12, **changes})


def samples(step: ov.Step) -> Counter[Any]:
    return Counter(piece.sample for microbatch in step for piece in microbatch.samples)


def of_all(clients: dict[int, Any]) -> tuple[int, Counter[Any]]:
    """A step as all ranks of a mesh get it: its number, and the samples, by data-parallel group
    once.
    """
    steps = [next(client) for client in clients.values()]
    assert len({step.step for step in steps}) == 1
    return steps[0].step, sum((samples(step) for step in steps), Counter())


def undisturbed(made: ov.Job) -> dict[int, Counter[Any]]:
    with launch(made, "local") as session:
        clients = {r: session.client(r) for r in range(made.place.world_size)}
        found = {}
        while True:
            try:
                number, got = of_all(clients)
            except StopIteration:
                return found
            found[number] = got


@pytest.mark.parametrize(("runtime", "dp"), on_runtimes({"1": 1, "3": 3, "4": 4}, RUNTIMES, ("3",)))
def test_every_step_has_the_samples_it_would_have_had(runtime: str, dp: int) -> None:
    made = job()
    wanted = undisturbed(made)
    with launch(made, runtime) as session:
        clients = {r: session.client(r) for r in range(made.place.world_size)}
        found = dict(of_all(clients) for _ in range(4))
        assert session.reshard(ov.ClientPlaceTree(dp=dp)) == 4
        assert session.job.place.world_size == dp
        clients = {r: session.client(r) for r in range(dp)}
        found |= dict(of_all(clients) for _ in range(len(wanted) - 4))
        with pytest.raises(StopIteration):
            next(clients[0])
    assert found == wanted


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_clients_of_ranks_that_stay_go_on_and_those_of_others_are_told(runtime: str) -> None:
    made = job()
    with launch(made, runtime) as session:
        first, second = session.client(0), session.client(1)
        next(first), next(second)
        session.reshard(ov.ClientPlaceTree(dp=1))
        assert next(first).step == 1
        with pytest.raises(OverlordError, match="rank 1 is not in the mesh any more"):
            next(second)
        with pytest.raises(JobError, match=r"expected a rank from 0 to 0 .*, got 1"):
            session.client(1)


@pytest.mark.parametrize(("runtime", "dp"), on_runtimes({"1": 1, "3": 3}, RUNTIMES, ("1",)))
def test_a_state_that_is_loaded_behind_it_is_gone_on_from_under_the_new_mesh(
    runtime: str, dp: int
) -> None:
    """It was gone on from under the mesh of launch: ranks that were not in it were lost, and
    samples with ranks that are gone.
    """
    made = job()
    wanted = undisturbed(made)
    with launch(made, runtime) as session:
        clients = {r: session.client(r) for r in range(made.place.world_size)}
        of_all(clients)
        before = session.state_dict()
        of_all(clients)
        session.reshard(ov.ClientPlaceTree(dp=dp))
        clients = {r: session.client(r) for r in range(dp)}
        of_all(clients)
        session.load_state_dict(before)
        assert session.job.place.world_size == dp
        assert [of_all(clients) for _ in range(3)] == [(step, wanted[step]) for step in (1, 2, 3)]
        behind = clients[0].state_dict()
        of_all(clients)
        for client in clients.values():
            client.load_state_dict(behind)
        assert of_all(clients) == (4, wanted[4])


def test_it_can_be_done_again_and_again_and_a_state_of_it_is_as_any_other() -> None:
    made = job()
    wanted = undisturbed(made)
    found: dict[int, Counter[Any]] = {}
    with launch(made, "local") as session:
        for dp in (2, 4, 1, 3, 2):
            if dp != session.job.place.dp:
                session.reshard(ov.ClientPlaceTree(dp=dp))
            clients = {r: session.client(r) for r in range(dp)}
            found |= dict(of_all(clients) for _ in range(2))
        state = clients[0].state_dict()
    with launch(made, "local", resume=state) as session:
        clients = {r: session.client(r) for r in range(made.place.world_size)}
        found |= dict(of_all(clients) for _ in range(len(wanted) - len(found)))
    assert found == wanted


def test_what_was_said_before_holds_behind_it() -> None:
    made = job()
    names = made.names
    weights = {names[0]: 1.0, names[1]: 5.0}

    def run(reshard: bool) -> dict[int, Counter[Any]]:
        with launch(made, "local") as session:
            clients = {r: session.client(r) for r in range(2)}
            session.set_mixture(weights, at=8)
            found = dict(of_all(clients) for _ in range(3))
            if reshard:
                session.reshard(ov.ClientPlaceTree(dp=1))
                clients = {0: session.client(0)}
            return found | dict(of_all(clients) for _ in range(9))

    assert run(True) == run(False)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_rank_that_is_behind_is_waited_for(runtime: str) -> None:
    made = job()
    wanted = undisturbed(made)
    with launch(made, runtime) as session:
        quick, slow = session.client(0), session.client(1)
        got = [next(quick), next(quick)]
        late = [next(slow)]
        done: list[int] = []
        thread = threading.Thread(
            target=lambda: done.append(session.reshard(ov.ClientPlaceTree(dp=1)))
        )
        thread.start()
        late.append(next(slow))
        thread.join(30)
        assert done == [2]
        assert [samples(a) + samples(b) for a, b in zip(got, late, strict=True)] == [
            wanted[0],
            wanted[1],
        ]
        assert samples(next(quick)) == wanted[2]


def test_a_rank_that_stays_behind_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reshard, "WARN_S", 0.0)
    with launch(job(), "local") as session:
        quick, slow = session.client(0), session.client(1)
        next(quick), next(quick), next(slow)
        with pytest.raises(
            DataStall,
            match=r"rank 1 to take step 1 before the mesh is changed; .* let the "
            r"slower ones take",
        ):
            session.reshard(ov.ClientPlaceTree(dp=1), timeout_s=1.0)
        [said] = [r.message.partition(";")[0] for r in caplog.records]
        assert said.startswith("reshard has waited ")
        assert said.endswith(" s for rank 1 to take step 1")
        assert next(slow).step == 1, "nothing has changed"
        assert next(quick).step == 2


def test_what_is_wrong_is_told_and_changes_nothing() -> None:
    with launch(job(), "local") as session:
        clients = {r: session.client(r) for r in range(2)}
        of_all(clients)
        with pytest.raises(PlanError, match="got rank 0 after step 0"):
            session.reshard(ov.ClientPlaceTree(dp=1), at=0)
        with pytest.raises(JobError, match="expected a ClientPlaceTree"):
            session.reshard(4)  # type: ignore[arg-type]
        with pytest.raises(JobError, match="multiple"):
            session.reshard(ov.ClientPlaceTree(dp=1, cp=7))
        assert of_all(clients)[0] == 1
    with pytest.raises(OverlordError, match="closed"):
        session.reshard(ov.ClientPlaceTree(dp=1))


def test_a_step_that_is_not_the_trainers_yet_comes_from_the_new_mesh() -> None:
    """A rank may have a step in its hands when the mesh changes: it must be neither lost nor handed
    out twice.
    """
    made = job()
    wanted = undisturbed(made)
    place = ov.ClientPlaceTree(dp=1)
    with launch(made, "local", prefetch=1) as session:
        clients = {r: session.client(r) for r in range(2)}
        of_all(clients)
        until(lambda: len(clients[0].queue))
        box: list[ov.Step] = []
        with (
            running_job(session).switching,
            paused_at_one_step(running_job(session), None, WAIT_S) as state,
        ):
            thread = threading.Thread(target=lambda: box.append(next(clients[0])))
            thread.start()
            until(lambda: not len(clients[0].queue))
            blueprint = generation_of(session).prepared.placed(place)
            begin_generation(running_job(session), blueprint, state, "", together=True)
        thread.join(WAIT_S)
        assert samples(box[0]) == wanted[1]
        assert samples(next(clients[0])) == wanted[2]


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_connected_clients_go_on_and_new_ranks_may_connect(
    runtime: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        worker_pool, "CLOSE_S", WAIT_S
    )  # the workers of each mesh end; one that takes long on a busy machine is no alarm
    monkeypatch.setattr(reshard, "WARN_S", WAIT_S)
    caplog.set_level(logging.INFO, "overlord")
    made = job()
    wanted = undisturbed(made)
    with launch(made, runtime) as session:
        served = session.serve()
        clients = {r: ov.connect(served, r, served.token) for r in range(2)}
        found = dict(in_parallel(clients) for _ in range(3))
        with pytest.raises(JobError, match="expected the first step of the new mesh, got None"):
            session.reshard(ov.ClientPlaceTree(dp=3))
        assert session.reshard(ov.ClientPlaceTree(dp=3), at=3) == 3
        clients[2] = ov.connect(served, 2, served.token)
        found |= dict(in_parallel(clients) for _ in range(2))
        assert session.reshard(ov.ClientPlaceTree(dp=1), at=5) == 5
        with pytest.raises(OverlordError, match="rank 2 is not in the mesh any more"):
            list(clients[2])  # behind the steps it holds already
        found |= dict(in_parallel({0: clients[0]}) for _ in range(len(wanted) - 5))
        for client in clients.values():
            client.close()
    assert found == wanted
    assert [r.message for r in caplog.records if r.levelno >= logging.WARNING] == [], (
        "what is meant alarms nobody"
    )
    if runtime == "process":
        said = "\n".join(r.message for r in caplog.records)
        assert (
            "rank 0: connection to the constructor of rank 0 lost: connection closed by the session "
            "(rewind, reshard or end)" in said
        )
        assert "rank 0: reconnected to the constructor of rank 0 after" in said


def in_parallel(clients: dict[int, Any]) -> tuple[int, Counter[Any]]:
    """As trainers do: each in its own thread."""
    with ThreadPoolExecutor(len(clients)) as pool:
        steps = list(pool.map(next, clients.values()))
    assert len({step.step for step in steps}) == 1
    return steps[0].step, sum((samples(step) for step in steps), Counter())
