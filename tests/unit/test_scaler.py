"""Stories of the scaler: what is seen, and what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from overlord.scaling.decisions import CannotKeepUp, Decision, ReadAhead, Scale, current_shortages
from overlord.scaling.scaler import Observation, Scaler, ScalingLimits, SourceSample

LIMITS = ScalingLimits(cores=4, patience=2, idle_patience=3, cool_down_s=2.0)


def seen(
    name: str = "photos", share: float = 0.5, lanes: float = 0.5, **changes: Any
) -> SourceSample:
    """A source that kept ``lanes`` cores busy for a second, with ten steps of 100 samples."""
    n = 1000 * share
    settings = {
        "ahead": share,
        "drawn": n,
        "read": n,
        "busy_s": lanes,
        "took_s": lanes,
        "hosts": (0,),
        "most": 8,
    }
    return SourceSample(name=name, share=share, **{**settings, **changes})


def look(*sources: SourceSample, **changes: Any) -> Observation:
    hosts = len({h for s in sources for h in s.hosts})
    return Observation(
        **{
            "seconds": 1.0,
            "planned": 10,
            "taken": 10,
            "waited_s": 0.0,
            "hosts": hosts,
            "sources": sources,
            **changes,
        }
    )


def told(scaler: Scaler, observed: Observation, looks: int, first: int = 1) -> list[Decision]:
    return [
        decision for k in range(looks) for decision in scaler.handle(observed, float(first + k))
    ]


def test_a_source_that_fills_its_worker_gets_more_once_that_was_seen_twice() -> None:
    scaler, full = Scaler(LIMITS), look(seen(lanes=1.0), waited_s=0.2)
    assert told(scaler, full, 1) == []
    [scale] = told(scaler, full, 1, first=2)
    assert scale == Scale(
        source="photos",
        hosts=2,
        had=1,
        reason="625 samples per second of 2 ms each take 1.2 cores, its workers have room for 1 cores, "
        "trainers wait 20% of their time",
    )
    assert str(scale).startswith("photos: 1 -> 2 loader workers: 625 samples")


def test_workers_come_before_a_schedule_needs_them() -> None:
    soon = look(seen(share=0.1, lanes=0.1, ahead=0.8), seen("text", share=0.9, lanes=0.1))
    [scale] = told(Scaler(LIMITS), soon, 2)
    assert (scale.source, scale.hosts) == ("photos", 2)
    assert "the mixture will give it 80.0% in place of 10.0%" in scale.reason


def test_a_source_whose_workers_idle_gives_them_back_but_not_at_once() -> None:
    scaler, idle = Scaler(LIMITS), look(seen(lanes=0.2, hosts=(0, 1, 2)))
    assert told(scaler, idle, 2) == []
    [scale] = told(scaler, idle, 1, first=3)
    assert (scale.hosts, scale.had) == (1, 3)


def test_a_mixture_that_goes_up_and_down_is_not_followed_down_before_it_stays_there() -> None:
    high, low = (
        look(seen(share=0.8, lanes=1.6, hosts=(0, 1))),
        look(seen(share=0.1, lanes=0.2, hosts=(0, 1))),
    )
    scaler, now = Scaler(LIMITS), 0
    for _ in range(4):
        assert told(scaler, high, 4, first=now + 1) == []
        assert told(scaler, low, 4, first=now + 5) == []
        now += 8
    scale, *_ = told(scaler, low, 4, first=now + 1)
    assert (scale.hosts, scale.had) == (1, 2)


def test_after_a_change_a_source_is_left_alone_for_a_while() -> None:
    scaler = Scaler(replace(LIMITS, cool_down_s=10.0))
    assert len(told(scaler, look(seen(lanes=1.0), waited_s=0.2), 2)) == 1
    assert told(scaler, look(seen(lanes=2.0, hosts=(0, 1)), waited_s=0.5), 9, first=3) == []


def test_while_a_change_is_under_way_no_other_is_decided() -> None:
    scaler = Scaler(LIMITS)
    assert told(scaler, look(seen(lanes=1.0), waited_s=0.2, changing=True), 5) == []
    assert len(told(scaler, look(seen(lanes=1.0), waited_s=0.2), 1, first=6)) == 1


def test_a_source_that_gets_no_more_is_named_once_with_what_it_would_take() -> None:
    scaler, short = Scaler(LIMITS), look(seen(lanes=1.0, most=1), waited_s=0.5)
    [named] = told(scaler, short, 6)
    assert isinstance(named, CannotKeepUp)
    assert (named.hosts, named.wanted) == (1, 3)
    assert (
        "it has 1 loader: more chunks open together (shuffle_chunks) or loaders= allow more"
        in str(named)
    )
    assert current_shortages([named]) == [named]
    assert current_shortages([named, Scale(source="photos", hosts=2, had=1, reason="")]) == []


def test_who_holds_workers_that_it_does_not_need_gives_them_up_sooner_when_another_needs_them() -> (
    None
):
    full = look(seen(lanes=1.0, hosts=(0,)), seen("text", lanes=0.1, hosts=(1, 2, 3)), waited_s=0.3)
    found = told(Scaler(replace(LIMITS, idle_patience=50)), full, 2)
    assert [(type(d).__name__, d.source) for d in found] == [
        ("CannotKeepUp", "photos"),
        ("Scale", "text"),
    ]
    assert "the 4 cores for loading and the memory allow no more loader workers" in str(found[0])


def test_memory_bounds_workers_as_cores_do() -> None:
    scaler = Scaler(replace(LIMITS, cores=64, memory_bytes=2**31))
    [named] = told(scaler, look(seen(lanes=1.0), waited_s=0.2, host_bytes=2**31), 3)
    assert isinstance(named, CannotKeepUp)


def test_a_source_that_waits_for_its_storage_gets_no_workers_and_is_named() -> None:
    slow = look(seen(lanes=0.1, took_s=1.0, waited_for=True, most=1), waited_s=0.5)
    [named] = told(Scaler(LIMITS), slow, 6)
    assert isinstance(named, CannotKeepUp)
    assert (named.what, named.wanted) == ("loaders", 2)
    assert "a sample takes 2 ms, of which 0.2 ms are CPU time" in named.reason


def test_a_source_whose_reads_are_slow_now_and_then_is_read_further_ahead() -> None:
    scaler = Scaler(LIMITS, read_ahead=2)
    [ahead] = told(scaler, look(seen(read_s=0.01, slow_read_s=0.5)), 4)
    assert ahead == ReadAhead(
        source="photos", steps=7, reason="its slow reads take 0.5 s, usual ones 0.01 s"
    )
    [less] = told(scaler, look(seen(read_s=0.01, slow_read_s=0.011)), 4)
    assert isinstance(less, ReadAhead)
    assert less.steps == 2


def test_where_nothing_is_moved_a_source_is_named_with_the_loaders_that_it_would_take() -> None:
    """A place is a loader there, and a source has as many as it has."""
    mine = seen(lanes=1.0, hosts=(3,), most=1)
    scaler = Scaler(LIMITS, fixed=True)
    [named] = told(scaler, look(mine, waited_s=0.2), 9)
    assert isinstance(named, CannotKeepUp)
    assert (named.what, named.hosts, named.wanted) == ("loaders", 1, 2)
    assert str(named) == (
        "photos cannot keep up: it would take 2 loaders and has 1: 625 samples per second "
        "of 2 ms each, trainers wait 20% of their time; loaders= "
        "and autoscale=True give it more loaders"
    )
    assert told(Scaler(LIMITS, fixed=True), look(mine), 9) == [], "nobody waits for it"
    assert (
        told(Scaler(LIMITS, fixed=True), look(seen(lanes=0.1, hosts=(3, 4, 5), most=3)), 20) == []
    ), "none is taken away"


def test_where_all_cores_are_taken_it_is_said_that_loaders_alone_are_not_enough() -> None:
    both = seen(lanes=1.0, hosts=(0,), most=1), seen("scenes", lanes=1.0, hosts=(1,), most=1)
    found = told(Scaler(replace(LIMITS, cores=2), fixed=True), look(*both, waited_s=0.2), 2)
    assert {d.source for d in found} == {"photos", "scenes"}
    assert all(
        d.reason.endswith("; all sources together need 2.5 cores of 2, so that alone is not enough")
        for d in found
    )


def test_where_nothing_is_moved_slow_reads_are_read_ahead_too() -> None:
    [ahead] = told(Scaler(LIMITS, fixed=True), look(seen(read_s=0.01, slow_read_s=0.5)), 4)
    assert isinstance(ahead, ReadAhead)


def test_nothing_is_decided_while_nobody_takes_a_step() -> None:
    assert told(Scaler(LIMITS), look(seen(lanes=1.0), taken=0, waited_s=0.0), 9) == []


def test_limits_that_cannot_be_are_told_together() -> None:
    with pytest.raises(
        ValueError,
        match="cores: expected a whole number of at least 1, got 0; interval_s: expected a finite number above 0, got 0",
    ):
        ScalingLimits(cores=0, interval_s=0)


def test_trainers_that_only_wait_are_taken_for_twenty_times_as_fast_and_no_more() -> None:
    """Waits are told when they are over: they may be longer than the time that was looked at."""
    scaler = Scaler(LIMITS)
    scaler.handle(look(seen(), taken=2, waited_s=5.0), 1.0)
    assert (scaler.waited, scaler.pace, scaler.rate) == (1.0, 40.0, 2.0)


def test_a_source_that_was_read_and_never_drawn_needs_what_its_share_will_take() -> None:
    new = seen("new", share=0.5, drawn=0.0, lanes=2.0)
    [scale] = told(Scaler(LIMITS), look(new, seen("old", lanes=0.1, hosts=(1,))), 2)
    assert isinstance(scale, Scale)
    assert scale.source == "new"


def test_a_source_whose_workers_are_full_gets_more_before_trainers_wait() -> None:
    [scale] = told(Scaler(LIMITS), look(seen(lanes=1.0)), 2)
    assert isinstance(scale, Scale)
    assert scale.hosts == 2


def test_what_is_reckoned_leads_to_nothing_while_nobody_waits_and_workers_idle() -> None:
    """Half of what was drawn had been read before: by its cost it would need more than its worker,
    and it does not.
    """
    assert told(Scaler(LIMITS), look(seen(drawn=1000.0, read=400.0, lanes=0.45)), 6) == []
    [scale] = told(
        Scaler(LIMITS), look(seen(drawn=1000.0, read=400.0, lanes=0.45), waited_s=0.05), 2
    )
    assert isinstance(scale, Scale), "but where they wait"


def test_so_many_workers_are_given_back_as_leave_the_others_well_below_their_target() -> None:
    [scale] = told(Scaler(LIMITS), look(seen(lanes=0.6, hosts=(0, 1, 2))), 3)
    assert scale.hosts == 2, "one alone would be 60 % busy: below its target, and too close to it"


def test_workers_must_idle_so_many_looks_in_a_row_before_they_are_given_back() -> None:
    scaler = Scaler(LIMITS)
    assert told(scaler, look(seen(lanes=0.6, hosts=(0, 1))), 3) == []
    assert told(scaler, look(seen(lanes=0.0, hosts=(0, 1))), 2, first=4) == []
    assert len(told(scaler, look(seen(lanes=0.0, hosts=(0, 1))), 1, first=6)) == 1


def test_a_source_on_three_workers_is_busy_when_half_of_all_three_is() -> None:
    assert (
        told(Scaler(LIMITS), look(seen(hosts=(0, 1, 2), drawn=1000.0, read=100.0, lanes=0.6)), 6)
        == []
    )


def test_the_heaviest_of_a_crowded_worker_goes_elsewhere_and_the_others_wait_for_the_room_it_leaves() -> (
    None
):
    crowd = look(seen("a", lanes=0.5), seen("z", lanes=0.7), waited_s=0.2)
    assert [(type(d), d.source) for d in told(Scaler(LIMITS), crowd, 2)] == [(Scale, "z")]
    found = told(Scaler(replace(LIMITS, cores=1)), crowd, 2)
    assert [(type(d), d.source) for d in found] == [(CannotKeepUp, "z")], (
        "nor are they named for it"
    )


def test_one_change_at_a_time_and_what_is_missed_before_what_idles() -> None:
    both = look(seen(lanes=1.0), seen("text", lanes=0.1, hosts=(1, 2)), waited_s=0.2)
    found = told(Scaler(replace(LIMITS, cores=8, idle_patience=2)), both, 2)
    assert [(d.source, d.hosts) for d in found if isinstance(d, Scale)] == [("photos", 2)]


def test_who_idles_most_gives_back_first() -> None:
    [scale] = told(
        Scaler(LIMITS),
        look(seen("a", lanes=0.5, hosts=(0, 1)), seen("b", lanes=0.1, hosts=(2, 3, 4))),
        3,
    )
    assert scale.source == "b"


def test_a_source_gets_as_many_workers_as_bring_it_to_its_target() -> None:
    [scale] = told(Scaler(LIMITS), look(seen(lanes=1.0), waited_s=0.35), 2)
    assert scale.hosts == 3, "two would be 77 % busy"


def test_after_a_change_looks_are_counted_anew() -> None:
    scaler = Scaler(replace(LIMITS, patience=3, cool_down_s=1.0))
    assert len(told(scaler, look(seen(lanes=1.0), waited_s=0.2), 5)) == 1


def test_before_it_is_known_what_a_worker_holds_there_is_no_room_for_one() -> None:
    found = told(
        Scaler(replace(LIMITS, memory_bytes=2**40)),
        look(seen(lanes=1.0), waited_s=0.2, host_bytes=0),
        3,
    )
    assert {type(d) for d in found} == {CannotKeepUp}


def test_a_source_is_named_again_when_it_is_another_matter_or_was_well_meanwhile() -> None:
    scaler = Scaler(replace(LIMITS, window=1))
    short, well = look(seen(lanes=1.0, most=1), waited_s=0.5), look(seen(lanes=0.1, most=1))
    assert len(told(scaler, short, 6)) == 1
    assert told(scaler, well, 12, first=7) == []
    assert len(told(scaler, short, 8, first=19)) == 1
    assert len(told(scaler, look(seen(lanes=4.0, most=1), waited_s=0.5), 8, first=27)) >= 1


@pytest.mark.parametrize(
    ("changes", "waited_s", "looks"),
    [
        ({"lanes": 0.1, "took_s": 1.0, "most": 8}, 0.5, 6),
        ({"lanes": 0.1, "took_s": 1.0, "most": 1}, 0.5, 2),
        ({"lanes": 0.6, "took_s": 1.1, "most": 1}, 0.2, 6),
        ({"lanes": 0.1, "took_s": 1.0, "most": 1}, 0.05, 6),
    ],
    ids=[
        "it has enough loaders",
        "it was seen twice only",
        "it is its core that it waits for",
        "trainers hardly wait",
    ],
)
def test_a_source_is_not_said_to_wait_for_storage_when(
    changes: dict[str, Any], waited_s: float, looks: int
) -> None:
    assert (
        told(Scaler(LIMITS), look(seen(waited_for=True, **changes), waited_s=waited_s), looks) == []
    )


def test_a_source_whose_workers_are_full_is_short_of_workers_whatever_its_storage_does() -> None:
    found = told(
        Scaler(LIMITS), look(seen(lanes=1.0, took_s=5.0, waited_for=True, most=1), waited_s=0.5), 6
    )
    assert {getattr(d, "what", "") for d in found} == {"loader workers"}


def test_read_ahead_is_by_the_steps_that_trainers_do_take_within_a_bound_and_does_not_follow_every_change() -> (
    None
):
    scaler = Scaler(LIMITS, read_ahead=2)
    [ahead] = told(scaler, look(seen(lanes=0.1, read_s=0.01, slow_read_s=0.5), waited_s=0.5), 1)
    assert isinstance(ahead, ReadAhead)
    assert ahead.steps == 7, "ten steps a second, though they would take twenty"
    assert (
        told(scaler, look(seen(lanes=0.1, read_s=0.01, slow_read_s=0.6), waited_s=0.5), 1, first=2)
        == []
    )
    [most] = told(
        Scaler(LIMITS, read_ahead=2), look(seen(lanes=0.1, read_s=0.01, slow_read_s=100.0)), 1
    )
    assert isinstance(most, ReadAhead)
    assert most.steps == 32
    named = CannotKeepUp(source="photos", hosts=1, wanted=3, reason="")
    assert current_shortages([named, ahead]) == [named], "it is no remedy"


def test_thresholds_stand_in_order() -> None:
    with pytest.raises(
        ValueError, match=r"expected 0 < low < target < high <= 1, got 0\.8, 0\.7, 0\.85"
    ):
        ScalingLimits(cores=1, low=0.8)


def test_shares_are_shown_as_a_moving_average() -> None:
    scaler = Scaler(LIMITS)
    told(scaler, look(seen(share=0.5)), 1)
    told(scaler, look(seen(share=1.0)), 1, first=2)
    assert scaler.estimates()["photos"]["share"] == pytest.approx(0.7)


# code that holds the interpreter lock

THREADED = replace(LIMITS, cores=3, lanes=3.0)


def test_pieces_of_work_that_take_turns_on_one_core_get_another_process_though_their_worker_has_threads_left() -> (
    None
):
    """Three pieces in progress kept one core busy between them: by Karp and Flatt all of it is
    serial.
    """
    scaler = Scaler(THREADED)
    [scale] = told(scaler, look(seen(lanes=1.0, took_s=3.0, most=3), waited_s=0.5), 2)
    assert (scale.source, scale.hosts) == ("photos", 3), "one for each core"
    assert scaler.estimates()["photos"]["locked"] == 1.0


def test_code_that_is_not_known_to_release_the_lock_gets_processes_before_anything_was_measured() -> (
    None
):
    [scale] = told(Scaler(THREADED), look(seen(lanes=0.95, free_s=0.0, most=3)), 2)
    assert (scale.source, scale.hosts) == ("photos", 2)
    assert told(Scaler(THREADED), look(seen(lanes=0.95, most=3)), 6) == [], (
        "threads do the same for code that releases it"
    )


def test_threads_that_were_seen_side_by_side_count_as_cores_whatever_was_assumed() -> None:
    scaler = Scaler(replace(THREADED, cores=6))
    assert told(scaler, look(seen(lanes=2.0, took_s=2.1, free_s=0.0, most=3)), 6) == []
    assert scaler.estimates()["photos"]["locked"] == pytest.approx(0.045, abs=0.01)


def test_no_process_is_added_where_threads_keep_all_cores_busy() -> None:
    found = told(Scaler(THREADED), look(seen(lanes=2.8, took_s=3.0, most=3), waited_s=0.2), 6)
    assert [type(d) for d in found] == [CannotKeepUp]


def test_what_waits_for_storage_says_nothing_of_the_lock_and_what_was_measured_is_kept() -> None:
    scaler = Scaler(replace(THREADED, window=1))
    told(scaler, look(seen(lanes=0.3, took_s=3.0)), 4)
    assert scaler.estimates()["photos"]["locked"] == 0.0
    told(scaler, look(seen(lanes=1.0, took_s=3.0)), 4, first=5)
    told(scaler, look(seen(lanes=0.3, took_s=0.3)), 4, first=9)
    assert scaler.estimates()["photos"]["locked"] == 1.0


def test_a_worker_whose_lock_one_source_holds_has_no_room_for_another_that_wants_it() -> None:
    both = seen("a", lanes=0.6, free_s=0.0), seen("z", lanes=0.7, free_s=0.0)
    assert [d.source for d in told(Scaler(THREADED), look(*both, waited_s=0.1), 2)] == ["z"]
    free = seen("a", lanes=0.6), seen("z", lanes=0.7)
    assert told(Scaler(THREADED), look(*free, waited_s=0.1), 6) == []


def test_where_nothing_is_moved_processes_are_the_remedy_for_code_that_holds_the_lock() -> None:
    """Three loaders in one process are one core for it."""
    mine = seen(lanes=1.0, took_s=3.0, hosts=(3, 4, 5), most=3, free_s=0.0, processes=1)
    [named] = told(Scaler(LIMITS, fixed=True), look(mine, waited_s=0.2), 9)
    assert isinstance(named, CannotKeepUp)
    assert named.reason.endswith(
        "its code holds the interpreter lock: workers='processes', or runtime='process' "
        "with autoscale=True, "
        "give it more cores"
    )


# workers that are there


def test_where_no_worker_can_be_added_a_source_is_read_on_those_that_have_room() -> None:
    """Three workers of one thread on three cores: two of them idle with what they read."""
    mine = seen(lanes=1.0, most=3, able=(1, 2), hosts=(0,))
    beside = (
        seen("text", lanes=0.1, hosts=(1,), most=1),
        seen("code", lanes=0.6, hosts=(2,), most=1),
    )
    [scale] = told(Scaler(replace(LIMITS, cores=3)), look(mine, *beside, waited_s=0.2), 2)
    assert (scale.source, scale.hosts, scale.on) == ("photos", 2, (1,)), (
        "the one with the most room"
    )
    [scale] = told(Scaler(replace(LIMITS, cores=4)), look(mine, *beside, waited_s=0.2), 2)
    assert (scale.hosts, scale.on) == (2, ()), "a new one where there is a core for it"


def test_workers_without_room_are_no_remedy() -> None:
    mine = seen(lanes=1.0, most=3, able=(1, 2), hosts=(0,))
    beside = (
        seen("text", lanes=0.9, hosts=(1,), most=1),
        seen("code", lanes=0.9, hosts=(2,), most=1),
    )
    found = told(Scaler(replace(LIMITS, cores=3)), look(mine, *beside, waited_s=0.2), 3)
    assert {type(d) for d in found} == {CannotKeepUp}
    lock = seen("text", lanes=0.9, free_s=0.0, hosts=(1,), most=1)
    other = seen(lanes=1.0, most=2, able=(1,), hosts=(0,), free_s=0.0)
    assert {
        type(d)
        for d in told(Scaler(replace(THREADED, cores=2)), look(other, lock, waited_s=0.2), 3)
    } == {CannotKeepUp}, "a lock is one"
