"""Placement of workers on a cluster of several nodes: next to their ranks, on nodes with the
requested labels and resources, and somewhere even if other jobs have taken the room since.
"""

from __future__ import annotations

from pathlib import Path

from tests import rays
from tests.processes import program

pytestmark = rays.by_make_ray("half a minute; what is decided is in unit/test_ray_node_choice.py")

PLACES = """
    import logging, os, sys
    from dataclasses import replace
    from tests import rays

    os.environ.update(rays.of_a_cluster(**rays.ATTENTIVE))
    import overlord as ov
    from tests.internals import launcher_of, runtime_of
    from overlord.ray import cluster as ray_cluster
    from overlord.ray import launcher as ray_control
    from tests.processes import launch, play, run, until
    from tests.scenarios.test_process import job


    class Squatter:
        def there(self):
            return True


    def names():
        return {n.id: n.name for n in ray_cluster.CLUSTER.nodes()}


    def where(session):
        return {
            a["name"]: names().get(a.get("node"), "none")
            for a in session.metrics()["actors"]
            if a["role"] == "host"
        }


    def refused(cluster, made, **options):
        try:
            launch(made, "ray", address=cluster.address, **options)
        except ov.JobError as error:
            print(str(error).replace(chr(10), " "), flush=True)


    def take(node, cores):
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        there = NodeAffinitySchedulingStrategy(
            node_id=next(i for i, name in names().items() if name == node), soft=False
        )
        found = ray.remote(Squatter).options(num_cpus=cores, scheduling_strategy=there).remote()
        assert ray.get(found.there.remote(), timeout=60)
        return found


    def main():
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
        nodes = {
            name: cluster.add_node(node_name=name, num_cpus=3, **small)
            for name in ("gpu-0", "gpu-1")
        }
        cluster.add_node(
            node_name="data-0",
            num_cpus=3,
            labels={"pool": "data"},
            resources={"scratch": 4},
            **small,
        )
        made = job(until=40, place=ov.ClientPlaceTree(dp=4))
        calm = run(made, "local")
        refused(cluster, made, rank_nodes=["gpu-0", "gpu-1"])
        refused(cluster, made, node_labels={"pool": "dta"})
        asked = {
            "rank_nodes": ["gpu-0", "gpu-0", "gpu-1", "gpu-1"],
            "node_labels": {"pool": "data"},
            "node_resources": {"scratch": 1},
        }
        with launch(
            made, "ray", address=cluster.address, hosts=2, sources_per_host=2, **asked
        ) as session:
            print(where(session), flush=True)
            print(launcher_of(session).workers.constructor_of.tolist(), flush=True)
            print(runtime_of(session).actor_system.asked(), flush=True)
            idle = {n.name: dict(n.idle_resources) for n in ray_cluster.CLUSTER.nodes()}["data-0"]
            print(idle, flush=True)
            taken = []

            def lose(session):
                taken.append(take("data-0", 1))
                cluster.remove_node(nodes["gpu-1"], allow_graceful=False)
                until(
                    lambda: any(
                        a["state"] != "running"
                        for a in session.metrics()["actors"]
                        if a["role"] == "host"
                    )
                )

            print(play(session, act={7: lose}) == calm, flush=True)
            print(where(session), flush=True)
            print(runtime_of(session).actor_system.asked(), flush=True)
            logging.getLogger("overlord").addHandler(logging.StreamHandler(sys.stdout))
            ray_control.TIMEOUTS = replace(ray_control.TIMEOUTS, process_s=1.0)
            with ray_control.ray_actors(
                cluster.address
            ) as control:  # what was idle is taken between the look and the start
                late = control.spawn(
                    dict, name="late", node="gpu-0", resources={"cpus": 3.0, "memory": 2.0**20}
                )
                print(control.get(control.call(late, "copy"), 60), control.asked(), flush=True)
        cluster.shutdown()
"""


def test_workers_go_to_their_ranks_labels_and_resources_and_do_not_wait_for_what_others_took(
    tmp_path: Path,
) -> None:
    with program(tmp_path, PLACES) as there:
        assert "rank_nodes: expected a node for each of 4 ranks, got 2" in there.line()
        said = there.line()
        assert "node_labels: no node of the cluster has pool=dta; its nodes: " in said
        assert "data-0 with pool=data and scratch=4.0" in said
        before = eval(there.line())
        assert before == {
            "constructor-worker/0": "gpu-0",
            "constructor-worker/1": "gpu-1",
            "loader-worker/0": "data-0",
            "loader-worker/1": "data-0",
        }
        assert eval(there.line()) == [0, 0, 1, 1], (
            "two groups of a node have one constructor host, on it"
        )
        asked = eval(there.line())
        assert asked.pop("planner")["cores"] == 0.0
        assert {a["cores"] for a in asked.values()} == {1.0}
        assert [asked[f"loader-worker/{h}"]["scratch"] for h in range(2)] == [1.0, 1.0]
        assert eval(there.line()) == {"scratch": 2.0}, "of four, one for each loader host"
        assert there.line() == "True", "to the byte"
        assert eval(there.line())["constructor-worker/1"] == "data-0", "its node is gone"
        assert eval(there.line())["constructor-worker/1"] == {"cores": 0.0, "memory": 0.0}, (
            "the core that was idle there at launch is another's"
        )
        assert (
            "late started without its resources: 3 cores and 1 MB not available on its node within 1 s"
            in there.line()
        )
        assert there.line() == "{} {'late': {'cores': 0.0, 'memory': 0.0}}"
        assert there.end(60)[0] == 0


STAND_BYS = """
    import os
    from tests import rays

    os.environ.update(rays.of_a_cluster(**rays.ATTENTIVE))
    import overlord as ov
    from overlord.ray import cluster as ray_cluster
    from tests.coordinators import coordinator_of, launch_here
    from tests.processes import play, run, until
    from tests.scenarios.test_process import job


    def apart(session):
        (host, _), names = coordinator_of(session), {n.id: n.name for n in ray_cluster.CLUSTER.nodes()}
        at = {h: names[remote.node] for h, remote in host.pool.loaders.items()}
        return [(at[home], at[host.standby.worker_of[loader]]) for loader, home in enumerate(host.placement.worker_of.tolist())]

    def main():
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 3, "node_name": "ranks", **small}
        )
        nodes = {
            name: cluster.add_node(node_name=name, num_cpus=3, labels={"pool": "data"}, **small)
            for name in ("data-0", "data-1")
        }
        made = job(until=40)
        calm = run(made, "local")
        asked = {"rank_nodes": ["ranks", "ranks"], "node_labels": {"pool": "data"}}
        with launch_here(
            made,
            runtime="ray",
            address=cluster.address,
            hosts=4,
            sources_per_host=1,
            shadows="all",
            **asked,
        ) as session:
            print(apart(session), flush=True)

            def lose(session):
                cluster.remove_node(nodes["data-1"], allow_graceful=False)
                until(lambda: session.metrics()["recoveries"])

            print(play(session, act={7: lose}) == calm, flush=True)
            print([row["stand_bys"] for row in session.metrics()["recoveries"]], flush=True)
        cluster.shutdown()
"""


def test_standbys_are_on_another_node_which_takes_over_when_the_first_is_lost(
    tmp_path: Path,
) -> None:
    with program(tmp_path, STAND_BYS) as there:
        pairs = eval(there.line())
        assert {home for home, _ in pairs} == {"data-0", "data-1"}, "loaders are on both"
        assert all({*pair} == {"data-0", "data-1"} for pair in pairs)
        assert there.line() == "True", "to the byte"
        assert set(eval(there.line())) == {True}, "nothing was read again"
        assert there.end(60)[0] == 0


CROWDED = """
    import os
    from tests import rays

    os.environ.update(rays.of_a_cluster(**rays.ATTENTIVE))
    import overlord as ov
    from overlord.ray import cluster as ray_cluster
    from overlord.cli import detached_jobs as ray_jobs
    from tests.processes import launch, play, run, until
    from tests.scenarios.test_process import job


    def where(session):
        names = {n.id: n.name for n in ray_cluster.CLUSTER.nodes()}
        return {
            a["name"]: names.get(a.get("node"), "none")
            for a in session.metrics()["actors"]
            if a["role"] in ("host", "planner")
        }


    def readers(session):
        actors = session.metrics()["actors"]
        reads = {a["pid"] for a in actors if a["role"] == "loader"}
        return sorted(a["name"] for a in actors if a["role"] == "host" and a["pid"] in reads)


    def exceeded(session):
        return [
            (row["node"], row["hosts"], row["allowed"])
            for row in session.metrics()["placement"]["exceeded"]
        ]


    def is_exceeded(session):
        try:
            return exceeded(session)
        except ov.DataStall:  # the planner is being started again
            return False


    def main():
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "node_name": "head", **small}
        )
        cluster.add_node(node_name="gpu-0", num_cpus=4, **small)
        lost = cluster.add_node(node_name="cpu-0", num_cpus=6, **small)
        made, calm = job(until=60, journal=os.path.abspath("journal")), run(job(until=60), "local")
        asked = {
            "rank_nodes": ["gpu-0"] * 2,
            "loaders": {made.names[0]: 3},
            "sources_per_host": 1,
            "hosts": 5,
        }
        with launch(made, "ray", address=cluster.address, **asked) as session:
            print(where(session), exceeded(session), flush=True)

            def lose(session):
                cluster.remove_node(lost, allow_graceful=False)
                until(lambda: is_exceeded(session))
                print(where(session), exceeded(session), flush=True)

            def join(session):
                cluster.add_node(node_name="cpu-1", num_cpus=6, **small)
                until(
                    lambda: (
                        sum(int(name.rpartition("/")[2]) >= 10_000 for name in readers(session))
                        == 4
                    )
                )

            def settled(session):
                until(lambda: not exceeded(session))
                print(where(session), exceeded(session), flush=True)

            print(play(session, act={7: lose, 14: join, 50: settled}) == calm, flush=True)
        cluster.shutdown()
"""


def test_an_exceeded_share_after_the_loss_of_a_node_is_reported_and_workers_move_to_a_new_node(
    tmp_path: Path,
) -> None:
    with program(tmp_path, CROWDED) as there:
        before, exceeded = eval(there.line().replace("} [", "}, ["))
        assert exceeded == []
        assert sorted(
            name.partition("/")[0] for name, node in before.items() if node == "gpu-0"
        ) == ["constructor-worker", "loader-worker"]
        assert {node for name, node in before.items() if node != "gpu-0"} == {"cpu-0"}, (
            "the planner, too"
        )
        after, exceeded = eval(there.line().replace("} [", "}, ["))
        assert {node for name, node in after.items() if name != "planner"} == {"gpu-0"}, (
            "a job does not die for a share"
        )
        assert after["planner"] == "head", "it asks for nothing, and no ranks are there"
        assert exceeded == [("gpu-0", 6, 2)]
        settled, exceeded = eval(there.line().replace("} [", "}, ["))
        assert exceeded == []
        assert sorted(settled.values()) == ["cpu-1"] * 4 + ["gpu-0"] * 2 + ["head"]
        assert there.line() == "True", "to the byte"
        assert there.end(60)[0] == 0
