"""Ray's own autoscaler and ours: a loader host for which no node has room makes Ray add one, and nobody notices in the stream.

Ray's fake provider adds nodes that are processes of this machine; nothing else of it is made up. Half a minute: told by ``make ray``.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import rays
from tests.processes import PARTS, program

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there"),
    pytest.mark.skipif(PARTS != "ray", reason="half a minute: make ray"),
]

GROWS = """
    import ctypes, json, os, secrets, shutil, socket, subprocess, sys, tempfile
    os.environ.update(
        RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32), RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0",
        AUTOSCALER_UPDATE_INTERVAL_S="1", RAY_FAKE_CLUSTER="1", RAY_gcs_rpc_server_reconnect_timeout_s="5",
    )
    from tests.processes import WAIT_S, launch, play, run, until
    from tests.scenarios.test_scaling import ONE, job, loaders_apart

    def with_us():
        ctypes.CDLL(None).prctl(1, 15)  # the head ends, and tidily, when this program is killed

    def head():
        from ray.util import get_node_ip_address
        from tests.autoscaled import config
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        address, folder = f"{get_node_ip_address()}:{port}", tempfile.mkdtemp(prefix="o", dir="/tmp")
        with open("nodes.json", "w") as file:
            json.dump(config(address, nodes=4), file)
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--port={port}", "--num-cpus=0"]
        command += ["--object-store-memory=83886080", "--include-dashboard=false", f"--temp-dir={folder}", "--disable-usage-stats"]
        with open("ray.log", "w") as said:
            command += [f"--autoscaling-config={os.path.abspath('nodes.json')}"]
            process = subprocess.Popen(command, stdout=said, stderr=said, preexec_fn=with_us)
        until(lambda: "will now block" in open("ray.log").read())
        return process, address, folder

    def main():
        from overlord.runtime import ray_cluster
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
                cores = [cores for name, (cores, _) in session._host._control.asked().items() if name.startswith("loader-host")]
                print(json.dumps([told, same, cores, session.metrics()["recoveries"]]), flush=True)
        finally:
            process.terminate()
            process.wait(WAIT_S)
            shutil.rmtree(folder, ignore_errors=True)
"""


def test_hosts_that_are_added_let_ray_add_nodes(tmp_path: Path) -> None:
    with program(tmp_path, GROWS) as there:
        told, same, cores, recoveries = json.loads(there.line())
        assert told == [3, 4], "a head without cores, a node each for the constructor and the loader host; one more for the new host"
        assert same, "to the byte"
        assert cores == [1.0, 1.0]
        assert recoveries == []
        assert there.end(120)[0] == 0
