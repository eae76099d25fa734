"""Convert stream pieces into the buffer of a strategy, and check the plan that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from overlord.errors import PlanError
from overlord.mesh import BUCKET_AXES, Mesh
from overlord.messages.control import StreamState
from overlord.plan.plan import LoadingPlan
from overlord.planning.events import present
from overlord.planning.spec import PlannerSpec
from overlord.planning.stream import StreamPiece, step_meta
from overlord.sample import Buffer, Ragged, take_rows

# (source, run of its samples), source by source, in stream order
Pieces = Sequence[tuple[int, StreamPiece]]


class Joined:
    """Stream pieces as columns, one row per sample."""

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
        """Return the cursors after all samples: a source's last piece ends at its cursor."""
        last, end = np.append(self.where[1:] != self.where[:-1], True), np.cumsum(self.sizes) - 1
        source, end, moved = self.where[last], end[last], cursors.copy()
        moved[source, :3] = self.at[last]
        moved[source, 3:] = np.stack([self.file[end], self.row[end], self.part[end]], axis=1)
        return moved

    def holders(self, first_loader: np.ndarray) -> np.ndarray:
        """Return the loader of every sample; those of source i start at ``first_loader[i]``."""
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
    """The job, the state before a step, and the weights of the step."""

    spec: PlannerSpec
    state: StreamState
    weights: Sequence[float]


def gather(
    pieces: Joined, order: np.ndarray, substep: np.ndarray | None, context: StepContext
) -> Buffer:
    """Return the samples of the pieces in the given order.

    The arrays are read-only: the plan is compared with them.
    """
    spec, state, weights = context
    names = present(spec.names, state.events, state.step)
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
        batch=spec.batch,
        step=state.step,
        drawn=True,
        substep=substep,
        weights=dict(zip(names, weights, strict=False)),
        absent=tuple(n for n in own if n not in had),
        sync=spec.sync,
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
                f"expected buckets along one of {', '.join(BUCKET_AXES)}, got {axis!r}",
                buffer.step,
                'call .distribute("DP")',
            )
        # more buckets would never be delivered
        if plan.main.n_buckets != (wanted := place.n_buckets(axis)):
            problem = (
                f"expected {wanted} buckets along {axis} of {place}, got {plan.main.n_buckets}"
            )
            raise PlanError(problem, buffer.step, f'call .distribute("{axis}")')
    if plan.place is not None and plan.place != place:  # the fetchers would be wrong
        raise PlanError(
            f"expected a plan for {place}, got one for {plan.place}",
            buffer.step,
            "use the place the strategy is given",
        )


def check_samples(plan: LoadingPlan, buffer: Buffer) -> None:
    same = plan.step == buffer.step and plan.names == buffer.names and len(plan) == len(buffer)
    columns = (
        (getattr(plan, n), getattr(buffer, n)) for n in ("source", "epoch", "file", "row", "part")
    )
    if not same or not all(
        a is b or np.array_equal(a, b) for a, b in (*columns, (plan.tokens, buffer.meta["tokens"]))
    ):
        raise PlanError(
            "the strategy changed the drawn samples",
            buffer.step,
            "a strategy places samples; it neither adds, drops nor reorders them",
        )
