"""Nodes for Ray's own autoscaler on one machine: Ray's fake provider, which cannot request memory
for a node.
"""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class Provider(FakeMultiNodeProvider):
    """A node provider that the autoscaler loads by name. Every node has the memory of the
    machine.
    """

    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        some = {key: value for key, value in resources.items() if key != "memory"}
        super()._create_node_with_resources_and_labels(node_config, tags, count, some, labels)


def config(address: str, nodes: int) -> dict[str, Any]:
    """Return the configuration of the autoscaler: up to ``nodes`` nodes of one core, and a head
    without cores.
    """
    kinds = {
        "worker": {
            "resources": {"CPU": 1, "memory": 2**31, "object_store_memory": 80 * 2**20},
            "max_workers": nodes,
        },
        "ray.head.default": {"resources": {"CPU": 0}, "max_workers": 0},
    }
    lists = (
        "cluster_synced_files",
        "rsync_exclude",
        "rsync_filter",
        "initialization_commands",
        "setup_commands",
        "head_setup_commands",
    )
    lists += ("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands")
    return {
        "cluster_name": "tests",
        "max_workers": nodes,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5.0,
        "provider": {
            "type": "external",
            "module": "tests.autoscaler_nodes.Provider",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            name: {"node_config": {}, "min_workers": 0, **kind} for name, kind in kinds.items()
        },
        "head_node_type": "ray.head.default",
        "auth": {"ssh_user": "ray"},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "head_node": {},
        "worker_nodes": {},
        **{key: [] for key in lists},
    }
