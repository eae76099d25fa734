"""Microbatches by hand: every array of small steps, written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from overlord.constructor.pack import SLICE_FROM, build, valid_tokens
from overlord.mesh import Batch

VALUES = np.array([90, 91, 10, 11, 12, 20, 21, 92, 30, 31, 32, 33], np.uint16)
DTYPES = {
    "tokens": np.int64,
    "position_ids": np.int64,
    "labels": np.int64,
    "loss_mask": np.float32,
    "cu_seqlens": np.int32,
    "cu_seqlens_padded": np.int32,
    "max_seqlen": np.int32,
    "source_ids": np.int32,
}


def step(n_microbatches: int = 2, multiple: int = 1, **batch: Any) -> list[dict[str, np.ndarray]]:
    """Documents [30..33] and [20, 21] in microbatch 0, [10, 11, 12] in microbatch 1."""
    return build(
        VALUES,
        np.array([8, 5, 2]),
        np.array([4, 2, 3]),
        np.array([0, 0, 1], np.int32),
        n_microbatches,
        np.array([1, 0, 2], np.int32),
        Batch(samples=3, context=8, **batch),
        multiple,
    )


def as_lists(microbatch: dict[str, np.ndarray]) -> dict[str, Any]:
    return {name: array.tolist() for name, array in microbatch.items()}


def test_documents_are_packed_end_to_end_with_shifted_labels():
    first, second = step()
    assert as_lists(first) == {
        "tokens": [30, 31, 32, 33, 20, 21],
        "position_ids": [0, 1, 2, 3, 0, 1],
        "labels": [31, 32, 33, -100, 21, -100],
        "loss_mask": [1, 1, 1, 0, 1, 0],
        "cu_seqlens": [0, 4, 6],
        "cu_seqlens_padded": [0, 4, 6],
        "max_seqlen": 4,
        "source_ids": [1, 0],
    }
    assert as_lists(second) == {
        "tokens": [10, 11, 12],
        "position_ids": [0, 1, 2],
        "labels": [11, 12, -100],
        "loss_mask": [1, 1, 0],
        "cu_seqlens": [0, 3],
        "cu_seqlens_padded": [0, 3],
        "max_seqlen": 3,
        "source_ids": [2],
    }


def test_unshifted_labels_are_the_tokens_without_the_first_of_each_document():
    first, second = step(labels="unshifted")
    assert first["labels"].tolist() == [-100, 31, 32, 33, -100, 21]
    assert first["loss_mask"].tolist() == [0, 1, 1, 1, 0, 1]
    assert second["labels"].tolist() == [-100, 11, 12]


def test_documents_are_padded_to_the_multiple_and_padding_carries_no_loss():
    first, second = step(multiple=4, pad_id=7, pad_multiple=4)
    assert as_lists(first) == {
        "tokens": [30, 31, 32, 33, 20, 21, 7, 7],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "labels": [31, 32, 33, -100, 21, -100, -100, -100],
        "loss_mask": [1, 1, 1, 0, 1, 0, 0, 0],
        "cu_seqlens": [0, 4, 6],
        "cu_seqlens_padded": [0, 4, 8],
        "max_seqlen": 4,
        "source_ids": [1, 0],
    }
    assert second["tokens"].tolist() == [10, 11, 12, 7]
    assert second["cu_seqlens"].tolist() == [0, 3]
    assert second["cu_seqlens_padded"].tolist() == [0, 4]


def test_unshifted_labels_stop_where_the_padding_begins():
    first, _ = step(multiple=4, pad_id=7, labels="unshifted")
    assert first["labels"].tolist() == [-100, 31, 32, 33, -100, 21, -100, -100]
    assert first["loss_mask"].tolist() == [0, 1, 1, 1, 0, 1, 0, 0]


@pytest.mark.parametrize("labels", ["shifted", "unshifted"])
def test_an_empty_microbatch_is_one_document_of_pad_tokens_without_loss(labels):
    *_, empty = step(n_microbatches=3, multiple=2, pad_id=7, labels=labels)
    assert as_lists(empty) == {
        "tokens": [7, 7],
        "position_ids": [0, 1],
        "labels": [-100, -100],
        "loss_mask": [0, 0],
        "cu_seqlens": [0, 2],
        "cu_seqlens_padded": [0, 2],
        "max_seqlen": 2,
        "source_ids": [-1],
    }


def test_an_empty_microbatch_between_full_ones_leaves_them_as_they_are():
    none = np.zeros(0, np.int64)
    start, length, source = np.array([8, 2]), np.array([4, 3]), np.array([1, 2], np.uint32)
    batch = Batch(samples=2, context=8)
    got = build(VALUES, start, length, np.array([1, 3]), 5, source, batch, 1)
    assert [m["tokens"].tolist() for m in got] == [[0], [30, 31, 32, 33], [0], [10, 11, 12], [0]]
    assert [m["source_ids"].tolist() for m in got] == [[-1], [1], [-1], [2], [-1]]
    assert [m["labels"].tolist() for m in got] == [
        [-100],
        [31, 32, 33, -100],
        [-100],
        [11, 12, -100],
        [-100],
    ]
    all_empty = build(VALUES[:0], none, none, none, 2, none, batch, 3)
    assert [m["tokens"].tolist() for m in all_empty] == [[0, 0, 0], [0, 0, 0]]


def test_the_padded_layout_gives_each_document_a_row_of_the_context():
    first, second, empty = step(
        n_microbatches=3, multiple=2, pad_id=7, pad_multiple=2, layout="padded"
    )
    assert as_lists(first) == {
        "tokens": [[30, 31, 32, 33, 7, 7, 7, 7], [20, 21, 7, 7, 7, 7, 7, 7]],
        "position_ids": [[0, 1, 2, 3, 4, 5, 6, 7]] * 2,
        "labels": [
            [31, 32, 33, -100, -100, -100, -100, -100],
            [21, -100, -100, -100, -100, -100, -100, -100],
        ],
        "loss_mask": [[1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]],
        "attention_mask": [[True] * 4 + [False] * 4, [True] * 2 + [False] * 6],
        "cu_seqlens": [0, 4, 6],
        "cu_seqlens_padded": [0, 8, 16],
        "max_seqlen": 8,
        "source_ids": [1, 0],
    }
    assert second["tokens"].tolist() == [[10, 11, 12, 7, 7, 7, 7, 7]]
    assert empty["tokens"].tolist() == [[7] * 8]
    assert empty["attention_mask"].tolist() == [[True] * 2 + [False] * 6]
    assert empty["cu_seqlens"].tolist() == [0, 2]
    assert empty["loss_mask"].sum() == 0
    assert empty["source_ids"].tolist() == [-1]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_keys_have_the_types_of_the_contract_and_nothing_can_be_written(layout):
    for microbatch in step(n_microbatches=3, layout=layout):
        wanted = DTYPES | ({"attention_mask": np.bool_} if layout == "padded" else {})
        assert {name: array.dtype for name, array in microbatch.items()} == {
            n: np.dtype(t) for n, t in wanted.items()
        }
        assert microbatch["max_seqlen"].shape == ()
        assert not any(array.flags.writeable for array in microbatch.values())
        with pytest.raises(ValueError, match="read-only"):
            microbatch["tokens"][...] = 1


def test_microbatches_share_the_arrays_of_their_step():
    first, second = step()
    assert first["tokens"].base is second["tokens"].base
    assert first["tokens"].base is not None


def test_a_long_document_is_copied_like_short_ones():
    values = np.arange(3 * SLICE_FROM, dtype=np.uint32)
    batch = Batch(samples=1, context=4 * SLICE_FROM)
    (got,) = build(
        values,
        np.array([5]),
        np.array([2 * SLICE_FROM + 1]),
        np.array([0]),
        1,
        np.array([0]),
        batch,
        4,
    )
    assert got["tokens"].tolist() == [*range(5, 2 * SLICE_FROM + 6), 0, 0, 0]
    assert got["position_ids"].tolist() == list(range(2 * SLICE_FROM + 4))
    assert got["labels"].tolist() == [*range(6, 2 * SLICE_FROM + 6), -100, -100, -100, -100]


def test_a_document_longer_than_the_context_is_our_own_mistake():
    with pytest.raises(AssertionError, match="expected documents of at most the context"):
        build(
            VALUES,
            np.array([0]),
            np.array([9]),
            np.array([0]),
            1,
            np.array([0]),
            Batch(samples=1, context=8, layout="padded"),
            1,
        )


def test_valid_tokens_are_all_tokens_of_a_document_but_one():
    assert valid_tokens(np.array([4, 2, 1, 0, 3])) == 3 + 1 + 0 + 0 + 2
    assert valid_tokens(np.zeros(0, np.int64)) == 0
    assert valid_tokens(np.array([4, 2, 3])) == sum(int(m["loss_mask"].sum()) for m in step())
