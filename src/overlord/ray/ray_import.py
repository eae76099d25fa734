"""Ray, and its internals that this package uses.

Only this module imports Ray.
"""

from __future__ import annotations

import sys
from typing import Any

from overlord.checks import pip_install
from overlord.errors import JobError
from overlord.ray.folder import environment_kept
from overlord.ray.versions import check_version

try:
    with environment_kept():
        import ray

        check_version(str(ray.__version__))  # before imports that other versions may not have
        from ray import exceptions
        from ray._private import ray_constants
        from ray._private import state as ray_state
        from ray._private import worker as ray_worker
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:
    raise JobError(
        [f"runtime: 'ray' needs Ray, which cannot be imported ({missing}); {pip_install('ray')}"],
        "launch",
    ) from missing

__all__ = [
    "NodeAffinitySchedulingStrategy",
    "exceptions",
    "ray",
    "ray_constants",
    "ray_state",
    "ray_worker",
    "raylet",
]

raylet: Any = ray._raylet  # its type stubs are incomplete

# Ray's hook reports an exception to the head before printing it. Without a head that takes an hour.
if sys.excepthook is ray_worker.custom_excepthook:
    sys.excepthook = ray_worker.normal_excepthook
