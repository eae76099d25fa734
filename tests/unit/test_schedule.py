"""Schedules, one by one: what they say, what they refuse, how they look, and the same in job
files.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord import Job, Source
from overlord.errors import JobError, PlanError
from overlord.mesh import Batch
from overlord.planning import schedule as library
from overlord.planning.schedule import Base, bind, by_source, factories, make, register_schedule
from tests.internals import SCHEDULE_NAMES

A, B = {"web": 1.0}, {"web": 1.0, "code": 3.0}
S = ov.schedule

EACH: dict[str, Callable[..., Any]] = {
    "constant": lambda **k: S.constant(**({"weights": B} | k)),
    "staged": lambda **k: S.staged(**({"stages": {0: A, 10: B, 30: S.linear(A, B, 5)}} | k)),
    "linear": lambda **k: S.linear(**({"start": A, "end": B, "steps": 10, "begin": 5} | k)),
    "cosine": lambda **k: S.cosine(
        **({"start": S.temperature(2, {"web": 9, "code": 1}), "end": B, "steps": 10} | k)
    ),
    "temperature": lambda **k: S.temperature(
        **({"tau": 2, "sizes": {"web": 100, "code": 4}, "end_tau": 3.5, "steps": 9} | k)
    ),
    "curriculum": lambda **k: S.curriculum(
        **({"column": "hard", "low": 0, "high": 1, "steps": 10, "weights": S.linear(A, B, 9)} | k)
    ),
    "length_warmup": lambda **k: S.length_warmup(
        **({"start": 16, "end": 64, "steps": 10, "weights": B} | k)
    ),
    "odm": lambda **k: S.odm(
        **({"weights": B, "warmup": 4, "floor": {"code": 0.1}, "decay": 0.9, "rate": 0.5} | k)
    ),
}
OTHER: dict[str, dict[str, list[Any]]] = {
    "constant": {"weights": [{"web": 1, "code": 2}, {"web": 1}]},
    "staged": {
        "stages": [
            {0: A},
            {0: A, 11: B, 30: S.linear(A, B, 5)},
            {0: A, 10: B, 30: S.linear(A, B, 6)},
        ]
    },
    "linear": {"start": [B], "end": [A], "steps": [11], "begin": [0]},
    "cosine": {
        "start": [A, S.temperature(3, {"web": 9, "code": 1})],
        "end": [A],
        "steps": [11],
        "begin": [1],
    },
    "temperature": {
        "tau": [1],
        "sizes": [{"web": 100, "code": 5}, None],
        "end_tau": [4],
        "steps": [8],
        "begin": [1],
    },
    "curriculum": {
        "column": ["easy"],
        "low": [-1],
        "high": [2],
        "steps": [9],
        "weights": [A, None],
    },
    "length_warmup": {
        "start": [8],
        "end": [65],
        "steps": [9],
        "weights": [A, None],
        "column": ["chars"],
    },
    "odm": {
        "weights": [{"web": 2, "code": 3.0}, None],
        "warmup": [5],
        "floor": [0.1, {"code": 0.2}, {"web": 0.1}],
        "scale": [1],
        "decay": [1],
        "rate": [None, 1],
        "metric": ["excess"],
    },
}


def sources(*names: str) -> list[Source]:
    return [Source(name, f"/data/{name}") for name in names or ("web", "code")]


def job(**given: Any) -> Job:
    return Job(
        **({"name": "x", "sources": sources(), "batch": Batch(samples=8, context=16)} | given)
    )


def refused(call: Callable[[], Any]) -> list[str]:
    with pytest.raises(JobError) as caught:
        call()
    return caught.value.problems


def candidates(step: int = 0, **columns: Any) -> ov.Buffer:
    return ov.Buffer.from_columns({"web": columns}, batch=Batch(samples=1, context=64), step=step)


# what they say


def test_stages_begin_where_they_say():
    schedule = S.staged({10: B, 0: A})
    assert [schedule(step, {}) for step in (0, 9, 10, 11, 10**9)] == [A, A, B, B, B]


def test_a_ramp_goes_from_shares_to_shares_however_large_the_weights_are():
    schedule = S.linear(start={"web": 1000}, end={"code": 1}, steps=4, begin=2)
    shares = [schedule(step, {}).get("code", 0.0) for step in range(8)]
    assert shares == [0, 0, 0, 0.25, 0.5, 0.75, 1, 1]


def test_a_cosine_is_slow_at_its_ends():
    schedule = S.cosine(start={"web": 1}, end={"code": 1}, steps=100)
    code = [schedule(step, {}).get("code", 0.0) for step in range(101)]
    assert code[0] == 0
    assert code[100] == 1
    assert code[50] == pytest.approx(0.5, abs=1e-15)
    assert code[10] == pytest.approx((1 - math.cos(math.pi / 10)) / 2, abs=1e-15)


def test_temperature_lifts_small_sources():
    sizes = {"web": 10_000, "code": 100, "none": 0}
    assert S.temperature(1, sizes)(0, {}) == sizes
    assert S.temperature(2, sizes)(0, {}) == pytest.approx(
        {"web": 1, "code": 0.1, "none": 0}, rel=1e-14
    )
    assert S.temperature(math.inf, sizes)(0, {}) == {"web": 1, "code": 1, "none": 0}
    assert S.temperature(0.5, sizes)(0, {}) == pytest.approx(
        {"web": 1, "code": 1e-4, "none": 0}, rel=1e-14
    )


def test_temperature_may_rise_or_fall():
    schedule = S.temperature(1, {"web": 100, "code": 1}, end_tau=2, steps=10, begin=5)
    ratio = [by_source(schedule(step, {}), ["web", "code"]) for step in (0, 5, 10, 15, 99)]
    assert [web / code for web, code in ratio] == pytest.approx(
        [100, 100, 100 ** (1 / 1.5), 10, 10]
    )


def test_a_schedule_may_stand_where_weights_do():
    schedule = S.staged(
        {0: S.linear(A, {"code": 1}, 4), 8: S.temperature(1, {"web": 2, "code": 2})}
    )
    assert schedule(2, {}) == {"web": 0.5, "code": 0.5}
    assert schedule(8, {}) == {"web": 2, "code": 2}


def test_a_stage_that_learns_has_learned_when_its_time_comes():
    schedule = S.staged({0: A, 50: S.odm(["web", "code"], warmup=0)})
    said = [
        schedule(step, {"loss/web": 1.0, "loss/code": 4.0} if step < 50 else {})
        for step in range(51)
    ]
    assert said[49] == A
    assert said[50]["code"] > 0.6


def test_a_function_may_stand_where_weights_do():
    def mine(step: int, feedback: Any) -> dict[str, float]:
        return {"web": 1.0, "code": float(step)}

    assert S.linear(mine, {"code": 1}, 4)(2, {}) == {
        "web": pytest.approx(1 / 6),
        "code": pytest.approx(5 / 6),
    }
    with pytest.raises(JobError, match=r"linear\.start: expected weights by source name at step 1"):
        S.linear(lambda step, feedback: [1, 2], A, 4)(1, {})
    with pytest.raises(
        JobError, match=r"linear\.end: at step 1, the weight of 'web': expected a finite number"
    ):
        S.linear(A, lambda step, feedback: {"web": -1}, 4)(1, {})


def test_a_curriculum_prefers_what_is_easy_enough_in_stream_order():
    schedule = S.curriculum(column="hard", low=0.2, high=0.8, steps=10, weights=A)
    held = candidates(tokens=[1, 1, 1, 1], hard=[0.9, 0.1, 0.5, math.nan])
    assert schedule.prefer(0, held).tolist() == pytest.approx([0.7, 0, 0.3, math.inf])
    assert schedule.prefer(5, held).tolist() == pytest.approx([0.4, 0, 0, math.inf])
    assert schedule.prefer(10, held).tolist() == [
        0,
        0,
        0,
        0,
    ]  # past the ramp the plain stream, whatever is in it
    assert schedule.prefer(0, held).dtype == np.float64
    assert schedule(3, {}) == A


def test_length_warmup_prefers_short_samples():
    schedule = S.length_warmup(start=10, end=30, steps=4, weights=A)
    held = candidates(tokens=[5, 40, 20])
    assert [schedule.prefer(step, held).tolist() for step in (0, 2, 4)] == [
        [0, 30, 10],
        [0, 20, 0],
        [0, 0, 0],
    ]


def test_a_curriculum_needs_one_number_a_sample():
    schedule = S.curriculum(column="hard", low=0, high=1, steps=10, weights=A)
    with pytest.raises(PlanError, match=r"expected metadata of .*, got 'hard'"):
        schedule.prefer(0, candidates(tokens=[1]))
    with pytest.raises(PlanError, match="expected one number for each sample in"):
        schedule.prefer(0, candidates(tokens=[1, 1], hard=[[1, 2], [3]]))


# online data mixing


def test_odm_keeps_the_given_weights_while_it_warms_up():
    schedule = S.odm(B, warmup=3)
    assert [schedule(step, {"loss/web": 9.0, "loss/code": 0.0}) for step in range(3)] == [
        {"web": 0.25, "code": 0.75}
    ] * 3
    assert schedule(3, {}) == {"web": 0.25, "code": 0.75}  # nothing new was reported


def test_odm_gives_more_to_what_is_learned_worst():
    schedule = S.odm(["web", "code", "math"], warmup=0, floor=0.05)
    for step in range(300):
        weights = schedule(step, {"loss/web": 2.0, "loss/code": 3.0, "loss/math": 1.0})
    assert weights["code"] > weights["web"] > weights["math"] >= 0.05


def test_odm_takes_the_last_report_of_a_source_that_is_silent():
    loud, silent = S.odm(["web", "code"], warmup=0), S.odm(["web", "code"], warmup=0)
    for step in range(50):
        both = {"loss/web": 2.0 + step, "loss/code": 4.0}
        said = loud(step, both), silent(step, both if step == 0 else {"loss/web": 2.0 + step})
    assert said[0] == said[1]


def test_odm_treats_a_source_that_never_reported_as_the_mean_of_the_others():
    schedule = S.odm(["a", "b", "c"], warmup=0)
    for step in range(50):
        weights = schedule(step, {"loss/a": 1.0, "loss/b": 3.0})
    assert weights["a"] < weights["c"] < weights["b"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, "high", None, True])
def test_odm_ignores_and_counts_what_is_no_loss(bad: Any):
    schedule, clean = S.odm(["web", "code"], warmup=0), S.odm(["web", "code"], warmup=0)
    for step in range(20):
        said = schedule(step, {"loss/web": 2.0 if step < 10 else bad, "loss/code": 1.0})
        assert said == clean(step, {"loss/web": 2.0, "loss/code": 1.0})
    assert schedule.state_dict()["ignored"] == {"web": 10}


def test_odm_does_not_move_without_reports():
    schedule = S.odm(["web", "code"], warmup=0)
    schedule(0, {"loss/web": 5.0, "loss/code": 1.0})
    assert (
        schedule(1, {})
        == schedule(2, {"lr": 0.1, "loss": 3.0, "loss/other": 1.0})
        == schedule(3, {"loss/web": math.nan})
    )


def test_odm_forgets_old_losses_when_told_to():
    forgetful, exact = (
        S.odm(["web", "code"], warmup=0, decay=0.9, rate=1.0),
        S.odm(["web", "code"], warmup=0, rate=1.0),
    )
    for step in range(200):
        hard, easy = ("web", "code") if step < 120 else ("code", "web")
        said = [s(step, {f"loss/{hard}": 3.0, f"loss/{easy}": 1.0}) for s in (forgetful, exact)]
    assert said[0]["code"] > said[0]["web"]
    assert said[1]["code"] < said[1]["web"]


def test_odm_survives_losses_of_any_size():
    schedule = S.odm(["a", "b", "c"], warmup=0, scale=1e-6, rate=1e300)
    for step in range(50):
        weights = schedule(step, {"loss/a": 1e308, "loss/b": 5e-324, "loss/c": 1e308})
    assert math.fsum(weights.values()) == pytest.approx(1)
    assert weights["a"] == weights["c"] > weights["b"]


def test_a_state_of_another_schedule_is_refused():
    with pytest.raises(ValueError, match="got the state of another schedule, with 'updates'"):
        S.linear(A, B, 10).load_state_dict(S.odm(B).state_dict())
    with pytest.raises(KeyError):
        S.odm(B).load_state_dict({})
    state = S.odm(B).state_dict() | {"reward": {"web": math.nan}}
    with pytest.raises(ValueError, match="not a number"):
        S.odm(B).load_state_dict(state)


def test_a_source_that_comes_later_begins_in_the_middle():
    old = S.odm(["a", "b"], warmup=0, rate=1.0)
    for step in range(30):
        old(step, {"loss/a": 1.0, "loss/b": 9.0})
    new = S.odm(["a", "b", "c"], warmup=0, rate=1.0)
    new.load_state_dict(old.state_dict())
    weights = new(30, {})
    assert weights["a"] < weights["c"] < weights["b"]


# what the job fills in


def test_what_only_the_job_knows_is_filled_in():
    weights, rows = {"web": 3.0, "code": 1.0}, {"web": 900, "code": 100}
    easy = S.curriculum(column="hard", low=0, high=1, steps=9)
    assert bind(easy, weights, rows)(0, {}) == weights
    assert bind(S.length_warmup(1, 2, 3), weights, rows)(0, {}) == weights
    assert bind(S.odm(), weights, rows)(0, {}) == {"web": 0.75, "code": 0.25}
    assert bind(S.temperature(), weights, rows)(0, {}) == {"web": 900, "code": 100}
    inside = S.curriculum(
        column="hard",
        low=0,
        high=1,
        steps=9,
        weights=S.staged({0: S.linear(A, S.temperature(), 1)}),
    )
    assert bind(inside, weights, rows)(1, {}) == {"web": 900, "code": 100}
    whole = S.linear(A, B, 9)
    assert bind(whole, weights, rows) is whole
    assert bind(by_source, weights, rows) is by_source
    assert bind(easy, weights, rows).fingerprint != easy.fingerprint


def test_rows_that_only_reading_tells_must_be_given():
    (found,) = refused(
        lambda: bind(S.temperature(2), {"web": 1.0, "code": 1.0}, {"web": 9, "code": None})
    )
    assert (
        found
        == "sizes: expected formats that store their number of rows, got code without it; give "
        "sizes={name: rows}"
    )


@pytest.mark.parametrize(
    "schedule",
    [S.curriculum("hard", 0, 1, 9), S.length_warmup(1, 2, 3), S.odm(), S.temperature()],
    ids=lambda s: s.kind,
)
def test_outside_a_job_what_is_missing_is_said(schedule: Any):
    assert "give" in refused(lambda: schedule(0, {}))[0]


class Rows:
    """A map-style dataset: its size is known without reading it."""

    fingerprint = "rows"

    def __init__(self, n: int):
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"tokens": [1 + i % 3] * 4, "hard": i % 10}


def running(mixture: Any, **given: Any) -> Job:
    transforms = [ov.Meta("hard", "hard"), ov.Tokens()]
    made = [
        Source(name, Rows(n), transforms=transforms, weight=w, epochs=None)
        for name, n, w in (("web", 300, 1), ("code", 100, 3))
    ]
    return job(sources=made, mixture=mixture, until=6, **given)


def drawn(made: Job) -> dict[str, int]:
    steps = ov.simulate(made).steps[0]
    names = [piece.sample.source for step in steps for mb in step for piece in mb.samples]
    return {name: names.count(name) for name in made.names}


def test_a_running_job_knows_sizes_and_weights():
    assert drawn(running(S.temperature(1))) == {"web": 36, "code": 12}
    assert drawn(running(S.temperature(math.inf))) == {"web": 24, "code": 24}
    assert drawn(running(S.curriculum("hard", 0, 9, 3), look_ahead=2)) == {"web": 12, "code": 36}
    assert drawn(running(S.staged({0: {"web": 1}, 3: S.odm(warmup=0)}))) == {
        "web": 24 + 6,
        "code": 18,
    }


def test_a_saved_state_tells_schedules_apart(tmp_path: Path):
    with ov.launch(running(S.linear(A, B, 9)), cache_dir=str(tmp_path)) as session:
        saved = session.state_dict()
    with pytest.raises(ov.StateMismatch, match="mixture"):
        ov.launch(running(S.linear(A, B, 10)), resume=saved, cache_dir=str(tmp_path))
    ov.launch(running(S.linear(A, B, 9)), resume=saved, cache_dir=str(tmp_path)).close()


# what is refused


@pytest.mark.parametrize(
    ("call", "problems"),
    [
        (
            lambda: S.constant({"web": -1, 3: 1, "code": math.nan}),
            [
                "weights: expected the name of a source, got 3",
                "weights: the weight of 'web': expected a finite number of at least 0, got -1",
                "weights: the weight of 'code': expected a finite number of at least 0, got nan",
            ],
        ),
        (lambda: S.constant({}), ["weights: expected a weight above 0, got only zeros"]),
        (
            lambda: S.constant([1, 2]),
            ["weights: expected a mapping of source name to number, got [1, 2]"],
        ),
        (lambda: S.staged({}), ["stages: expected a mapping of first step to weights, got {}"]),
        (
            lambda: S.staged({5: A, 9: 1}),
            [
                "stages: expected a first stage at step 0, got the first at step 5; give weights "
                "from step 0 on",
                "stages[9]: expected weights by source name or a schedule, got 1",
            ],
        ),
        (
            lambda: S.staged({-1: A, "x": A}),
            [
                "stages: expected the first step of a stage, a whole number of at least 0, got -1",
                "stages: expected the first step of a stage, a whole number of at least 0, got 'x'",
            ],
        ),
        (
            lambda: S.linear({"web": 0}, None, 0, begin=-1),
            [
                "start: expected a weight above 0, got only zeros",
                "end: expected weights by source name or a schedule, got None",
                "steps: expected a whole number of at least 1, got 0",
                "begin: expected a whole number of at least 0, got -1",
            ],
        ),
        (lambda: S.cosine(A, B, 1.5), ["steps: expected a whole number of at least 1, got 1.5"]),
        (
            lambda: S.cosine(A, S.length_warmup(1, 2, 3, A), 5),
            [
                "end: expected a schedule without prefer(), got "
                "length_warmup(start=1, end=2, steps=3, weights={'web': 1.0}); "
                "make it the outer schedule, and pass this one as its weights"
            ],
        ),
        (
            lambda: S.temperature(0, {"web": -1, "code": "x"}),
            [
                "tau: expected a number above 0 (infinity: equal weights), got 0",
                "sizes: the size of 'web': expected a finite number of at least 0, got -1",
                "sizes: the size of 'code': expected a finite number of at least 0, got 'x'",
            ],
        ),
        (
            lambda: S.temperature(2, {"web": 0}, end_tau=3),
            [
                "end_tau, steps: expected both for a ramp of the temperature, got one of them",
                "sizes: expected at least one above 0, got only zeros",
            ],
        ),
        (
            lambda: S.temperature(math.inf, end_tau=3, steps=0),
            [
                "tau: expected a finite number above 0, got inf",
                "steps: expected a whole number of at least 1, got 0",
            ],
        ),
        (
            lambda: S.curriculum("", 2, 1, 0, weights={}),
            [
                "column: expected a name, got ''",
                "low, high: expected low at most high, got 2 above 1; reverse the column in ov.Meta",
                "steps: expected a whole number of at least 1, got 0",
                "weights: expected a weight above 0, got only zeros",
            ],
        ),
        (
            lambda: S.length_warmup(9, 3, 1),
            ["start, end: expected start at most end, got 9 above 3"],
        ),
        (
            lambda: S.odm(
                ["a", "b", "c"], warmup=-1, floor=0.4, scale=0, decay=2, rate=-1, metric=""
            ),
            [
                "warmup: expected a whole number of at least 0, got -1",
                "scale: expected a finite number of at least 1e-6, got 0",
                "rate: expected a finite number above 0, got -1",
                "decay: expected a number above 0 and at most 1, got 2",
                "metric: expected a name, got ''",
                "floor: expected shares that sum to at most 1, got 0.4 for each of 3 sources",
            ],
        ),
        (
            lambda: S.odm({"a": 1}, floor={"b": 0.7, "a": 0.7}),
            [
                "floor: 'b' is not among the weights",
                "floor: expected shares that sum to at most 1, got 1.4",
            ],
        ),
        (
            lambda: S.odm(S.linear(A, B, 9)),
            [
                "weights: expected initial weights by source name, got "
                "linear(start={'web': 1.0}, "
                "end={'code': 3.0, 'web': 1.0}, steps=9)"
            ],
        ),
    ],
)
def test_all_problems_of_a_schedule_come_at_once(call: Callable[[], Any], problems: list[str]):
    assert refused(call) == problems


def test_a_job_names_what_is_no_source_of_it():
    assert refused(lambda: job(mixture=S.linear(A, {"cod": 1, "math": 1}, 9))) == [
        "mixture: expected a source of the job, got 'cod'; did you mean 'code'?",
        "mixture: expected a source of the job, got 'math'; known: code, web",
    ]
    assert refused(lambda: job(mixture=S.temperature(2, {"wbe": 1}))) == [
        "mixture: expected a source of the job, got 'wbe'; did you mean 'web'?"
    ]
    assert refused(lambda: job(mixture=S.odm(["web", "x"]))) == [
        "mixture: expected a source of the job, got 'x'; known: code, web"
    ]


def test_choosing_needs_something_to_choose_from():
    (found,) = refused(lambda: job(mixture=EACH["curriculum"]()))
    assert (
        found == "look_ahead: expected more than 1 for curriculum, which chooses among candidates, "
        "got 1; set it, for example, to 4"
    )

    class Mine:
        def __call__(self, step: int, feedback: Any) -> dict[str, float]:
            return A

        def prefer(self, step: int, candidates: ov.Buffer) -> np.ndarray:
            return np.zeros(len(candidates))

    assert (
        "which chooses among candidates, got 1; set it" in refused(lambda: job(mixture=Mine()))[0]
    )


def test_looking_ahead_goes_with_samples_only():
    found = refused(lambda: job(look_ahead=4, batch=Batch(tokens=64, context=16)))
    assert (
        "look_ahead: expected 1 for a batch in tokens, got 4; set batch.samples, or look_ahead=1"
        in found
    )


def test_a_class_is_no_schedule():
    assert "expected a mapping of weights or a schedule" in refused(lambda: job(mixture=Base))[0]


# identity


@pytest.mark.parametrize("kind", EACH)
def test_equal_arguments_equal_schedules(kind: str):
    one, two = EACH[kind](), EACH[kind]()
    assert one == two
    assert hash(one) == hash(two)
    assert one.fingerprint == two.fingerprint
    assert one.kind == kind == repr(one).split("(")[0]


def test_the_order_in_which_weights_are_given_means_nothing():
    assert S.constant({"a": 1, "b": 2}).fingerprint == S.constant({"b": 2, "a": 1}).fingerprint


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in OTHER for name in OTHER[kind]])
def test_any_other_argument_is_another_schedule(kind: str, name: str):
    made = [EACH[kind](), *(EACH[kind](**{name: value}) for value in OTHER[kind][name])]
    assert len({schedule.fingerprint for schedule in made}) == len(made)
    assert all(a != b for i, a in enumerate(made) for b in made[:i])


def test_every_argument_of_every_schedule_is_tried():
    wanted = {kind: {f.name for f in fields(EACH[kind]()) if f.init} for kind in EACH}
    assert {kind: set(OTHER[kind]) for kind in OTHER} == wanted
    assert set(EACH) == set(library.BUILT_IN)


def test_a_fingerprint_holds_no_address_and_not_what_was_learned():
    mine = S.linear(lambda step, feedback: A, B, 9)
    assert " at 0x" not in mine.fingerprint
    assert "test_schedule" in mine.fingerprint
    learning = S.odm(B, warmup=0)
    before = learning.fingerprint, repr(learning)
    learning(0, {"loss/web": 3.0})
    assert (learning.fingerprint, repr(learning)) == before
    assert learning == S.odm(B, warmup=0)


@pytest.mark.parametrize("kind", EACH)
def test_a_copy_does_not_share_what_it_learns(kind: str):
    schedule = EACH[kind]()
    other = copy.deepcopy(schedule)
    for step in range(20):
        schedule(step, {"loss/web": 3.0, "loss/code": 1.0})
    assert other.state_dict() == EACH[kind]().state_dict()
    assert other == schedule


def test_only_what_learns_waits_for_reports():
    class Mine:
        takes_feedback = True

        def __call__(self, step: int, feedback: Any) -> dict[str, float]:
            return A

    assert [kind for kind in EACH if EACH[kind]().takes_feedback] == ["odm"]
    assert S.staged({0: A, 5: S.linear(A, S.odm(B), 9)}).takes_feedback
    assert S.linear(A, Mine(), 9).takes_feedback
    assert not S.linear(A, lambda step, feedback: A, 9).takes_feedback


def test_schedules_cannot_be_changed():
    with pytest.raises(AttributeError):
        EACH["linear"]().steps = 3


def test_what_stands_inside_keeps_its_state():
    def nested() -> Any:
        return S.staged(
            {0: A, 5: S.cosine(S.odm(B, warmup=0), S.odm(["web", "code"], warmup=2), 90)}
        )

    schedule, feedback = (
        nested(),
        [{"loss/web": 1.0 + step % 3, "loss/code": 2.0} for step in range(60)],
    )
    said = []
    for step, reports in enumerate(feedback):
        if step == 30:
            state = json.loads(json.dumps(schedule.state_dict()))
        said.append(schedule(step, reports))
    again = nested()
    again.load_state_dict(state)
    assert [again(step, feedback[step]) for step in range(30, 60)] == said[30:]


# names and job files


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    SCHEDULE_NAMES.replace(monkeypatch, {})


class Sawtooth:
    def __init__(self, period: int, low: float):
        self.period, self.low = period, low

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        return {"web": 1.0, "code": self.low + step % self.period}


def sawtooth(period: int, low: float = 0.5, inside: Any = None) -> Any:
    if period < 1:
        raise ValueError("no period")
    return Sawtooth(period, low)


def test_a_registered_schedule_is_made_by_its_name(registry: None):
    mine = register_schedule("sawtooth", sawtooth)
    made = mine(period=3)
    assert made == make("sawtooth", period=3) != make("sawtooth", period=4)
    assert repr(made) == made.fingerprint == "sawtooth(period=3)"
    assert made(4, {}) == {"web": 1.0, "code": 1.5}
    assert not hasattr(made, "prefer")
    assert not hasattr(made, "state_dict")
    assert copy.deepcopy(made) == made
    assert register_schedule("sawtooth", sawtooth)(period=3) == made
    assert by_source(job(mixture=made).mixture(0, {}), ["web", "code"]) == [1.0, 0.5]


def test_a_registered_schedule_can_do_what_the_made_one_can(registry: None):
    register_schedule("easy", lambda steps: S.curriculum(column="hard", low=0, high=1, steps=steps))
    made = make("easy", steps=5)
    assert made.prefer(5, candidates(tokens=[1], hard=[9])).tolist() == [0]
    assert bind(made, A, {})(0, {}) == A
    assert bind(made, A, {}) == made
    assert "curriculum" in made.fingerprint
    assert "which chooses among candidates, got 1" in refused(lambda: job(mixture=made))[0]


def test_names_are_kept(registry: None):
    register_schedule("sawtooth", sawtooth)
    assert "expected an unused name" in refused(lambda: register_schedule("sawtooth", Sawtooth))[0]
    assert "expected an unused name" in refused(lambda: register_schedule("linear", sawtooth))[0]
    assert "expected a name and a function" in refused(lambda: register_schedule("", sawtooth))[0]
    assert refused(lambda: make("linaer")) == ["unknown schedule 'linaer'; did you mean 'linear'?"]
    assert ov.register_schedule is register_schedule
    register_schedule("broken", lambda: 5)
    assert "expected a function of step and feedback" in refused(lambda: make("broken"))[0]


def written_and_read(made: Job, folder: Path) -> Job:
    (folder / "job.yaml").write_text(made.to_yaml())
    return ov.Job.from_yaml(folder / "job.yaml")


def look(schedule: Any) -> int:
    return 4 if hasattr(schedule, "prefer") else 1


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in OTHER for name in OTHER[kind]])
def test_a_schedule_in_a_file_is_the_same_schedule(kind: str, name: str, tmp_path: Path):
    for schedule in (EACH[kind](), *(EACH[kind](**{name: value}) for value in OTHER[kind][name])):
        made = job(mixture=schedule, look_ahead=look(schedule))
        again = written_and_read(made, tmp_path)
        assert again == made
        assert again.mixture.fingerprint == schedule.fingerprint


def test_a_registered_schedule_in_a_file_is_the_same_schedule(registry: None, tmp_path: Path):
    mine = register_schedule("sawtooth", sawtooth)
    for schedule in (
        mine(period=3),
        mine(period=4, inside=S.linear(A, B, 9)),
        S.linear(A, mine(period=2), 9),
    ):
        made = job(mixture=schedule)
        assert written_and_read(made, tmp_path) == made


def read(mixture: str, folder: Path) -> Job:
    head = "name: x\nsources: {web: {uri: /w}, code: {uri: /c}}\nbatch: {samples: 8, context: 16}\n"
    (folder / "job.yaml").write_text(head + mixture)
    return ov.Job.from_yaml(folder / "job.yaml")


def test_a_file_says_what_python_says(tmp_path: Path):
    said = read(
        "mixture: {schedule: cosine, start: {web: 0.9, code: 0.1}, end: {web: 1, code: "
        "1}, steps: 1000}",
        tmp_path,
    ).mixture
    assert said == S.cosine({"web": 0.9, "code": 0.1}, {"web": 1, "code": 1}, 1000)
    said = read(
        "mixture:\n  schedule: staged\n  stages:\n    0: {web: 1}\n    500: {schedule: "
        "odm, weights: [web, code]}",
        tmp_path,
    ).mixture
    assert said == S.staged({0: {"web": 1}, 500: S.odm(["web", "code"])})


def test_a_source_may_be_called_schedule(tmp_path: Path):
    made = job(sources=sources("web", "schedule"), mixture={"schedule": 1, "web": 2})
    assert written_and_read(made, tmp_path) == made
    made = job(sources=sources("web", "schedule"), mixture=S.linear({"schedule": 1}, {"web": 2}, 9))
    assert written_and_read(made, tmp_path) == made


@pytest.mark.parametrize(
    ("mixture", "problems"),
    [
        (
            "{schedule: cosin, start: 3}",
            ["mixture.schedule: expected a known schedule, got 'cosin'; did you mean 'cosine'?"],
        ),
        (
            "{schedule: [1]}",
            [
                "mixture.schedule: expected a known schedule, got [1]; known: "
                + ", ".join(sorted(library.BUILT_IN))
            ],
        ),
        (
            "{schedule: linear, start: {web: -1}, ends: {web: 1}, steps: 0}",
            [
                "mixture.ends: expected a known argument, got 'ends'; did you mean 'end'?",
                "mixture.end: expected a value, got none",
                "mixture.start: the weight of 'web': expected a finite number of at least "
                "0, got -1",
                "mixture.steps: expected a whole number of at least 1, got 0",
            ],
        ),
        (
            "{schedule: staged, stages: {0: {schedule: linear, steps: x}, 9: {schedule: "
            "nothing}, -1: {web: 1}}}",
            [
                "mixture.stages[0].start: expected a value, got none",
                "mixture.stages[0].end: expected a value, got none",
                "mixture.stages[0].steps: expected a whole number of at least 1, got 'x'",
                "mixture.stages[9].schedule: expected a known schedule, got 'nothing'; known: "
                + ", ".join(sorted(library.BUILT_IN)),
                "mixture.stages: expected the first step of a stage, a whole number of at "
                "least 0, got -1",
            ],
        ),
        (
            "{schedule: temperature, tau: 2, sizes: {web: 1, cdoe: 2}}",
            ["mixture: expected a source of the job, got 'cdoe'; did you mean 'code'?"],
        ),
        (
            "{schedule: length_warmup, start: 1, end: 9, steps: 5}",
            [
                "look_ahead: expected more than 1 for length_warmup, which chooses among "
                "candidates, got 1; set it, for example, to 4"
            ],
        ),
    ],
)
def test_all_problems_of_a_schedule_in_a_file_come_at_once(
    mixture: str, problems: list[str], tmp_path: Path
):
    assert refused(lambda: read(f"mixture: {mixture}", tmp_path)) == problems


def test_problems_of_the_schedule_come_with_those_of_the_job(tmp_path: Path):
    found = refused(
        lambda: read(
            "mixture: {schedule: linear, start: {web: 1}, end: {web: 1}, steps: -1}\nseed: -1",
            tmp_path,
        )
    )
    assert found == [
        "mixture.steps: expected a whole number of at least 1, got -1",
        "seed: expected a whole number of at least 0, got -1",
    ]


def test_what_a_registered_factory_refuses_is_said_under_its_key(registry: None, tmp_path: Path):
    register_schedule("sawtooth", sawtooth)
    [problem] = refused(lambda: read("mixture: {schedule: sawtooth, period: 0}", tmp_path))
    assert problem.startswith(f"mixture: sawtooth raised ValueError: no period (at {__file__}:")
    assert refused(lambda: read("mixture: {schedule: sawtooth, perod: 0}", tmp_path)) == [
        "mixture.perod: expected a known argument, got 'perod'; did you mean 'period'?",
        "mixture.period: expected a value, got none",
    ]
    assert "sawtooth" in factories()


def test_a_function_has_no_place_in_a_file():
    (found,) = refused(lambda: job(mixture=S.linear(A, sawtooth, 9)).to_yaml())
    assert found.startswith("mixture.end: expected a named schedule, got the code ")
    assert found.endswith("; make it with ov.register_schedule")
