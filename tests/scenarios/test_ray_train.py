"""Workers of Ray Train get their steps by address and token. If one is killed, Train ends the
others and starts a new group. It continues after the last checkpoint, to the byte as the local
runtime.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.hashing import digest
from tests import rays
from tests.processes import Program, program, until, written
from tests.scenarios.test_process import job

pytestmark = rays.by_make_ray(
    "a minute; the kill of a worker is in examples/15_ray_train.py too", rays.train_missing()
)

STEPS, SAVES, HOLDS = (
    14,
    4,
    9,
)  # a checkpoint after every fourth step; the first group blocks in its tenth


def noted(step: ov.Step) -> str:
    return digest(repr(written(step)))


TRAIN = """
    import json, os, tempfile, time
    from pathlib import Path

    os.environ.update(
        RAY_TRAIN_HEALTH_CHECK_INTERVAL_S="0.2", RAY_TRAIN_ENABLE_PREEMPTION_WATCHER="0"
    )
    import ray.train
    import torch.distributed as dist
    from ray.train.torch import TorchTrainer
    import overlord as ov
    from tests.scenarios.test_process import job
    from tests.scenarios.test_ray_train import HOLDS, SAVES, STEPS, noted


    def train(config):
        rank, last, state = (
            ray.train.get_context().get_world_rank(),
            ray.train.get_checkpoint(),
            config.get("start"),
        )
        if last is not None:
            with last.as_directory() as folder:
                state = json.loads(Path(folder, "data.json").read_text())
        if "address" in config:
            client = ov.connect(config["address"], rank, config["token"])
            client.load_state_dict(state)
        else:
            client = ov.connect(*submitted(config, rank, state))
        dist.barrier()
        with open(f"{config['folder']}/rank-{rank}", "a", buffering=1) as out:
            for step in client:
                print(json.dumps([0 if last is None else 1, step.step, noted(step)]), file=out)
                if step.step % SAVES == SAVES - 1:
                    with tempfile.TemporaryDirectory() as folder:
                        if rank == 0:
                            Path(folder, "data.json").write_text(json.dumps(client.state_dict()))
                        ray.train.report(
                            {"step": step.step},
                            checkpoint=ray.train.Checkpoint.from_directory(folder)
                            if rank == 0
                            else None,
                        )
                if last is None and step.step == HOLDS and rank == config["victim"]:
                    ray.train.get_all_reported_checkpoints()
                    Path(config["folder"], "pid.new").write_text(str(os.getpid()))
                    Path(config["folder"], "pid.new").rename(f"{config['folder']}/pid")
                    time.sleep(600)


    def fit(config, **workers):
        failures = ray.train.FailureConfig(max_failures=1)
        run = ray.train.RunConfig(
            name="run", storage_path=os.path.abspath("storage"), failure_config=failures
        )
        scaling = ray.train.ScalingConfig(
            num_workers=2, resources_per_worker={"CPU": 0.5}, **workers
        )
        config = {"folder": os.path.abspath("."), **config}
        return TorchTrainer(
            train, train_loop_config=config, scaling_config=scaling, run_config=run
        ).fit()
"""

SERVED = """
    def main():
        with ov.launch(job(until=STEPS), "ray", hosts=1, constructor_hosts=1) as session:
            print(os.environ["RAY_AUTH_MODE"], flush=True)
            served = session.serve()
            config = {
                "address": served.address,
                "token": served.token,
                "start": session.state_dict(),
                "victim": 0,
            }
            print(fit(config).metrics, flush=True)
"""

TOKEN = """
    import os
    from tests import rays
    os.environ.update(rays.of_a_cluster())
"""

SUBMITTED = """
    def submitted(config, rank, state):
        from overlord.cli import detached_jobs as ray_jobs

        cluster, nodes, said = ray.get_runtime_context().gcs_address, [None, None], [None]
        dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
        if rank == 0:
            for name in [found.name for found in ray_jobs.jobs(cluster)]:
                ray_jobs.stop(name, cluster)
            served = ray_jobs.submit(
                job(until=STEPS), address=cluster, rank_nodes=nodes, resume=state
            )
            said = [(served.address, served.token)]
            [found] = ray_jobs.jobs(cluster)
            where = {
                worker["name"]: worker["node"]
                for worker in found.workers
                if worker["name"].startswith("constructor")
            }
            with open(f"{config['folder']}/where", "a") as out:
                print(json.dumps([nodes, where]), file=out)
        dist.broadcast_object_list(said)
        return said[0][0], rank, said[0][1]


    def main():
        from ray.cluster_utils import Cluster
        from overlord.cli import detached_jobs as ray_jobs

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        for name in ("gpu-0", "gpu-1"):
            cluster.add_node(node_name=name, num_cpus=3, **small)
        ray.init(cluster.address, log_to_driver=False)
        ids = {node["NodeName"]: node["NodeID"] for node in ray.nodes()}
        wanted = [ids["gpu-1"], ids["gpu-0"]]
        print(json.dumps(ids), flush=True)
        found = fit({"victim": 1}, label_selector=[{"ray.io/node-id": node} for node in wanted])
        print(found.metrics, flush=True)
        ray_jobs.stop("processes", cluster.address)
        ray.shutdown()
        cluster.shutdown()
"""


def kill_it(there: Program, folder: Path) -> None:
    """Kill the suspended worker, once Train has recorded the checkpoint before."""

    def there_it_is() -> bool:
        assert there.process.poll() is None, there.end()
        return (folder / "pid").exists()

    until(there_it_is, 120.0)
    os.kill(int((folder / "pid").read_text()), signal.SIGKILL)


@pytest.fixture(scope="module")
def calm() -> list[list[Any]]:
    with ov.launch(job(until=STEPS)) as session:
        steps = list(zip(*map(session.client, range(2)), strict=True))
    return [[[step.step, noted(step)] for step in of_rank] for of_rank in zip(*steps, strict=True)]


def check(folder: Path, calm: list[list[Any]], victim: int) -> None:
    saved = HOLDS // SAVES * SAVES
    for rank in range(2):
        got = [json.loads(line) for line in (folder / f"rank-{rank}").read_text().splitlines()]
        first, second = ([line[1:] for line in got if line[0] == group] for group in range(2))
        assert first == calm[rank][: len(first)]
        assert len(first) == HOLDS + 1 if rank == victim else len(first) >= saved
        assert second == calm[rank][saved:], "behind the checkpoint, to the byte"


def test_a_worker_is_killed_and_the_next_group_goes_on_behind_the_checkpoint(
    calm: list[list[Any]], tmp_path: Path
) -> None:
    with program(tmp_path, TRAIN + SERVED) as there:
        assert there.line() == "token"
        kill_it(there, tmp_path)
        code, out, err = there.end(120)  # Ray has words of its own for a worker that was killed
        assert code == 0, err
        assert "{'step': 11}" in out.splitlines()
    check(tmp_path, calm, 0)


def test_each_group_submits_the_job_for_the_nodes_where_train_has_put_it(
    calm: list[list[Any]], tmp_path: Path
) -> None:
    with program(tmp_path, TOKEN + TRAIN + SUBMITTED) as there:
        ids = json.loads(there.line())
        kill_it(there, tmp_path)
        code, out, err = there.end(120)  # Ray has words of its own for a worker that was killed
        assert code == 0, err
        assert "{'step': 11}" in out.splitlines()
    check(tmp_path, calm, 1)
    groups = [json.loads(line) for line in (tmp_path / "where").read_text().splitlines()]
    assert len(groups) == 2
    for nodes, where in groups:
        assert nodes == [ids["gpu-1"], ids["gpu-0"]], (
            "the order of the selectors is that of the ranks"
        )
        assert where == {"constructor-worker/0": "gpu-1", "constructor-worker/1": "gpu-0"}, (
            "beside their ranks"
        )
