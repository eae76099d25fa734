"""Ray for tests: one cluster of this machine that all share, and the reason to skip without Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from tests.processes import WORKER_RUNTIME

# Settings of docs/ray.md that detect a lost node soon.
ATTENTIVE = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


def missing() -> str:
    """Return why Ray is not available; empty if it is."""
    return (
        "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install -e '.[ray]'"
    )


def train_missing() -> str:
    """Return why Ray Train is not available, which needs more than Ray; empty if it is."""
    wanted = ("torch", "pandas", "pydantic", "fsspec", "requests")
    lacking = ", ".join(name for name in wanted if importlib.util.find_spec(name) is None)
    return missing() or (f"Ray Train cannot be imported without {lacking}" if lacking else "")


def by_make_ray(why: str, lacking: str = "", seconds: int = 300) -> list[pytest.MarkDecorator]:
    """Return the marks of a file that `make ray` runs. `make test` skips it, since it has fifteen
    minutes. ``lacking`` names what is not installed.
    """
    lacking = lacking or missing()
    return [
        pytest.mark.timeout(seconds),
        pytest.mark.skipif(bool(lacking), reason=lacking or "it is there"),
        pytest.mark.skipif(WORKER_RUNTIME != "ray", reason=f"{why}: make ray"),
    ]


def on_disk(folder: str) -> dict[str, str]:
    """Return settings of a head that keeps its state in a folder, so that it can be restarted; none
    for older versions.
    """
    from importlib.metadata import version

    from overlord.ray.versions import minor

    if minor(version("ray")) < (2, 57):
        return {}
    return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": folder}


def of_a_cluster(**more: str) -> dict[str, str]:
    """Return the environment of a program that starts a cluster with Ray's own utility. Set it
    before the import of Ray.
    """
    plain = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), **plain, **more}


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    from overlord.ray import cluster

    with cluster.cluster() as running:
        yield running


def control() -> Any:
    from overlord.ray.launcher import ray_actors

    return ray_actors(job="tests")
