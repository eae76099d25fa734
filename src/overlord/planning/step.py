"""Planning of one step: the strategy's buffer, the checked plan, the accounts. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import fsum
from typing import Any, NamedTuple

import numpy as np

from overlord.documents import LENGTHS
from overlord.errors import PlanError
from overlord.mesh import BUCKET_AXES, Batch, Mesh
from overlord.messages.control import StreamState
from overlord.plan.module_ranks import check_padding
from overlord.plan.plan import LoadingPlan
from overlord.planning.document_nodes import documents_of_buffer, sample_sizes
from overlord.planning.draw import Drawn, LoaderRequests, step_positions
from overlord.planning.images import ENCODER, check_images
from overlord.planning.mixture import sources_of_step
from overlord.planning.shapes import check_shapes
from overlord.planning.spec import Ledger, PlannerSpec
from overlord.planning.stage_cuts import cut_samples
from overlord.planning.strategies import validates
from overlord.planning.stream import SourceStream, StreamPiece, step_meta
from overlord.sample import LOSS_RUNS, LOSS_WEIGHTS, Buffer, Column, Ragged, take_rows

# ----------------------------------------------------------------------------
# Convert stream pieces into the buffer of a strategy, and check the plan that it returns.

# (source, run of its samples), source by source, in stream order
Pieces = Sequence[tuple[int, StreamPiece]]


class PieceColumns:
    """The samples of stream pieces as columns, one row per sample."""

    def __init__(self, pieces: Pieces):
        n, self.parts = len(pieces), [p for _, p in pieces]
        self.where = np.fromiter((i for i, _ in pieces), np.int64, n)  # source of each piece
        # unpacked, since reading fields of hundreds of pieces by name takes longer
        spans = [(ids, start, stop) for _, _, _, ids, start, stop in self.parts]
        self.sizes = np.fromiter((stop - start for _, start, stop in spans), np.int64, n)
        # epoch, group, window of each piece
        places = chain.from_iterable(at[:3] for at, *_ in self.parts)
        self.at = np.fromiter(places, np.int64, 3 * n).reshape(-1, 3)
        rows = [ids[start:stop] for ids, start, stop in spans] or [np.zeros((0, 3), np.int64)]
        ids = np.concatenate(rows)
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
        if len(first_loader) == int(first_loader[-1]) + 1 or not self.parts:
            return first  # one loader per source
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
        source=pieces.where.astype(np.int32).repeat(pieces.sizes)[order],
        epoch=pieces.at[:, 0].astype(np.int32).repeat(pieces.sizes)[order],
        file=pieces.file[order].astype(np.int32),
        row=pieces.row[order],
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


def with_documents(plan: LoadingPlan, buffer: Buffer, place: Mesh) -> LoadingPlan:
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
# Count the valid tokens of a step: the sum of the weights of all labels.


def valid_tokens(
    plan: LoadingPlan, weights: Column | None, images: bool, labels: str = "shifted"
) -> int | float:
    """Return the sum of the weights of all labels of a step, over all ranks.

    ``weights``: metadata ``loss_weights`` of the plan's samples; a sample without an entry has the
    weight 1 on every label. The sum is rounded once, so it does not depend on the order of samples.
    It is an int if it is whole. ``images``: whether the job's images are encoded.
    """
    if not isinstance(weights, Ragged) or not len(weights.values):
        return labels_of(plan, np.ones(len(plan), bool), images, labels)
    flat = weights.values[weights.offsets[0] : weights.offsets[-1]]
    plain = labels_of(plan, weights.lengths == 0, images, labels)
    found = fsum([*flat.tolist(), plain])
    return int(found) if found.is_integer() else found


def labels_of(plan: LoadingPlan, plain: np.ndarray, images: bool, labels: str = "shifted") -> int:
    """Return the number of labels of those samples of a plan that the mask ``plain`` marks.

    Every token is a label except the first of each document and placeholders of images, which are
    not predicted. A shifted label may be the token after a piece of a sample.
    """
    tokens = plan.payload_tokens if labels == "shifted" else plan.tokens
    counts = 1 if plan.documents is None else plan.documents.counts[plain]
    found = int(np.maximum(tokens[plain] - counts, 0).sum())
    a = plan.modules.get(ENCODER) if images else None
    if a is None or a.out is None or a.offset is None:
        return found
    mine = plain[a.sample]
    # the first token of a document is never predicted
    first = (a.offset == 0) & (a.out > 0) & mine
    return found - int(a.out[mine].sum()) + int(first.sum())


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
    if not validates(spec.strategy):
        plan.validate()
    plan = with_documents(plan, buffer, spec.place)
    pops = np.bincount(loader, minlength=demand.n_loaders)
    doc = _number_popped(order, loader, demand)
    if cut is not None:
        doc, loader = doc[cut.sample], loader[cut.sample]
    cursors = joint.cursors_after(context.state.cursors)
    labels = "shifted" if cut is None else context.batch.labels
    valid = valid_tokens(plan, buffer.meta.get(LOSS_WEIGHTS), spec.images, labels)
    return PlacedStep(
        plan, pops, doc, loader, cursors, drawn.owed, drawn.active, valid_tokens=valid
    )


def _number_popped(order: np.ndarray, loader: np.ndarray, demand: LoaderRequests) -> np.ndarray:
    """Return the number of each sample among the popped ones, which are listed loader by loader.

    Samples leave a loader in the order of the source's stream. ``order``: the number of each sample
    in the streams, source by source. With one loader per source it is the result.
    """
    if demand.n_loaders == demand.n_sources:
        return order
    doc = np.empty(len(loader), np.int64)
    doc[np.lexsort((order, loader))] = np.arange(len(loader))
    return doc
