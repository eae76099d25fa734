"""Laws of schedules: for every step, whatever their parameters and whatever was reported."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord import Job, Source
from overlord.errors import JobError
from overlord.mesh import Batch
from overlord.planning import integer_math
from overlord.planning.draw import whole_weights
from overlord.planning.schedule.base import shares

S = ov.schedule
NAMES = ("a", "b", "c", "d")
law = settings(deadline=None, max_examples=100)

some_weights = st.dictionaries(
    st.sampled_from(NAMES), st.floats(0, 1e300) | st.integers(0, 2**53), min_size=1
).filter(lambda w: any(w.values()))
sizes = st.dictionaries(
    st.sampled_from(NAMES),
    st.floats(0, 1e15, allow_subnormal=False) | st.integers(0, 10**15),
    min_size=1,
).filter(lambda s: any(s.values()))
steps = st.integers(0, 2**40)
lengths = st.integers(1, 10**9)
taus = st.floats(0.01, 1000)
floors = st.floats(0, 0.25) | st.dictionaries(
    st.sampled_from(NAMES), st.floats(0, 0.25), max_size=4
)
bandits = st.builds(
    S.odm,
    st.just(NAMES)
    | st.tuples(*[st.floats(0.01, 100)] * 4).map(lambda w: dict(zip(NAMES, w, strict=True))),
    warmup=st.integers(0, 5),
    floor=floors,
    scale=st.floats(0.1, 100),
    decay=st.floats(0.1, 1),
    rate=st.none() | st.floats(0.001, 10),
)


def scheduled(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    stages = st.dictionaries(st.integers(1, 10**6), inner, max_size=3)
    return (
        st.builds(lambda first, rest: S.staged({0: first, **rest}), inner, stages)
        | st.builds(S.linear, inner, inner, lengths, begin=st.integers(0, 10**6))
        | st.builds(S.cosine, inner, inner, lengths, begin=st.integers(0, 10**6))
    )


plain = (
    st.builds(S.constant, some_weights)
    | st.builds(S.temperature, taus, sizes)
    | st.builds(
        S.temperature, taus, sizes, end_tau=taus, steps=lengths, begin=st.integers(0, 10**6)
    )
)
schedules = st.recursive(plain | some_weights | bandits, scheduled, max_leaves=4).filter(callable)
reports = st.dictionaries(
    st.sampled_from([f"loss/{n}" for n in NAMES] + ["lr", "loss/x"]),
    st.floats() | st.floats(0, 20) | st.floats(0, 20),
    max_size=5,
)
histories = st.lists(reports, min_size=1, max_size=30)


def right(weights: Mapping[str, float]) -> bool:
    values = list(weights.values())
    return (
        all(isinstance(w, float) and 0 <= w < math.inf for w in values)
        and any(values)
        and set(weights) <= set(NAMES)
    )


# every schedule


@law
@given(schedules, st.lists(steps, min_size=1, max_size=6), histories)
def test_weights_are_finite_and_never_all_zero(
    schedule: Any, at: list[int], history: list[dict[str, float]]
):
    for step, feedback in zip(sorted(at), history, strict=False):
        said = schedule(step, feedback)
        assert right(said)
        assert sum(whole_weights([said.get(name, 0.0) for name in NAMES])) == 2**40


@law
@given(schedules, histories)
def test_equal_inputs_give_equal_outputs(schedule: Any, history: list[dict[str, float]]):
    other = copy.deepcopy(schedule)
    assert [schedule(step, f) for step, f in enumerate(history)] == [
        other(step, f) for step, f in enumerate(history)
    ]


@law
@given(schedules, histories, st.data())
def test_a_state_restored_at_any_step_goes_on_as_if_nothing_happened(
    schedule: Any, history: list[dict[str, float]], data: st.DataObject
):
    at, fresh = data.draw(st.integers(0, len(history))), copy.deepcopy(schedule)
    for step in range(at):
        schedule(step, history[step])
    fresh.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert fresh.state_dict() == schedule.state_dict()
    assert [fresh(s, history[s]) for s in range(at, len(history))] == [
        schedule(s, history[s]) for s in range(at, len(history))
    ]
    assert fresh.state_dict() == schedule.state_dict()


def job(mixture: Any) -> Job:
    return Job(
        name="x",
        sources=[Source(n, "/x") for n in NAMES],
        batch=Batch(samples=1, context=1),
        mixture=mixture,
    )


@settings(law, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedules)
def test_a_schedule_that_is_written_and_read_is_the_same(tmp_path: Path, schedule: Any):
    (tmp_path / "job.yaml").write_text(job(schedule).to_yaml())
    again = ov.Job.from_yaml(tmp_path / "job.yaml").mixture
    assert again == schedule
    assert again.fingerprint == schedule.fingerprint


@law
@given(schedules, schedules)
def test_fingerprints_tell_schedules_apart(one: Any, two: Any):
    assert (one.fingerprint == two.fingerprint) == (one == two)


keys = st.text(max_size=3) | st.sampled_from(["schedule", "a", "steps"]) | st.integers(0, 9)
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["linear", "web", "odm"]),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(keys, x, max_size=3),
    max_leaves=6,
)


@settings(law, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(S.BUILT_IN)), st.data())
def test_whatever_stands_in_a_file_is_a_schedule_or_a_job_error(
    tmp_path: Path, kind: str, data: st.DataObject
):
    names = [
        "weights",
        "stages",
        "start",
        "end",
        "steps",
        "begin",
        "tau",
        "sizes",
        "end_tau",
        "column",
        "low",
        "high",
        "floor",
        "rate",
    ]
    given = data.draw(
        st.dictionaries(st.sampled_from(names), anything | some_weights | st.integers(0, 9))
    )
    whole = {
        "name": "x",
        "sources": {n: {"uri": "/x"} for n in NAMES},
        "batch": {"samples": 1, "context": 1},
    }
    (tmp_path / "job.yaml").write_text(
        yaml.safe_dump({**whole, "look_ahead": 4, "mixture": {"schedule": kind, **given}})
    )
    try:
        found = ov.Job.from_yaml(tmp_path / "job.yaml").mixture.kind
    except JobError as refused:
        found = refused.problems
    assert found == kind or (isinstance(found, list) and found), "a refusal says why"


# ramps


@law
@given(
    st.sampled_from([S.linear, S.cosine]),
    some_weights,
    some_weights,
    st.integers(1, 10**7),
    st.integers(0, 10**6),
    steps,
)
def test_a_ramp_hits_its_ends_exactly(
    ramp: Any, start: Any, end: Any, n: int, begin: int, later: int
):
    schedule = ramp(start, end, n, begin=begin)
    assert schedule(0, {}) == schedule(begin, {}) == start
    assert schedule(begin + n, {}) == schedule(begin + n + later, {}) == end


@law
@given(
    st.sampled_from([S.linear, S.cosine]),
    some_weights,
    some_weights,
    st.integers(1, 10**7),
    st.data(),
)
def test_a_ramp_never_turns_back(ramp: Any, start: Any, end: Any, n: int, data: st.DataObject):
    schedule = ramp(start, end, n)
    at = sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=8)))
    for name in NAMES:
        way = [
            shares(schedule(0, {})).get(name, 0.0),
            *(_share(schedule, k, n, name) for k in at),
            shares(schedule(n, {})).get(name, 0.0),
        ]
        assert way == sorted(way) or way == sorted(way, reverse=True)


def _share(schedule: Any, step: int, n: int, name: str) -> float:
    said = schedule(step, {}) if 0 < step < n else shares(schedule(step, {}))
    return said.get(name, 0.0)


def test_rounding_does_not_carry_a_ramp_past_its_end():
    """So close to the end the cosine is 1 to the last bit, and a + (b - a) is not b."""
    schedule = S.cosine({"a": 6, "b": 60}, {"a": 32, "b": 60}, 10**9)
    assert schedule(10**9 - 1, {})["a"] <= shares({"a": 32, "b": 60})["a"]


@law
@given(some_weights, some_weights, st.integers(2, 10**6), st.data())
def test_a_linear_ramp_moves_by_equal_amounts(start: Any, end: Any, n: int, data: st.DataObject):
    k = data.draw(st.integers(1, n - 1))
    first, last, said = shares(start), shares(end), S.linear(start, end, n)(k, {})
    for name in NAMES:
        a, b = first.get(name, 0.0), last.get(name, 0.0)
        assert said.get(name, 0.0) == pytest.approx(a + (b - a) * k / n, abs=1e-15)


@law
@given(st.dictionaries(st.integers(1, 10**9), some_weights, max_size=4), some_weights)
def test_a_stage_holds_until_the_next(later: dict[int, Any], first: Any):
    stages = {0: first, **later}
    schedule, begins = S.staged(stages), sorted(stages)
    for this, following in zip(begins, [*begins[1:], 2**60], strict=True):
        assert schedule(this, {}) == schedule(following - 1, {}) == stages[this]


# temperature


@law
@given(sizes, steps)
def test_temperature_one_is_proportional(given_sizes: Any, step: int):
    assert S.temperature(1, given_sizes)(step, {}) == given_sizes


@law
@given(
    st.dictionaries(st.sampled_from(NAMES), st.floats(1e-3, 1e15), min_size=1), st.floats(1e6, 1e9)
)
def test_a_high_temperature_draws_all_alike(given_sizes: Any, tau: float):
    said = shares(S.temperature(tau, given_sizes)(0, {}))
    assert all(share == pytest.approx(1 / len(given_sizes), rel=1e-4) for share in said.values())


@law
@given(st.dictionaries(st.sampled_from(NAMES), st.floats(1, 1e9), min_size=2), st.floats(0.2, 100))
def test_temperature_is_the_root_of_the_size(given_sizes: Any, tau: float):
    said, top = S.temperature(tau, given_sizes)(0, {}), max(given_sizes.values())
    scale = max(said.values())
    for name, size in given_sizes.items():
        assert said[name] / scale == pytest.approx((size / top) ** (1 / tau), rel=1e-12, abs=1e-20)


@law
@given(sizes, taus, taus, lengths, steps)
def test_a_ramp_of_the_temperature_ends_at_its_end(
    given_sizes: Any, one: float, two: float, n: int, later: int
):
    ramp = S.temperature(one, given_sizes, end_tau=two, steps=n)
    assert ramp(0, {}) == S.temperature(one, given_sizes)(0, {})
    assert ramp(n, {}) == ramp(n + later, {}) == S.temperature(two, given_sizes)(0, {})


@law
@given(sizes, taus, taus)
def test_the_hotter_the_more_even(given_sizes: Any, one: float, two: float):
    cool, hot = (shares(S.temperature(tau, given_sizes)(0, {})) for tau in sorted((one, two)))
    assert max(hot.values()) <= max(cool.values()) + 1e-12


# curricula


@law
@given(
    st.floats(-100, 100),
    st.floats(0, 100),
    st.integers(1, 1000),
    st.lists(st.floats(-200, 200), min_size=1, max_size=20),
    st.data(),
)
def test_scores_fall_with_time_and_rise_with_difficulty(
    low: float, more: float, n: int, hard: list[float], data: st.DataObject
):
    schedule = S.curriculum(column="hard", low=low, high=low + more, steps=n, weights={"a": 1})
    held = ov.Buffer.from_columns(
        {"a": {"tokens": [1] * len(hard), "hard": hard}}, batch=Batch(samples=1, context=1)
    )
    early, late = sorted(data.draw(st.tuples(st.integers(0, n + 5), st.integers(0, n + 5))))
    one, two = schedule.prefer(early, held), schedule.prefer(late, held)
    assert (two <= one).all()
    assert (one >= 0).all()
    assert (np.diff(one[np.argsort(hard, kind="stable")]) >= 0).all()
    assert schedule.prefer(n, held).tolist() == [0.0] * len(hard)
    assert (one[np.array(hard) <= low] == 0).all()


# online data mixing


@law
@given(bandits, histories)
def test_odm_weights_sum_to_one_and_keep_their_floor(
    schedule: Any, history: list[dict[str, float]]
):
    floor = (
        dict.fromkeys(NAMES, schedule.floor)
        if isinstance(schedule.floor, float)
        else dict(schedule.floor)
    )
    for step, feedback in enumerate(history):
        said = schedule(step, feedback)
        assert math.fsum(said.values()) == pytest.approx(1, abs=1e-12)
        assert all(said[name] >= floor.get(name, 0.0) for name in NAMES)


@law
@given(
    st.lists(st.floats(0.5, 12), min_size=2, max_size=4, unique=True),
    st.integers(50, 400),
    st.floats(0, 0.1),
    st.integers(0, 20),
)
def test_odm_gives_more_to_a_source_with_persistently_higher_loss(
    losses: list[float], n: int, floor: float, warmup: int
):
    assume(min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 0.01)
    names = NAMES[: len(losses)]
    schedule = S.odm(names, warmup=warmup, floor=floor)
    for step in range(n):
        said = schedule(
            step, {f"loss/{name}": loss for name, loss in zip(names, losses, strict=True)}
        )
    assert [said[name] for _, name in sorted(zip(losses, names, strict=True))] == sorted(
        said.values()
    )
    assert len(set(said.values())) == len(names)


@law
@given(bandits, histories)
def test_reports_of_others_change_nothing(schedule: Any, history: list[dict[str, float]]):
    other = copy.deepcopy(schedule)
    for step, feedback in enumerate(history):
        own = {key: x for key, x in feedback.items() if key.removeprefix("loss/") in NAMES}
        assert schedule(step, feedback) == other(step, own)


# the arithmetic beneath


@law
@given(st.floats(-100, 0), st.floats(-100, 0))
def test_the_exponential_is_the_exponential(x: float, y: float):
    assert abs(integer_math.exp_down(x) - math.exp(x)) < 1e-16
    assert integer_math.exp_down(min(x, y)) <= integer_math.exp_down(max(x, y))


@law
@given(st.floats(5e-324, 1.7e308))
def test_the_logarithm_is_the_logarithm(x: float):
    assert integer_math.log(x) / integer_math.ONE == pytest.approx(
        math.log(x), rel=1e-15, abs=1e-15
    )


@law
@given(st.integers(1, 10**9), st.data())
def test_the_cosine_is_the_cosine(n: int, data: st.DataObject):
    k = data.draw(st.integers(0, n))
    assert integer_math.half_cosine(k, n) == pytest.approx(
        (1 - math.cos(math.pi * k / n)) / 2, abs=1e-15
    )


def test_results_are_fixed_to_the_last_bit():
    """A machine that got other bits here would draw another stream: these values are for ever."""
    weights = S.temperature(3, {"a": 1, "b": 10, "c": 12345678})(0, {})
    learned = S.odm(["a", "b", "c"], warmup=0)
    for step in range(100):
        mixed = learned(step, {"loss/a": 1.0 + step / 100, "loss/b": 2.5, "loss/c": 3.0})
    ramp = S.cosine({"a": 1, "b": 2}, {"b": 1, "c": 1}, 7)(3, {})
    said = {
        k: [w[n].hex() for n in "abc"]
        for k, w in (("temperature", weights), ("odm", mixed), ("cosine", ramp))
    }
    assert said == {
        "temperature": ["0x1.1b8eccb8282f1p-8", "0x1.31741189d2df3p-7", "0x1.0000000000000p+0"],
        "odm": ["0x1.b5cf4fd0012f5p-3", "0x1.5f2872c608112p-2", "0x1.c5efe551f7574p-2"],
        "cosine": ["0x1.a149825d5b640p-3", "0x1.3429304bab6c8p-1", "0x1.8e11bc73f6e9fp-3"],
    }
