"""Which node of a cluster a host of a job goes to. Decided here, purely; a control plane carries it out.

Beside the trainers first, as in the Overlord paper (arXiv 2504.09844): their machines have idle cores and memory, and what is built there
reaches a rank through shared memory. Constructors go where the ranks of their groups are. Loaders take a share of the idle cores of those
machines, and machines without ranks when that runs out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONSTRUCTOR = "constructor-host"
LOADER = "loader-host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster: what it is called, and cores that nobody has asked for."""

    id: str
    name: str = ""
    address: str = ""
    idle_cores: float = 0.0

    def is_called(self, name: str) -> bool:
        return name in (self.id, self.name, self.address)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is wanted: the node of every rank, where they are known, and which ranks a constructor host serves."""

    rank_nodes: tuple[str, ...] = ()
    ranks_of: tuple[tuple[int, ...], ...] = ()  # by constructor host
    share: float = 0.5  # of the idle cores of machines that have ranks


def choose(name: str, nodes: Sequence[Node], layout: Layout, placed: Mapping[str, str]) -> str:
    """The node for a host: ``placed`` says where the others are, by name of host. There is at least one node."""
    kind, _, number = name.partition("/")
    trainers = [n for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)]
    load = Counter(node for host, node in placed.items() if host != name)
    if kind == CONSTRUCTOR and trainers and int(number) < len(layout.ranks_of):
        beside = Counter(layout.rank_nodes[rank] for rank in layout.ranks_of[int(number)] if rank < len(layout.rank_nodes))
        for called, _ in beside.most_common():
            if (found := next((n for n in trainers if n.is_called(called)), None)) is not None:
                return found.id
    others = [n for n in nodes if n not in trainers]
    for some, share in ((trainers, layout.share), (others, 1.0)):
        if room := [n for n in some if int(n.idle_cores * share) > load[n.id]]:
            return min(room, key=lambda n: (load[n.id] - int(n.idle_cores * share), n.id)).id
    some = [n for n in nodes if n.idle_cores >= 1] or list(nodes)  # a head is often told to have no cores, so that it is left alone
    return min(some, key=lambda n: (load[n.id] / max(1.0, n.idle_cores), n.id)).id  # none has room: the least crowded


def unknown(nodes: Sequence[Node], layout: Layout) -> list[str]:
    """What is wrong with the nodes of ranks, in words: one that is not there would be passed over, and its ranks served from elsewhere."""
    missing = dict.fromkeys(called for called in layout.rank_nodes if not any(n.is_called(called) for n in nodes))
    known = ", ".join(sorted(n.name or n.address or n.id for n in nodes))
    return [f"rank_nodes: no node of the cluster is called {called!r}; there are {known}" for called in missing]


def cores_for_loading(nodes: Sequence[Node], layout: Layout) -> int:
    """Cores that loader hosts may use in all."""
    trainers = {n.id for n in nodes if any(n.is_called(rank_node) for rank_node in layout.rank_nodes)}
    return max(1, sum(int(n.idle_cores * (layout.share if n.id in trainers else 1.0)) for n in nodes))
