"""Where the hosts of a job are on the nodes of a cluster: chosen when they start, reviewed while
they run.

``placing.py`` decides, purely. This file holds the figures of the nodes, the hosts placed so far,
and the clock.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from threading import Lock
from typing import Any

from overlord.concurrency.platform import Platform
from overlord.ray.node_choice import (
    Layout,
    Node,
    Spot,
    Surplus,
    again,
    at_most,
    choose,
    labels_wanted,
    moves,
    surplus,
    without_job,
    without_ranks,
)
from overlord.rpc.actors import ActorSystem

log = logging.getLogger("overlord")

SETTLED_S = 5.0  # until what was asked of a cluster is missing from the figures of its nodes
REVIEW_S = 2.0  # between two reviews
AGAIN_S = 60.0  # until a host that should have moved is proposed again

# Takes the numbers of the loader hosts that are to move, and what to call once the move is
# accepted. Another change may be under way.
Move = Callable[[list[int], Callable[[], None]], None]


class NodePlacement:
    """The hosts of one job by node. Runs on: any thread."""

    def __init__(self, control: ActorSystem, layout: Callable[[], Layout]):
        self._control, self._layout = control, layout
        self._placed: dict[str, Spot] = {}  # hosts by name
        self._memory: dict[str, int] = {}  # bytes that each of them needs
        self._nodes: dict[
            str, Node
        ] = {}  # as they would be without this job, when their figures had last settled
        self._last_start = -math.inf
        self._wanted: dict[
            str, tuple[str, str]
        ] = {}  # hosts that are to move by the last review: the node, and the node they leave
        self._moved: dict[str, float] = {}  # hosts whose move was accepted, and when
        self._crowded: dict[
            str, tuple[float, Surplus]
        ] = {}  # nodes with ranks whose share is exceeded, since when
        self._lock = Lock()  # hosts are started by several threads

    def place(self, name: str, memory: int) -> dict[str, Any]:
        """Return node and resources of a host, as arguments of ``spawn``. A host that is started
        again stays, if its node is there.
        """
        if not (nodes := self._living_nodes()):
            return {}
        layout = self._layout()
        with self._lock:
            if (
                time.monotonic() - self._last_start > SETTLED_S
            ):  # all that was asked for is in the figures of now
                self._nodes = {}
            before = self._placed.get(name)
            if before is None or (spot := again(before, nodes)) is None:
                spot = choose(name, self._without_job(nodes, name), layout, self._placed, memory)
            self._placed[name], self._memory[name], self._last_start = (
                spot,
                memory,
                time.monotonic(),
            )
        asked = {"cpus": spot.cores, "memory": float(spot.memory), **spot.resources}
        return {"node": spot.node or labels_wanted(nodes, layout) or None, "resources": asked}

    def planner(self) -> dict[str, Any]:
        """Return the node of the planner, which asks for nothing: one without ranks where there is
        one, else any.
        """
        found = (
            without_ranks(nodes, layout)
            if (nodes := self._living_nodes()) and (layout := self._layout()).rank_nodes
            else None
        )
        return {} if found is None else {"node": found.id}

    def forget(self, name: str) -> None:
        """The host has ended, and nobody starts it again."""
        with self._lock:
            self._placed.pop(name, None)
            self._memory.pop(name, None)

    def memory_of(self, name: str) -> int | None:
        """Return the bytes that a host was placed with; None for one that is not known."""
        return self._memory.get(name)

    def review(self) -> list[str]:
        """Report nodes whose share is exceeded, and return the loader hosts that are to move to
        nodes with room.

        They are returned again by the next review, until ``accept`` says that they move.
        """
        nodes, layout, now = self._living_nodes(), self._layout(), time.monotonic()
        with self._lock:
            if not nodes or now - self._last_start <= SETTLED_S:
                return []
            self._nodes = {}
            free = self._without_job(nodes)
            self._report(surplus(free, layout, self._placed, self._memory), now)
            found = moves(free, layout, self._placed, self._memory)
            self._moved = {host: when for host, when in self._moved.items() if host in self._placed}
            names = {n.id: n.name or n.address for n in nodes}
            self._wanted = {
                host: (names[spot.node], names.get(self._placed[host].node, ""))
                for host, spot in found.items()
                if now - self._moved.get(host, -math.inf) > AGAIN_S
            }
            return list(self._wanted)

    def accept(self, hosts: Sequence[str]) -> None:
        """Report that hosts move. They are proposed again after ``AGAIN_S``, where nothing came of
        it.
        """
        with self._lock:
            for host in hosts:
                if host in self._wanted:
                    to, at = self._wanted.pop(host)
                    self._moved[host] = time.monotonic()
                    log.warning(
                        "%s moves to node %s, which has room: node %s runs more hosts than it may",
                        host,
                        to,
                        at,
                    )

    def figures(self) -> dict[str, Any]:
        """Return the nodes with ranks that run more hosts of this job than ``sidecar`` allows;
        empty without a cluster.
        """
        now, share = time.monotonic(), self._layout().share
        with self._lock:
            if not self._placed:
                return {}
            rows = [
                {
                    "node": s.node.name or s.node.address,
                    "hosts": s.hosts,
                    "allowed": s.allowed,
                    "for_s": now - since,
                }
                for since, s in self._crowded.values()
            ]
        return {"sidecar": share, "exceeded": rows}

    def _living_nodes(self) -> list[Node]:
        return getattr(self._control, "nodes", list)()

    def _without_job(self, nodes: Sequence[Node], name: str = "") -> list[Node]:
        """Nodes as they would be without the hosts of this job, ``name`` apart. Under the lock."""
        living: Collection[str] = getattr(self._control, "asked", dict)()
        ours = [spot for host, spot in self._placed.items() if host in living and host != name]
        free = [without_job(n, [s for s in ours if s.node == n.id]) for n in nodes]
        self._nodes = {n.id: self._nodes.get(n.id, n) for n in free}
        return [at_most(n, self._nodes[n.id]) for n in free]

    def _report(self, found: Sequence[Surplus], now: float) -> None:
        crowded = {s.node.id: s for s in found if s.has_ranks}
        for node, s in crowded.items():
            if node not in self._crowded:
                words = (
                    "node %s runs %d hosts of this job, and sidecar=%g allows %d: no other "
                    "node had room. They move when one has"
                )
                log.warning(
                    words, s.node.name or s.node.address, s.hosts, self._layout().share, s.allowed
                )
        for node, (since, s) in self._crowded.items():
            if node not in crowded:
                log.warning(
                    "node %s runs no more hosts than sidecar allows, again after %.0f s",
                    s.node.name or s.node.address,
                    now - since,
                )
        self._crowded = {
            node: (self._crowded.get(node, (now, s))[0], s) for node, s in crowded.items()
        }


def watch(
    placement: NodePlacement, machine: Platform, control: ActorSystem, move: Move
) -> Callable[[], None]:
    """Review the placement every ``REVIEW_S`` in a thread of its own, since a cluster may be slow
    to answer. Returns what ends it.
    """
    if not getattr(control, "nodes", list)():
        return lambda: None

    def look() -> None:
        try:
            if found := placement.review():
                move(
                    [int(name.rpartition("/")[2]) for name in found],
                    lambda: placement.accept(found),
                )
        except Exception:  # its figures are for people, and what it proposes can wait
            log.exception(
                "the nodes of the job's hosts could not be reviewed; the next review is in %g s",
                REVIEW_S,
            )

    return machine.every(REVIEW_S, look, "overlord places")
