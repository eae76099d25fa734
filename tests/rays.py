"""Ray for tests: one cluster of this machine that all share, and a reason to skip where Ray is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any


def missing() -> str:
    """Why there is no Ray here; empty where there is."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install -e '.[ray]'"


def train_missing() -> str:
    """Why Ray Train cannot be used here, which wants more than Ray; empty where it can."""
    wanted = ("torch", "pandas", "pydantic", "fsspec", "requests")
    lacking = ", ".join(name for name in wanted if importlib.util.find_spec(name) is None)
    return missing() or (f"Ray Train cannot be imported without {lacking}" if lacking else "")


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    from overlord.runtime import ray_cluster

    with ray_cluster.cluster() as running:
        yield running


def control() -> Any:
    from overlord.runtime.ray_control import RayControl

    return RayControl(job="tests")
