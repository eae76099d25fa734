"""A disconnect from a silent raylet ends at its deadline, and the next connection waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import overlord as ov
from tests import rays
from tests.internals import opened_at
from tests.processes import WAIT_S

pytestmark = pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")


@pytest.fixture
def silent_raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let ``ray.shutdown`` block until the event is set, and shorten the deadlines."""
    from overlord.ray import connection

    answers = threading.Event()
    monkeypatch.setattr(connection.ray, "shutdown", lambda: answers.wait(WAIT_S))
    short_timeouts = replace(connection.TIMEOUTS, disconnect_s=0.05, hold_s=0.05)
    monkeypatch.setattr(connection, "TIMEOUTS", short_timeouts)
    yield answers
    answers.set()


def connected() -> Any:
    """Return a connection to the cluster at an address, as if it had been opened."""
    from overlord.ray.connection import RayConnection

    return opened_at(RayConnection(), "10.0.0.1:6379")


def test_a_disconnect_continues_without_a_raylet_that_does_not_answer(
    silent_raylet: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    made = connected()
    made.close()
    assert [record.getMessage() for record in caplog.records] == [
        "raylet did not acknowledge the disconnect within 0.05 s; continuing without it"
    ]
    with pytest.raises(ov.DataStall, match="the raylet of this node to acknowledge an earlier"):
        made.await_disconnect()


def test_the_next_connection_waits_for_an_earlier_disconnect(
    silent_raylet: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overlord.ray import connection

    made = connected()
    made.close()
    monkeypatch.setattr(connection, "TIMEOUTS", replace(connection.TIMEOUTS, hold_s=WAIT_S))
    silent_raylet.set()
    made.await_disconnect()
    made.await_disconnect()  # nothing is left to wait for


def test_an_exception_of_a_disconnect_is_raised_after_a_second_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from overlord.ray import connection

    calls: list[str] = []

    def fails_once() -> None:
        calls.append("shutdown")
        if len(calls) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(connection.ray, "shutdown", fails_once)
    with pytest.raises(KeyboardInterrupt):
        connected().close()
    assert calls == ["shutdown", "shutdown"]
