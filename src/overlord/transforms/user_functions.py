"""Execution of user functions over the rows of a stage, and checks of their results.

A failing row never affects the others. An invalid result of a function over a whole slice is a
fault of the function, not of a row: it raises ``TransformError``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.checks import where_raised
from overlord.errors import TransformError
from overlord.sample import Column, Ragged
from overlord.transforms.base import Transform
from overlord.transforms.columns import (
    Bad,
    RowFrame,
    check_meta,
    from_values,
    numbers_of,
    plain_numbers,
    read_meta,
    retyped,
    to_columns,
    to_rows,
    unfit_rows,
)


def run_whole(
    frame: RowFrame, t: Transform, fn: Callable[..., Any], check: Callable[[Any, int], Any]
) -> Any:
    """Call ``fn`` once with all rows and return its checked result.

    If ``fn`` raises, it is called with each row alone. The rows for which it raises again are
    recorded as bad and removed. ``check(result, rows)`` validates a result; its TransformError ends
    the job, since an invalid result is a fault of the function and not of a row.
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
    """Return rows as columns in order of first appearance; a missing value is None."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def run_each(
    frame: RowFrame,
    t: Transform,
    fn: Callable[..., Any],
    check: Callable[[Any], Any],
    generators: Iterator[Any] | None = None,
) -> list[Any]:
    """Call ``fn`` row by row, and return the results that ``check`` accepts.

    A row for which ``fn`` or ``check`` raises is recorded as bad and removed.
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
    """Yield rows as dicts, or as functions that return a dict if some text is not UTF-8.

    Each function converts one row, so that only invalid rows raise an error.
    """
    try:
        yield from to_rows(table)
    except UnicodeDecodeError:
        for i in range(table.num_rows):
            yield lambda i=i: to_rows(table.slice(i, 1))[0]


def error_text(fault: BaseException) -> str:
    text = f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__
    return (text if len(text) <= 200 else text[:197] + "...") + where_raised(fault)


def value_per_row(
    source: str, t: Transform, kinds: str, expected: str
) -> Callable[[Any, int], np.ndarray]:
    """Return a check of a result that has one value per row, of one of the numpy ``kinds``."""

    def check(result: Any, rows: int) -> np.ndarray:
        try:
            values = np.asarray(result)
        except ValueError:  # lists of different lengths
            problem = f"expected {rows} {expected}, one per row, got {type(result).__name__}"
            remedy = "return one value for each row, in order"
            raise TransformError(source, repr(t), problem, remedy) from None
        if values.shape != (rows,) or values.dtype.kind not in kinds:
            problem = (
                f"expected {rows} {expected}, one per row, got {values.dtype} of shape "
                f"{values.shape}"
            )
            remedy = "return one value for each row, in order"
            raise TransformError(source, repr(t), problem, remedy)
        return values

    return check


def meta_per_row(source: str, t: Transform) -> Callable[[Any, int], Any]:
    """Return a check of a result that has one number, or one list of numbers, per row."""
    numbers = value_per_row(source, t, "biuf", "numbers")

    def check(result: Any, rows: int) -> Any:
        if isinstance(result, Ragged):
            result = [result[i] for i in range(len(result))]
        lists = isinstance(result, (list, tuple)) and any(
            isinstance(v, (list, tuple, np.ndarray)) for v in result
        )
        if lists and len(result) == rows:
            return list(result)
        values = numbers(result, rows)
        # An array of all values would round large whole numbers.
        return result if isinstance(result, (list, tuple)) else values

    return check


def columns_per_row(source: str, t: Transform) -> Callable[[Any, int], Mapping[str, Any]]:
    """Return a check of a result that is a dict of columns with one value per row."""

    def check(result: Any, rows: int) -> Mapping[str, Any]:
        plain = isinstance(result, Mapping) and bool(result)
        if not plain or not all(
            isinstance(name, str) and hasattr(c, "__len__") for name, c in result.items()
        ):
            problem = f"expected a dict of columns, got {type(result).__name__}"
            raise TransformError(source, repr(t), problem, "return {name: array or list, ...}")
        if wrong := [f"{name!r}: {len(c)}" for name, c in result.items() if len(c) != rows]:
            problem = f"expected {rows} rows in every column, got {', '.join(wrong)}"
            raise TransformError(source, repr(t), problem, "drop rows with Filter, not with Map")
        checked: Mapping[str, Any] = result
        return checked

    return check


def meta_values(made: Any, name: str) -> tuple[Column, Bad]:
    """Return the results of a user function as a column of numbers or lists, and the bad rows."""
    if isinstance(made, np.ndarray):
        return plain_numbers(made, name, {})
    if not any(isinstance(v, list | tuple | np.ndarray) for v in made):
        return numbers_of(made, name)
    values, misfits = from_values(made, name)
    table = pa.table({name: values})
    unfit, retype = unfit_rows(table, name, check_meta)
    if retype:
        table = retyped(table, name, unfit)
    column, bad = read_meta(table, name)
    return column, bad | unfit | misfits
