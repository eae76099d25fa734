"""Which node of a cluster a host of a job goes to. Decided here, purely; a control plane carries it
out.

Beside the trainers first, as in the Overlord paper (arXiv 2504.09844): their machines have idle
cores and memory, and what is built there reaches a rank through shared memory. Constructors go
where the ranks of their groups are. Loaders take a share of the idle cores of those machines, and
machines without ranks when that runs out.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

CONSTRUCTOR = "constructor-host"
LOADER = "loader-host"
NODE_ID = "ray.io/node-id"  # the label by which Ray tells its nodes apart
_ONE_OF = re.compile(r"in\((.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster: what it is called, and cores and bytes that nobody has asked for.
    Labels and resources are whatever those who run the cluster gave it.
    """

    id: str
    name: str = ""
    address: str = ""
    idle_cores: float = 0.0
    idle_memory: float = math.inf
    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)  # all that it has
    idle_resources: Mapping[str, float] = field(default_factory=dict)

    def is_called(self, name: str) -> bool:
        return name in (self.id, self.name, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is wanted: the node of every rank, where they are known, and which ranks a constructor
    host serves.
    """

    rank_nodes: tuple[str, ...] = ()
    ranks_of: tuple[tuple[int, ...], ...] = ()  # by constructor host
    # of the idle cores and memory of machines that have ranks: of constructors there, and of
    # loaders what is left
    share: float = 0.5
    # a loader host for which there is no room is left to the cluster, which may get another machine
    # for it
    reserve: bool = False
    labels: Mapping[str, str] = field(
        default_factory=dict
    )  # of machines for hosts that need not be beside ranks
    resources: Mapping[str, float] = field(
        default_factory=dict
    )  # that each of those hosts asks for, besides a core and memory

    def suits(self, node: Node) -> bool:
        return all(
            has_label(node.labels, key, wanted) for key, wanted in self.labels.items()
        ) and all(node.resources.get(key, 0.0) >= wanted for key, wanted in self.resources.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a host goes, and what is asked for it there: nothing where there is no room, since who
    asks for more than there is waits. ``node`` is empty where the cluster is to find one.
    """

    node: str
    cores: float = 0.0
    memory: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)

    def fits(self, node: Node) -> bool:
        enough = all(
            node.idle_resources.get(key, 0.0) >= wanted for key, wanted in self.resources.items()
        )
        return enough and node.idle_cores >= self.cores and node.idle_memory >= self.memory


def has_label(labels: Mapping[str, str], key: str, wanted: str) -> bool:
    """``wanted`` as Ray writes it: ``cpu``, ``!spot``, ``in(a, b)``, ``!in(a, b)``. A machine
    without the label is unlike any value.
    """
    found, negated = labels.get(key), wanted.startswith("!")
    listed = _ONE_OF.fullmatch(wanted.removeprefix("!"))
    values = (
        [value.strip() for value in listed[1].split(",")] if listed else [wanted.removeprefix("!")]
    )
    return (found in values) != negated


def without_job(node: Node, ours: Iterable[Spot]) -> Node:
    """A machine as it would be if this job did not hold these places on it."""
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
    """What was asked for a moment ago may not be missing from a machine's figures yet: so it has no
    more than when they had settled.
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
    """The place for a host of so many bytes: ``placed`` says where the others are, by name of host.
    There is at least one node.
    """
    trainers = [n for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)]
    load = Counter(spot.node for host, spot in placed.items() if host != name)
    held, taken = Counter[str](), defaultdict[tuple[str, str], float](float)
    for host, spot in placed.items():
        if host != name:
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

    if (beside := _beside(name, trainers, layout)) is not None:
        return (
            Spot(node=beside.id, cores=1.0, memory=memory)
            if has_room(beside, 1.0)
            else Spot(node=beside.id)
        )
    suited = [n for n in nodes if layout.suits(n)]
    for some, share in (
        ([n for n in suited if n in trainers], layout.share),
        ([n for n in suited if n not in trainers], 1.0),
    ):
        if room := [n for n in some if has_room(n, share) and has_more(n)]:
            best = min(room, key=lambda n: (load[n.id] - int(n.idle_cores * share), n.id))
            return Spot(node=best.id, cores=1.0, memory=memory, resources=layout.resources)
    if (
        layout.reserve or not suited
    ):  # what was asked for by name is waited for, and nothing else taken in its place
        return Spot(node="", cores=1.0, memory=memory, resources=layout.resources)
    some = [
        n for n in suited if n.idle_cores >= 1
    ] or suited  # a head is often told to have no cores, so that it is left alone
    return Spot(
        node=min(some, key=lambda n: (load[n.id] / max(1.0, n.idle_cores), n.id)).id
    )  # none has room: the least crowded


def _beside(name: str, trainers: Sequence[Node], layout: Layout) -> Node | None:
    """Of a constructor host, the machine with most of its ranks."""
    kind, _, number = name.partition("/")
    if kind != CONSTRUCTOR or int(number) >= len(layout.ranks_of):
        return None
    ranks = Counter(
        layout.rank_nodes[rank]
        for rank in layout.ranks_of[int(number)]
        if rank < len(layout.rank_nodes)
    )
    found = (n for called, _ in ranks.most_common() for n in trainers if n.is_called(called))
    return next(found, None)


def again(spot: Spot, nodes: Sequence[Node]) -> Spot | None:
    """The place of a host that is started again, as long as its machine is there. What it had may
    have been given to others, or not been given back yet: then it asks for nothing, since coming
    back must not wait.
    """
    if (node := next((n for n in nodes if n.id == spot.node), None)) is None:
        return None
    return spot if spot.fits(node) else Spot(node=spot.node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Surplus:
    """Loader hosts that a node has no room for, in the order in which they are to leave it."""

    node: Node
    hosts: int  # of the job on that node
    allowed: int
    has_ranks: bool
    leave: tuple[str, ...]


def surplus(
    nodes: Sequence[Node], layout: Layout, placed: Mapping[str, Spot], memory: Mapping[str, int]
) -> list[Surplus]:
    """Return the nodes that run more hosts than their share allows, those with ranks first.

    ``nodes`` are as they would be without the job; ``memory`` is what each host needs. Hosts that
    were given a core keep it, also where others have taken cores since. Constructor hosts never
    leave the ranks they serve.
    """
    found = []
    for node in nodes:
        ranks = any(node.is_called(rank_node) for rank_node in layout.rank_nodes)
        share = layout.share if ranks else 1.0
        there = [host for host, spot in placed.items() if spot.node == node.id]
        allowed = max(
            int(node.idle_cores * share), sum(host.startswith(CONSTRUCTOR) for host in there)
        )
        without = sorted(
            (host for host in there if host.startswith(LOADER) and not placed[host].cores),
            key=_number,
            reverse=True,
        )
        held, leave = sum(memory.get(host, 0) for host in there), list[str]()
        for host in without:
            if len(there) - len(leave) <= allowed and held <= node.idle_memory * share:
                break
            leave.append(host)
            held -= memory.get(host, 0)
        if leave:
            found.append(
                Surplus(
                    node=node,
                    hosts=len(there),
                    allowed=allowed,
                    has_ranks=ranks,
                    leave=tuple(leave),
                )
            )
    return sorted(found, key=lambda s: (not s.has_ranks, s.node.id))


def moves(
    nodes: Sequence[Node], layout: Layout, placed: Mapping[str, Spot], memory: Mapping[str, int]
) -> dict[str, Spot]:
    """Return the loader hosts that are to move to nodes with room, as those that joined: off nodes
    that run more than they may.
    """
    found, now = dict[str, Spot](), dict(placed)
    for crowded in surplus(nodes, layout, placed, memory):
        for host in crowded.leave:
            spot = choose(host, nodes, layout, now, memory.get(host, 0))
            if spot.cores and spot.node not in (
                "",
                crowded.node.id,
            ):  # else there is no room for it anywhere
                found[host] = now[host] = spot
    return found


def _number(host: str) -> int:
    return int(host.rpartition("/")[2])


def without_ranks(nodes: Sequence[Node], layout: Layout) -> Node | None:
    """Return the node without ranks that is best for the planner, which asks for nothing; None
    where all nodes have ranks.
    """
    others = [
        n for n in nodes if not any(n.is_called(rank_node) for rank_node in layout.rank_nodes)
    ]
    suited = [n for n in others if layout.suits(n)] or others
    return max(suited, key=lambda n: (n.idle_cores, n.id), default=None)


def labels_wanted(nodes: Sequence[Node], layout: Layout) -> dict[str, str]:
    """Of a machine that the cluster is to find: none with ranks, whose share is used up."""
    trainers = sorted(
        n.id for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)
    )
    return {**layout.labels, **({NODE_ID: f"!in({','.join(trainers)})"} if trainers else {})}


def constructors_by_node(nodes_of: Sequence[Sequence[str]], hosts: int) -> list[int]:
    """The constructor host of every data-parallel group. ``nodes_of``: for each group the machines
    of its ranks, as far as they are known.

    A host is on one machine, so the groups that it has should be: every machine gets hosts by the
    number of its groups, as far as they go round; with fewer hosts than machines, one host has the
    groups of several. Where no machine is known they are dealt out in turn.
    """
    at = [Counter(nodes).most_common(1)[0][0] if nodes else "" for nodes in nodes_of]
    groups = Counter(at)
    if not any(at):
        return [group % hosts for group in range(len(at))]
    if hosts <= len(groups):
        load, whose = [0] * hosts, dict[str, list[int]]()
        for node, number in groups.most_common():
            whose[node] = [load.index(min(load))]
            load[whose[node][0]] += number
    else:
        having = dict.fromkeys(groups, 1)
        for _ in range(min(hosts, len(at)) - len(groups)):
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


def by_one_name(nodes: Sequence[Node], called: Sequence[str]) -> tuple[str, ...]:
    """The same machines, each under one name however it was called: else two names of one machine
    would count as two.
    """
    names = Counter(n.name for n in nodes)
    found = [next(n for n in nodes if n.is_called(name)) for name in called]
    return tuple(n.name if n.name and names[n.name] == 1 else n.id for n in found)


def problems(nodes: Sequence[Node], layout: Layout, ranks: int) -> list[str]:
    """What is wrong with what was asked for, in words: a machine that is not there would be passed
    over, and its ranks served from elsewhere.
    """
    missing = dict.fromkeys(
        called for called in layout.rank_nodes if not any(n.is_called(called) for n in nodes)
    )
    known = ", ".join(sorted(n.name or n.address or n.id for n in nodes))
    found = [
        f"rank_nodes: no node of the cluster is called {called!r}; there are {known}"
        for called in missing
    ]
    if layout.rank_nodes and len(layout.rank_nodes) != ranks:
        found.append(
            f"rank_nodes: expected a node for each of {ranks} ranks, got "
            f"{len(layout.rank_nodes)}: name them by rank, from rank 0 on"
        )
    if not layout.reserve and not any(
        layout.suits(n) for n in nodes
    ):  # with it, a machine that has them may come
        found += (
            [
                f"node_labels: no node of the cluster has {_both(layout.labels)}; there "
                f"are {_told(nodes)}"
            ]
            if layout.labels
            else []
        )
        found += (
            [
                f"node_resources: no node of the cluster has {_both(layout.resources)}; "
                f"there are {_told(nodes)}"
            ]
            if layout.resources
            else []
        )
    return found


def _both(wanted: Mapping[str, object]) -> str:
    return " and ".join(f"{key}={value}" for key, value in wanted.items())


def _told(nodes: Sequence[Node]) -> str:
    """Machines with what was given to them; Ray's own labels tell nothing."""
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
        f"{n.name or n.address or n.id} with {_both(has) or 'none'}"[:200] for n, has in given
    )


def cores_for_loading(nodes: Sequence[Node], layout: Layout) -> int:
    """Cores that loader hosts, and constructor hosts among them, may use in all."""
    trainers = {
        n.id for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)
    }
    return max(
        1,
        sum(
            int(n.idle_cores * (layout.share if n.id in trainers else 1.0))
            for n in nodes
            if layout.suits(n)
        ),
    )
