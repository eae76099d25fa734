"""Conversion of Python values, foreign tables and columns of several types to Arrow tables."""

from __future__ import annotations

import decimal
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from overlord.sources.base import NO_ROWS, RawSlice, ReadOptions, check_refused

# ----------------------------------------------------------------------------
# Conversion between Arrow and numpy arrays that share memory.
#
# ``Array.to_numpy`` and ``pa.array`` do the same, but import pandas first if it is installed. The
# import costs 30 MB and half a second in every process.


def numpy_of(array: pa.Array) -> np.ndarray:
    """Return the values of an array: numbers without nulls as a view, booleans as a copy.

    Arrow converts arrays with nulls or of other types.
    """
    kind, n = array.type, len(array)
    if array.null_count or not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind)):
        converted: np.ndarray = array.to_numpy(zero_copy_only=False)
        return converted
    memory = array.buffers()[1]
    if pt.is_boolean(kind):  # one bit per value
        bits = np.frombuffer(memory, np.uint8) if n else np.zeros(0, np.uint8)
        return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + n].view(
            np.bool_
        )
    dtype = np.dtype(kind.to_pandas_dtype())  # despite its name this returns a numpy type
    if not n:
        return np.zeros(0, dtype)
    return np.frombuffer(memory, dtype, count=n, offset=array.offset * dtype.itemsize)


def arrow_of(values: np.ndarray) -> pa.Array:
    """Return a one-dimensional numpy array as an Arrow array.

    Contiguous integers and floats of native byte order are not copied.
    """
    if values.dtype.kind not in "iuf" or not values.dtype.isnative:
        return pa.array(values)
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )


# ----------------------------------------------------------------------------
# Columns whose values do not share one Arrow type.
#
# Such columns come from JSON lines, rows of datasets and results of user functions.
#
# Arrow converts values until they share a type: 1 next to 2.5 becomes 1.0, ``{"a": 1}`` next to
# ``{"b": 2}`` gains a field. A row must not depend on its neighbours. ``column_of`` therefore
# keeps a native array only if it holds every value exactly as Arrow holds it alone. Otherwise it
# stores each value by itself, as msgpack, in a column of type ``MIXED``.

# Errors of a value that no column can hold.
MISFIT = (pa.ArrowException, TypeError, ValueError, OverflowError)
# Levels of nesting; with more, the result would depend on the remaining stack of the caller.
MAX_DEPTH = 100
BadValues = dict[int, str]  # row -> reason

_SCALARS = (type(None), bool, int, float, str, bytes)
_DECIMAL, _TEMPORAL = 1, 2  # codes of msgpack extensions
_SHOWN = 60  # most characters of a value in a reason


class MixedScalar(pa.ExtensionScalar):  # type: ignore[misc]
    """One value of a mixed column, decoded by ``as_py``."""

    def as_py(self, **_: Any) -> Any:
        """Return the Python value; ``to_pylist`` of arrays and tables calls this method."""
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

    def __hash__(self) -> int:  # types with this one inside are keys of caches
        return hash(self.extension_name)


MIXED = MixedType()
pa.register_extension_type(MIXED)


def is_mixed(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds values of several types."""
    return isinstance(kind, MixedType)


def type_name(kind: pa.DataType) -> str:
    """Return the name of a column's type for users: "mixed", or Arrow's name."""
    return "mixed" if is_mixed(kind) else str(kind)


def column_of(values: Sequence[Any], *, decoded: bool = False) -> tuple[pa.Array, BadValues]:
    """Return a column that holds every value unchanged, and the rows that no column can hold.

    Such rows are null in the column, and listed with their reasons. ``decoded``: the values come
    from a JSON decoder, so a native array of whole numbers, texts or booleans needs no check.
    """
    try:
        array = pa.array(values)
        if (decoded and _certain(array.type)) or _exact(values, array.type):
            return array, {}
    except MISFIT:
        pass
    packed, bad = list[bytes | None](), BadValues()
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


def groups(array: pa.Array) -> tuple[list[tuple[np.ndarray, pa.Array]], BadValues]:
    """Split a mixed array by the type of each single value.

    Returns (row numbers, native array) pairs, and the reason for each row without a native type.
    """
    alone: dict[pa.DataType, list[tuple[int, pa.Array]]] = {}
    bad: BadValues = {}
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
    """Return the ``repr`` of a value for an error, shortened to ``_SHOWN`` characters."""
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
    """Return the family of a Python or numpy type: Arrow infers one kind of type for a family.

    Any type outside the families is returned unchanged.
    """
    families: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("bool", (bool, np.bool_)),
        ("text", (str,)),
        ("bytes", (bytes, bytearray, memoryview)),
        ("float", (float, np.floating)),
        ("integer", (int, np.integer)),
    )
    if issubclass(cls, np.timedelta64):  # a subclass of np.integer
        return cls
    return next((name for name, types in families if issubclass(cls, types)), cls)


# Encode single values of a mixed column as msgpack.


def _encode(value: Any) -> bytes:
    return msgspec.msgpack.encode(_to_msgpack(value, 0))


def _to_msgpack(value: Any, depth: int) -> Any:
    """Return the value in types that msgpack distinguishes. Raises one of ``MISFIT``."""
    if depth > MAX_DEPTH:
        raise ValueError(f"expected at most {MAX_DEPTH} levels of nesting, got more")
    kind = type(value)
    if kind is int and not -(2**63) <= value < 2**64:
        raise ValueError("expected a whole number from -2**63 to 2**64 - 1, got one outside")
    if kind in _SCALARS:
        return value
    if kind in (list, tuple):
        return [_to_msgpack(v, depth + 1) for v in value]
    if kind is dict:
        if not all(type(k) is str for k in value):
            raise TypeError("expected keys of an object as text, got keys of another type")
        return {k: _to_msgpack(v, depth + 1) for k, v in value.items()}
    return _converted(value, depth)


def _converted(value: Any, depth: int) -> Any:
    """Return a value of any other type in the form that Arrow gives it in a column of its own."""
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
    """Return the value of a msgpack message, or the bytes themselves if they are invalid.

    Invalid bytes may come from a foreign file that declares the type ``overlord.mixed``.
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


# ----------------------------------------------------------------------------
# Conversion of Python values and foreign tables to valid Arrow tables.
#
# Rows that do not fit are reported, not raised.

BadRows = list[tuple[int, str]]


def table_of(
    values: dict[str, list[Any]], n: int, *, decoded: bool = False
) -> tuple[pa.Table, BadRows]:
    """Return a table that holds every value unchanged, and the bad rows with their reasons.

    A row is bad, and not in the table, if no column can hold one of its values. ``n`` is the number
    of rows if there are no columns. ``decoded``: the values come from a JSON decoder.
    """
    arrays, bad = {}, dict[int, str]()
    for name, column in values.items():
        arrays[name], misfits = column_of(column, decoded=decoded)
        for i, reason in misfits.items():
            bad.setdefault(i, f"column {name!r}: {reason}")
    table = pa.table(arrays) if arrays else empty(n)
    if not bad:
        return table, []
    return drop_rows(table, sorted(bad)), sorted(bad.items())


def empty(n: int = 0, names: Sequence[str] | None = None) -> pa.Table:
    """Return a table of n rows of nulls; without names it has no columns."""
    return pa.table({name: pa.nulls(n) for name in ("_", *(names or ()))}).select(list(names or ()))


def columns_of(
    rows: Sequence[dict[str, Any]], columns: Sequence[str] | None
) -> dict[str, list[Any]]:
    """Return dicts as columns: a list of values for each name. A missing value is None.

    Without ``columns``, names are in order of first appearance.
    """
    names = list(dict.fromkeys(k for row in rows for k in row)) if columns is None else columns
    return {str(name): [row.get(name) for row in rows] for name in names}


def check_values(columns: dict[str, list[Any]], options: ReadOptions) -> None:
    """Raise BadFile if a refused column has a value that is not None.

    Also remove the refused columns that the job did not request from ``columns``, in place.
    """
    for name in options.refused:
        if any(value is not None for value in columns.get(name, ())):
            check_refused((name,), options)
        if options.columns is not None and name not in options.columns:
            columns.pop(name, None)


def without_invalid_rows(
    table: pa.Table, max_sample_bytes: int, every_column: bool = False
) -> tuple[pa.Table, BadRows]:
    """Return the table without invalid or too large rows, and those rows with their reasons.

    Invalid rows have text that is not UTF-8. ``every_column``: offsets inside the arrays come from
    the file, so every column is validated and not only text. ``table`` may be a view.
    """
    bad: dict[int, str] = {}
    doubtful = [i for i, f in enumerate(table.schema) if every_column or has_text(f.type)]
    if doubtful:
        view = table.select(doubtful)
        try:
            view.validate(full=True)
        except pa.ArrowInvalid:
            bad.update(_broken_rows(view))
    if bad or (
        table.get_total_buffer_size() > max_sample_bytes and table.nbytes > max_sample_bytes
    ):
        for i in range(table.num_rows):
            if i not in bad and (size := table.slice(i, 1).nbytes) > max_sample_bytes:
                bad[i] = too_large(size, max_sample_bytes)
    return (drop_rows(table, sorted(bad)), sorted(bad.items())) if bad else (table, [])


def drop_rows(table: pa.Table, rows: list[int]) -> pa.Table:
    """Return the table without ``rows`` (ascending), as views of the rows between them.

    ``take`` would follow invalid offsets of the removed rows and crash the process.
    """
    edges = [-1, *rows, table.num_rows]
    return pa.concat_tables([table.slice(a + 1, b - a - 1) for a, b in pairwise(edges)])


def _broken_rows(view: pa.Table) -> dict[int, str]:
    bad: dict[int, str] = {}
    for name in view.column_names:
        for i in range(view.num_rows):
            try:
                view.slice(i, 1).select([name]).validate(full=True)
            except pa.ArrowInvalid as error:
                reason = (
                    "expected UTF-8, got other bytes"
                    if "UTF8" in str(error)
                    else str(error).rpartition("Invalid: ")[2]
                )
                bad.setdefault(i, f"column {name!r}: {reason}")
    return bad


@lru_cache(maxsize=256)  # called for every slice
def has_text(kind: pa.DataType) -> bool:
    """Return whether values of a type hold text, which may be invalid UTF-8."""
    if is_mixed(kind):
        return False
    if pa.types.is_nested(kind):
        return any(has_text(kind.field(k).type) for k in range(kind.num_fields))
    if pa.types.is_dictionary(kind):
        return has_text(kind.value_type)
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def too_large(size: int, limit: int) -> str:
    return f"expected a row of at most max_sample_bytes={limit} bytes, got {size}"


def rows_of(table: pa.Table, at: np.ndarray) -> pa.Table:
    """Return the rows ``at`` of a table; consecutive rows (unshuffled sources) are a view."""
    if len(at) and int(at[-1]) - int(at[0]) == len(at) - 1 and bool((at[1:] > at[:-1]).all()):
        return table.slice(int(at[0]), len(at))
    return take_table(table, at)


def compact(table: pa.Table) -> pa.Table:
    """Copy the rows into their own memory, so that their row group or file can be freed.

    A column of more than 2 GB of text or of differing dictionaries is not copied.
    """
    return (
        pa.table([_copied(column) for column in table.columns], schema=table.schema)
        if table.num_columns
        else table
    )


# Mean length of lists from which copying one by one is cheaper than Arrow's gathering. Measured:
# 1.6 ns per value by Arrow; 0.2 us per list and the copy itself otherwise.
LONG_LISTS = 160


def take_table(table: pa.Table, rows: np.ndarray) -> pa.Table:
    """Return the chosen rows in the given order; long lists of numbers are copied one by one."""
    if not any(_is_long(column) for column in table.columns):
        return table.take(arrow_of(rows))
    index = arrow_of(rows)
    columns = [_taken(c.chunk(0), rows) if _is_long(c) else c.take(index) for c in table.columns]
    return pa.table(columns, schema=table.schema)


def _is_long(column: pa.ChunkedArray) -> bool:
    """Return whether a column holds lists of numbers without nulls, long ones on average."""
    kind = column.type
    if column.num_chunks != 1 or column.null_count:
        return False
    if not (pt.is_list(kind) or pt.is_large_list(kind)):
        return False
    inner, lists = kind.value_type, column.chunk(0)
    if not (pt.is_integer(inner) or pt.is_floating(inner)) or lists.values.null_count:
        return False
    edges = numpy_of(lists.offsets)
    return bool(len(lists) and edges[-1] - edges[0] > LONG_LISTS * len(lists))


def _taken(lists: pa.ListArray | pa.LargeListArray, rows: np.ndarray) -> pa.Array:
    values, edges = numpy_of(lists.values), numpy_of(lists.offsets)
    starts, stops = edges[rows], edges[rows + 1]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    pieces = [values[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    flat = arrow_of(np.concatenate([values[:0], *pieces]))
    if pt.is_large_list(lists.type):
        return pa.LargeListArray.from_arrays(arrow_of(offsets), flat, type=lists.type)
    if int(offsets[-1]) >= 2**31:  # rows that are taken several times may exceed 32 bits
        return lists.take(arrow_of(rows))
    return pa.ListArray.from_arrays(arrow_of(offsets.astype(np.int32)), flat, type=lists.type)


def _copied(column: pa.ChunkedArray) -> pa.Array:
    pieces = [c for c in column.chunks if len(c)]
    if not pieces:
        return pa.nulls(0, column.type)
    # A version of concat_arrays may return a single array unchanged; an empty piece forces a copy.
    if len(pieces) == 1:
        pieces.append(pieces[0].slice(0, 0))
    try:
        return pa.concat_arrays(pieces)
    except pa.ArrowInvalid:  # more than 2 GB of text, or differing dictionaries
        return column


def slice_of(first_row: int, n: int, table: pa.Table, bad: BadRows, last: bool) -> RawSlice:
    """Return a slice of n consecutive rows; ``table`` holds those that are not in ``bad``."""
    return RawSlice(np.arange(first_row, first_row + n, dtype=np.int64), table, bad, last)


def unreadable_slice(first_row: int, n: int, table: pa.Table, reason: str, last: bool) -> RawSlice:
    """Return a slice of n unreadable rows; ``table`` is empty and has the requested columns."""
    return slice_of(first_row, n, table, [(i, reason) for i in range(n)], last)


def no_rows(options: ReadOptions, skip: int, reason: str = NO_ROWS) -> RawSlice:
    """Return the only slice of a chunk without rows: one unreadable row with the reason.

    If ``skip`` is above 0, return the empty slice after it.
    """
    blank = empty(0, options.columns)
    return slice_of(1, 0, blank, [], True) if skip else unreadable_slice(0, 1, blank, reason, True)
