"""Laws of columns that are spans of other memory: they equal the copies that they stand for."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlord.content import Content, RaggedParts, RaggedSpans, spans_of
from overlord.sample import Ragged
from overlord.sources.tables import rows_of
from overlord.transforms.base import Block, Tokens
from overlord.transforms.pipeline import Pipeline

ROWS = st.lists(st.lists(st.integers(0, 200), max_size=6), max_size=6)
KINDS = st.sampled_from([np.uint16, np.uint32, np.int64])


@st.composite
def columns(draw: st.DrawFn) -> Ragged:
    """Return a column of adjacent rows, or of spans of one, in any order and some repeated."""
    kind = draw(KINDS)
    whole = Ragged.from_rows([np.array(row, kind) for row in draw(ROWS)], kind)
    first = draw(st.integers(0, len(whole)))
    if draw(st.booleans()):
        return whole.slice(first, len(whole))
    picks = st.lists(st.integers(0, len(whole) - 1), max_size=6) if len(whole) else st.just([])
    rows, spans = np.array(draw(picks), np.int64), spans_of(whole)
    return RaggedSpans(spans.held, spans.starts[rows], spans.stops[rows])


def plain(column: Ragged) -> tuple[Any, list[Any]]:
    return column.values.dtype, [column[i].tolist() for i in range(len(column))]


@given(st.lists(columns(), min_size=1, max_size=4), st.data())
def test_parts_equal_their_concatenation(parts: list[Ragged], data: st.DataObject) -> None:
    joined, wanted = RaggedParts(parts), Ragged.concat([Ragged(p.values, p.offsets) for p in parts])
    assert joined.lengths.tolist() == wanted.lengths.tolist()
    assert joined.nbytes == sum(p.nbytes for p in parts)
    assert (len(joined), plain(joined)) == (len(wanted), plain(wanted))
    rows = data.draw(st.permutations(range(len(wanted))))
    assert plain(joined.take(np.array(rows, np.int64))) == plain(wanted.take(np.array(rows, int)))
    assert plain(pickle.loads(pickle.dumps(joined))) == plain(wanted)


@given(columns(), st.data())
def test_spans_equal_their_copy(column: Ragged, data: st.DataObject) -> None:
    wanted = Ragged(column.values, column.offsets)
    a = data.draw(st.integers(0, len(column)))
    b = data.draw(st.integers(a, len(column)))
    assert plain(column.slice(a, b)) == plain(wanted.slice(a, b))
    assert plain(column.compact()) == plain(wanted.compact())
    assert plain(pickle.loads(pickle.dumps(column))) == plain(wanted)
    assert Content(column).bytes_before(b) == Content(wanted).slice(0, b).nbytes
    adjacent = Content(column).adjacent().tokens
    assert not isinstance(adjacent, RaggedSpans)
    assert plain(adjacent) == plain(wanted)


IDS = st.none() | st.lists(st.integers(-1, 300), max_size=9)


@pytest.mark.parametrize("on_long", ["truncate", "split", "drop", "quarantine"])
@given(st.lists(IDS, min_size=1, max_size=8), st.data())
def test_a_block_in_place_equals_the_block_of_copied_rows(
    on_long: str, ids: list[list[int] | None], data: st.DataObject
) -> None:
    """For every row, good, empty, null, out of range or too long, in any order."""
    kind = data.draw(st.sampled_from([pa.int32(), pa.int64(), pa.int16()]))
    table = pa.table({"ids": pa.array(ids, pa.list_(kind))})
    pipeline = Pipeline("s", [Tokens("ids")], seed=0, context=4, on_long=on_long)
    rows = np.array(
        data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, unique=True)), np.int64
    )
    block_of = pipeline.blocks_of(table)
    assert block_of is not None
    found, wanted = block_of(rows), pipeline.row_stage(rows_of(table, rows))
    assert shown(found) == shown(wanted)


def shown(block: Block) -> dict[str, Any]:
    meta = {name: np.asarray(column).tolist() for name, column in block.meta.items()}
    tokens = [block.tokens[i].tolist() for i in range(len(block.tokens))]
    return {
        "index": block.index.tolist(),
        "part": block.part.tolist(),
        "tokens": tokens,
        "kind": block.tokens.values.dtype if tokens else None,
        "meta": meta,
        "bad": block.bad,
        "long": (block.long.tolist(), block.lost.tolist()),
    }
