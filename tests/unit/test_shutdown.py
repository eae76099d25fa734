"""A shutdown completes, whatever interrupts it."""

from __future__ import annotations

import pytest

from overlord.process.shutdown import CloseOnce, run_all


def test_whatever_interrupts_a_step_the_others_are_done_and_the_next_who_comes_does_that_one() -> (
    None
):
    done: list[str] = []
    faults: list[BaseException] = [KeyboardInterrupt(), OSError("later")]

    def interrupted() -> None:
        done.append("tried")
        if faults:
            raise faults.pop(0)

    ending = CloseOnce()
    steps = lambda: [lambda: done.append("first"), interrupted, lambda: done.append("last")]  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        ending.run(steps)
    assert done == ["first", "tried", "last"]
    with pytest.raises(OSError, match="later"):
        ending.run(steps)
    ending.run(steps)
    ending.run(steps)
    assert done == ["first", "tried", "last", "tried", "tried"]


def test_what_went_wrong_first_is_raised() -> None:
    def fails(fault: BaseException) -> None:
        raise fault

    with pytest.raises(KeyboardInterrupt):
        run_all([lambda: fails(KeyboardInterrupt()), lambda: fails(OSError())])


def test_the_handler_of_a_signal_that_ends_what_is_being_ended_waits_for_nobody() -> None:
    ending, done = CloseOnce(), list[str]()
    ending.run(
        lambda: [
            lambda: ending.run(lambda: [lambda: done.append("twice")]),
            lambda: done.append("once"),
        ]
    )
    assert done == ["once"]
