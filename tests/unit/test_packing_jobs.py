"""Jobs in chunks and of fixed shape: what is refused, what a file holds, what works together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.constructor.rank_views import join
from overlord.errors import JobError, StateMismatch
from tests import images as pictures
from tests.properties.test_stream import run
from tests.worlds import Rows

CHUNKS: dict[str, Any] = {"samples": 4, "context": 32, "packing": "concat"}
FIXED: dict[str, Any] = {"samples": 14, "context": 32, "shape": "fixed", "max_documents": 8}


def job(batch: dict[str, Any], **changes: Any) -> ov.Job:
    rows = [
        {"tokens": list(range(k, k + 1 + k * 7 % 30)), "loss": [k % 2] * (1 + k * 7 % 30)}
        for k in range(90)
    ]
    settings: dict[str, Any] = {
        "name": "packed",
        "sources": [ov.Source("a", Rows(rows), transforms=[ov.Tokens("tokens")], epochs=1)],
        "batch": ov.Batch(**batch),
        "place": ov.Mesh(dp=2),
    }
    return ov.Job(**{**settings, **changes})


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (CHUNKS | {"packing": "cat"}, "batch.packing: expected one of documents, concat"),
        (CHUNKS | {"shape": "same"}, "batch.shape: expected one of free, fixed"),
        (CHUNKS | {"layout": "padded"}, 'batch.layout: expected "packed" with packing="concat"'),
        (CHUNKS | {"pad_multiple": 4}, 'batch.pad_multiple: expected 1 with packing="concat"'),
        (
            {"tokens": 100, "context": 32, "packing": "concat"},
            "batch.tokens: expected a multiple of context=32",
        ),
        (CHUNKS | {"max_documents": 3}, 'batch.max_documents: expected None with shape="free"'),
        (
            FIXED | {"max_documents": 0},
            "batch.max_documents: expected a whole number of at least 1",
        ),
        (
            {"tokens": 64, "context": 32, "shape": "fixed"},
            'batch.tokens: expected None with shape="fixed" and packing="documents"',
        ),
    ],
)
def test_a_batch_that_cannot_be_is_refused(batch: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as error:
        ov.Batch(**batch)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("batch", "fields", "message"),
    [
        (CHUNKS, {"draw": "random"}, "draw: expected 'exact' with packing=\"concat\""),
        (CHUNKS, {"mix_every": "microbatch"}, "mix_every: expected 'step' with packing"),
        (CHUNKS, {"look_ahead": 2}, 'look_ahead: expected 1 with packing="concat"'),
        (CHUNKS, {"overflow": "defer"}, "overflow: expected 'grow' with packing=\"concat\""),
        (
            CHUNKS,
            {"hooks": [ov.constructor_do_plan(lambda assembly: assembly.default())]},
            'hooks: expected () with packing="concat"',
        ),
        (CHUNKS, {"strategy": "hdp_balance"}, "strategy: expected whole samples with packing"),
        (
            CHUNKS,
            {"place": ov.Mesh(cp=2)},
            'batch.cp_split: expected "zigzag_whole", "contiguous" or "none"',
        ),
        (
            CHUNKS | {"context": 30, "cp_split": "zigzag_whole"},
            {"place": ov.Mesh(cp=2)},
            "batch.context: expected a multiple of 4",
        ),
        (FIXED, {"strategy": "hdp_balance"}, 'strategy: expected whole samples with shape="fixed"'),
        (
            FIXED,
            {"strategy": "packed"},
            'strategy: expected one that packs tightly with shape="fixed"',
        ),
        (FIXED, {"mix_every": "microbatch"}, 'mix_every: expected "step" or "epoch"'),
        (
            FIXED | {"layout": "padded", "max_documents": None},
            {},
            'batch.max_documents: expected a number with shape="fixed" and layout="padded"',
        ),
    ],
)
def test_a_job_that_cannot_be_packed_is_refused_with_a_remedy(
    batch: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(JobError) as error:
        job(batch, **fields)
    assert message in str(error.value)


def test_images_are_refused_in_chunks() -> None:
    images = [ov.Tokens("tokens"), ov.Images("i", placeholder=1)]
    with pytest.raises(JobError, match="expected no images"):
        job(CHUNKS, sources=[replace(job(CHUNKS).sources[0], transforms=images)])


def test_a_job_file_holds_packing_and_shape(tmp_path: Path) -> None:
    ov.register_function("rows_of_packing", lambda: None)
    made = job(CHUNKS | {"shape": "fixed", "max_documents": 9})
    made = replace(made, sources=[ov.Source("a", "a/*.jsonl", transforms=[ov.Tokens("tokens")])])
    file = tmp_path / "job.yaml"
    file.write_text(made.to_yaml())
    assert "packing: concat" in file.read_text()
    assert ov.Job.from_yaml(file).batch == made.batch


def test_a_cut_sample_is_continued_by_chunks_alone() -> None:
    with ov.launch(job(CHUNKS)) as session:
        client = session.client(0)
        session.client(1)
        next(client)
        state = client.state_dict()
    assert state["cut"]
    with pytest.raises(StateMismatch, match="samples of which steps have received a part"):
        ov.launch(job({"samples": 4, "context": 32}), resume=state, allow=("batch",)).close()


@pytest.mark.parametrize("split", ["zigzag", "zigzag_whole", "contiguous"])
def test_slices_of_fixed_documents_join_to_the_whole(split: str) -> None:
    batch = FIXED | {"context": 64, "cp_split": split, "labels": "unshifted"}
    whole, _, _, _ = run(job(batch, place=ov.Mesh()), 0)
    parts, _, _, _ = run(job(batch, place=ov.Mesh(cp=2)), 0)
    for k, step in enumerate(whole[0][:3]):
        for m, mb in enumerate(step):
            joined = join([parts[rank][k][m] for rank in (0, 1)], split)
            assert joined["tokens"].shape == (64,)
            kept = {tuple(p.sample) for p in mb.samples}
            assert kept == {tuple(p.sample) for p in parts[0][k][m].samples} or k > 0
            for piece in parts[0][k][m].samples:
                at = slice(piece.offset, piece.offset + piece.length)
                first = joined["tokens"][piece.offset]
                assert joined["tokens"][at].tolist() == list(range(first, first + piece.length))
                assert joined["labels"][at].tolist() == [-100, *joined["tokens"][at][1:].tolist()]
            assert int(joined["loss_mask"].sum()) == sum(
                p.length - 1 for p in parts[0][k][m].samples
            )


def test_loss_weights_and_hooks_work_with_fixed_shapes() -> None:
    seen = []

    def watched(assembly: Any) -> Any:
        seen.append(assembly.step)
        return assembly.default()

    weighed = replace(job(FIXED).sources[0], transforms=[ov.Tokens("tokens", loss="loss")])
    made = job(FIXED, sources=[weighed], hooks=[ov.constructor_do_plan(watched)])
    got, error, _, _ = run(made, 0)
    assert error is None
    assert seen
    for steps in zip(*got.values(), strict=True):
        masks = sum(float(mb["loss_mask"].sum()) for step in steps for mb in step)
        assert masks == steps[0].global_valid_tokens
        assert {mb["cu_seqlens"].shape for step in steps for mb in step} == {(9,)}
        for mb in (mb for step in steps for mb in step):
            for piece in mb.samples:
                mask = mb["loss_mask"][piece.offset : piece.offset + piece.length - 1]
                assert (mask == piece.sample.row % 2).all()


def test_images_work_with_documents_of_fixed_shape(tmp_path: Path) -> None:
    batch = ov.Batch(samples=6, microbatches=3, context=64, shape="fixed", max_documents=10)
    made = pictures.job(tmp_path, batch=batch, until=6)
    got, error, _, _ = run(made, 0)
    assert error is None
    found = 0
    for step in (step for rank in got for step in got[rank]):
        assert {(mb["tokens"].shape, mb["cu_seqlens"].shape) for mb in step} == {((64,), (11,))}
        routes = step.encoder[0]
        for row, k in zip(routes["image_token_index"], routes["recv_rows"], strict=True):
            assert int(k) >= 0
            found += 1
            assert 0 <= int(row) < 64
    assert found > 0


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"max_document": 20}, "max_document"), ({"on_long": "truncate"}, "on_long")],
)
def test_the_rest_of_a_cut_sample_ends_where_it_began(changes: dict[str, Any], name: str) -> None:
    with ov.launch(job(CHUNKS, place=ov.Mesh())) as session:
        client = session.client(0)
        next(client)
        state = client.state_dict()
    assert state["cut"]
    with pytest.raises(StateMismatch, match=f"{name}: saved"):
        ov.launch(job(CHUNKS, place=ov.Mesh(), **changes), resume=state, allow=(name,)).close()


def test_a_cut_sample_that_has_become_shorter_ends_the_job_with_its_source() -> None:
    with ov.launch(job(CHUNKS, place=ov.Mesh())) as session:
        client = session.client(0)
        next(client)
        state = client.state_dict()
    rows = Rows([{"tokens": [1]} for _ in range(90)])
    changed = replace(job(CHUNKS).sources[0], uri=rows)
    entry = "source a: files"
    made = job(CHUNKS, place=ov.Mesh(), sources=[changed])
    with (
        ov.launch(made, resume=state, allow=(entry,)) as session,
        pytest.raises(ov.OverlordError, match="'a': expected a sample of more than"),
    ):
        next(session.client(0))


def test_an_evaluation_has_the_same_chunks_on_every_mesh_and_refuses_what_waits() -> None:
    sources, found = job(CHUNKS).sources, []
    for dp in (1, 2, 3):
        made = ov.evaluation(sources, ov.Batch(**CHUNKS, shape="fixed"), ov.Mesh(dp=dp))
        got, error, _, _ = run(made, 0)
        assert error is None
        assert len({len(steps) for steps in got.values()}) == 1
        found.append(
            [
                sorted(mb["tokens"].tolist() for part in steps for mb in part if mb.samples)
                for steps in zip(*got.values(), strict=True)
            ]
        )
    assert found[0] == found[1] == found[2]
    with pytest.raises(JobError, match=r'batch\.shape: expected "free" or packing="concat"'):
        ov.evaluation(sources, ov.Batch(**FIXED))


def test_metrics_and_plans_of_chunks_count_tokens_pieces_and_each_sample_once() -> None:
    second = replace(job(CHUNKS).sources[0], name="b", weight=3.0)
    made = job(CHUNKS, sources=[*job(CHUNKS).sources, second], until=6, place=ov.Mesh())
    with ov.launch(made, prefetch=1) as session:
        client = session.client(0)
        steps = list(client)
        plans = [session.plan(step.step) for step in steps]
        sources = session.metrics()["sources"]
        held = session.explain(1)
    assert {name: s["wanted"] for name, s in sources.items()} == {"a": 0.25, "b": 0.75}
    assert sources["a"]["realised"] == pytest.approx(0.25, abs=1 / 700)
    samples = {(p.sample.source, p.sample.row) for step in steps for mb in step for p in mb.samples}
    assert sum(s["samples"] for s in sources.values()) == len(samples)
    assert sum(map(len, plans)) > len(samples), "some samples are cut"
    assert f"{len(plans[1])} pieces" in repr(plans[1])
    assert f"{len(plans[1])} pieces, 128 tokens" in str(held)
