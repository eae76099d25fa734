"""Between Arrow columns and what is made of them: token ids, texts, numbers, and what users'
functions take and give.

Every reader here returns what it could read and a mapping of the rows it could not, with the
reason. A column that no row of can be read (missing, or of a type that never fits) raises
``Unfit``; the pipeline adds who and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from overlord.sample import Column, Ragged, join_rows, take_rows
from overlord.sources.arrow_numpy import arrow_of, numpy_of
from overlord.sources.mixed_columns import column_of, groups, is_mixed

EXACT = (
    2**53
    # metadata of many rows and sources share one array, maybe of float64; beyond, whole numbers
    # would
    # be rounded
)
ID_LIMIT = (
    2**31
)  # ids are delivered as int64 and indexed as int32 by most kernels; nothing real comes near
_TOO_LARGE = "a whole number beyond 2**53, which float64 would round"
HIDDEN = "\x1fmeta."  # columns that Meta made: users' functions neither see nor lose them
Bad = dict[int, str]  # row -> reason


class Unfit(Exception):
    """No row of this column can be read as wanted."""


def plain(table: pa.Table) -> pa.Table:
    """Without dictionaries and views: Arrow can neither join the one with plain columns nor take
    rows from the other.
    """
    for i, field in enumerate(table.schema):
        wanted = field.type.value_type if pt.is_dictionary(field.type) else field.type
        if pt.is_string_view(wanted) or pt.is_binary_view(wanted):
            wanted = pa.large_string() if pt.is_string_view(wanted) else pa.large_binary()
        if wanted is not field.type:
            table = table.set_column(i, field.name, table.column(i).cast(wanted))
    return table


def kind_of(table: pa.Table, name: str, wanted: str) -> pa.DataType:
    at = table.schema.get_field_index(name)
    if at < 0:
        known = [n for n in table.column_names if not n.startswith(HIDDEN)]
        raise Unfit(
            f"no column {name!r} ({wanted} wanted); the columns are: {', '.join(known) or 'none'}"
        )
    kind = table.schema.field(at).type
    return (
        kind.storage_type if isinstance(kind, pa.BaseExtensionType) and not is_mixed(kind) else kind
    )


def column(table: pa.Table, name: str, wanted: str) -> pa.Array:
    """One column as one array; no copy when the table has one chunk, as a slice that was just read
    has.
    """
    kind_of(table, name, wanted)
    chunked = table.column(name)
    found = _one(chunked)
    return (
        found.storage
        if isinstance(found, pa.ExtensionArray) and not is_mixed(found.type)
        else found
    )


def _one(chunked: pa.ChunkedArray) -> pa.Array:
    found = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    return (
        pa.nulls(0, chunked.type) if isinstance(found, pa.ChunkedArray) else found
    )  # combine_chunks of no chunk at all


Check = Callable[[pa.Table, str], None]  # raises Unfit if no row of the column can be read


def unfit_rows(table: pa.Table, name: str, check: Check) -> tuple[Bad, bool]:
    """List the rows whose values do not pass ``check`` alone, and whether the others need another
    type. Raises Unfit if none passes.

    A column passes as a whole if its type does. Else rows decide: an empty list has the type of its
    neighbours.
    """
    typed = name not in table.column_names or not is_mixed(table.schema.field(name).type)
    if typed:
        try:
            check(table, name)
        except Unfit:
            if name not in table.column_names or not table.num_rows:
                raise
        else:
            return {}, False
    found, bad = groups(_one(table.column(name)))
    bad = {i: f"column {name!r}: {reason}" for i, reason in bad.items()}
    for rows, array in found:
        try:
            check(pa.table({name: array}), name)
        except Unfit as fault:
            bad |= dict.fromkeys(rows.tolist(), str(fault))
    if bad and len(bad) == table.num_rows and len(set(bad.values())) == 1:
        raise Unfit(bad[0])
    return bad, typed or bool(bad)


def retyped(table: pa.Table, name: str, bad: Mapping[int, str] | None = None) -> pa.Table:
    """Give a column the type that its values have without those of other rows; ``bad`` rows become
    null.
    """
    values = [None if bad and i in bad else v for i, v in enumerate(table.column(name).to_pylist())]
    return table.set_column(table.schema.get_field_index(name), name, column_of(values)[0])


def _each_type(
    array: pa.Array, name: str, read: Callable[[pa.Table, str], tuple[Any, Bad]]
) -> tuple[list[Any], np.ndarray, Bad]:
    """Read a mixed column type by type: what ``read`` returned, where each row is in these joined,
    and the rows it refused.
    """
    found, unread = groups(array)
    bad = {i: f"{name} holds {reason}" for i, reason in unread.items()}
    parts, order = [], [np.zeros(0, np.int64)]
    nulls = np.array(sorted(unread), np.int64)
    for rows, part in [*found, (nulls, pa.nulls(len(nulls)))]:
        try:
            values, faults = read(pa.table({name: part}), name)
        except Unfit as fault:
            values, faults = read(pa.table({name: pa.nulls(len(rows))}), name)
            faults = dict.fromkeys(range(len(rows)), str(fault))
        parts.append(values)
        order.append(rows)
        bad = {int(rows[i]): reason for i, reason in faults.items()} | bad
    return parts, np.argsort(np.concatenate(order)), bad


def check_ids(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, "lists of token ids")
    if pt.is_null(kind) or is_mixed(kind):  # of a mixed column each row is read by itself
        return
    if pt.is_fixed_size_list(kind) or pt.is_list(kind) or pt.is_large_list(kind):
        inner = kind.value_type
        if pt.is_integer(inner) or pt.is_floating(inner) or pt.is_null(inner):
            return
    raise Unfit(f"column {name!r} has the type {kind}; lists of token ids (list<int>) expected")


def read_ids(table: pa.Table, name: str) -> tuple[Ragged, Bad]:
    """A list column as token ids, without a copy (int64: cast to half the size) and without Python
    per row.

    The type of the ids follows from the type of the column alone, never from the values, so that
    the bytes of a row are the same in whatever batch it comes.
    """
    array = column(table, name, "lists of token ids")
    if is_mixed(array.type):
        parts, order, bad = _each_type(array, name, read_ids)
        return Ragged.concat(parts).take(order), bad
    check_ids(table, name)
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    if pt.is_null(array.type):
        return Ragged(np.zeros(0, np.uint32), np.zeros(len(array) + 1, np.int64)), bad
    values, offsets = lists(array)
    ids, faults = _numbers(values)
    _blame(bad, name, offsets, [*faults, *_out_of_range(ids)])
    return Ragged(_narrow(ids), offsets), bad


def lists(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """A list column as its flat values, nothing unused, and offsets into them."""
    if pt.is_fixed_size_list(array.type):
        offsets = (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * array.type.list_size
    else:
        offsets = numpy_of(array.offsets).astype(np.int64) if len(array) else np.zeros(1, np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    return array.values.slice(first, last - first), offsets - first


def _blame(bad: Bad, name: str, offsets: np.ndarray, faults: list[tuple[np.ndarray, str]]) -> None:
    """Rows that hold the faulty positions, each with its first reason."""
    for positions, reason in faults:
        for i in np.unique(np.searchsorted(offsets, positions, side="right") - 1):
            bad.setdefault(int(i), f"{name} {reason}")


def _numbers(values: pa.Array) -> tuple[np.ndarray, list[tuple[np.ndarray, str]]]:
    """Flat values as integers; what is null or has a fraction is listed by position."""
    faults: list[tuple[np.ndarray, str]] = []
    if pt.is_null(values.type):
        return np.zeros(len(values), np.uint32), [
            (np.arange(len(values)), "holds a null id")
        ] if len(values) else []
    if values.null_count:
        faults.append((null_rows(values), "holds a null id"))
        values = values.fill_null(0)
    ids = numpy_of(values)
    if ids.dtype.kind == "f":  # JSON: one row with a fraction makes the whole column floating
        whole = np.isfinite(ids) & (np.floor(ids) == ids) & (np.abs(ids) < 2**53)
        faults.append((np.flatnonzero(~whole), "holds an id that is no whole number"))
        ids = np.where(whole, ids, 0).astype(np.int64)
    return ids, faults


def _out_of_range(ids: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """Negative ids and ids of 2**31 and more. One pass over the bits: a negative number is a large
    unsigned one.
    """
    bits = ids.dtype.itemsize * 8
    limit = min(ID_LIMIT, 2 ** (bits - 1) if ids.dtype.kind == "i" else 2**bits)
    unsigned = ids.view(f"u{ids.dtype.itemsize}")
    if not len(ids) or limit == 2**bits or int(unsigned.max()) < limit:
        return []
    return [(np.flatnonzero(unsigned >= limit), f"holds an id below 0 or above {ID_LIMIT - 1}")]


def _narrow(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint32) if ids.dtype.itemsize == 8 else ids.view(f"u{ids.dtype.itemsize}")


def check_texts(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, "text")
    if not (_is_bytes(kind) or pt.is_string(kind) or pt.is_large_string(kind) or pt.is_null(kind)):
        raise Unfit(f"column {name!r} has the type {kind}; text (string) expected")


def _is_bytes(kind: pa.DataType) -> bool:
    return pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)


def read_texts(table: pa.Table, name: str) -> tuple[list[str], Bad]:
    """A column as Python strings; bytes are taken as UTF-8. Rows that are no text are "" and
    listed.
    """
    array = column(table, name, "text")
    if is_mixed(array.type):
        parts, order, bad = _each_type(array, name, read_texts)
        joined = [text for part in parts for text in part]
        return [joined[i] for i in order], bad
    check_texts(table, name)
    bad = Bad()
    if _is_bytes(array.type):
        texts = [_decoded(i, raw, name, bad) for i, raw in enumerate(array.to_pylist())]
    else:
        try:
            texts = array.to_pylist()
        except UnicodeDecodeError:  # Parquet does not check what a writer calls a string
            texts = [
                _decoded(i, s.as_buffer().to_pybytes() if s.is_valid else None, name, bad)
                for i, s in enumerate(array)
            ]
    if array.null_count:
        bad |= {int(i): f"{name} is null or missing" for i in null_rows(array)}
        texts = [text if text is not None else "" for text in texts]
    return texts, bad


def _decoded(i: int, raw: bytes | None, name: str, bad: Bad) -> str:
    try:
        return (raw or b"").decode()
    except UnicodeDecodeError as fault:
        bad[i] = f"{name} is not UTF-8: {fault.reason} at byte {fault.start}"
        return ""


def check_numbers(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, "numbers")
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_null(kind)):
        raise Unfit(f"column {name!r} has the type {kind}; numbers expected")


def read_numbers(table: pa.Table, name: str) -> tuple[np.ndarray, Bad]:
    """A numeric column as int64 or float64; nulls and what is not finite are listed, since no plan
    can count with them.
    """
    check_numbers(table, name)
    array = column(table, name, "numbers")
    if pt.is_null(array.type):
        return np.zeros(len(array), np.int64), dict.fromkeys(
            range(len(array)), f"{name} is null or missing"
        )
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    if array.null_count:
        array = array.fill_null(False if pt.is_boolean(array.type) else 0)
    return plain_numbers(numpy_of(array), name, bad)


def check_meta(table: pa.Table, name: str) -> None:
    """Numbers, or lists of them."""
    kind = kind_of(table, name, "numbers")
    if not _is_lists(kind):
        check_numbers(table, name)
    elif not (
        pt.is_integer(kind.value_type)
        or pt.is_floating(kind.value_type)
        or pt.is_null(kind.value_type)
    ):
        raise Unfit(f"column {name!r} has the type {kind}; numbers expected")


def _is_lists(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def read_meta(table: pa.Table, name: str) -> tuple[Column, Bad]:
    """A column of numbers, or of lists of them: then every number counts something, and none is
    negative.
    """
    array = column(table, name, "numbers")
    if is_mixed(array.type):
        parts, order, bad = _each_type(array, name, read_meta)
        return take_rows(join_rows(parts), order), bad
    check_meta(table, name)
    if not _is_lists(array.type):
        return read_numbers(table, name)
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    flat, offsets = lists(array)
    faults = [(null_rows(flat), "holds a null")]
    if pt.is_null(flat.type) or flat.null_count:
        flat = flat.cast(pa.int64()).fill_null(0) if pt.is_null(flat.type) else flat.fill_null(0)
    values, wide = plain_numbers(numpy_of(flat), "", {})
    faults.append(
        (np.array(sorted(wide), np.int64), "holds a number that is not finite, or too large")
    )
    faults.append((np.flatnonzero(values < 0), "holds a number below 0"))
    _blame(bad, name, offsets, faults)
    return Ragged(values, offsets), bad


def meta_column(found: Column) -> pa.Array:
    return ids_column(found) if isinstance(found, Ragged) else arrow_of(found)


def meta_rows(chunked: pa.ChunkedArray, row: np.ndarray, part: np.ndarray) -> Column:
    """Metadata of samples by their row. The pieces of a split sample share its number; its items
    stay with the first piece.
    """
    if not _is_lists(chunked.type):
        return numpy_of(_one(chunked))[row]
    flat, offsets = lists(_one(chunked))
    items = Ragged(numpy_of(flat), np.append(offsets, offsets[-1]))  # one row more, without items
    return items.take(np.where(part == 0, row, len(offsets) - 1))


def unequal_items(table: pa.Table, name: str, items: str) -> Bad:
    """Rows in which a list has not one number for each item of another."""
    one, other = (table.column(HIDDEN + n) for n in (name, items))
    if not (_is_lists(one.type) and _is_lists(other.type)):
        return {}
    found, wanted = (numpy_of(pc.list_value_length(_one(c))).astype(np.int64) for c in (one, other))
    return {
        int(i): f"{name} has {found[i]} numbers for {wanted[i]} items of {items}"
        for i in np.flatnonzero(found != wanted)
    }


def plain_numbers(values: np.ndarray, name: str, bad: Bad) -> tuple[np.ndarray, Bad]:
    """Any numeric array as int64 or float64."""
    if values.dtype.kind == "f":
        wide = values.astype(np.float64)
        for i in np.flatnonzero(~np.isfinite(wide)):
            bad.setdefault(int(i), f"{name} is not finite")
        return wide, bad
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        for i in np.flatnonzero(
            (values > EXACT) | (values < -EXACT) if values.dtype.kind == "i" else values > EXACT
        ):
            bad.setdefault(int(i), f"{name} is {_TOO_LARGE}")
    return values.astype(np.int64), bad


def numbers_of(values: Sequence[Any], name: str) -> tuple[np.ndarray, Bad]:
    """Single numbers as int64 or float64; rows with a whole number that float64 would round are
    listed.
    """
    bad = {
        i: f"{name} is {_TOO_LARGE}"
        for i, v in enumerate(values)
        if isinstance(v, (int, np.integer)) and not -EXACT <= v <= EXACT
    }
    return plain_numbers(
        np.asarray([0 if i in bad else v for i, v in enumerate(values)] if bad else values),
        name,
        bad,
    )


def null_rows(array: pa.Array) -> np.ndarray:
    if not array.null_count:
        return np.zeros(0, np.int64)
    return np.flatnonzero(numpy_of(pc.is_null(array)))


def ids_column(ids: Ragged) -> pa.Array:
    """Token ids as a list column over the same memory."""
    return pa.LargeListArray.from_arrays(arrow_of(ids.offsets), arrow_of(ids.values))


def to_columns(table: pa.Table) -> dict[str, Any]:
    """What a user's function gets: numbers as an array of its own (it may write to it), everything
    else as a list.
    """
    visible = [name for name in table.column_names if not name.startswith(HIDDEN)]
    return {name: _values(column(table, name, "values")) for name in visible}


def _values(array: pa.Array) -> np.ndarray | list[Any]:
    if is_mixed(array.type):
        return _whole_or_not(array.to_pylist())
    numeric = pt.is_integer(array.type) or pt.is_floating(array.type) or pt.is_boolean(array.type)
    if numeric and not array.null_count:
        return np.array(numpy_of(array))
    values: list[Any] = array.to_pylist()
    return values


def _whole_or_not(values: list[Any]) -> np.ndarray | list[Any]:
    """Whole numbers beside fractions are an array of float64 if it holds them exactly."""
    numbers = all(type(v) is float or (type(v) is int and -EXACT <= v <= EXACT) for v in values)
    return np.array(values, np.float64) if numbers else values


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """The same row by row, all in plain Python values."""
    visible = [name for name in table.column_names if not name.startswith(HIDDEN)]
    rows: list[dict[str, Any]] = (
        table.select(visible).to_pylist() if visible else [{} for _ in range(table.num_rows)]
    )
    return rows


def from_values(values: Any, name: str) -> tuple[pa.Array, Bad]:
    """A column from what a user's function returned. Rows with a value that no column can hold are
    listed.
    """
    if isinstance(values, (pa.Array, pa.ChunkedArray)):
        return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values, {}
    if isinstance(values, np.ndarray) and values.ndim == 1 and values.dtype != object:
        return pa.array(values), {}
    array, bad = column_of(list(values))
    return array, {i: f"{name} cannot hold {reason}" for i, reason in bad.items()}


def as_number(value: Any) -> Any:
    if isinstance(value, (bool, int, float, np.number, np.bool_)) and not isinstance(
        value, np.complexfloating
    ):
        if isinstance(value, (int, np.integer)) and not -EXACT <= value <= EXACT:
            raise ValueError(f"{value} is {_TOO_LARGE}")
        return value
    raise TypeError(f"expected a number, got {value!r}")


def as_meta(value: Any) -> Any:
    """A number, or a list of them."""
    if isinstance(value, (list, tuple, np.ndarray)) and np.ndim(value) == 1:
        return [as_number(v) for v in value]
    return as_number(value)


def as_bool(value: Any) -> bool:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    raise TypeError(f"expected True or False, got {value!r}")


def as_row(value: Any) -> Mapping[str, Any]:
    if isinstance(value, Mapping) and value and all(isinstance(name, str) for name in value):
        return value
    raise TypeError(f"expected a dict of values by column name, got {type(value).__name__}")
