"""Images of a source: from columns to items, placeholders and metadata, and the rows that cannot be
used.
"""

from __future__ import annotations

import io
import re
import tarfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import overlord as ov
from overlord.errors import JobError, TransformError
from overlord.observe.source_inspection import inspect_job
from overlord.sample import Ragged
from overlord.transforms.base import Block, Filter, Map, Meta, RowIds, Select, Tokens
from overlord.transforms.image_items import (
    PREFIX_BYTES,
    READY,
    fill,
    item_grid,
    item_shape,
    read_prefix,
)
from overlord.transforms.images import Images
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.transform_process import TransformWorker
from tests.pictures import BAD, FILES, jpeg, moving, photo, png, saved, turned
from tests.source_reads import read_all

P = 900  # the placeholder
SPEC = Images(placeholder=P, patch=7, merge=2, min_pixels=14 * 14, max_pixels=14 * 14 * 64)
A, B, C = jpeg(28, 42), png(14, 14), jpeg(56, 28)  # 6, 1 and 8 tokens


def pipeline(
    *transforms: Any, context: int = 1000, on_long: str = "truncate", seed: int = 0
) -> Pipeline:
    return Pipeline("web", transforms, seed=seed, context=context, on_long=on_long)


def run(*transforms: Any, epoch: int = 0, stages: Any = None, **columns: Any) -> Block:
    options = {k: columns.pop(k) for k in ("context", "on_long", "seed") if k in columns}
    p, table = stages or pipeline(*transforms, **options), pa.table(columns)
    return p.row_stage(p.slice_stage(table, RowIds(epoch, 0, np.arange(table.num_rows))).table)


def lists(column: Any) -> list[list[int]]:
    assert isinstance(column, Ragged)
    return [column[i].tolist() for i in range(len(column))]


def numbers(block: Block, name: str) -> list[list[int]]:
    return lists(block.meta[f"image_{name}"])


def items(block: Block) -> list[list[bytes]]:
    """Files of the images of every sample."""
    assert block.items is not None
    flat, first = block.items.bytes, block.items.first
    return [
        [flat[k][PREFIX_BYTES:].tobytes() for k in range(first[i], first[i + 1])]
        for i in range(len(block))
    ]


def pixels(block: Block) -> list[bytes]:
    assert block.items is not None
    out = []
    for k in range(len(block.items.bytes)):
        patches, dim, dtype = item_shape(block.items.bytes[k])
        made = np.empty((patches, dim), dtype)
        fill(block.items.bytes[k], made)
        out.append(made.tobytes())
    return out


def test_an_image_is_a_run_of_placeholders_three_numbers_and_an_item() -> None:
    block = run(Tokens(), SPEC, tokens=[[1, 2], [3]], images=[[A], [B, C]])
    assert lists(block.tokens) == [[P] * 6 + [1, 2], [P] * 9 + [3]]
    assert numbers(block, "patches") == [[24], [4, 32]]
    assert numbers(block, "tokens") == [[6], [1, 8]]
    assert numbers(block, "offset") == [[0], [0, 1]]
    assert items(block) == [[A], [B, C]]
    assert [item_grid(block.items.bytes[k]) for k in range(3)] == [(1, 4, 6), (1, 2, 2), (1, 8, 4)]  # type: ignore[union-attr]
    assert block.meta["tokens"].tolist() == [8, 10]  # type: ignore[union-attr]
    assert block.meta["bytes"].tolist() == [8 * 4 + len(A) + 96, 10 * 4 + len(B) + len(C) + 192]  # type: ignore[union-attr]


def test_a_source_in_which_no_row_has_an_image_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    some, none = pipeline(Tokens(), SPEC), pipeline(Tokens(), SPEC)
    run(stages=some, tokens=[[1]], images=[[A]])
    for stages in (some, none):
        for _ in range(3):
            run(
                stages=stages,
                tokens=[[1]] * 600,
                images=pa.array([[]] * 600, pa.list_(pa.binary())),
            )
    (told,) = [r.getMessage() for r in caplog.records]
    assert told.startswith("source 'web': found no image in the first 1200 rows, column 'images'")


def test_placeholders_stand_where_they_are_asked_for() -> None:
    rows = {"tokens": [[1, 5, 2, 5], [3]], "images": [[B, A], None]}
    end = run(Tokens(), replace(SPEC, at="end"), **rows)
    assert lists(end.tokens) == [[1, 5, 2, 5] + [P] * 7, [3]]
    assert numbers(end, "offset") == [[4, 5], []]
    marked = run(Tokens(), replace(SPEC, at="marker", marker=5), **rows)
    assert lists(marked.tokens) == [[1, P, 2] + [P] * 6, [3]]
    assert numbers(marked, "offset") == [[1, 3], []]
    itself = run(Tokens(), replace(SPEC, at="marker"), tokens=[[1, P, 2, P]], images=[[B, A]])
    assert lists(itself.tokens) == [[1, P, 2] + [P] * 6]


def test_markers_and_images_must_agree_in_number() -> None:
    spec = replace(SPEC, at="marker", marker=5)
    block = run(
        Tokens(), spec, tokens=[[5], [1, 5], [5, 5, 1], [1, 2]], images=[[B, B], [B], [B], []]
    )
    assert dict(block.bad) == {
        0: "expected 2 markers (token 5), one per image, got 1",
        2: "expected 1 markers (token 5), one per image, got 2",
    }
    assert block.index.tolist() == [1, 3]
    assert items(block) == [[B], []]


STRUCT = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
COLUMNS: dict[str, pa.Array] = {
    "binary": pa.array([A, None, B], pa.binary()),
    "large binary": pa.array([A, None, B], pa.large_binary()),
    "binary view": pa.array([A, None, B], pa.binary_view()),
    "lists": pa.array([[A], None, [B]], pa.list_(pa.binary())),
    "lists with holes": pa.array([[None, A], [None], [B]], pa.list_(pa.binary())),
    "lists of nothing known": pa.array([[A], [], [B]]),
    "null lists with something behind them": pa.ListArray.from_arrays(
        [0, 1, 2, 3], pa.array([A, C, B]), mask=pa.array([False, True, False])
    ),
    "large lists": pa.array([[A], [], [B]], pa.large_list(pa.large_binary())),
    "fixed lists": pa.array([[A], None, [B]], pa.list_(pa.binary(), 1)),
    "structs": pa.array([{"bytes": A, "path": "a"}, None, {"bytes": B, "path": None}], STRUCT),
    "structs without a path": pa.array([{"bytes": A}, {"bytes": None}, {"bytes": B}]),
    "lists of structs": pa.array(
        [[{"bytes": A, "path": None}], [], [{"bytes": B, "path": "b"}]], pa.list_(STRUCT)
    ),
    "a slice": pa.array([[C], [A], None, [B]]).slice(1),
    "a slice of structs": pa.array([{"bytes": C}, {"bytes": A}, None, {"bytes": B}]).slice(1),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_every_kind_of_column_holds_images(kind: str) -> None:
    block = run(Tokens(), SPEC, tokens=[[1], [2], [3]], images=COLUMNS[kind])
    assert items(block) == [[A], [], [B]]
    assert block.bad == []
    assert lists(block.tokens) == [[P] * 6 + [1], [2], [P, 3]]


def test_chunks_of_a_column_stay_apart_and_count_through() -> None:
    chunks = pa.chunked_array([pa.array([[A], [B]]), pa.array([[], [C]])])
    block = run(Tokens(), SPEC, tokens=pa.chunked_array([pa.array([[1]] * 4)]), images=chunks)
    assert items(block) == [[A], [B], [], [C]]


def test_a_column_that_holds_nothing_has_no_images() -> None:
    block = run(Tokens(), SPEC, tokens=[[1], [2]], images=pa.nulls(2))
    assert items(block) == [[], []]
    assert numbers(block, "patches") == [[], []]


def test_several_columns_give_their_images_in_order() -> None:
    block = run(
        Tokens(),
        replace(SPEC, column=("front", "back")),
        tokens=[[1], [2], [3]],
        back=[B, B, None],
        front=[[A, C], None, [C]],
    )
    assert items(block) == [[A, C, B], [B], [C]]


def test_a_path_alone_is_refused_with_the_reason() -> None:
    rows = pa.array([{"bytes": None, "path": "img/1.jpg"}, {"bytes": B, "path": None}], STRUCT)
    block = run(Tokens(), SPEC, tokens=[[1], [2]], images=rows)
    assert block.bad == [
        (0, "images: expected the bytes of an image, got only its path 'img/1.jpg'")
    ]
    assert items(block) == [[B]]


@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (["a.jpg"], "column 'images': expected images as bytes, got text"),
        ([[["x"]]], "binary, struct<bytes, path>, or lists"),
        ([1], "column 'images': expected images"),
        ([{"path": "x"}], "expected a struct with a field 'bytes'"),
    ],
)
def test_a_column_that_can_hold_no_image_says_what_is_wanted(column: Any, reason: str) -> None:
    p = pipeline(Tokens(), SPEC)
    staged = p.slice_stage(
        pa.table({"tokens": [[1]], "images": column}), RowIds(0, 0, np.arange(1))
    )
    assert reason in staged.bad[0][1]


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_takes_its_row_out_and_no_other(name: str) -> None:
    data, reason = BAD[name]
    block = run(Tokens(), SPEC, tokens=[[1], [2], [3]], images=[[A], [B, data], [C]])
    ((row, said),) = block.bad
    assert row == 1
    assert said.startswith("image 1: ")
    assert reason in said
    assert items(block) == [[A], [C]]
    assert lists(block.tokens) == [[P] * 6 + [1], [P] * 8 + [3]]


def test_bad_rows_of_every_stage_leave_the_images_with_their_own_rows() -> None:
    tokens = pa.array([[1], None, [3], [4], [], [6]], pa.list_(pa.int32()))
    block = run(
        Tokens(),
        Meta("m", "m"),
        SPEC,
        tokens=tokens,
        m=[1, 2, None, 4, 5, 6],
        images=[[A], [B], [C], [b"?"], [C], []],
    )
    assert block.index.tolist() == [0, 4, 5]
    assert items(block) == [[A], [C], []]
    assert lists(block.tokens) == [[P] * 6 + [1], [P] * 8, [6]]
    assert block.meta["m"].tolist() == [1, 5, 6]  # type: ignore[union-attr]
    assert sorted(dict(block.bad)) == [1, 2, 3]


@pytest.mark.parametrize("at", ["start", "marker", "end"])
def test_a_batch_of_nothing_but_bad_rows_is_empty(at: str) -> None:
    block = run(Tokens(), replace(SPEC, at=at), tokens=[[1], [2]], images=[[b"?"], [b""]])
    assert (len(block), len(block.bad), block.items) == (0, 2, None)


def test_limits_of_the_spec_are_kept() -> None:
    rows = {"tokens": [[1], [2]], "images": [[B, B, B], [moving("GIF")]]}
    assert run(Tokens(), replace(SPEC, max_images=2), **rows).bad == [
        (0, "expected at most max_images=2 images, got 3")
    ]
    assert run(Tokens(), replace(SPEC, animated="quarantine"), **rows).bad == [
        (1, "image 0: expected a still image, got an animated GIF")
    ]
    assert run(Tokens(), SPEC, **rows).bad == []
    assert "max_pixels_in=100" in run(Tokens(), replace(SPEC, max_pixels_in=100), **rows).bad[0][1]


# Long documents


def test_a_cut_document_loses_images_that_no_token_is_left_of() -> None:
    block = run(
        Tokens(),
        replace(SPEC, at="end"),
        context=6,
        tokens=[[1, 2, 3, 4], [1] * 6],
        images=[[B, C, A], [A]],
    )
    assert lists(block.tokens) == [[1, 2, 3, 4, P, P], [1] * 6]
    assert items(block) == [[B, C], []]
    assert numbers(block, "offset") == [[4, 5], []]
    assert numbers(block, "tokens") == [
        [1, 8],
        [],
    ]  # what the image has; the planner sends what there is room for


def test_a_split_document_keeps_its_images_with_the_first_piece() -> None:
    block = run(
        Tokens(), SPEC, context=8, on_long="split", tokens=[list(range(10)), [1]], images=[[A], [C]]
    )
    assert lists(block.tokens) == [[P] * 6 + [0, 1], list(range(2, 10)), [P] * 8, [1]]
    assert block.part.tolist() == [0, 1, 0, 1]
    assert items(block) == [[A], [], [C], []]
    assert numbers(block, "patches") == [[24], [], [32], []]


def test_an_image_behind_the_first_piece_of_a_split_document_takes_it_out() -> None:
    block = run(Tokens(), SPEC, context=8, on_long="split", tokens=[[1], [2]], images=[[A, C], [B]])
    assert block.bad == [
        (
            0,
            "on_long='split': expected all images in the first piece of 8 tokens, got one that "
            "ends at token 14",
        )
    ]
    assert items(block) == [[B]]


@pytest.mark.parametrize(("on_long", "bad"), [("split", 1), ("truncate", 0), ("drop", 0)])
def test_inspect_tells_of_images_that_end_behind_the_first_piece(on_long: str, bad: int) -> None:
    rows = [{"tokens": [1], "images": [A, C]}, {"tokens": list(range(20)), "images": [B]}]
    source = ov.Source.from_dataset("web", rows, transforms=[Tokens(), SPEC], epochs=1)
    made = ov.Job(
        name="x",
        sources=[source],
        batch=ov.Batch(samples=1, context=8),
        strategy="vlm_hybrid",
        on_long=on_long,
    )
    [found] = inspect_job(made)
    assert found.bad == ({"an image ends after the first piece of 8": 1} if bad else {})
    assert (found.longer, found.lost) == (
        2,
        {"split": 0, "truncate": 7 + 13, "drop": 15 + 21}[on_long],
    )


def test_a_long_document_is_quarantined_by_its_tokens_and_those_of_its_images() -> None:
    block = run(
        Tokens(), SPEC, context=8, on_long="quarantine", tokens=[[1], [1, 2, 3]], images=[[A], [A]]
    )
    assert block.bad == [(1, "expected at most context=8 tokens, got 9")]
    assert items(block) == [[A]]


# Ids


@pytest.mark.parametrize(
    ("kind", "wide"),
    [
        (pa.uint8(), np.uint16),
        (pa.uint16(), np.uint16),
        (pa.int32(), np.uint32),
        (pa.int64(), np.uint32),
    ],
)
def test_ids_are_as_wide_as_the_placeholder_with_images_or_without(
    kind: pa.DataType, wide: Any
) -> None:
    tokens = pa.array([[1, 2]], pa.list_(kind))
    assert {
        run(Tokens(), SPEC, tokens=tokens, images=[i]).tokens.values.dtype for i in ([A], [])
    } == {np.dtype(wide)}


def test_a_row_of_images_alone_is_a_sample() -> None:
    assert lists(
        run(Tokens(), SPEC, tokens=pa.array([[]], pa.list_(pa.int32())), images=[[B]]).tokens
    ) == [[P]]


# Chance


def boxes(block: Block) -> list[tuple[Any, bool]]:
    assert block.items is not None
    return [
        (p.box, p.flip)
        for p in (read_prefix(block.items.bytes[k]) for k in range(len(block.items.bytes)))
    ]


def test_random_crops_and_flips_follow_from_the_seed_and_the_name_of_the_sample_alone() -> None:
    spec = replace(SPEC, crop="random", flip=True)
    big = [[jpeg(80, 90), jpeg(80, 90)], [jpeg(80, 90)], [jpeg(80, 90)]]
    rows = {"tokens": [[1], [2], [3]], "images": big}
    block = run(Tokens(), spec, **rows)
    assert len(set(boxes(block))) == 4
    assert boxes(run(Tokens(), spec, **rows)) == boxes(block)
    assert boxes(run(Tokens(), Meta("m", len_of), spec, **rows)) == boxes(block)
    p = pipeline(Tokens(), spec)
    staged = p.slice_stage(pa.table(rows), RowIds(0, 0, np.arange(3)))
    assert boxes(p.row_stage(staged.table.take([2, 0]))) == [
        boxes(block)[3],
        *boxes(block)[:2],
    ]  # whatever rows stand beside it
    for other in (run(Tokens(), spec, seed=1, **rows), run(Tokens(), spec, epoch=1, **rows)):
        assert set(boxes(other)).isdisjoint(boxes(block))
    for (x, y, w, h), _ in boxes(block):
        assert 0.8 * 90 - 1 <= w <= 90 - x
        assert 0.8 * 80 - 1 <= h <= 80 - y


def len_of(columns: Any) -> Any:
    return np.ones(len(columns["tokens"]))


def test_a_fixed_size_takes_the_middle_of_the_same_shape() -> None:
    spec = replace(SPEC, size=(14, 28))
    block = run(
        Tokens(),
        spec,
        tokens=[[1]] * 3,
        images=[[jpeg(100, 100)], [jpeg(20, 100)], [jpeg(50, 100)]],
    )
    assert [box for box, _ in boxes(block)] == [(0, 25, 100, 50), (30, 0, 40, 20), (0, 0, 100, 50)]
    assert numbers(block, "tokens") == [[2], [2], [2]]
    by_chance = boxes(
        run(Tokens(), replace(spec, crop="random"), tokens=[[1]], images=[[jpeg(300, 100)]])
    )[0][0]
    assert abs(by_chance[2] / by_chance[3] - 2) < 0.1


# Where pixels are made


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_pixels_are_bit_equal_wherever_they_are_made(dtype: str) -> None:
    broken = bytearray(png(40, 60))
    broken[len(broken) // 2] ^= 0xFF  # its header is sound
    images = [
        [FILES[n]]
        for n in ("jpeg", "jpeg cmyk", "png 16 bit 2", "webp", "jpeg turned 6", "gif animated")
    ]
    rows = {"tokens": [[1]] * len(images), "images": images}
    spec = replace(SPEC, dtype=dtype, crop="random", flip=True)
    late, early = (
        run(Tokens(), replace(spec, place=place), **rows) for place in ("constructor", "loader")
    )
    assert pixels(late) == pixels(early)
    assert lists(late.tokens) == lists(early.tokens)
    assert [c.tolist() for c in (late.meta["bytes"], late.meta["tokens"])] == [
        c.tolist() for c in (early.meta["bytes"], early.meta["tokens"])
    ]  # type: ignore[union-attr]
    forms = [
        {read_prefix(b.items.bytes[k]).form for k in range(len(images))} for b in (late, early)
    ]  # type: ignore[union-attr]
    assert forms == [{0}, {READY}]
    spoiled = run(Tokens(), replace(spec, place="loader"), tokens=[[1]], images=[[bytes(broken)]])
    assert items(spoiled) == [
        [bytes(broken)]
    ]  # it fails where it is used, as it would have done later
    assert spoiled.bad == []


def test_left_to_itself_a_source_makes_pixels_where_they_are_smaller() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (56, 56, 3), np.uint8)
    large, small = saved(noise, "PNG"), jpeg(56, 56, quality=20)
    spec = replace(SPEC, dtype="uint8", place="auto")
    assert len(large) > 56 * 56 * 3 > len(small)
    p = pipeline(Tokens(), spec)
    sizes, forms = [], []
    for data in (large, small, small, small, large, large, large):
        block = run(stages=p, tokens=[[1]], images=[[data]])
        assert block.items is not None
        sizes.append((block.image_bytes_in, block.image_bytes_out))
        forms.append(read_prefix(block.items.bytes[0]).form)
    assert sizes == [
        (len(d), 56 * 56 * 3) for d in (large, small, small, small, large, large, large)
    ]
    so_far = np.cumsum(np.array(sizes), axis=0)
    assert forms == (so_far[:, 1] <= so_far[:, 0]).astype(int).tolist()
    assert set(forms) == {0, READY}


def test_a_worker_process_gives_the_same_block() -> None:
    spec = replace(SPEC, place="loader", flip=True)
    rows = {"tokens": [[1], [2], [3]], "images": [[A, turned(6)], [b"?"], []]}
    p = pipeline(Tokens(), spec)
    with TransformWorker(p) as worker:
        there, here = run(stages=worker, **rows), run(stages=p, **rows)
    assert items(there) == items(here)
    assert there.bad == here.bad
    assert lists(there.tokens) == lists(here.tokens)
    assert {n: numbers(there, n) for n in ("patches", "tokens", "offset")} == {
        n: numbers(here, n) for n in ("patches", "tokens", "offset")
    }
    assert (
        (there.image_bytes_in, there.image_bytes_out)
        == (here.image_bytes_in, here.image_bytes_out)
        != (0, 0)
    )


# The spec


def test_where_pixels_are_made_is_no_part_of_the_fingerprint_and_all_else_is() -> None:
    assert (
        len({replace(SPEC, place=p).fingerprint() for p in ("auto", "loader", "constructor")}) == 1
    )
    others = [
        replace(SPEC, column="x"),
        replace(SPEC, placeholder=1),
        replace(SPEC, patch=14),
        replace(SPEC, merge=1),
        replace(SPEC, min_pixels=1),
        replace(SPEC, max_pixels=9999),
        replace(SPEC, size=(14, 14)),
        replace(SPEC, at="end"),
        replace(SPEC, at="marker", marker=3),
        replace(SPEC, mean=(0, 0, 0)),
        replace(SPEC, std=(1, 1, 1)),
        replace(SPEC, dtype="uint8"),
        replace(SPEC, crop="random"),
        replace(SPEC, flip=True),
        replace(SPEC, scaled=False),
        replace(SPEC, max_images=1),
        replace(SPEC, animated="quarantine"),
        replace(SPEC, max_pixels_in=5),
        replace(SPEC, max_decoded_bytes=5),
        replace(SPEC, max_file_bytes=5),
        replace(SPEC, max_aspect=5.0),
    ]
    assert len({s.fingerprint() for s in (SPEC, *others)}) == len(others) + 1


def test_deferring_images_says_that_the_constructor_makes_their_pixels() -> None:
    late = ov.Source("web", "x", transforms=[Tokens()], deferred=[SPEC])
    assert late == ov.Source("web", "x", transforms=[Tokens(), replace(SPEC, place="constructor")])
    with pytest.raises(JobError, match=r"deferred\[0\]: expected ov.Images\(...\), got Tokens"):
        ov.Source("web", "x", deferred=[Tokens()])


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"placeholder": -1}, "placeholder: expected a whole number"),
        ({"patch": 0}, "patch: expected"),
        ({"merge": True}, "merge: expected"),
        ({"column": ()}, "column: expected a name or several"),
        ({"column": ("a", "a")}, "column: expected"),
        ({"column": ("a", 3)}, "column[1]: expected a name"),
        (
            {"size": (28, 30)},
            "size: expected (height, width), both multiples of patch * merge = 28",
        ),
        ({"size": 28}, "size: expected"),
        (
            {"size": (28 * 2**9, 28 * 2**8)},
            "size: expected at most 65536 tokens per image, got more with (14336, 7168)",
        ),
        ({"max_pixels": 100}, "max_pixels: expected at least min_pixels"),
        ({"max_pixels": 2**40}, "max_pixels: expected at most 65536 tokens per image"),
        ({"at": "middle"}, "at: expected one of start, marker, end"),
        ({"marker": 3}, 'marker: expected at="marker" with it'),
        ({"mean": (1, 2)}, "mean: expected three numbers"),
        ({"std": (0, 1, 1)}, "std: expected three numbers of at least 1e-6"),
        ({"dtype": "int8"}, "dtype: expected one of uint8, float16, float32"),
        ({"crop": "centre"}, "crop: expected one of None, random"),
        ({"flip": 1}, "flip: expected True or False"),
        ({"place": "here"}, "place: expected one of auto"),
        ({"animated": "all"}, "animated: expected"),
        ({"max_aspect": 0}, "max_aspect: expected"),
        ({"max_images": 0}, "max_images: expected"),
    ],
)
def test_a_spec_names_its_problems(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobError) as fault:
        Images(**{"placeholder": 1, **given})
    assert any(problem in p for p in fault.value.problems)


def test_a_spec_shows_what_differs_from_the_defaults() -> None:
    assert repr(Images(placeholder=7)) == "Images('images', placeholder=7)"
    assert (
        repr(Images(["a", "b"], placeholder=7, size=[28, 28]))
        == "Images(('a', 'b'), placeholder=7, size=(28, 28))"
    )


@pytest.mark.parametrize(
    ("transforms", "problem"),
    [
        ([SPEC, Tokens()], "got Tokens('tokens') after it; put Images after"),
        ([Tokens(), SPEC, Map(len_of)], "got Map"),
        ([Tokens(), SPEC, SPEC], "expected one Images in a source"),
        (
            [Tokens(), Meta("image_patches", "x"), SPEC],
            "expected different names of metadata, got 'image_patches' twice",
        ),
        (
            [Select("tokens"), Tokens(), SPEC],
            "expected the column 'images', got an earlier Select that drops it",
        ),
    ],
)
def test_a_pipeline_says_what_cannot_work_with_images(transforms: list[Any], problem: str) -> None:
    with pytest.raises(TransformError) as fault:
        pipeline(*transforms)
    assert problem in str(fault.value)


def test_every_field_stands_in_the_page_on_images_with_its_default() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
    table = page.split("## Images(")[1].split("\n## ")[0]
    listed = {}
    for line in table.splitlines():
        if line.startswith("| `"):
            names, values = (re.findall(r"`([^`]+)`", cell) for cell in line.split("|")[1:3])
            listed |= dict(zip(names, values + [""] * len(names), strict=False))
    assert sorted(listed) == sorted(f.name for f in fields(Images))
    for f in fields(Images):
        if listed[f.name]:
            assert listed[f.name].replace('"', "'") == repr(f.default), f.name


def test_only_the_columns_of_images_and_ids_are_read() -> None:
    assert pipeline(Tokens("ids"), replace(SPEC, column=("a", "b"))).columns == ("ids", "a", "b")


def keep_two(columns: Any) -> Any:
    return np.array([len(t) < 3 for t in columns["tokens"]])


def test_images_pass_functions_of_the_user_untouched() -> None:
    block = run(
        Tokens(), Filter(keep_two), SPEC, tokens=[[1], [1, 2, 3], [2]], images=[[A], [B], [C]]
    )
    assert items(block) == [[A], [C]]


# Tar shards


def tar_of(path: Path, members: dict[str, bytes]) -> str:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


MEMBERS = {
    "0001.txt": b"one",
    "0001.jpg": A,
    "0002.10.jpg": C,
    "0002.2.png": B,
    "0002.txt": b"two",
    "0003.txt": b"none",
    "0004.img1.jpeg": A,
    "0004.img2.webp": saved(photo(20, 20), "WEBP"),
    "0004.seg.npy": b"x",
    "0004.txt": b"four",
}


def test_all_images_of_a_tar_sample_are_one_column_in_the_order_of_their_names(
    tmp_path: Path,
) -> None:
    path = tar_of(tmp_path / "a.tar", MEMBERS)
    rows = read_all(path, columns=("txt", "images", "*.jpg")).rows
    assert [r["images"] for r in rows] == [[A], [B, C], [], [A, MEMBERS["0004.img2.webp"]]]
    assert [r["*.jpg"] for r in rows] == [[], [C], [], []]
    assert [r["txt"] for r in rows] == [b"one", b"two", b"none", b"four"]
    named = read_all(path, columns=("jpg", "2.png")).rows
    assert [(r["jpg"], r["2.png"]) for r in named] == [
        (A, None),
        (None, B),
        (None, None),
        (None, None),
    ]
