"""Many small messages of one kind as one message of columns.

A worker with dozens of sources announces samples of each, and receives a request for each, in every
step. A message costs tens of microseconds on both sides, however small it is; an entry of a column
costs next to nothing. Order is preserved: only messages that follow each other are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from overlord.messages.control import Refill
from overlord.messages.data import Announce, SampleBlock

NONE, NO_KEYS = np.zeros(0, np.int64), np.zeros(0, np.uint64)
for _array in (NONE, NO_KEYS):
    _array.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class Announcements:
    """Several ``Announce`` messages without errors, bad rows and long documents, in order."""

    # int64 [n, 8]: loader, epoch, group, window, samples, closes + 2 * last, generation, dropped
    table: np.ndarray
    key: np.ndarray
    file: np.ndarray
    row: np.ndarray
    part: np.ndarray
    meta: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        columns = (self.key, self.file, self.row, self.part, *self.meta.values())
        if self.table.ndim != 2 or self.table.shape[1] != 8 or self.table.dtype != np.int64:
            raise ValueError(f"table: expected int64 [n, 8], got {self.table.shape}")
        n = int(self.table[:, 4].sum())
        if (self.table[:, 4] < 0).any() or any(column.shape != (n,) for column in columns):
            raise ValueError(
                f"expected columns of {n} samples, got {[column.shape for column in columns]}"
            )

    @staticmethod
    def of(announces: Sequence[Announce]) -> Announcements:
        """Join announcements of equal ``_signature``."""
        blocks = [one.found for one in announces if one.found is not None]
        rows = [
            (
                one.loader,
                one.epoch,
                one.group,
                one.window,
                len(found),
                one.closes + 2 * one.last,
                one.generation,
                found.dropped,
            )
            for one, found in zip(announces, blocks, strict=True)
        ]
        return Announcements(
            np.array(rows, np.int64),
            np.concatenate([found.key for found in blocks]),
            np.concatenate([found.file for found in blocks]),
            np.concatenate([found.row for found in blocks]),
            np.concatenate([found.part for found in blocks]),
            {name: np.concatenate([b.meta[name] for b in blocks]) for name in blocks[0].meta},
        )

    def split(self) -> list[Announce]:
        """Return the announcements that were joined; their columns are views."""
        key, file, row, part, meta = self.key, self.file, self.row, self.part, self.meta
        announces, a = list[Announce](), 0
        for loader, epoch, group, window, n, ends, generation, dropped in self.table.tolist():
            b = a + n
            found = SampleBlock(
                key[a:b],
                file[a:b],
                row[a:b],
                part[a:b],
                {name: column[a:b] for name, column in meta.items()},
                NO_KEYS,
                NONE,
                NONE,
                (),
                dropped,
            )
            closes, last = bool(ends & 1), bool(ends & 2)
            announces.append(
                Announce(loader, epoch, group, window, found, closes, last, None, generation)
            )
            a = b
        return announces


def _signature(announce: Announce) -> tuple[Any, ...] | None:
    """Return the names and types of the columns; None if it must be sent alone."""
    found = announce.found
    if found is None or announce.error is not None or found.long is not None or found.bad_reason:
        return None
    kinds = [found.key.dtype, found.file.dtype, found.row.dtype, found.part.dtype]
    for column in found.meta.values():
        if not isinstance(column, np.ndarray) or column.ndim != 1:
            return None
        kinds.append(column.dtype)
    return (*kinds, *found.meta)


@dataclass(frozen=True, slots=True, eq=False)
class Refills:
    """Several ``Refill`` messages, in order."""

    table: np.ndarray  # int64 [n, 4]: the fields of each Refill

    def __post_init__(self) -> None:
        if self.table.ndim != 2 or self.table.shape[1] != 4 or self.table.dtype != np.int64:
            raise ValueError(f"table: expected int64 [n, 4], got {self.table.shape}")

    @staticmethod
    def of(refills: Sequence[Refill]) -> Refills:
        return Refills(
            np.array([(r.loader, r.must, r.level, r.horizon) for r in refills], np.int64)
        )

    def split(self) -> list[Refill]:
        """Return the requests that were joined."""
        return [Refill(*row) for row in self.table.tolist()]


def join_announcements(events: Sequence[Any]) -> list[Any]:
    """Return events with announcements that follow each other as one message."""
    return _joined(events, Announce, _signature, Announcements.of)


def join_refills(messages: Sequence[Any]) -> list[Any]:
    """Return messages with requests that follow each other as one message."""
    return _joined(messages, Refill, lambda refill: True, Refills.of)


def _joined(
    messages: Sequence[Any],
    kind: type,
    signature: Callable[[Any], Any],
    join: Callable[[Sequence[Any]], Any],
) -> list[Any]:
    """Replace runs of at least two messages of a kind with equal signatures."""
    if sum(type(message) is kind for message in messages) < 2:
        return list(messages)
    signs = [signature(m) if type(m) is kind else None for m in messages]
    cuts = [0, *(i for i in range(1, len(signs)) if signs[i] is None or signs[i] != signs[i - 1])]
    runs = [messages[a:b] for a, b in pairwise([*cuts, len(messages)])]
    return [run[0] if len(run) == 1 else join(run) for run in runs]
