"""Check values against the annotations of record fields.

Each check is compiled once per class, so checking a message is cheap. A record with a field of the
wrong type is rejected on arrival. Inside the pure cores the error would surface far from its cause.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np

Check = Callable[[Any], bool]


def check_for(annotation: Any) -> Check | None:
    """Return a function that checks a value against ``annotation``; None if any value is valid."""
    origin, args = get_origin(annotation), get_args(annotation)
    if annotation is Any or annotation is object:
        return None
    if origin in (Union, types.UnionType):
        return _any_of([check_for(a) for a in args])
    if origin is tuple:
        return _tuple_of(args)
    if origin in (list, Sequence) or annotation in (list, Sequence):
        return _items_of((list,) if origin is list or annotation is list else (list, tuple), args)
    if origin in (dict, Mapping) or annotation in (dict, Mapping):
        return _mapping_of(args)
    if origin is Literal:
        return lambda value: any(type(value) is type(a) and value == a for a in args)
    if annotation in _PLAIN:
        return _PLAIN[annotation]
    cls = type(None) if annotation is None else (origin or annotation)
    if not isinstance(cls, type):
        raise TypeError(f"record field: expected a supported annotation, got {annotation!r}")
    return lambda value: isinstance(value, cls)


def _is_int(value: Any) -> bool:
    return type(value) is int or isinstance(value, np.integer)


def _is_float(value: Any) -> bool:
    """Return whether ``value`` is a number.

    A float field accepts integers too: ``weights={"web": 1}``.
    """
    return (
        type(value) is float or type(value) is int or isinstance(value, (np.floating, np.integer))
    )


def _is_bool(value: Any) -> bool:
    return value is True or value is False or isinstance(value, np.bool_)


_PLAIN: dict[Any, Check] = {
    int: _is_int,
    float: _is_float,
    bool: _is_bool,
    str: lambda value: type(value) is str,
    bytes: lambda value: type(value) is bytes,
    tuple: lambda value: type(value) is tuple,
    np.ndarray: lambda value: type(value) is np.ndarray,
}
# Usual item types of a long tuple. Comparing the set of types is cheaper than checking every item.
_LIKELY: dict[Any, set[type]] = {
    int: {int},
    float: {float, int},
    bool: {bool},
    str: {str},
    np.ndarray: {np.ndarray},
}


def _any_of(checks: Sequence[Check | None]) -> Check | None:
    some = [c for c in checks if c is not None]
    if len(some) < len(checks):
        return None
    if len(some) == 2:
        first, second = some
        return lambda value: first(value) or second(value)
    return lambda value: any(check(value) for check in some)


def _tuple_of(args: Sequence[Any]) -> Check:
    if len(args) == 2 and args[1] is Ellipsis:
        return _items_of((tuple,), args[:1])
    checks = [check_for(a) for a in args]
    return lambda value: (
        type(value) is tuple
        and len(value) == len(checks)
        and all(c is None or c(v) for c, v in zip(checks, value, strict=True))
    )


def _items_of(kinds: tuple[type, ...], args: Sequence[Any]) -> Check:
    each = check_for(args[0]) if args else None
    likely: set[type] = _LIKELY.get(args[0], set()) if args else set()
    if each is None:
        return lambda value: type(value) in kinds
    return lambda value: (
        type(value) in kinds
        and (not value or likely.issuperset(set(map(type, value))) or all(map(each, value)))
    )


def _mapping_of(args: Sequence[Any]) -> Check:
    key, each = (check_for(args[0]), check_for(args[1])) if args else (None, None)
    likely: set[type] = _LIKELY.get(args[0], set()) if args else set()
    return lambda value: (
        isinstance(value, dict)
        and (key is None or likely.issuperset(set(map(type, value))) or all(map(key, value)))
        and (each is None or all(map(each, value.values())))
    )
