"""Conversion of Python values and foreign tables to valid Arrow tables.

Rows that do not fit are reported, not raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.sources.base import NO_ROWS, RawSlice, ReadOptions, check_refused
from overlord.sources.mixed_columns import column_of

Bad = list[tuple[int, str]]


def table_of(
    values: dict[str, list[Any]], n: int, *, decoded: bool = False
) -> tuple[pa.Table, Bad]:
    """Build a table of n rows that holds every value unchanged.

    Rows with a value that no column can hold are bad. ``decoded``: the values come from a JSON
    decoder.
    """
    arrays, bad = {}, dict[int, str]()
    for name, column in values.items():
        arrays[name], misfits = column_of(column, decoded=decoded)
        for i, reason in misfits.items():
            bad.setdefault(i, f"column {name!r}: {reason}")
    table = pa.table(arrays) if arrays else empty(n)
    if not bad:
        return table, []
    return drop_rows(table, sorted(bad)), sorted(bad.items())


def empty(n: int = 0, names: Sequence[str] | None = None) -> pa.Table:
    """Return a table of n rows of nulls; without names it has no columns."""
    return pa.table({name: pa.nulls(n) for name in ("_", *(names or ()))}).select(list(names or ()))


def columns_of(
    rows: Sequence[dict[str, Any]], columns: Sequence[str] | None
) -> dict[str, list[Any]]:
    """Return dicts as columns.

    Without ``columns``, names are in order of first appearance. A missing value is None.
    """
    names = list(dict.fromkeys(k for row in rows for k in row)) if columns is None else columns
    return {str(name): [row.get(name) for row in rows] for name in names}


def check_values(columns: dict[str, list[Any]], options: ReadOptions) -> None:
    """Refuse rows with a value in a refused column.

    Remove refused columns that the job did not request.
    """
    for name in options.refused:
        if any(value is not None for value in columns.get(name, ())):
            check_refused((name,), options)
        if options.columns is not None and name not in options.columns:
            columns.pop(name, None)


def without_invalid_rows(
    table: pa.Table, max_sample_bytes: int, every_column: bool = False
) -> tuple[pa.Table, Bad]:
    """Remove rows with text that is not UTF-8 and rows that are too large. ``table`` may be a view.

    ``every_column``: offsets inside the arrays come from the file, so every column is validated.
    """
    bad: dict[int, str] = {}
    doubtful = [i for i, f in enumerate(table.schema) if every_column or _has_text(f.type)]
    if doubtful:
        view = table.select(doubtful)
        try:
            view.validate(full=True)
        except pa.ArrowInvalid:
            bad.update(_broken_rows(view))
    if bad or (
        table.get_total_buffer_size() > max_sample_bytes and table.nbytes > max_sample_bytes
    ):
        for i in range(table.num_rows):
            if i not in bad and (size := table.slice(i, 1).nbytes) > max_sample_bytes:
                bad[i] = too_large(size, max_sample_bytes)
    return (drop_rows(table, sorted(bad)), sorted(bad.items())) if bad else (table, [])


def drop_rows(table: pa.Table, rows: list[int]) -> pa.Table:
    """Return the other rows as views of the runs between.

    ``take`` would follow the offsets of the removed rows and crash.
    """
    edges = [-1, *rows, table.num_rows]
    return pa.concat_tables([table.slice(a + 1, b - a - 1) for a, b in pairwise(edges)])


def _broken_rows(view: pa.Table) -> dict[int, str]:
    bad: dict[int, str] = {}
    for name in view.column_names:
        for i in range(view.num_rows):
            try:
                view.slice(i, 1).select([name]).validate(full=True)
            except pa.ArrowInvalid as error:
                reason = (
                    "bytes that are not UTF-8"
                    if "UTF8" in str(error)
                    else str(error).rpartition("Invalid: ")[2]
                )
                bad.setdefault(i, f"column {name!r}: {reason}")
    return bad


@lru_cache(maxsize=256)  # called for every slice
def _has_text(kind: pa.DataType) -> bool:
    if pa.types.is_nested(kind):
        return any(_has_text(kind.field(k).type) for k in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return _has_text(kind.value_type)
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def too_large(size: int, limit: int) -> str:
    return f"the row has {size} bytes, the source's max_sample_bytes is {limit}"


def compact(table: pa.Table) -> pa.Table:
    """Copy the rows into their own memory, so that their row group or file can be freed."""
    return (
        pa.table([_copied(column) for column in table.columns], schema=table.schema)
        if table.num_columns
        else table
    )


def _copied(column: pa.ChunkedArray) -> pa.Array:
    pieces = [c for c in column.chunks if len(c)]
    if not pieces:
        return pa.nulls(0, column.type)
    # concat_arrays returns a single array as it is; two halves force a copy.
    if len(pieces) == 1 and len(pieces[0]) > 1:
        pieces = [pieces[0].slice(0, 1), pieces[0].slice(1)]
    try:
        return pa.concat_arrays(pieces)
    except pa.ArrowInvalid:  # more than 2 GB of text, or differing dictionaries
        return column


def slice_of(first_row: int, n: int, table: pa.Table, bad: Bad, last: bool) -> RawSlice:
    """Return a slice of consecutively numbered rows."""
    return RawSlice(np.arange(first_row, first_row + n, dtype=np.int64), table, bad, last)


def unreadable_slice(first_row: int, n: int, table: pa.Table, reason: str, last: bool) -> RawSlice:
    """Return a slice without a readable row; ``table`` is an empty one with the right columns."""
    return slice_of(first_row, n, table, [(i, reason) for i in range(n)], last)


def no_rows(options: ReadOptions, skip: int, reason: str = NO_ROWS) -> RawSlice:
    """Return the only slice of a chunk without rows, or the empty one after it."""
    blank = empty(0, options.columns)
    return slice_of(1, 0, blank, [], True) if skip else unreadable_slice(0, 1, blank, reason, True)
