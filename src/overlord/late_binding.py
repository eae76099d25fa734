"""Functions of upper packages that classes of lower packages offer as methods.

``overlord/__init__.py`` binds them, so that lower packages do not import upper ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_FUNCTIONS: dict[str, Callable[..., Any]] = {}


def bind(name: str, function: Callable[..., Any]) -> None:
    """Make ``function`` available under ``name``."""
    _FUNCTIONS[name] = function


def call(name: str, *arguments: Any) -> Any:
    """Call the function bound to ``name``."""
    return _FUNCTIONS[name](*arguments)
