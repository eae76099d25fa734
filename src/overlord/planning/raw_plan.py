"""``plan_raw``: a strategy from a function over raw arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from overlord.batch import Batch
from overlord.errors import PlanError
from overlord.mesh import Mesh
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance.balance import ItemPlacement
from overlord.planning.graph.dgraph import DGraph
from overlord.sample import IDS, Buffer, Columns
from overlord.user_code import checked_function, name_of


def plan_raw(fn: RawFn, *, axis: str = "DP", broadcast: str | Sequence[str] = ("TP",)) -> RawPlan:
    """Make a strategy of a function over raw arrays.

    The function is ``fn(columns, place, batch, step) -> {"bucket": ..., "microbatch": ...}``.

    Use it as ``Job(strategy=ov.plan_raw(fn))``; it is called once per step. ``columns`` has a
    read-only array per column, with one row per drawn sample in the order of the draw. The columns
    are ``tokens`` and your metadata (a ``Ragged`` if a sample has several values). The identity is
    ``source`` (number in the job's order), ``epoch``, ``file``, ``row``, ``part``.
    ``mix_every="microbatch"`` adds ``substep``.

    The function returns an integer per sample for ``bucket`` (0 to ``place.n_buckets(axis) - 1``)
    and ``microbatch`` (the highest determines their number, at least ``batch.microbatches``).
    Optional keys are ``slot``, the position in the microbatch (default: the order of the draw), and
    ``cost`` (default: tokens), which only reports use.

        def by_row(columns, place, batch, step):
            row = columns["row"]
            return {"bucket": row % place.dp, "microbatch": np.zeros(len(row), int)}
    """
    dims = (broadcast,) if isinstance(broadcast, str) else tuple(broadcast)
    return RawPlan(
        fn=checked_function(fn, "plan_raw", ("columns", "place", "batch", "step")),
        axis=axis,
        broadcast=dims,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPlan:
    """The strategy that ``plan_raw`` returns."""

    fn: RawFn
    axis: str
    broadcast: tuple[str, ...]
    kind: ClassVar[str] = "strategy"

    @property
    def __name__(self) -> str:
        return f"plan_raw({name_of(self.fn)})"

    def __call__(self, buffer: Buffer, place: Mesh) -> LoadingPlan:
        graph = DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute(self.axis)
        # look-ahead has chosen among candidates, and overflow="defer" has left out what does not
        # fit
        buffer = graph.buffer
        columns: dict[str, Any] = Columns(
            {n: getattr(buffer, n) for n in IDS} | dict(buffer.meta), buffer.step
        )
        if buffer.substep is not None:
            columns["substep"] = buffer.substep
        result = self._checked(
            self.fn(columns, place, buffer.batch, buffer.step), buffer, place.n_buckets(self.axis)
        )
        if "cost" in result:
            graph = graph.cost(lambda _: result["cost"])
        graph.check_sizes(buffer.batch.context)
        microbatches = max(buffer.batch.microbatches, int(result["microbatch"].max(initial=0)) + 1)
        found = ItemPlacement(
            bucket=result["bucket"],
            microbatch=result["microbatch"],
            n_microbatches=microbatches,
            way="raw",
        )
        plan = (
            graph.placed(found, self.__name__, buffer.batch.context)
            .broadcast_at(*self.broadcast)
            .plan()
        )
        if "slot" not in result:
            return plan
        return replace(
            plan, modules={"backbone": replace(plan.main, slot=result["slot"])}
        ).validate()

    def _checked(self, result: Any, buffer: Buffer, n_buckets: int) -> dict[str, np.ndarray]:
        known = ("bucket", "microbatch", "slot", "cost")
        keys = list(result) if isinstance(result, Mapping) else None
        if keys is None or not {"bucket", "microbatch"} <= set(keys) or not set(keys) <= set(known):
            found = type(result).__name__ if keys is None else f"keys {', '.join(map(str, keys))}"
            remedy = f"return a mapping with bucket and microbatch; known: {', '.join(known)}"
            raise PlanError(f"{self.__name__} returned {found}", buffer.step, remedy)
        arrays = {key: np.asarray(result[key]) for key in keys}
        for key, array in arrays.items():
            kinds = "iuf" if key == "cost" else "iu"
            if array.shape != (len(buffer),) or (array.dtype.kind not in kinds and len(buffer)):
                wanted = f"{len(buffer)} {'numbers' if key == 'cost' else 'whole numbers'}"
                raise PlanError(
                    f"{self.__name__}: expected {wanted} for {key}, got {array.dtype} "
                    f"{array.shape}",
                    buffer.step,
                )
            top = n_buckets if key == "bucket" else 2**31
            if key != "cost" and len(array) and not 0 <= int(array.min()) <= int(array.max()) < top:
                raise PlanError(
                    f"{self.__name__}: expected {key} from 0 to {top - 1}, got "
                    f"{int(array.min())} to {int(array.max())}",
                    buffer.step,
                )
        return {
            key: array.astype(np.float64 if key == "cost" else np.int32)
            for key, array in arrays.items()
        }


RawFn = Callable[[dict[str, Any], Mesh, "Batch", int], Mapping[str, Any]]
