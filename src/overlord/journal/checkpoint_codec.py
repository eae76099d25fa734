"""Tables of integers in few bytes: each column has the smallest integer type that holds it.

A plan writes such a table at every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ZERO = "0"  # a column of nothing but zeros takes no bytes
FORMS: dict[str, np.dtype[Any]] = {
    "b": np.dtype("<i1"),
    "h": np.dtype("<i2"),
    "i": np.dtype("<i4"),
    "q": np.dtype("<i8"),
}
_LIMITS = [(form, np.iinfo(dtype).min, np.iinfo(dtype).max) for form, dtype in FORMS.items()]


def packed(table: np.ndarray) -> list[Any]:
    """Return an int64 table [rows, columns] as one letter and some bytes for every column."""
    if not len(table):
        return [ZERO * table.shape[1], b""]
    low, high = table.min(axis=0).tolist(), table.max(axis=0).tolist()
    form = "".join(map(_form, low, high))
    return [
        form,
        b"".join(table[:, k].astype(FORMS[f]).tobytes() for k, f in enumerate(form) if f != ZERO),
    ]


def _form(low: int, high: int) -> str:
    return (
        ZERO
        if low == high == 0
        else next(form for form, least, most in _LIMITS if least <= low and high <= most)
    )


def unpacked(saved: Sequence[Any], rows: int) -> np.ndarray:
    """Return the table that was given to ``packed``.

    Raise ValueError for a wrong form or length.
    """
    form, data = saved
    if unknown := set(form) - {ZERO, *FORMS}:
        raise ValueError(
            f"expected columns of the forms {ZERO}{''.join(FORMS)}, got {sorted(unknown)[0]!r:.10}"
        )
    wanted = sum(FORMS[f].itemsize for f in form if f != ZERO) * rows
    if len(data) != wanted:
        raise ValueError(
            f"expected {wanted} bytes for {rows} rows of {form!r:.40}, got {len(data)}"
        )
    table, at = np.zeros((rows, len(form)), np.int64), 0
    for k, f in enumerate(form):
        if f != ZERO:
            table[:, k] = np.frombuffer(data, FORMS[f], rows, at)
            at += rows * FORMS[f].itemsize
    return table
