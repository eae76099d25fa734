"""The last epoch of a source whose ``epochs`` is not a whole number, as a pure function.

``docs/stream.md``, "Fractional epochs", specifies it. Where the index knows the rows of every
chunk, the epoch is a prefix of its stream, exact to the row. Elsewhere it has whole chunks by their
bytes, and a hash selects the rows of the last one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from overlord.hashing import key64, keyed_hash

if TYPE_CHECKING:
    from overlord.loader.samples import SourceOrder

WHOLE = 2**64  # the threshold of a chunk of which every row is kept


class ChunkTable(Protocol):
    """The sizes of a source's chunks, as its index has them (``sources.base.Chunks``)."""

    @property
    def file(self) -> np.ndarray: ...
    @property
    def start(self) -> np.ndarray: ...
    @property
    def rows(self) -> np.ndarray: ...
    @property
    def nbytes(self) -> np.ndarray: ...


class RowPosition(NamedTuple):
    """A position in the stream of an epoch: a window of a group, and the order inside it."""

    group: int
    window: int
    key: int
    file: int
    row: int


@dataclass(frozen=True, slots=True)
class PartialEpoch:
    """An epoch that ends early. It has the first ``chunks`` chunks of its order."""

    epoch: int
    chunks: int
    groups: int
    end: RowPosition | None = None  # the first row that is left out; None if rows are unknown
    last: int = -1  # if rows are unknown, the number of its last chunk
    key: int = 0
    below: int = WHOLE  # rows of the last chunk with a lower hash are kept

    def kept(
        self, group: int, window: int, chunk: int, ids: tuple[int, np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """Return a mask of the rows of one slice that the epoch has.

        ``ids``: the file, the rows and their keys in the order of the window.
        """
        file, row, key = ids
        if self.end is None:
            if chunk != self.last or self.below == WHOLE:
                return np.ones(len(row), bool)
            return keyed_hash(self.key, np.full(len(row), file), row) < np.uint64(self.below)
        end = self.end
        if (group, window) != end[:2]:
            return np.full(len(row), (group, window) < end[:2])
        limit = np.uint64(end.key)
        after = file > end.file or (file == end.file and row >= end.row)
        return (key < limit) | ((key == limit) & ~np.asarray(after))

    def is_last(self, group: int, window: int) -> bool:
        """Return whether no row of the epoch follows a window of a group."""
        return self.end is not None and (group, window) >= self.end[:2]


def partial_epoch(
    order: SourceOrder, chunks: ChunkTable, epochs: float, slice_rows: int
) -> PartialEpoch | None:
    """Return the partial epoch of a source that is read ``epochs`` times.

    None if the number is whole, or if its fraction has no row.
    """
    number = math.floor(epochs)
    fraction = Fraction(epochs) - number
    if not fraction:
        return None
    if (chunks.rows < 0).any():
        return _by_size(order, chunks, number, fraction)
    return _by_rows(order, chunks, number, fraction, slice_rows)


def _by_rows(
    order: SourceOrder, chunks: ChunkTable, epoch: int, fraction: Fraction, slice_rows: int
) -> PartialEpoch | None:
    rows = chunks.rows[order.chunk_order(epoch)]
    kept = math.floor(fraction * int(rows.sum()) + Fraction(1, 2))
    if not kept:
        return None
    ends = np.cumsum(np.add.reduceat(rows, np.arange(0, len(rows), order.group_size)))
    group = int(np.searchsorted(ends, kept))
    first = group * order.group_size
    inside = rows[first : first + order.group_size]
    left = kept - int(ends[group] - inside.sum())
    window = _window_of(inside, left, slice_rows)
    left -= int(np.minimum(inside, window * slice_rows).sum())
    number = order.chunk_order(epoch)[first : first + order.group_size]
    size = np.clip(inside - window * slice_rows, 0, slice_rows)
    file = np.repeat(chunks.file[number].astype(np.int64), size)
    row = np.concatenate(
        [
            np.arange(n) + int(chunks.start[c]) + window * slice_rows
            for c, n in zip(number.tolist(), size.tolist(), strict=True)
        ]
    )
    if left == len(row):
        end = RowPosition(group, window + 1, 0, 0, 0)
    else:
        key = order.row_keys(epoch, file, row)
        at = np.lexsort((row, file, key))[left]
        end = RowPosition(group, window, int(key[at]), int(file[at]), int(row[at]))
    return PartialEpoch(epoch, first + len(inside), group + 1, end)


def _window_of(rows: np.ndarray, wanted: int, slice_rows: int) -> int:
    """Return the window of a group that has its row number ``wanted``, counted from 1."""
    low, high = 0, int(rows.max()) // slice_rows
    while low < high:
        middle = (low + high) // 2
        if int(np.minimum(rows, (middle + 1) * slice_rows).sum()) >= wanted:
            high = middle
        else:
            low = middle + 1
    return low


def _by_size(
    order: SourceOrder, chunks: ChunkTable, epoch: int, fraction: Fraction
) -> PartialEpoch | None:
    number = order.chunk_order(epoch)
    sizes = chunks.nbytes[number] if chunks.nbytes.any() else np.ones(len(number), np.int64)
    ends = np.cumsum(sizes)
    target = fraction * int(ends[-1])
    count = int(np.searchsorted(ends, math.floor(target), side="right"))
    rest = target - int(ends[count - 1] if count else 0)
    below = math.floor(rest / int(sizes[count]) * WHOLE) if rest else 0
    if not below:
        below, count = WHOLE, count - 1
    if count < 0:
        return None
    return PartialEpoch(
        epoch,
        count + 1,
        -(-(count + 1) // order.group_size),
        last=int(number[count]),
        key=key64("part", order.seed, order.name, epoch),
        below=below,
    )
