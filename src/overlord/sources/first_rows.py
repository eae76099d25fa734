"""Check of the first rows of a file whose format has no schema, before a job reads it.

JSON lines, tar shards and Python objects have no schema. A source without the column of its token
ids or texts would otherwise fail only after ``max_bad`` quarantined rows.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from overlord.sources.base import BadFile, Chunks, File, Format, ReadOptions, missing_columns_error
from overlord.sources.python_objects import NO_DICT
from overlord.sources.tables import type_name

if TYPE_CHECKING:
    from overlord.sources.files import Files

ROWS = 32  # rows that are read at most; usually the first one has every column


def check_first_rows(
    fmt: Format, access: Files, file: File, chunks: Chunks, options: ReadOptions
) -> None:
    """Raise BadFile if no row at the start of a file has a column of ``options.required``.

    It is raised for rows of a dataset that are not dicts, too.

    Unreadable rows are skipped: they are quarantined later. A factory is not called, since its
    start may be slow.
    """
    empty = not len(chunks.unit) or int(chunks.unit[0]) < 0
    if empty or not options.required or fmt.name == "factory":
        return
    one = replace(options, columns=options.required, refused=(), slice_rows=1, required=())
    left = set(options.required)
    with closing(_read(fmt, access, file, chunks, one)) as slices:
        for raw in islice(slices, ROWS):
            left -= {name for name in left if raw.table.num_rows and _present(raw.table, name)}
            if not left:
                return
    with closing(
        _read(fmt, access, file, chunks, replace(one, columns=None, slice_rows=ROWS))
    ) as slices:
        first = next(slices)
    schema, reasons = first.table.schema, [reason for _, reason in first.bad]
    if len(reasons) == len(first.row) and all(why.startswith(NO_DICT) for why in reasons):
        raise BadFile(f"{reasons[0]} in each of the first {len(reasons)} rows", "yield dicts")
    missing = [name for name in options.required if name in left and name not in schema.names]
    if missing and schema.names:
        raise missing_columns_error(missing, {f.name: type_name(f.type) for f in schema})


def _read(fmt: Format, access: Files, file: File, chunks: Chunks, options: ReadOptions) -> Any:
    return fmt.read(access, file, chunks, 0, options)


def _present(table: Any, name: str) -> bool:
    return name in table.schema.names and not table.column(name).is_null().to_pylist()[0]
