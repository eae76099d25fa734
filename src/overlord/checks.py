"""Checks that the validators of jobs, batches and sources share."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


def did_you_mean(name: str, known: Iterable[str]) -> str:
    names = sorted(set(known))
    close = difflib.get_close_matches(str(name), names, n=1)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names[:20])}{more}"


def one_of(name: str, value: Any, known: Sequence[str]) -> list[str]:
    return [] if value in known else [f"{name}: expected one of {', '.join(known)}, got {value!r}"]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
