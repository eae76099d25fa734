"""``--json`` of the commands that need trainers or a Ray cluster, run for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests import rays
from tests.unit.test_cli import job_file
from tests.unit.test_cli_json import sections, shape, unequal

ROOT = Path(__file__).resolve().parents[2]


def overlord(*args: str | Path, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "overlord", *map(str, args)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def document(*args: str | Path, **env: str) -> Any:
    process = overlord(*args, "--json", **env)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return json.loads(out)


def same_form(example: Any, found: Any) -> None:
    assert unequal(shape(example), shape(found)) == []


def test_serve_prints_a_line_for_its_address_and_one_for_its_end(tmp_path: Path) -> None:
    process = overlord("serve", job_file(tmp_path, until=6), "--json")
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())
    examples = {example["event"]: example for example in sections()["overlord serve"]}
    same_form(examples["serving"], first)
    clients = [ov.connect(first["address"], rank, token=first["token"]) for rank in range(2)]
    taken = [[step.step for step in steps] for steps in zip(*clients, strict=True)]
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert taken == [[k, k] for k in range(6)]
    end = json.loads(out)
    same_form(examples["end"], end)
    assert end["steps"] == 6


CLUSTER = """
    import os, sys
    from tests import rays

    os.environ.update(rays.of_a_cluster())
    if __name__ == "__main__":
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        print(cluster.address, os.environ["RAY_AUTH_TOKEN"], flush=True)
        input()
        cluster.shutdown()
"""


@pytest.mark.timeout(400)
@pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")
def test_commands_on_a_ray_cluster_print_documents(tmp_path: Path) -> None:
    program = tmp_path / "cluster.py"
    program.write_text("\n".join(line[4:] for line in CLUSTER.splitlines()))
    head = subprocess.Popen(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdout is not None
        address, token = head.stdout.readline().split()
        env = {"OVERLORD_CLUSTER": address, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        listed, with_token = sections()["overlord status"]
        job = job_file(tmp_path)
        served = document("serve", job, "--detach", "--runtime", "ray", **env)
        assert (served["event"], sorted(served)) == ("serving", ["address", "event", "token"])
        found = document("status", **env)
        same_form(listed, found)
        [running] = found["jobs"]
        assert (running["name"], running["state"]) == ("small", "running")
        assert {worker["name"] for worker in running["workers"]} >= {"planner"}
        token_found = document("status", "--token", "small", **env)
        same_form(with_token, token_found)
        assert token_found == {"address": served["address"], "token": served["token"]}
        stopped = document("stop", "small", **env)
        same_form(sections()["overlord stop"][0], stopped)
        assert stopped == {"name": "small", "killed_because": ""}
        assert document("status", **env) == {"jobs": []}
    finally:
        head.communicate("\n", timeout=60)
