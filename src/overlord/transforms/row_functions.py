"""Rows inside a stage, and the execution of user functions over them.

A failing row never affects the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.sources.arrow_numpy import arrow_of
from overlord.transforms.base import Transform
from overlord.transforms.columns import Bad, to_columns, to_rows, without_dictionaries
from overlord.user_code import where_raised


class RowFrame:
    """Rows inside a stage: their input rows, and the outcome of the removed ones."""

    __slots__ = ("at", "bad", "dropped", "images", "index", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table, self.index = without_dictionaries(table), np.arange(table.num_rows)
        self.bad: list[tuple[int, str]] = []
        self.dropped = 0
        self.at = -1  # the row that a user function is processing; -1: all rows
        self.images: Any = None  # images of the rows (image_rows.PlannedImages), once they are read

    def put(self, name: str, values: pa.Array) -> None:
        at = self.table.column_names.index(name) if name in self.table.column_names else -1
        self.table = (
            self.table.append_column(name, values)
            if at < 0
            else self.table.set_column(at, name, values)
        )

    def report(self, bad: Mapping[int, str]) -> np.ndarray:
        """Record the bad rows and return the others, as positions in the table."""
        self.bad += [(int(self.index[i]), reason) for i, reason in bad.items()]
        mask = np.ones(self.table.num_rows, bool)
        mask[list(bad)] = False
        return np.flatnonzero(mask)

    def drop(self, bad: Mapping[int, str]) -> None:
        if bad:
            self.take(self.report(bad))

    def drop_all(self, reason: str) -> None:
        self.drop(dict.fromkeys(range(self.table.num_rows), reason))

    def keep(self, mask: np.ndarray) -> None:
        if not mask.all():
            self.take(np.flatnonzero(mask))

    def take(self, rows: np.ndarray) -> None:
        self.table, self.index = self.table.take(arrow_of(rows)), self.index[rows]


def run_whole(
    frame: RowFrame, t: Transform, fn: Callable[..., Any], check: Callable[[Any, int], Any]
) -> Any:
    """Call ``fn`` with all rows.

    If it raises, call it with each row alone and report the rows on which it raises.
    ``check(result, rows)`` validates a result. An invalid result is a fault of the function, not of
    a row, and ends the job.
    """
    try:
        result = fn(to_columns(frame.table))
    except MemoryError:
        raise
    except Exception:
        return _run_alone(frame, t, fn, check)
    return check(result, frame.table.num_rows)


def _run_alone(
    frame: RowFrame, t: Transform, fn: Callable[..., Any], check: Callable[[Any, int], Any]
) -> Any:
    bad: Bad = {}
    alone = []
    for i in range(frame.table.num_rows):
        frame.at = i
        try:
            result = fn(to_columns(frame.table.slice(i, 1)))
        except MemoryError:
            raise
        except Exception as fault:
            bad[i] = f"{t!r}: {error_text(fault)}"
        else:
            alone.append(check(result, 1))
    frame.at = -1
    frame.drop(bad)
    if alone and isinstance(alone[0], Mapping):
        return join_rows([{name: values[0] for name, values in row.items()} for row in alone])
    return [values[0] for values in alone]


def join_rows(rows: list[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return rows as columns, in order of first appearance; a missing value is null."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def run_each(
    frame: RowFrame,
    t: Transform,
    fn: Callable[..., Any],
    check: Callable[[Any], Any],
    generators: Iterator[Any] | None = None,
) -> list[Any]:
    """Call ``fn`` row by row.

    A row that fails or returns an invalid value is reported and removed.
    """
    bad: Bad = {}
    results = []
    for i, row in enumerate(_rows(frame.table)):
        frame.at = i
        rng = next(generators) if generators is not None else None
        try:
            row = row() if callable(row) else row
            results.append(check(fn(row) if rng is None else fn(row, rng)))
        except MemoryError:
            raise
        except Exception as fault:
            bad[i] = f"{t!r}: {error_text(fault)}"
    frame.at = -1
    frame.drop(bad)
    return results


def _rows(table: pa.Table) -> Iterator[Any]:
    """Yield rows as dicts.

    If the table does not convert (text that is not UTF-8), yield calls that convert one row each.
    """
    try:
        yield from to_rows(table)
    except UnicodeDecodeError:
        for i in range(table.num_rows):
            yield lambda i=i: to_rows(table.slice(i, 1))[0]


def error_text(fault: BaseException) -> str:
    text = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
    return (text if len(text) <= 200 else text[:197] + "...") + where_raised(fault)
