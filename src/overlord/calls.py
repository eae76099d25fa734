"""Functions of the user: whether they can be called as they will be, asked before anything runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any


def cannot_take(fn: Callable[..., Any], arguments: Sequence[str]) -> str:
    """Why a function cannot be called with these; empty where it can, or where it does not tell."""
    try:
        return _cannot_take(fn, tuple(arguments))
    except TypeError:  # it has no hash
        return _cannot_take.__wrapped__(fn, tuple(arguments))


@lru_cache(maxsize=64)
def _cannot_take(fn: Callable[..., Any], arguments: tuple[str, ...]) -> str:
    """Costs and the like are asked for every step, and are the same ones."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # written in C, most of them
        return ""
    try:
        signature.bind(*arguments)
    except TypeError:
        name = getattr(fn, "__name__", None) or type(fn).__name__
        return f"wanted a function of ({', '.join(arguments)}), found {name}{signature}"
    return ""
