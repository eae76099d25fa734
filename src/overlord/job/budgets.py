"""Budgets of a source: how much of it a job draws, as passes or as tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlord.checks import is_int, is_real

if TYPE_CHECKING:
    from overlord.job.job import Source

# an order of chunks exists for every epoch, and a fraction of it is computed in integers
MOST_EPOCHS = 2**31


def normal(value: Any) -> Any:
    """Return a whole number as an int, so that ``5e9`` and ``5_000_000_000`` are equal."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def problems(at: str, epochs: Any, max_tokens: Any) -> list[str]:
    """Return every problem of the budgets of the source ``at``, each as one text."""
    found = list[str]()
    if epochs is not None and not (is_real(epochs) and 0 < epochs <= MOST_EPOCHS):
        found.append(
            f"{at}.epochs: expected a number above 0, or None for no limit, got {epochs!r}"
        )
    if max_tokens is not None and not (is_int(max_tokens) and max_tokens >= 1):
        found.append(
            f"{at}.max_tokens: expected a whole number of at least 1, or None for no limit, got "
            f"{max_tokens!r}"
        )
    return found


def is_endless(source: Source) -> bool:
    """Return whether a source repeats forever."""
    return source.epochs is None and source.max_tokens is None
