"""Look-ahead: a step chooses among the first samples of each source. Still one stream, exactly
once, whatever happens.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.hashing import key64, keyed_hash
from overlord.messages.control import SetMixture
from tests.laws import examples
from tests.properties.test_stream import Sample, delivered, fingerprint, in_order, run, state_after
from tests.reference import reference_stream
from tests.worlds import Rows, World, folder, some_steps, worlds

CHOICES = st.tuples(
    st.integers(2, 5), st.integers(1, 6), st.sampled_from(("whim", "short", "none"))
)  # look_ahead, max_age, taste


class Taste:
    """A mixture by the sources' own weights that prefers some candidates to others."""

    def __init__(self, weights: dict[str, float], taste: str):
        self.weights, self.taste = weights, taste

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        return self.weights

    def prefer(self, step: int, candidates: ov.Buffer) -> np.ndarray:
        if self.taste == "short":
            return np.maximum(np.asarray(candidates.column("tokens")) - 5.0, 0.0)
        if self.taste == "whim":
            return (
                keyed_hash(key64("whim"), candidates.row, np.full(len(candidates), step))
                % np.uint64(7)
            ).astype(float)
        return np.zeros(len(candidates))

    def score(self, step: int, sample: Sample) -> float:
        (_, _, _, row, _), tokens = sample
        if self.taste == "short":
            return max(len(tokens) - 5.0, 0.0)
        return (
            float(keyed_hash(key64("whim"), np.array([row]), np.array([step]))[0] % np.uint64(7))
            if self.taste == "whim"
            else 0.0
        )

    @property
    def fingerprint(self) -> str:
        return f"taste {self.taste} {sorted(self.weights.items())}"


def ahead(world: World, directory: str, choice: tuple[int, int, str]) -> tuple[ov.Job, Taste]:
    plain = world.job(directory)
    taste = Taste({s.name: s.weight for s in plain.sources}, choice[2])
    return world.job(directory, look_ahead=choice[0], max_age=choice[1], mixture=taste), taste


@given(worlds(batches="samples"), CHOICES, st.integers(0, 2**20))
@examples(60)
def test_the_chosen_stream_equals_the_reference(
    world: World, choice: tuple[int, int, str], seed: int
) -> None:
    with folder() as directory:
        job, taste = ahead(world, directory, choice)
        steps: list[list[Sample]] = []
        broken = False
        try:
            for step in reference_stream(job, [], taste.score):
                steps.append(step)
        except ValueError:
            broken = True
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps


@given(worlds(batches="samples"), CHOICES, st.integers(0, 2**20), st.integers(1, 4))
@examples(18)
def test_no_option_changes_a_byte_and_restored_at_every_step_the_rest_is_identical(
    world: World, choice: tuple[int, int, str], seed: int, loaders: int
) -> None:
    with folder() as directory:
        job, _ = ahead(world, directory, choice)
        whole, error, bad, _ = run(job, seed)
        again, other, bad_too, _ = run(
            job, seed + 1, loaders=dict.fromkeys(job.names, loaders), prefetch=1 + seed % 5
        )
        assert (fingerprint(again), type(other), bad_too) == (fingerprint(whole), type(error), bad)
        for k in some_steps(len(whole[0]), seed):
            state = json.loads(json.dumps(state_after(job, whole[0][k])))
            rest, last, _, end = run(job, seed + k, resume=state, loaders={"s0": loaders})
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()}), (
                f"restored after step {k}"
            )
            assert type(last) is type(error)
            if rest[0]:
                assert end["counts"] == state_after(job, whole[0][-1])["counts"]


@given(worlds(batches="samples", endless=False), CHOICES)
@examples(40)
def test_every_sample_is_chosen_exactly_once(world: World, choice: tuple[int, int, str]) -> None:
    with folder() as directory:
        job, _ = ahead(world, directory, choice)
        if job.until != "all":
            return
        plain, broken, _, _ = run(world.job(directory), 1)
        got, error, _, _ = run(job, 1)
        assert (error is None) == (broken is None)
        if error is None:
            assert sorted(s for step in got[0] for s in in_order(step.info)) == sorted(
                s for step in plain[0] for s in in_order(step.info)
            )


@given(worlds(batches="samples"), st.integers(2, 5), st.integers(0, 2**20))
@examples(25)
def test_without_a_preference_look_ahead_changes_nothing(
    world: World, look_ahead: int, seed: int
) -> None:
    with folder() as directory:
        plain, first, _, _ = run(world.job(directory), seed)
        got, second, _, _ = run(world.job(directory, look_ahead=look_ahead), seed)
        if first is None:  # one that looks further ahead comes to a broken place sooner
            assert second is None
            assert fingerprint(got) == fingerprint(plain)


def test_a_choice_needs_candidates() -> None:
    with pytest.raises(ov.JobError, match="look_ahead: expected more than 1 for"):
        ov.Job(
            name="j",
            sources=[ov.Source("a", "a/*.parquet")],
            place=ov.ClientPlaceTree(dp=1),
            batch=ov.Batch(samples=4, context=8),
            mixture=Taste({"a": 1.0}, "whim"),
        )


# overflow="defer": what does not fit a step is left for a later one


def deferring(world: World, directory: str) -> ov.Job:
    return world.job(directory, overflow="defer")


@given(worlds(batches="samples"), st.integers(0, 2**20), st.integers(1, 3))
@examples(18)
def test_deferring_keeps_the_number_of_microbatches_and_restores_to_the_byte(
    world: World, seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = deferring(world, directory)
        whole, error, _, _ = run(job, seed)
        assert all(len(step) == job.batch.microbatches for step in whole[0])
        again, other, _, _ = run(job, seed + 1, loaders=dict.fromkeys(job.names, loaders))
        assert (fingerprint(again), type(other)) == (fingerprint(whole), type(error))
        for k in some_steps(len(whole[0]), seed):
            state = json.loads(json.dumps(state_after(job, whole[0][k])))
            rest, _, _, _ = run(job, seed + k, resume=state, loaders={"s0": loaders})
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()}), (
                f"restored after step {k}"
            )


@given(worlds(batches="samples", endless=False), st.integers(0, 2**20))
@examples(25)
def test_what_is_deferred_still_comes_exactly_once(world: World, seed: int) -> None:
    with folder() as directory:
        job = deferring(world, directory)
        if job.until != "all":
            return
        plain, broken, _, _ = run(world.job(directory), seed)
        got, error, _, _ = run(job, seed)
        assert (error is None) == (broken is None)
        if error is None:
            assert sorted(s for step in got[0] for s in in_order(step.info)) == sorted(
                s for step in plain[0] for s in in_order(step.info)
            )


def test_a_job_that_overflows_at_every_step_owes_no_more_and_follows_a_new_mixture() -> None:
    sources = [
        ov.Source(
            name,
            Rows([{"tokens": [k + 1] * 20} for k in range(50)]),
            transforms=[ov.Tokens("tokens")],
            epochs=None,
        )
        for name in "ab"
    ]
    batch = ov.Batch(samples=8, microbatches=2, context=32)  # two of the eight fit
    job = ov.Job(name="full", sources=sources, batch=batch, overflow="defer", until=140)
    got = ov.simulate(job, seed=1, events=[SetMixture(100, {"a": 1.0, "b": 3.0})], check=True)
    names = [key[0] for step in got.steps[0] for key in in_order(step.info)]
    assert len(names) == 280
    assert abs(names[:200].count("a") - 100) <= 8
    assert abs(names[200:].count("a") - 20) <= 8
    assert all(abs(owed) <= 8 * 2**40 for owed in got.end_state["owed"].values())
