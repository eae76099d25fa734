"""Samples the planner has pulled from the streams beyond those it drew: passed over by look-ahead,
or left for a later step.

Streams are read front to back whatever a strategy chooses, so loaders and merging know nothing of
this: a step *pulls* prefixes, *takes* some of the samples, and the rest stays here with an age. A
state keeps the cursor in front of the first sample left, and behind it one age per sample up to the
last one pulled; -1 says that it was taken. Restoring pulls them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from overlord.planning.stream import Piece, SourceStream

TAKEN = -1
PENDING = -1  # the payload of a row that no stage has popped yet has no number


@dataclass(slots=True, eq=False)
class _Record:
    """One source: pieces of its stream from the first sample left to the last one pulled."""

    pieces: list[Piece] = field(default_factory=list)
    age: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    # of the payload's row, as the last stage left it
    number: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    loader: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def open(self) -> int:
        return int((self.age != TAKEN).sum())


class LookAheadPool:
    """All sources' records, and the numbering of the payload that is held for them."""

    def __init__(self, n_sources: int):
        self._records = [_Record() for _ in range(n_sources)]
        self._open = [0] * n_sources
        self.held = 0  # rows of payload held since the last stage

    def grow(self) -> None:
        """One more source."""
        self._records.append(_Record())
        self._open.append(0)

    def open(self, i: int) -> int:
        """Samples of the source that are here to be drawn."""
        return self._open[i]

    def pull(
        self, i: int, pieces: Sequence[Piece], loader: np.ndarray, age: np.ndarray | None = None
    ) -> None:
        """Samples from the front of a stream; with ``age`` they are those of a restored state, some
        of them taken.
        """
        record, n = self._records[i], len(loader)
        record.pieces += pieces
        record.age = np.concatenate(
            [record.age, np.zeros(n, np.int32) if age is None else age[:n].astype(np.int32)]
        )
        record.number = np.concatenate([record.number, np.full(n, PENDING, np.int64)])
        record.loader = np.concatenate([record.loader, loader])
        self._open[i] = record.open()

    def give_back(self, i: int) -> tuple[np.ndarray, int]:
        """A source is read again: ages of its samples, to be pulled again, and how many rows of
        payload are held no more.
        """
        record = self._records[i]
        held = record.number[(record.age != TAKEN) & (record.number != PENDING)]
        for other in self._records if len(held) else ():
            # a source's held rows are numbered through
            other.number[other.number > held[-1]] -= len(held)
        self.held -= len(held)
        self._records[i], self._open[i] = _Record(), 0
        return record.age, len(held)

    def number(self, n_loaders: int) -> np.ndarray:
        """Give the rows pulled since the last stage their numbers: behind the held ones, loader by
        loader. Returns pops by loader.
        """
        pending = [(r, np.flatnonzero(r.number == PENDING)) for r in self._records]
        loader = (
            np.concatenate([r.loader[rows] for r, rows in pending])
            if pending
            else np.zeros(0, np.int64)
        )
        number = np.empty(len(loader), np.int64)
        number[np.argsort(loader, kind="stable")] = self.held + np.arange(len(loader))
        for (record, rows), mine in zip(
            pending,
            np.split(number, np.cumsum([len(rows) for _, rows in pending])[:-1]),
            strict=True,
        ):
            record.number[rows] = mine
        return np.bincount(loader, minlength=n_loaders)

    def candidates(self, counts: Sequence[int]) -> Candidates:
        """The first ``counts[i]`` samples that each source has here."""
        sources = [i for i, n in enumerate(counts) if n]
        records = [self._records[i] for i in sources]
        age = np.concatenate([r.age for r in records])
        first = np.cumsum([0, *(len(r.age) for r in records)])
        kept = []
        for i, r, start in zip(sources, records, first, strict=False):
            kept.append(start + np.flatnonzero(r.age != TAKEN)[: counts[i]])
        rows = np.concatenate(kept)
        return Candidates(
            sources=tuple(sources),
            pieces=tuple((i, p) for i, r in zip(sources, records, strict=True) for p in r.pieces),
            rows=rows,
            age=age[rows],
            number=np.concatenate([r.number for r in records])[rows],
            first=first,
        )

    def settle(
        self, candidates: Candidates, taken: np.ndarray, cursors: np.ndarray, *, left: bool = False
    ) -> np.ndarray:
        """``taken[j]``: candidate j was drawn; those passed over for it are a step older, or all
        others when they were ``left``. Moves cursors; returns the payload rows that stay, in order.
        """
        for k, i in enumerate(candidates.sources):
            record = self._records[i]
            mine = (candidates.rows >= candidates.first[k]) & (
                candidates.rows < candidates.first[k + 1]
            )
            rows = candidates.rows[mine] - candidates.first[k]
            last = np.flatnonzero(taken[mine])[-1:]  # those behind it just wait for their turn
            record.age[rows if left else rows[: int(last[0]) if len(last) else 0]] += 1
            record.age[rows[taken[mine]]] = TAKEN
            self._trim(i, cursors)
            self._open[i] = record.open()
        kept = np.concatenate([r.number[r.age != TAKEN] for r in self._records])
        at = 0
        for r in self._records:
            mine = np.flatnonzero(r.age != TAKEN)
            r.number[mine] = np.arange(at, at + len(mine))
            at += len(mine)
        self.held = at
        return kept

    def _trim(self, i: int, cursors: np.ndarray) -> None:
        """Forget the samples in front of the first one left; the cursor moves behind them."""
        record = self._records[i]
        left = np.flatnonzero(record.age != TAKEN)
        gone = n = int(left[0]) if len(left) else len(record.age)
        if not n:
            return
        while n:
            piece = record.pieces[0]
            size = piece.stop - piece.start
            last = piece.start + min(n, size) - 1
            cursors[i] = (
                *piece.at[:3],
                piece.found.file[last],
                piece.found.row[last],
                piece.found.part[last],
            )
            if n < size:
                record.pieces[0] = piece._replace(start=piece.start + n)
            else:
                record.pieces.pop(0)
            n -= min(n, size)
        record.age, record.number, record.loader = (
            record.age[gone:],
            record.number[gone:],
            record.loader[gone:],
        )

    def ages(self) -> tuple[np.ndarray, ...]:
        """What a state holds: for each source one age per sample behind its cursor, as far as it
        was pulled.
        """
        return tuple(r.age.copy() for r in self._records)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """What a step may take: rows of the pieces joined, source by source, in stream order."""

    sources: tuple[int, ...]
    pieces: tuple[tuple[int, Piece], ...]  # (source, piece)
    rows: np.ndarray  # of the joined pieces
    age: np.ndarray
    number: np.ndarray  # of the payload's row
    first: np.ndarray  # row at which each source begins


class ExtendedFront:
    """The front of a stream with what is in the reserve before it: what the draw sees."""

    def __init__(self, stream: SourceStream, more: int):
        self._stream, self._more = stream, more

    @property
    def ready(self) -> int:
        return self._more + self._stream.ready

    @property
    def ended(self) -> bool:
        return self._stream.ended

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        raise AssertionError("look-ahead and deferring go with batches in samples")
