"""From pieces of the streams to what a strategy sees, and from its plan back: is it a plan of these samples, for this job?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from overlord.errors import PlanError
from overlord.messages import StreamState
from overlord.placetree import ClientPlaceTree
from overlord.plan import LoadingPlan
from overlord.planner.events import present
from overlord.planner.spec import PlannerSpec
from overlord.planner.stream import Piece, step_meta
from overlord.sample import Buffer, Ragged, take_rows

Pieces = Sequence[tuple[int, Piece]]  # (source, run of its samples), source by source, in stream order


def gather(
    pieces: Pieces, order: np.ndarray, substep: np.ndarray | None, *, spec: PlannerSpec, state: StreamState, weights: Sequence[float]
) -> Buffer:
    """The samples of the pieces, joined, in the given order. Read-only: the plan is compared with these very arrays."""
    parts, n = [p for _, p in pieces], _sizes(pieces)

    def column(name: str, dtype: type) -> np.ndarray:
        return np.concatenate([getattr(p.found, name)[p.start : p.stop] for p in parts])[order].astype(dtype)

    meta = {name: take_rows(values, order) for name, values in step_meta(parts).items()}
    had = {name for p in parts for name in p.found.meta}
    names = present(spec.names, state.events, state.step)
    absent = tuple(dict.fromkeys(name for s in spec.sources[: len(names)] for name in s.meta if name not in had))
    buffer = Buffer(
        names=names, source=np.repeat([i for i, _ in pieces], n)[order].astype(np.int32),
        epoch=np.repeat([p.at[0] for p in parts], n)[order].astype(np.int32),
        file=column("file", np.int32), row=column("row", np.int64), part=column("part", np.int32), meta=meta,
        batch=spec.batch, step=state.step, drawn=True, substep=substep, weights=dict(zip(names, weights, strict=False)), absent=absent,
    )  # fmt: skip
    arrays = [array for c in meta.values() for array in ((c.values, c.offsets) if isinstance(c, Ragged) else (c,))]
    for array in (buffer.source, buffer.epoch, buffer.file, buffer.row, buffer.part, *arrays):
        array.flags.writeable = False
    return buffer


def _sizes(pieces: Pieces) -> np.ndarray:
    return np.array([p.stop - p.start for _, p in pieces], np.int64)


def cursors_behind(pieces: Pieces, cursors: np.ndarray) -> np.ndarray:
    """The cursors when all samples of the pieces are drawn: a source's last piece ends at its cursor."""
    moved = cursors.copy()
    for i, p in dict(pieces).items():
        moved[i] = (*p.at[:3], p.found.file[p.stop - 1], p.found.row[p.stop - 1], p.found.part[p.stop - 1])
    return moved


def holders(pieces: Pieces, first_loader: np.ndarray) -> np.ndarray:
    """Loader of every sample of the pieces; source i's loaders are numbered from ``first_loader[i]`` on."""
    if not pieces:
        return np.zeros(0, np.int64)
    n = _sizes(pieces)
    first = np.repeat(first_loader[[i for i, _ in pieces]], n)
    if len(first_loader) == int(first_loader[-1]) + 1:  # one loader each
        return first
    return first + np.concatenate(
        [np.full(k, p.loader) if isinstance(p.loader, int) else p.loader[p.start : p.stop] for k, (_, p) in zip(n, pieces, strict=True)]
    )


def check_plan(plan: Any, buffer: Buffer, place: ClientPlaceTree) -> None:
    if not isinstance(plan, LoadingPlan):
        raise PlanError(f"the strategy returned {type(plan).__name__}", buffer.step, "end it with .plan()")
    wanted = place.n_buckets("DP")
    if "backbone" in plan.modules and plan.main.n_buckets != wanted:  # more would never be delivered
        raise PlanError(f"the plan has {plan.main.n_buckets} buckets, {place} has {wanted}", buffer.step, 'call .distribute("DP")')
    if plan.place is not None and plan.place != place:  # who fetches would be told wrong
        raise PlanError(f"the plan is for {plan.place}, the job has {place}", buffer.step, "use the place the strategy is given")


def check_samples(plan: LoadingPlan, buffer: Buffer) -> None:
    same = plan.step == buffer.step and plan.names == buffer.names and len(plan) == len(buffer)
    columns = ((getattr(plan, n), getattr(buffer, n)) for n in ("source", "epoch", "file", "row", "part"))
    if not same or not all(a is b or np.array_equal(a, b) for a, b in (*columns, (plan.tokens, buffer.meta["tokens"]))):
        raise PlanError(
            "the strategy changed the drawn samples", buffer.step, "a strategy places samples; it neither adds, drops nor reorders them"
        )
