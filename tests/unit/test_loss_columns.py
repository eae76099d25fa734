"""A column that says which tokens have a loss is refused by name if no transform reads it: ignored,
it would train on the wrong tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.errors import SourceError, TransformError
from tests.corpus import write_rows

ROWS = [{"tokens": [i, i + 1, i + 2], "loss_mask": [0, 1, 1], "n": i} for i in range(8)]


def first_step(uri: Any, *transforms: Any) -> ov.Step:
    source = ov.Source("web", uri, transforms=transforms, epochs=1)
    with ov.launch(
        ov.Job(name="t", sources=[source], batch=ov.Batch(samples=4, context=8))
    ) as session:
        return next(session.client(0))


def source_of(kind: str, folder: Path, rows: list[dict[str, Any]]) -> Any:
    if kind == "dataset":
        return ov.Source.from_dataset("web", rows).uri
    if kind == "factory":
        return ov.Source.from_factory("web", lambda: iter(rows)).uri
    return write_rows(folder, kind, rows, files=1)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "jsonl", "jsonl.gz", "dataset", "factory"])
@pytest.mark.parametrize("name", ["loss_mask", "labels"])
def test_a_mask_beside_the_ids_is_refused_by_name(tmp_path: Path, kind: str, name: str) -> None:
    uri = source_of(
        kind, tmp_path, [{"tokens": row["tokens"], name: row["loss_mask"]} for row in ROWS]
    )
    problem = (
        f"expected token ids alone, got the column '{name}' next to them, which no transform "
        r"reads; name a column of loss weights in Tokens\(loss=...\), or add Select"
    )
    for transforms in ([ov.Tokens("tokens")], [], [ov.Tokens("tokens"), ov.Filter(len_is_three)]):
        with pytest.raises(SourceError, match=problem):
            first_step(uri, *transforms)


def len_is_three(columns: dict[str, Any]) -> list[bool]:
    return [len(ids) == 3 for ids in columns["tokens"]]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "dataset"])
def test_select_says_that_every_token_has_a_loss(tmp_path: Path, kind: str) -> None:
    uri = source_of(kind, tmp_path, ROWS)
    assert first_step(uri, ov.Select("tokens", "n"), ov.Meta("n", "n")).global_valid_tokens == 8
    assert first_step(uri, ov.Select("tokens"), ov.Filter(len_is_three)).global_valid_tokens == 8


def test_a_mask_that_is_null_everywhere_is_none() -> None:
    rows = [{"tokens": row["tokens"], "loss_mask": None} for row in ROWS]
    assert first_step(source_of("dataset", Path(), rows)).global_valid_tokens == 8


def masked(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["tokens"], "loss_mask": [0, 0, 1]}


def unmasked(row: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": row["tokens"]}


def test_a_function_that_returns_a_mask_is_refused_by_name(tmp_path: Path) -> None:
    uri = source_of("jsonl", tmp_path, ROWS)
    problem = (
        "expected columns that a transform reads, got 'loss_mask', which none does; "
        r"read it with Tokens\(loss='loss_mask'\), or return 'tokens' without 'loss_mask'"
    )
    with pytest.raises(TransformError, match=problem):
        first_step(uri, ov.Map(masked, rows=True))
    with pytest.raises(TransformError, match="got 'loss_mask', which none does"):
        first_step(uri, ov.Select("tokens", "loss_mask"))
    twice = ov.Map(masked, rows=True)
    with pytest.raises(TransformError, match=problem):
        first_step(uri, twice, twice)
    for later in ([ov.Select("tokens")], [ov.Map(unmasked, rows=True)]):
        assert first_step(uri, ov.Map(masked, rows=True), *later).global_valid_tokens == 8
    assert first_step(uri, ov.Map(unmasked, rows=True)).global_valid_tokens == 8


def test_a_mask_beside_text_says_nothing_about_tokens(tmp_path: Path, tokenizer: str) -> None:
    uri = write_rows(tmp_path, "parquet", [{"text": "one two three", "labels": 1}] * 4, files=1)
    assert first_step(uri, ov.Tokenize(tokenizer, text="text")).global_valid_tokens > 0
