"""Ids that are used as Arrow has them equal those that are read one by one."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from overlord.transforms.columns import plain_ids, read_ids

ROWS = [[1, 2, 3], [], [127], [4, 5]]
PLAIN = ("int8", "uint8", "int16", "uint16", "int32", "uint32")


def table_of(rows: list[list[int] | None], kind: pa.DataType) -> pa.Table:
    return pa.table({"other": range(len(rows)), "ids": pa.array(rows, kind)})


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("make", [pa.list_, pa.large_list])
@pytest.mark.parametrize(("first", "n"), [(0, 4), (1, 3), (2, 1)])
def test_ids_are_those_of_the_column_without_a_copy(name: str, make, first: int, n: int) -> None:
    table = table_of(ROWS, make(getattr(pa, name)())).slice(first, n)
    found = plain_ids(table, "ids")
    assert found is not None
    expected, bad = read_ids(table, "ids")
    assert not bad
    assert [found[i].tolist() for i in range(n)] == ROWS[first : first + n]
    assert (found.held.dtype, found.nbytes) == (expected.values.dtype, expected.nbytes)
    data = table.column("ids").chunk(0).values.buffers()[1]
    assert data.address <= found.held.ctypes.data < data.address + data.size


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([[1], None], pa.list_(pa.int32())),
        ([[1, None]], pa.list_(pa.int32())),
        ([[1], [-1]], pa.list_(pa.int32())),
        ([[1], [-1]], pa.list_(pa.int8())),
        ([[2**31]], pa.list_(pa.uint32())),
        ([[1]], pa.list_(pa.int64())),
        ([[1.0]], pa.list_(pa.float32())),
        ([[1]], pa.list_(pa.int32(), 1)),
        ([[]], pa.list_(pa.int32())),
        ([], pa.list_(pa.int32())),
        ([1], pa.int32()),
    ],
)
def test_a_column_that_needs_a_closer_look_gets_one(rows, kind) -> None:
    assert plain_ids(table_of(rows, kind), "ids") is None


def test_a_missing_column_or_one_of_several_pieces_is_left_to_others() -> None:
    table = table_of(ROWS, pa.list_(pa.int32()))
    assert plain_ids(table, "tokens") is None
    assert plain_ids(pa.concat_tables([table, table]), "ids") is None


@pytest.mark.parametrize(
    ("name", "last"), [("uint8", 255), ("uint16", 65_535), ("uint32", 2**31 - 1)]
)
def test_the_largest_ids_are_ids(name: str, last: int) -> None:
    found = plain_ids(table_of([[0, last]], pa.list_(getattr(pa, name)())), "ids")
    assert found is not None
    assert found[0].tolist() == [0, last]
    assert np.shares_memory(found.held, found[0])
