"""The placement of an actor on Ray: node, labels and resources.

This module does not import Ray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from overlord.ray.node_choice import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPlace:
    """The node of an actor, or the labels of one, and the resources requested for the actor."""

    num_cpus: float = 0.0
    memory: float | None = None
    resources: tuple[tuple[str, float], ...] = ()
    node: str | None = None  # its id
    labels: tuple[tuple[str, str], ...] = ()  # labels that the node must have, if none is named

    @property
    def requests_resources(self) -> bool:
        """Whether the actor requests resources, so that it starts only on a node with room."""
        return self.num_cpus > 0 or bool(self.memory) or bool(self.resources)

    @property
    def waits(self) -> bool:
        """Whether Ray chooses the node, and waits until one has room."""
        return self.node is None and (self.requests_resources or bool(self.labels))

    @property
    def request_text(self) -> str:
        """The requested resources and labels as text."""
        found = (
            f"{self.num_cpus:g} core{'s' * (self.num_cpus != 1)} and "
            f"{(self.memory or 0.0) / 2**20:.0f} MB"
        )
        return (
            found
            + "".join(f" and {key}={value:g}" for key, value in self.resources)
            + "".join(f", {k}={v}," for k, v in self.labels)
        )

    def options(self) -> dict[str, Any]:
        """Return the options of a Ray actor, except for the node."""
        found: dict[str, Any] = {
            "num_cpus": self.num_cpus,
            "max_restarts": 0,
            "max_task_retries": 0,
        }
        if self.memory:
            found["memory"] = self.memory
        if self.resources:
            found["resources"] = dict(self.resources)
        if self.labels:
            found["label_selector"] = dict(self.labels)
        return found


def room_text(place: RayPlace, nodes: Sequence[Node]) -> str:
    """Return the node that a start waits for, and the idle resources of the nodes, as text."""
    kinds = [key for key, _ in place.resources]  # a named resource may be the missing one
    more = [
        " and ".join(f"{key}={n.idle_resources.get(key, 0.0):g}" for key in kinds) for n in nodes
    ]
    had = [
        f"{n.name or n.address} {n.idle_cores:g} cores and {n.idle_memory / 2**20:.0f} MB"
        for n in nodes
    ]
    idle = ", ".join(
        f"{one} and {kept}" if kept else one for one, kept in zip(had, more, strict=True)
    )
    return (
        f"a node with {place.request_text} idle (nodes have {idle or 'none'}): an autoscaler may "
        "add one, or other jobs may end"
    )
