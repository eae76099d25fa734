"""What the interface names and this version does not do: refused in words, never ignored. Here alone, to be emptied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlord.errors import OverlordError

# Launch options: the value that says what is done today, and what that is.
OPTIONS: Mapping[str, tuple[Any, str]] = {}


def option_problems(options: object) -> list[str]:
    """Options set to something else than what is done."""
    given = {name: (getattr(options, name), today, what) for name, (today, what) in OPTIONS.items()}
    return [
        f"{name}: {value!r} is not available in this version; {what}: leave the option out, or say {today!r}"
        for name, (value, today, what) in given.items()
        if value is not today and not (type(value) is type(today) and value == today)
    ]


def not_available(what: str, instead: str) -> OverlordError:
    return OverlordError(f"{what} is not available in this version; {instead}")
