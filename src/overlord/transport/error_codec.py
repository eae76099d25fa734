"""Exceptions on the wire.

Exceptions of Overlord and of Python keep type, arguments and notes. Other exceptions are sent as
text.
"""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np

from overlord import errors
from overlord.transport.value_codec import (
    ERROR,
    OPENERS,
    PACKERS,
    TUPLE,
    Refused,
    Tree,
    open_value,
    pack_value,
    wants,
)

MAX_TEXT = 20_000  # characters of an exception that becomes text

KNOWN: dict[str, type[Exception]] = {
    cls.__name__: cls
    for home in (builtins, errors)
    for cls in vars(home).values()
    if isinstance(cls, type) and issubclass(cls, Exception) and cls.__module__ == home.__name__
}


def _pack(error: BaseException, columns: list[np.ndarray], depth: int) -> Tree:
    name, before = type(error).__name__, len(columns)
    if KNOWN.get(name) is type(error):
        try:
            # The args of an OSError do not contain its file name.
            args = error.__reduce__()[1] if isinstance(error, OSError) else error.args
            return _packed(name, args, error, columns, depth)
        except Refused:  # an argument that cannot be encoded
            del columns[before:]
    return _packed(
        "OverlordError", (f"{type(error).__qualname__}: {_text(error)}",), error, columns, depth
    )


def _packed(
    name: str, args: Any, error: BaseException, columns: list[np.ndarray], depth: int
) -> Tree:
    found = getattr(error, "__notes__", ())
    notes = (
        [note for note in found if type(note) is str] if isinstance(found, (list, tuple)) else []
    )
    return [ERROR, name, _sendable(pack_value(tuple(args), columns, depth + 1)), _sendable(notes)]


def _text(error: BaseException) -> str:
    try:
        return str(error)[:MAX_TEXT]
    except Exception as e:
        return f"an exception whose text raises {type(e).__name__}"


def _sendable(tree: Tree) -> Tree:
    """Escape text that is not valid Unicode (as file names may be), so that every error arrives."""
    if type(tree) is str:
        return tree if tree.isascii() else tree.encode("utf-8", "backslashreplace").decode()
    if type(tree) is list:
        return [_sendable(item) for item in tree]
    return (
        {_sendable(key): _sendable(item) for key, item in tree.items()}
        if type(tree) is dict
        else tree
    )


def _open(tree: list[Any], columns: list[np.ndarray], depth: int) -> Exception:
    name, args, notes = wants(tree, str, list, list)
    if name not in KNOWN or args[:1] != [TUPLE] or any(type(note) is not str for note in notes):
        raise Refused(f"expected a known exception with its arguments and notes, got {name!r:.60}")
    values = open_value(args, columns, depth)
    try:
        error = KNOWN[name](*values)
        str(error)  # an exception whose text cannot be built would fail where it is printed
    except Exception as e:
        raise Refused(f"expected arguments of {name}, got others: {type(e).__name__}: {e}") from e
    for note in notes:
        error.add_note(note)
    return error


PACKERS[BaseException] = _pack
OPENERS[ERROR] = _open
