"""Functions that job files may name.

A file cannot import code, so a program registers each function under a name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.jobfile.yaml_scalars import short_repr
from overlord.planning.strategies import STRATEGIES

REGISTER = (
    "call ov.register_function before the file is read; on the command line, in a module "
    "named by --import"
)
_functions: dict[str, Callable[..., Any]] = {}


def register_function(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function for job files, as in ``{map: {fn: name}}``, and return it.

    A strategy is named directly, as in ``strategy: name``; its name differs from those of
    ``ov.strategy``. A name can be registered again only for a function of the same module and name,
    such as an edited one.
    """
    if not isinstance(name, str) or not name or not callable(fn):
        raise JobError(
            [f"expected a name and a function, got {name!r} and {fn!r}"], "register_function"
        )
    known = _functions.get(name)
    if known is not None and qualified_name(known) != qualified_name(fn):
        raise JobError(
            [
                f"name: expected an unused name, got {name!r} of {qualified_name(known)}; "
                "choose another name"
            ],
            "register_function",
        )
    _functions[name] = fn
    return fn


def strategy_named(name: Any) -> str | Callable[..., Any]:
    """Return the name of a strategy of ``ov.strategy``, or the function registered under it.

    Raise ``JobError`` for any other value, and for a name that both have.
    """
    if not isinstance(name, str):
        raise JobError([f"strategy: expected the name of a strategy, got {short_repr(name)}"])
    fn = _functions.get(name)
    if name not in STRATEGIES:
        if fn is not None:
            return fn
        hint = did_you_mean(name, [*STRATEGIES, *_functions])
        problem = f"strategy: expected a known strategy, got {name!r}{hint}"
        raise JobError([f"{problem}; for a strategy of your own, {REGISTER}"])
    if fn is not None and fn is not STRATEGIES[name]:
        raise JobError(
            [
                f"strategy: expected one strategy of the name {name!r}, got ov.strategy.{name} "
                f"and the registered {qualified_name(fn)}; register yours under another name"
            ]
        )
    return name


def registered_function(name: Any) -> Callable[..., Any] | None:
    """Return the function that is registered under a name; None if there is none."""
    return _functions.get(name) if isinstance(name, str) else None


def registered_names() -> list[str]:
    """Return the names of all registered functions, sorted."""
    return sorted(_functions)


def qualified_name(fn: Any) -> str:
    """Return module and name of a function."""
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"
