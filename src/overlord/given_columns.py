"""Columns that users give for a buffer, as arrays: numbers or lists of numbers by sample. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.sample import Column, Ragged


def columns_of(columns: Any, source: str, step: int) -> dict[str, Column]:
    """Return the columns of one source as arrays; raise ``PlanError`` if one is not valid."""
    if not isinstance(columns, Mapping):
        found = (
            f"source {source!r}: expected a mapping of metadata name to column, got "
            f"{type(columns).__name__}"
        )
        raise PlanError(found, step, 'pass columns as in {"web": {"tokens": [5, 9]}}')
    made = {}
    for key, value in columns.items():
        column = _column(value)
        lengths = key == "tokens"
        if column is None or (lengths and not _are_lengths(column)):
            wanted = (
                "a whole number of at least 0 for each sample"
                if lengths
                else "a number for each sample, or a list of numbers"
            )
            raise PlanError(
                f"metadata {key!r} of source {source!r}: expected {wanted}, got {value!r:.80}", step
            )
        made[key] = column
    return made


def _column(value: Any) -> Column | None:
    """Return a column of one number or a list of numbers per sample; None if it is neither."""
    if isinstance(value, Ragged):
        return value
    try:
        if (
            isinstance(value, (list, tuple))
            and value
            and isinstance(value[0], (list, tuple, np.ndarray))
        ):
            column = Ragged.from_rows(value)
            return (
                column if column.values.ndim == 1 and column.values.dtype.kind in "biuf" else None
            )
        found = np.asarray(value) if len(value) else np.zeros(0, np.int64)
    except (TypeError, ValueError):  # not a sequence, or numbers and lists mixed
        return None
    return found if found.ndim == 1 and found.dtype.kind in "biuf" else None


def _are_lengths(column: Column) -> bool:
    return (
        isinstance(column, np.ndarray)
        and column.dtype.kind in "iu"
        and (not len(column) or int(column.min()) >= 0)
    )
