"""Peers that have the token and say what they like: a worker refuses or ignores it, lives on, and
delivers what it should.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import ActorLost, LinkRefused, OverlordError
from overlord.messages.control import STRIDE, Attach, EndOfJob
from overlord.messages.data import StepAck, StepMessage, StepPayload
from overlord.sample import Ragged
from overlord.transport.connection import TIMEOUT, Connection, open_connection
from tests.internals import RAGGED_CHECK, runtime_of
from tests.processes import Played, launch, play, run, until, workers_left, workers_of
from tests.scenarios.test_process import job, source

pytestmark = pytest.mark.timeout(200)

DOCUMENTS = Ragged(np.arange(10, dtype=np.int32), np.arange(0, 11, 2))


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=400), "local", steps=60)


@pytest.fixture
def session(caplog: pytest.LogCaptureFixture) -> Iterator[ov.Session]:
    with launch(job(until=400)) as made:
        yield made


def peer(session: ov.Session, **hello: Any) -> Connection:
    address, token = runtime_of(session).address_for(0)  # type: ignore[attr-defined]
    link, _ = open_connection(address, token, hello, timeout_s=10)
    return link


def end_of(link: Connection) -> str:
    """Why a connection was ended; what came before that is let go."""
    try:
        while link.recv(10.0) is not TIMEOUT:
            pass
    except ActorLost as lost:
        return lost.reason
    raise AssertionError("it was not ended")


class Course:
    """The job goes on, whatever a peer does in between."""

    def __init__(self, session: ov.Session, alone: Played):
        self.session, self._alone, self._at = session, alone, 0
        self._hosts = workers_of(session)

    def go_on(self, steps: int = 3) -> None:
        got = play(self.session, steps=steps)
        assert not got.error
        assert got.steps == {
            rank: s[self._at : self._at + steps] for rank, s in self._alone.steps.items()
        }
        self._at += steps
        assert workers_of(self.session) == self._hosts, "no host has died"


HELLOS: list[dict[str, Any]] = [
    {},
    {"role": "loader"},
    {"role": "loader", "host": "0"},
    {"role": "loader", "host": -1},
    {"role": "loader", "host": True},
    {"role": "loader", "host": 0},
    {"role": "loader", "host": None},
    {"role": "loader", "host": [1]},
    {"role": "client", "rank": 9, "next": 0, "generation": 0},
    {"role": "client", "rank": "0"},
    {"role": "client", "rank": 0, "next": "x"},
    {"role": "client", "rank": 0, "next": 0, "generation": 7},
    {"role": "client", "rank": None},
    {"role": 7, "rank": 2**63},
    {"x" * 1000: list(range(50))},
]


def test_a_hello_that_is_none_is_refused_in_words(session: ov.Session, alone: Played) -> None:
    course = Course(session, alone)
    course.go_on()
    for hello in HELLOS:
        with pytest.raises((LinkRefused, OverlordError)) as refused:
            peer(session, **hello)
        assert str(refused.value)
    course.go_on()


NO_PAYLOAD: list[Any] = [
    None,
    7,
    "x",
    [],
    {"ask": "why"},
    np.zeros(3),
    DOCUMENTS,
    Attach(0),
    StepAck(3),
    EndOfJob(0),
    StepPayload("0", 9, DOCUMENTS),  # type: ignore[arg-type]
    StepPayload(-1, 9, DOCUMENTS),
    StepPayload(0, 0, DOCUMENTS),
    StepPayload(0, None, DOCUMENTS),
    StepPayload(0, 9, None),
    StepPayload([0], 9, DOCUMENTS),  # type: ignore[arg-type]
    StepPayload(0, 9, Ragged(DOCUMENTS.values.astype(float), DOCUMENTS.offsets)),
    StepPayload(0, 9, np.zeros(3)),  # type: ignore[arg-type]
    StepPayload(0, 9, Ragged(DOCUMENTS.values, np.array([0, 2], np.uint32))),
    StepPayload(0, 9, Ragged(DOCUMENTS.values > 3, DOCUMENTS.offsets)),
    StepPayload(0, 9, Ragged(DOCUMENTS.values.reshape(2, 5), np.array([0, 1, 2]))),
]


def test_a_loader_worker_that_sends_anything_but_its_payload_is_cut_off(
    session: ov.Session, alone: Played
) -> None:
    course = Course(session, alone)
    course.go_on()
    for value in NO_PAYLOAD:
        with peer(session, role="loader", host=9) as link:
            link.send(value)
            assert "expected" in end_of(link)
    course.go_on()


def test_payload_that_nobody_planned_reaches_nobody(session: ov.Session, alone: Played) -> None:
    course = Course(session, alone)
    course.go_on()
    with peer(session, role="loader", host=9) as link:
        for step in (0, 1, 5, 6, 7, 8, 2**40, *range(100, 1300)):
            link.send(StepPayload(step, 9, DOCUMENTS))
        course.go_on(10)
    course.go_on()


def test_a_client_may_send_no_payload_and_can_take_no_step_that_was_not_sent(
    session: ov.Session, alone: Played
) -> None:
    made = job(until=400)
    clients = [session.client(rank) for rank in range(2)]
    next(clients[0])  # rank 1 is taken over by a stranger
    for value in (
        StepPayload(1, 0, DOCUMENTS),
        StepPayload(0, 9, DOCUMENTS),
        "x",
        None,
        StepAck("x"),
        StepAck(None),
    ):  # type: ignore[arg-type]
        with peer(session, role="client", rank=1, next=0, generation=0) as link:
            link.send(value)
            end_of(link)
    with peer(session, role="client", rank=1, next=0, generation=0) as link:
        for step in (2**62, -5, 4, 10**9):
            link.send(StepAck(step))
        first = until(lambda: None if (found := link.recv(1.0)) is TIMEOUT else found)
        assert isinstance(first, StepMessage)
        assert first.info.step == 0
        taken = until(lambda: found if (found := session.metrics())["planned_steps"] >= 4 else None)
        assert taken["planned_steps"] == 4, (
            "the window has not moved for a step that was never sent"
        )
    del first
    assert made.place.world_size == 2
    got = [next(clients[1]).step for _ in range(4)]
    assert got == [0, 1, 2, 3], "its client comes back and misses nothing"


def test_who_has_the_place_of_a_worker_that_joins_loses_it_and_spoils_nothing(
    session: ov.Session, alone: Played
) -> None:
    course = Course(session, alone)
    course.go_on()
    host = 1 + max(
        int(name.split("/")[1]) for name in workers_of(session) if name.startswith("loader-worker/")
    )
    with peer(session, role="loader", host=host) as link:
        link.send(StepPayload(20, host, DOCUMENTS))
        at = session.add_source(source("d", 30, 5000))
        assert "this connection was replaced" in end_of(link)
    got = play(session, steps=at - 3 + 4)
    assert not got.error
    assert "d" in {
        p[0][0] for steps in got.steps.values() for step in steps for mb in step[4] for p in mb
    }


NUMBERS: list[Any] = [
    0,
    1,
    2,
    5,
    6,
    7,
    8,
    9,
    10,
    STRIDE - 1,
    STRIDE,
    STRIDE + 3,
    7 * STRIDE,
    2**40,
    2**62,
    2**63 - 1,
    -1,
    -STRIDE,
    None,
    True,
    0.5,
    "1",
]


@pytest.mark.parametrize("seed", range(3))
def test_payload_of_wild_steps_origins_and_generations_hurts_nobody(
    session: ov.Session, alone: Played, seed: int
) -> None:
    course, chance = Course(session, alone), random.Random(seed)
    course.go_on()
    for _ in range(6):
        with (
            peer(session, role="loader", host=9) as link,
            contextlib.suppress(ActorLost),
        ):  # what is no payload ends the connection
            for _ in range(200):
                origin = 9 if chance.random() < 0.98 else chance.choice(NUMBERS)
                wild = chance.random() < 0.05
                step, generation = (
                    chance.choice(NUMBERS if wild else NUMBERS[:16]) for _ in range(2)
                )
                link.send(StepPayload(step, origin, DOCUMENTS, generation), timeout_s=10.0)
        course.go_on(2)
    course.go_on()


def test_a_stranger_that_has_the_place_of_a_loader_worker_is_driven_out(
    session: ov.Session, alone: Played
) -> None:
    """Whoever has the token can take a place. The worker whose place it was is missed, and the job
    goes back; nothing is repeated.
    """
    before = play(session, steps=3)
    with peer(session, role="loader", host=0, incarnation=2**62):
        got = play(session, steps=20)
    assert not got.error
    assert {rank: before.steps[rank] + got.steps[rank] for rank in got.steps} == {
        rank: s[:23] for rank, s in alone.steps.items()
    }


def test_a_wrong_token_opens_nothing(
    session: ov.Session, alone: Played, caplog: pytest.LogCaptureFixture
) -> None:
    address, token = runtime_of(session).address_for(0)  # type: ignore[attr-defined]
    with pytest.raises(LinkRefused):
        open_connection(address, token + "x", {"role": "loader", "host": 9}, timeout_s=10)
    Course(session, alone).go_on()
    with caplog.at_level(logging.DEBUG, "overlord"):
        session.metrics()
    assert token not in caplog.text
    hosts = list(workers_of(session).values())
    session.close()
    assert not workers_left(hosts, 3.0)


def sent_as_it_is(link: Connection, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the look that our own sender takes at a value."""
    with monkeypatch.context() as patch:
        RAGGED_CHECK.replace(patch, lambda *_: "")
        link.send(value)


@pytest.mark.parametrize("offsets", [[0, 4, 2], [0, 11], [-3, 4], [2**62, -(2**62)]])
def test_documents_that_lie_elsewhere_than_in_their_payload_end_the_connection(
    session: ov.Session, alone: Played, offsets: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with peer(session, role="loader", host=9) as link:
        sent_as_it_is(
            link,
            StepPayload(0, 9, Ragged(DOCUMENTS.values, np.array(offsets, np.int64))),
            monkeypatch,
        )
        assert "expected" in end_of(link)
    Course(session, alone).go_on()
