"""``Tokens(loss=)``: a weight for each token, or a reason for the quarantine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import overlord as ov
from overlord.content import Content
from overlord.errors import JobError
from overlord.sample import Ragged
from overlord.transforms.base import RowIds
from overlord.transforms.loss_weights import label_sums, stored
from overlord.transforms.pipeline import Pipeline
from tests.corpus import write_rows

IDS = [[1, 2, 3], [4, 5, 6]]


def pipeline(*transforms: Any, **changes: Any) -> Pipeline:
    settings: dict[str, Any] = {"seed": 0, "context": 8, "on_long": "split"}
    return Pipeline("web", transforms or (ov.Tokens("ids", loss="w"),), **settings | changes)


@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        ([1.0, 2.0], "expected 3 loss weights, one per token, got 2"),
        ([], "expected 3 loss weights, one per token, got 0"),
        (None, "w is null or missing"),
        ([1.0, None, 1.0], "w holds a null weight"),
        ([1.0, float("nan"), 1.0], "w holds a weight that is not finite"),
        ([1.0, float("inf"), 1.0], "w holds a weight that is not finite"),
        ([1.0, 1e39, 1.0], "w holds a weight that is not finite"),
        ([1.0, -0.5, 1.0], "w holds a weight below 0"),
    ],
)
@pytest.mark.parametrize("typed", [True, False])
def test_a_row_with_unusable_weights_is_bad_and_its_neighbour_is_not(
    weights: Any, reason: str, typed: bool
) -> None:
    kind = pa.list_(pa.float64()) if typed else None
    column = pa.array([weights, [0.5, 0.0, 2.0]], kind)
    block = pipeline().row_stage(pa.table({"ids": IDS, "w": column}))
    assert block.bad == [(0, reason)]
    assert block.weights is not None
    assert block.weights[0].tolist() == [0.5, 0.0, 2.0]
    assert block.meta["loss_weights"][0].tolist() == [2.0]


def test_bad_weights_are_quarantined_with_file_and_row(tmp_path: Path) -> None:
    rows = [{"ids": [1, 2, 3], "w": [1, 1] if i == 2 else [0, 1, 1]} for i in range(6)]
    uri = write_rows(tmp_path, "jsonl", rows, files=1)
    source = ov.Source("web", uri, transforms=[ov.Tokens("ids", loss="w")], epochs=1)
    with ov.launch(
        ov.Job(name="t", sources=[source], batch=ov.Batch(samples=5, context=8))
    ) as session:
        step = next(session.client(0))
        (entry,) = session.quarantine()
    assert step.global_valid_tokens == 10
    assert entry["reason"] == "expected 3 loss weights, one per token, got 2"
    assert str(entry["path"]).endswith(".jsonl")


@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64()])
def test_any_type_of_number_is_a_mask(kind: pa.DataType) -> None:
    column = pa.array([[0, 1, 1], [1, 0, 1]]).cast(pa.list_(kind))
    block = pipeline().row_stage(pa.table({"ids": IDS, "w": column}))
    assert block.weights is not None
    assert block.weights.values.dtype == np.uint8, "a mask takes a byte per token"
    assert block.weights.values.tolist() == [0, 1, 1, 1, 0, 1]


def test_numbers_that_are_no_lists_are_refused() -> None:
    with pytest.raises(ov.TransformError, match=r"expected lists of loss weights \(list<float>\)"):
        pipeline().row_stage(pa.table({"ids": IDS, "w": [1.0, 2.0]}))


def test_weights_follow_the_pieces_of_a_long_document() -> None:
    table = pa.table({"ids": [[1, 2, 3, 4, 5]], "w": [[9.0, 0.5, 1.0, 2.0, 4.0]]})
    block = pipeline(context=2).row_stage(table)
    assert block.weights is not None
    assert [block.weights[i].tolist() for i in range(3)] == [[9.0, 0.5], [1.0, 2.0], [4.0]]
    assert block.meta["loss_weights"].values.tolist() == [0.5, 2.0, 0.0]
    cut = pipeline(context=2, on_long="truncate").row_stage(table)
    assert cut.weights is not None
    assert cut.weights.values.tolist() == [9.0, 0.5]


def test_a_map_that_changes_the_number_of_ids_leaves_no_wrong_weights() -> None:
    longer = ov.Map(lambda c: {"tokens": [[*ids, 7] for ids in c["tokens"]]})
    made = pipeline(ov.Tokens("ids", loss="w"), longer)
    table = pa.table({"ids": IDS, "w": [[1.0] * 3] * 2})
    staged = made.slice_stage(table, RowIds(0, 0, np.arange(2)))
    block = made.row_stage(staged.table)
    assert {reason for _, reason in block.bad} == {"expected 4 loss weights, one per token, got 3"}


def test_contents_without_weights_have_ones_next_to_contents_with_weights() -> None:
    plain = Content(Ragged.from_rows([[1, 2], [3]]).slice(1, 2))
    weighed = Content(Ragged.from_rows([[4, 5]]), None, Ragged.from_rows([[0.5, 2.0]], np.float32))
    for joined in (
        Content.concat([plain, weighed]),
        Content.pick([weighed, plain], np.array([1, 0])),
    ):
        assert joined.weights is not None
        assert joined.weights.values.tolist() == [1.0, 0.5, 2.0]
        assert joined.weights.offsets.tolist() == joined.tokens.offsets.tolist()
    assert Content.concat([plain, plain]).weights is None
    assert weighed.nbytes == weighed.tokens.nbytes + 8


def test_the_sum_of_a_document_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 400, 50)
    weights = rng.random(int(lengths.sum())).astype(np.float32)
    start = np.cumsum(lengths) - lengths
    together = label_sums(weights, start)
    alone = [
        label_sums(weights[a : a + n], np.array([0]))[0]
        for a, n in zip(start.tolist(), lengths.tolist(), strict=True)
    ]
    assert together.tolist() == alone


def test_only_masks_of_0_and_1_are_stored_as_bytes() -> None:
    assert stored(np.array([0, 1, 1], np.float32)).dtype == np.uint8
    assert stored(np.array([0, 0.5], np.float32)).dtype == np.float32
    assert stored(np.array([2], np.float32)).dtype == np.float32
    assert stored(np.zeros(0, np.float32)).dtype == np.float32


def test_the_fingerprint_and_the_repr_name_the_column_of_weights() -> None:
    assert repr(ov.Tokens("ids", loss="w")) == "Tokens('ids', loss='w')"
    prints = {t.fingerprint() for t in (ov.Tokens("ids"), ov.Tokens("ids", loss="w"))}
    assert len(prints) == 2
    for wrong in ("", 3, "ids"):
        with pytest.raises(JobError, match="loss: expected"):
            ov.Tokens("ids", loss=wrong)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="loss_weights"):
        ov.Meta("loss_weights", "n")


def test_a_job_file_names_the_column_of_weights(tmp_path: Path) -> None:
    uri = write_rows(tmp_path, "parquet", [{"ids": [1, 2], "w": [0.0, 1.0]}], files=1)
    source = ov.Source("web", uri, transforms=[ov.Tokens("ids", loss="w")])
    job = ov.Job(name="t", sources=[source], batch=ov.Batch(samples=1, context=8))
    text = job.to_yaml()
    assert "loss: w" in text
    (tmp_path / "job.yaml").write_text(text)
    assert ov.Job.from_yaml(tmp_path / "job.yaml").sources == job.sources


def test_images_move_the_weights_of_the_tokens_after_them() -> None:
    pytest.importorskip("PIL")
    from tests.pictures import png

    weights = [[0.5, 2.0, 4.0]]
    for at, tokens, expected in (
        ("start", [1, 2, 3], [0.0, 0.5, 2.0, 4.0]),
        ("end", [1, 2, 3], [0.5, 2.0, 4.0, 0.0]),
        ("marker", [1, 9, 3], [0.5, 0.0, 4.0]),
    ):
        images = ov.Images("image", placeholder=9, at=at, patch=8, merge=1, size=(8, 8))
        made = pipeline(ov.Tokens("ids", loss="w"), images)
        table = pa.table({"ids": [tokens], "w": weights, "image": [png(8, 8)]})
        block = made.row_stage(table)
        assert block.weights is not None, block.bad
        assert block.weights.values.tolist() == expected
