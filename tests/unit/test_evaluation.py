"""``ov.evaluation``: one pass in file order, of which the mesh changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
import overlord.torch as ot
from overlord.session.pass_length import PassLength, pass_length
from overlord.setup.job_agreement import difference, parts_of
from tests.corpus import write_megatron, write_rows

BATCH = ov.Batch(samples=6, microbatches=2, context=32)


def rows(n: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"tokens": [1 + (first + k) % 90] * (1 + k % 9)} for k in range(n)]


def sources(*counts: int) -> list[ov.Source]:
    """Sources of a training job: shuffled and endless."""
    return [
        ov.Source.from_dataset(f"s{i}", rows(n, 100 * i), transforms=[ov.Tokens()], weight=1.0 + i)
        for i, n in enumerate(counts)
    ]


def delivered(job: ov.Job) -> tuple[list[list[ov.Step]], list[ov.LoadingPlan]]:
    """Steps by rank, taken in turn, and the plans."""
    with ov.launch(job, partition="off", check=True) as session:
        clients = [session.client(rank) for rank in range(job.place.world_size)]
        found: list[list[ov.Step]] = [[] for _ in clients]
        while steps := [step for client in clients if (step := next(client, None)) is not None]:
            assert len(steps) == len(clients), "every rank ends at the same step"
            for mine, step in zip(found, steps, strict=True):
                mine.append(step)
        plans = [session.plan(step.step) for step in found[0]]
        assert session.quarantine() == []
    return found, plans


def ids(plan: ov.LoadingPlan) -> list[tuple[int, int, int]]:
    return list(zip(plan.source.tolist(), plan.row.tolist(), plan.part.tolist(), strict=True))


def documents(steps: Sequence[ov.Step]) -> list[tuple[tuple[Any, ...], tuple[int, ...]]]:
    """Samples of one rank, with their tokens."""
    return [
        (tuple(p.sample), tuple(mb["tokens"][p.offset : p.offset + p.length].tolist()))
        for step in steps
        for mb in step
        for p in mb.samples
    ]


def test_an_evaluation_reads_its_sources_once_unshuffled_whatever_they_are_in_training() -> None:
    given = sources(5, 7)
    job = ov.evaluation(given, BATCH)
    assert job.evaluation
    assert job.until == "all"
    assert [(s.epochs, s.shuffle, s.weight) for s in job.sources] == [(1, False, 1), (1, False, 2)]
    assert given[0].epochs is None, "the sources of the training job stay"
    assert job == ov.Job(name="evaluation", sources=given, batch=BATCH, evaluation=True)
    assert "one pass" in repr(job)
    assert ov.evaluation(given[0], BATCH, ov.Mesh(dp=2), name="valid", steps=3, seed=4) == ov.Job(
        name="valid",
        sources=given[:1],
        batch=BATCH,
        place=ov.Mesh(dp=2),
        until=3,
        seed=4,
        evaluation=True,
    )


@settings(max_examples=12, deadline=None)
@given(
    counts=st.lists(st.integers(1, 25), min_size=1, max_size=3),
    samples=st.integers(1, 9),
    mesh=st.sampled_from(
        [ov.Mesh(dp=3), ov.Mesh(dp=2, tp=2), ov.Mesh(dp=2, cp=2), ov.Mesh(dp=8), ov.Mesh(pp=2)]
    ),
)
def test_every_sample_comes_once_in_file_order_in_the_same_step_on_every_mesh(
    counts: list[int], samples: int, mesh: ov.Mesh
) -> None:
    batch = ov.Batch(samples=samples, microbatches=2, context=32)
    _, one = delivered(ov.evaluation(sources(*counts), batch))
    ranks, many = delivered(ov.evaluation(sources(*counts), batch, mesh))
    assert [ids(plan) for plan in many] == [ids(plan) for plan in one]
    assert len(one) == -(-sum(counts) // samples)
    assert [len(plan) for plan in one[:-1]] == [samples] * (len(one) - 1)
    order = [sample for plan in one for sample in ids(plan)]
    for i, n in enumerate(counts):
        assert [row for source, row, _ in order if source == i] == list(range(n))
    # what arrives, once for each rank that has whole microbatches
    if mesh.cp == 1 and mesh.pp == 1:
        found = [d for r in range(0, mesh.world_size, mesh.tp) for d in documents(ranks[r])]
        wanted = [
            ((f"s{i}", 0, 0, k, 0), tuple(row["tokens"]))
            for i, n in enumerate(counts)
            for k, row in enumerate(rows(n, 100 * i))
        ]
        assert sorted(found) == sorted(wanted)


def test_ranks_without_data_get_steps_of_empty_microbatches() -> None:
    found, _ = delivered(ov.evaluation(sources(7), BATCH, ov.Mesh(dp=4)))
    last = [steps[-1] for steps in found]
    assert len(last) == 4
    assert {len(step) for step in last} == {2}
    with_data = [sum(len(mb.samples) for mb in step) for step in last]
    assert sorted(with_data) == [0, 0, 0, 1]
    assert {step.global_valid_tokens for step in last} == {6}, "known to every rank"
    empty = last[with_data.index(0)][0]
    assert (np.asarray(empty["labels"]) == -100).all()


def test_a_pass_can_be_limited_to_some_steps() -> None:
    _, whole = delivered(ov.evaluation(sources(30), BATCH))
    _, some = delivered(ov.evaluation(sources(30), BATCH, steps=2))
    assert [ids(p) for p in some] == [ids(p) for p in whole[:2]]
    _, more = delivered(ov.evaluation(sources(7), BATCH, steps=100))
    assert len(more) == 2, "the data end first"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mixture": {"s0": 1.0, "s1": 2.0}}, "mixture: expected None in an evaluation"),
        ({"draw": "random"}, "draw: expected 'exact' in an evaluation, got 'random'"),
        ({"look_ahead": 4}, "look_ahead: expected 1 in an evaluation, got 4"),
        ({"overflow": "defer"}, "overflow: expected 'grow' in an evaluation, got 'defer'"),
        ({"mix_every": "epoch"}, "mix_every: expected 'step' in an evaluation"),
        ({"until": "first"}, 'until: expected "all" or a number of steps in an evaluation'),
        ({"strategy": "hdp_balance"}, "max_document: expected a number in an evaluation"),
        ({"evaluation": 1}, "evaluation: expected true or false, got 1"),
    ],
)
def test_what_would_lose_samples_or_depend_on_the_mesh_is_refused(
    fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ov.JobError) as error:
        ov.Job(
            **{"name": "x", "sources": sources(4, 4), "batch": BATCH, "evaluation": True, **fields}
        )
    assert problem in str(error.value)


def test_sources_that_could_be_left_out_are_refused() -> None:
    with pytest.raises(ov.JobError, match=r"weight: expected more than 0 in an evaluation, got 0"):
        ov.evaluation([*sources(4), ov.Source.from_dataset("none", rows(2), weight=0)], BATCH)
    with pytest.raises(ov.JobError, match=r"on_lost: expected 'fail' in an evaluation"):
        ov.evaluation(ov.Source.from_dataset("may go", rows(2), on_lost="leave"), BATCH)
    with pytest.raises(ov.JobError, match=r"sources: expected at least one Source"):
        ov.evaluation([], BATCH)


def test_ranks_must_agree_that_a_job_evaluates() -> None:
    one_pass = ov.evaluation(sources(4), BATCH, name="same")
    like = ov.Job(name="same", sources=one_pass.sources, batch=BATCH)
    error = difference(one_pass, 1, parts_of(like))
    assert error is not None
    assert "evaluation: expected False, as on rank 0, got True" in str(error)


def test_a_job_file_may_hold_an_evaluation(tmp_path: Path) -> None:
    data = write_rows(tmp_path / "web", "jsonl", rows(9))
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: valid\nsources: {{web: {{uri: '{data}', transforms: [tokens]}}}}\n"
        "batch: {samples: 6, microbatches: 2, context: 32}\nevaluation: true\n"
    )
    job = ov.Job.from_yaml(path)
    source = ov.Source("web", data, transforms=[ov.Tokens()])
    assert job == ov.evaluation(source, BATCH, name="valid")
    again = tmp_path / "again.yaml"
    again.write_text(job.to_yaml())
    assert ov.Job.from_yaml(again) == job


def test_the_order_of_a_running_evaluation_cannot_change() -> None:
    with ov.launch(ov.evaluation(sources(9, 9), BATCH)) as session:
        for change in (
            lambda: session.set_mixture({"s0": 1.0}),
            lambda: session.add_source(sources(3)[0]),
        ):
            with pytest.raises(ov.JobError, match=r"expected a job that trains, got an evaluation"):
                change()
        assert len(list(session.client(0))) == 3


# loaders


def numbers(loader: Any) -> list[int]:
    return [step.step for step in loader]


def test_a_loader_of_an_evaluation_begins_anew_at_every_pass() -> None:
    job = ov.evaluation(sources(20), BATCH)
    with ot.StatefulLoader(job) as loader:
        assert [numbers(loader) for _ in range(3)] == [[0, 1, 2, 3]] * 3
        assert next(iter(loader)).step == 0
        assert numbers(loader) == [0, 1, 2, 3], "also after a pass that was broken off"
    with ot.StatefulLoader(job, rewind=False) as loader:
        assert [numbers(loader), numbers(loader)] == [[0, 1, 2, 3], []]
    with ov.launch(job) as session, ot.StatefulLoader(session.client(0)) as loader:
        assert [numbers(loader) for _ in range(2)] == [[0, 1, 2, 3]] * 2


def test_a_loader_of_a_connected_client_begins_anew_too() -> None:
    with ov.launch(ov.evaluation(sources(20), BATCH)) as session:
        served = session.serve()
        with ot.StatefulLoader(ov.connect(served, 0, served.token)) as loader:
            assert [numbers(loader) for _ in range(2)] == [[0, 1, 2, 3]] * 2


def test_several_ranks_of_one_process_have_one_pass_and_are_refused_a_second() -> None:
    with ov.launch(ov.evaluation(sources(20), BATCH, ov.Mesh(dp=2))) as session:
        loaders = [ot.StatefulLoader(session.client(rank)) for rank in range(2)]
        steps = list(zip(*loaders, strict=True))
        assert [[step.step for step in pair] for pair in steps] == [[k, k] for k in range(4)]
        with pytest.raises(ov.JobError, match=r"expected a process group of the 2 ranks"):
            iter(loaders[0])


def test_microbatches_of_an_evaluation_may_be_more_than_were_asked_for() -> None:
    """A training loop would accumulate the wrong ones; sums over all of them stay right."""
    full = ov.Batch(samples=6, microbatches=1, context=9)
    with ot.StatefulLoader(ov.evaluation(sources(18), full), microbatches=True) as loader:
        assert len(list(loader)) == len(list(loader)) > 3


def indexed(folder: Path, lengths: Sequence[int]) -> ov.Source:
    write_megatron(folder / "corpus.bin", [[[1 + k % 90] * n] for k, n in enumerate(lengths)])
    return ov.Source("corpus", str(folder / "corpus.bin"))


@pytest.mark.parametrize("batch", [BATCH, ov.Batch(tokens=40, microbatches=2, context=32)])
@pytest.mark.parametrize("steps", [None, 2, 100])
def test_the_length_is_known_where_an_index_has_all_lengths(
    tmp_path: Path, batch: ov.Batch, steps: int | None
) -> None:
    """Documents longer than the context are split, which changes the number of samples."""
    source = indexed(tmp_path, [1 + 7 * k % 80 for k in range(25)])
    for mesh in (ov.Mesh(), ov.Mesh(dp=3)):
        job = ov.evaluation(source, batch, mesh, steps=steps)
        found, _ = delivered(job)
        assert len(ot.Dataset(job)) == len(found[0])
        assert len(ot.StatefulLoader(job, microbatches=True)) == sum(map(len, found[0]))


def test_a_pass_of_many_steps_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlord.session.pass_length.AT_ONCE", 4)
    source = indexed(tmp_path, [3] * 25)
    for samples, steps in ((1, 25), (5, 5), (6, 5), (25, 1)):
        job = ov.evaluation(source, ov.Batch(samples=samples, context=128))
        assert pass_length(job) == PassLength(steps, steps)


@pytest.mark.parametrize(
    ("transforms", "reason"),
    [
        ([ov.Tokens()], "got 'dataset' as the format of source 's'"),
        ([ov.Filter(lambda c: [True] * len(c["tokens"])), ov.Tokens()], "got filter in source 's'"),
        ([ov.Map(lambda c: c), ov.Tokens()], "got map in source 's'"),
    ],
)
def test_an_unknown_length_is_a_type_error_with_the_reason(
    transforms: list[Any], reason: str
) -> None:
    job = ov.evaluation(ov.Source.from_dataset("s", rows(5), transforms=transforms), BATCH)
    with pytest.raises(TypeError) as error:
        len(ot.Dataset(job))
    assert reason in str(error.value)
