"""The planner and the front of a source's stream: what they keep, what they refuse, and what timing
must not change.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.constructor.assembler import Assembler
from overlord.dryrun.virtual_run import Delays
from overlord.errors import JobError, SourceError
from overlord.job.job import UNIT
from overlord.loader.samples import SourceOrder
from overlord.messages.control import Attach, Cursor, EndOfJob, PlannedStep, SetMixture, Skip
from overlord.messages.data import (
    Announce,
    Build,
    Built,
    Deliver,
    EndRank,
    PayloadReady,
    Release,
    SampleBlock,
)
from overlord.planning.draw import draw_counts, random_counts, whole_weights
from overlord.planning.mixture import still_in_force
from overlord.planning.schedule import by_source
from overlord.planning.strategies import llm_balance
from overlord.planning.stream import SourceStream
from overlord.setup.prepared_job import Options, PreparedJob
from tests.internals import cached_orders
from tests.laws import examples
from tests.worlds import Rows, even

# Events


def mixtures(events: Any) -> list[tuple[int, float]]:
    return [(e.at, e.weights["a"]) for e in events if isinstance(e, SetMixture)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 99)), max_size=6),
    st.integers(0, 10),
    st.integers(0, 10),
)
def test_a_folded_log_means_the_same_for_all_steps_to_come(
    said: list[tuple[int, int]], step: int, lag: int
) -> None:
    """Whichever was last said of the latest step that has come is in force, folded or not."""
    mix_step = max(0, step - lag)
    log = tuple(SetMixture(at, {"a": float(w)}) for at, w in said)
    folded = still_in_force(log, step, mix_step)

    def in_force(events: Any, at: int) -> Any:
        return max(
            ((e.at, i, e.weights) for i, e in enumerate(events) if e.at <= at),
            default=(None, None, None),
            key=lambda x: x[:2],
        )[2]

    assert in_force(folded, mix_step) == in_force(log, mix_step)
    for later in range(step, 12):
        assert in_force(folded, later) == in_force(log, later)
    assert still_in_force(folded, step, mix_step) == folded
    assert sum(e.at <= step for e in folded) <= 2


def test_a_skip_is_kept_until_its_last_step_has_passed() -> None:
    event = Skip((3, 7))
    assert still_in_force((event,), 6, 6) == (event,)
    assert still_in_force((event,), 7, 7) == ()


# Weights by epoch


def job(mixture: Any = None, n: int = 12, **changes: Any) -> ov.Job:
    sources = [
        ov.Source(
            name,
            Rows([{"tokens": [k + 1] * 2} for k in range(n + 4 * i)]),
            transforms=[ov.Tokens("tokens")],
            epochs=None,
        )
        for i, name in enumerate("ab")
    ]
    settings = {
        "name": "planner",
        "sources": sources,
        "batch": ov.Batch(samples=5, context=32),
        "mixture": mixture,
        "until": 24,
        "slice_rows": 4,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


def rising(step: int, feedback: Any) -> list[float]:
    return [1.0, 1.0 + step]


def digests(run: Any) -> list[tuple[int, str]]:
    return [(s.step, s.plan_digest) for s in run.steps[0]]


def state_after(made: ov.Job, step: ov.Step) -> dict[str, Any]:
    return json.loads(json.dumps(PreparedJob(made, Options()).export(step.info.after)))


EVENTS: list[tuple[Any, ...]] = [
    (),
    (SetMixture(3, {"a": 1.0}),),
    (
        SetMixture(9, {"a": 1.0, "b": 7.0}),
        SetMixture(2, {"b": 1.0}),
        Skip((4, 15)),
        SetMixture(6, {"a": 2.0, "b": 1.0}),
    ),
]


@pytest.mark.parametrize("mix_every", ["step", "epoch"])
@pytest.mark.parametrize("events", EVENTS)
def test_restored_at_any_step_the_weights_in_force_are_the_same(
    mix_every: str, events: tuple[Any, ...]
) -> None:
    made = job(rising, mix_every=mix_every)
    whole = ov.simulate(made, seed=1, events=events, check=True)
    assert whole.error is None
    for k, step in enumerate(whole.steps[0]):
        again = ov.simulate(made, seed=2 + k, resume=state_after(made, step), check=True)
        assert digests(again) == digests(whole)[k + 1 :], f"restored after step {step.step}"


def test_weights_by_epoch_change_at_the_first_step_behind_the_epoch() -> None:
    seen: list[int] = []

    def schedule(step: int, feedback: Any) -> list[float]:
        seen.append(step)
        return [1.0, 1.0]

    run = ov.simulate(job(schedule, mix_every="epoch"), seed=3)
    assert seen == list(range(24))  # asked once a step all the same: it may be one that learns
    epochs = [s.info.after.cursors[:, 0].min() for s in run.steps[0]]
    rises = [k + 1 for k in range(len(epochs) - 1) if epochs[k] > (epochs[k - 1] if k else 0)]
    assert sorted({s.info.after.mix_step for s in run.steps[0]}) == [0, *rises]


# A stream that breaks


class Shards:
    """A factory's function one of whose shards cannot be read."""

    def __init__(self, bad: int):
        self.bad = bad

    def __call__(self, shard: int) -> Iterator[dict[str, Any]]:
        if shard == self.bad:
            raise OSError("the disk is gone")
        return iter([{"tokens": [shard * 100 + k]} for k in range(10)])


@pytest.mark.parametrize("bad", [1, 4])
def test_a_broken_source_ends_the_job_at_the_same_step_whatever_the_timing_and_the_loaders(
    bad: int,
) -> None:
    made = ov.Job(
        name="broken",
        batch=ov.Batch(samples=3, context=16),
        slice_rows=2,
        shuffle_chunks=3,
        sources=[
            ov.Source(
                "a",
                ov.Factory(Shards(bad), shards=6, fingerprint="x"),
                transforms=[ov.Tokens("tokens")],
                epochs=1,
            )
        ],
    )
    seen = set()
    for seed, loaders, ahead in itertools.product(range(6), (1, 2, 3), (1, 8)):
        run = ov.simulate(made, seed=seed, loaders={"a": loaders}, read_ahead=ahead, check=True)
        assert isinstance(run.error, SourceError)
        assert "the disk is gone" in str(run.error)
        seen.add(tuple(digests(run)))
    assert len(seen) == 1, [len(s) for s in seen]


def found(keys: list[int], dropped: int = 0, bad: tuple[int, ...] = ()) -> SampleBlock:
    k, b = np.array(keys, np.int64), np.array(bad, np.int64)
    return SampleBlock(
        k.astype(np.uint64),
        k,
        k,
        k * 0,
        {"tokens": k * 0 + 1},
        b.astype(np.uint64),
        b,
        b,
        ("bad",) * len(b),
        dropped,
    )


def test_news_of_a_failure_that_come_early_break_the_stream_no_sooner() -> None:
    """Loader 1 fails in window 1; loader 0 is slow. In every order of arrival the same samples come
    before the break.
    """
    gone = SourceError("a", "gone")
    of_loader = {
        0: [Announce(0, 0, 0, 0, found([1, 3]), True), Announce(0, 0, 0, 1, found([10, 12]), True)],
        1: [
            Announce(1, 0, 0, 0, found([2, 4]), True),
            Announce(1, 0, 0, 1, found([11])),
            Announce(1, 0, 0, 1, None, error=gone),
        ],
    }
    seen = set()
    for turns in set(itertools.permutations([0, 0, 1, 1, 1])):
        stream = SourceStream("a", loaders=2, n_groups=2, epochs=1, max_bad=9, cursor=Cursor())
        waiting = {k: list(news) for k, news in of_loader.items()}
        for k in turns:
            assert stream.error is None
            stream.add(waiting[k].pop(0), k)
        assert stream.error is gone
        pieces, _ = stream.take(stream.ready)
        seen.add(tuple(int(r) for p in pieces for r in p.found.row[p.start : p.stop]))
    assert seen == {(1, 2, 3, 4, 10)}


def test_samples_behind_the_row_that_stops_the_job_are_never_ready() -> None:
    stream = SourceStream("a", loaders=1, n_groups=1, epochs=1, max_bad=2, cursor=Cursor())
    stream.add(Announce(0, 0, 0, 0, found([1], bad=(2, 3))), 0)
    stream.add(Announce(0, 0, 0, 0, found([4, 5]), True, True), 0)
    assert stream.ready == 1
    assert isinstance(stream.error, SourceError)


def test_a_stream_restored_behind_its_last_epoch_has_ended() -> None:
    assert SourceStream(
        "a", loaders=1, n_groups=4, epochs=2, max_bad=9, cursor=Cursor(epoch=2)
    ).ended
    assert not SourceStream(
        "a", loaders=1, n_groups=4, epochs=None, max_bad=9, cursor=Cursor(epoch=2)
    ).ended


# Counts


def test_counts_in_the_state_depend_on_the_stream_alone() -> None:
    rows = Rows([{"n": k, "tokens": [k + 1]} for k in range(200)])
    made = ov.Job(
        name="counts",
        batch=ov.Batch(samples=6, context=16),
        slice_rows=5,
        shuffle_chunks=2,
        chunk_bytes=100,
        sources=[ov.Source("a", rows, transforms=[ov.Filter(even), ov.Tokens("tokens")], epochs=1)],
    )
    ways = [
        ov.simulate(made, seed=s, loaders={"a": n}, prefetch=p, read_ahead=r)
        for s, n, p, r in ((1, 1, 1, 1), (2, 1, 6, 9), (3, 3, 2, 4), (4, 2, 5, 1))
    ]
    states = [[state_after(made, step) for step in run.steps[0]] for run in ways]
    assert all(s == states[0] for s in states)
    assert states[0][-1]["counts"]["dropped"]["a"] > 50
    for k in (0, 3, 9):
        again = ov.simulate(made, seed=9, resume=states[0][k], read_ahead=7)
        assert [state_after(made, step) for step in again.steps[0]] == states[0][k + 1 :]


@pytest.mark.parametrize("slice_rows", [1, 5])
def test_at_the_end_every_drop_is_counted_also_those_of_windows_that_lost_every_row(
    slice_rows: int,
) -> None:
    rows = Rows([{"n": k, "tokens": [k + 1]} for k in range(100)])
    source = ov.Source("a", rows, transforms=[ov.Filter(even), ov.Tokens("tokens")], epochs=1)
    with ov.launch(
        ov.Job(
            name="counts",
            batch=ov.Batch(samples=6, context=16),
            slice_rows=slice_rows,
            sources=[source],
        )
    ) as session:
        assert sum(len(mb.samples) for step in session.client(0) for mb in step) == 50
        assert session.metrics()["sources"]["a"]["dropped"] == 50


def test_chunk_orders_are_kept_for_two_epochs_and_no_more() -> None:
    order = SourceOrder(name="a", n_chunks=1000, seed=1, shuffle=True, shuffle_chunks=8)
    first = [order.chunk_order(e).tolist() for e in range(20)]
    assert cached_orders(order) == 2
    assert [order.chunk_order(e).tolist() for e in range(20)] == first
    assert order.chunk_order(7) is order.chunk_order(7)


# Numbers


EXTREME = st.one_of(
    st.floats(0, allow_nan=False, allow_infinity=False),
    st.sampled_from(
        [5e-324, 1e-300, 1e300, 1.7976931348623157e308, 2.2250738585072014e-308, 1.0, 0.0]
    ),
)


@given(st.lists(EXTREME, min_size=1, max_size=8))
def test_whole_weights_sum_to_the_unit_whatever_the_weights(weights: list[float]) -> None:
    whole = whole_weights(weights)
    assert sum(whole) == (UNIT if any(weights) else 0)
    assert all(w >= 0 for w in whole)
    assert all(w == 0 for w, real in zip(whole, weights, strict=True) if real == 0)


@given(
    st.lists(EXTREME, min_size=1, max_size=5).filter(any),
    st.lists(st.integers(1, 2**45), min_size=1, max_size=4),
)
def test_a_batch_of_any_size_is_drawn_exactly(weights: list[float], sizes: list[int]) -> None:
    whole, owed, total = whole_weights(weights), [0] * len(weights), [0] * len(weights)
    for n in sizes:
        counts = draw_counts(n, whole, owed)
        assert sum(counts) == n
        total = [t + c for t, c in zip(total, counts, strict=True)]
    for t, w in zip(total, whole, strict=True):
        assert abs(t * UNIT - sum(sizes) * w) < UNIT


def test_random_draws_of_a_big_batch_follow_the_weights() -> None:
    counts = random_counts(10**6, whole_weights([1e-300, 1.0, 3.0, 5e-324]), 5, 2**40, 2**50)
    assert sum(counts) == 10**6
    assert (counts[0], counts[3]) == (0, 0)
    assert abs(counts[2] / 10**6 - 0.75) < 0.01


@pytest.mark.parametrize("weights", [(1e-300, 1e300), (5e-324, 1.0), (1e300, 1e300)])
def test_a_job_of_extreme_weights_gives_every_sample_once(weights: tuple[float, float]) -> None:
    sources = [
        ov.Source(
            name,
            Rows([{"tokens": [k]} for k in range(20)]),
            transforms=[ov.Tokens("tokens")],
            weight=w,
            epochs=1,
        )
        for name, w in zip("ab", weights, strict=True)
    ]
    for batch in (ov.Batch(samples=7, context=16), ov.Batch(tokens=7, context=16)):
        run = ov.simulate(ov.Job(name="extreme", sources=sources, batch=batch), check=True)
        ids = [tuple(p.sample) for s in run.steps[0] for mb in s for p in mb.samples]
        assert run.error is None
        assert len(ids) == len(set(ids)) == 40


@given(
    st.lists(
        st.one_of(
            EXTREME,
            st.integers(0, 5),
            st.just(math.nan),
            st.just(-1.0),
            st.just(True),
            st.just("x"),
        ),
        min_size=1,
        max_size=5,
    )
)
@examples(200)
def test_weights_are_right_or_refused_whichever_way_they_are_said(weights: list[Any]) -> None:
    names = [f"s{i}" for i in range(len(weights))]
    outcomes = []
    for said in (
        weights,
        dict(zip(names, weights, strict=True)),
        {**dict(zip(names, weights, strict=True)), "zz": 1.0},
    ):
        try:
            outcomes.append(by_source(said, names))
        except JobError:
            outcomes.append(None)
    right = all(type(w) in (int, float) and 0 <= w < math.inf for w in weights) and any(weights)
    assert outcomes == [[float(w) for w in weights] if right else None] * 2 + [None]


# The end, as a constructor sees it


def stage(step: int) -> PlannedStep:
    plan: Any = type("Plan", (), {"step": step})()
    return PlannedStep(plan, np.zeros(0), np.zeros(0), "", None)  # type: ignore[arg-type]


def building(*steps: int) -> Assembler:
    assembler = Assembler(0, [0], build_ahead=len(steps))
    assembler.handle(Attach(0))
    for step in steps:
        assembler.handle(stage(step))
        assert assembler.handle(PayloadReady(step)) == [Build(step, 0)]
    return assembler


def test_a_step_that_cannot_be_built_is_the_end_though_later_ones_are_under_way() -> None:
    assembler, error = building(0, 1, 2), MemoryError()
    assert assembler.handle(Built(2)) == []
    assert assembler.handle(EndOfJob(1, error)) == [Release(2, 0)]
    assert assembler.handle(Built(0)) == [Deliver(0, 0), EndRank(0, error)]
    assert assembler.handle(Built(1)) == [Release(1, 0)]
    assembler.handle(stage(3))
    assert assembler.handle(PayloadReady(3)) == [Release(3, 0)]


def test_of_two_failures_the_earlier_step_is_the_end() -> None:
    first, second = MemoryError("first"), MemoryError("second")
    assembler = building(0, 1, 2)
    assert assembler.handle(EndOfJob(2, second)) == []
    assert assembler.handle(EndOfJob(1, first)) == []
    assert assembler.handle(EndOfJob(2, second)) == []
    assert assembler.handle(Built(0)) == [Deliver(0, 0), EndRank(0, first)]


def test_a_step_built_for_nobody_is_let_go() -> None:
    from overlord.messages.control import Detach

    assembler = building(0)
    assert assembler.handle(Detach(0)) == []
    assert assembler.handle(Built(0)) == [Release(0, 0)]


# Failures behind the last sample of a source


def failing_end(**changes: Any) -> ov.Job:
    """Source ``short`` ends with rows that fail; ``long`` goes on for ever."""
    short = [{"tokens": [1]}] * 9 + [{"tokens": []}] * 4
    sources = [
        ov.Source("short", Rows(short), transforms=[ov.Tokens("tokens")], epochs=1, shuffle=False),
        ov.Source(
            "long", Rows([{"tokens": [2]}] * 50), transforms=[ov.Tokens("tokens")], epochs=None
        ),
    ]
    return ov.Job(
        name="ends",
        sources=sources,
        batch=ov.Batch(samples=6, context=8),
        until=8,
        slice_rows=4,
        **changes,
    )


@pytest.mark.parametrize("changes", [{}, {"look_ahead": 3}, {"overflow": "defer"}])
def test_failures_at_the_end_of_a_source_are_listed_when_it_leaves_and_counted_in_the_state(
    changes: dict[str, Any],
) -> None:
    made = failing_end(**changes)
    whole = ov.simulate(made, seed=1, save=True, check=True)
    assert [(q.source, q.row) for q in whole.quarantine] == [(0, 9), (0, 10), (0, 11), (0, 12)]
    left = [state["active"]["short"] for state in whole.states.values()]
    assert [state["counts"]["quarantined"].get("short", 0) for state in whole.states.values()] == [
        0 if active else 4 for active in left
    ]
    assert set(left) == {True, False}
    for k, state in whole.states.items():
        again = ov.simulate(made, seed=k, resume=json.loads(json.dumps(state)), check=True)
        assert len(again.quarantine) + state["counts"]["quarantined"].get("short", 0) == 4, (
            f"restored after step {k}"
        )


@pytest.mark.parametrize("changes", [{}, {"look_ahead": 2}])
def test_of_two_sources_that_break_in_one_step_the_first_is_named_whoever_was_read_first(
    changes: dict[str, Any],
) -> None:
    rows = [{"tokens": [1]}] * 12 + [{"tokens": []}] * 5
    sources = [
        ov.Source(
            name,
            Rows(rows),
            transforms=[ov.Tokens("tokens")],
            epochs=1,
            shuffle=False,
            max_bad=3,
            weight=w,
        )
        for name, w in (("a", 1.0), ("b", 1.0), ("c", 0.01))
    ]
    made = ov.Job(
        name="broken",
        sources=sources,
        batch=ov.Batch(samples=4, context=8),
        slice_rows=3,
        **changes,
    )
    runs = [
        ov.simulate(made, seed=seed, delays=Delays(sigma=3.0), prefetch=2, check=True)
        for seed in range(25)
    ]
    assert len({(str(r.error), tuple(r.quarantine), len(r.steps[0])) for r in runs}) == 1
    assert "source 'a'" in str(runs[0].error)


# What a strategy may not do with candidates


def test_a_state_with_samples_passed_over_is_refused_by_a_batch_in_tokens() -> None:
    def last_first(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix(
            prefer=lambda candidates, place: -1.0 * candidates.row
        )
        return graph.distribute("DP").balance("greedy").plan()

    state = ov.simulate(job(strategy=last_first, look_ahead=3), seed=1, steps=2).end_state
    assert state["ahead"]
    other = job(batch=ov.Batch(tokens=10, context=32))
    with pytest.raises(ov.StateMismatch, match="until a state has no 'ahead'"):
        ov.launch(other, resume=state, allow=("batch", "look_ahead", "strategy"))


@pytest.mark.parametrize("changes", [{"look_ahead": 2}, {"overflow": "defer"}])
@pytest.mark.parametrize("field", ["step", "tokens", "names"])
def test_a_choice_that_tells_something_else_than_was_drawn_is_refused(
    changes: dict[str, Any], field: str
) -> None:
    def doctored(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        plan = llm_balance(buffer, place)
        wrong = {"step": plan.step + 1, "tokens": plan.tokens + 1, "names": plan.names[::-1]}
        return replace(plan, **{field: wrong[field]})

    run = ov.simulate(job(strategy=doctored, **changes), seed=1)
    assert isinstance(run.error, ov.PlanError)
    assert "expected a plan for the step, sources and samples of its buffer" in str(run.error)
