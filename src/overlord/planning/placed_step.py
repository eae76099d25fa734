"""Plan one drawn step: its samples, the strategy's plan, and the accounts after it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from overlord.plan.plan import LoadingPlan
from overlord.planning.buffer import Joined, StepContext, check_plan, check_samples, gather
from overlord.planning.demand import LoaderRequests
from overlord.planning.draw import Drawn, owed_after, step_positions
from overlord.planning.images.encoder_plans import check_images
from overlord.planning.look_ahead import LookAheadPool
from overlord.planning.selection import check_choice, checked_scores, counts_of, rows_of
from overlord.planning.spec import Ledger
from overlord.planning.stream import SourceStream, StreamPiece


class PlacedStep(NamedTuple):
    """A valid plan of a step, its samples in the loaders, and the accounts after it."""

    plan: LoadingPlan
    pops: np.ndarray  # samples that leave each loader
    doc: np.ndarray  # number of each sample among the held and popped ones (``PlannedStep.doc``)
    loader: np.ndarray  # loader of each sample
    cursors: np.ndarray  # cursors after the step, by source
    owed: tuple[int, ...]
    active: tuple[bool, ...]
    kept: np.ndarray | None = None  # payload rows that stay held; None: nothing is ever held


def place_drawn(
    context: StepContext,
    drawn: Drawn,
    streams: Sequence[SourceStream],
    demand: LoaderRequests,
    ledger: Ledger,
) -> PlacedStep:
    """Take the first samples of each stream and place them by the strategy."""
    spec, pieces = context.spec, list[tuple[int, StreamPiece]]()
    for i, n in enumerate(np.sum(drawn.counts, axis=0).tolist()):
        if n:
            taken, bad = streams[i].take(n)
            pieces += [(i, piece) for piece in taken]
            if bad:
                ledger.list_bad(i, bad)
    order, substep = step_positions(drawn.counts)
    joint = Joined(pieces)
    buffer = gather(joint, order, substep, context)
    loader = joint.holders(demand.first)[order]
    plan = spec.strategy(buffer, spec.place)
    check_plan(plan, buffer, spec.place)
    check_samples(plan, buffer)
    if spec.images:
        check_images(plan, buffer)
    plan.validate()
    # Samples leave a loader in the order of the source's stream.
    pops = np.bincount(loader, minlength=demand.n_loaders)
    by_stream = np.lexsort((order, loader))
    doc = np.empty(len(loader), np.int64)
    doc[by_stream] = np.arange(len(loader))
    cursors = joint.cursors_after(context.state.cursors)
    return PlacedStep(plan, pops, doc, loader, cursors, drawn.owed, drawn.active)


def place_chosen(
    context: StepContext, drawn: Drawn, pool: LookAheadPool, demand: LoaderRequests
) -> PlacedStep:
    """Let the strategy choose among the pool's candidates, or defer samples that do not fit."""
    spec, state = context.spec, context.state
    pops = pool.number(demand.n_loaders)
    candidates = pool.candidates(counts_of(drawn.counts, spec.look_ahead))
    order, substep = step_positions(drawn.counts)
    shown = np.arange(len(candidates.rows)) if spec.look_ahead > 1 else order
    pieces = Joined(candidates.pieces)
    buffer = gather(
        pieces, candidates.rows[shown], substep if spec.look_ahead == 1 else None, context
    )
    loader = pieces.holders(demand.first)[candidates.rows[shown]]
    buffer = replace(
        buffer, age=candidates.age[shown], max_age=spec.max_age, overflow=spec.overflow
    )
    if spec.look_ahead > 1:
        buffer = replace(buffer, drawn=False, wanted=drawn.counts)
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
    taken = np.zeros(len(candidates.rows), bool)
    taken[shown[rows]] = True
    doc, cursors = candidates.number[shown[rows]], state.cursors.copy()
    kept = pool.settle(candidates, taken, cursors, left=spec.look_ahead == 1)
    left = (
        np.sum(drawn.counts, axis=0) - np.bincount(plan.source, minlength=len(spec.sources))
    ).tolist()
    active = tuple(a or n > 0 for a, n in zip(drawn.active, left, strict=True))
    owed = owed_after(drawn.owed, left, context.weights, active) if any(left) else drawn.owed
    return PlacedStep(plan, pops, doc, loader[rows], cursors, owed, active, kept)
