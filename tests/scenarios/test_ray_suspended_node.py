"""A suspended node of a Ray cluster is given up with its workers. When they resume, others have
replaced them, and their messages are ignored.

On one machine a worker that is given up is killed at once. Here the launching process takes the
nodes for other machines, where it cannot kill them: suspended workers live on. It takes half a
minute and runs with ``make ray``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests import rays
from tests.processes import program

pytestmark = rays.by_make_ray("half a minute")

STANDS_STILL = """
    import json, os, signal
    from tests import rays

    os.environ.update(rays.of_a_cluster(**rays.ATTENTIVE))
    from overlord.ray import cluster as ray_cluster
    from overlord.ray import launcher as ray_control
    from tests.processes import halt, launch, play, run, runs, until
    from tests.scenarios.test_process import job

    ray_control.this_machine = lambda: "another machine"


    def hosts(session):
        names = {n.id: n.name for n in ray_cluster.CLUSTER.nodes()}
        return {
            a["name"]: (a["pid"], names.get(a.get("node")))
            for a in session.metrics()["actors"]
            if a["role"] == "host"
        }


    def main():
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        nodes = {
            name: cluster.add_node(node_name=name, num_cpus=4, **small)
            for name in ("gpu-0", "gpu-1")
        }
        calm, zombies = run(job(until=60), "local"), {}

        def stop(session):
            zombies.update(
                {name: pid for name, (pid, node) in hosts(session).items() if node == "gpu-1"}
            )
            for pid in (nodes["gpu-1"].all_processes["raylet"][0].process.pid, *zombies.values()):
                halt(pid)

        def wake(session):
            print(
                json.dumps([sorted(zombies), [runs(pid) for pid in zombies.values()]]), flush=True
            )
            print(
                json.dumps({name: node for name, (pid, node) in hosts(session).items()}), flush=True
            )
            for pid in zombies.values():
                os.kill(pid, signal.SIGCONT)

        apart = {"rank_nodes": ["gpu-0", "gpu-1"], "hosts": 2, "sources_per_host": 2}
        with launch(job(until=60), "ray", address=cluster.address, **apart) as session:
            print(play(session, act={9: stop, 30: wake}) == calm, flush=True)
            until(lambda: not any(runs(pid) for pid in zombies.values()))
            print("gone", flush=True)
        cluster.shutdown()
"""


def test_workers_of_a_node_that_stood_still_wake_when_others_have_their_place(
    tmp_path: Path,
) -> None:
    with program(tmp_path, STANDS_STILL) as there:
        zombies, alive = json.loads(there.line())
        assert "constructor-worker/1" in zombies
        assert any(name.startswith("loader-worker/") for name in zombies)
        assert all(alive), "when they were woken they lived"
        assert set(json.loads(there.line()).values()) == {"gpu-0"}
        assert there.line() == "True", "to the byte"
        assert there.line() == "gone", "who finds its link closed leaves"
        assert there.end(60)[0] == 0


LEAVES_THE_DEAF = """
    import os, signal
    from dataclasses import replace
    from tests import rays

    os.environ.update(rays.of_a_cluster())
    from overlord.ray import connection as ray_connection
    from overlord.ray.ray_import import ray_worker
    from tests.processes import halt, launch, left_after, play, run
    from tests.scenarios.test_process import job

    ray_connection.TIMEOUTS = replace(ray_connection.TIMEOUTS, disconnect_s=2.0)


    def close_beside(pid, folder, **where):
        with launch(job(until=20, journal=folder), "ray", **where) as session:
            print(play(session, act={9: lambda _: halt(pid())}) == calm, flush=True)
            parts = [
                a["pid"]
                for a in session.metrics()["actors"]
                if a["role"] in ("host", "planner") and a["pid"] != os.getpid()
            ]
        print("closed", left_after(parts, 20.0), flush=True)


    def main():
        global calm
        calm = run(job(until=20), "local")
        close_beside(lambda: ray_worker._global_node.all_processes["raylet"][0].process.pid, "own")
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, **small})
        raylet = cluster.head_node.all_processes["raylet"][0].process.pid
        close_beside(lambda: raylet, "there", address=cluster.address)
        os.kill(raylet, signal.SIGCONT)
        with launch(job(until=20), "ray", address=cluster.address) as session:
            print(play(session) == calm, flush=True)
        cluster.shutdown()
"""


def test_a_session_is_closed_though_the_ray_of_its_node_stands_still_and_lives_when_that_wakes(
    tmp_path: Path,
) -> None:
    """Ray waits without a deadline for the raylet of its node to acknowledge a disconnect."""
    with program(tmp_path, LEAVES_THE_DEAF) as there:
        for _ in ("a cluster of its own", "one that is there"):
            assert there.line() == "True"
            assert there.line() == "closed []"
        assert there.line() == "True", "woken, it does what it is asked for"
        code, _, said = there.end(60)
        assert code == 0
        assert "raylet did not acknowledge the disconnect within 2 s" in said
