"""``DGraph.split``: samples on rings of ranks, by the schedule of hybrid steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.errors import PlanError
from overlord.plan.pieces import AXES
from overlord.plan.tasks import PlanTasks
from overlord.planning.balance.balance import ItemPlacement
from overlord.planning.balance.hybrid import HybridPlan, HybridRules, schedule
from overlord.planning.balance.hybrid_rules import check_arguments
from overlord.planning.balance.ring_bound import lower_bound
from overlord.planning.cost import CostFn, fingerprint_of
from overlord.planning.cost.ring import RingCosts

if TYPE_CHECKING:
    from overlord.planning.graph.dgraph import DGraph

# lengths at which the cost of a token and of a pair of tokens is read from any cost function
PROBES = np.array([4096.0, 8192.0])


def split_graph(
    graph: DGraph, capacity: int | None, groups: Any, rules: Mapping[str, Any]
) -> DGraph:
    """Return the graph with every sample on its ring: see ``DGraph.split``."""
    _check(graph)
    batch, tree = graph.buffer.batch, graph.tree
    assert graph.axis is not None
    chunks = {"virtual": tree.vpp, "count_multiple": tree.count_multiple} if tree.vpp > 1 else {}
    equal = graph.buffer.sync == "microbatch" or tree.vpp > 1
    unit = batch.pad_multiple * (tree.tp if batch.sequence_parallel else 1)
    try:
        given = {"equal_counts": equal, **chunks, **check_arguments(capacity, groups, rules)}
        padded = given.pop("padded", unit > 1 or groups == "power_of_two")
        if equal and not given["equal_counts"]:
            raise PlanError(
                'expected equal counts with Job.sync="microbatch" or place.vpp above 1, got '
                "equal_counts=False",
                remedy='leave out equal_counts, or set Job.sync="step" and place.vpp=1',
            )
        if unit > 1 and not padded:
            raise PlanError(
                f"expected padding, since a piece is a multiple of {unit} tokens, got padded=False",
                remedy="leave out padded, or set Batch.pad_multiple=1 and sequence_parallel=False",
            )
        made = HybridRules(
            groups=groups,
            ranks=tree.n_buckets(graph.axis),
            capacity=batch.context if capacity is None else capacity,
            stages=tree.pp,
            multiple=unit if padded else 0,
            **given,
        )
        costs = ring_costs(graph.costs_by)
        lengths = _tokens(graph)
        found = schedule(lengths, costs, made)
    except PlanError as e:
        raise PlanError(f"split(): {e.problem}", graph.buffer.step, e.remedy) from None
    return _placed(graph, made, found, costs, lengths)


def ring_costs(fn: CostFn | None) -> RingCosts:
    """Return a cost function as costs of rings.

    ``RingCosts`` are used as they are. Of others only the cost of a token and of a pair of tokens
    is known; transfers on their rings have no cost.
    """
    if isinstance(fn, RingCosts):
        return fn
    if fn is None:
        return RingCosts(linear=1.0)
    try:
        a, b = np.asarray(fn({"tokens": PROBES}), np.float64).tolist()
    except (PlanError, KeyError, TypeError, ValueError):
        raise PlanError(
            f"expected a cost of the metadata 'tokens' alone, got {fingerprint_of(fn)}",
            remedy="call .cost(ov.cost.RingCosts(...)), or a cost of lengths",
        ) from None
    x, y = PROBES.tolist()
    square = max(0.0, (b / y - a / x) / (y - x))
    return RingCosts(linear=max(0.0, a / x - square * x), square=square)


def _check(graph: DGraph) -> None:
    step = graph.buffer.step
    if graph.axis not in AXES:
        raise PlanError(
            f"split(): expected a graph that is distributed over {' or '.join(AXES)}, got "
            f"{graph.axis or 'one without buckets'}",
            step,
            'call .distribute("CP"), which has every rank of dp x cp',
        )
    if graph.axis == "DP" and graph.tree.cp > 1:
        raise PlanError(
            f"split(): expected every rank of {graph.tree} in a bucket of its own, got buckets of "
            f"{graph.tree.cp} ranks",
            step,
            'call .distribute("CP")',
        )
    if graph.on is not None:
        raise PlanError(
            f"split(): expected a graph on the job's mesh, got one on {graph.on}",
            step,
            "leave out distribute(on=)",
        )
    if graph.items or len(graph.sample) != len(graph.buffer):
        raise PlanError(
            "split(): expected all samples of the step, got items or a selection",
            step,
            'start from .select("tokens")',
        )
    if graph.memory is not None or graph.group_size is not None:
        raise PlanError(
            "split(): expected neither cost(memory=) nor distribute(group_size=), got one of them",
            step,
            "leave it out: capacity= bounds the tokens of a rank",
        )
    if graph.buffer.batch.layout != "packed":
        raise PlanError(
            f'split(): expected Batch.layout "packed", got {graph.buffer.batch.layout!r}',
            step,
            'set layout="packed"',
        )
    if graph.buffer.batch.cp_split != "zigzag":
        raise PlanError(
            f'split(): expected Batch.cp_split "zigzag", got {graph.buffer.batch.cp_split!r}',
            step,
            'set cp_split="zigzag": a ring has chunks k and 2d-1-k of each sample',
        )


def _tokens(graph: DGraph) -> np.ndarray:
    tokens = graph.buffer.column("tokens")
    assert isinstance(tokens, np.ndarray)
    return tokens.astype(np.int64, copy=False)


def _placed(
    graph: DGraph, rules: HybridRules, found: HybridPlan, costs: RingCosts, lengths: np.ndarray
) -> DGraph:
    table, task = found.tasks, found.task
    sizes = table.sizes()
    d = sizes[task]
    exact = lengths.astype(np.float64)
    node, first = table.task_rank // rules.node, table.task_ptr[:-1]
    across = np.maximum.reduceat(node, first) > np.minimum.reduceat(node, first)
    constant = costs.coefficients(d)[2]
    seconds = costs.seconds(exact, exact * exact, d, across[task]) - constant
    n = int(table.index.max(initial=0)) + 1
    rings = int((sizes > 1).sum())
    placement = ItemPlacement(
        bucket=table.task_rank[table.task_ptr[:-1]][task].astype(np.int32),
        microbatch=table.index[task].astype(np.int32),
        n_microbatches=n,
        algorithm=f"{len(table)} tasks, {rings} of them rings of up to {int(sizes.max(initial=1))}",
    )
    tasks = PlanTasks(
        table=table,
        task=task,
        rules=rules.task_rules(),
        offload_share=rules.offload_share,
        end=found.load,
        bound=lower_bound(lengths, costs, rules),
    )
    whole = replace(graph, costs=seconds * d, tasks=tasks)
    what = f"split({rules.capacity}, {rules.groups}{', padded' if rules.multiple else ''})"
    return whole.placed(placement, what, rules.capacity)
