"""Which node of a cluster a host of a job goes to. Decided here, purely; a control plane carries it out.

Beside the trainers first, as in the Overlord paper (arXiv 2504.09844): their machines have idle cores and memory, and what is built there
reaches a rank through shared memory. Constructors go where the ranks of their groups are. Loaders take a share of the idle cores of those
machines, and machines without ranks when that runs out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONSTRUCTOR = "constructor-host"
LOADER = "loader-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster: what it is called, and cores and bytes that nobody has asked for."""

    id: str
    name: str = ""
    address: str = ""
    idle_cores: float = 0.0
    idle_memory: float = math.inf

    def is_called(self, name: str) -> bool:
        return name in (self.id, self.name, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is wanted: the node of every rank, where they are known, and which ranks a constructor host serves."""

    rank_nodes: tuple[str, ...] = ()
    ranks_of: tuple[tuple[int, ...], ...] = ()  # by constructor host
    share: float = 0.5  # of the idle cores and memory of machines that have ranks
    reserve: bool = False  # a loader host for which there is no room is left to the cluster, which may get another machine for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a host goes, and what is asked for it there: nothing where there is no room, since who asks for more than there is waits.
    ``node`` is empty where the cluster is to find one."""

    node: str
    cores: float = 0.0
    memory: int = 0


def choose(name: str, nodes: Sequence[Node], layout: Layout, placed: Mapping[str, Spot], memory: int = 0) -> Spot:
    """The place for a host of so many bytes: ``placed`` says where the others are, by name of host. There is at least one node."""
    trainers = [n for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)]
    others = [n for n in nodes if n not in trainers]
    load = Counter(spot.node for host, spot in placed.items() if host != name)
    held = Counter[str]()
    for host, spot in placed.items():
        held[spot.node] += spot.memory if host != name else 0

    def has_room(n: Node, share: float) -> bool:
        return int(n.idle_cores * share) > load[n.id] and held[n.id] + memory <= n.idle_memory * share

    if (beside := _beside(name, trainers, layout)) is not None:
        return Spot(node=beside.id, cores=1.0, memory=memory) if has_room(beside, 1.0) else Spot(node=beside.id)
    for some, share in ((trainers, layout.share), (others, 1.0)):
        if room := [n for n in some if has_room(n, share)]:
            best = min(room, key=lambda n: (load[n.id] - int(n.idle_cores * share), n.id))
            return Spot(node=best.id, cores=1.0, memory=memory)
    if layout.reserve:
        return Spot(node="", cores=1.0, memory=memory)
    some = [n for n in nodes if n.idle_cores >= 1] or list(nodes)  # a head is often told to have no cores, so that it is left alone
    return Spot(node=min(some, key=lambda n: (load[n.id] / max(1.0, n.idle_cores), n.id)).id)  # none has room: the least crowded


def _beside(name: str, trainers: Sequence[Node], layout: Layout) -> Node | None:
    """Of a constructor host, the machine with most of its ranks."""
    kind, _, number = name.partition("/")
    if kind != CONSTRUCTOR or int(number) >= len(layout.ranks_of):
        return None
    ranks = Counter(layout.rank_nodes[rank] for rank in layout.ranks_of[int(number)] if rank < len(layout.rank_nodes))
    found = (n for called, _ in ranks.most_common() for n in trainers if n.is_called(called))
    return next(found, None)


def again(spot: Spot, nodes: Sequence[Node]) -> Spot | None:
    """The place of a host that is started again, as long as its machine is there. What it had may have been given to others, or not been
    given back yet: then it asks for nothing, since coming back must not wait."""
    if (node := next((n for n in nodes if n.id == spot.node), None)) is None:
        return None
    there = node.idle_cores >= spot.cores and node.idle_memory >= spot.memory
    return spot if there else Spot(node=spot.node)


def unknown(nodes: Sequence[Node], layout: Layout) -> list[str]:
    """What is wrong with the nodes of ranks, in words: one that is not there would be passed over, and its ranks served from elsewhere."""
    missing = dict.fromkeys(called for called in layout.rank_nodes if not any(n.is_called(called) for n in nodes))
    known = ", ".join(sorted(n.name or n.address or n.id for n in nodes))
    return [f"rank_nodes: no node of the cluster is called {called!r}; there are {known}" for called in missing]


def cores_for_loading(nodes: Sequence[Node], layout: Layout) -> int:
    """Cores that loader hosts may use in all."""
    trainers = {n.id for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)}
    return max(1, sum(int(n.idle_cores * (layout.share if n.id in trainers else 1.0)) for n in nodes))
