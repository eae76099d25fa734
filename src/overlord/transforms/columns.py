"""Convert Arrow columns to token ids, texts, numbers and arguments of user functions, and back.

Every ``read_*`` function returns the values of a column, and a mapping of unreadable rows to
reasons. A column without a readable row (missing, or of a wrong type) raises ``Unfit``. The
pipeline adds the transform and the remedy. ``RowFrame`` holds the columns of a stage, and the rows
that it removes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from overlord.content import RaggedSpans
from overlord.sample import Column, Ragged, join_rows, take_rows
from overlord.sources.tables import arrow_of, column_of, groups, is_mixed, numpy_of

# Largest whole number of metadata. Numbers of many rows and sources share one array, which may be
# float64 and would round larger whole numbers.
EXACT = 2**53
# Ids are delivered as int64 and indexed as int32 by most kernels; no real vocabulary comes near.
ID_LIMIT = 2**31
# Types of ids that are used as they are, by the number of the Arrow type: the unsigned type of the
# same size, and the limit of ids in it. Ids of 64 bits are cast.
_AS_THEY_ARE: dict[int, tuple[np.dtype[Any], int]] = {
    pa.int8().id: (np.dtype(np.uint8), 2**7),
    pa.uint8().id: (np.dtype(np.uint8), 2**8),
    pa.int16().id: (np.dtype(np.uint16), 2**15),
    pa.uint16().id: (np.dtype(np.uint16), 2**16),
    pa.int32().id: (np.dtype(np.uint32), ID_LIMIT),
    pa.uint32().id: (np.dtype(np.uint32), ID_LIMIT),
}
# Type of the offsets, by the number of the type of a list.
_OFFSETS: dict[int, np.dtype[Any]] = {
    pa.list_(pa.null()).id: np.dtype(np.int32),
    pa.large_list(pa.null()).id: np.dtype(np.int64),
}
_TOO_LARGE = "a whole number beyond 2**53, which float64 would round"
# Prefix of internal columns, such as those of Meta: user functions do not receive them, and their
# results do not replace them.
HIDDEN = "\x1fmeta."
Bad = dict[int, str]  # row -> reason


class Unfit(Exception):
    """Raised for a column of which no row can be read in the requested form."""


def without_dictionaries(table: pa.Table) -> pa.Table:
    """Return the table without dictionaries and views.

    Arrow cannot join dictionaries with other columns, and cannot take rows from views.
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
            f"expected the column {name!r} ({wanted}), got {', '.join(known) or 'no column'}"
        )
    kind = table.schema.field(at).type
    return (
        kind.storage_type if isinstance(kind, pa.BaseExtensionType) and not is_mixed(kind) else kind
    )


def column(table: pa.Table, name: str, wanted: str) -> pa.Array:
    """Return one column as one array; a column of one chunk is not copied. Raises Unfit."""
    kind_of(table, name, wanted)
    chunked = table.column(name)
    array = _one_array(chunked)
    return (
        array.storage
        if isinstance(array, pa.ExtensionArray) and not is_mixed(array.type)
        else array
    )


def _one_array(chunked: pa.ChunkedArray) -> pa.Array:
    array = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
    # combine_chunks of no chunk at all returns a chunked array.
    return pa.nulls(0, chunked.type) if isinstance(array, pa.ChunkedArray) else array


Check = Callable[[pa.Table, str], None]  # raises Unfit if no row of the column can be read


def unfit_rows(table: pa.Table, name: str, check: Check) -> tuple[Bad, bool]:
    """Return the rows whose values fail ``check``, and whether to rebuild the column (``retyped``).

    Raises Unfit if all rows fail for the same reason. A column whose type passes is not examined
    row by row. Otherwise each value is checked alone, since an empty list has the type of its
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
    arrays, bad = groups(_one_array(table.column(name)))
    bad = {i: f"column {name!r}: {reason}" for i, reason in bad.items()}
    for rows, array in arrays:
        try:
            check(pa.table({name: array}), name)
        except Unfit as fault:
            bad |= dict.fromkeys(rows.tolist(), str(fault))
    if bad and len(bad) == table.num_rows and len(set(bad.values())) == 1:
        raise Unfit(bad[0])
    return bad, typed or bool(bad)


def retyped(table: pa.Table, name: str, bad: Mapping[int, str] | None = None) -> pa.Table:
    """Return the table with a column rebuilt from its values, so that these alone decide its type.

    The values of ``bad`` rows become null.
    """
    values = [None if bad and i in bad else v for i, v in enumerate(table.column(name).to_pylist())]
    return table.set_column(table.schema.get_field_index(name), name, column_of(values)[0])


def each_type(
    array: pa.Array, name: str, read: Callable[[pa.Table, str], tuple[Any, Bad]]
) -> tuple[list[Any], np.ndarray, Bad]:
    """Read a mixed column with one call of ``read`` for each type of its values.

    Returns the results of the calls, the position of each row in their concatenation, and the
    rejected rows.
    """
    arrays, unread = groups(array)
    bad = {i: f"{name} holds {reason}" for i, reason in unread.items()}
    parts, order = [], [np.zeros(0, np.int64)]
    nulls = np.array(sorted(unread), np.int64)
    for rows, part in [*arrays, (nulls, pa.nulls(len(nulls)))]:
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
    if pt.is_null(kind) or is_mixed(kind):  # each row of a mixed column is read by itself
        return
    if pt.is_fixed_size_list(kind) or pt.is_list(kind) or pt.is_large_list(kind):
        inner = kind.value_type
        if pt.is_integer(inner) or pt.is_floating(inner) or pt.is_null(inner):
            return
    raise Unfit(f"column {name!r}: expected lists of token ids (list<int>), got {kind}")


def read_ids(table: pa.Table, name: str) -> tuple[Ragged, Bad]:
    """Return a list column as unsigned token ids, if possible without a copy.

    Ids of 64 bits are cast to half the size. The type of the ids follows from the type of the
    column alone, never from the values. The bytes of a row are therefore the same in every batch.
    """
    array = column(table, name, "lists of token ids")
    if is_mixed(array.type):
        parts, order, bad = each_type(array, name, read_ids)
        return Ragged.concat(parts).take(order), bad
    check_ids(table, name)
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    if pt.is_null(array.type):
        return Ragged(np.zeros(0, np.uint32), np.zeros(len(array) + 1, np.int64)), bad
    values, offsets = lists(array)
    ids, faults = _numbers(values)
    add_faults(bad, name, offsets, [*faults, *_out_of_range(ids)])
    return Ragged(_unsigned(ids), offsets), bad


def plain_ids(table: pa.Table, name: str) -> RaggedSpans | None:
    """Return a column of lists of ids as spans of Arrow's memory.

    The ids equal those of ``read_ids``. Return None if any row or id needs a closer look: nulls,
    ids out of range, or a column of another type or of several pieces.
    """
    if (number := table.schema.get_field_index(name)) < 0:
        return None
    chunked = table.column(number)
    kind = chunked.type
    if chunked.num_chunks != 1 or (width := _OFFSETS.get(kind.id)) is None:
        return None
    array = chunked.chunk(0)
    if (found := _AS_THEY_ARE.get(kind.value_type.id)) is None or array.null_count:
        return None
    (dtype, limit), (_, edges, nulls, data) = found, array.buffers()
    values = array.values
    if not len(array) or data is None or (nulls is not None and values.null_count):
        return None
    bounds = np.frombuffer(edges, width, len(array) + 1, array.offset * width.itemsize)
    bounds = bounds.astype(np.int64)
    first, last = bounds.item(0), bounds.item(-1)
    if last == first:
        return None
    ids = np.frombuffer(data, dtype, last - first, (values.offset + first) * dtype.itemsize)
    if int(ids.max()) >= limit:
        return None
    bounds -= first
    return RaggedSpans(ids, bounds[:-1], bounds[1:])


def lists(array: pa.Array) -> tuple[pa.Array, np.ndarray]:
    """Return the flat values of a list column without unused ones, and the offsets of its rows."""
    if pt.is_fixed_size_list(array.type):
        offsets = (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * array.type.list_size
    else:
        offsets = numpy_of(array.offsets).astype(np.int64) if len(array) else np.zeros(1, np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    return array.values.slice(first, last - first), offsets - first


def add_faults(
    bad: Bad, name: str, offsets: np.ndarray, faults: list[tuple[np.ndarray, str]]
) -> None:
    """Add the rows that hold faulty positions of the flat values, each with its first reason."""
    for positions, reason in faults:
        for i in np.unique(np.searchsorted(offsets, positions, side="right") - 1):
            bad.setdefault(int(i), f"{name} {reason}")


def _numbers(values: pa.Array) -> tuple[np.ndarray, list[tuple[np.ndarray, str]]]:
    """Return flat values as integers, and the positions of nulls and fractions by reason."""
    faults: list[tuple[np.ndarray, str]] = []
    if pt.is_null(values.type):
        return np.zeros(len(values), np.uint32), [
            (np.arange(len(values)), "holds a null id")
        ] if len(values) else []
    if values.null_count:
        faults.append((null_rows(values), "holds a null id"))
        values = values.fill_null(0)
    ids = numpy_of(values)
    if ids.dtype.kind == "f":  # in JSON lines one fraction makes the whole column floating
        whole = np.isfinite(ids) & (np.floor(ids) == ids) & (np.abs(ids) < 2**53)
        faults.append((np.flatnonzero(~whole), "holds an id that is not a whole number"))
        ids = np.where(whole, ids, 0).astype(np.int64)
    return ids, faults


def _out_of_range(ids: np.ndarray) -> list[tuple[np.ndarray, str]]:
    """Return the positions of negative ids and of ids of 2**31 and more, with a reason.

    One pass over the bits: a negative number is a large unsigned one.
    """
    bits = ids.dtype.itemsize * 8
    limit = min(ID_LIMIT, 2 ** (bits - 1) if ids.dtype.kind == "i" else 2**bits)
    unsigned = ids.view(f"u{ids.dtype.itemsize}")
    if not len(ids) or limit == 2**bits or int(unsigned.max()) < limit:
        return []
    return [(np.flatnonzero(unsigned >= limit), f"holds an id below 0 or above {ID_LIMIT - 1}")]


def _unsigned(ids: np.ndarray) -> np.ndarray:
    return ids.astype(np.uint32) if ids.dtype.itemsize == 8 else ids.view(f"u{ids.dtype.itemsize}")


def check_texts(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, "text")
    if not (_is_bytes(kind) or pt.is_string(kind) or pt.is_large_string(kind) or pt.is_null(kind)):
        raise Unfit(f"column {name!r}: expected text (string), got {kind}")


def _is_bytes(kind: pa.DataType) -> bool:
    return pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_fixed_size_binary(kind)


def read_texts(table: pa.Table, name: str) -> tuple[list[str], Bad]:
    """Return a column as Python strings, and the rows without valid text; bytes must be UTF-8.

    The string of a row without valid text is "".
    """
    array = column(table, name, "text")
    if is_mixed(array.type):
        parts, order, bad = each_type(array, name, read_texts)
        joined = [text for part in parts for text in part]
        return [joined[i] for i in order], bad
    check_texts(table, name)
    bad = Bad()
    if _is_bytes(array.type):
        texts = [_decoded(i, raw, name, bad) for i, raw in enumerate(array.to_pylist())]
    else:
        try:
            texts = array.to_pylist()
        except UnicodeDecodeError:  # Parquet does not validate strings
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
        bad[i] = f"{name}: expected UTF-8, got {fault.reason} at byte {fault.start}"
        return ""


def check_numbers(table: pa.Table, name: str) -> None:
    kind = kind_of(table, name, "numbers")
    if not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind) or pt.is_null(kind)):
        raise Unfit(f"column {name!r}: expected numbers, got {kind}")


def read_numbers(table: pa.Table, name: str) -> tuple[np.ndarray, Bad]:
    """Return a numeric column as int64 or float64, and the rows without a usable number.

    Those rows have a null, a number that is not finite, or a whole number beyond 2**53.
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
    """Raise Unfit unless the column holds numbers or lists of numbers."""
    kind = kind_of(table, name, "numbers")
    if not _is_lists(kind):
        check_numbers(table, name)
    elif not (
        pt.is_integer(kind.value_type)
        or pt.is_floating(kind.value_type)
        or pt.is_null(kind.value_type)
    ):
        raise Unfit(f"column {name!r}: expected numbers, got {kind}")


def _is_lists(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind))


def read_meta(table: pa.Table, name: str, *, counts: bool = True) -> tuple[Column, Bad]:
    """Return a column of numbers or of lists of numbers, and the rows that cannot be used.

    With ``counts`` numbers in lists must not be negative.
    """
    array = column(table, name, "numbers")
    if is_mixed(array.type):
        parts, order, bad = each_type(array, name, partial(read_meta, counts=counts))
        return take_rows(join_rows(parts), order), bad
    check_meta(table, name)
    if not _is_lists(array.type):
        return read_numbers(table, name)
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    flat, offsets = lists(array)
    faults = [(null_rows(flat), "holds a null")]
    if pt.is_null(flat.type) or flat.null_count:
        flat = flat.cast(pa.int64()).fill_null(0) if pt.is_null(flat.type) else flat.fill_null(0)
    values, invalid = plain_numbers(numpy_of(flat), "", {})
    faults.append(
        (np.array(sorted(invalid), np.int64), "holds a number that is not finite, or beyond 2**53")
    )
    if counts:
        faults.append((np.flatnonzero(values < 0), "holds a number below 0"))
    add_faults(bad, name, offsets, faults)
    return Ragged(values, offsets), bad


def meta_column(column: Column) -> pa.Array:
    return ids_column(column) if isinstance(column, Ragged) else arrow_of(column)


def meta_rows(chunked: pa.ChunkedArray, row: np.ndarray, part: np.ndarray) -> Column:
    """Return a metadata column for samples, given the row and the part of each sample.

    All pieces of a split row have its number; its items stay with the first piece.
    """
    if not _is_lists(chunked.type):
        return numpy_of(_one_array(chunked))[row]
    flat, offsets = lists(_one_array(chunked))
    items = Ragged(numpy_of(flat), np.append(offsets, offsets[-1]))  # one extra row without items
    return items.take(np.where(part == 0, row, len(offsets) - 1))


def unequal_items(table: pa.Table, name: str, items: str) -> Bad:
    """Return the rows in which list ``name`` has another length than list ``items``."""
    one, other = (table.column(HIDDEN + n) for n in (name, items))
    if not (_is_lists(one.type) and _is_lists(other.type)):
        return {}
    counts, expected = (
        numpy_of(pc.list_value_length(_one_array(c))).astype(np.int64) for c in (one, other)
    )
    return {
        int(i): f"{name}: expected {expected[i]} numbers, one per item of {items}, got {counts[i]}"
        for i in np.flatnonzero(counts != expected)
    }


def plain_numbers(values: np.ndarray, name: str, bad: Bad) -> tuple[np.ndarray, Bad]:
    """Return any numeric array as int64 or float64, and ``bad`` with the unusable rows added.

    Those rows have a number that is not finite, or a whole number beyond 2**53.
    """
    if values.dtype.kind == "f":
        widened = values.astype(np.float64)
        for i in np.flatnonzero(~np.isfinite(widened)):
            bad.setdefault(int(i), f"{name} is not finite")
        return widened, bad
    if values.dtype.kind in "iu" and values.dtype.itemsize == 8:
        for i in np.flatnonzero(
            (values > EXACT) | (values < -EXACT) if values.dtype.kind == "i" else values > EXACT
        ):
            bad.setdefault(int(i), f"{name} is {_TOO_LARGE}")
    return values.astype(np.int64), bad


def numbers_of(values: Sequence[Any], name: str) -> tuple[np.ndarray, Bad]:
    """Return Python numbers as an array of int64 or float64, and the unusable rows.

    Those rows have a number that is not finite, or a whole number beyond 2**53.
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
    """Return token ids as a list column over the same memory."""
    return pa.LargeListArray.from_arrays(arrow_of(ids.offsets), arrow_of(ids.values))


def to_columns(table: pa.Table) -> dict[str, Any]:
    """Return the columns for a user function: numbers as writable arrays, other values as lists.

    A column with nulls is a list. Internal columns are left out.
    """
    visible = [name for name in table.column_names if not name.startswith(HIDDEN)]
    return {name: _values(column(table, name, "values")) for name in visible}


def _values(array: pa.Array) -> np.ndarray | list[Any]:
    if is_mixed(array.type):
        return _as_float64(array.to_pylist())
    numeric = pt.is_integer(array.type) or pt.is_floating(array.type) or pt.is_boolean(array.type)
    if numeric and not array.null_count:
        return np.array(numpy_of(array))
    values: list[Any] = array.to_pylist()
    return values


def _as_float64(values: list[Any]) -> np.ndarray | list[Any]:
    """Return numbers as an array of float64 if it holds them exactly, else the list unchanged."""
    numbers = all(type(v) is float or (type(v) is int and -EXACT <= v <= EXACT) for v in values)
    return np.array(values, np.float64) if numbers else values


def to_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Return the rows as dicts of plain Python values, without internal columns."""
    visible = [name for name in table.column_names if not name.startswith(HIDDEN)]
    rows: list[dict[str, Any]] = (
        table.select(visible).to_pylist() if visible else [{} for _ in range(table.num_rows)]
    )
    return rows


def from_values(values: Any, name: str) -> tuple[pa.Array, Bad]:
    """Return the result of a user function as a column, and the rows that no column can hold.

    The values of such rows are null in the column.
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
    """Return a number or a list of numbers. Raises TypeError, or ValueError beyond 2**53."""
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


class RowFrame:
    """The rows of a stage, the input row of each, and the removed rows with their reasons."""

    __slots__ = ("at", "bad", "dropped", "images", "index", "table")

    def __init__(self, table: pa.Table) -> None:
        self.table, self.index = without_dictionaries(table), np.arange(table.num_rows)
        self.bad: list[tuple[int, str]] = []  # (input row, reason) of each bad row
        self.dropped = 0  # number of rows that a Filter dropped
        self.at = -1  # the row of the table that a user function is processing; -1: all rows
        self.images: Any = None  # images of the rows (image_rows.PlannedImages), once they are read

    def put(self, name: str, values: pa.Array) -> None:
        at = self.table.column_names.index(name) if name in self.table.column_names else -1
        self.table = (
            self.table.append_column(name, values)
            if at < 0
            else self.table.set_column(at, name, values)
        )

    def record_bad(self, bad: Mapping[int, str]) -> np.ndarray:
        """Record the bad rows and return the others, as positions in the table."""
        self.bad += [(int(self.index[i]), reason) for i, reason in bad.items()]
        mask = np.ones(self.table.num_rows, bool)
        mask[list(bad)] = False
        return np.flatnonzero(mask)

    def drop(self, bad: Mapping[int, str]) -> None:
        if bad:
            self.take(self.record_bad(bad))

    def drop_all(self, reason: str) -> None:
        self.drop(dict.fromkeys(range(self.table.num_rows), reason))

    def drop_unfit(self, name: str, check: Check, reason_of: Callable[[str], str]) -> None:
        """Drop the rows of which a column cannot be read. Raises Unfit if no row can be read."""
        bad, retype = unfit_rows(self.table, name, check)
        self.drop({i: reason_of(reason) for i, reason in bad.items()})
        if retype:
            self.table = retyped(self.table, name)

    def keep(self, mask: np.ndarray) -> None:
        if not mask.all():
            self.take(np.flatnonzero(mask))

    def take(self, rows: np.ndarray) -> None:
        self.table, self.index = self.table.take(arrow_of(rows)), self.index[rows]


def select_columns(frame: RowFrame, names: Sequence[str], made: Sequence[str]) -> None:
    """Keep the named columns, those that transforms ``made``, and hidden ones."""
    for name in names:
        column(frame.table, name, "any type")
    hidden = [name for name in frame.table.column_names if name.startswith(HIDDEN)]
    kept = [*names, *(name for name in made if name not in names), *hidden]
    frame.table = frame.table.select(kept)
