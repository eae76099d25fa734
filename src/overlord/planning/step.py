"""Planning of one step: look-ahead candidates, the strategy's buffer, the checked plan. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from overlord.documents import LENGTHS
from overlord.errors import PlanError
from overlord.mesh import BUCKET_AXES, Batch, Mesh
from overlord.messages.control import StreamState
from overlord.plan.module_ranks import check_padding
from overlord.plan.plan import LoadingPlan
from overlord.planning.document_nodes import documents_of_buffer, sample_sizes
from overlord.planning.draw import Drawn, LoaderRequests, owed_after, step_positions
from overlord.planning.images import check_images
from overlord.planning.mixture import sources_of_step
from overlord.planning.selection import check_choice, checked_scores, rows_of
from overlord.planning.shapes import candidate_order, check_shapes
from overlord.planning.spec import Ledger, PlannerSpec
from overlord.planning.stage_cuts import cut_samples
from overlord.planning.stream import SourceStream, StreamPiece, step_meta
from overlord.planning.valid_tokens import valid_tokens
from overlord.sample import LOSS_RUNS, LOSS_WEIGHTS, Buffer, Ragged, take_rows

# ----------------------------------------------------------------------------
# Convert stream pieces into the buffer of a strategy, and check the plan that it returns.

# (source, run of its samples), source by source, in stream order
Pieces = Sequence[tuple[int, StreamPiece]]


class PieceColumns:
    """The samples of stream pieces as columns, one row per sample."""

    def __init__(self, pieces: Pieces):
        self.parts = [p for _, p in pieces]
        self.where = np.array([i for i, _ in pieces], np.int64)  # source of each piece
        self.sizes = np.array([p.stop - p.start for p in self.parts], np.int64)
        # epoch, group, window of each piece
        self.at = np.array([p.at[:3] for p in self.parts], np.int64).reshape(-1, 3)
        ids = np.concatenate(
            [p.ids[p.start : p.stop] for p in self.parts] or [np.zeros((0, 3), np.int64)]
        )
        self.file, self.row, self.part = np.ascontiguousarray(ids.T)

    def cursors_after(self, cursors: np.ndarray) -> np.ndarray:
        """Return ``cursors``, moved past all samples of the pieces for sources that have any."""
        last, end = np.append(self.where[1:] != self.where[:-1], True), np.cumsum(self.sizes) - 1
        source, end, moved = self.where[last], end[last], cursors.copy()
        moved[source, :3] = self.at[last]
        moved[source, 3:] = np.stack([self.file[end], self.row[end], self.part[end]], axis=1)
        return moved

    def holders(self, first_loader: np.ndarray) -> np.ndarray:
        """Return the loader number of each sample; source i's loaders start at first_loader[i]."""
        first = np.repeat(first_loader[self.where], self.sizes)
        # one loader per source
        if len(first_loader) == int(first_loader[-1]) + 1 or not self.parts:
            return first
        shares = zip(self.sizes, self.parts, strict=True)
        return first + np.concatenate(
            [
                np.full(n, p.loader) if isinstance(p.loader, int) else p.loader[p.start : p.stop]
                for n, p in shares
            ]
        )


class StepContext(NamedTuple):
    """The inputs of a step: the job, the state before the step, and the weights in force."""

    spec: PlannerSpec
    state: StreamState
    weights: Sequence[float]

    @property
    def batch(self) -> Batch:
        """The batch of the step."""
        return self.spec.batch_at(self.state.step)


def gather(
    pieces: PieceColumns, order: np.ndarray, substep: np.ndarray | None, context: StepContext
) -> Buffer:
    """Return the buffer of a strategy: the samples of the pieces in the given order.

    The arrays are read-only, since the plan of the strategy is compared with them.
    """
    spec, state, weights = context
    names = sources_of_step(spec.names, state.events, state.step)
    meta = {name: take_rows(values, order) for name, values in step_meta(pieces.parts).items()}
    own = dict.fromkeys(name for s in spec.sources[: len(names)] for name in s.meta)
    had = {name for p in pieces.parts for name in p.found.meta} if own else ()
    buffer = Buffer(
        names=names,
        source=np.repeat(pieces.where, pieces.sizes)[order].astype(np.int32),
        epoch=np.repeat(pieces.at[:, 0], pieces.sizes)[order].astype(np.int32),
        file=pieces.file[order].astype(np.int32),
        row=pieces.row[order].astype(np.int64),
        part=pieces.part[order].astype(np.int32),
        meta=meta,
        batch=context.batch,
        step=state.step,
        drawn=True,
        substep=substep,
        weights=dict(zip(names, weights, strict=False)),
        absent=tuple(n for n in own if n not in had),
        documents=tuple(
            dict.fromkeys(name for s in spec.sources[: len(names)] for name in s.documents)
        ),
        sync=spec.sync,
        model=spec.model,
    )
    arrays = [
        array
        for c in meta.values()
        for array in ((c.values, c.offsets) if isinstance(c, Ragged) else (c,))
    ]
    for array in (buffer.source, buffer.epoch, buffer.file, buffer.row, buffer.part, *arrays):
        array.flags.writeable = False
    return buffer


def check_plan(plan: Any, buffer: Buffer, place: Mesh) -> None:
    """Raise ``PlanError`` unless a strategy returned a LoadingPlan for this mesh."""
    if not isinstance(plan, LoadingPlan):
        raise PlanError(
            f"strategy: expected a LoadingPlan, got {type(plan).__name__}",
            buffer.step,
            "end it with .plan()",
        )
    if "backbone" in plan.modules:
        axis = plan.main.axis
        if axis not in BUCKET_AXES:
            raise PlanError(
                f"strategy: expected buckets along one of {', '.join(BUCKET_AXES)}, got {axis!r}",
                buffer.step,
                'call .distribute("DP")',
            )
        # more buckets would never be delivered
        mesh = plan.main.on or place
        if plan.main.n_buckets != (wanted := mesh.n_buckets(axis)):
            problem = (
                f"strategy: expected {wanted} buckets along {axis} of {mesh}, got "
                f"{plan.main.n_buckets}"
            )
            raise PlanError(problem, buffer.step, f'call .distribute("{axis}")')
        if plan.main.on is not None:
            check_padding(place, plan.main.on, buffer.batch, buffer.step)
        if buffer.batch.fixed:
            check_shapes(plan, buffer.batch, place)
    if plan.place is not None and plan.place != place:  # other ranks would fetch the buckets
        raise PlanError(
            f"strategy: expected a plan for {place}, got one for {plan.place}",
            buffer.step,
            "use the place that the strategy receives",
        )


def check_samples(plan: LoadingPlan, buffer: Buffer) -> None:
    """Raise ``PlanError`` unless a plan has exactly the samples of the buffer, in their order."""
    same = plan.step == buffer.step and plan.names == buffer.names and len(plan) == len(buffer)
    columns = (
        (getattr(plan, n), getattr(buffer, n)) for n in ("source", "epoch", "file", "row", "part")
    )
    if not same or not all(
        a is b or np.array_equal(a, b) for a, b in (*columns, (plan.tokens, buffer.meta["tokens"]))
    ):
        raise PlanError(
            "strategy: expected a plan for the step, sources and samples of its buffer, in their "
            "order, got another",
            buffer.step,
            "build the plan from the buffer, without adding, dropping or reordering samples",
        )


def _with_documents(plan: LoadingPlan, buffer: Buffer, place: Mesh) -> LoadingPlan:
    """Return the plan with the documents of its samples, which are those of the buffer.

    Raise ``PlanError`` unless sizes count the padding of each document, on whole microbatches.
    """
    if LENGTHS not in (*buffer.documents, *buffer.meta):
        return plan
    documents = documents_of_buffer(buffer)
    assert documents is not None
    if problem := documents.problem(plan.tokens):
        raise PlanError(f"documents: {problem}", buffer.step)
    if plan.tasks is not None:
        problem = "expected whole samples, since some have several documents, got pieces on rings"
        raise PlanError(f"strategy: {problem}", buffer.step, "use a strategy without .split()")
    sizes = sample_sizes(buffer, plan.main.sample, buffer.batch.document_multiple(place))
    if not np.array_equal(plan.main.size, sizes):
        raise PlanError(
            "strategy: expected sizes with the padding of every document of a sample, got others",
            buffer.step,
            "build the plan from DGraph.from_buffer(buffer, place)",
        )
    return replace(plan, documents=documents)


# ----------------------------------------------------------------------------
# The look-ahead pool: samples that the planner has pulled from the streams and not drawn yet.
#
# Streams are read in order whatever a strategy chooses, so loaders do not depend on the pool. A
# step *pulls* prefixes of the streams and *takes* some of the samples. The rest stays in the pool
# with an age: the number of steps that passed over the sample. A state keeps the cursor before the
# first sample left. It also keeps one age for every sample after the cursor up to the last one
# pulled; -1 marks a sample that was taken. Restoring the state pulls these samples again.

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


# ----------------------------------------------------------------------------
# Plan one drawn step: its samples, the strategy's plan, and the accounts after it.


class PlacedStep(NamedTuple):
    """A valid plan of a step, the loaders of its samples, and the accounts after the step."""

    plan: LoadingPlan
    pops: np.ndarray  # samples that leave each loader
    doc: np.ndarray  # number of each sample among the held and popped ones (``PlannedStep.doc``)
    loader: np.ndarray  # loader of each sample
    cursors: np.ndarray  # cursors after the step, by source
    owed: tuple[int, ...]
    active: tuple[bool, ...]
    kept: np.ndarray | None = None  # payload rows that stay held; None: nothing is ever held
    cut: tuple[int, ...] = ()  # chunks: ``StreamState.cut`` after the step
    valid_tokens: int | float = 0


def place_drawn(
    context: StepContext,
    drawn: Drawn,
    streams: Sequence[SourceStream],
    demand: LoaderRequests,
    ledger: Ledger,
) -> PlacedStep:
    """Take the drawn number of samples from each stream, and place them by the strategy.

    Raise ``PlanError`` for an invalid plan; the samples have left the streams then.
    """
    spec, pieces = context.spec, list[tuple[int, StreamPiece]]()
    for i, n in enumerate(np.sum(drawn.counts, axis=0).tolist()):
        if n:
            taken, bad = streams[i].take(n)
            pieces += [(i, piece) for piece in taken]
            if bad:
                ledger.list_bad(i, bad)
    order, substep = step_positions(drawn.counts)
    joint = PieceColumns(pieces)
    buffer = gather(joint, order, substep, context)
    loader = joint.holders(demand.first)[order]
    cut = cut_samples(buffer, spec.cut_samples) if spec.cut_samples else None
    if LOSS_RUNS in buffer.meta:  # only of use for cuts
        own = {name: column for name, column in buffer.meta.items() if name != LOSS_RUNS}
        buffer = replace(buffer, meta=own)
    if cut is not None:
        buffer = cut.buffer
        ledger.count_truncated(cut.truncated, cut.lost)
    plan = spec.strategy(buffer, spec.place)
    check_plan(plan, buffer, spec.place)
    check_samples(plan, buffer)
    if spec.images:
        check_images(plan, buffer)
    plan = _with_documents(plan.validate(), buffer, spec.place)
    # Samples leave a loader in the order of the source's stream.
    pops = np.bincount(loader, minlength=demand.n_loaders)
    by_stream = np.lexsort((order, loader))
    doc = np.empty(len(loader), np.int64)
    doc[by_stream] = np.arange(len(loader))
    if cut is not None:
        doc, loader = doc[cut.sample], loader[cut.sample]
    cursors = joint.cursors_after(context.state.cursors)
    labels = "shifted" if cut is None else context.batch.labels
    valid = valid_tokens(plan, buffer.meta.get(LOSS_WEIGHTS), spec.images, labels)
    return PlacedStep(
        plan, pops, doc, loader, cursors, drawn.owed, drawn.active, valid_tokens=valid
    )


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
        plan = _with_documents(plan, buffer.take(rows), spec.place)
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
