"""The loader of each node of a planned DGraph, and the constructor of every bucket.

A strategy cannot read them: a plan that depended on the loader of a sample would change with the
number of loaders.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.batch import Batch
from overlord.errors import PlanError
from overlord.mesh import Mesh
from overlord.plan.plan import LoadingPlan
from overlord.planning.balance.balance import ItemPlacement
from overlord.sample import Buffer

if TYPE_CHECKING:
    from overlord.planning.graph.dgraph import DGraph

STATES = {
    "select": "selected",
    "mix": "drawn",
    "distribute": "distributed",
    "cost": "weighed",
    "broadcast_at": "pruned",
}


class Edge(NamedTuple):
    """One transform or grouping that took all nodes from one state to the next."""

    before: str
    after: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """The holder of each node: ``names[index[i]]`` or ``binding[i]`` holds node i."""

    index: np.ndarray  # int32, read-only
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> str:
        return self.names[int(self.index[i])]

    def counts(self) -> dict[str, int]:
        """Return the number of nodes by holder, without holders of none."""
        n = np.bincount(self.index, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, n, strict=True) if count}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """Bindings that planning added to a graph.

    ``loader`` is by sample of the plan, whatever the nodes are.
    """

    plan: LoadingPlan
    loader: Binding
    constructor: tuple[str, ...]  # by bucket


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view: the owner may be a user function."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def unbound(step: int) -> PlanError:
    return PlanError(
        "no constructor is bound before the step is planned",
        step,
        "session.graph(step).constructor names them by bucket",
    )


def edges_of(trail: Sequence[str], planned: bool) -> list[Edge]:
    """Return the states of the nodes before and after each operation.

    An operation that is not in ``STATES``, such as balance, pack or one of a user, places the
    nodes.
    """
    edges, state = [], "buffered"
    for what in trail:
        after = STATES.get(what.partition("(")[0], "placed")
        edges.append(Edge(state, after, what))
        state = after
    return [*edges, Edge(state, "planned", "plan()")] if planned else edges


def constructors_of(place: Mesh, axis: str) -> tuple[str, ...]:
    """Return the constructor of each bucket: that of the data-parallel group of its ranks."""
    if axis == "DP":
        return tuple(f"constructor/{b}" for b in range(place.n_buckets("DP")))
    group = {rank: b for b, ranks in enumerate(place.buckets("DP")) for rank in ranks}
    return tuple(f"constructor/{group[ranks[0]]}" for ranks in place.buckets(axis))


def planned_graph(
    plan: LoadingPlan,
    batch: Batch,
    place: Mesh,
    loader: np.ndarray,
    loaders: tuple[str, ...],
    sync: str = "microbatch",
) -> DGraph:
    """Return the graph of a planned step: the nodes of its backbone with their bindings.

    For display; it has the metadata of the plan only.
    """
    from overlord.planning.graph.dgraph import DGraph

    a, place = plan.main, plan.place or place
    buffer = Buffer(
        names=plan.names,
        source=plan.source,
        epoch=plan.epoch,
        file=plan.file,
        row=plan.row,
        part=plan.part,
        meta={"tokens": read_only(plan.tokens)},
        batch=batch,
        step=plan.step,
        drawn=True,
        substep=plan.substep,
        weights=dict(plan.extra.get("weights", {})),
        sync=sync,
    )
    placement = ItemPlacement(
        bucket=a.bucket, microbatch=a.microbatch, n_microbatches=a.n_microbatches, way="as planned"
    )
    binding = Binding(index=read_only(loader.astype(np.int32)), names=loaders)
    return DGraph(
        buffer=buffer,
        tree=place,
        sample=a.sample,
        columns={"tokens": plan.tokens[a.sample]},
        meta=("tokens",),
        mixed=True,
        axis=a.axis,
        costs=a.cost,
        capacity=a.capacity,
        placement=placement,
        broadcast=a.broadcast,
        trail=tuple(plan.extra.get("trail", ())),
        bound=Bound(plan=plan, loader=binding, constructor=constructors_of(place, a.axis)),
    )
