"""What the nodes of a DGraph are bound to once their step is planned: a loader each, a constructor
for every bucket.

A strategy sees none of it: a plan that depended on which loader holds a sample would change with
the number of loaders.
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
from overlord.planning.balance.balance import Placement
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
    """One transform or grouping that took all nodes from one processing state to the next."""

    before: str
    after: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Binding:
    """Who holds each node: ``names[index[i]]`` holds node i, and so does ``binding[i]`` say."""

    index: np.ndarray  # int32, not writeable
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> str:
        return self.names[int(self.index[i])]

    def counts(self) -> dict[str, int]:
        """Nodes by holder, those that hold none left out."""
        n = np.bincount(self.index, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, n, strict=True) if count}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """What planning added to a graph. ``loader`` is by sample of the plan, whatever the nodes
    are.
    """

    plan: LoadingPlan
    loader: Binding
    constructor: tuple[str, ...]  # by bucket


def read_only(array: np.ndarray) -> np.ndarray:
    """The same memory, not writeable through what is returned: the owner may be a user's
    function.
    """
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
    """The states that nodes went through. What is no primitive of its own (balance, pack, yours)
    places.
    """
    edges, state = [], "buffered"
    for what in trail:
        after = STATES.get(what.partition("(")[0], "placed")
        edges.append(Edge(state, after, what))
        state = after
    return [*edges, Edge(state, "planned", "plan()")] if planned else edges


def constructors_of(place: Mesh, axis: str) -> tuple[str, ...]:
    """The constructor that serves each bucket of an axis: that of the data-parallel group of its
    ranks.
    """
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
    """The graph of a planned step: its backbone's nodes with what they are bound to. For people;
    metadata is what the plan holds.
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
    placement = Placement(
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
