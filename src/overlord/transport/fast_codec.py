"""Shortcuts for the fields that messages are full of: a column, three hundred whole numbers, a
weight for each source.

A shortcut answers ``NOT`` where it does not apply, and the general way is taken; so none decides
what is right or wrong. Tuples are looked through in C, by ``msgspec.convert``, which is stricter
than we need: a numpy number in a tuple goes the general way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import GenericAlias, UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np

from overlord.transport.value_codec import ARRAY, OPEN_PLAIN, SMALL, TUPLE, open_small

NOT: Any = object()

Quick = Callable[[Any, list[np.ndarray]], Any]

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
}  # a float field keeps whole numbers as they are


def members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def plain_types(annotation: Any) -> frozenset[type]:
    """Types whose values fit, with no further look."""
    return frozenset().union(*(_PLAIN.get(m, frozenset()) for m in members(annotation)))


def opener_for(annotation: Any) -> Quick | None:
    """A shortcut from what stands in the header to a value that fits the annotation."""
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
    """A shortcut from a tuple of numbers to the header."""
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
    for key, part in tree.items():
        found[key] = array = _open_array(part, columns)
        if array is NOT or type(key) is not str:
            return NOT
    return found


def _items_opener(wanted: Any) -> Quick:
    def quick(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not list or not tree or type(tree[0]) is not int or tree[0] != TUPLE:
            return NOT
        try:
            return msgspec.convert(tree[1:], wanted)
        except msgspec.ValidationError:
            return NOT

    return quick


def _each_opener(each: Quick) -> Quick:
    def quick(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not list or not tree or type(tree[0]) is not int or tree[0] != TUPLE:
            return NOT
        found = tuple([each(part, columns) for part in tree[1:]])
        return NOT if any(value is NOT for value in found) else found

    return quick


def _mapping_opener(wanted: Any) -> Quick:
    def quick(tree: Any, columns: list[np.ndarray]) -> Any:
        if type(tree) is not dict:
            return NOT
        try:
            return msgspec.convert(tree, wanted)
        except msgspec.ValidationError:
            return NOT

    return quick


def _items_packer(wanted: Any) -> Callable[[Any], Any]:
    def quick(value: Any) -> Any:
        if type(value) is not tuple:
            return NOT
        try:
            return [TUPLE, *msgspec.convert(value, wanted)]
        except msgspec.ValidationError:
            return NOT

    return quick
