"""Ray's autoscaler together with ours: a loader worker for which no node has room makes Ray add
one, and the stream does not change.

Ray's fake provider adds nodes that are processes of this machine; everything else is real. It takes
half a minute and runs with ``make ray``.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests import rays
from tests.processes import program

pytestmark = rays.by_make_ray("half a minute")

GROWS = """
    import contextlib, ctypes, json, os, shutil, socket, subprocess, sys, tempfile
    from pathlib import Path
    from tests import rays

    quick = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "5",
    }
    os.environ.update(rays.of_a_cluster(**quick))
    import overlord as ov
    from tests.internals import runtime_of
    from tests.processes import WAIT_S, launch, play, run, until
    from tests.scenarios.test_scaling import ONE, job, loaders_apart


    def with_us():
        ctypes.CDLL(None).prctl(1, 15)  # the head ends, and tidily, when this program is killed


    def head():
        from ray.util import get_node_ip_address
        from tests.autoscaler_nodes import config

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address, folder = (
            f"{get_node_ip_address()}:{port}",
            tempfile.mkdtemp(prefix="o", dir="/tmp"),
        )
        with open("nodes.json", "w") as file:
            json.dump(config(address, nodes=4), file)
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            f"--port={port}",
            "--num-cpus=0",
        ]
        command += [
            "--object-store-memory=83886080",
            "--include-dashboard=false",
            f"--temp-dir={folder}",
            "--disable-usage-stats",
        ]
        with open("ray.log", "w") as said:
            command += [f"--autoscaling-config={os.path.abspath('nodes.json')}"]
            process = subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=with_us)
        until(lambda: "will now block" in open("ray.log").read())
        return process, address, folder


    def end_nodes(folder):
        # The autoscaler never ends its nodes, and their log monitors do not detect a lost head.
        for at in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if folder.encode() in at.read_bytes():
                    os.kill(int(at.parent.name), 9)


    def alone(address):
        from overlord.cli import detached_jobs as ray_jobs

        few = {"address": address, "hosts": 1, "sources_per_host": 2, "constructor_hosts": 1}
        served = ray_jobs.submit(job(until=2), **few)
        clients = [ov.connect(served.address, rank, token=served.token) for rank in range(2)]
        print(sum(1 for _ in zip(*clients)), flush=True)
        for client in clients:
            client.close()
        [over] = until(lambda: [j for j in ray_jobs.jobs(address) if j.state != "running"])
        print(json.dumps([over.state, over.steps, over.taken, over.workers]), flush=True)
        ray_jobs.submit(job(until=2), **few)  # the one that is over makes way
        try:
            ray_jobs.submit(job(until=2), **few)
        except ov.JobError as error:
            print(error, flush=True)
        ray_jobs.stop("scaled", address)
        print(ray_jobs.jobs(address), flush=True)


    def main():
        from overlord.ray import cluster as ray_cluster

        calm = run(job(), "local")
        process, address, folder = head()
        nodes = lambda: len({n.id for n in ray_cluster.CLUSTER.nodes()})
        told = []

        def grow(session):
            told.append(nodes())
            session.scale("heavy", 2)
            until(lambda: loaders_apart(session) == 2)
            told.append(nodes())

        try:
            with launch(job(), "ray", address=address, reserve=True, **ONE) as session:
                same = play(session, act={6: grow}) == calm
                cores = [
                    asked["cores"]
                    for name, asked in runtime_of(session).actor_system.asked().items()
                    if name.startswith("loader-worker")
                ]
                print(json.dumps([told, same, cores, session.metrics()["recoveries"]]), flush=True)
            alone(address)
        finally:
            process.terminate()
            process.wait(WAIT_S)
            end_nodes(folder)
            shutil.rmtree(folder, ignore_errors=True)
"""


def test_workers_that_are_added_let_ray_add_nodes_and_a_job_that_is_over_makes_way_for_the_next(
    tmp_path: Path,
) -> None:
    with program(tmp_path, GROWS) as there:
        told, same, cores, recoveries = json.loads(there.line())
        assert told == [3, 4], (
            "a head without cores, a node each for the constructor and the loader host; "
            "one more for the new host"
        )
        assert same, "to the byte"
        assert cores == [1.0, 1.0]
        assert recoveries == []
        assert there.line() == "2"
        assert json.loads(there.line()) == ["ended", 2, 1, []]
        assert "a job called 'scaled' is running on this cluster; stop it first" in there.line()
        assert there.line() == "[]"
        assert there.end(120)[0] == 0
