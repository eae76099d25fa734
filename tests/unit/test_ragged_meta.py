"""Metadata with several values a sample (images), from the file to the strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import overlord as ov
from overlord.errors import PlanError, TransformError
from overlord.sample import Ragged, join_rows, no_items
from overlord.transforms.base import Block, Filter, Map, Meta, RowIds, Select, Tokens
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.transform_process import TransformWorker
from tests.corpus import FORMATS, write_rows
from tests.worlds import Rows, decode


def run(*transforms: Any, context: int = 1000, on_long: str = "truncate", **columns: Any) -> Block:
    p = Pipeline("web", transforms, seed=0, context=context, on_long=on_long)
    table = pa.table(columns)
    return p.row_stage(p.slice_stage(table, RowIds(0, 0, np.arange(table.num_rows))).table)


def lists(column: Any) -> list[list[Any]]:
    assert isinstance(column, Ragged)
    return [column[i].tolist() for i in range(len(column))]


def plain(column: Any) -> list[Any]:
    return lists(column) if isinstance(column, Ragged) else column.tolist()


IMAGES = Meta("image_patches", "image_patches")
KINDS = [
    pa.list_(pa.int32()),
    pa.large_list(pa.uint8()),
    pa.list_(pa.float32()),
    pa.list_(pa.int64()),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_column_gives_a_ragged_column(kind: pa.DataType) -> None:
    block = run(
        Tokens(),
        IMAGES,
        tokens=[[1, 2], [3], [4, 5, 6]],
        image_patches=pa.array([[7, 8], [], [9]], kind),
    )
    assert lists(block.meta["image_patches"]) == [[7, 8], [], [9]]
    assert block.meta["image_patches"].values.dtype == (
        np.float64 if "float" in str(kind) else np.int64
    )  # type: ignore[union-attr]
    assert block.meta["tokens"].tolist() == [2, 1, 3]  # type: ignore[union-attr]


def test_lists_of_nothing_at_all_and_of_fixed_size_are_lists_too() -> None:
    assert lists(
        run(Tokens(), IMAGES, tokens=[[1], [2]], image_patches=[[], []]).meta["image_patches"]
    ) == [[], []]
    pairs = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))
    assert lists(
        run(Tokens(), IMAGES, tokens=[[1], [2]], image_patches=pairs).meta["image_patches"]
    ) == [[1, 2], [3, 4]]


def test_bad_items_are_quarantined_with_their_reason_and_spoil_no_other_row() -> None:
    block = run(
        Tokens(),
        IMAGES,
        tokens=[[1]] * 6,
        image_patches=[[1], None, [2, None], [-3], [float("nan")], [4, 5]],
    )
    assert lists(block.meta["image_patches"]) == [[1], [4, 5]]
    assert block.index.tolist() == [0, 5]
    assert dict(block.bad) == {
        1: "image_patches is null or missing",
        2: "image_patches holds a null",
        3: "image_patches holds a number below 0",
        4: "image_patches holds a number that is not finite, or beyond 2**53",
    }


def test_lists_of_text_are_refused_as_text_is() -> None:
    p = Pipeline("web", [Tokens(), IMAGES], seed=0, context=9, on_long="truncate")
    (_, reason) = p.slice_stage(
        pa.table({"tokens": [[1]], "image_patches": [["a"]]}), RowIds(0, 0, np.arange(1))
    ).bad[0]
    assert "column 'image_patches': expected numbers, got list<item: string>" in reason.replace(
        "element: ", "item: "
    )


@pytest.mark.parametrize(
    ("on_long", "index", "items"),
    [
        ("truncate", [0, 1, 2], [[7, 8], [], [9]]),
        ("split", [0, 0, 1, 2, 2, 2], [[7, 8], [], [], [9], [], []]),
        ("quarantine", [1], [[]]),
    ],
)
def test_a_sample_that_is_cut_keeps_its_items_on_its_first_piece(
    on_long: str, index: list[int], items: list[list[int]]
) -> None:
    tokens = [[1] * 3, [2], [3] * 5]
    block = run(
        Tokens(),
        IMAGES,
        Meta("n", "n"),
        tokens=tokens,
        image_patches=[[7, 8], [], [9]],
        n=[1, 2, 3],
        context=2,
        on_long=on_long,
    )
    assert block.index.tolist() == index
    assert lists(block.meta["image_patches"]) == items
    assert block.meta["n"].tolist() == [i + 1 for i in index], (
        "a number is that of the whole sample"
    )  # type: ignore[union-attr]


def odd(columns: dict[str, Any]) -> list[bool]:
    return [n % 2 == 1 for n in columns["n"]]


def grown(columns: dict[str, Any]) -> dict[str, Any]:
    return {"tokens": columns["tokens"], "n": columns["n"] + 1}


def test_items_survive_filters_maps_and_selects_behind_them() -> None:
    columns = {
        "tokens": [[1], [2], [3], [4]],
        "n": [0, 1, 2, 3],
        "image_patches": [[5], [6, 7], [8], []],
    }
    block = run(IMAGES, Filter(odd), Map(grown), Select("tokens"), **columns)
    assert (block.index.tolist(), lists(block.meta["image_patches"])) == ([0, 1], [[6, 7], []])


def patches(columns: dict[str, Any]) -> list[list[int]]:
    return [[s * s for s in sides] for sides in columns["sides"]]


def patches_of(row: dict[str, Any]) -> Any:
    return np.array(row["sides"]) ** 2 if row["sides"] else []


def fails_on_three(columns: dict[str, Any]) -> list[list[int]]:
    if any(3 in sides for sides in columns["sides"]):
        raise ValueError("three")
    return patches(columns)


@pytest.mark.parametrize(
    "meta",
    [
        Meta("p", patches),
        Meta("p", patches_of, rows=True),
        Meta("p", lambda c: Ragged.from_rows(patches(c))),
    ],
)
def test_a_function_may_give_lists(meta: Meta) -> None:
    block = run(meta, tokens=[[1], [2], [3]], sides=[[2, 3], [], [4]])
    assert lists(block.meta["p"]) == [[4, 9], [], [16]]


def test_a_function_that_fails_on_a_row_loses_that_row_alone() -> None:
    block = run(Meta("p", fails_on_three), tokens=[[1], [2], [3]], sides=[[2], [3], [4, 5]])
    assert (block.index.tolist(), lists(block.meta["p"])) == ([0, 1], [[4], [16, 25]])
    p = Pipeline("web", [Meta("p", fails_on_three)], seed=0, context=9, on_long="truncate")
    staged = p.slice_stage(
        pa.table({"tokens": [[1], [2]], "sides": [[2], [3]]}), RowIds(0, 0, np.arange(2))
    )
    [(row, reason)] = staged.bad
    assert row == 1
    assert reason.startswith(f"Meta('p', fails_on_three): ValueError: three (at {__file__}:")


def test_a_function_must_give_one_list_a_row() -> None:
    with pytest.raises(TransformError, match="expected 2 numbers, one per row"):
        run(Meta("p", lambda columns: [[1], [2], [3]]), tokens=[[1], [2]])


def test_tokens_and_offsets_that_do_not_match_the_items_are_quarantined() -> None:
    block = run(
        Tokens(),
        IMAGES,
        Meta("image_tokens", "image_tokens"),
        Meta("image_offset", "image_offset"),
        tokens=[[1], [2], [3]],
        image_patches=[[4, 4], [8], []],
        image_tokens=[[1, 1], [2], [3]],
        image_offset=[[0], [0], []],
    )
    assert block.index.tolist() == [1]
    assert dict(block.bad) == {
        0: "image_offset: expected 2 numbers, one per item of image_patches, got 1",
        2: "image_tokens: expected 0 numbers, one per item of image_patches, got 1",
    }


def slow(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "tokens": columns["tokens"]}


def test_items_come_from_a_worker_process_as_they_do_from_this_one() -> None:
    p = Pipeline(
        "web",
        [Map(slow, holds_lock=True), IMAGES, Meta("n", "n")],
        seed=0,
        context=2,
        on_long="split",
    )
    table = pa.table({"tokens": [[1, 2, 3], [4]], "image_patches": [[5, 6], []], "n": [1, 2]})
    with TransformWorker(p) as worker:
        for t in (table, table.slice(0, 0)):
            staged = worker.slice_stage(t, RowIds(0, 0, np.arange(t.num_rows)))
            one, two = p.row_stage(staged.table), worker.row_stage(staged.table)
            assert list(one.meta) == list(two.meta)
            assert [plain(c) for c in one.meta.values()] == [plain(c) for c in two.meta.values()]
            assert plain(one.meta["image_patches"]) == ([[5, 6], [], []] if t.num_rows else [])


# From files to the buffer that a strategy gets


def samples(n: int) -> list[dict[str, Any]]:
    return [
        {"n": k, "tokens": [k] * (1 + k % 5), "image_patches": [k + j for j in range(k % 4)]}
        for k in range(n)
    ]


def job(
    path: Any, into: list[ov.Buffer], *, tar: bool = False, text: bool = True, **changes: Any
) -> ov.Job:
    seen = ov.Source(
        "seen",
        path,
        transforms=[*([ov.Map(decode, rows=True)] if tar else []), ov.Tokens(), IMAGES],
        epochs=1,
    )
    plain = ov.Source(
        "text",
        Rows([{"tokens": [900 + k] * 3} for k in range(12)]),
        transforms=[ov.Tokens()],
        epochs=1,
    )

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        into.append(buffer)
        return ov.strategy.llm_balance(buffer, place)

    settings = {
        "name": "images",
        "sources": [seen, plain] if text else [seen],
        "place": ov.ClientPlaceTree(dp=2),
        "strategy": strategy,
        "batch": ov.Batch(samples=6, context=32),
        "slice_rows": 4,
    }
    return ov.Job(**{**settings, **changes})


def played(
    make: Callable[[list[ov.Buffer]], ov.Job], **options: Any
) -> list[list[tuple[ov.SampleId, list[int]]]]:
    """Every step's samples with their images, as the strategy saw them."""
    seen: list[ov.Buffer] = []
    done = ov.simulate(make(seen), seed=5, check=True, **options)
    assert done.error is None
    return [[(b[i], b.column("image_patches")[i].tolist()) for i in range(len(b))] for b in seen]  # type: ignore[union-attr]


@pytest.mark.parametrize("format", FORMATS)
def test_images_reach_the_strategy_from_every_format_whatever_the_number_of_loaders(
    format: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path, format, samples(30), files=3, row_group_size=5)
    steps = played(lambda into: job(path, into, tar=format == "tar"))
    met = {sample: images for step in steps for sample, images in step}
    assert len(met) == 42
    assert all(images == [] for sample, images in met.items() if sample.source == "text"), (
        "text has no images"
    )
    assert sorted(images for sample, images in met.items() if sample.source == "seen") == sorted(
        r["image_patches"] for r in samples(30)
    )
    assert played(lambda into: job(path, into, tar=format == "tar"), loaders={"seen": 3}) == steps


def test_slices_of_lines_may_differ_in_what_their_lists_hold(tmp_path: Path) -> None:
    kinds: list[Any] = [[], [1, 2], [2.5], [], [3]]  # each for a whole slice of four rows
    rows = [{"n": k, "tokens": [k], "image_patches": kinds[k // 4]} for k in range(20)]
    path = write_rows(tmp_path, "jsonl", rows, files=1)
    for loaders in (1, 2):
        steps = played(
            lambda into: job(path, into, text=False, chunk_bytes=200), loaders={"seen": loaders}
        )
        assert sorted(images for step in steps for _, images in step) == sorted(
            row["image_patches"] for row in rows
        )


def test_a_step_without_a_single_image_source_has_no_images_and_plans_all_the_same() -> None:
    seen: list[ov.Buffer] = []

    def mixture(step: int, feedback: Any) -> dict[str, float]:
        return {"text": 1.0} if step == 1 else {"seen": 1.0}

    made = job(Rows(samples(20)), seen, mixture=mixture, until=3)
    done = ov.simulate(made, seed=1)
    assert done.error is None
    assert [b.absent for b in seen] == [(), ("image_patches",), ()]
    assert "image_patches" not in seen[1].meta
    assert lists(seen[1].column("image_patches")) == [[]] * 6
    images = ov.DGraph.from_buffer(seen[1], made.place).mix().select("image_patches")
    assert (len(images.sample), images.items) == (0, True)
    plan = ov.strategy.vlm_hybrid(seen[1], made.place)
    assert len(plan.routes("encoder")) == 0


def test_buffers_cannot_be_written_to() -> None:
    seen: list[ov.Buffer] = []
    ov.simulate(job(Rows(samples(20)), seen, until=1), seed=1)
    column = seen[0].column("image_patches")
    assert isinstance(column, Ragged)
    for array in (column.values, column.offsets):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


# Buffers by hand


def test_a_source_by_hand_without_a_list_column_has_no_items_but_numbers_must_be_there() -> None:
    batch = ov.Batch(samples=4, context=32)
    made = ov.Buffer.from_columns(
        {"text": {"tokens": [3, 4]}, "seen": {"tokens": [5, 6], "p": [[1, 2], []]}}, batch=batch
    )
    assert lists(made.column("p")) == [[], [], [1, 2], []]
    assert made.column("p").values.dtype == np.int64  # type: ignore[union-attr]
    with pytest.raises(PlanError, match="source 'text': expected metadata 'stars', got none"):
        ov.Buffer.from_columns(
            {"text": {"tokens": [3]}, "seen": {"tokens": [5], "stars": [1]}}, batch=batch
        )
    with pytest.raises(PlanError, match="expected columns of one length"):
        ov.Buffer.from_columns({"seen": {"tokens": [5], "p": [[1], [2]]}}, batch=batch)


def test_columns_are_joined_and_numbers_among_lists_count_as_lists_of_one() -> None:
    assert join_rows([np.array([1]), np.array([2, 3])]).tolist() == [1, 2, 3]  # type: ignore[union-attr]
    mixed = join_rows([np.array([7, 8]), Ragged.from_rows([[1, 2], []]), no_items(1)])
    assert lists(mixed) == [[7], [8], [1, 2], [], []]
