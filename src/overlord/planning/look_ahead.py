"""The look-ahead pool: samples that are pulled from the streams and not drawn yet. Pure.

Streams are read in order whatever a strategy chooses, so loaders do not depend on the pool. A step
*pulls* prefixes of the streams and *takes* some of the samples. The rest stays in the pool with an
age: the number of steps that passed over the sample. A state keeps the cursor before the first
sample left. It also keeps one age for every sample after the cursor up to the last one pulled; -1
marks a sample that was taken. Restoring the state pulls these samples again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from overlord.planning.draw import Drawn, LoaderRequests, owed_after, step_positions
from overlord.planning.images import check_images
from overlord.planning.selection import check_choice, checked_scores, rows_of
from overlord.planning.shapes import candidate_order
from overlord.planning.spec import Ledger
from overlord.planning.step import (
    PieceColumns,
    PlacedStep,
    StepContext,
    check_plan,
    gather,
    valid_tokens,
    with_documents,
)
from overlord.planning.stream import SourceStream, StreamPiece, step_meta
from overlord.sample import LOSS_WEIGHTS, take_rows

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
        """Return the number of samples that no step has taken."""
        return int((self.age != TAKEN).sum())


class LookAheadPool:
    """The pulled samples of all sources, and the numbers of the payload rows held for them."""

    def __init__(self, n_sources: int, ages: Sequence[np.ndarray] = ()):
        """Start empty.

        ``ages``: by source, the ages of samples that a saved state had pulled. ``restore`` pulls
        them again.
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
        """Return the number of pulled samples of a source that no step has taken."""
        return self._open[i]

    def fronts(self, streams: Sequence[SourceStream]) -> list[ExtendedFront]:
        """Return the fronts of the streams with the samples of the pool before them."""
        return [ExtendedFront(s, self._open[i]) for i, s in enumerate(streams)]

    def restore(
        self, streams: Sequence[SourceStream], first_loader: np.ndarray, ledger: Ledger
    ) -> dict[int, int]:
        """Pull the samples again that a saved state or a restarted source had pulled.

        If some are not ready, pull none. Return the number that must be ready, by source; empty if
        done.
        """
        if need := _short(streams, {i: len(ages) for i, ages in self._replay.items()}):
            return need
        for i, ages in self._replay.items():
            # the failures among these samples are listed already
            pieces, _ = streams[i].take(min(len(ages), streams[i].ready))
            self._pull(i, pieces, first_loader, ages)
            ledger.exclude_counts(i, streams[i].passed)
        self._replay = {}
        return {}

    def pull(
        self,
        counts: Sequence[int],
        streams: Sequence[SourceStream],
        first_loader: np.ndarray,
        ledger: Ledger,
    ) -> dict[int, int]:
        """Pull samples from the streams until the pool has ``counts[i]`` open ones of each source.

        If some are not ready, pull none. Return the number that must be ready, by source; empty if
        done. A stream that has ended gives as many as it has.
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
        """Append samples of source i that were pulled from its stream.

        ``age``: the age of each sample, ``TAKEN`` if a step took it. None: all are new.
        """
        loader = PieceColumns([(i, p) for p in pieces]).holders(first_loader)
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

        Return whether loaders held payload of these samples.
        """
        ages, held = self._release(i)
        if len(ages):
            self._replay[i] = ages
        return held > 0

    def drop(self, i: int) -> bool:
        """Release the samples of a lost source; return whether loaders held their payload."""
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

    def open_tokens(self, i: int) -> np.ndarray:
        """Return the lengths of a source's samples that no step has taken, in stream order."""
        record = self._records[i]
        tokens = step_meta(record.pieces)["tokens"] if record.pieces else np.zeros(0, np.int64)
        assert isinstance(tokens, np.ndarray)
        return tokens[record.age != TAKEN]

    def candidates(self, counts: Sequence[int]) -> Candidates:
        """Return the first ``counts[i]`` samples of each source in the pool that no step took."""
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

    def close_step(
        self, candidates: Candidates, taken: np.ndarray, cursors: np.ndarray, *, left: bool = False
    ) -> np.ndarray:
        """Close a step: age the candidates that were left, and move ``cursors`` in place.

        ``taken[j]``: whether candidate j was taken. Of each source, the candidates before the last
        taken one become a step older; with ``left``, all that were not taken do. Return the payload
        rows that stay held, in order, and renumber them from 0.
        """
        for k, i in enumerate(candidates.sources):
            record = self._records[i]
            mine = (candidates.rows >= candidates.first[k]) & (
                candidates.rows < candidates.first[k + 1]
            )
            rows = candidates.rows[mine] - candidates.first[k]
            last = np.flatnonzero(taken[mine])[-1:]  # later candidates were not passed over
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
        """Remove taken samples before the first one left, and move the cursor past them."""
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
        """Return, by source, the age of each pulled sample after the cursor, for a state."""
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
    """Return the entries of ``wanted`` (source -> samples) that the streams cannot give yet.

    An ended stream counts as ready, since it gives no more.
    """
    return {i: n for i, n in wanted.items() if streams[i].ready < n and not streams[i].ended}


def place_chosen(
    context: StepContext,
    drawn: Drawn,
    counts: Sequence[int],
    pool: LookAheadPool,
    demand: LoaderRequests,
) -> PlacedStep:
    """Let the strategy choose among the pool's candidates, or defer samples that do not fit.

    ``counts``: the number of candidates of each source, if the pool has as many.

    Raise ``PlanError`` for an invalid plan.
    """
    spec, state = context.spec, context.state
    pops = pool.number(demand.n_loaders)
    candidates = pool.candidates(counts)
    pieces = PieceColumns(candidates.pieces)
    chooses, substep = spec.look_ahead > 1 and not spec.batch.defers, None
    if spec.batch.defers:
        source = np.repeat(pieces.where, pieces.sizes)[candidates.rows]
        shown = candidate_order(source, np.sum(drawn.counts, axis=0).tolist())
    elif chooses:
        shown = np.arange(len(candidates.rows))
    else:
        shown, substep = step_positions(drawn.counts)
    buffer = gather(pieces, candidates.rows[shown], substep, context)
    loader = pieces.holders(demand.first)[candidates.rows[shown]]
    buffer = replace(
        buffer, age=candidates.age[shown], max_age=spec.max_age, overflow=spec.overflow
    )
    if chooses:
        buffer = replace(buffer, drawn=False, wanted=drawn.counts)
        if spec.consume is not None:
            chosen = spec.consume(buffer)
            buffer, shown, loader = buffer.take(chosen), shown[chosen], loader[chosen]
        if spec.prefer is not None:
            scores = checked_scores(spec.prefer(state.step, buffer), buffer)
            buffer = replace(buffer, scores=scores)
    plan = spec.strategy(buffer, spec.place)
    check_plan(plan, buffer, spec.place)
    rows = rows_of(plan, buffer)
    check_choice(rows, buffer, left_allowed=spec.overflow == "defer")
    if spec.images:
        check_images(plan, buffer.take(rows))
    plan.validate()
    if buffer.documents:
        plan = with_documents(plan, buffer.take(rows), spec.place)
    taken = np.zeros(len(candidates.rows), bool)
    taken[shown[rows]] = True
    doc, cursors = candidates.number[shown[rows]], state.cursors.copy()
    kept = pool.close_step(candidates, taken, cursors, left=spec.look_ahead == 1)
    left = (
        np.sum(drawn.counts, axis=0) - np.bincount(plan.source, minlength=len(spec.sources))
    ).tolist()
    active = tuple(a or n > 0 for a, n in zip(drawn.active, left, strict=True))
    owed = owed_after(drawn.owed, left, context.weights, active) if any(left) else drawn.owed
    weights = buffer.meta.get(LOSS_WEIGHTS)
    valid = valid_tokens(plan, None if weights is None else take_rows(weights, rows), spec.images)
    return PlacedStep(
        plan, pops, doc, loader[rows], cursors, owed, active, kept, valid_tokens=valid
    )
