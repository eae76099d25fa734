"""Laws of the transforms: the row stage is a function of the row, whatever rows it comes with and
wherever it runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlord.job.job import ON_LONG
from overlord.transforms.base import Block, Filter, Map, Meta, RowIds, Tokens
from overlord.transforms.pipeline import Pipeline
from overlord.transforms.tokenize import Tokenize
from overlord.transforms.transform_process import TransformWorker

TYPES = [pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64()]
quick = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

a_row = st.none() | st.lists(st.integers(-2, 300) | st.none(), max_size=9)


def id_column(rows: list[list[int | None] | None], inner: pa.DataType, outer: Any) -> pa.Array:
    unsigned = pa.types.is_unsigned_integer(inner)
    return pa.array(
        [row and [abs(v) if v and unsigned else v for v in row] for row in rows], outer(inner)
    )


id_columns = st.builds(
    id_column,
    st.lists(a_row, max_size=20),
    st.sampled_from(TYPES),
    st.sampled_from([pa.list_, pa.large_list]),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def samples(block: Block, shift: int = 0) -> list[tuple[Any, ...]]:
    """Every sample as (row, part, ids, metadata)."""
    meta = sorted(block.meta)
    return [
        (
            int(block.index[i]) + shift,
            int(block.part[i]),
            block.tokens[i].tolist(),
            *(block.meta[name][i].item() for name in meta),
        )
        for i in range(len(block))
    ]


def in_pieces(p: Pipeline, table: pa.Table, cuts: list[int]) -> tuple[list[Any], list[Any]]:
    found: list[Any] = []
    bad: list[Any] = []
    edges = [0, *sorted({c % (table.num_rows + 1) for c in cuts}), table.num_rows]
    for a, b in pairwise(edges):
        block = p.row_stage(table.slice(a, b - a))
        found += samples(block, a)
        bad += [(i + a, reason) for i, reason in block.bad]
    return found, bad


def by_hand(rows: list[Any], context: int, on_long: str) -> list[tuple[int, int, list[int]]]:
    found = []
    for i, row in enumerate(rows):
        if (
            not row
            or any(v is None or v < 0 for v in row)
            or (on_long in ("quarantine", "drop") and len(row) > context)
        ):
            continue
        pieces = [row[k : k + context] for k in range(0, len(row), context)]
        found += [
            (i, k, piece) for k, piece in enumerate(pieces[:1] if on_long == "truncate" else pieces)
        ]
    return found


@quick
@given(
    id_columns,
    st.integers(1, 8),
    st.sampled_from(ON_LONG),
    st.lists(st.integers(0, 30), max_size=4),
    st.integers(0, 3),
)
def test_ids_give_the_same_samples_in_whatever_batches_they_come(
    column: pa.Array, context: int, on_long: str, cuts: list[int], skip: int
):
    column = column.slice(skip)
    table = pa.table({"tokens": column, "n": pa.array(range(len(column)), pa.int64())})
    p = Pipeline("s", [Tokens(), Meta("n", "n")], seed=0, context=context, on_long=on_long)
    block = p.row_stage(table)
    found = samples(block)
    assert [(row, part, ids) for row, part, ids, *_ in found] == by_hand(
        column.to_pylist(), context, on_long
    )
    assert all(n == row and length == len(ids) for row, _, ids, _, n, length in found)
    dropped = set(block.long.tolist()) if on_long == "drop" else set()
    assert sorted({i for i, _ in block.bad} | {row for row, *_ in found} | dropped) == list(
        range(len(column))
    ), "every row is a sample, dropped or in quarantine"
    whole = sum(
        len(row) for i, row in enumerate(column.to_pylist()) if i not in {i for i, _ in block.bad}
    )
    assert sum(len(ids) for _, _, ids, *_ in found) + int(block.lost.sum()) == whole, (
        "every token is delivered or counted as lost"
    )
    assert not {i for i, _ in block.bad} & {row for row, *_ in found}
    assert in_pieces(p, table, cuts) == (found, block.bad)


@quick
@given(
    st.lists(st.none() | st.text("abcd é😀\n", max_size=20), max_size=15),
    st.lists(st.integers(0, 20), max_size=4),
    st.booleans(),
)
def test_text_gives_the_same_samples_in_whatever_batches_it_comes(
    tokenizer: str, texts: list[str | None], cuts: list[int], ends: bool
):
    from tokenizers import Tokenizer

    table = pa.table({"text": pa.array(texts, pa.string())})
    p = Pipeline(
        "s",
        [Tokenize(tokenizer, bos=7 if ends else None, eos="a" if ends else None)],
        seed=0,
        context=4,
        on_long="split",
    )
    block = p.row_stage(table)
    assert in_pieces(p, table, cuts) == (samples(block), block.bad)
    alone, (before, after) = Tokenizer.from_file(tokenizer), ([7], [1]) if ends else ([], [])
    whole = [
        None if text is None else before + alone.encode(text, add_special_tokens=False).ids + after
        for text in texts
    ]
    assert [(row, part, ids) for row, part, ids, *_ in samples(block)] == by_hand(whole, 4, "split")


def odd(columns: dict[str, Any]) -> Any:
    return columns["n"] % 2 == 1


def add_up(row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {
        "tokens": [*row["tokens"], sum(row["tokens"]) // row["n"], int(rng.integers(100))],
        "n": row["n"],
    }


def spread(columns: dict[str, Any]) -> Any:
    return columns["n"] - columns["n"].min()  # looks at its whole batch


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Pipeline, TransformWorker]]:
    steps = [Filter(odd), Meta("spread", spread), Map(add_up, rows=True, rng=True, holds_lock=True)]
    p = Pipeline("s", steps, seed=3, context=4, on_long="split")
    with TransformWorker(p) as worker:
        yield p, worker


@quick
@given(
    st.lists(st.tuples(st.integers(-3, 9), a_row), max_size=12),
    st.integers(0, 5),
    st.integers(0, 5),
)
def test_a_worker_process_gives_what_the_pipeline_gives(
    both: Any, rows: list[Any], epoch: int, file: int
):
    p, worker = both
    table = pa.table(
        {
            "n": pa.array([n for n, _ in rows], pa.int64()),
            "tokens": pa.array([r for _, r in rows], pa.list_(pa.int64())),
        }
    )
    who = RowIds(epoch, file, np.arange(len(rows)) * 7)
    here, there = p.slice_stage(table, who), worker.slice_stage(table, who)
    assert (here.index.tolist(), here.bad, here.dropped) == (
        there.index.tolist(),
        there.bad,
        there.dropped,
    )
    assert here.table.to_pylist() == there.table.to_pylist()
    assert len(here.index) + len(here.bad) + here.dropped == len(rows)
    one, two = p.row_stage(here.table), worker.row_stage(there.table)
    assert (samples(one), one.bad) == (samples(two), two.bad)
