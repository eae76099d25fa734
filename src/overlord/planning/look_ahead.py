"""Samples that the planner has pulled from the streams and not drawn yet.

Look-ahead has passed them over, or a step has left them for a later one.

Streams are read front to back whatever a strategy chooses, so loaders and merging do not depend on
this module. A step *pulls* prefixes of the streams and *takes* some of the samples. The rest stays
here with an age. A state keeps the cursor before the first sample left. It also keeps one age for
every sample after the cursor up to the last one pulled; -1 marks a sample that was taken. Restoring
the state pulls these samples again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from overlord.planning.buffer import Joined
from overlord.planning.spec import Ledger
from overlord.planning.stream import SourceStream, StreamPiece

TAKEN = -1
PENDING = -1  # number of a payload row that no step has popped yet


@dataclass(slots=True, eq=False)
class _PulledSamples:
    """The samples of one source from the first one left to the last one pulled."""

    pieces: list[StreamPiece] = field(default_factory=list)
    age: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    # payload row of each sample, as the last planned step left it
    number: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    loader: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def open(self) -> int:
        return int((self.age != TAKEN).sum())


class LookAheadPool:
    """The pulled samples of all sources, and the numbers of the payload rows held for them."""

    def __init__(self, n_sources: int, ages: Sequence[np.ndarray] = ()):
        """Start empty.

        ``ages``: of samples that a saved state had pulled; ``restore`` pulls them again.
        """
        self._records = [_PulledSamples() for _ in range(n_sources)]
        self._open = [0] * n_sources
        self._replay = {i: a for i, a in enumerate(ages) if len(a)}
        self.held = 0  # payload rows held since the last planned step

    def grow(self) -> None:
        """Add an entry for one more source."""
        self._records.append(_PulledSamples())
        self._open.append(0)

    def open(self, i: int) -> int:
        """Return the number of samples of a source that can be drawn from the pool."""
        return self._open[i]

    def fronts(self, streams: Sequence[SourceStream]) -> list[ExtendedFront]:
        """Return the fronts of the streams with the samples of the pool before them."""
        return [ExtendedFront(s, self._open[i]) for i, s in enumerate(streams)]

    def restore(
        self, streams: Sequence[SourceStream], first_loader: np.ndarray, ledger: Ledger
    ) -> dict[int, int]:
        """Pull the samples again that a saved state or a restarted source had pulled.

        Return source -> samples its stream must have first; empty: done.
        """
        if need := _short(streams, {i: len(ages) for i, ages in self._replay.items()}):
            return need
        for i, ages in self._replay.items():
            # the failures among these samples are listed already
            pieces, _ = streams[i].take(min(len(ages), streams[i].ready))
            self._pull(i, pieces, first_loader, ages)
            ledger.counted_before(i, streams[i].passed)
        self._replay = {}
        return {}

    def pull(
        self,
        counts: Sequence[int],
        streams: Sequence[SourceStream],
        first_loader: np.ndarray,
        ledger: Ledger,
    ) -> dict[int, int]:
        """Hold ``counts[i]`` samples of each source, pulled from the streams.

        Return source -> samples its stream must have first; empty: done.
        """
        more = {i: n - self._open[i] for i, n in enumerate(counts) if n > self._open[i]}
        if need := _short(streams, more):
            return need
        for i, n in more.items():
            pieces, bad = streams[i].take(min(n, streams[i].ready))
            ledger.list_bad(i, bad)
            self._pull(i, pieces, first_loader)
        return {}

    def _pull(
        self,
        i: int,
        pieces: Sequence[StreamPiece],
        first_loader: np.ndarray,
        age: np.ndarray | None = None,
    ) -> None:
        """Append samples from the front of a stream; with ``age`` some of them were taken."""
        loader = Joined([(i, p) for p in pieces]).holders(first_loader)
        record, n = self._records[i], len(loader)
        record.pieces += pieces
        record.age = np.concatenate(
            [record.age, np.zeros(n, np.int32) if age is None else age[:n].astype(np.int32)]
        )
        record.number = np.concatenate([record.number, np.full(n, PENDING, np.int64)])
        record.loader = np.concatenate([record.loader, loader])
        self._open[i] = record.open()

    def restart(self, i: int) -> bool:
        """Release the samples of a source that is read again; ``restore`` pulls them again.

        Return whether loaders held payload of them.
        """
        ages, held = self._release(i)
        if len(ages):
            self._replay[i] = ages
        return held > 0

    def drop(self, i: int) -> bool:
        """Release the samples of a source for good. Return whether loaders held payload of them."""
        self._replay.pop(i, None)
        return self._release(i)[1] > 0

    def _release(self, i: int) -> tuple[np.ndarray, int]:
        """Remove a source's samples; return their ages, and the number of held payload rows."""
        record = self._records[i]
        held = record.number[(record.age != TAKEN) & (record.number != PENDING)]
        for other in self._records if len(held) else ():
            # the held rows of a source have consecutive numbers
            other.number[other.number > held[-1]] -= len(held)
        self.held -= len(held)
        self._records[i], self._open[i] = _PulledSamples(), 0
        return record.age, len(held)

    def number(self, n_loaders: int) -> np.ndarray:
        """Number the rows pulled since the last planned step, and return the pops by loader.

        Numbers follow those of the held rows, loader by loader.
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
        """Return the first ``counts[i]`` samples that each source has in the pool."""
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
        """Close a step: age the candidates that were left, and move the cursors.

        ``taken[j]``: whether candidate j was drawn. Candidates before the last drawn one become a
        step older; with ``left`` all others do. Return the payload rows that stay held, in order.
        """
        for k, i in enumerate(candidates.sources):
            record = self._records[i]
            mine = (candidates.rows >= candidates.first[k]) & (
                candidates.rows < candidates.first[k + 1]
            )
            rows = candidates.rows[mine] - candidates.first[k]
            last = np.flatnonzero(taken[mine])[-1:]  # later ones only wait
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
        """Remove the samples before the first one left, and move the cursor past them."""
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
                record.pieces[0] = StreamPiece(*piece[:4], piece.start + n, piece.stop)
            else:
                record.pieces.pop(0)
            n -= min(n, size)
        record.age, record.number, record.loader = (
            record.age[gone:],
            record.number[gone:],
            record.loader[gone:],
        )

    def ages(self) -> tuple[np.ndarray, ...]:
        """Return one age per pulled sample after the cursor of each source, for a state."""
        return tuple(r.age.copy() for r in self._records)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Samples that a step may take: rows of the joined pieces, by source, in stream order."""

    sources: tuple[int, ...]
    pieces: tuple[tuple[int, StreamPiece], ...]  # (source, piece)
    rows: np.ndarray  # rows of the joined pieces
    age: np.ndarray
    number: np.ndarray  # payload row of each candidate
    first: np.ndarray  # row at which each source begins


class ExtendedFront:
    """The front of a stream with the samples of the pool before it, as input of the draw."""

    def __init__(self, stream: SourceStream, more: int):
        self._stream, self._more = stream, more

    @property
    def ready(self) -> int:
        return self._more + self._stream.ready

    @property
    def ended(self) -> bool:
        return self._stream.ended

    def samples_for(self, start: int, tokens: int) -> tuple[int, int]:
        raise AssertionError("look-ahead and deferring need batches in samples")


def _short(streams: Sequence[SourceStream], wanted: Mapping[int, int]) -> dict[int, int]:
    """Return the entries of ``wanted`` (source -> samples) that its stream cannot give yet."""
    return {i: n for i, n in wanted.items() if streams[i].ready < n and not streams[i].ended}
