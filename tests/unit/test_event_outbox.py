"""What is said to a planner elsewhere: it has happened once, or not at all, whoever tells of it
first.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from overlord.errors import DataStall, PlanError
from overlord.messages.control import SetMixture
from overlord.session.events import EventOutbox

A, B = SetMixture(10, {"a": 1.0}), SetMixture(10, {"a": 2.0})


def silent() -> None:
    raise DataStall("the planner", 25.0)


def told(late: list[SetMixture], event: SetMixture) -> Callable[[], None]:
    return lambda: late.append(event)


def given_up(sayings: EventOutbox, event: SetMixture, late: list[SetMixture]) -> None:
    with pytest.raises(DataStall):
        sayings.send(event, silent, told(late, event))


def test_what_was_answered_is_not_told_again() -> None:
    sayings, late = EventOutbox(), list[SetMixture]()
    sayings.send(A, lambda: None, told(late, A))
    sayings.confirmed(A)
    assert late == []


def test_what_was_given_up_and_taken_later_is_told_once() -> None:
    sayings, late = EventOutbox(), list[SetMixture]()
    given_up(sayings, A, late)
    sayings.confirmed(B)
    assert late == []
    sayings.confirmed(A)
    sayings.confirmed(A)
    assert late == [A]


def test_what_is_told_of_before_it_is_given_up_has_been_answered() -> None:
    sayings, late = EventOutbox(), list[SetMixture]()

    def too_late() -> None:
        sayings.confirmed(A)
        silent()

    sayings.send(A, too_late, told(late, A))
    assert late == []


def test_news_of_what_was_answered_are_not_taken_for_those_of_an_equal_one() -> None:
    sayings, late = EventOutbox(), list[SetMixture]()
    sayings.send(A, lambda: None, told(late, A))

    def news_of_the_first() -> None:
        sayings.confirmed(A)
        silent()

    with pytest.raises(DataStall):
        sayings.send(A, news_of_the_first, told(late, A))
    assert sayings.unsettled
    sayings.confirmed(A)
    assert late == [A]


def test_what_was_given_up_is_settled_by_what_the_planner_has_taken_in_the_order_of_saying() -> (
    None
):
    sayings, late = EventOutbox(), list[SetMixture]()
    given_up(sayings, A, late)
    given_up(sayings, B, late)
    sayings.settle([A])
    assert late == [A], "the other was refused"
    assert not sayings.unsettled
    sayings.confirmed(B)
    assert late == [A]


def test_what_was_refused_is_forgotten() -> None:
    sayings, late = EventOutbox(), list[SetMixture]()

    def refused() -> None:
        raise PlanError("planned already")

    with pytest.raises(PlanError):
        sayings.send(A, refused, told(late, A))
    sayings.confirmed(A)
    assert late == []


def test_what_the_next_planner_finds_counts_if_it_was_not_known_before() -> None:
    """Said, changed, and said again: of two that are equal the journal may hold the first alone."""
    sayings, late = EventOutbox(), list[SetMixture]()
    sayings.send(A, lambda: None, told(late, A))
    sayings.send(B, lambda: None, told(late, B))
    given_up(sayings, A, late)
    sayings.found([A, B])
    assert late == []
    sayings.found([A, B, A])
    assert late == [A]
