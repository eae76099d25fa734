"""The general codec: encode any supported value as a header and columns, and decode it.

Use it through ``codec``, which describes the format.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

import msgspec
import numpy as np

from overlord.errors import FrameError
from overlord.sample import Columns, Ragged
from overlord.transport.frame import CODES, DTYPES, MAX_DIMS

MAX_DEPTH = 64  # levels of nested values; messages have about 8
MAX_INT_BYTES = 4096
_SAME_VERSION = "run the same version of Overlord on both sides"
LONG_BYTES = 2**14  # bytes of this size and more are sent as a column
# a one-dimensional array up to this size is in the header: a column costs more than the copy
SMALL_BYTES = 256

# the tags; never renumbered
LIST, TUPLE, ARRAY, RAGGED, SCALAR, BIG_INT, LONG, COLUMNS, RECORD, ERROR, SMALL = range(11)

Tree = Any  # a MessagePack value: None, bool, int, float, str, bytes, list, dict
Packer = Callable[[Any, list[np.ndarray], int], Tree]
Opener = Callable[[list[Any], list[np.ndarray], int], Any]

PLAIN = frozenset({type(None), bool, int, float, str})
OPEN_PLAIN = PLAIN | {bytes}
KEYS = frozenset({str, int})
PACKERS: dict[type, Packer] = {}
OPENERS: dict[int, Opener] = {}

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


class Refused(Exception):
    """A value that cannot be encoded, or a header that cannot be decoded.

    Each level of nesting adds its key to the path.
    """

    def __init__(self, problem: str, remedy: str = ""):
        super().__init__(problem, remedy)
        self.problem, self.remedy, self.path = problem, remedy, [""]

    def inside(self, part: str) -> Refused:
        self.path.append(part)
        return self

    def as_error(self) -> FrameError:
        return FrameError(self.problem, "value" + "".join(reversed(self.path)), self.remedy)


# encoding


def encode(value: Any) -> tuple[bytes, list[np.ndarray]]:
    """Encode a value as a header and columns.

    An array is copied if it is strided, big-endian, or so small that it goes into the header.
    Other columns view their arrays. Raise ``FrameError`` for a value that cannot be encoded.
    """
    columns: list[np.ndarray] = []
    try:
        tree = pack_value(value, columns, 0)
        try:
            return _encoder.encode(tree), columns
        except OverflowError:
            return _encoder.encode(_with_big_ints(tree)), columns
    except Refused as e:
        raise e.as_error() from None
    except UnicodeEncodeError as e:
        raise FrameError(
            f"expected valid Unicode, got {e.object!r:.60} with a lone surrogate",
            "value",
            "escape it, or send it as bytes",
        ) from e


def pack_value(value: Any, columns: list[np.ndarray], depth: int) -> Tree:
    kind = type(value)
    if kind in PLAIN:
        return value
    if depth > MAX_DEPTH:
        raise _too_deep()
    packer = PACKERS.get(kind)
    return (
        packer(value, columns, depth) if packer is not None else _pack_other(value, columns, depth)
    )


def _pack_other(value: Any, columns: list[np.ndarray], depth: int) -> Tree:
    """Encode a value by its base class: numpy scalars, mappings, exceptions."""
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, np.generic):
        return _pack_scalar(value)
    if isinstance(value, BaseException):
        return PACKERS[BaseException](value, columns, depth)
    if isinstance(value, np.memmap):
        return _pack_array(value.view(np.ndarray), columns, depth)
    if isinstance(value, Mapping):
        return _pack_dict(value, columns, depth)
    raise Refused(
        "expected a value that can be sent, got "
        f"{type(value).__module__}.{type(value).__qualname__}",
        "send plain values, numpy arrays, or a record registered with "
        "overlord.transport.codec.register",
    )


def _too_deep() -> Refused:
    return Refused(f"expected at most {MAX_DEPTH} levels of nesting, got more", "flatten the value")


def _pack_items(tag: int) -> Packer:
    def pack(value: Any, columns: list[np.ndarray], depth: int) -> Tree:
        out = [tag, *value]
        if PLAIN.issuperset(set(map(type, value))):
            return out
        i = 0
        try:
            for i, item in enumerate(value, 1):
                out[i] = pack_value(item, columns, depth + 1)
        except Refused as e:
            raise e.inside(f"[{i - 1}]") from None
        return out

    return pack


def _pack_dict(value: Mapping[Any, Any], columns: list[np.ndarray], depth: int) -> Tree:
    if not KEYS.issuperset(set(map(type, value))):
        wrong = next(key for key in value if type(key) not in KEYS)
        raise Refused(
            f"expected keys of type str or int, got {wrong!r:.60} of type {type(wrong).__name__}",
            "convert the keys",
        )
    if PLAIN.issuperset(set(map(type, value.values()))):
        return value if type(value) is dict else dict(value)
    out, key = dict(value), None
    try:
        for key, item in value.items():
            if type(item) not in PLAIN:
                out[key] = pack_value(item, columns, depth + 1)
    except Refused as e:
        raise e.inside(f"[{key!r:.60}]") from None
    return out


def _pack_columns(value: Columns, columns: list[np.ndarray], depth: int) -> Tree:
    return [COLUMNS, value.step, _pack_dict(value, columns, depth)]


def _pack_bytes(value: bytes, columns: list[np.ndarray], depth: int) -> Tree:
    if len(value) < LONG_BYTES:
        return value
    columns.append(np.frombuffer(value, np.uint8))
    return [LONG, len(columns) - 1]


def _pack_scalar(value: np.generic) -> Tree:
    code = CODES.get(value.dtype)
    if code is None:
        raise _wrong_dtype(value.dtype)
    return [SCALAR, code, value.tobytes()]


def _wrong_dtype(dtype: Any) -> Refused:
    return Refused(
        f"expected an array of one of {', '.join(map(str, DTYPES))}, got {dtype!r}",
        "convert it with astype",
    )


def put_column(array: np.ndarray, columns: list[np.ndarray]) -> int:
    """Append an array to the columns in a form that a frame accepts; return its index.

    Raise ``Refused`` for another dtype, or too many dimensions.
    """
    if array.dtype not in CODES:
        little = array.dtype.newbyteorder("<")
        if little not in CODES:
            raise _wrong_dtype(array.dtype)
        array = array.astype(little)
    if array.ndim > MAX_DIMS:
        raise Refused(f"expected at most {MAX_DIMS} dimensions, got {array.ndim}", "reshape it")
    columns.append(array if array.flags.c_contiguous else array.copy(order="C"))
    return len(columns) - 1


def owned(array: np.ndarray) -> bool:
    """Return whether the memory of the array belongs to it or to the array that it views.

    If so, the array is not in shared memory, which is sent by reference.
    """
    base = array.base
    return base is None or (type(base) is np.ndarray and base.base is None)


def pack_array(value: np.ndarray, columns: list[np.ndarray]) -> Tree:
    if (
        value.nbytes <= SMALL_BYTES
        and value.ndim == 1
        and owned(value)
        and (code := CODES.get(value.dtype)) is not None
    ):
        return [SMALL, code, value.tobytes()]
    return [ARRAY, put_column(value, columns)]


def _pack_array(value: np.ndarray, columns: list[np.ndarray], depth: int) -> Tree:
    return pack_array(value, columns)


def _pack_ragged(value: Ragged, columns: list[np.ndarray], depth: int) -> Tree:
    """Encode only the rows of a slice, not the whole column that it views."""
    values, offsets = value.values, value.offsets
    # Check both ends only; the receiver checks all offsets.
    if problem := _ragged_problem(values, offsets[:: max(1, len(offsets) - 1)]):
        raise Refused(problem)
    first, last = int(offsets[0]), int(offsets[-1])
    values = values if last - first == len(values) else values[first:last]
    return [
        RAGGED,
        put_column(values, columns),
        put_column(offsets - first if first else offsets, columns),
    ]


def _with_big_ints(tree: Tree) -> Tree:
    """Return the tree with integers of more than 64 bits as bytes.

    Raise ``Refused`` for one of more than ``MAX_INT_BYTES``, or as a key.
    """
    if type(tree) is int and not -(2**63) <= tree < 2**64:
        size = tree.bit_length() // 8 + 1
        if size > MAX_INT_BYTES:
            raise Refused(
                f"expected a whole number of at most {MAX_INT_BYTES} bytes, got one of {size}",
                "send it as text",
            )
        return [BIG_INT, tree.to_bytes(size, "little", signed=True)]
    if type(tree) is list:
        return [_with_big_ints(item) for item in tree]
    if type(tree) is dict:
        if any(type(key) is int and not -(2**63) <= key < 2**64 for key in tree):
            raise Refused(
                "expected integer keys of at most 64 bits, got a larger one", "use strings as keys"
            )
        return {key: _with_big_ints(item) for key, item in tree.items()}
    return tree


# decoding


def decode(header: Any, columns: list[np.ndarray]) -> Any:
    """Return the value of a header and its columns; raise ``FrameError`` if they are invalid."""
    try:
        return open_value(_decoder.decode(header), columns, 0)
    except Refused as e:
        raise e.as_error() from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, MemoryError) as e:
        raise FrameError(
            f"expected a header in MessagePack, got {type(e).__name__}: {e}", remedy=_SAME_VERSION
        ) from e


def open_value(tree: Tree, columns: list[np.ndarray], depth: int) -> Any:
    kind = type(tree)
    if kind in OPEN_PLAIN:
        return tree
    if depth > MAX_DEPTH + 1:  # one more: an integer beyond 64 bits is encoded as a list
        raise _too_deep()
    if kind is list:
        opener = OPENERS.get(tree[0]) if tree and type(tree[0]) is int else None
        if opener is None:
            raise Refused(
                f"expected a known tag, got {describe_value(tree[0]) if tree else 'none'}",
                _SAME_VERSION,
            )
        return opener(tree, columns, depth + 1)
    if kind is dict:
        return _open_dict(tree, columns, depth + 1)
    raise Refused(f"expected a plain value, got {kind.__name__}", _SAME_VERSION)


def _open_items(tree: list[Any], columns: list[np.ndarray], depth: int) -> list[Any]:
    del tree[0]
    if OPEN_PLAIN.issuperset(set(map(type, tree))):
        return tree
    i = 0
    try:
        for i, item in enumerate(tree):
            tree[i] = open_value(item, columns, depth)
    except Refused as e:
        raise e.inside(f"[{i}]") from None
    return tree


def _open_dict(tree: dict[Any, Any], columns: list[np.ndarray], depth: int) -> dict[Any, Any]:
    if not KEYS.issuperset(set(map(type, tree))):
        raise Refused("expected keys of type str or int, got other types", _SAME_VERSION)
    key = None
    try:
        for key, item in tree.items():
            if type(item) not in OPEN_PLAIN:
                tree[key] = open_value(item, columns, depth)
    except Refused as e:
        raise e.inside(f"[{key!r:.60}]") from None
    return tree


def describe_value(value: Any) -> str:
    """Return a plain value as at most 60 characters of text, or else the name of its type.

    Values of other types may be large or fail in ``repr``.
    """
    return f"{value!r:.60}" if type(value) in OPEN_PLAIN else type(value).__name__


def wants(tree: list[Any], *kinds: type) -> list[Any]:
    """Return the values after a tree's tag; raise ``Refused`` unless they have these types."""
    if len(tree) != len(kinds) + 1 or any(
        type(found) is not kind for found, kind in zip(tree[1:], kinds, strict=True)
    ):
        raise Refused(
            f"expected {', '.join(k.__name__ for k in kinds)} after tag {tree[0]}, got "
            f"{', '.join(map(describe_value, tree[1:5])) or 'nothing'}",
            _SAME_VERSION,
        )
    return tree[1:]


def _column(i: Any, columns: list[np.ndarray]) -> np.ndarray:
    if type(i) is not int or not 0 <= i < len(columns):
        raise Refused(
            f"expected the index of one of {len(columns)} columns, got {describe_value(i)}",
            _SAME_VERSION,
        )
    return columns[i]


def _open_array(tree: list[Any], columns: list[np.ndarray], depth: int) -> np.ndarray:
    if len(tree) != 2:
        raise Refused(f"expected the index of a column, got {len(tree) - 1} values", _SAME_VERSION)
    return _column(tree[1], columns)


def open_small(tree: list[Any]) -> np.ndarray:
    code, data = wants(tree, int, bytes)
    if not 0 <= code < len(DTYPES) or len(data) % DTYPES[code].itemsize or len(data) > SMALL_BYTES:
        raise Refused(
            f"expected a dtype code below {len(DTYPES)} and whole items of at most {SMALL_BYTES} "
            f"bytes in all, got code {code} and {len(data)} bytes",
            _SAME_VERSION,
        )
    return np.frombuffer(data, DTYPES[code])


def _open_ragged(tree: list[Any], columns: list[np.ndarray], depth: int) -> Ragged:
    values, offsets = (_column(i, columns) for i in wants(tree, int, int))
    if problem := _ragged_problem(values, offsets):
        raise Refused(problem)
    return Ragged(values, offsets)


def _ragged_problem(values: np.ndarray, offsets: np.ndarray) -> str:
    if offsets.ndim != 1 or not len(offsets) or offsets.dtype.kind not in "iu" or not values.ndim:
        return (
            "expected values of at least one dimension and a column of integer offsets that is "
            f"not empty, got {values.dtype}{values.shape} and {offsets.dtype}{offsets.shape}"
        )
    if offsets[0] < 0 or offsets[-1] > len(values) or (offsets[1:] < offsets[:-1]).any():
        return (
            f"expected offsets from 0 to {len(values)} that never decrease, got {offsets[0]} to "
            f"{offsets[-1]}, or decreasing ones"
        )
    return ""


def _open_scalar(tree: list[Any], columns: list[np.ndarray], depth: int) -> Any:
    code, data = wants(tree, int, bytes)
    if not 0 <= code < len(DTYPES) or len(data) != DTYPES[code].itemsize:
        raise Refused(
            f"expected a dtype code below {len(DTYPES)} and the bytes of one number, got code "
            f"{code} and {len(data)} bytes",
            _SAME_VERSION,
        )
    return np.frombuffer(data, DTYPES[code])[0]


def _open_big_int(tree: list[Any], columns: list[np.ndarray], depth: int) -> int:
    (data,) = wants(tree, bytes)
    if len(data) > MAX_INT_BYTES:
        raise Refused(
            f"expected a whole number of at most {MAX_INT_BYTES} bytes, got one of {len(data)}",
            _SAME_VERSION,
        )
    return int.from_bytes(data, "little", signed=True)


def _open_long(tree: list[Any], columns: list[np.ndarray], depth: int) -> bytes:
    column = _open_array(tree, columns, depth)
    if column.dtype != np.uint8 or column.ndim != 1:
        raise Refused(
            f"expected a column of bytes, got {column.dtype}{column.shape}", _SAME_VERSION
        )
    return column.tobytes()


def _open_columns(tree: list[Any], columns: list[np.ndarray], depth: int) -> Columns:
    step, found = wants(tree, int, dict)
    made = _open_dict(found, columns, depth)
    if wrong := [
        key
        for key, c in made.items()
        if type(key) is not str or type(c) not in (np.ndarray, Ragged)
    ]:
        raise Refused(
            "expected an array or Ragged with a string as key, got "
            f"{type(made[wrong[0]]).__name__} with a key of type {type(wrong[0]).__name__}",
            _SAME_VERSION,
        ).inside(f"[{wrong[0]!r:.60}]")
    return Columns(made, step)


PACKERS.update(
    {
        list: _pack_items(LIST),
        tuple: _pack_items(TUPLE),
        dict: _pack_dict,
        bytes: _pack_bytes,
        np.ndarray: _pack_array,
        Ragged: _pack_ragged,
        Columns: _pack_columns,
    }
)
OPENERS.update(
    {
        LIST: _open_items,
        TUPLE: lambda tree, columns, depth: tuple(_open_items(tree, columns, depth)),
        ARRAY: _open_array,
        RAGGED: _open_ragged,
        SCALAR: _open_scalar,
        BIG_INT: _open_big_int,
        LONG: _open_long,
        COLUMNS: _open_columns,
        SMALL: lambda tree, columns, depth: open_small(tree),
    }
)


# ----------------------------------------------------------------------------
# Check values against the annotations of record fields.
#
# Each check is compiled once per class, so checking a message is cheap. A record with a field of
# the wrong type is rejected on arrival. Otherwise the error would surface in a state
# machine, far from its cause.

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
