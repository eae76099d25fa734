"""Loss weights in chunks: each label has the weight of its token, wherever a sample is cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.planning.cut_pieces import weights_of_spans
from overlord.sample import Ragged
from overlord.transforms.loss_weights import runs_of
from tests.laws import examples
from tests.properties.test_stream import fingerprint, run, state_after
from tests.worlds import Rows

KINDS = ("none", "mask", "turns", "floats", "zero")
lists_of_weights = st.lists(
    st.lists(st.sampled_from((0.0, 1.0, 1.0, 0.25, 3.5)), min_size=1, max_size=12),
    min_size=1,
    max_size=6,
)


def weights(kind: str, n: int, chance: np.random.Generator) -> list[float]:
    if kind == "zero":
        return [0] * n
    if kind == "turns":
        return [float(k // 5 % 2) for k in range(n)]
    values = (0, 1) if kind == "mask" else (0, 0.5, 1, 0.1, 2.25)
    return [float(np.float32(w)) for w in chance.choice(values, n).tolist()]


@st.composite
def jobs(draw: st.DrawFn) -> ov.Job:
    """Sources with and without weights, in chunks that are shorter and longer than a document."""
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    chance = np.random.default_rng(draw(st.integers(0, 99)))
    sources = []
    for i, kind in enumerate(kinds):
        rows = []
        for k in range(draw(st.integers(1, 12))):
            n = int(chance.choice((1, 2, 7, 30, 90)))
            row: dict[str, Any] = {"tokens": chance.integers(1, 500, n).tolist(), "n": k}
            rows.append(row if kind == "none" else row | {"w": weights(kind, n, chance)})
        loss = None if kind == "none" else "w"
        sources.append(
            ov.Source(
                f"s{i}",
                Rows(rows),
                transforms=[ov.Tokens("tokens", loss=loss)],
                epochs=draw(st.integers(1, 3)),
                weight=draw(st.sampled_from((0.5, 1.0, 3.0))),
            )
        )
    cp = draw(st.integers(1, 2))
    return ov.Job(
        name="weights",
        sources=sources,
        batch=ov.Batch(
            samples=draw(st.integers(1, 6)),
            context=draw(st.sampled_from((8, 32))),
            packing="concat",
            shape=draw(st.sampled_from(("free", "fixed"))),
            labels=draw(st.sampled_from(("shifted", "unshifted"))),
            cp_split="zigzag_whole",
        ),
        max_document=draw(st.sampled_from((20, 100))),
        place=ov.Mesh(dp=draw(st.integers(1, 2)), cp=cp),
        until=draw(st.sampled_from(("all", "first", 4))),
    )


def weight_of(job: ov.Job, piece: Any, token: int) -> float:
    """The weight of a token of a sample: that of its row, or 1 if the source has no weights."""
    source = next(s for s in job.sources if s.name == piece.sample.source)
    row = source.uri[piece.sample.row]
    at = piece.sample.part * (job.max_document or 0) + token
    return float(row["w"][at]) if "w" in row else 1.0


def check_step(job: ov.Job, steps: list[ov.Step]) -> None:
    """Compare the mask of every token with the weight of its label, and the sum of all."""
    total, ranks = 0.0, [job.place.rank(dp=d) for d in range(job.place.dp)]
    for rank in ranks:
        for mb in steps[rank]:
            mask, labels = np.array(mb["loss_mask"]), np.array(mb["labels"])
            total += float(mask.astype(np.float64).sum())
            assert ((labels == -100) == (mask == 0)).all()
            for piece, begin in zip(mb.samples, mb.begins.tolist(), strict=True):
                here = slice(piece.offset, piece.offset + piece.length)
                own = [weight_of(job, piece, t) for t in range(begin, begin + piece.length)]
                if job.batch.labels == "unshifted":
                    assert mask[here].tolist() == [0, *own[1:]]
                    continue
                assert mask[here][:-1].tolist() == own[1:]
                row = next(s for s in job.sources if s.name == piece.sample.source).uri[
                    piece.sample.row
                ]
                limit = job.max_document or 0
                first = piece.sample.part * limit
                tokens = row["tokens"][first : first + limit]
                end = begin + piece.length
                if end == len(tokens):
                    assert mask[here][-1] == 0
                else:
                    weight = weight_of(job, piece, end)
                    assert mask[here][-1] == weight
                    assert labels[here][-1] == (tokens[end] if weight else -100)
    assert steps[0].global_valid_tokens == pytest.approx(total, rel=1e-12)
    assert isinstance(steps[0].global_valid_tokens, int) == float(total).is_integer()


@given(jobs(), st.integers(0, 2**20))
@examples(60)
def test_every_label_has_the_weight_of_its_token(job: ov.Job, seed: int) -> None:
    whole = replace(job, place=ov.Mesh(dp=job.place.dp))
    made, error, _, _ = run(whole, seed)
    assert error is None
    for steps in zip(*made.values(), strict=True):
        check_step(whole, list(steps))
    if job.place.cp == 1:
        return
    sliced, error, _, _ = run(job, seed)
    assert error is None
    for dp in range(job.place.dp):
        for k, step in enumerate(made[dp]):
            for m, mb in enumerate(step):
                parts = [
                    sliced[job.place.rank(dp=dp, cp=cp)][k][m]["loss_mask"]
                    for cp in range(job.place.cp)
                ]
                assert sorted(np.concatenate(parts)) == sorted(mb["loss_mask"])


@given(jobs(), st.integers(0, 2**20))
@examples(15)
def test_a_restored_job_has_the_same_weights_to_the_byte(job: ov.Job, seed: int) -> None:
    whole, _, _, _ = run(job, seed)
    sums = [step.global_valid_tokens for step in whole[0]]
    for k in range(len(sums)):
        rest, _, _, _ = run(job, seed + k, resume=state_after(job, whole[0][k]))
        assert fingerprint(rest) == fingerprint({r: s[k + 1 :] for r, s in whole.items()})
        assert [step.global_valid_tokens for step in rest[0]] == sums[k + 1 :]


@given(lists_of_weights, st.data())
def test_sums_of_spans_equal_those_of_the_weights(rows: list[list[float]], data: Any) -> None:
    whole = Ragged.from_rows(rows, np.float32)
    spans = data.draw(
        st.lists(
            st.integers(0, len(rows) - 1).flatmap(
                lambda i: st.tuples(
                    st.just(i), st.integers(0, len(rows[i])), st.integers(0, len(rows[i]))
                )
            )
        )
    )
    sample, first, stop = (np.array([s[k] for s in spans], np.int64) for k in range(3))
    found = weights_of_spans(runs_of(whole), sample, first, stop)
    assert [found[k].tolist() for k in range(len(found))] == [
        [sum(rows[i][a:b])] for i, a, b in spans
    ]
