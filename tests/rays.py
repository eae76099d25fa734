"""Ray for tests: one cluster of this machine that all share, and a reason to skip where Ray is not installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any


def missing() -> str:
    """Why there is no Ray here; empty where there is."""
    return "" if importlib.util.find_spec("ray") else "Ray is not installed: pip install -e '.[ray]'"


@contextlib.contextmanager
def cluster() -> Iterator[Any]:
    from overlord.runtime import ray_cluster

    with ray_cluster.cluster() as running:
        yield running


def control() -> Any:
    from overlord.runtime.ray_control import RayControl

    return RayControl(job="tests")
