"""Events that are sent to a coordinator elsewhere: each is applied once, or not at all, whatever is
lost or late on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, cast

import pytest

from overlord.concurrency.event_loop import CommandLoop
from overlord.errors import DataStall, JournalError, PlanError
from overlord.journal import checkpoint
from overlord.journal.applied_ids import SESSION, AppliedIds
from overlord.journal.write_ahead import NullJournal, WriteAheadGate
from overlord.messages.control import EndOfJob, EventId, Report, SetMixture, Skip, SourceLost
from overlord.session.events import UnansweredEvents


def silent() -> None:
    raise DataStall("the planner", 25.0)


def noting(late: list[int], number: int) -> Callable[[], None]:
    return lambda: late.append(number)


def given_up(events: UnansweredEvents, number: int, late: list[int]) -> None:
    with pytest.raises(DataStall):
        events.send(number, silent, noting(late, number))


def test_what_was_answered_is_not_told_again() -> None:
    events, late = UnansweredEvents(), list[int]()
    events.send(1, lambda: None, noting(late, 1))
    events.confirmed(1)
    assert late == []
    assert not events.unsettled


def test_what_was_given_up_and_applied_later_is_told_once() -> None:
    events, late = UnansweredEvents(), list[int]()
    given_up(events, 1, late)
    assert events.unsettled
    events.confirmed(2)
    assert late == []
    events.confirmed(1)
    events.confirmed(1)
    assert late == [1]
    assert not events.unsettled


def test_what_is_confirmed_before_it_is_given_up_has_been_answered() -> None:
    events, late = UnansweredEvents(), list[int]()

    def too_late() -> None:
        events.confirmed(1)
        silent()

    events.send(1, too_late, noting(late, 1))
    assert late == []


def test_news_of_an_earlier_event_is_not_taken_for_that_of_an_equal_one() -> None:
    events, late = UnansweredEvents(), list[int]()
    events.send(1, lambda: None, noting(late, 1))

    def news_of_the_first() -> None:
        events.confirmed(1)
        silent()

    with pytest.raises(DataStall):
        events.send(2, news_of_the_first, noting(late, 2))
    assert events.unsettled
    events.confirmed(2)
    assert late == [2]


@pytest.mark.parametrize(("last", "applied"), [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2])])
def test_what_was_given_up_is_settled_by_the_last_event_that_was_applied(
    last: int, applied: list[int]
) -> None:
    events, late = UnansweredEvents(), list[int]()
    given_up(events, 1, late)
    given_up(events, 2, late)
    events.settle(last)
    assert late == applied
    assert not events.unsettled
    events.confirmed(2)
    assert late == applied


def test_what_was_refused_is_settled() -> None:
    events, late = UnansweredEvents(), list[int]()

    def refused() -> None:
        raise PlanError("it is planned already", 3)

    with pytest.raises(PlanError):
        events.send(1, refused, noting(late, 1))
    assert not events.unsettled
    events.confirmed(1)
    assert late == []


# ids


def test_events_of_each_origin_are_applied_once_in_the_order_of_their_numbers() -> None:
    applied = AppliedIds("launch")
    mixture, report = SetMixture(3, {"a": 1.0}), Report(3, 1, {"loss/a": 1.0})
    one, two = applied.id_of(mixture, 1), applied.id_of(report, 7)
    assert one == EventId("launch", "session", 1)
    assert two == EventId("launch", "rank 1", 7)
    assert applied.id_of("no event", 1) is None
    assert applied.is_new(one)
    applied.add(one)
    applied.add(two)
    assert not applied.is_new(one)
    assert not applied.is_new(EventId("launch", "rank 1", 6))
    assert applied.is_new(EventId("launch", "rank 1", 8))
    assert applied.is_new(EventId("launch", "rank 0", 1))
    assert applied.id_of(SourceLost(3, "a", "gone")) == EventId("launch", "planner", 1)
    assert applied.reports() == {1: 7}
    assert AppliedIds("launch", applied.ids()).ids() == applied.ids()


def test_numbers_of_another_launch_mean_nothing() -> None:
    before = AppliedIds("before")
    before.add(EventId("before", "session", 9))
    assert AppliedIds("after", before.ids()).last("session") == 0


def test_entries_of_an_older_journal_have_no_ids_and_are_read() -> None:
    event = SetMixture(3, {"a": 1.0})
    entry = checkpoint.event(event, 2, EventId("launch", "session", 4))
    assert checkpoint.ids_of(entry) == [EventId("launch", "session", 4)]
    older = replace(entry, body={k: v for k, v in entry.body.items() if k != "id"})
    assert checkpoint.ids_of(older) == []
    assert checkpoint.event_of(older) == checkpoint.event_of(entry) == event


class _FullDisk(NullJournal):
    """A journal whose disk is full, or has room again."""

    def __init__(self) -> None:
        self.applied, self.full = AppliedIds("launch"), True

    def write_event(self, event: Any, event_id: EventId) -> None:
        if self.full:
            raise JournalError("the disk", "no space left on device", "free some space")


def test_an_event_that_cannot_be_written_does_not_count_as_applied() -> None:
    """A sender that has given it up asks for the last applied event."""

    class Planner:
        next_step = 3
        handled: ClassVar[list[Any]] = []

        def handle(self, event: Any) -> list[Any]:
            self.handled.append(event)
            return [event]

    planner, ran = Planner(), list[Any]()
    gate = WriteAheadGate(CommandLoop(ran.append), lambda: cast(Any, planner))
    gate.journal = disk = _FullDisk()
    with pytest.raises(JournalError):
        gate.record(Skip((5,)), 1)
    assert gate.applied.last(SESSION) == 0
    assert [type(command) for command in ran] == [EndOfJob], "the job ends"
    disk.full = False
    assert gate.record(Skip((5,)), 1) == [Skip((5,))]
    assert gate.applied.last(SESSION) == 1
    assert gate.record(Skip((5,)), 1) == [], "it is sent again"
