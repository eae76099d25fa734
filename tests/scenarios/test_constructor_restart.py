"""A constructor worker that is started anew in the middle of a job: it knows nothing, and its
clients go on without a gap or a repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from overlord.client import remote_queue
from overlord.client.remote_queue import LONGEST_PAUSE_S, RemoteStepQueue
from overlord.cluster.constructor_worker import ConstructorWorker
from overlord.cluster.worker import WorkerConfig
from overlord.errors import ActorLost, DataStall, FrameError, LinkRefused, OverlordError
from overlord.mesh import Batch
from overlord.messages.control import STRIDE, Attach, Detach, EndOfJob, Rollback, StepsAcked
from overlord.messages.data import StepPayload
from overlord.transport.connection import CLOSES, Connection, open_connection
from tests.internals import connect_at, connection_of, drop_connection, serve_clients
from tests.processes import WAIT_S, until
from tests.scenarios.test_serving import by_tcp
from tests.unit.test_payload_gather import documents, placed

pytestmark = pytest.mark.timeout(200)

G = STRIDE


class Started:
    """A constructor worker in this process, and what it has told the coordinator."""

    def __init__(self) -> None:
        settings = WorkerConfig(name="again", token="t", build_ahead=8, check=True, failover=True)
        self.host = ConstructorWorker(0, settings, {0: (0, 1)}, Batch(samples=4, context=32), 1, ())
        self.told: list[Any] = []
        self._asked: Future[list[Any]] = self.host.events()
        self.loader = self.loader_link(1)

    def loader_link(self, incarnation: int, host: int = 3) -> Connection:
        return open_connection(
            self.host.address(),
            "t",
            {"role": "loader", "host": host, "incarnation": incarnation},
            timeout_s=WAIT_S,
        )[0]

    def do(self, *messages: Any) -> None:
        self.host.do(list(messages))

    def plan(self, *steps: int, generation: int = G) -> None:
        self.do(*(replace(placed(step, [2], (3,)), generation=generation) for step in steps))

    def send(
        self, *steps: int, generation: int = G, value: int = 0, link: Connection | None = None
    ) -> None:
        for step in steps:
            (link or self.loader).send(
                StepPayload(step, 3, documents(2, first=value or 10 + step), generation)
            )

    def client(self, rank: int, next_step: int, taken: int | None = None) -> RemoteStepQueue:
        """One that was linked to another process before, and has the steps up to ``next_step``."""
        where = lambda generation: (self.host.address(), "t")  # noqa: E731
        box = RemoteStepQueue(
            rank=rank, address="", token="t", where=where, next_step=next_step, reconnect_s=WAIT_S
        )
        connect_at(box, next_step - 1 if taken is None else taken, until)
        return box

    def heard(self) -> dict[int, int]:
        """The last step that each rank took, as the coordinator was told."""
        if self._asked.done():
            self.told += self._asked.result()
            self._asked = self.host.events()
        said = [e for e in self.told if isinstance(e, StepsAcked)]
        return {rank: step for e in said for rank, step in zip(e.ranks, e.steps, strict=True)}

    def took(self, rank: int) -> int:
        return self.host.taken(rank)

    def close(self) -> None:
        self.loader.close()
        self.host.close()


@pytest.fixture
def anew() -> Iterator[Started]:
    """All ranks took step 4; it was started since."""
    made = Started()
    made.do(Rollback(G, 4), Attach(0), Attach(1))
    yield made
    made.close()


def take(box: RemoteStepQueue, n: int) -> list[int]:
    got = []
    for _ in range(n):
        found = box.get(WAIT_S)
        assert found is not None
        told, bucket = found
        assert bucket.microbatches[0]["tokens"].tolist() == [10 + told.step] * 2
        box.ack(told.step)
        got.append(told.step)
    return got


def test_clients_that_are_at_different_steps_go_on_where_they_are(anew: Started) -> None:
    with closing_all(anew.client(0, 8, taken=6), anew.client(1, 5)) as (
        ahead,
        behind,
    ):  # rank 0 has step 7, and has not taken it
        anew.plan(*range(5, 10))
        anew.send(*range(5, 10))
        assert take(ahead, 2) == [8, 9]
        assert take(behind, 5) == [5, 6, 7, 8, 9]
        until(lambda: anew.heard() == {0: 9, 1: 9})
    assert anew.host.metrics()["memory"]["assembled"] == 0
    assert [e for e in anew.told if not isinstance(e, StepsAcked)] == []


def closing_all(*boxes: RemoteStepQueue) -> Any:
    class All:
        def __enter__(self) -> tuple[RemoteStepQueue, ...]:
            return boxes

        def __exit__(self, *exc: object) -> None:
            for box in boxes:
                box.end(None, drop=True)

    return All()


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
def test_a_client_goes_from_one_that_died_to_the_next_without_a_gap_or_a_repeat(
    tcp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        remote_queue, "EARLY_DIAL_S", 10.0
    )  # the next one is there, and may stand for a moment
    first, second = Started(), Started()
    doors = [serve_clients(made.host, "t", host="127.0.0.1", tcp=tcp) for made in (first, second)]
    addresses = [by_tcp(door.address) if tcp else door.address for door in doors]
    there = [addresses[0]]
    first.do(Attach(0))
    first.plan(0, 1, 2, 3, generation=0)
    first.send(0, 1, 2, 3, generation=0)
    where = lambda generation: (there[0], "t")  # noqa: E731
    box = RemoteStepQueue(
        rank=0, address=there[0], token="t", where=where, next_step=0, reconnect_s=WAIT_S
    )
    with closing_all(box):
        assert connection_of(box) is not None
        assert connection_of(box).shares_memory != tcp
        assert take(box, 2) == [0, 1]
        until(lambda: len(box) == 2)
        doors[0].close()
        first.close()
        until(lambda: len(box) == 2 and connection_of(box) is None)
        there[0] = addresses[1]
        second.do(
            Rollback(G, 0), Attach(0)
        )  # that step 1 was taken was told to nobody but the dead
        second.plan(1, 2, 3, 4, 5)
        second.send(1, 2, 3, 4, 5)
        assert take(box, 1) == [2]
        assert connection_of(box) is not None, "who waits for its steps knows at once how far it is"
        until(lambda: second.took(0) == 2)
        assert take(box, 3) == [3, 4, 5]
        until(lambda: second.heard() == {0: 5})
    doors[1].close()
    second.close()


def test_a_client_that_is_ahead_counts_as_far_as_it_is_and_no_further(anew: Started) -> None:
    with closing_all(anew.client(0, 8, taken=7), anew.client(1, 8, taken=7)):
        until(lambda: (anew.took(0), anew.took(1)) == (4, 4))  # no step was planned here yet
        anew.plan(5, 6)
        anew.send(5, 6)
        until(lambda: anew.heard() == {0: 6, 1: 6})
        anew.plan(7)
        anew.send(7)
        until(lambda: anew.heard() == {0: 7, 1: 7})


def test_whoever_comes_for_a_client_that_died_gets_what_that_one_had_and_did_not_take(
    anew: Started,
) -> None:
    anew.plan(5, 6, 7, 8)
    anew.send(5, 6, 7, 8)
    first = anew.client(0, 8, taken=5)
    assert first.get(WAIT_S) is not None
    until(lambda: anew.took(0) == 5)
    drop_connection(first)
    with closing_all(anew.client(0, 6)) as (second,):
        assert take(second, 3) == [6, 7, 8]
    with pytest.raises(
        OverlordError,
        match=r"rank 1: .* got step 4, which was taken .* load a saved state on every rank",
    ):
        anew.client(1, 4).get(WAIT_S)


def test_a_worker_that_lives_goes_on_and_says_again_how_far_its_ranks_are() -> None:
    made = Started()
    try:
        made.do(Attach(0), Attach(1))
        made.plan(0, 1, 2, generation=0)
        made.send(0, 1, 2, generation=0)
        with closing_all(made.client(0, 0), made.client(1, 0)) as (one, two):
            assert take(one, 3) == [*take(two, 2), 2] == [0, 1, 2]
            until(lambda: made.heard() == {0: 2, 1: 1} or made.heard() == {0: 1, 1: 1})
            until(lambda: (made.took(0), made.took(1)) == (2, 1))
            made.told.clear()
            # of a coordinator that was started anew, and knows of step 0 only
            made.do(Rollback(G, 0))
            until(lambda: made.heard() == {0: 2, 1: 1})
            made.plan(1, 2, 3)
            made.send(1, 2, 3)
            assert take(two, 2) == [2, 3]
            assert take(one, 1) == [3]
    finally:
        made.close()


def test_a_coordinator_that_knows_of_less_than_the_one_before_it_rolled_back_to_hears_how_far_ranks_are() -> (
    None
):
    made = Started()
    try:
        made.do(Attach(0), Attach(1))
        made.plan(0, 1, generation=0)
        made.send(0, 1, generation=0)
        with closing_all(made.client(0, 0), made.client(1, 0)) as (one, two):
            assert take(one, 2) == take(two, 2) == [0, 1]
            until(lambda: made.heard() == {0: 1, 1: 1})
            made.do(
                Rollback(G, 1)
            )  # a loader was lost; the coordinator dies before it has written that all took step 1
            made.told.clear()
            made.do(Rollback(2 * G, 0))
            until(lambda: made.heard() == {0: 1, 1: 1})
            made.do(Detach(0), Detach(1), Rollback(3 * G, 0))
            made.told.clear()
            made.do(Attach(0), Attach(1))  # they were away when it came
            until(lambda: made.heard() == {0: 1, 1: 1})
    finally:
        made.close()


def test_a_loader_worker_that_was_started_again_takes_the_place_of_the_old_one(
    anew: Started,
) -> None:
    anew.plan(5)
    new = anew.loader_link(2)
    with closing(new), pytest.raises(ActorLost, match="this connection was replaced"):
        until(lambda: anew.loader.recv(5.0) is None)
    with pytest.raises(LinkRefused, match="it was replaced"):
        anew.loader_link(1)
    new = anew.loader_link(2)  # its connection was cut
    with closing(new), closing_all(anew.client(0, 5)) as (box,):
        anew.send(5, link=new)
        assert take(box, 1) == [5]


def test_an_end_that_is_undone_is_undone_for_clients_that_have_not_heard_it_yet(
    anew: Started,
) -> None:
    with closing_all(anew.client(0, 5)) as (box,):
        anew.plan(5)
        anew.send(5)
        anew.do(EndOfJob(6, ActorLost("loader-worker/3", "killed")))
        until(lambda: len(box) == 1)
        anew.do(Rollback(2 * G, 4))
        anew.host.metrics()  # behind which it is done
        anew.plan(5, 6, generation=2 * G)
        anew.send(5, 6, generation=2 * G)
        assert take(box, 2) == [5, 6]
        anew.do(EndOfJob(7))
        with pytest.raises(StopIteration):
            box.get(WAIT_S)


# a client and its connection, in a time of its own


class Line:
    """A connection that does what it is told, and a clock that moves when someone waits."""

    shares_memory, max_held = True, 0

    def __init__(self, fault: Exception):
        self.fault, self.time, self.dialled = fault, 0.0, list[float]()

    def open(
        self, address: str, token: str, hello: dict[str, Any], *, timeout_s: float
    ) -> tuple[Any, dict[str, Any]]:
        self.dialled.append(self.time)
        return self, {}

    def recv(self, seconds: float, *, polled: bool = False) -> Any:
        raise self.fault

    def send(self, value: Any, *, timeout_s: float) -> None:
        pass

    def close(self, reason: str = "") -> None:
        pass

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds

    def box(self, where: Any, **settings: Any) -> RemoteStepQueue:
        return RemoteStepQueue(
            rank=0,
            token="t",
            where=where,
            next_step=0,
            open_connection=self.open,
            now=lambda: self.time,
            sleep=self.sleep,
            **{"address": "overlord://x:1/y", "reconnect_s": 20.0, **settings},
        )


def test_a_connection_that_breaks_with_every_message_is_tried_with_pauses_and_given_up() -> None:
    line = Line(FrameError("what came is no message"))
    box = line.box(lambda generation: ("overlord://x:1/y", "t"))
    with pytest.raises(
        ActorLost,
        match=r"could not be reached for 20\.\d s while step 0 was expected: frame: what came is no message",
    ):
        box.get(100.0)
    pauses = [round(b - a, 6) for a, b in pairwise(line.dialled)]
    assert len(line.dialled) < 40
    assert pauses[1:] == sorted(pauses[1:])
    assert pauses[-1] == LONGEST_PAUSE_S


def test_what_is_said_of_a_server_that_is_gone_names_the_cause_once() -> None:
    line = Line(ActorLost("overlord://x:1/y", "the connection broke: Connection reset by peer"))

    def where(generation: int) -> tuple[str, str]:
        cause = ActorLost("overlord://x:1/z", "nobody answers: Connection refused")
        raise ActorLost(
            "the session's control server",
            f"overlord://x:1/z could not be reached for 1.0 s: {cause}",
        ) from cause

    with pytest.raises(ActorLost) as lost:
        line.box(where).get(100.0)
    assert str(lost.value).endswith(
        "s while step 0 was expected: nobody answers: Connection refused (the session's "
        "control server could not be reached either)"
    )
    assert str(lost.value).count("is lost") == 1


def test_a_constructor_that_is_replaced_is_waited_for_by_name_and_asked_for_often() -> None:
    line, asked = Line(ActorLost("x", "gone")), list[float]()

    def where(generation: int) -> tuple[str, str]:
        asked.append(line.time)
        raise DataStall("constructor-worker/0 to be started again (killed by signal 9)", line.time)

    box = line.box(where, address="")
    assert box.get(3.0) is None
    assert box.connection_problem == "constructor-worker/0 to be started again (killed by signal 9)"
    assert line.dialled == []
    assert max(b - a for a, b in pairwise(asked)) <= 0.2 + 1e-9, "it will be there in a moment"
    with pytest.raises(ActorLost, match="could not be reached for 20"):
        box.get(100.0)


def test_a_constructor_that_the_session_has_given_up_ends_its_clients() -> None:
    line = Line(ActorLost("x", "gone"))

    def where(generation: int) -> tuple[str, str]:
        raise ActorLost("constructor-worker/0", "killed by signal 9")

    with pytest.raises(ActorLost, match=r"^constructor-worker/0 is lost: killed by signal 9"):
        line.box(where).get(100.0)


def test_a_constructor_that_closes_while_the_session_is_rewound_is_asked_for_again() -> None:
    line = Line(ActorLost("x", "gone"))
    real, n = line.open, 0

    def closes(address: str, *given: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
        nonlocal n
        n += 1
        if n < 4:
            raise LinkRefused(address, CLOSES)
        line.fault = OverlordError("here is the next one")
        return real(address, *given, **settings)

    line.open = closes  # type: ignore[method-assign]
    with pytest.raises(OverlordError, match="here is the next one"):
        line.box(lambda generation: ("overlord://x:1/y", "t"), address="").get(100.0)
    assert (n, line.time < 1.0) == (4, True)


def test_one_that_refuses_for_another_reason_is_not() -> None:
    line = Line(ActorLost("x", "gone"))

    def refuses(address: str, *given: Any, **settings: Any) -> tuple[Any, dict[str, Any]]:
        raise LinkRefused(address, "wrong token")

    line.open = refuses  # type: ignore[method-assign]
    with pytest.raises(OverlordError, match=r"^wrong token$"):
        line.box(lambda generation: ("overlord://x:1/y", "t"), address="").get(100.0)
    assert line.time < 0.1


def test_a_session_that_is_closed_is_not_looked_for() -> None:
    line = Line(ActorLost("x", "gone"))

    def where(generation: int) -> tuple[str, str]:
        raise OverlordError("the session is closed")

    with pytest.raises(OverlordError, match="the session is closed"):
        line.box(where).get(100.0)
    assert line.time < 0.1
