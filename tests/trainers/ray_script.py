"""Run the script of the page on Ray Train, on a cluster of this machine whose workers record.

python -m tests.trainers.ray_script docs/trainers/ray-train.md 2
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import ray

from tests.trainers.script_world import on_ranks, script_of

if __name__ == "__main__":
    page = Path(sys.argv[1]).resolve()
    passed = {name: value for name, value in os.environ.items() if name.startswith("TRAINERS_")}
    hook = "tests.trainers.ray_worker.record"
    ray.init(
        address="local",  # never a cluster that runs on this machine already
        num_cpus=2,
        include_dashboard=False,
        runtime_env={"worker_process_setup_hook": hook, "env_vars": passed},
    )
    scope = {"__name__": "__main__", "__file__": str(page)}
    exec(compile(on_ranks(script_of(page), int(sys.argv[2])), str(page), "exec"), scope)
