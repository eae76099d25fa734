"""A head that answers is used at once, a lost head is waited for, and after a deadline it is an
error.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from overlord.errors import OverlordError
from overlord.ray import head
from overlord.ray.head import Head


class Answers:
    """The results of pings: a missing one is a timeout, and the last one is repeated."""

    def __init__(self, *there: bool):
        self.there: Iterator[bool] = iter(there)
        self.last, self.asked = there[-1], 0

    def __call__(self) -> None:
        self.asked += 1
        if not next(self.there, self.last):
            raise ConnectionRefusedError


class Time:
    """A clock that advances with every sleep."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(autouse=True)
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    monkeypatch.setattr(head, "time", made := Time())
    return made


def test_one_that_comes_back_was_waited_for() -> None:
    answers = Answers(False, False, True)
    assert Head("h:1", answers, lost_after_s=60.0).wait()
    assert answers.asked == 3


def test_one_that_stays_away_is_given_up_in_words_and_not_waited_for_again() -> None:
    answers = Answers(False)
    head = Head("10.0.0.1:6379", answers, lost_after_s=20.0)
    with pytest.raises(
        OverlordError,
        match=r"Ray head at 10\.0\.0\.1:6379: expected an answer, got none for 20 s"
        r".*its journal",
    ):
        head.wait()
    before = answers.asked
    with pytest.raises(OverlordError, match="Ray head at"):
        head.wait()
    assert answers.asked == before + 1


def test_its_patience_begins_anew_when_it_has_answered() -> None:
    head = Head("h:1", Answers(False, True, False), lost_after_s=20.0)
    assert not head.answers()
    assert head.wait()
    with pytest.raises(OverlordError, match="Ray head at"):
        head.wait()


def test_one_that_nobody_has_asked_since_may_have_been_there(time: Time) -> None:
    head = Head("h:1", Answers(False, False, True), lost_after_s=20.0)
    assert not head.answers()
    time.sleep(21.0)
    assert head.wait(), "it is waited for as if it had never been missed"


def test_nobody_is_waited_for_by_nobody() -> None:
    assert not Head("h:1", Answers(False), lost_after_s=60.0).wait(lambda: False)
