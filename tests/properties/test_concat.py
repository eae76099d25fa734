"""Packing "concat": steps are streams of tokens in chunks. Every token once, whatever happens."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from tests.laws import examples
from tests.properties.test_stream import fingerprint, run, state_after
from tests.reference_chunks import Piece, reference_chunks
from tests.worlds import World, folder, some_steps, worlds

SHAPES = st.sampled_from(("free", "fixed"))
LIMITS = st.sampled_from((None, 10, 100))
STRATEGIES = st.sampled_from(("vanilla", "packed", "llm_balance", "backbone_balance"))


@st.composite
def concat_worlds(draw: st.DrawFn, **options: Any) -> World:
    """A world whose batch has chunks; its documents are shorter and longer than one."""
    world = draw(worlds(batches="samples", **options))
    batch = {
        "samples": draw(st.integers(1, 7)),
        "microbatches": draw(st.integers(1, 3)),
        "context": draw(st.sampled_from((8, 32))),
        "packing": "concat",
        "shape": draw(SHAPES),
        "labels": draw(st.sampled_from(("shifted", "shifted", "unshifted"))),
    }
    if draw(st.booleans()):
        batch["tokens"] = batch.pop("samples") * batch["context"]
    fields = dict(world.fields) | {
        "mix_every": "step",
        "draw": "exact",
        "max_document": draw(LIMITS),
        "strategy": draw(STRATEGIES),
    }
    sources = tuple((*s[:-1], "" if s[-1] == "images" else s[-1]) for s in world.sources)
    return replace(world, sources=sources, fields=tuple(fields.items()), batch=tuple(batch.items()))


def chunk_of(mb: ov.Microbatch, labels: str) -> list[Piece]:
    """The pieces of a microbatch, read from its arrays; everything else in it is checked."""
    pieces = []
    rest = np.ones(len(mb["tokens"]), bool)
    for k, (piece, start) in enumerate(zip(mb.samples, mb.begins.tolist(), strict=True)):
        at = slice(piece.offset, piece.offset + piece.length)
        tokens, targets, mask = mb["tokens"][at], mb["labels"][at], mb["loss_mask"][at]
        rest[at] = False
        assert mb["position_ids"][at].tolist() == list(range(piece.length))
        assert mb["cu_seqlens"][k + 1] - mb["cu_seqlens"][k] == piece.length
        assert mb["cu_seqlens_padded"][k] == piece.offset
        assert mask.tolist() == (targets != -100).tolist()
        after = None
        if labels == "shifted":
            assert targets[:-1].tolist() == tokens[1:].tolist()
            after = None if targets[-1] == -100 else int(targets[-1])
        else:
            assert targets.tolist() == [-100, *tokens[1:].tolist()]
        pieces.append(Piece(tuple(piece.sample), start, tokens.tolist(), after))
    assert (mb["tokens"][rest] == 0).all()
    assert (mb["labels"][rest] == -100).all()
    assert (mb["loss_mask"][rest] == 0).all()
    return pieces


def delivered(job: ov.Job, steps: dict[int, list[ov.Step]]) -> list[list[list[Piece]]]:
    """The chunks of every step, in the order of the stream."""
    out = []
    for k in range(len(steps[0])):
        info = steps[0][k].info
        order = {(tuple(info.sample_id(i)), int(info.offset[i])): i for i in range(len(info))}
        chunks, valid = [], 0
        for rank in steps:
            step = steps[rank][k]
            assert len(step) == len(steps[0][k])
            for mb in step:
                valid += int(mb["loss_mask"].sum())
                assert mb["tokens"].shape == (job.batch.context,)
                if mb.samples:
                    chunks.append(chunk_of(mb, job.batch.labels))
        assert valid == steps[0][k].global_valid_tokens
        chunks.sort(key=lambda chunk: order[chunk[0][:2]])
        assert [p[:2] for chunk in chunks for p in chunk] == list(order), "in stream order"
        out.append(chunks)
    return out


def wanted(job: ov.Job) -> tuple[list[list[list[Piece]]], bool]:
    steps: list[list[list[Piece]]] = []
    hide = job.batch.labels != "shifted"
    try:
        for chunks in reference_chunks(job):
            steps.append([[p._replace(next=None) if hide else p for p in c] for c in chunks])
    except ValueError:
        return steps, True
    return steps, False


@given(concat_worlds(), st.integers(0, 2**20))
@examples(80)
def test_the_chunks_equal_the_reference(world: World, seed: int) -> None:
    with folder() as directory:
        job = world.job(directory)
        steps, broken = wanted(job)
        got, error, _, _ = run(job, seed)
        assert (error is not None) == broken, error
        assert delivered(job, got) == steps


@given(concat_worlds(), st.integers(1, 3), st.integers(1, 5))
@examples(12)
def test_the_local_runtime_delivers_the_chunks_of_the_reference(
    world: World, loaders: int, prefetch: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        steps, broken = wanted(job)
        got, error, _, _ = run(job, loaders={"s0": loaders}, prefetch=prefetch)
        assert (error is not None) == broken, error
        assert delivered(job, got) == steps


@given(concat_worlds(), st.integers(0, 2**20), st.integers(1, 4))
@examples(25)
def test_restored_at_every_step_the_rest_is_identical_to_the_byte(
    world: World, seed: int, loaders: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        whole, error, _, _ = run(job, seed)
        for k in some_steps(len(whole[0]), seed):
            state = json.loads(json.dumps(state_after(job, whole[0][k])))
            rest, again, _, end = run(job, seed + k, resume=state, loaders={"s0": loaders})
            assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()}), (
                f"restored after step {k}"
            )
            assert type(again) is type(error)
            if rest[0]:
                assert end["counts"] == state_after(job, whole[0][-1])["counts"]


@given(concat_worlds(endless=False), st.integers(0, 2**20))
@examples(30)
def test_the_pieces_of_every_sample_tile_it_and_chunks_are_full(world: World, seed: int) -> None:
    with folder() as directory:
        job = world.job(directory, until="all")
        got, error, _, _ = run(job, seed)
        if error is not None:
            return
        steps = delivered(job, got)
        n, found = job.batch.chunks, dict[Any, int]()
        for k, chunks in enumerate(steps):
            for chunk in chunks:
                for piece in chunk:
                    assert found.get(piece.sample, 0) == piece.start, "out of order"
                    found[piece.sample] = piece.start + len(piece.tokens)
            sizes = [sum(len(p.tokens) for p in chunk) for chunk in chunks]
            assert set(sizes[:-1]) <= {job.batch.context}
            assert k == len(steps) - 1 or sizes == [job.batch.context] * n
        whole = job_of_documents(world, directory)
        expected, _, _, _ = run(whole, seed)
        assert found == {
            tuple(piece.sample): piece.length
            for rank in expected
            for step in expected[rank]
            for mb in step
            for piece in mb.samples
        }


def job_of_documents(world: World, directory: str) -> ov.Job:
    """The same sources with packing="documents": every sample once."""
    fields = dict(world.fields)
    limit = fields["max_document"] or dict(world.batch)["context"]
    return world.job(
        directory,
        until="all",
        batch=ov.Batch(samples=5, context=limit),
        max_document=None,
        strategy="vanilla",
    )


@given(concat_worlds(), st.integers(0, 2**20), st.integers(1, 5))
@examples(25)
def test_another_mesh_gets_the_same_chunks_in_every_step_also_after_a_restore(
    world: World, seed: int, dp: int
) -> None:
    with folder() as directory:
        job = world.job(directory)
        other = world.job(directory, place=ov.Mesh(dp=dp))
        a, _, _, _ = run(job, seed)
        b, _, _, _ = run(other, seed + 1)
        assert delivered(job, a) == delivered(other, b)
        if len(a[0]) > 1:
            rest, _, _, _ = run(other, seed, resume=state_after(job, a[0][0]))
            assert delivered(other, rest) == delivered(job, a)[1:]


@given(concat_worlds(), st.integers(0, 2**20))
@examples(25)
def test_fixed_shapes_are_the_same_in_every_microbatch_of_every_step(
    world: World, seed: int
) -> None:
    with folder() as directory:
        batch = dict(world.batch) | {"shape": "fixed"}
        job = replace(world, batch=tuple(batch.items())).job(directory)
        got, _, _, _ = run(job, seed)
        shapes = {
            (len(step), *((key, mb[key].shape, mb[key].dtype) for key in mb))
            for rank in got
            for step in got[rank]
            for mb in step
        }
        assert len(shapes) <= 1
        assert {int(mb["max_seqlen"]) for r in got for s in got[r] for mb in s} <= {
            job.batch.context
        }


def test_a_hand_made_buffer_is_cut_like_a_drawn_step() -> None:
    buffer = ov.Buffer.from_columns(
        {"a": {"tokens": [30, 50, 100, 7]}, "b": {"tokens": [64, 64, 64]}},
        batch=ov.Batch(samples=3, context=64, packing="concat"),
    )
    graph = ov.DGraph.from_buffer(buffer, ov.Mesh(dp=2)).mix({"a": 1, "b": 1}).distribute("DP")
    plan = graph.balance().plan()
    assert plan.n_microbatches == 2
    assert np.bincount(plan.main.bins(), weights=plan.tokens).tolist() == [64, 64, 64]
    assert np.bincount(plan.source, weights=plan.tokens).tolist() == [96, 96]


def test_a_strategy_that_divides_a_chunk_is_refused() -> None:
    def apart(columns: Any, place: ov.Mesh, batch: ov.Batch, step: int) -> dict[str, Any]:
        n = len(columns["chunk"])
        return {"bucket": np.arange(n) % place.dp, "microbatch": np.arange(n) // place.dp}

    job = tiny_job(strategy=ov.plan_raw(apart))
    _, error, _, _ = run(job, 0)
    assert "expected every chunk in a microbatch of its own" in str(error)


def test_more_documents_than_a_fixed_shape_has_end_the_job_with_the_remedy() -> None:
    batch = ov.Batch(samples=2, context=32, packing="concat", shape="fixed", max_documents=3)
    _, error, _, _ = run(tiny_job(batch=batch), 0)
    assert "expected at most max_documents=3 documents in a microbatch" in str(error)
    assert "raise Batch.max_documents" in str(error)


def tiny_job(**changes: Any) -> ov.Job:
    rows = [{"tokens": list(range(5))} for _ in range(60)]
    settings: dict[str, Any] = {
        "name": "tiny",
        "sources": [ov.Source.from_dataset("a", rows, epochs=1)],
        "batch": ov.Batch(samples=2, context=32, packing="concat"),
        "place": ov.Mesh(dp=2),
    }
    return ov.Job(**{**settings, **changes})


def test_an_explanation_lists_the_pieces_of_a_sample() -> None:
    with ov.launch(tiny_job()) as session:
        client = session.client(0)
        next(client), next(client)
        plan = session.plan(0)
        cut = int(np.flatnonzero(plan.remaining)[-1])
        found = session.explain(plan.sample_id(cut))
        assert len(found.pieces) == 2
        assert found.pieces[0].startswith("step 0: tokens 0 to ")
        assert found.pieces[1].endswith(" of bucket 0") or " bucket 1" in found.pieces[1]
        assert "pieces" in str(found)
        assert "realised" in str(session.explain(0))
