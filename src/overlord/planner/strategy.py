"""The strategies that come with the package: each turns a step's drawn samples into a plan.

Write your own as a function ``(buffer, place) -> LoadingPlan`` from the same primitives.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np

from overlord.errors import JobError
from overlord.job import did_you_mean
from overlord.placetree import ClientPlaceTree
from overlord.plan import LoadingPlan
from overlord.planner import kernel
from overlord.planner.balance import Placement
from overlord.planner.cost import transformer
from overlord.planner.dgraph import DGraph
from overlord.sample import Buffer

Strategy = Callable[[Buffer, ClientPlaceTree], LoadingPlan]
DENSE_12B = transformer(hidden=4608, layers=45, heads=36)  # the backbone of the Overlord paper (arXiv 2504.09844); only ratios matter


def vanilla(buffer: Buffer, place: ClientPlaceTree) -> LoadingPlan:
    """No planning: sample i goes to rank i mod D, microbatches are cut where they are full."""
    return _samples(buffer, place).balance("none").broadcast_at("TP").plan()


def packed(buffer: Buffer, place: ClientPlaceTree) -> LoadingPlan:
    """Token packing: one global stream cut where a microbatch is full, microbatches dealt out to ranks in turn."""
    graph, n, context = _samples(buffer, place), place.n_buckets("DP"), buffer.batch.context
    graph.check_sizes(context)
    bins = kernel.next_fit(graph.sizes(), context)
    m = max(buffer.batch.microbatches, int(bins.max(initial=0)) // n + 1)
    found = Placement(bucket=(bins % n).astype(np.int32), microbatch=(bins // n).astype(np.int32), n_microbatches=m, way="next fit")
    return graph.placed(found, "pack", context).broadcast_at("TP").plan()


def llm_balance(buffer: Buffer, place: ClientPlaceTree) -> LoadingPlan:
    """Equal cost over ranks, then over the microbatches of each."""
    return _samples(buffer, place).balance("greedy").broadcast_at("TP").plan()


def backbone_balance(buffer: Buffer, place: ClientPlaceTree) -> LoadingPlan:
    """Equal cost over ranks; inside a rank samples stay in stream order."""
    return _samples(buffer, place).balance("greedy", level="inter").broadcast_at("TP").plan()


def _samples(buffer: Buffer, place: ClientPlaceTree) -> DGraph:
    return DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute("DP").cost(DENSE_12B)


STRATEGIES = MappingProxyType({fn.__name__: fn for fn in (vanilla, packed, llm_balance, backbone_balance)})


def resolve(strategy: Any) -> Strategy:
    """A strategy by its name, or the function itself."""
    if callable(strategy):
        return strategy
    if strategy not in STRATEGIES:
        raise JobError([f"strategy: unknown strategy {strategy!r}{did_you_mean(strategy, STRATEGIES)}"])
    return STRATEGIES[strategy]
