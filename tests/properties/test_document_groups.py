"""Samples of several documents of any job: whole, in one microbatch, with their losses and keys."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.documents import reserve
from overlord.sample import Ragged
from overlord.transforms.grouped_samples import fitted_lengths
from tests.laws import examples
from tests.properties.test_loss_weights import steps_of
from tests.reference import Sample, reference_stream
from tests.reference_groups import Grouped, documents_of, most_tokens

PAD = 0
Document = tuple[
    int, int, int, int, float | None
]  # sample in the step, role, tokens, prompt, value
Target = tuple[int, float]  # label and weight


def ids(first: int, n: int) -> list[int]:
    return list(range(first, first + n))


@st.composite
def rows(draw: st.DrawFn, first: int) -> list[dict[str, Any]]:
    """Rows with responses of different ids; some cannot be used."""
    found = []
    for _ in range(draw(st.integers(3, 10))):
        lengths = draw(st.lists(st.integers(1, 40), min_size=2, max_size=5))
        prompt = draw(st.integers(0, 12))
        row: dict[str, Any] = {"prompt": ids(first, prompt), "margin": draw(st.floats(-2, 2))}
        first += prompt
        responses = []
        for n in lengths:
            responses.append(ids(first, n))
            first += n
        row |= {"chosen": responses[0], "rejected": responses[1], "responses": responses}
        row["rewards"] = [draw(st.floats(-9, 9)) for _ in lengths]
        row["loss"] = [draw(st.lists(WEIGHTS, min_size=n, max_size=n)) for n in lengths]
        row["loss_c"], row["loss_r"] = row["loss"][:2]
        fault = draw(st.sampled_from([None] * 12 + list(FAULTS)))
        found.append(row if fault is None else row | FAULTS[fault])
    found.append(
        {"prompt": [], "chosen": [first], "rejected": [first + 1], "margin": 0.0}
        | {"responses": [[first + 2]], "rewards": [0.0], "loss": [[1.0]]}
        | {"loss_c": [1.0], "loss_r": [1.0]}
    )
    return found


WEIGHTS = st.sampled_from([0.0, 1.0, 0.25, 3.5])
FAULTS: dict[str, dict[str, Any]] = {
    "no rejected": {"rejected": None, "responses": None},
    "empty response": {"chosen": [], "responses": [[], [1]]},
    "an id below 0": {"rejected": [-1], "responses": [[-1]]},
    "no prompt": {"prompt": None},
    "too few rewards": {"rewards": [], "margin": None},
    "a weight too few": {"loss": [[1.0]], "loss_c": [1.0] * 99},
}
KINDS = (
    (ov.Pair("chosen", "rejected"),),
    (ov.Pair(prompt="prompt", values=["margin"]),),
    (ov.Pair(prompt="prompt"), ov.Tokens(loss=("loss_c", "loss_r"))),
    (ov.Group("responses", prompt="prompt", values=["rewards"]), ov.Tokens()),
    (ov.Group("responses", values={"rewards": "margin"}), ov.Tokens(loss="loss")),
)


@st.composite
def jobs(draw: st.DrawFn, strategies: tuple[str, ...]) -> ov.Job:
    place = ov.Mesh(dp=draw(st.sampled_from([1, 2])), cp=draw(st.sampled_from([1, 2])))
    plain = [{"tokens": ids(10**6 + 100 * i, 1 + i % 40)} for i in range(draw(st.integers(1, 9)))]
    sources = [ov.Source.from_dataset("plain", plain, epochs=1)]
    for k in range(draw(st.integers(1, 2))):
        given_rows, transforms = draw(rows(1000 + 100_000 * k)), draw(st.sampled_from(KINDS))
        sources.append(ov.Source.from_dataset(f"s{k}", given_rows, transforms=transforms, epochs=1))
    context = draw(st.sampled_from([192, 256])) if place.cp > 1 else draw(st.integers(24, 200))
    strategy = draw(st.sampled_from(strategies))
    look_ahead = 3 if strategy == "look_ahead_balance" else 1
    return ov.Job(
        name="groups",
        sources=sources,
        batch=ov.Batch(
            samples=4,
            microbatches=draw(st.sampled_from([1, 2])),
            context=context,
            layout=draw(st.sampled_from(["packed", "padded"])),
            labels=draw(st.sampled_from(["shifted", "unshifted"])),
            pad_id=PAD,
            cp_split=draw(st.sampled_from(["zigzag", "contiguous", "none"])),
        ),
        place=place,
        strategy=strategy,
        look_ahead=look_ahead,
        max_document=draw(st.none() | st.integers(8, 24)),
        on_long=draw(st.sampled_from(["split", "truncate", "drop", "quarantine"])),
        slice_rows=draw(st.sampled_from([2, 64])),
        seed=draw(st.integers(0, 99)),
    )


@given(jobs(("llm_balance", "packed", "vanilla", "even")), st.integers(0, 2**20), st.booleans())
@examples(60)
def test_every_document_of_a_sample_is_delivered_once_beside_the_others(
    job: ov.Job, seed: int, simulated: bool
) -> None:
    wanted = list(reference_stream(job))
    got = steps_of(job, seed if simulated else None)
    assert {len(steps) for steps in got.values()} == {len(wanted)}
    for k, samples in enumerate(wanted):
        check_step(job, samples, {rank: steps[k] for rank, steps in got.items()})


@given(jobs(("look_ahead_balance",)), st.integers(0, 2**20))
@examples(20)
def test_look_ahead_delivers_every_sample_of_several_documents_once(job: ov.Job, seed: int) -> None:
    every = {sample[0]: sample for samples in reference_stream(job) for sample in samples}
    got, seen = steps_of(job, seed), set()
    for k in range(len(got[0])):
        steps = {rank: steps[k] for rank, steps in got.items()}
        drawn = sorted(
            {
                (int(g), tuple(p.sample))
                for step in steps.values()
                for mb in step
                for g, p in zip(mb["group_ids"], mb.samples, strict=False)
            }
        )
        assert [g for g, _ in drawn] == list(range(len(drawn))), "numbered in the draw's order"
        assert not seen & {i for _, i in drawn}
        seen |= {i for _, i in drawn}
        check_step(job, [every[i] for _, i in drawn], steps)  # type: ignore[index]
    assert seen == set(every)


def check_step(job: ov.Job, samples: list[Sample], steps: dict[int, ov.Step]) -> None:
    whole = job.place.cp == 1 or job.batch.cp_split == "none"
    targets: dict[int, Target] = {}
    buckets: dict[int, list[Document]] = {}
    for rank, step in steps.items():
        coords = job.place.coords(rank)
        seen = [document for mb in step for document in documents_in(job, mb, samples)]
        assert buckets.setdefault(coords["dp"], seen) == seen, "ranks of a bucket agree"
        for mb in step if not whole or coords["cp"] == 0 else ():
            part = targets_in(mb)
            assert not targets.keys() & part.keys(), "delivered twice"
            targets |= part
    found = sorted(d for documents in buckets.values() for d in documents)
    assert found == sorted(d for i, s in enumerate(samples) for d in documents_wanted(job, i, s))
    expected: dict[int, Target] = {}
    for sample in samples:
        expected |= targets_wanted(job, sample)
    assert targets == expected
    valid = math.fsum(w for _, w in expected.values())
    assert {step.global_valid_tokens for step in steps.values()} == {valid}
    if job.strategy == "even" and len(samples) == job.batch.samples:
        counts = {len({*mb["group_ids"].tolist()}) for step in steps.values() for mb in step}
        assert len(counts) == 1, "microbatches have equal counts"


def documents_in(job: ov.Job, mb: ov.Microbatch, samples: list[Sample]) -> list[Document]:
    """Return the documents that the keys of a microbatch describe; each sample must be whole."""
    groups, roles = mb["group_ids"].tolist(), mb["roles"].tolist()
    lengths, prompts = np.diff(mb["cu_seqlens"]).tolist(), mb["prompt_lengths"].tolist()
    if groups == [-1]:
        assert roles == [-1]
        assert not mb.samples
        return []
    assert len(mb.samples) == len(groups)
    found: list[Document] = []
    for d, (g, role, n, p) in enumerate(zip(groups, roles, lengths, prompts, strict=True)):
        assert tuple(mb.samples[d].sample) == samples[g][0]
        assert mb.samples[d].length == n
        value = next((float(mb[v][d]) for v in ("margin", "rewards") if v in mb), math.nan)
        found.append((g, role, n, p, None if math.isnan(value) else value))
    runs = [g for d, g in enumerate(groups) if d == 0 or groups[d - 1] != g]
    assert len(set(runs)) == len(runs), "documents of a sample follow each other"
    for g in runs:
        own = [role for role, group in zip(roles, groups, strict=True) if group == g]
        made = documents_of(job, samples[g])
        assert own == ([-1] if made is None else list(range(len(made.documents))))
    return found


def documents_wanted(job: ov.Job, number: int, sample: Sample) -> list[Document]:
    made = documents_of(job, sample)
    if made is None:
        return [(number, -1, len(sample[1]), 0, None)]
    found: list[Document] = []
    # a job with both has two columns, of which the test reads the first
    names = {
        name for s in job.sources for t in s.transforms for name in getattr(t, "values", None) or {}
    }
    column = made.values.get("margin" if "margin" in names else "rewards")
    for d, document in enumerate(made.documents):
        value = None if column is None else float(np.float32(column[d]))
        found.append((number, d, len(document), made.prompts[d], value))
    return found


def targets_in(mb: Any) -> dict[int, Target]:
    found: dict[int, Target] = {}
    columns = [mb[key].reshape(-1).tolist() for key in ("tokens", "labels", "loss_mask")]
    for token, label, weight in zip(*columns, strict=True):
        if token == PAD:
            assert (label, weight) == (-100, 0.0), "padding has a loss"
        elif label >= 0:  # prompts repeat, and have no label
            assert label not in found, "delivered twice"
            found[label] = (label, weight)
    return found


def targets_wanted(job: ov.Job, sample: Sample) -> dict[int, Target]:
    made = documents_of(job, sample)
    if made is None:
        made = Grouped([sample[1]], [0], [[1.0] * len(sample[1])], {})
    found: dict[int, Target] = {}
    for document, weights in zip(made.documents, made.weights, strict=True):
        for token, weight in list(zip(document, weights, strict=True))[1:]:
            if weight:
                found[token] = (token, weight)
    return found


@given(
    st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=6), min_size=1, max_size=5),
    st.integers(1, 70),
    st.integers(1, 120),
)
@examples(200)
def test_documents_are_cut_to_the_largest_length_that_fits(
    documents: list[list[int]], limit: int, room: int
) -> None:
    cut = fitted_lengths(Ragged.from_rows(documents), limit, room)
    expected = []
    for lengths in documents:
        most = most_tokens(lengths, limit, room)
        expected += [min(length, most) for length in lengths]
    assert cut.tolist() == expected


@given(st.integers(64, 2**15), st.integers(2, 40), st.data())
@examples(200)
def test_a_fitted_sample_fits_with_the_padding_of_any_mesh_within_its_reserve(
    room: int, n: int, data: st.DataObject
) -> None:
    multiple = 1 + data.draw(st.integers(0, int(reserve(room, np.array([n]))[0])))
    lengths = data.draw(st.lists(st.integers(1, room), min_size=n, max_size=n))
    cut = fitted_lengths(Ragged.from_rows([lengths]), room, room)
    assert int((-(-cut // multiple) * multiple).sum()) <= room
