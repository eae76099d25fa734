"""Validation of the results of user functions over whole slices.

An invalid result is a fault of the function, not of a row: it raises TransformError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.errors import TransformError
from overlord.sample import Column, Ragged
from overlord.transforms.base import Transform
from overlord.transforms.columns import (
    Bad,
    check_meta,
    from_values,
    numbers_of,
    plain_numbers,
    read_meta,
    retyped,
    unfit_rows,
)


def value_per_row(
    source: str, t: Transform, kinds: str, expected: str
) -> Callable[[Any, int], np.ndarray]:
    """Return a check for one value per row, of one of the numpy ``kinds``."""

    def check(result: Any, rows: int) -> np.ndarray:
        try:
            values = np.asarray(result)
        except ValueError:  # lists of several lengths
            problem = f"expected {rows} {expected}, one a row, got {type(result).__name__}"
            raise TransformError(source, repr(t), problem) from None
        if values.shape != (rows,) or values.dtype.kind not in kinds:
            problem = (
                f"expected {rows} {expected}, one a row, got {values.dtype} of shape {values.shape}"
            )
            raise TransformError(source, repr(t), problem)
        return values

    return check


def meta_per_row(source: str, t: Transform) -> Callable[[Any, int], Any]:
    """Return a check for one number, or one list of numbers, per row."""
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
    """Return a check for a dict of columns with one value per row."""

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
    """Return the results of a user function for all rows as numbers, or lists of numbers."""
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
