"""Conversion between Arrow and numpy arrays that share memory.

``Array.to_numpy`` and ``pa.array`` do the same, but import pandas first if it is installed. The
import costs 30 MB and half a second in every process.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt


def numpy_of(array: pa.Array) -> np.ndarray:
    """Return a view of the numbers of an array. Arrow converts arrays with nulls or other types."""
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
    """Return a one-dimensional numpy array as an Arrow array without a copy."""
    if values.dtype.kind not in "iuf" or not values.dtype.isnative:
        return pa.array(values)
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )
