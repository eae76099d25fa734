"""Steps of fixed shape with whole documents: what does not fit waits, and nothing is lost."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from tests.laws import examples
from tests.properties.test_stream import delivered, fingerprint, run, state_after
from tests.reference_fixed import reference_fixed
from tests.worlds import World, folder, some_steps, worlds


@st.composite
def fixed_worlds(draw: st.DrawFn, **options: Any) -> World:
    world = draw(worlds(batches="samples", **options))
    batch = dict(world.batch) | {
        "shape": "fixed",
        "max_documents": draw(st.sampled_from((None, 3, 9))),
    }
    if draw(st.booleans()):
        batch |= {"layout": "padded", "max_documents": 4}
    fields = dict(world.fields) | {"mix_every": "step", "look_ahead": draw(st.integers(1, 3))}
    return replace(world, fields=tuple(fields.items()), batch=tuple(batch.items()))


@given(fixed_worlds(), st.integers(0, 2**20))
@examples(60)
def test_the_samples_of_every_step_equal_the_reference(world: World, seed: int) -> None:
    with folder() as directory:
        job = world.job(directory)
        steps: list[Any] = []
        broken = False
        try:
            for step in reference_fixed(job):
                steps.append(step)
        except ValueError:
            broken = True
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        found = (
            delivered(got, len(got[0]))
            if job.batch.layout == "packed"
            else [
                [(tuple(s.info.sample_id(i)), int(s.info.tokens[i])) for i in range(len(s.info))]
                for s in got[0]
            ]
        )
        if job.batch.layout == "padded":
            steps = [[(key, len(tokens)) for key, tokens in step] for step in steps]
        assert found == steps


@given(fixed_worlds(), st.integers(0, 2**20))
@examples(40)
def test_every_array_of_every_microbatch_has_the_same_shape(world: World, seed: int) -> None:
    with folder() as directory:
        job = world.job(directory)
        got, _, _, _ = run(job, seed)
        shapes = {
            (len(step), *((key, mb[key].shape, mb[key].dtype) for key in mb))
            for rank in got
            for step in got[rank]
            for mb in step
        }
        assert len(shapes) <= 1
        for mb in (mb for rank in got for step in got[rank] for mb in step):
            n, bounds = len(mb.samples), mb["cu_seqlens"]
            assert len(bounds) == job.batch.documents + 1
            assert int(mb["max_seqlen"]) == job.batch.context
            if job.batch.layout == "packed":
                assert (bounds[max(1, n) :] == bounds[max(1, n)]).all()
                assert (mb["source_ids"][n:] == -1).all()
                assert mb["cu_seqlens_padded"][max(1, n)] == job.batch.context
            assert [p.length for p in mb.samples] == (bounds[1:] - bounds[:-1])[:n].tolist()


@given(fixed_worlds(), st.integers(0, 2**20), st.integers(1, 4))
@examples(20)
def test_restored_at_every_step_the_rest_is_identical_to_the_byte(
    world: World, seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        whole, error, _, _ = run(job, seed)
        for k in some_steps(len(whole[0]), seed):
            state = json.loads(json.dumps(state_after(job, whole[0][k])))
            rest, again, _, _ = run(job, seed + k, resume=state, loaders={"s0": loaders})
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()}), (
                f"restored after step {k}"
            )
            assert type(again) is type(error)


@given(fixed_worlds(endless=False), st.integers(0, 2**20), st.integers(1, 4))
@examples(30)
def test_every_sample_arrives_once_also_on_a_mesh_that_changes(
    world: World, seed: int, dp: int
) -> None:
    with folder() as directory:
        job = world.job(directory, until="all")
        other = world.job(directory, until="all", place=ov.Mesh(dp=dp))
        got, error, _, _ = run(job, seed)
        if error is not None:
            return
        everything = samples(got)
        assert max(everything.values(), default=1) == 1
        k = len(got[0]) // 2
        rest, _, _, _ = run(other, seed, resume=state_after(job, got[0][k]))
        first = {rank: steps[: k + 1] for rank, steps in got.items()}
        assert samples(first) + samples(rest) == everything


def samples(steps: dict[int, list[ov.Step]]) -> Counter[Any]:
    return Counter(
        tuple(piece.sample)
        for rank in steps
        for step in steps[rank]
        for mb in step
        for piece in mb.samples
    )
