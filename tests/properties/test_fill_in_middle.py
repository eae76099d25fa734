"""Laws of fill in the middle: the parts are the document, and randomness follows from identity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.errors import JobError, TransformError
from overlord.jobfile.yaml_file import read_job, write_job
from overlord.transforms.base import Block, RowIds
from overlord.transforms.fill_in_middle import FillInMiddle
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.tokenize import Tokenize
from tests.store_jobs import stream

PRE, SUF, MID, BOS, EOS = 300, 301, 302, 303, 304
LAW = settings(max_examples=60, deadline=None)


def letters() -> Any:
    """Return an encoding with one id per byte, so that ids show the text."""
    import tiktoken

    marks = {"<fim_prefix>": PRE, "<fim_suffix>": SUF, "<fim_middle>": MID, "<s>": BOS, "</s>": EOS}
    ranks = {bytes([i]): i for i in range(256)}
    return tiktoken.Encoding(
        "letters", pat_str=r"[\s\S]", mergeable_ranks=ranks, special_tokens=marks
    )


LETTERS = Tokenize(letters(), bos="<s>", eos="</s>")


def pipeline(spec: FillInMiddle, *, context: int = 10_000, **options: Any) -> Pipeline:
    options = {"seed": 0, "on_long": "split"} | options
    return Pipeline("web", [spec, LETTERS], context=context, **options)


def run(p: Pipeline, texts: list[str], first: int = 0, epoch: int = 0) -> Block:
    ids = RowIds(epoch, 0, np.arange(first, first + len(texts)))
    return p.row_stage(p.slice_stage(pa.table({"text": texts}), ids).table)


def parts_of(ids: list[int]) -> tuple[str, bytes, bytes, bytes]:
    """Return "plain", "psm" or "spm", and the prefix, middle and suffix of the text."""
    assert (ids[0], ids[-1]) == (BOS, EOS)
    assert (ids.count(BOS), ids.count(EOS)) == (1, 1)
    ids = ids[1:-1]
    if PRE not in ids:
        return "plain", bytes(ids), b"", b""
    assert ids[0] == PRE
    assert [ids.count(mark) for mark in (PRE, SUF, MID)] == [1, 1, 1]
    suf, mid = ids.index(SUF), ids.index(MID)
    before, suffix, after = bytes(ids[1:suf]), bytes(ids[suf + 1 : mid]), bytes(ids[mid + 1 :])
    return ("psm" if before else "spm"), before, after, suffix


@LAW
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), min_size=1),
    rate=st.floats(0, 1),
    spm_rate=st.floats(0, 1),
    seed=st.integers(0, 5),
)
def test_the_parts_are_the_document(texts, rate, spm_rate, seed):
    block = run(pipeline(FillInMiddle(rate, spm_rate), seed=seed), texts)
    assert len(block) == len(texts)
    for i, text in enumerate(texts):
        _, prefix, middle, suffix = parts_of(block.tokens[i].tolist())
        assert prefix + middle + suffix == text.encode()
    assert block.meta["tokens"].tolist() == block.tokens.lengths.tolist()


def test_rates_of_zero_and_one_are_exact():
    texts = [f"document {k}" for k in range(200)]
    kinds = {
        (rate, spm): {
            parts_of(row.tolist())[0]
            for row in (lambda b: [b.tokens[i] for i in range(len(b))])(
                run(pipeline(FillInMiddle(rate, spm)), texts)
            )
        }
        for rate, spm in ((0, 1), (1, 1), (1, 0))
    }
    assert kinds[0, 1] == {"plain"}
    assert kinds[1, 1] == {"spm"}
    assert "psm" in kinds[1, 0]


def test_cuts_are_uniform_over_the_positions_of_a_text():
    text, n = "abcde", 12_000
    block = run(pipeline(FillInMiddle(0.75, 0.25)), [text] * n)
    counts: dict[tuple[int, int], int] = {}
    plain = spm = 0
    for i in range(n):
        ids = block.tokens[i].tolist()
        kind, prefix, _, suffix = parts_of(ids)
        if kind == "plain":
            plain += 1
        elif ids[1:3] == [PRE, SUF] and prefix == b"" and len(suffix) < len(text):
            spm += 1
        if kind == "psm":
            cuts = (len(prefix), len(text) - len(suffix))
            counts[cuts] = counts.get(cuts, 0) + 1
    assert abs(plain / n - 0.25) < 0.02
    assert 0.25 * 0.75 < spm / n < 0.5
    # With a prefix there are 15 pairs of cuts; two different ones have twice the chance of equal
    # ones. The probability of a pair of the six positions is 2/36 or 1/36.
    total = 0.75 * 0.75 * n / 36
    for (low, high), count in counts.items():
        wanted = total * (1 if low == high else 2)
        assert abs(count - wanted) < 6 * wanted**0.5, (low, high, count, wanted)
    assert len(counts) == 15


def test_a_row_is_the_same_in_every_slice_and_batch_and_differs_in_another_epoch():
    texts = [f"some document of number {k}" for k in range(60)]
    p = pipeline(FillInMiddle(0.7, 0.5))
    whole = run(p, texts)
    for k in range(0, 60, 7):
        part = run(p, texts[k : k + 7], first=k)
        for i in range(len(part)):
            assert part.tokens[i].tolist() == whole.tokens[k + i].tolist()
    assert run(p, texts, epoch=1).tokens.values.tolist() != whole.tokens.values.tolist()


def test_a_document_that_would_exceed_the_limit_stays_as_it_was():
    texts = ["x" * 10, "y" * 5]
    block = run(pipeline(FillInMiddle(1, 0), context=12), texts)
    assert [row.tolist().count(PRE) for row in map(block.tokens.__getitem__, range(2))] == [0, 1]
    assert block.part.tolist() == [0, 0]
    split = run(pipeline(FillInMiddle(1, 0), context=8), ["x" * 10])
    assert split.tokens.values.tolist() == [BOS, *b"x" * 10, EOS]
    assert split.part.tolist() == [0, 1]


def test_an_empty_document_stays_empty():
    block = run(
        Pipeline("web", [FillInMiddle(1), Tokenize(letters())], seed=0, context=9, on_long="split"),
        ["", "a"],
    )
    assert [reason for _, reason in block.bad] == ["expected at least one token, got none"]


def test_marks_may_be_ids_beyond_the_vocabulary():
    spec = FillInMiddle(1, 0, prefix=70_000, suffix=SUF, middle=MID)
    assert run(pipeline(spec), ["abc"]).tokens[0].tolist()[1] == 70_000


@pytest.mark.parametrize(
    ("transforms", "says"),
    [
        ([LETTERS, FillInMiddle()], "expected Tokenize directly after it, got None"),
        ([FillInMiddle(), ov.Tokens()], "expected Tokenize directly after it, got Tokens"),
        (
            [FillInMiddle(prefix="<no>"), LETTERS],
            r"FillInMiddle\(.*prefix: expected a token of .*, got '<no>'",
        ),
        (
            [FillInMiddle(), Tokenize(letters(), add_special_tokens=True)],
            "expected add_special_tokens=False after FillInMiddle, got True",
        ),
    ],
)
def test_a_combination_that_cannot_work_is_refused(transforms: list[Any], says: str):
    with pytest.raises(TransformError, match=says):
        Pipeline("web", transforms, seed=0, context=9, on_long="split")


def test_values_that_cannot_work_are_refused_when_it_is_made():
    with pytest.raises(JobError) as caught:
        FillInMiddle(1.5, True, prefix="", middle=-1)
    for name in ("rate", "spm_rate", "prefix", "middle"):
        assert f"{name}: expected" in str(caught.value)


def test_a_job_file_holds_it(tmp_path: Path):
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: a\nbatch: {samples: 2, context: 8}\nsources: {a: {uri: x.jsonl, transforms: "
        "[{fill_in_middle: {rate: 0.9, prefix: 5}}, {tokenize: {tokenizer: gpt2}}]}}\n"
    )
    job = read_job(path)
    assert job.sources[0].transforms[0] == FillInMiddle(0.9, prefix=5)
    path.write_text(write_job(job))
    assert read_job(path).sources[0].transforms == job.sources[0].transforms


def test_all_runtimes_and_meshes_rearrange_alike_and_resume_at_every_step(tmp_path: Path):
    lines = [f'{{"text": "document {k} {"x" * (k % 9)}"}}\n' for k in range(48)]
    (tmp_path / "a.jsonl").write_text("".join(lines))

    def job(seed: int = 5, **changes: Any) -> ov.Job:
        transforms = [FillInMiddle(0.6), LETTERS]
        source = ov.Source("a", str(tmp_path / "a.jsonl"), epochs=1, transforms=transforms)
        batch = ov.Batch(samples=8, context=64)
        settings = {"name": "fim", "sources": [source], "batch": batch, "slice_rows": 5}
        return ov.Job(**settings, seed=seed, **changes)

    local = stream(job())
    assert stream(job(), "simulated") == local
    assert stream(job(), "process") == local
    assert stream(job(seed=6)) != local
    with ov.launch(job(place=ov.Mesh(dp=2))) as session:
        found = {
            (tuple(p.sample), tuple(m["tokens"][p.offset : p.offset + p.length].tolist()))
            for steps in zip(*[session.client(rank) for rank in range(2)], strict=True)
            for step in steps
            for m in step
            for p in m.samples
        }
    assert found == {(name, tuple(ids)) for step in local for name, ids in step}
    for k in range(1, len(local)):
        with ov.launch(job()) as session:
            client = session.client(0)
            for _ in range(k):
                next(client)
            state = client.state_dict()
        with ov.launch(job(), resume=state) as session:
            resumed = [
                [
                    (tuple(p.sample), m["tokens"][p.offset : p.offset + p.length].tolist())
                    for m in step
                    for p in m.samples
                ]
                for step in session.client(0)
            ]
        assert resumed == local[k:]
