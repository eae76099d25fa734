"""A node of a Ray cluster that stands still is given up with its hosts; when they wake, others have their place, and nobody hears them.

On one machine a part that is given up is killed at once. Here the launching process takes the nodes for other machines, where it cannot
reach them: what is stopped lives on. Half a minute: told by ``make ray``.
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
    from overlord.runtime import ray_cluster, ray_control
    from tests.processes import halt, launch, play, run, runs, until
    from tests.scenarios.test_process import job

    ray_control.this_machine = lambda: "another machine"

    def hosts(session):
        names = {n.id: n.name for n in ray_cluster.CLUSTER.nodes()}
        return {a["name"]: (a["pid"], names.get(a.get("node"))) for a in session.metrics()["actors"] if a["role"] == "host"}

    def main():
        from ray.cluster_utils import Cluster
        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        nodes = {name: cluster.add_node(node_name=name, num_cpus=4, **small) for name in ("gpu-0", "gpu-1")}
        calm, zombies = run(job(until=60), "local"), {}

        def stop(session):
            zombies.update({name: pid for name, (pid, node) in hosts(session).items() if node == "gpu-1"})
            for pid in (nodes["gpu-1"].all_processes["raylet"][0].process.pid, *zombies.values()):
                halt(pid)

        def wake(session):
            print(json.dumps([sorted(zombies), [runs(pid) for pid in zombies.values()]]), flush=True)
            print(json.dumps({name: node for name, (pid, node) in hosts(session).items()}), flush=True)
            for pid in zombies.values():
                os.kill(pid, signal.SIGCONT)

        apart = {"rank_nodes": ["gpu-0", "gpu-1"], "hosts": 2, "sources_per_host": 2}
        with launch(job(until=60), "ray", address=cluster.address, **apart) as session:
            print(play(session, act={9: stop, 30: wake}) == calm, flush=True)
            until(lambda: not any(runs(pid) for pid in zombies.values()))
            print("gone", flush=True)
        cluster.shutdown()
"""


def test_hosts_of_a_node_that_stood_still_wake_when_others_have_their_place(tmp_path: Path) -> None:
    with program(tmp_path, STANDS_STILL) as there:
        zombies, alive = json.loads(there.line())
        assert "constructor-host/1" in zombies
        assert any(name.startswith("loader-host/") for name in zombies)
        assert all(alive), "when they were woken they lived"
        assert set(json.loads(there.line()).values()) == {"gpu-0"}
        assert there.line() == "True", "to the byte"
        assert there.line() == "gone", "who finds its link closed leaves"
        assert there.end(60)[0] == 0
