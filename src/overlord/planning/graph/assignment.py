"""The assignment of a balanced DGraph for a plan, and checks of its modules and memory bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.array_order import number_inside
from overlord.errors import PlanError
from overlord.plan.plan import Assignment
from overlord.planning.images.items import Placeholders

if TYPE_CHECKING:
    from overlord.planning.graph.dgraph import DGraph


def assignment_of(graph: DGraph, name: str, ends: Placeholders | None = None) -> Assignment:
    """Return the assignment of a mixed, distributed and balanced graph; else raise."""
    if not graph.mixed:
        raise PlanError(
            f"module {name!r} was never mixed", graph.buffer.step, "call .mix() after from_buffer"
        )
    if graph.axis is None or graph.placement is None:
        missing = "distribute" if graph.axis is None else "balance"
        raise PlanError(
            f"module {name!r} was never given {missing}()",
            graph.buffer.step,
            'balance("none") keeps stream order',
        )
    p, n = graph.placement, graph.tree.n_buckets(graph.axis)
    costs = graph.sizes().astype(np.float64) if graph.costs is None else graph.costs
    slot = number_inside(
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
    )


def check_module(graph: DGraph, what: str, other: Any) -> None:
    """Raise unless ``other`` is a graph of the same samples on the same mesh."""
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
            f"{what} was made from other samples",
            graph.buffer.step,
            "start both graphs from one mixed graph",
        )
    if other.tree != graph.tree:
        problem = f"{what}: expected a graph on {graph.tree}, got one on {other.tree}"
        raise PlanError(
            problem, graph.buffer.step, "give both graphs the place that the strategy is given"
        )


def check_memory(graph: DGraph, capacity: float | None) -> None:
    """Raise unless memory has a function and a bound, or neither.

    The error names a node that alone breaks the bound.
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
            f"sample {graph.buffer[int(graph.sample[i])]} takes "
            f"{float(graph.memory[i]):.12g} of memory, a microbatch has {capacity:.12g}",
            graph.buffer.step,
            "raise memory_capacity, or let on_long truncate or split long samples",
        )
