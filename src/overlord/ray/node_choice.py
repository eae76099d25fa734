"""Choose the node of a cluster for each worker of a job.

The choice is pure; an actor system executes it. Nodes of trainers come first, as in the Overlord
paper (arXiv 2504.09844). They have idle cores and memory, and batches built there reach a rank
through shared memory. Constructors run where the ranks of their groups are. Loaders take a share of
the idle cores of those nodes, and nodes without ranks when that is used up.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

CONSTRUCTOR = "constructor-worker"
LOADER = "loader-worker"
NODE_ID = "ray.io/node-id"  # the label with which Ray identifies its nodes
_ONE_OF = re.compile(r"in\((.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the cluster: its names, its idle cores and bytes, its labels and resources.

    What no actor has requested is idle. The operators of the cluster define labels and resources.
    """

    id: str
    name: str = ""
    address: str = ""
    idle_cores: float = 0.0
    idle_memory: float = math.inf
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)  # in total
    idle_resources: Mapping[str, float] = field(default_factory=dict)

    def has_name(self, name: str) -> bool:
        """Return whether ``name`` is its id, name or address."""
        return name in (self.id, self.name, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The requested layout: the node of every rank, and the ranks of each constructor worker."""

    rank_nodes: tuple[str, ...] = ()
    ranks_of: tuple[tuple[int, ...], ...] = ()  # by constructor worker
    # fraction of the idle cores and memory of nodes with ranks: constructors use it first, loaders
    # the rest
    share: float = 0.5
    # a loader worker without room is left to the cluster, which may add a node for it
    reserve: bool = False
    # labels of the nodes for workers that need not run next to ranks
    labels: Mapping[str, str] = field(default_factory=dict)
    # resources that each of those workers requests, in addition to a core and memory
    resources: Mapping[str, float] = field(default_factory=dict)

    def suits(self, node: Node) -> bool:
        """Return whether a node has the requested labels and resources."""
        return all(
            has_label(node.labels, key, wanted) for key, wanted in self.labels.items()
        ) and all(node.resources.get(key, 0.0) >= wanted for key, wanted in self.resources.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The node of a worker and the resources requested there.

    The request is empty if the node has no room, since Ray would wait for the resources. ``node``
    is empty if the cluster should choose one.
    """

    node: str
    cores: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def fits(self, node: Node) -> bool:
        """Return whether the request fits into the idle resources of a node."""
        enough = all(
            node.idle_resources.get(key, 0.0) >= wanted for key, wanted in self.resources.items()
        )
        return enough and node.idle_cores >= self.cores and node.idle_memory >= self.memory


def has_label(labels: Mapping[str, str], key: str, wanted: str) -> bool:
    """Return whether a label matches ``wanted``, in the syntax of Ray.

    The syntax is ``cpu``, ``!spot``, ``in(a, b)`` or ``!in(a, b)``. A node without the label
    differs from every value.
    """
    found, negated = labels.get(key), wanted.startswith("!")
    listed = _ONE_OF.fullmatch(wanted.removeprefix("!"))
    values = (
        [value.strip() for value in listed[1].split(",")] if listed else [wanted.removeprefix("!")]
    )
    return (found in values) != negated


def without_job(node: Node, ours: Iterable[Spot]) -> Node:
    """Return a node with the idle resources that it would have without these spots of the job."""
    held, more = list(ours), dict.fromkeys(node.resources, 0.0)
    for key, amount in (pair for spot in held for pair in spot.resources.items()):
        more[key] = more.get(key, 0.0) + amount
    return replace(
        node,
        idle_cores=node.idle_cores + math.fsum(spot.cores for spot in held),
        idle_memory=node.idle_memory + sum(spot.memory for spot in held),
        idle_resources={
            key: node.idle_resources.get(key, 0.0) + amount for key, amount in more.items()
        },
    )


def at_most(node: Node, before: Node) -> Node:
    """Return a node with its idle resources limited to those of ``before``.

    Ray may not have subtracted recent requests yet.
    """
    return replace(
        node,
        idle_cores=min(node.idle_cores, before.idle_cores),
        idle_memory=min(node.idle_memory, before.idle_memory),
        idle_resources={
            key: min(idle, before.idle_resources.get(key, 0.0))
            for key, idle in node.idle_resources.items()
        },
    )


def choose(
    name: str, nodes: Sequence[Node], layout: Layout, placed: Mapping[str, Spot], memory: int = 0
) -> Spot:
    """Return the spot for a worker that needs ``memory`` bytes.

    ``placed`` holds the spots of all workers by name. There is at least one node.
    """
    trainers = [n for n in nodes if any(n.has_name(rank_node) for rank_node in layout.rank_nodes)]
    load = Counter(spot.node for worker, spot in placed.items() if worker != name)
    held, taken = Counter[str](), defaultdict[tuple[str, str], float](float)
    for worker, spot in placed.items():
        if worker != name:
            held[spot.node] += spot.memory
            for key, amount in spot.resources.items():
                taken[spot.node, key] += amount

    def has_room(n: Node, share: float) -> bool:
        return (
            int(n.idle_cores * share) > load[n.id] and held[n.id] + memory <= n.idle_memory * share
        )

    def has_more(n: Node) -> bool:
        return all(
            n.idle_resources.get(key, 0.0) >= taken[n.id, key] + wanted
            for key, wanted in layout.resources.items()
        )

    if (near := _near_ranks(name, trainers, layout)) is not None:
        return (
            Spot(node=near.id, cores=1.0, memory=memory)
            if has_room(near, 1.0)
            else Spot(node=near.id)
        )
    suited = [n for n in nodes if layout.suits(n)]
    for some, share in (
        ([n for n in suited if n in trainers], layout.share),
        ([n for n in suited if n not in trainers], 1.0),
    ):
        if room := [n for n in some if has_room(n, share) and has_more(n)]:
            best = min(room, key=lambda n: (load[n.id] - int(n.idle_cores * share), n.id))
            return Spot(node=best.id, cores=1.0, memory=memory, resources=layout.resources)
    # The worker waits for a node with its labels and resources; no other node replaces it.
    if layout.reserve or not suited:
        return Spot(node="", cores=1.0, memory=memory, resources=layout.resources)
    # A head often has no cores, so that no work is placed on it.
    some = [n for n in suited if n.idle_cores >= 1] or suited
    # No node has room: use the least crowded.
    return Spot(node=min(some, key=lambda n: (load[n.id] / max(1.0, n.idle_cores), n.id)).id)


def _near_ranks(name: str, trainers: Sequence[Node], layout: Layout) -> Node | None:
    """Return the node with most of the ranks of a constructor worker, among ``trainers``.

    Return None for another worker, and if the nodes of its ranks are not given.
    """
    kind, _, number = name.partition("/")
    if kind != CONSTRUCTOR or int(number) >= len(layout.ranks_of):
        return None
    ranks = Counter(
        layout.rank_nodes[rank]
        for rank in layout.ranks_of[int(number)]
        if rank < len(layout.rank_nodes)
    )
    found = (n for called, _ in ranks.most_common() for n in trainers if n.has_name(called))
    return next(found, None)


def spot_for_restart(spot: Spot, nodes: Sequence[Node]) -> Spot | None:
    """Return the spot of a restarted worker; None if its node is lost.

    Its resources may belong to others now, or not be free yet. Then it requests none, since a
    restart must not wait.
    """
    if (node := next((n for n in nodes if n.id == spot.node), None)) is None:
        return None
    return spot if spot.fits(node) else Spot(node=spot.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """A node that runs more workers than allowed, and the loader workers that should move away."""

    node: Node
    workers: int  # workers of the job on that node
    allowed: int
    has_ranks: bool
    leaving: tuple[str, ...]  # names of loader workers, in the order in which they should move


def surplus(
    nodes: Sequence[Node], layout: Layout, placed: Mapping[str, Spot], memory: Mapping[str, int]
) -> list[Surplus]:
    """Return the nodes that run more workers than their share allows, those with ranks first.

    ``nodes`` are as they would be without the job; ``memory`` is the need of each worker. Workers
    with a reserved core keep it, also if other jobs have taken cores since. Constructor workers
    never move away from their ranks.
    """
    found = []
    for node in nodes:
        ranks = any(node.has_name(rank_node) for rank_node in layout.rank_nodes)
        share = layout.share if ranks else 1.0
        there = [worker for worker, spot in placed.items() if spot.node == node.id]
        allowed = max(
            int(node.idle_cores * share), sum(worker.startswith(CONSTRUCTOR) for worker in there)
        )
        without = sorted(
            (worker for worker in there if worker.startswith(LOADER) and not placed[worker].cores),
            key=_number,
            reverse=True,
        )
        held, leave = sum(memory.get(worker, 0) for worker in there), list[str]()
        for worker in without:
            if len(there) - len(leave) <= allowed and held <= node.idle_memory * share:
                break
            leave.append(worker)
            held -= memory.get(worker, 0)
        if leave:
            found.append(
                Surplus(
                    node=node,
                    workers=len(there),
                    allowed=allowed,
                    has_ranks=ranks,
                    leaving=tuple(leave),
                )
            )
    return sorted(found, key=lambda s: (not s.has_ranks, s.node.id))


def moves(
    nodes: Sequence[Node], layout: Layout, placed: Mapping[str, Spot], memory: Mapping[str, int]
) -> dict[str, Spot]:
    """Return new spots for loader workers that should move from crowded nodes to others."""
    found, now = dict[str, Spot](), dict(placed)
    for crowded in surplus(nodes, layout, placed, memory):
        for worker in crowded.leaving:
            spot = choose(worker, nodes, layout, now, memory.get(worker, 0))
            # Otherwise no node has room for it.
            if spot.cores and spot.node not in ("", crowded.node.id):
                found[worker] = now[worker] = spot
    return found


def _number(worker: str) -> int:
    return int(worker.rpartition("/")[2])


def node_without_ranks(nodes: Sequence[Node], layout: Layout) -> Node | None:
    """Return the node without ranks that is best for the coordinator; None if there is none.

    The coordinator requests no resources.
    """
    others = [n for n in nodes if not any(n.has_name(rank_node) for rank_node in layout.rank_nodes)]
    suited = [n for n in others if layout.suits(n)] or others
    return max(suited, key=lambda n: (n.idle_cores, n.id), default=None)


def labels_wanted(nodes: Sequence[Node], layout: Layout) -> dict[str, str]:
    """Return the labels of the node that Ray should choose for a worker.

    It must be a node without ranks, because the share of nodes with ranks is used up.
    """
    trainers = sorted(
        n.id for n in nodes if any(n.has_name(rank_node) for rank_node in layout.rank_nodes)
    )
    return {**layout.labels, **({NODE_ID: f"!in({','.join(trainers)})"} if trainers else {})}


def constructors_by_node(nodes_of: Sequence[Sequence[str]], workers: int) -> list[int]:
    """Return the number of the constructor worker of every data-parallel group.

    ``nodes_of`` holds the known nodes of the ranks of each group. A worker runs on one node, so its
    groups should too. Every node gets workers in proportion to its groups. With fewer workers than
    nodes, a worker serves the groups of several nodes. Without known nodes, groups are assigned in
    turn.
    """
    at = [Counter(nodes).most_common(1)[0][0] if nodes else "" for nodes in nodes_of]
    groups = Counter(at)
    if not any(at):
        return [group % workers for group in range(len(at))]
    if workers <= len(groups):
        load, whose = [0] * workers, dict[str, list[int]]()
        for node, number in groups.most_common():
            whose[node] = [load.index(min(load))]
            load[whose[node][0]] += number
    else:
        having = dict.fromkeys(groups, 1)
        for _ in range(min(workers, len(at)) - len(groups)):
            having[max(groups, key=lambda node: groups[node] / having[node])] += 1
        first = 0
        whose = {}
        for node, number in having.items():
            whose[node] = list(range(first, first + number))
            first += number
    seen = Counter[str]()
    found = []
    for node in at:
        found.append(whose[node][seen[node] % len(whose[node])])
        seen[node] += 1
    return found


def unique_names(nodes: Sequence[Node], called: Sequence[str]) -> tuple[str, ...]:
    """Return one name for the node of each name in ``called``: always the same for one node.

    It is the node's name if no other node has it, else its id. Every name must be of a node.
    """
    names = Counter(n.name for n in nodes)
    found = [next(n for n in nodes if n.has_name(name)) for name in called]
    return tuple(n.name if n.name and names[n.name] == 1 else n.id for n in found)


def problems(nodes: Sequence[Node], layout: Layout, ranks: int) -> list[str]:
    """Return the problems of a layout for a job with this number of ranks, one sentence each.

    Without this check a missing node would be skipped, and its ranks served from other nodes.
    """
    missing = dict.fromkeys(
        called for called in layout.rank_nodes if not any(n.has_name(called) for n in nodes)
    )
    known = ", ".join(sorted(n.name or n.address or n.id for n in nodes))
    found = [
        f"rank_nodes: no node of the cluster is called {called!r}; its nodes: {known}"
        for called in missing
    ]
    if layout.rank_nodes and len(layout.rank_nodes) != ranks:
        found.append(
            f"rank_nodes: expected a node for each of {ranks} ranks, got "
            f"{len(layout.rank_nodes)}: name them by rank, from rank 0 on"
        )
    # With ``reserve`` a node that has them may be added later.
    if not layout.reserve and not any(layout.suits(n) for n in nodes):
        found += (
            [
                f"node_labels: no node of the cluster has {_pairs_text(layout.labels)}; its "
                f"nodes: {_nodes_text(nodes)}"
            ]
            if layout.labels
            else []
        )
        found += (
            [
                f"node_resources: no node of the cluster has {_pairs_text(layout.resources)}; "
                f"its nodes: {_nodes_text(nodes)}"
            ]
            if layout.resources
            else []
        )
    return found


def _pairs_text(wanted: Mapping[str, object]) -> str:
    return " and ".join(f"{key}={value}" for key, value in wanted.items())


def _nodes_text(nodes: Sequence[Node]) -> str:
    """Return the first 8 nodes as text, with their labels and resources except for Ray's own."""
    given = [
        (
            n,
            {
                **{key: value for key, value in n.labels.items() if not key.startswith("ray.io/")},
                **n.resources,
            },
        )
        for n in nodes[:8]
    ]
    return "; ".join(
        f"{n.name or n.address or n.id} with {_pairs_text(has) or 'none'}"[:200] for n, has in given
    )


def cores_for_loading(nodes: Sequence[Node], layout: Layout) -> int:
    """Return the number of CPU cores that loader and constructor workers may use in total.

    Only nodes with the requested labels and resources count; the result is at least 1.
    """
    trainers = {
        n.id for n in nodes if any(n.has_name(rank_node) for rank_node in layout.rank_nodes)
    }
    return max(
        1,
        sum(
            int(n.idle_cores * (layout.share if n.id in trainers else 1.0))
            for n in nodes
            if layout.suits(n)
        ),
    )
