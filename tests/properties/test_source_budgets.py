"""Budgets of sources: each source gives exactly its budget, on every runtime and after a restart."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from tests.laws import examples
from tests.properties.test_concat import concat_worlds
from tests.properties.test_concat import delivered as delivered_chunks
from tests.properties.test_concat import wanted as wanted_chunks
from tests.properties.test_fixed_shapes import fixed_worlds
from tests.properties.test_look_ahead import CHOICES, ahead
from tests.properties.test_stages import delivered as delivered_stages
from tests.properties.test_stages import job_of, staged_worlds
from tests.properties.test_stages import wanted as wanted_stages
from tests.properties.test_stream import delivered, fingerprint, in_order, run, state_after, wanted
from tests.reference import reference_stream
from tests.reference_fixed import reference_fixed
from tests.worlds import Rows, World, folder, some_steps, worlds

EPOCHS = st.lists(
    st.one_of(st.none(), st.sampled_from((0.25, 0.5, 1.5, 2.25, 7 / 3, 0.9))),
    min_size=4,
    max_size=4,
)
TOKENS = st.lists(st.one_of(st.none(), st.integers(64, 900)), min_size=4, max_size=4)


def with_budgets(job: ov.Job, tokens: list[int | None]) -> ov.Job:
    """The job with a token budget for each of its sources."""
    sources = [replace(s, max_tokens=n) for s, n in zip(job.sources, tokens, strict=False)]
    return replace(job, sources=sources)


def with_epochs(job: ov.Job, epochs: list[float | None]) -> ov.Job:
    """The job with other epochs for each source that has a number of them."""
    sources = [
        replace(s, epochs=n if n and s.epochs else s.epochs)
        for s, n in zip(job.sources, epochs, strict=False)
    ]
    return replace(job, sources=sources)


def tokens_drawn(job: ov.Job, steps: dict[int, list[ov.Step]]) -> Counter[str]:
    """The tokens of each source in all steps."""
    found = Counter[str]()
    for step in steps[0]:
        for source, n in zip(step.info.source.tolist(), step.info.tokens.tolist(), strict=True):
            found[job.names[source]] += n
    return found


@given(worlds(), TOKENS, st.integers(0, 2**20))
@examples(120)
def test_the_stream_equals_the_reference(world: World, tokens: list[int | None], seed: int) -> None:
    with folder() as directory:
        job = with_budgets(world.job(directory), tokens)
        steps, broken, _ = wanted(job)
        got, error, _, _ = run(job, seed, loaders={"s0": 1 + seed % 3})
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps


@given(worlds(), EPOCHS, st.integers(0, 2**20))
@examples(150)
def test_fractional_epochs_equal_the_reference(
    world: World, epochs: list[float | None], seed: int
) -> None:
    with folder() as directory:
        job = with_epochs(world.job(directory), epochs)
        steps, broken, _ = wanted(job)
        got, error, _, _ = run(job, seed, loaders={"s0": 1 + seed % 3})
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps


@given(worlds(), EPOCHS, TOKENS, st.integers(0, 2**20), st.integers(1, 4))
@examples(15)
def test_restored_at_every_step_the_rest_is_identical_to_the_byte(
    world: World, epochs: list[float | None], tokens: list[int | None], seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = with_epochs(with_budgets(world.job(directory), tokens), epochs)
        check_restores(job, seed, loaders)


def check_restores(job: ov.Job, seed: int, loaders: int) -> None:
    """Other options change no byte, and a run restored after any step gives the same rest."""
    whole, error, bad, _ = run(job, seed)
    again, other, bad_too, _ = run(job, seed + 1, loaders=dict.fromkeys(job.names, loaders))
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


@given(worlds(batches="samples"), TOKENS, CHOICES, st.integers(0, 2**20))
@examples(25)
def test_look_ahead_chooses_inside_the_budget_and_restores_to_the_byte(
    world: World, tokens: list[int | None], choice: tuple[int, int, str], seed: int
) -> None:
    with folder() as directory:
        plain, taste = ahead(world, directory, choice)
        job = with_budgets(plain, tokens)
        steps, broken = list[Any](), False
        try:
            steps.extend(reference_stream(job, [], taste.score))
        except ValueError:
            broken = True
        got, error, _, _ = run(job, seed)
        if not broken:
            assert error is None
            assert delivered(got, len(got[0])) == steps
        check_restores(job, seed, 1 + seed % 3)


@given(worlds(batches="samples", endless=False), TOKENS, st.integers(0, 2**20))
@examples(25)
def test_deferred_samples_count_once(world: World, tokens: list[int | None], seed: int) -> None:
    with folder() as directory:
        plain = with_budgets(world.job(directory, until="all"), tokens)
        job = replace(plain, overflow="defer")
        whole, broken, _, _ = run(plain, seed)
        got, error, _, _ = run(job, seed)
        assert (error is None) == (broken is None)
        if error is None:
            assert sorted(samples_of(got)) == sorted(samples_of(whole))
        check_restores(job, seed, 1 + seed % 3)


def samples_of(steps: dict[int, list[ov.Step]]) -> list[Any]:
    return [key for step in steps[0] for key in in_order(step.info)]


@given(concat_worlds(), TOKENS, st.integers(0, 2**20))
@examples(50)
def test_chunks_hold_budgets_to_the_token(
    world: World, tokens: list[int | None], seed: int
) -> None:
    with folder() as directory:
        job = with_budgets(world.job(directory), tokens)
        steps, broken = wanted_chunks(job)
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered_chunks(job, got) == steps
        if not broken and job.until == "all":
            for source in job.sources:
                if source.epochs is None and source.max_tokens is not None:
                    assert tokens_drawn(job, got)[source.name] == source.max_tokens
        check_restores(job, seed, 1 + seed % 3)


@given(fixed_worlds(), EPOCHS, TOKENS, st.integers(0, 2**20))
@examples(25)
def test_fixed_shapes_keep_budgets(
    world: World, epochs: list[float | None], tokens: list[int | None], seed: int
) -> None:
    with folder() as directory:
        job = with_epochs(with_budgets(world.job(directory), tokens), epochs)
        steps, broken = list[Any](), False
        try:
            steps.extend(reference_fixed(job))
        except ValueError:
            broken = True
        got, error, _, _ = run(job, seed)
        if not broken:
            assert error is None, error
            assert [
                [tuple(step.info.sample_id(i)) for i in range(len(step.info))] for step in got[0]
            ] == [[key for key, _ in step] for step in steps]
        check_restores(job, seed, 1 + seed % 3)


@given(staged_worlds(), EPOCHS, TOKENS, st.integers(0, 2**20))
@examples(40)
def test_stages_and_ramps_keep_budgets(
    case: tuple[World, tuple[ov.Stage, ...]],
    epochs: list[float | None],
    tokens: list[int | None],
    seed: int,
) -> None:
    with folder() as directory:
        job = with_epochs(with_budgets(job_of(case, directory), tokens), epochs)
        steps, broken = wanted_stages(job)
        got, error, _, end = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered_stages(job, got) == steps
        for source in job.sources:
            given = end["counts"].get("tokens", {}).get(source.name, 0)
            assert source.max_tokens is None or given <= source.max_tokens
        check_restores(job, seed, 1 + seed % 3)


@given(worlds(), EPOCHS, TOKENS, st.integers(1, 3), st.integers(1, 5), st.integers(1, 4))
@examples(15)
def test_the_local_runtime_and_other_meshes_give_the_same_samples(
    world: World,
    epochs: list[float | None],
    tokens: list[int | None],
    loaders: int,
    prefetch: int,
    dp: int,
) -> None:
    with folder() as directory:
        job = with_epochs(with_budgets(world.job(directory), tokens), epochs)
        steps, broken, _ = wanted(job)
        got, error, _, _ = run(job, loaders={"s0": loaders}, prefetch=prefetch)
        assert (error is not None) == broken, error
        assert delivered(got, len(got[0])) == steps
        other = replace(job, place=ov.Mesh(dp=dp))
        half = len(got[0]) // 2
        if half and not broken:
            rest, _, _, _ = run(other, dp, resume=state_after(job, got[0][half - 1]))
            assert delivered(rest, len(rest[0])) == steps[half:]


@given(
    worlds(formats=("parquet", "dataset", "megatron", "jsonl"), endless=False),
    TOKENS,
    st.sampled_from((1, 1.5, 2, 2.25)),
    st.sampled_from((1, 1.5, 2, 2.75)),
    st.integers(0, 2**20),
)
@examples(60)
def test_a_run_resumed_with_other_budgets_continues_every_source_where_it_was(
    world: World, tokens: list[int | None], first: float, second: float, seed: int
) -> None:
    """Whatever the budgets were, each source gives the prefix that the last ones allow."""
    with folder() as directory:
        plain = world.job(directory, until="all", overflow="grow")
        before = with_epochs(with_budgets(plain, tokens), [first] * 4)
        after = with_epochs(with_budgets(plain, tokens[::-1]), [second] * 4)
        got, error, _, end = run(before, seed)
        steps, broken, _ = wanted(after)
        if error is not None or broken or not got[0]:
            return
        k = seed % len(got[0])
        state = end if seed % 2 else state_after(before, got[0][k])
        taken = got[0] if seed % 2 else got[0][: k + 1]
        allow = tuple(f"source {name}: reading" for name in before.names)
        uncounted = first != second and any(
            not isinstance(s.uri, Rows) and "jsonl" in str(s.uri) for s in plain.sources
        )
        prepared = PreparedJob(after, Options())
        try:
            state = prepared.export(prepared.restore(state, allow))
        except ov.StateMismatch:
            assert uncounted
            return
        rest, error, _, _ = run(after, seed + 1, resume=state)
        assert error is None, error
        goal = by_source([[key for key, _ in step] for step in steps])
        old = by_source([in_order(step.info) for step in taken])
        both = by_source([in_order(step.info) for step in [*taken, *rest[0]]])
        for name in before.names:
            # a budget that was lowered below what was drawn adds nothing
            assert both[name] == max(goal[name], old[name], key=len)


def by_source(steps: list[list[Any]]) -> dict[str, list[Any]]:
    """The samples of each source in the order of the stream."""
    found = defaultdict[str, list[Any]](list)
    for step in steps:
        for key in step:
            found[key[0]].append(key)
    return found
