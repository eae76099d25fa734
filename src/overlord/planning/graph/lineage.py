"""The nodes of a DGraph: their rows and columns, their assignment, their bindings once planned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import PlanError
from overlord.hashing import position_in_key
from overlord.mesh import Batch, Mesh
from overlord.plan.module_ranks import check_padding
from overlord.plan.plan import Assignment, LoadingPlan
from overlord.planning.balance.balance import ItemPlacement
from overlord.planning.images import Placeholders
from overlord.sample import Buffer, Ragged

if TYPE_CHECKING:
    from overlord.planning.graph.dgraph import DGraph


def nodes(
    buffer: Buffer, names: Sequence[str], sources: Sequence[str] | None = None
) -> tuple[np.ndarray, dict[str, np.ndarray], bool]:
    """Return the buffer row of each node, the columns of the nodes, and whether they are items.

    ``names``: metadata columns; empty: all with one value per sample. If one of them is ragged,
    there is a node for each of its values. ``sources``: keep nodes of these sources; None: of all.
    """
    sample, columns, items = _all_nodes(buffer, names)
    if sources is None:
        return sample, columns, items
    kept = np.isin(sample, of_sources(buffer, sources))
    return sample[kept], {n: c[kept] for n, c in columns.items()}, items


def _all_nodes(
    buffer: Buffer, names: Sequence[str]
) -> tuple[np.ndarray, dict[str, np.ndarray], bool]:
    if not names:
        return (
            np.arange(len(buffer)),
            {n: c for n, c in buffer.meta.items() if isinstance(c, np.ndarray)},
            False,
        )
    found = {name: buffer.column(name) for name in names}
    ragged = {n: c for n, c in found.items() if isinstance(c, Ragged)}
    if not ragged:
        return (
            np.arange(len(buffer)),
            {n: c for n, c in found.items() if isinstance(c, np.ndarray)},
            False,
        )
    lengths = next(iter(ragged.values())).lengths
    sample = np.repeat(np.arange(len(buffer)), lengths)
    columns: dict[str, np.ndarray] = {}
    for name, column in found.items():
        if isinstance(column, Ragged) and not np.array_equal(column.lengths, lengths):
            other = next(iter(ragged))
            raise PlanError(
                f"select: expected as many items in {name!r} as in {other!r}, got another number",
                buffer.step,
                "select them in two graphs",
            )
        columns[name] = (
            column.values[column.offsets[0] : column.offsets[-1]]
            if isinstance(column, Ragged)
            else column[sample]
        )
    return sample, dict(sorted(columns.items(), key=lambda c: c[0] not in ragged)), True


def of_sources(buffer: Buffer, sources: Sequence[str]) -> np.ndarray:
    """Return the rows of the buffer that come from these sources."""
    unknown = [s for s in sources if s not in buffer.names]
    if unknown:
        raise PlanError(
            f"expected a source of the buffer, got {unknown[0]!r}",
            buffer.step,
            f"select one of {', '.join(buffer.names)}",
        )
    return np.flatnonzero(np.isin(buffer.source, [buffer.names.index(s) for s in sources]))


# ----------------------------------------------------------------------------
# The assignment of a balanced DGraph for a plan, and checks of its modules and memory bound.


def assignment_of(graph: DGraph, name: str, ends: Placeholders | None = None) -> Assignment:
    """Return the assignment of a graph; raise ``PlanError`` unless mixed, distributed, balanced.

    ``name``: module of the plan. ``ends``: placeholders of items; None for samples.
    """
    if not graph.mixed:
        raise PlanError(
            f"module {name!r}: expected a mixed graph, got one without .mix()",
            graph.buffer.step,
            "call .mix() after from_buffer",
        )
    if graph.axis is None or graph.placement is None:
        missing = "distribute" if graph.axis is None else "balance"
        raise PlanError(
            f"module {name!r}: expected a distributed and balanced graph, got one without "
            f".{missing}()",
            graph.buffer.step,
            'call .distribute(axis), then .balance(); balance("none") keeps stream order',
        )
    p, n = graph.placement, graph.mesh.n_buckets(graph.axis)
    if name == "backbone" and graph.on is not None:
        check_padding(graph.tree, graph.on, graph.buffer.batch, graph.buffer.step)
    costs = graph.sizes().astype(np.float64) if graph.costs is None else graph.costs
    slot = position_in_key(
        p.bucket.astype(np.int64) * p.n_microbatches + p.microbatch, n * p.n_microbatches, np.int32
    )
    return Assignment(
        axis=graph.axis,
        n_buckets=n,
        n_microbatches=p.n_microbatches,
        sample=graph.sample,
        bucket=p.bucket,
        microbatch=p.microbatch,
        slot=slot,
        size=graph.sizes(),
        cost=costs,
        capacity=graph.capacity,
        broadcast=graph.broadcast,
        memory=graph.memory,
        memory_capacity=graph.memory_capacity,
        out=None if ends is None else ends.out,
        offset=None if ends is None else ends.offset,
        on=graph.on,
    )


def check_module(graph: DGraph, what: str, other: Any) -> None:
    """Raise ``PlanError`` unless ``other`` is a graph of the same samples on the same mesh.

    ``what`` names ``other`` in the error.
    """
    if not isinstance(other, type(graph)):
        raise PlanError(
            f"{what}: expected a DGraph, got {type(other).__name__}",
            graph.buffer.step,
            "give the graph, not its plan",
        )
    if not all(
        np.array_equal(getattr(other.buffer, n), getattr(graph.buffer, n))
        for n in ("source", "epoch", "file", "row", "part")
    ):
        raise PlanError(
            f"{what}: expected a graph of the same samples, got one of others",
            graph.buffer.step,
            "start both graphs from one mixed graph",
        )
    if other.tree != graph.tree:
        problem = f"{what}: expected a graph on {graph.tree}, got one on {other.tree}"
        raise PlanError(
            problem, graph.buffer.step, "make both graphs with the place that the strategy gets"
        )


def check_memory(graph: DGraph, capacity: float | None) -> None:
    """Raise ``PlanError`` unless a graph has a memory function and a valid bound, or neither.

    Also raise if one node alone exceeds the bound.
    """
    if capacity is not None and (
        not isinstance(capacity, (int, float, np.integer)) or not 0 < capacity < float("inf")
    ):
        raise PlanError(
            f"memory_capacity: expected a number above 0, got {capacity!r}", graph.buffer.step
        )
    if (graph.memory is None) != (capacity is None):
        lacks = (
            "balance(memory_capacity=) was not given"
            if capacity is None
            else "cost(memory=) was not given"
        )
        raise PlanError(
            f"expected a memory function and a bound, or neither, but {lacks}",
            graph.buffer.step,
            "give both, or neither",
        )
    if (
        graph.memory is not None
        and capacity is not None
        and len(graph.memory)
        and float(graph.memory.max()) > capacity
    ):
        i = int(graph.memory.argmax())
        raise PlanError(
            f"sample {graph.buffer[int(graph.sample[i])]}: expected at most {capacity:.12g} of "
            f"memory, that of a microbatch, got {float(graph.memory[i]):.12g}",
            graph.buffer.step,
            "raise memory_capacity, or let on_long truncate or split long samples",
        )


# ----------------------------------------------------------------------------
# The loader of each node of a planned DGraph, and the constructor of every bucket.
#
# A strategy cannot read them: a plan that depended on the loader of a sample would change with
# the number of loaders.


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
        """Return the number of nodes by holder, without holders that have none."""
        n = np.bincount(self.index, minlength=len(self.names)).tolist()
        return {name: count for name, count in zip(self.names, n, strict=True) if count}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """The plan of a planned graph, and the loaders and constructors of that plan.

    ``loader`` is by sample of the plan, even if nodes are items.
    """

    plan: LoadingPlan
    loader: Binding
    constructor: tuple[str, ...]  # by bucket


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only view of an array, whose owner may be user code."""
    if not array.flags.writeable:
        return array
    view = array.view()
    view.flags.writeable = False
    return view


def unbound(step: int) -> PlanError:
    return PlanError(
        "graph.constructor: expected a planned step, got a graph to which no constructor is bound",
        step,
        "use session.graph(step).constructor once the step is planned",
    )


def described(graph: DGraph) -> str:
    """Return the nodes of a graph and the primitives applied to them, as text."""
    nodes = (
        f"{len(graph.sample)} items of {len(graph.buffer)} samples"
        if graph.items
        else f"{len(graph.sample)} samples"
    )
    head = f"DGraph(step {graph.buffer.step}, {nodes} on {graph.tree}"
    return head + "".join(f"\n  -> {t}" for t in graph.trail) + ")"


def constructors_of(place: Mesh, axis: str, on: Mesh | None = None) -> tuple[str, ...]:
    """Return the constructor of each bucket: that of the data-parallel group of its ranks.

    ``on``: the module's own mesh, if it has one.
    """
    if axis == "DP" and on is None:
        return tuple(f"constructor/{b}" for b in range(place.n_buckets("DP")))
    group = {rank: b for b, ranks in enumerate(place.buckets("DP")) for rank in ranks}
    return tuple(f"constructor/{group[ranks[0]]}" for ranks in (on or place).buckets(axis))


def planned_graph(
    plan: LoadingPlan,
    batch: Batch,
    place: Mesh,
    loader: np.ndarray,
    loaders: tuple[str, ...],
    sync: str = "microbatch",
) -> DGraph:
    """Return the graph of a planned step, for display: the nodes of its backbone and their loaders.

    Its only metadata is ``tokens``. ``loader``: number in ``loaders`` of each sample's loader.
    """
    from overlord.planning.graph.dgraph import DGraph

    a, place = plan.pieces(), plan.place or place
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
        bucket=a.bucket,
        microbatch=a.microbatch,
        n_microbatches=a.n_microbatches,
        algorithm="as planned",
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
        on=a.on,
        costs=a.cost,
        capacity=a.capacity,
        placement=placement,
        broadcast=a.broadcast,
        trail=tuple(plan.extra.get("trail", ())),
        bound=Bound(plan=plan, loader=binding, constructor=constructors_of(place, a.axis, a.on)),
    )
