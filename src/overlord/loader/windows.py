"""Windows of a loader: rows of open slices, and the samples made of them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from overlord.messages.control import Cursor
from overlord.messages.data import BlockReady, LongDocuments, SampleBlock, WindowReady
from overlord.sample import cut_rows
from overlord.transforms.base import Block


@dataclass(slots=True, eq=False)
class Window:
    """An open window: its rows in stream order, readable or not."""

    key: np.ndarray
    file: np.ndarray
    row: np.ndarray
    at: np.ndarray  # row of the joined tables; -1 - n for an unreadable row with reason n
    tables: list[pa.Table]  # one, unless slices have different types of a column
    reasons: list[str]  # why rows are unreadable
    dropped: int  # rows that filters dropped, until they are reported
    after: Cursor | None  # the cursor if the loader was opened inside this window
    position: int = 0  # number of evaluated rows
    # Turns rows of the only table into a block without a copy, if samples are rows of ids.
    block_of: Callable[[np.ndarray], Block] | None = None

    def first_rows(self, n: int) -> Window:
        """Return the window with its first n rows only."""
        return replace(self, key=self.key[:n], file=self.file[:n], row=self.row[:n], at=self.at[:n])


def sample_block(
    window: Window,
    key: np.ndarray,
    file: np.ndarray,
    row: np.ndarray,
    at: np.ndarray,
    good: np.ndarray,
    index: np.ndarray,
    part: np.ndarray,
    meta: dict[str, Any],
    failed: list[tuple[int, str]],
) -> SampleBlock:
    """Return the samples and failed rows of a block of a window, whose rows are given."""
    if len(good) == len(at) and not failed:  # the usual case
        none = good[:0]
        return SampleBlock(
            key[index],
            file[index],
            row[index],
            part,
            meta,
            key[none],
            none,
            none,
            (),
            window.dropped,
        )
    why = {int(j): window.reasons[-1 - int(at[j])] for j in np.flatnonzero(at < 0)}
    why.update((int(good[j]), reason) for j, reason in failed)
    bad = np.array(sorted(why), np.int64)
    where = good[index]
    return SampleBlock(
        key[where],
        file[where],
        row[where],
        part,
        meta,
        key[bad],
        file[bad],
        row[bad],
        tuple(why[j] for j in bad.tolist()),
        window.dropped,
    )


def by_window(
    found: SampleBlock, block: Block, n_rows: int, step: int, over: tuple[int, ...]
) -> list[tuple[WindowReady, BlockReady]]:
    """Split the samples of consecutive rows into windows of ``step`` rows."""
    size, itemsize = block.meta["tokens"], block.tokens.itemsize
    assert isinstance(size, np.ndarray)
    rows = [*range(0, n_rows, step), n_rows]
    cuts = np.searchsorted(block.index, rows).tolist()
    long_cuts = np.searchsorted(block.long, rows).tolist() if found.long is not None else []
    windows = []
    for k in range(len(rows) - 1):
        a, b = cuts[k], cuts[k + 1]
        long = None
        if found.long is not None:
            long = found.long.take(np.arange(long_cuts[k], long_cuts[k + 1]))
        samples = SampleBlock(
            found.key[a:b],
            found.file[a:b],
            found.row[a:b],
            found.part[a:b],
            {name: cut_rows(column, a, b) for name, column in found.meta.items()},
            found.bad_key,
            found.bad_file,
            found.bad_row,
            (),
            0,
            long,
        )
        n = rows[k + 1] - rows[k]
        nbytes = int(size[a:b].sum()) * itemsize
        last = k == len(rows) - 2
        windows.append((WindowReady(n, over if last else ()), BlockReady(samples, n, nbytes)))
    return windows


def long_documents(
    key: np.ndarray,
    file: np.ndarray,
    row: np.ndarray,
    at: np.ndarray,
    lost: np.ndarray,
    after: Cursor | None,
) -> LongDocuments | None:
    """Return the documents at the positions ``at``, which lost ``lost`` tokens each.

    The document of the cursor ``after`` is excluded: its loss was counted with its sample.
    """
    documents = LongDocuments(key[at], file[at], row[at], lost)
    if after is None:
        return documents
    return documents.take(
        np.flatnonzero((documents.file != after.file) | (documents.row != after.row))
    )


def already_drawn(file: np.ndarray, row: np.ndarray, part: np.ndarray, after: Cursor) -> np.ndarray:
    """Return a mask of the samples up to the cursor."""
    return (file == after.file) & (row == after.row) & (part <= after.part)
