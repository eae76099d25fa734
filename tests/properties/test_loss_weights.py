"""Loss weights of any job: every label has the weight of its token, on every mesh and layout."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from tests.laws import examples
from tests.reference import reference_stream
from tests.reference_loss import Target, targets, targets_of, valid_tokens

PAD = 0
WEIGHTS = st.sampled_from([0, 1, 0.0, 1.0, 0.25, 0.1, 3.5])
BAD = [None, [], [0.5], [float("nan")] * 40, [-1.0] * 40, [float("inf")] * 40, [1e39] * 40]


@st.composite
def rows(draw: st.DrawFn, first: int) -> list[dict[str, Any]]:
    """Rows of different ids with weights; some weights cannot be used."""
    found = []
    for n in draw(st.lists(st.integers(1, 40), min_size=4, max_size=12)):
        weights: Any = draw(st.lists(WEIGHTS, min_size=n, max_size=n))
        if draw(st.integers(0, 9)) == 0:
            weights = draw(st.sampled_from(BAD))
            weights = weights[:n] if weights and len(weights) > 1 else weights
        found.append({"ids": list(range(first, first + n)), "w": weights})
        first += n
    found.append({"ids": [first], "w": [1.0]})  # a source needs a sample
    return found


@st.composite
def jobs(draw: st.DrawFn) -> ov.Job:
    cp, strategy = draw(st.sampled_from([1, 2])), draw(st.sampled_from(["llm_balance", "packed"]))
    shared = draw(st.booleans())
    weighted = ov.Tokens("ids", loss="w")
    kind = draw(st.sampled_from([(weighted,), (weighted, ov.Filter(everything)), ()]))
    plain = [{"tokens": row["ids"]} for row in draw(rows(1000))]
    sources = [ov.Source.from_dataset("plain", plain, epochs=1, max_bad=100)]
    for k, transforms in enumerate([(weighted,), kind]):
        given_rows = draw(rows(2000 + 1000 * k))
        if not transforms:
            given_rows = [{"tokens": row["ids"]} for row in given_rows]
        source = ov.Source.from_dataset(f"s{k}", given_rows, transforms=transforms, epochs=1)
        sources.append(source)
    return ov.Job(
        name="weights",
        sources=sources,
        batch=ov.Batch(
            samples=draw(st.integers(2, 9)),
            context=draw(st.sampled_from([8, 16, 24])),
            layout="packed" if shared else draw(st.sampled_from(["packed", "padded"])),
            labels=draw(st.sampled_from(["shifted", "unshifted"])),
            pad_id=PAD,
            cp_split="zigzag" if shared else draw(st.sampled_from(["zigzag", "contiguous"])),
        ),
        place=ov.Mesh(dp=draw(st.sampled_from([1, 2])), cp=cp),
        strategy="hdp_balance" if shared else strategy,
        on_long=draw(st.sampled_from(["split", "truncate", "drop", "quarantine"])),
        slice_rows=draw(st.sampled_from([2, 64])),
        seed=draw(st.integers(0, 99)),
    )


def everything(columns: dict[str, Any]) -> list[bool]:
    return [True] * len(columns["ids"])


@given(jobs(), st.integers(0, 2**20), st.booleans())
@examples(60)
def test_every_label_has_the_weight_of_its_token_wherever_it_is(
    job: ov.Job, seed: int, simulated: bool
) -> None:
    wanted = list(reference_stream(job))
    got = steps_of(job, seed if simulated else None)
    assert {len(steps) for steps in got.values()} == {len(wanted)}
    for k, samples in enumerate(wanted):
        found: dict[int, Target] = {}
        for steps in got.values():
            for mb in steps[k]:
                part = targets_of(mb, PAD)
                assert not found.keys() & part.keys(), "delivered to two ranks"
                found |= part
        assert found == targets(job, samples)
        valid = valid_tokens(job, samples)
        assert {steps[k].global_valid_tokens for steps in got.values()} == {valid}
        kinds = {type(steps[k].global_valid_tokens) for steps in got.values()}
        assert kinds == {int if valid.is_integer() else float}


def steps_of(job: ov.Job, seed: int | None) -> dict[int, list[ov.Step]]:
    """Return all steps of all ranks: on the virtual clock with a seed, else on the local runtime."""
    if seed is not None:
        done = ov.simulate(job, seed=seed, check=True, broadcast=False)
        assert done.error is None, done.error
        return done.steps
    with ov.launch(job, check=True, broadcast=False) as session:
        clients = {rank: session.client(rank) for rank in range(job.place.world_size)}
        got: dict[int, list[ov.Step]] = {rank: [] for rank in clients}
        while True:
            try:
                for rank, client in clients.items():
                    got[rank].append(next(client))
            except StopIteration:
                return got
