"""Columns whose values do not share one Arrow type.

They come from JSON lines, rows of datasets and results of user functions.

Arrow converts values until they share a type: 1 next to 2.5 becomes 1.0, ``{"a": 1}`` next to
``{"b": 2}`` gains a field. A row must not depend on its neighbours. ``column_of`` therefore keeps a
native array only if it holds every value exactly as Arrow holds it alone. Otherwise it stores each
value by itself, as msgpack, in a column of type ``MIXED``.
"""

from __future__ import annotations

import decimal
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.types as pt

MISFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
# Levels of nesting; beyond, the result would depend on the remaining stack of the caller.
MAX_DEPTH = 100
Bad = dict[int, str]  # row -> reason

_SCALARS = (type(None), bool, int, float, str, bytes)
_DECIMAL, _TEMPORAL = 1, 2  # codes of msgpack extensions
_SHOWN = 60  # characters of a value in a reason


class MixedScalar(pa.ExtensionScalar):  # type: ignore[misc]
    """One value of a mixed column; ``to_pylist`` of arrays and tables calls it."""

    def as_py(self, **_: Any) -> Any:
        """Return the Python value."""
        return None if self.value is None else _decode(self.value.as_py())


class MixedType(pa.ExtensionType):  # type: ignore[misc]
    """Arrow type of a mixed column: one msgpack message per value."""

    def __init__(self) -> None:
        super().__init__(pa.large_binary(), "overlord.mixed")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage: pa.DataType, serialized: bytes) -> MixedType:
        if storage != pa.large_binary():
            raise TypeError(
                f"overlord.mixed: expected the storage type large_binary, got {storage}"
            )
        return cls()

    def __arrow_ext_scalar_class__(self) -> type[MixedScalar]:
        return MixedScalar


MIXED = MixedType()
pa.register_extension_type(MIXED)


def is_mixed(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds values of several types."""
    return isinstance(kind, MixedType)


def type_name(kind: pa.DataType) -> str:
    """Return the name of a column's type as users read it."""
    return "mixed" if is_mixed(kind) else str(kind)


def column_of(values: Sequence[Any], *, decoded: bool = False) -> tuple[pa.Array, Bad]:
    """Build a column that holds every value unchanged, and list the rows that no column can hold.

    ``decoded``: the values come from a JSON decoder, so a native array of whole numbers, texts or
    booleans needs no check.
    """
    try:
        array = pa.array(values)
        if (decoded and _certain(array.type)) or _exact(values, array.type):
            return array, {}
    except MISFIT:
        pass
    packed, bad = list[bytes | None](), Bad()
    for i, value in enumerate(values):
        try:
            packed.append(None if value is None else _encode(value))
        except MISFIT as error:
            packed.append(None)
            bad[i] = f"{short_text(value)}: {error}"
    if bad:
        kept = [None if i in bad else value for i, value in enumerate(values)]
        return column_of(kept, decoded=decoded)[0], bad
    return pa.ExtensionArray.from_storage(MIXED, pa.array(packed, pa.large_binary())), {}


def groups(array: pa.Array) -> tuple[list[tuple[np.ndarray, pa.Array]], Bad]:
    """Split a mixed array by the type of each single value.

    Returns (rows, native array) pairs, and the rows without a native type.
    """
    alone: dict[pa.DataType, list[tuple[int, pa.Array]]] = {}
    bad: Bad = {}
    for i, value in enumerate(array.to_pylist()):
        try:
            one = pa.array([value])
        except MISFIT as error:
            bad[i] = f"{short_text(value)}: {error}"
            continue
        if _exact([value], one.type, lenient=True):
            alone.setdefault(one.type, []).append((i, one))
        else:
            bad[i] = f"{short_text(value)}: expected values of one type, got several"
    arrays = [
        (np.array([i for i, _ in held]), pa.concat_arrays([one for _, one in held]))
        for held in alone.values()
    ]
    return arrays, bad


def short_text(value: Any) -> str:
    """Return a value as text for a reason, shortened."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


@lru_cache(maxsize=256)
def _certain(kind: pa.DataType) -> bool:
    """Return whether Arrow infers this type only from JSON values that it holds exactly."""
    depth = 0
    while pt.is_list(kind) and depth < MAX_DEPTH:
        kind, depth = kind.value_type, depth + 1
    return pt.is_integer(kind) or pt.is_string(kind) or pt.is_boolean(kind) or pt.is_null(kind)


def _exact(
    values: Iterable[Any], kind: pa.DataType, *, lenient: bool = False, depth: int = 0
) -> bool:
    """Return whether an array of this type holds each value as Arrow would hold it alone.

    ``lenient``: whole and fractional numbers count as one type, and structs may lack fields.
    """
    if depth > MAX_DEPTH:
        return False
    some = [v for v in values if v is not None]
    if pt.is_list(kind):
        if all(isinstance(v, (list, tuple)) for v in some):
            return _exact(
                chain.from_iterable(some), kind.value_type, lenient=lenient, depth=depth + 1
            )
        return (
            all(isinstance(v, np.ndarray) and v.dtype != object for v in some)
            and len({v.dtype for v in some}) == 1
        )
    if pt.is_struct(kind):
        names = tuple(field.name for field in kind)
        if not all(
            type(v) is dict and (tuple(v) == names or (lenient and set(v) <= set(names)))
            for v in some
        ):
            return False
        return all(
            _exact([v.get(f.name) for v in some], f.type, lenient=lenient, depth=depth + 1)
            for f in kind
        )
    if kinds := {_kind(t) for t in set(map(type, some))}:
        if lenient and kinds == {"integer", "float"}:
            return True
        if len(kinds) > 1:
            return False
        if not isinstance(next(iter(kinds)), str):
            return all(pa.array([v]).type == kind for v in some)
    return True


@lru_cache(maxsize=1024)
def _kind(cls: type) -> str | type:
    """Return the family of a Python or numpy type whose values Arrow holds alike.

    Any other type is its own family.
    """
    families: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("bool", (bool, np.bool_)),
        ("text", (str,)),
        ("bytes", (bytes, bytearray, memoryview)),
        ("float", (float, np.floating)),
        ("integer", (int, np.integer)),
    )
    if issubclass(cls, np.timedelta64):  # numpy counts it among its integers
        return cls
    return next((name for name, types in families if issubclass(cls, types)), cls)


# Values stored by themselves


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(_to_msgpack(value, 0))


def _to_msgpack(value: Any, depth: int) -> Any:
    """Return the value in types that msgpack distinguishes. Raises one of ``MISFIT``."""
    if depth > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of nesting")
    kind = type(value)
    if kind is int and not -(2**63) <= value < 2**64:
        raise ValueError("expected a whole number of 64 bits")
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [_to_msgpack(v, depth + 1) for v in value]
    if kind is dict:
        if not all(type(k) is str for k in value):
            raise TypeError("expected texts as the keys of an object")
        return {k: _to_msgpack(v, depth + 1) for k, v in value.items()}
    return _converted(value, depth)


def _converted(value: Any, depth: int) -> Any:
    """Return any other value in the form in which Arrow holds it alone."""
    scalar = pa.array([value])[0]
    if pt.is_temporal(scalar.type):
        unit, zone = getattr(scalar.type, "unit", ""), getattr(scalar.type, "tz", None)
        name = str(scalar.type).partition("[")[0]
        return msgspec.msgpack.Ext(
            _TEMPORAL, msgspec.msgpack.encode([name, unit, zone, scalar.value])
        )
    plain = scalar.as_py()
    if isinstance(plain, decimal.Decimal):
        return msgspec.msgpack.Ext(_DECIMAL, str(plain).encode())
    if type(plain) in (*_SCALARS, list, dict):
        return _to_msgpack(plain, depth)
    raise TypeError(f"expected a plain value, got {type(value).__name__}")


def _decode(packed: bytes) -> Any:
    """Return the value, or the bytes themselves if they are not a valid message.

    The bytes may come from a foreign file that only claims this type.
    """
    try:
        return _decoder.decode(packed)
    except (*MISFIT, ArithmeticError, KeyError, RecursionError):
        return packed


def _extension(code: int, data: memoryview) -> Any:
    if code == _DECIMAL:
        return decimal.Decimal(bytes(data).decode())
    name, unit, zone, value = msgspec.msgpack.decode(data)
    kinds = {
        "timestamp": lambda: pa.timestamp(unit, zone),
        "duration": lambda: pa.duration(unit),
        "time32": lambda: pa.time32(unit),
        "time64": lambda: pa.time64(unit),
        "date32": pa.date32,
        "date64": pa.date64,
    }
    return pa.scalar(value, kinds[name]()).as_py()


_decoder = msgspec.msgpack.Decoder(ext_hook=_extension)
