"""Between Arrow and numpy by their memory, without a copy.

``Array.to_numpy`` and ``pa.array`` do the same, but look for pandas first and load it where there
is one: 30 MB and half a second in every process, for nothing.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt


def numpy_of(array: pa.Array) -> np.ndarray:
    """Numbers that are all there. What is null, or no number, is left to Arrow."""
    kind, n = array.type, len(array)
    if array.null_count or not (pt.is_integer(kind) or pt.is_floating(kind) or pt.is_boolean(kind)):
        found: np.ndarray = array.to_numpy(zero_copy_only=False)
        return found
    memory = array.buffers()[1]
    if pt.is_boolean(kind):  # a bit each
        bits = np.frombuffer(memory, np.uint8) if n else np.zeros(0, np.uint8)
        return np.unpackbits(bits, bitorder="little")[array.offset : array.offset + n].view(
            np.bool_
        )
    dtype = np.dtype(kind.to_pandas_dtype())  # Arrow's name for a numpy type
    if not n:
        return np.zeros(0, dtype)
    return np.frombuffer(memory, dtype, count=n, offset=array.offset * dtype.itemsize)


def arrow_of(values: np.ndarray) -> pa.Array:
    """Numbers in one dimension."""
    if values.dtype.kind not in "iuf" or not values.dtype.isnative:
        return pa.array(values)
    values = np.ascontiguousarray(values)
    return pa.Array.from_buffers(
        pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
    )
