"""Fast paths for the most frequent record fields.

These are a column, a tuple of hundreds of integers, and a weight per source. A fast path returns
``NOT`` if it does not apply; the general codec then handles the value. So no fast path decides
which values are valid. ``msgspec.convert`` checks tuples in C. It is stricter than necessary: a
numpy number in a tuple goes through the general codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np

from overlord.transport.value_codec import ARRAY, OPEN_PLAIN, SMALL, TUPLE, open_small

NOT: Any = object()

FastDecoder = Callable[[Any, list[np.ndarray]], Any]

_PLAIN: dict[Any, frozenset[type]] = {
    int: frozenset({int}),
    float: frozenset({float, int}),
    bool: frozenset({bool}),
    str: frozenset({str}),
    bytes: frozenset({bytes}),
    type(None): frozenset({type(None)}),
    Any: OPEN_PLAIN,
    object: OPEN_PLAIN,
}
_NUMBERS: dict[Any, Any] = {
    int: int,
    float: int | float,
    bool: bool,
}  # a float field keeps integers as integers


def members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the annotation itself."""
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def plain_types(annotation: Any) -> frozenset[type]:
    """Return the types whose values match the annotation without a further check."""
    return frozenset().union(*(_PLAIN.get(m, frozenset()) for m in members(annotation)))


def opener_for(annotation: Any) -> FastDecoder | None:
    """Return a fast path from the header to a value that matches the annotation, or None."""
    for member in members(annotation):
        origin, args = get_origin(member), get_args(member)
        if member is np.ndarray:
            return _open_array
        if origin is tuple and args[1:] == (Ellipsis,) and (args[0] in _NUMBERS or args[0] is str):
            return _items_opener(GenericAlias(tuple, (_NUMBERS.get(args[0], str), ...)))
        if (
            origin is tuple
            and args[1:] == (Ellipsis,)
            and (each := opener_for(args[0])) is not None
        ):
            return _each_opener(each)
        if origin in (dict, Mapping) and args[0] is str and args[1] in _NUMBERS:
            return _mapping_opener(GenericAlias(dict, (str, _NUMBERS[args[1]])))
        if origin in (dict, Mapping) and args[0] is str and np.ndarray in members(args[1]):
            return _open_arrays
    return None


def packer_for(annotation: Any) -> Callable[[Any], Any] | None:
    """Return a fast path from a tuple of numbers to the header, or None."""
    for member in members(annotation):
        args = get_args(member)
        if get_origin(member) is tuple and args[1:] == (Ellipsis,) and args[0] in _NUMBERS:
            return _items_packer(GenericAlias(tuple, (_NUMBERS[args[0]], ...)))
    return None


def _open_array(tree: Any, columns: list[np.ndarray]) -> Any:
    if type(tree) is list and tree:
        if tree[0] == ARRAY and len(tree) == 2:
            i = tree[1]
            if type(i) is int and 0 <= i < len(columns):
                return columns[i]
        elif tree[0] == SMALL and type(tree[0]) is int:
            return open_small(tree)
    return NOT


def _open_arrays(tree: Any, columns: list[np.ndarray]) -> Any:
    if type(tree) is not dict:
        return NOT
    found = {}
    for key, item in tree.items():
        found[key] = array = _open_array(item, columns)
        if array is NOT or type(key) is not str:
            return NOT
    return found


def _items_opener(wanted: Any) -> FastDecoder:
    def fast(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not list or not tree or type(tree[0]) is not int or tree[0] != TUPLE:
            return NOT
        try:
            return msgspec.convert(tree[1:], wanted)
        except msgspec.ValidationError:
            return NOT

    return fast


def _each_opener(each: FastDecoder) -> FastDecoder:
    def fast(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not list or not tree or type(tree[0]) is not int or tree[0] != TUPLE:
            return NOT
        found = tuple([each(item, columns) for item in tree[1:]])
        return NOT if any(value is NOT for value in found) else found

    return fast


def _mapping_opener(wanted: Any) -> FastDecoder:
    def fast(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not dict:
            return NOT
        try:
            return msgspec.convert(tree, wanted)
        except msgspec.ValidationError:
            return NOT

    return fast


def _items_packer(wanted: Any) -> Callable[[Any], Any]:
    def fast(value: Any) -> Any:
        if type(value) is not tuple:
            return NOT
        try:
            return [TUPLE, *msgspec.convert(value, wanted)]
        except msgspec.ValidationError:
            return NOT

    return fast
