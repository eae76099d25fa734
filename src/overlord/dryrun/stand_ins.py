"""Stand-in readers, which read no files.

They return the rows of a source's index with the metadata of a few probed rows. Loaders and planner
run unchanged with them, so that one machine can plan for a cluster of any size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.loader.samples import SourceOrder
from overlord.messages.data import BlockReady, Evaluate, Read, SampleBlock, WindowReady
from overlord.sample import Column, Ragged
from overlord.sources.index import Index

ROW_BYTES = 2048  # assumed size of a row, for files with an unknown number of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurement of a few rows of one source: time, size and metadata."""

    row_s: float  # seconds to read and transform one row
    sample_bytes: float  # bytes of the token ids of a buffered sample
    # By column, a value for every sample, or a list if a sample has several.
    meta: Mapping[str, Sequence[Any]]

    @property
    def tokens(self) -> float:
        """The mean number of tokens of a sample."""
        return float(np.mean(self.meta["tokens"]))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values, for JSON."""
        return {
            "row_s": self.row_s,
            "sample_bytes": self.sample_bytes,
            "meta": {name: list(v) for name, v in self.meta.items()},
        }

    def columns(self, which: np.ndarray) -> dict[str, Column]:
        """Return the metadata columns of the probed samples ``which``, numbers that may repeat."""
        found: dict[str, Column] = {}
        for name, values in self.meta.items():
            if isinstance(values[0], (list, tuple)):
                picked = [np.asarray(values[k], np.int64) for k in which.tolist()]
                found[name] = Ragged(
                    np.concatenate([np.zeros(0, np.int64), *picked]),
                    np.cumsum([0, *map(len, picked)]),
                )
            else:
                found[name] = np.asarray(values)[which]
        return found


class StandInReader:
    """A reader that executes the ``Read`` and ``Evaluate`` commands of a loader without files.

    Every raw row becomes one of the probed samples, chosen by the key of the row.
    """

    def __init__(self, order: SourceOrder, index: Index, probe: Probe, slice_rows: int):
        self._order, self._probe, self._slice = order, probe, slice_rows
        chunks = index.chunks
        guessed = np.maximum(1, chunks.nbytes // ROW_BYTES)
        self._rows = np.where(chunks.rows >= 0, chunks.rows, guessed)
        self._file, self._start = chunks.file.astype(np.int64), chunks.start
        self._window: tuple[np.ndarray, np.ndarray, np.ndarray] = (
            np.zeros(0, np.uint64),
            np.zeros(0, np.int64),
            np.zeros(0, np.int64),
        )

    def read(self, command: Read) -> tuple[WindowReady, float]:
        """Return the window and the seconds of reading: 0, since ``Probe.row_s`` includes it."""
        first, files, rows, over = (
            command.window * self._slice,
            list[np.ndarray](),
            list[np.ndarray](),
            list[int](),
        )
        for chunk in command.chunks:
            n = int(np.clip(self._rows[chunk] - first, 0, self._slice))
            files.append(np.full(n, self._file[chunk]))
            rows.append(max(0, int(self._start[chunk])) + first + np.arange(n))
            if first + n >= self._rows[chunk]:
                over.append(chunk)
        file, row = np.concatenate(files), np.concatenate(rows)
        key = self._order.row_keys(command.epoch, file, row)
        order = np.lexsort((row, file, key))
        self._window = key[order], file[order], row[order]
        return WindowReady(len(row), tuple(over)), 0.0

    def evaluate(self, command: Evaluate) -> tuple[BlockReady, float]:
        """Return the samples of the next rows, and the seconds to read and transform these rows."""
        key, file, row = (column[: command.rows] for column in self._window)
        self._window = tuple(column[command.rows :] for column in self._window)  # type: ignore[assignment]
        n, none = len(key), np.zeros(0, np.int64)
        meta = self._probe.columns(
            (key % np.uint64(len(self._probe.meta["tokens"]))).astype(np.int64)
        )
        found = SampleBlock(
            key, file, row, np.zeros(n, np.int32), meta, none.astype(np.uint64), none, none, ()
        )
        seconds = n * self._probe.row_s
        return BlockReady(found, n, int(n * self._probe.sample_bytes), seconds), seconds
