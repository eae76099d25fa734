"""What a worker tells the planner, and when: at once what someone waits for, the rest together."""

from __future__ import annotations

from overlord.cluster.worker import QUIET_S, EventQueue
from overlord.planning.draw import HORIZON_STRIDE, LoaderRequests


def test_what_nobody_waits_for_is_told_with_what_comes_after_it() -> None:
    events = EventQueue(now=lambda: 100.0)  # nothing of this takes any time
    events.put("first", hurry=False)
    assert events.ask().result(0) == ["first"]  # nothing was told for a while
    asked = events.ask()
    events.put("ahead", hurry=False)
    left = events.answer()
    assert left is not None
    assert 0 < left <= QUIET_S  # it is looked at again by then
    assert not asked.done()
    events.put("wanted")
    assert events.answer() is None
    assert asked.result(0) == ["ahead", "wanted"]


def test_what_waits_is_told_when_a_draw_begins_to_wait_for_it_also_if_nobody_has_asked_yet() -> (
    None
):
    events = EventQueue()
    events.put("first")
    assert events.ask().result(0) == ["first"]
    events.put("ahead", hurry=False)
    events.hurry()
    assert events.answer() is None  # nobody has asked
    assert events.ask().result(0) == ["ahead"]


def test_the_horizon_is_told_in_strides_and_a_loader_always_has_groups_to_open() -> None:
    demand, told = LoaderRequests([2], read_ahead=2), -1
    words = 0
    for group in range(1, 40):
        for refill in demand.move_horizon(0, group):
            told, words = refill.horizon, words + 1
        assert group + 8 <= told <= group + 8 + HORIZON_STRIDE
    assert words <= 2 * (1 + 40 // HORIZON_STRIDE)
    demand.restarted(0)
    assert len(demand.move_horizon(0, 39)) == 2
