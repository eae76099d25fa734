"""The position of a row in the stream of its source, as far as known without reading the row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from overlord.errors import PlanError
from overlord.messages.control import Cursor
from overlord.sample import SampleId

if TYPE_CHECKING:
    from overlord.loader.samples import SourceOrder
    from overlord.sources.index import Index

_ID = re.compile(
    r"(?P<source>.+)/e(?P<epoch>\d+)/f(?P<file>\d+)/r(?P<row>\d+)(?:/p(?P<part>\d+))?", re.DOTALL
)


def parse_id(text: str) -> SampleId:
    """Return the ``SampleId`` of a text such as ``web/e0/f2/r17`` or ``web/e0/f2/r17/p1``.

    Raise ``PlanError`` for any other text.
    """
    found = _ID.fullmatch(text.strip())
    if found is None:
        raise PlanError(
            "expected a sample id such as web/e0/f2/r17 (source, epoch, file, row) or "
            f"web/e0/f2/r17/p1 (and part), got {text!r}"
        )
    numbers = {name: int(found[name] or 0) for name in ("epoch", "file", "row", "part")}
    return SampleId(found["source"], **numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLookup:
    """The order in which the stream of one source visits its rows."""

    index: Index
    order: SourceOrder
    slice_rows: int

    def chunk_of(self, file: int, row: int) -> int:
        """Return the number of the chunk with a row, by file and row or byte offset; -1 if none."""
        chunks = self.index.chunks
        inside = (
            (chunks.file == file)
            & (chunks.start <= row)
            & ((chunks.stop < 0) | (row < chunks.stop))
        )
        at = np.flatnonzero(inside)
        return int(at[0]) if len(at) else -1

    def passed(self, sample: SampleId, chunk: int, cursor: Cursor) -> bool | None:
        """Return whether the cursor of the stream is at or after the sample; None if unknown.

        It is unknown in the cursor's own group if the format does not number its rows.
        """
        place = int(np.flatnonzero(self.order.chunk_order(sample.epoch) == chunk)[0])
        mine, there = (sample.epoch, place // self.order.group_size), (cursor.epoch, cursor.group)
        if mine != there:
            return mine < there
        if self.index.row_unit == "byte":
            return None
        window = (sample.row - int(self.index.chunks.start[chunk])) // self.slice_rows
        if window != cursor.window or cursor.file < 0:
            return window < cursor.window
        return self._key(sample.epoch, sample.file, sample.row, sample.part) <= self._key(
            cursor.epoch, cursor.file, cursor.row, cursor.part
        )

    def in_epoch(self, sample: SampleId, chunk: int) -> bool:
        """Return whether the sample's epoch has its row; the last epoch may end early."""
        partial, size = self.order.partial, self.order.group_size
        if partial is None or sample.epoch != partial.epoch:
            return True
        place = int(np.flatnonzero(self.order.chunk_order(sample.epoch) == chunk)[0])
        if place >= partial.chunks:
            return False
        row = np.array([sample.row])
        window = (sample.row - int(self.index.chunks.start[chunk])) // self.slice_rows
        key = self.order.row_keys(sample.epoch, np.array([sample.file]), row)
        ids = (sample.file, row, key)
        return bool(partial.kept(place // size, window, chunk, ids)[0])

    def _key(self, epoch: int, file: int, row: int, part: int) -> tuple[int, int, int, int]:
        key = self.order.row_keys(epoch, np.array([file]), np.array([row]))
        return int(key[0]), file, row, part
