"""Chunks under changes of the job in mid-run: lost and added sources, skips and new weights."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.messages.control import SetMixture, Skip
from tests.laws import examples
from tests.properties.test_concat import concat_worlds
from tests.properties.test_lost_sources import assert_function_of_the_log, leaving
from tests.properties.test_stream import fingerprint, run
from tests.worlds import World, folder


@given(
    concat_worlds(),
    st.dictionaries(st.integers(0, 3), st.integers(0, 20), min_size=1, max_size=2),
    st.integers(0, 2**20),
)
@examples(30)
def test_a_lost_source_leaves_its_cut_sample_behind_in_every_run(
    world: World, after: dict[int, int], salt: int
) -> None:
    with folder() as directory:
        job = leaving(world.job(directory))
        assert_function_of_the_log(
            job, {job.names[i % len(job.names)]: n for i, n in after.items()}, salt
        )


@given(
    concat_worlds(endless=False),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=3),
    st.sets(st.integers(0, 5), max_size=2),
    st.integers(0, 2**20),
)
@examples(40)
def test_skips_and_weights_lose_and_repeat_no_token(
    world: World, mixes: list[tuple[int, int]], skips: set[int], seed: int
) -> None:
    with folder() as directory:
        job = world.job(directory, until="all")
        events: list[Any] = [
            SetMixture(at, {n: 1.0 + (i == which) for i, n in enumerate(job.names)})
            for at, which in mixes
        ]
        plain, error, _, _ = run(job, seed, events=events)
        if error is not None:
            return
        got, _, _, _ = run(job, seed + 1, events=[*events, Skip(tuple(sorted(skips)))])
        kept = {rank: [s for s in steps if s.step not in skips] for rank, steps in plain.items()}
        assert fingerprint(got) == fingerprint(kept)
        found: dict[Any, int] = {}
        for steps in zip(*plain.values(), strict=True):
            info = steps[0].info
            for i in range(len(info)):
                sample = tuple(info.sample_id(i))
                assert found.get(sample, 0) == info.offset[i]
                found[sample] = int(info.offset[i] + info.tokens[i])
        calm, _, _, _ = run(job, seed)
        assert found == ends(calm)


def ends(steps: dict[int, list[ov.Step]]) -> dict[Any, int]:
    """The tokens of each sample that steps have delivered."""
    found: dict[Any, int] = {}
    for step in steps[0]:
        info = step.info
        for i in range(len(info)):
            found[tuple(info.sample_id(i))] = int(info.offset[i] + info.tokens[i])
    return found
