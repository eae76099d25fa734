"""Loss weights of tokens: reading of a column, and the sum over the labels of each document.

The weight of a token applies to its prediction. The first token of a document is not predicted, so
its weight has no effect.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from overlord.content import ones_like
from overlord.sample import Ragged
from overlord.sources.tables import arrow_of, is_mixed, numpy_of
from overlord.transforms.base import IDS
from overlord.transforms.columns import (
    HIDDEN,
    Bad,
    RowFrame,
    Unfit,
    add_faults,
    column,
    each_type,
    kind_of,
    lists,
    null_rows,
    read_ids,
)

# Internal column of the weights, between the stages of a pipeline: lists of float32.
WEIGHTS = HIDDEN + "\x1fweights"


def check_weights(table: pa.Table, name: str) -> None:
    """Raise Unfit unless the column holds lists of numbers or of booleans."""
    kind = kind_of(table, name, "lists of loss weights")
    if pt.is_null(kind) or is_mixed(kind):  # each row of a mixed column is read by itself
        return
    if pt.is_fixed_size_list(kind) or pt.is_list(kind) or pt.is_large_list(kind):
        inner = kind.value_type
        if (
            pt.is_integer(inner)
            or pt.is_floating(inner)
            or pt.is_boolean(inner)
            or pt.is_null(inner)
        ):
            return
    raise Unfit(f"column {name!r}: expected lists of loss weights (list<float>), got {kind}")


def read_weights(table: pa.Table, name: str) -> tuple[Ragged, Bad]:
    """Return a list column as float32 weights, and the rows with a weight that is not usable.

    A weight is finite and at least 0. Numbers too large for float32 are not finite.
    """
    array = column(table, name, "lists of loss weights")
    if is_mixed(array.type):
        parts, order, bad = each_type(array, name, read_weights)
        return Ragged.concat(parts).take(order), bad
    check_weights(table, name)
    bad = {int(i): f"{name} is null or missing" for i in null_rows(array)}
    if pt.is_null(array.type):
        return Ragged(np.zeros(0, np.float32), np.zeros(len(array) + 1, np.int64)), bad
    flat, offsets = lists(array)
    faults = [(null_rows(flat), "holds a null weight")]
    if pt.is_null(flat.type):
        flat = flat.cast(pa.float32())
    if flat.null_count:
        flat = flat.fill_null(False if pt.is_boolean(flat.type) else 0)
    with np.errstate(over="ignore"):
        weights = numpy_of(flat).astype(np.float32)
    finite = np.isfinite(weights)
    faults.append((np.flatnonzero(~finite), "holds a weight that is not finite"))
    faults.append((np.flatnonzero(finite & (weights < 0)), "holds a weight below 0"))
    add_faults(bad, name, offsets, faults)
    return Ragged(weights, offsets), bad


def put_weights(table: pa.Table, weights: Ragged | None) -> pa.Table:
    """Return the table with its internal column of weights set; None: without that column."""
    at = table.column_names.index(WEIGHTS) if WEIGHTS in table.column_names else -1
    if weights is None:
        return table if at < 0 else table.remove_column(at)
    lists_of = pa.LargeListArray.from_arrays(
        arrow_of(weights.offsets), arrow_of(weights.values.astype(np.float32, copy=False))
    )
    return (
        table.append_column(WEIGHTS, lists_of)
        if at < 0
        else table.set_column(at, WEIGHTS, lists_of)
    )


def weights_of(table: pa.Table) -> Ragged | None:
    """Return the internal column of weights; None if the table has none."""
    if WEIGHTS not in table.column_names:
        return None
    flat, offsets = lists(column(table, WEIGHTS, "loss weights"))
    return Ragged(numpy_of(flat), offsets)


def weights_or_ones(table: pa.Table, tokens: Ragged) -> Ragged:
    """Return the weights of the table's tokens: 1 where the table has none."""
    found = weights_of(table)
    return ones_like(tokens) if found is None else found


def unequal_weights(weights: Ragged, tokens: np.ndarray) -> Bad:
    """Return the rows whose weights are not one per token."""
    counts = weights.lengths
    return {
        int(i): f"expected {tokens[i]} loss weights, one per token, got {counts[i]}"
        for i in np.flatnonzero(counts != tokens)
    }


def stored(weights: np.ndarray) -> np.ndarray:
    """Return weights in the type that samples keep: uint8 if all are 0 or 1, else float32."""
    small = weights.astype(np.uint8) if len(weights) and weights.max() <= 1 else None
    return weights if small is None or not np.array_equal(small, weights) else small


def label_sums(weights: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Return the sum of the weights of each document's labels: all of its tokens but the first.

    ``start``: the first token of each document; documents adjoin, and none is empty. The sum of a
    document is in float64 and does not depend on its neighbours.
    """
    counted = weights.astype(np.float64)
    counted[start] = 0
    return np.add.reduceat(counted, start) if len(start) else np.zeros(0)


def runs_of(weights: Ragged) -> Ragged:
    """Return the runs of equal weights of each document: float64, length and weight in turn."""
    values, offsets = weights.values, weights.offsets
    changes = np.flatnonzero(values[1:] != values[:-1]) + 1
    start = np.union1d(changes, offsets[:-1])
    runs = np.empty((len(start), 2))
    runs[:, 0] = np.diff(start, append=len(values))
    runs[:, 1] = values[start]
    return Ragged(runs.reshape(-1), 2 * np.searchsorted(start, offsets))


def use_weights(frame: RowFrame, name: object) -> None:
    """Use the weights of a column for the ids of the rows."""
    assert isinstance(name, str), "two columns of weights belong to a Pair"
    weights, bad = read_weights(frame.table, name)
    frame.table = put_weights(frame.table, weights)
    frame.drop(bad)
    if frame.table.num_rows and (kept := weights_of(frame.table)) is not None:
        ids, _ = read_ids(frame.table, IDS)
        frame.drop(unequal_weights(kept, ids.lengths))
