"""What a planner is killed for that stands still: it says nothing, or its process answers and its
event loop does not come to an end.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from overlord.cluster.launcher import TICKS, CoordinatorHeartbeat
from overlord.rpc.actors import ActorHandle, ActorRecord
from tests.internals import stop_heartbeats_by

SILENT, STUCK = (
    "it answered nothing for 2 s",
    "its event loop was blocked for 2 s: step 6, in mine",
)


class Control:
    """Whoever is asked answers as told, so many ticks later: True, it has moved; False, it has not;
    None, never.
    """

    def __init__(self, answers: list[tuple[bool | None, int]]):
        self.answers, self.now, self.asked = answers, 0, list[tuple[int, bool, Future[Any]]]()
        self.kills: list[int] = []

    def call(self, planner: Any, method: str) -> Future[Any]:
        future = Future[Any]()
        if method == "activity":
            future.set_result("step 6, in mine")
        elif self.answers and (given := self.answers.pop(0))[0] is not None:
            self.asked.append((self.now + given[1], bool(given[0]), future))
        return future

    def get(self, future: Future[Any], timeout_s: float) -> Any:
        return future.result(0)

    def kill(self, planner: Any) -> None:
        self.kills.append(self.now)

    def wait(self, seconds: float) -> bool:
        """A tick."""
        assert seconds == 2.0 / TICKS
        self.now += 1
        for at, answer, future in self.asked:
            if at <= self.now and not future.done():
                future.set_result(answer)
        return self.now > 30 or bool(self.kills)


def killed_for(*answers: tuple[bool | None, int]) -> list[tuple[int, str]]:
    """When a planner is killed that answers so, in ticks, and for what."""
    control = Control(list(answers))
    heartbeat = CoordinatorHeartbeat(control, 2.0, lambda: None)  # type: ignore[arg-type]
    stop_heartbeats_by(heartbeat, control)
    planner = ActorHandle("planner", None, ActorRecord("planner"))
    heartbeat.watch(planner)
    heartbeat.run()
    return [(at, heartbeat.cause(planner) or "") for at in control.kills]


MOVED, STANDS, NEVER = (True, 1), (False, 1), (None, 0)


def test_one_that_moves_is_let_be() -> None:
    assert killed_for(*[MOVED] * 40) == []
    assert killed_for(*[MOVED, STANDS, STANDS, STANDS] * 10) == [], "however slowly"


def test_one_that_never_answers_is_killed_for_it() -> None:
    assert killed_for(MOVED, NEVER) == [(6, SILENT)]


@pytest.mark.parametrize("late", [1, 2, 3, 9])
def test_one_that_is_stuck_is_told_so_though_its_last_answer_is_late(late: int) -> None:
    """Which was asked for a moment ago: that it answered before is what counts."""
    [(_, why)] = killed_for(MOVED, STANDS, STANDS, (False, late))
    assert why == STUCK


def test_what_it_answered_before_it_moved_does_not_count() -> None:
    assert [why for _, why in killed_for(STANDS, STANDS, MOVED, NEVER)] == [SILENT]


def test_one_that_was_never_killed_has_no_cause() -> None:
    control = Control([])
    heartbeat = CoordinatorHeartbeat(control, 2.0, lambda: None)  # type: ignore[arg-type]
    planner = ActorHandle("planner", None, ActorRecord("planner"))
    assert heartbeat.cause(None) is None, "before the first coordinator"
    assert heartbeat.cause(planner) is None
    heartbeat.kill(planner, SILENT)
    assert (heartbeat.cause(planner), heartbeat.cause(None)) == (SILENT, None)
