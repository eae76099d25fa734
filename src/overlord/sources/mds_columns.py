"""Values of MDS columns as Arrow arrays: one function per encoding, over all rows of a slice.

The bytes are not trusted. A row whose values do not fill its bytes exactly is reported with its
reason; its values are then null or empty, and the caller drops the row. Pickles are never read.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.sources import tables as cols
from overlord.sources.mds_index import Columns, Encoding

Bad = dict[int, str]  # row -> reason
# Types of arrays by the code in their first byte, if the encoding does not name the type.
_DTYPES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}
_FAULTS = (ValueError, ArithmeticError, RecursionError, OverflowError)
# Colour type and bits of a pixel in a PNG, and bytes of a pixel, by the mode of an image.
_PNG_MODES = {"1": (0, 1, 0), "L": (0, 8, 1), "LA": (4, 8, 2), "RGB": (2, 8, 3), "RGBA": (6, 8, 4)}


def value_edges(
    data: np.ndarray, edges: np.ndarray, columns: Columns
) -> tuple[np.ndarray, np.ndarray, Bad]:
    """Return first byte and end of every value, as arrays [rows, columns], and the broken rows.

    ``data`` has the bytes of consecutive samples, and ``edges`` the first byte of each, then the
    end. A sample begins with the sizes of its values that vary. The values of a broken row are
    empty.
    """
    starts, lengths = edges[:-1], edges[1:] - edges[:-1]
    varies = np.array([size is None for size in columns.sizes], np.bool_)
    head = 4 * int(varies.sum())
    sizes = np.tile(np.array([size or 0 for size in columns.sizes], np.int64), (len(starts), 1))
    short = lengths < head
    if head and len(starts) and not short.all():
        at = np.where(short, starts[np.argmin(short)], starts)
        words = data[at[:, None] + np.arange(head)]
        sizes[:, varies] = np.ascontiguousarray(words).view("<u4")
    filled = head + sizes.sum(axis=1)
    wrong = short | (filled != lengths)
    bad = {
        int(i): f"expected {filled[i] if not short[i] else head} bytes for the values of the "
        f"sample, got {lengths[i]}"
        for i in np.flatnonzero(wrong)
    }
    sizes[wrong] = 0
    stops = (starts + np.where(wrong, 0, head))[:, None] + np.cumsum(sizes, axis=1)
    return stops - sizes, stops, bad


def read_column(
    data: np.ndarray, starts: np.ndarray, stops: np.ndarray, encoding: Encoding
) -> tuple[pa.Array, Bad]:
    """Return the values of a column, and the rows whose bytes are not valid.

    A row that is empty and should not be was reported before.
    """
    if encoding.kind in ("bytes", "jpeg", "png"):
        return _binary(data, starts, stops), {}
    if encoding.kind == "str":
        return _binary(data, starts, stops).view(pa.large_string()), {}
    if encoding.kind == "scalar":
        assert encoding.dtype is not None
        values = _fixed(data, starts, stops, encoding.dtype.itemsize)
        return cols.arrow_of(values.view(encoding.dtype).reshape(-1)), {}
    if encoding.kind == "ndarray":
        return _arrays(data, starts, stops, encoding)
    return _parsed(data, starts, stops, _PARSERS[encoding.kind])


def _joined(data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return the bytes of consecutive ranges as one array; adjacent ranges are a view."""
    if not len(starts):
        return data[:0]
    if np.array_equal(starts[1:], stops[:-1]):
        return data[int(starts[0]) : int(stops[-1])]
    return np.concatenate([data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)])


def _offsets(lengths: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _binary(data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> pa.Array:
    offsets = _offsets(stops - starts)
    values = np.ascontiguousarray(_joined(data, starts, stops))
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(values)]
    return pa.Array.from_buffers(pa.large_binary(), len(starts), buffers)


def _fixed(data: np.ndarray, starts: np.ndarray, stops: np.ndarray, size: int) -> np.ndarray:
    """Return values of ``size`` bytes as an array [rows, size]; a value of another size is zero."""
    if bool((stops - starts == size).all()):
        return _aligned(_joined(data, starts, stops)).reshape(len(starts), size)
    out = np.zeros((len(starts), size), np.uint8)
    full = np.flatnonzero(stops - starts == size)
    if len(full):
        out[full] = data[starts[full][:, None] + np.arange(size)]
    return out


def _aligned(data: np.ndarray) -> np.ndarray:
    """Return bytes that any type can be a view of."""
    return data if data.ctypes.data % 8 == 0 and data.flags.c_contiguous else data.copy()


# ----------------------------------------------------------------------------
# Arrays, which are lists in Arrow; an array of two axes is a list of lists.


def _arrays(
    data: np.ndarray, starts: np.ndarray, stops: np.ndarray, encoding: Encoding
) -> tuple[pa.Array, Bad]:
    if encoding.dtype is not None and encoding.shape is not None:
        values = _fixed(data, starts, stops, encoding.size or 0).view(encoding.dtype)
        shapes = np.tile(np.array(encoding.shape, np.int64), (len(starts), 1))
        return _nested(values.reshape(-1), shapes), {}
    at, live = starts.copy(), stops > starts
    bad = {int(i): "expected an array, got no bytes" for i in np.flatnonzero(~live)}
    codes = np.zeros(len(starts), np.uint8)
    if encoding.dtype is None:
        codes = np.where(live, data[np.where(live, at, 0)] if len(data) else 0, 8).astype(np.uint8)
        bad |= {
            int(i): f"expected a type code of an array, got {codes[i]}"
            for i in np.flatnonzero(live & ~np.isin(codes, list(_DTYPES)))
        }
        at = np.where(live, at + 1, at)
    groups: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, shapes, first bytes
    ok = np.flatnonzero(live & ~np.isin(np.arange(len(at)), list(bad)))
    if encoding.shape is not None:
        groups.append((ok, np.tile(np.array(encoding.shape, np.int64), (len(ok), 1)), at[ok]))
    else:
        some = ok[at[ok] < stops[ok]]
        bad |= {
            int(i): "expected the shape of an array, got its end" for i in np.setdiff1d(ok, some)
        }
        heads = data[at[some]]
        for head in np.unique(heads):
            rows = some[heads == head]
            groups += _shapes(data, at, stops, rows, int(head), bad)
    sized = []
    for rows, shapes, first in groups:
        kinds = codes[rows]
        item = (
            np.full(len(rows), encoding.dtype.itemsize)
            if encoding.dtype is not None
            else np.array([np.dtype(_DTYPES[int(c)]).itemsize for c in kinds], np.int64)
        )
        # Whole numbers below 2**53 are exact in float64; larger ones are never equal.
        filled = np.prod(shapes.astype(np.float64), axis=1) * item == stops[rows] - first
        bad |= {
            int(i): f"expected an array that fills its {int(stops[i] - starts[i])} bytes, got the "
            f"shape {tuple(shape.tolist())}"
            for i, shape in zip(rows[~filled], shapes[~filled], strict=True)
        }
        if filled.any():
            sized.append((rows[filled], shapes[filled], first[filled]))
    return _built(data, stops, codes, encoding, sized, len(starts)), bad


def _shapes(
    data: np.ndarray, at: np.ndarray, stops: np.ndarray, rows: np.ndarray, head: int, bad: Bad
) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return (rows, shapes, first bytes of the values) of arrays with one kind of shape."""
    axes, width = head >> 2, 1 << (head & 3)
    first = at[rows] + 1 + axes * width
    inside = first <= stops[rows]
    wanted = "at least one axis" if not axes else f"{axes} axes of an array"
    bad |= {
        int(i): f"expected {wanted}, got {int(stops[i] - at[i]) - 1} bytes"
        for i in (rows[~inside] if axes else rows)
    }
    rows, first = rows[inside], first[inside]
    if not axes or not len(rows):
        return []
    words = data[(at[rows] + 1)[:, None] + np.arange(axes * width)]
    dims = np.ascontiguousarray(words).view(f"<u{width}")
    if width == 8:
        dims = np.minimum(dims, np.uint64(2**62))
    return [(rows, dims.astype(np.int64), first)]


def _built(
    data: np.ndarray,
    stops: np.ndarray,
    codes: np.ndarray,
    encoding: Encoding,
    groups: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    n: int,
) -> pa.Array:
    """Return the arrays of all rows as one column; rows that no group has are null or empty.

    Rows of one type and number of axes are a native column. Others are converted value by value.
    """
    axes = {shapes.shape[1] for _, shapes, _ in groups}
    known = {int(c) for rows, _, _ in groups for c in np.unique(codes[rows])}
    if len(axes) <= 1 and len(known) <= 1:
        kind = _dtype(encoding, known.pop() if known else 8)
        shapes = np.zeros((n, axes.pop() if axes else 1), np.int64)
        first = stops.copy()
        for rows, some, at in groups:
            shapes[rows], first[rows] = some, at
        return _nested(_aligned(_joined(data, first, stops)).view(kind), shapes)
    values: list[Any] = [None] * n
    for rows, shapes, first in groups:
        for i, shape, at in zip(rows.tolist(), shapes.tolist(), first.tolist(), strict=True):
            kind = _dtype(encoding, int(codes[i]))
            values[i] = _aligned(data[at : int(stops[i])]).view(kind).reshape(shape).tolist()
    return cols.column_of(values)[0]


def _dtype(encoding: Encoding, code: int) -> np.dtype:
    return np.dtype(_DTYPES[code]) if encoding.dtype is None else encoding.dtype


def _nested(values: np.ndarray, shapes: np.ndarray) -> pa.Array:
    """Return arrays of these shapes as lists, lists of lists and so on."""
    array = cols.arrow_of(values)
    for axis in range(shapes.shape[1] - 1, -1, -1):
        lists = np.prod(shapes[:, :axis], axis=1, dtype=np.int64)
        offsets = _offsets(np.repeat(shapes[:, axis], lists))
        array = pa.LargeListArray.from_arrays(cols.arrow_of(offsets), array)
    return array


# ----------------------------------------------------------------------------
# Encodings that are parsed value by value.


def _parsed(
    data: np.ndarray, starts: np.ndarray, stops: np.ndarray, parse: Callable[[bytes], Any]
) -> tuple[pa.Array, Bad]:
    values, bad = list[Any](), Bad()
    for i, (a, b) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        try:
            values.append(parse(data[a:b].tobytes()))
        except _FAULTS as error:
            values.append(None)
            bad[i] = f"expected a valid value, got: {_first_line(error)}"
    array, misfits = cols.column_of(values)
    return array, misfits | bad


def _first_line(error: BaseException) -> str:
    text = str(error)
    return (text.splitlines()[0] if text else type(error).__name__)[:200]


def _json(data: bytes) -> Any:
    return json.loads(data.decode())


def _decimal(data: bytes) -> Decimal:
    return Decimal(data.decode())


def _png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _raw_image(data: bytes) -> bytes:
    """Return raw pixels as a PNG, which holds them without a loss."""
    if len(data) < 12:
        raise ValueError(f"expected the 12 bytes of an image's size, got {len(data)} bytes")
    width, height, n = struct.unpack_from("<III", data)
    mode, pixels = data[12 : 12 + n][:16].decode(), data[12 + n :]
    if mode not in _PNG_MODES:
        raise ValueError(f"expected an image of mode {', '.join(_PNG_MODES)}, got {mode!r}")
    colour, bits, size = _PNG_MODES[mode]
    line = width * size if size else (width + 7) // 8
    if not (width and height) or len(pixels) != line * height:
        raise ValueError(f"expected {line * height} bytes of pixels, got {len(pixels)}")
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    rows = np.zeros((height, line + 1), np.uint8)  # each line begins with its filter: none
    rows[:, 1:] = np.frombuffer(pixels, np.uint8).reshape(height, line)
    body = zlib.compress(rows.tobytes(), 1)
    chunks = ((b"IHDR", head), (b"IDAT", body), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(*chunk) for chunk in chunks)


def _list(head: int, parse: Callable[[bytes], Any] = bytes) -> Callable[[bytes], list[Any]]:
    """Return a parser of lists whose count follows ``head`` bytes."""

    def parse_list(data: bytes) -> list[Any]:
        if len(data) < head + 4:
            raise ValueError(f"expected the number of items, got {len(data)} bytes")
        (n,) = struct.unpack_from("<I", data, head)
        first = head + 4 + 4 * n
        if first > len(data):
            raise ValueError(f"expected the sizes of {n} items, got {len(data)} bytes")
        sizes = np.frombuffer(data, "<u4", n, head + 4).astype(np.int64)
        edges = first + _offsets(sizes)
        if int(edges[-1]) != len(data):
            raise ValueError(f"expected items of {edges[-1]} bytes, got {len(data)}")
        return [parse(data[a:b]) for a, b in pairwise(edges.tolist())]

    return parse_list


_PARSERS: dict[str, Callable[[bytes], Any]] = {
    "json": _json,
    "str_int": int,
    "str_float": float,
    "str_decimal": _decimal,
    "pil": _raw_image,
    "jpeg_array": _list(0),
    "jpegarray": _list(0),
    "list[jpeg]": _list(4),
    "list[png]": _list(4),
    "list[pil]": _list(4, _raw_image),
}
_TYPES = {
    "bytes": pa.large_binary(),
    "jpeg": pa.large_binary(),
    "png": pa.large_binary(),
    "pil": pa.binary(),
    "str": pa.large_string(),
    "str_float": pa.float64(),
    **{name: pa.list_(pa.binary()) for name in _PARSERS if "[" in name or "array" in name},
}


def column_type(encoding: Encoding) -> pa.DataType | None:
    """Return the type of a column, or None if it depends on the values."""
    if encoding.dtype is None:
        return _TYPES.get(encoding.kind)
    kind = pa.from_numpy_dtype(encoding.dtype)
    if encoding.kind == "ndarray":
        if encoding.shape is None:
            return None
        for _ in encoding.shape:
            kind = pa.large_list(kind)
    return kind


def table_of(
    data: np.ndarray, edges: np.ndarray, columns: Columns, names: Sequence[str]
) -> tuple[pa.Table, cols.BadRows]:
    """Return the named columns of consecutive samples, and the rows that are not in the table."""
    starts, stops, bad = value_edges(data, edges, columns)
    broken, arrays = set(bad), dict[str, pa.Array]()
    for name in names:
        k = columns.names.index(name)
        arrays[name], faults = read_column(data, starts[:, k], stops[:, k], columns.encoding(name))
        for i, reason in faults.items():
            if i not in broken:
                bad.setdefault(i, f"column {name!r}: {reason}")
    table = pa.table(arrays) if arrays else cols.empty(len(starts))
    return (cols.drop_rows(table, sorted(bad)) if bad else table), sorted(bad.items())
