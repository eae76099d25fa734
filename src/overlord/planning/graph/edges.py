"""Edges of a DGraph: what each primitive made of each node.

Nodes of a state are the samples or items of the graph at that point, by number. Placing groups
them: the nodes of later states are microbatches, counted over all buckets. Edges are computed on
request, from the graphs before each primitive; without a request they have no cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from overlord.hashing import position_in_key
from overlord.sample import IDS, Buffer, ranges

if TYPE_CHECKING:
    from overlord.planning.graph.dgraph import DGraph

STATES = {
    "select": "selected",
    "mix": "drawn",
    "distribute": "distributed",
    "cost": "weighed",
    "broadcast_at": "pruned",
}
TRANSFORMATION, DEPENDENCY, NULL = "transformation", "dependency", "null"


class Edge(NamedTuple):
    """The edges of all nodes between two states, by one primitive.

    Edge i leads from node ``source[i]`` of the state ``before`` to node ``target[i]`` of the state
    ``after``. ``kind``: "transformation" if the primitive changed the nodes, "dependency" if it
    grouped them (into microbatches, and these by constructor), "null" if each node stayed as it
    was.
    """

    before: str
    after: str
    what: str  # the primitive with its main arguments
    kind: str
    source: np.ndarray  # int64
    target: np.ndarray  # int64


def edges_of(graph: DGraph) -> list[Edge]:
    """Return the edges of every primitive of a graph, in order.

    A primitive that is not in ``STATES``, such as ``balance`` or a user's, places the nodes. A
    planned graph has only the samples of its plan, not the candidates that were left out.
    """
    graphs = [graph]
    while (before := graphs[-1].before) is not None:
        graphs.append(before)
    graphs.reverse()
    if graph.bound is not None:
        return _of_planned(graph)
    edges, state = list[Edge](), "buffered"
    for earlier, later in pairwise(graphs):
        what = later.trail[-1]
        after = STATES.get(what.partition("(")[0], "placed")
        edges.append(Edge(state, after, what, *_between(earlier, later)))
        state = after
    return edges


def _between(earlier: DGraph, later: DGraph) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the kind, the sources and the targets of one primitive's edges."""
    if earlier.placement is not None:
        return _same(_n_groups(earlier))
    if later.placement is not None:
        return DEPENDENCY, np.arange(len(later.sample)), _groups(later)
    if later.buffer is earlier.buffer and later.sample is earlier.sample:
        kind, source, target = _same(len(later.sample))
        return (kind if later.costs is earlier.costs else TRANSFORMATION), source, target
    source, target = _by_sample(earlier, later)
    return TRANSFORMATION, source, target


def _same(n: int) -> tuple[str, np.ndarray, np.ndarray]:
    return NULL, np.arange(n), np.arange(n)


def _groups(graph: DGraph) -> np.ndarray:
    """Return the microbatch of each node, counted over all buckets."""
    assert graph.placement is not None
    p = graph.placement
    return p.bucket.astype(np.int64) * p.n_microbatches + p.microbatch


def _n_groups(graph: DGraph) -> int:
    assert graph.placement is not None
    assert graph.axis is not None
    return graph.mesh.n_buckets(graph.axis) * graph.placement.n_microbatches


def _by_sample(earlier: DGraph, later: DGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return the edges between nodes of the same sample.

    The k-th item of a sample becomes its k-th item, if both graphs have equally many. Otherwise
    every node of the sample leads to every node of it: from a sample to its items, or back.
    """
    n = len(earlier.buffer)
    row = _rows_in(later.buffer, earlier.buffer)[later.sample]
    had, has = (np.bincount(rows, minlength=n) for rows in (earlier.sample, row))
    first = np.cumsum(had) - had  # nodes are in the order of their samples
    by_row = np.argsort(earlier.sample, kind="stable")
    kept = has > 0
    if np.array_equal(had[kept], has[kept]):
        return by_row[first[row] + position_in_key(row, n)], np.arange(len(row))
    source = by_row[ranges(first[row], had[row])]
    return source, np.repeat(np.arange(len(row)), had[row])


def _rows_in(later: Buffer, earlier: Buffer) -> np.ndarray:
    """Return the row in an earlier buffer of each sample of a later one."""
    if later is earlier:
        return np.arange(len(later))
    names = IDS if later.offset is None or earlier.offset is None else (*IDS, "offset")
    ids = [
        np.stack([getattr(buffer, name).astype(np.int64) for name in names], axis=1)
        for buffer in (earlier, later)
    ]
    _, number = np.unique(np.concatenate(ids), axis=0, return_inverse=True)
    number = number.reshape(-1)
    rows = np.empty(int(number.max(initial=-1)) + 1, np.int64)
    rows[number[: len(earlier)]] = np.arange(len(earlier))
    found: np.ndarray = rows[number[len(earlier) :]]
    return found


def _of_planned(graph: DGraph) -> list[Edge]:
    """Return the edges of a planned graph, up to the constructor of each microbatch."""
    assert graph.bound is not None
    edges, state, n = list[Edge](), "buffered", len(graph.sample)
    placed = False
    for what in graph.trail:
        after = STATES.get(what.partition("(")[0], "placed")
        if placed or after != "placed":
            kind, source, target = _same(_n_groups(graph) if placed else n)
            kind = TRANSFORMATION if after in ("selected", "drawn", "weighed") else kind
        else:
            placed, kind, source, target = True, DEPENDENCY, np.arange(n), _groups(graph)
        edges.append(Edge(state, after, what, kind, source, target))
        state = after
    bucket = np.arange(_n_groups(graph)) // (_n_groups(graph) // len(graph.bound.constructor))
    target = _constructor_numbers(graph.bound.constructor)[bucket]
    return [*edges, Edge(state, "planned", "plan()", DEPENDENCY, np.arange(len(bucket)), target)]


def _constructor_numbers(names: Sequence[str]) -> np.ndarray:
    return np.array([int(name.rpartition("/")[2]) for name in names], np.int64)
