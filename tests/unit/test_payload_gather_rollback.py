"""Steps that come again: what is complete stays, the rest comes anew, and what is of an earlier
time is not heard.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.constructor.assembler import Assembler
from overlord.constructor.payload_gather import MAX_EARLY, PayloadGatherer, check_payload
from overlord.constructor.service import ConstructorService
from overlord.errors import ActorLost, OverlordError, PlanError
from overlord.mesh import Batch
from overlord.messages.control import STRIDE, ConstructorPlan, EndOfJob, Rollback
from overlord.messages.data import StepPayload
from tests.internals import built_bucket, early_payload, payload_holders
from tests.laws import examples
from tests.unit.test_payload_gather import Box, Here, documents, placed

G = STRIDE


class Ends(Box):
    """One that also keeps what it is told of the end."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[Any] = []
        self.order: list[int] = []

    def put(self, told: Any, bucket: Any) -> None:
        super().put(told, bucket)
        self.order.append(told.step)
        self.heard.append(told.step)

    def end(self, error: Exception | None, *, drop: bool = False) -> None:
        self.heard.append(error)

    def resume(self) -> None:
        self.heard.append("resumed")


class Later(Here):
    """A constructor that is started again when it is lost; its work is done when it is asked
    for.
    """

    def __init__(self, *, at_once: bool = True) -> None:
        super().__init__()
        self._at_once, self.todo = at_once, list[Any]()
        self.boxes = [Ends()]
        self.building = ConstructorService(
            [Assembler(0, [0], build_ahead=8)],
            batch=Batch(samples=4, context=32),
            multiple=1,
            executor=self,
            run=self.run,
            cannot=self.finished.append,
        )
        self.gathering = PayloadGatherer(self.building, failover=True)
        self.run(self.building.attach(dict(enumerate(self.boxes))))

    def submit(self, name: str, work: Any, done: Any, **_: Any) -> None:
        self.todo.append((work, done))
        if self._at_once:
            self.work()

    def work(self) -> None:
        while self.todo:
            super().submit("build", *self.todo.pop(0))

    def plan(self, step: int, generation: int = 0, origins: tuple[int, ...] = (3, 7)) -> None:
        self.run(
            self.gathering.plan(
                replace(placed(step, [2] * len(origins), origins), generation=generation)
            )
        )

    def send(self, step: int, origin: int, generation: int = 0, value: int = 0) -> None:
        self.run(
            self.gathering.payload(
                StepPayload(step, origin, documents(2, first=value or origin), generation)
            )
        )

    def back(self, step: int, generation: int) -> None:
        self.run(self.gathering.rollback(Rollback(generation, step)))

    @property
    def steps(self) -> dict[int, list[int]]:
        return self.boxes[0].steps


def test_a_step_that_is_complete_stays_and_one_that_is_not_comes_anew() -> None:
    here = Later()
    for step in (5, 6, 7):
        here.plan(step)
    for step in (5, 7):
        here.send(step, 3), here.send(step, 7)
    here.send(6, 3, value=90)  # the other half is lost with its worker
    assert here.boxes[0].order == [5], "7 is built, and waits for 6"
    here.back(5, G)
    assert here.gathering.complete_until == 6
    assert here.gathering.waiting() == "step 6: to be planned again after a worker was lost"
    for step in (6, 7, 8):
        here.plan(step, G)
    assert here.gathering.waiting() == "step 6: payload of loader-worker/3, loader-worker/7"
    here.send(6, 7, 0)
    here.send(6, 3, 0)
    assert here.boxes[0].order == [5], "payload of before is not heard"
    here.send(7, 3, G, value=91), here.send(7, 7, G, value=92)
    here.send(6, 3, G), here.send(6, 7, G)
    assert here.boxes[0].order == [5, 6, 7]
    assert here.steps[6] == here.steps[7] == [3, 3, 7, 7], (
        "what came again of a complete step is ignored"
    )
    here.send(8, 3, G), here.send(8, 7, G)
    assert here.boxes[0].order == [5, 6, 7, 8]
    assert early_payload(here.gathering) == {}


def test_payload_of_a_generation_may_come_before_the_word_of_it() -> None:
    here = Later()
    here.plan(0)
    here.send(0, 3)
    (
        here.send(0, 3, G, value=50),
        here.send(0, 7, 3 * G, value=60),
    )  # that of another one, later still
    here.back(-1, G)
    here.plan(0, G)
    here.send(0, 7, G)
    assert here.steps == {0: [50, 50, 7, 7]}
    here.back(0, 3 * G)
    here.plan(1, 3 * G)
    here.send(1, 3, 3 * G), here.send(1, 7, 3 * G)
    assert here.boxes[0].order == [0, 1]


def test_a_source_that_was_opened_again_is_no_recovery() -> None:
    here = Later()
    here.back(-1, G)
    here.plan(0, G + 2)
    here.send(0, 3, G), here.send(0, 7, G + 1)
    assert here.boxes[0].order == [0]


def test_what_was_said_before_and_what_is_over_changes_nothing() -> None:
    here = Later()
    here.back(-1, 2 * G)
    here.plan(0, 2 * G)
    here.send(0, 3, 2 * G)
    for generation in (2 * G, G, 0):
        here.back(-1, generation)
        here.plan(0, generation)
    here.plan(1, G)
    assert here.gathering.waiting() == "step 0: payload of loader-worker/7"
    here.send(0, 7, 2 * G)
    assert here.boxes[0].order == [0]
    assert here.gathering.waiting() == "", "step 1 was planned in a time that is over"


def test_a_worker_that_is_started_anew_begins_behind_what_all_have() -> None:
    for told in (True, False):
        here = Later()
        if told:
            here.back(40, 5 * G)
        here.plan(41, 5 * G)
        here.send(41, 3, 5 * G), here.send(41, 7, 5 * G)
        assert here.boxes[0].order == [41]


def test_a_loader_worker_that_is_lost_is_waited_for_and_named() -> None:
    here = Later()
    here.plan(0), here.plan(1)
    here.send(0, 3)
    here.run(here.gathering.lost(7, "killed by signal 9"))
    assert here.finished == []
    assert (
        here.gathering.waiting()
        == "step 0: payload of loader-worker/7, which is lost (killed by signal 9)"
    )
    here.gathering.found(7)
    here.back(-1, G)
    here.plan(0, G)
    here.send(0, 3, G)
    assert here.gathering.waiting() == "step 0: payload of loader-worker/7"
    here.send(0, 7, G)
    assert here.boxes[0].order == [0]


def test_if_it_is_given_up_the_job_ends_before_the_first_step_that_misses_it() -> None:
    here = Later()
    for step in range(3):
        here.plan(step)
    here.send(0, 3), here.send(0, 7)
    here.run(here.gathering.lost(7, "killed"))
    lost = ActorLost("loader-worker/7", "killed")
    here.run(here.gathering.finish(EndOfJob(3, lost)))
    assert [(f.step, str(f.error)) for f in here.finished] == [(1, str(lost))]
    here.run(here.gathering.finish(here.finished[0]))  # the planner says it again
    assert here.boxes[0].heard[0] == 0
    assert str(here.boxes[0].heard[1]) == str(lost)


def test_an_end_that_was_that_of_a_fault_is_undone_and_the_true_one_comes_later() -> None:
    here, fault = Later(), ActorLost("loader-worker/7", "killed")
    for step in range(4):
        here.plan(step)
        if step != 1:
            here.send(step, 3), here.send(step, 7)
    here.run(here.gathering.finish(EndOfJob(1, fault)))
    assert here.boxes[0].heard == [0, fault]
    assert (
        here.building.held_bytes()["staged"]
        == here.building.held_bytes()["assembled"] - built_bucket(here.building, 0, 0).nbytes
        == 0
    )
    here.back(0, G)
    for step in (1, 2, 3):
        here.plan(step, G)
        here.send(step, 3, G), here.send(step, 7, G)
    here.run(here.gathering.finish(EndOfJob(4)))
    assert here.boxes[0].heard == [0, fault, "resumed", 1, 2, 3, None]


def test_an_end_that_is_true_is_told_again_after_a_rollback() -> None:
    here = Later()
    here.plan(0)
    here.run(here.gathering.finish(EndOfJob(1)))
    here.back(-1, G)
    here.plan(0, G)
    here.send(0, 3, G), here.send(0, 7, G)
    assert here.boxes[0].heard == [0], "no end is known here until the planner has found it again"
    here.run(here.gathering.finish(EndOfJob(1)))
    assert here.boxes[0].heard == [0, None]


def test_a_step_that_was_being_built_when_the_job_ended_and_went_on_is_built_once() -> None:
    here = Later(at_once=False)
    for step in (0, 1):
        here.plan(step)
        here.send(step, 3), here.send(step, 7)
    assert len(here.todo) == 2
    here.run(here.gathering.finish(EndOfJob(0, ActorLost("loader-worker/7", "killed"))))
    here.back(-1, G)
    for step in (0, 1):
        here.plan(step, G)
        here.send(step, 3, G), here.send(step, 7, G)
    assert len(here.todo) == 2, "they are under way"
    here.work()
    assert here.boxes[0].order == [0, 1]
    here.run(here.building.consumed([0], 1))
    assert here.building.held_bytes()["staged"] == here.building.held_bytes()["assembled"] == 0
    assert payload_holders(here.building) == {}


def test_a_step_that_could_not_be_built_is_tried_again_when_it_comes_again() -> None:
    here = Later(at_once=False)
    for step in (0, 1):
        here.plan(step)
        here.send(step, 3), here.send(step, 7)
    (_, done), later = here.todo.pop(0), here.todo.pop(0)
    done(None, PlanError("a hook of the user", 0))
    super(Later, here).submit("build", *later)
    assert [f.step for f in here.finished] == [0]
    assert here.boxes[0].order == [], "1 is built, and does not overtake 0"
    assert here.building.waiting(0) == "step 0: the end of the job, since it could not be built"
    here.run(here.gathering.finish(here.finished[0]))
    here.back(-1, G)
    for step in (0, 1):
        here.plan(step, G)
        here.send(step, 3, G), here.send(step, 7, G)
    here.work()
    assert here.boxes[0].order == [0, 1]


def test_a_worker_that_floods_us_keeps_out_no_other() -> None:
    here = Later()
    for step in range(2 * MAX_EARLY):
        here.send(step, 9, step * G)
    here.send(0, 3), here.send(0, 7)
    here.plan(0)
    assert here.boxes[0].order == [0]


@pytest.mark.parametrize("generation", [-1, 0.5, "0", None, True])
def test_payload_of_no_generation_is_refused(generation: Any) -> None:
    with pytest.raises(OverlordError, match="expected a generation"):
        check_payload(StepPayload(0, 3, documents(2), generation), 3)


@given(st.data())
@examples(150)
def test_whatever_loaders_and_planner_repeat_every_step_is_delivered_once_with_its_own_payload(
    data: st.DataObject,
) -> None:
    """Loader workers lose what is on its way, in any step; late words of each generation come in
    between.
    """
    n, here = data.draw(st.integers(1, 6)), Later()
    flight: list[Any] = []  # of earlier generations, not come yet
    taken, generation = -1, 0
    for recovery in range(data.draw(st.integers(0, 4)) + 1):
        generation = recovery * G
        if recovery:
            here.back(taken, generation)
        said: list[Any] = [
            ConstructorPlan(placed(s, [2, 2], (3, 7)).stage, (3, 7), generation)
            for s in range(taken + 1, n)
        ]
        sent = [
            StepPayload(s, o, documents(2, first=10 * s + o), generation)
            for s in range(taken + 1, n)
            for o in (3, 7)
        ]
        some = data.draw(st.permutations([*sent, *flight]))
        cut = data.draw(st.integers(0, len(some)))
        _mix(here, said[: data.draw(st.integers(0, len(said)))], some[:cut], data)
        flight = some[cut:]
        built = here.boxes[0].order
        taken = max([taken, *built[: data.draw(st.integers(0, len(built)))]])
        here.run(here.building.consumed([0], taken))
    here.back(taken, 9 * G)
    for step in range(taken + 1, n):
        here.run(
            here.gathering.plan(ConstructorPlan(placed(step, [2, 2], (3, 7)).stage, (3, 7), 9 * G))
        )
        for origin in (3, 7):
            here.run(
                here.gathering.payload(
                    StepPayload(step, origin, documents(2, first=10 * step + origin), 9 * G)
                )
            )
        for late in flight:
            here.run(here.gathering.payload(late))
    assert here.boxes[0].order == list(range(n))
    assert here.steps == {s: [10 * s + 3] * 2 + [10 * s + 7] * 2 for s in range(n)}
    here.run(here.building.consumed([0], n - 1))
    assert payload_holders(here.building) == {}
    assert not here.finished
    assert early_payload(here.gathering) == {}


def _mix(here: Later, said: list[Any], sent: list[Any], data: st.DataObject) -> None:
    """Plans in their order, payload in any, and between them as it happens."""
    while said or sent:
        if said and (not sent or data.draw(st.booleans())):
            here.run(here.gathering.plan(said.pop(0)))
        else:
            here.run(here.gathering.payload(sent.pop(0)))


def test_a_step_that_could_not_be_built_fails_again_for_a_planner_that_did_not_hear_of_it() -> None:
    """The one that was told is lost, and said nothing: the next one plans the step again."""
    here = Later(at_once=False)

    def fails() -> None:
        raise OverlordError("it cannot be built")

    for generation in (0, G, 2 * G):
        here.back(4, generation)
        here.plan(5, generation), here.plan(6, generation)
        here.send(5, 3, generation), here.send(5, 7, generation)
        here.todo = [(fails, done) for _, done in here.todo]
        here.work()
        assert [(f.step, str(f.error)) for f in here.finished] == [(5, "it cannot be built")] * (
            1 + generation // G
        )
    here.back(5, 3 * G)  # whoever wanted it has left
    assert here.gathering.complete_until == 6
