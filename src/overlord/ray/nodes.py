"""The nodes of the connected Ray cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from overlord.ray.node_choice import Node
from overlord.ray.ray_import import ray, ray_state

# Resources that Ray counts by itself; all others have names given by the operators of the cluster.
BUILT_IN = ("CPU", "GPU", "memory", "object_store_memory")


def living_nodes() -> list[Node]:
    """Return the living nodes with their idle resources."""
    idle = ray_state.available_resources_per_node()
    return [_node(found, idle.get(found["NodeID"], {})) for found in ray.nodes() if found["Alive"]]


def _node(found: Mapping[str, Any], idle: Mapping[str, Any]) -> Node:
    given = {
        key: float(value)
        for key, value in found["Resources"].items()
        if key not in BUILT_IN and not key.startswith("node:")
    }
    return Node(
        id=found["NodeID"],
        name=found.get("NodeName", ""),
        address=found.get("NodeManagerAddress", ""),
        labels=found.get("Labels", {}),
        idle_cores=float(idle.get("CPU", 0.0)),
        idle_memory=float(idle.get("memory", 0.0)),
        resources=given,
        idle_resources={key: float(idle.get(key, 0.0)) for key in given},
    )


def here() -> str:
    """Return the IP address of this node in its cluster."""
    return str(ray.util.get_node_ip_address())


def node_here() -> str:
    """Return the id of this node in its cluster."""
    return str(ray.get_runtime_context().get_node_id())
