"""A job on Ray: workers are killed and restarted, nothing is left behind, nodes are used as
requested and may be lost, and jobs run detached.

Scenarios of all runtimes run on Ray in their own files (control, runtime, meshes, reshard,
kills_everywhere); those of other losses run with ``make ray``. A test that needs its own cluster
runs it in its own program.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from tests import rays
from tests.internals import cluster_lock, cluster_users, without_users
from tests.processes import (
    ROOT,
    WAIT_S,
    Played,
    command_of,
    halt,
    launch,
    left_after,
    play,
    program,
    run,
    runs,
    workers_of,
)
from tests.scenarios.test_process import job

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there"),
]

STEPS = 40
FEW: dict[str, Any] = {
    "sources_per_host": 2,
    "hosts": 2,
    "constructor_hosts": 1,
}  # two loader workers, one constructor worker
GONE_S = 30.0
LOOPBACK = {
    "0100007F",
    "0000000000000000FFFF00000100007F",
    "00000000000000000000000001000000",
}  # in the form of /proc/net


@pytest.fixture(scope="module")
def calm() -> Played:
    return run(job(until=STEPS), "local")


def pids_of(session: ov.Session) -> dict[str, int]:
    return {
        a["name"]: a["pid"] for a in session.metrics()["actors"] if a["role"] in ("host", "planner")
    }


# lost workers


def test_a_coordinator_that_hangs_is_killed_for_good_before_another_writes(
    calm: Played, tmp_path: Path, ray_cluster: None
) -> None:
    with launch(
        job(until=STEPS, journal=str(tmp_path / "journal")), "ray", lost_after_s=2.0, **FEW
    ) as session:
        before = play(session, steps=6)
        zombie = pids_of(session)["planner"]
        halt(zombie)
        after = play(session)
        assert {
            rank: before.steps[rank] + steps for rank, steps in after.steps.items()
        } == calm.steps
        assert not runs(zombie)


class Crashes:
    def end(self) -> None:
        sys.stderr.write("its last words\n")
        sys.stderr.flush()
        os._exit(9)


def test_the_last_words_of_a_worker_that_died_are_said_here_since_their_file_goes_with_the_cluster(
    ray_cluster: None, caplog: pytest.LogCaptureFixture
) -> None:
    with rays.control() as control:
        part = control.spawn(Crashes, name="part")
        with pytest.raises(ov.ActorLost, match=r"ran out of memory$"):
            control.get(control.call(part, "end"), 60.0)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        "last output of part:\n  its last words"
    ]


def test_two_jobs_side_by_side_have_workers_of_their_own(calm: Played, ray_cluster: None) -> None:
    few = {**FEW, "hosts": 1, "sources_per_host": 3}
    with (
        launch(job(until=STEPS), "ray", **few) as one,
        launch(job(until=STEPS), "ray", **few) as other,
    ):
        assert not set(workers_of(one).values()) & set(workers_of(other).values())
        one.kill("loader-worker/0")
        assert play(other) == calm
        assert other.metrics()["recoveries"] == []
        assert play(one) == calm


def test_whoever_asks_for_more_than_there_is_hears_what_is_waited_for(ray_cluster: None) -> None:
    with rays.control() as control:
        greedy = control.spawn(dict, name="greedy", resources={"cpus": 1000.0})
        wanted = (
            r"for greedy to be started, on a node with 1000 cores and 0 MB idle "
            r"\(nodes have .* cores and \d+ MB\): an autoscaler"
        )
        with pytest.raises(ov.DataStall, match=wanted):
            control.get(control.call(greedy, "keys"), 0.1)
        control.kill(greedy)


def test_an_actor_that_exits_leaves_no_process_and_its_successor_has_another(
    ray_cluster: None,
) -> None:
    with rays.control() as one:
        first = one.spawn(dict, name="leaves")
        assert one.get(one.call(first, "copy"), 60.0) == {}
        pid = one.pid_here(first)
    assert not left_after([pid], GONE_S)
    with rays.control() as other:
        again = other.spawn(dict, name="leaves")
        assert other.get(other.call(again, "copy"), 60.0) == {}
        assert other.pid_here(again) not in (0, pid)


def test_whoever_could_not_let_go_of_the_cluster_since_ray_hung_is_counted_when_it_does_not(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from overlord.ray import cluster as cluster

    before = cluster_users(cluster.CLUSTER)
    cluster.CLUSTER.hold(None)
    monkeypatch.setattr(cluster, "TIMEOUTS", replace(cluster.TIMEOUTS, release_s=0.05, hold_s=0.05))
    hangs, ends = threading.Event(), threading.Event()

    def hang() -> None:
        with cluster_lock(cluster.CLUSTER):
            hangs.set()
            ends.wait(WAIT_S)

    thread = threading.Thread(target=hang)
    thread.start()
    assert hangs.wait(WAIT_S)
    cluster.CLUSTER.release()
    with pytest.raises(ov.DataStall, match="Ray: the requests of another session to complete"):
        cluster.CLUSTER.hold(None)
    ends.set()
    thread.join()
    cluster.CLUSTER.hold(None)
    assert cluster_users(cluster.CLUSTER) == before + 1
    cluster.CLUSTER.release()


def test_who_asks_for_the_nodes_of_a_cluster_that_was_left_does_not_start_another(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray does that for every call. The placement of workers is reviewed in a thread that may be
    late.
    """
    from overlord.ray import cluster as cluster

    known = cluster.CLUSTER.nodes()
    without_users(cluster.CLUSTER, monkeypatch)
    monkeypatch.setattr(cluster, "living_nodes", lambda: pytest.fail("Ray was asked"))
    assert cluster.CLUSTER.nodes() == known != []


# a cluster of its own

OWN = """
    import json, os, signal, sys, time
    from pathlib import Path
    import overlord as ov
    from overlord.cluster import worker_pool
    from tests.processes import WAIT_S, workers_of, launch, written
    from tests.scenarios.test_process import job


    def below(pid):
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                found.append(
                    (int(stat.parent.name), int(stat.read_text().rpartition(")")[2].split()[1]))
                )
            except OSError:
                pass
        tree, grown = {pid}, True
        while grown:
            more = {p for p, parent in found if parent in tree} - tree
            grown = bool(more)
            tree |= more
        return sorted(tree - {pid})


    def listening(pids):
        inodes, found = {}, set()
        for line in (
            Path("/proc/net/tcp").read_text().splitlines()[1:]
            + Path("/proc/net/tcp6").read_text().splitlines()[1:]
        ):
            words = line.split()
            if words[3] == "0A":
                inodes[f"socket:[{words[9]}]"] = words[1].rpartition(":")[0]
        for pid in pids:
            for fd in Path(f"/proc/{pid}/fd").glob("*"):
                try:
                    found.add(inodes.get(os.readlink(fd)))
                except OSError:
                    pass
        return sorted(found - {None})


    def saves(number, frame):
        raise AssertionError("nobody has asked for it")


    def main():
        before, worker_pool.CLOSE_S = dict(os.environ), WAIT_S  # a host that takes long to leave on a busy machine is not to be told of
        signal.signal(signal.SIGTERM, saves)
        session = launch(job(until=10), "ray", hosts=1, sources_per_host=3, constructor_hosts=1)
        hosts = workers_of(session)
        print(
            json.dumps(
                [
                    below(os.getpid()),
                    hosts,
                    {n: os.getpriority(os.PRIO_PROCESS, p) for n, p in hosts.items()},
                ]
            ),
            flush=True,
        )
        print(
            os.environ["RAY_AUTH_MODE"],
            len(os.environ["RAY_AUTH_TOKEN"]),
            signal.getsignal(signal.SIGTERM) is saves,
            flush=True,
        )
        print(listening([os.getpid(), *below(os.getpid()), *hosts.values()]), flush=True)
        input()
        session.kill("loader-worker/0")
        clients = [session.client(rank) for rank in range(2)]
        print(sum(1 for steps in zip(*clients)), flush=True)
        session.close()
        print({k: v for k, v in os.environ.items() if before.get(k) != v}, flush=True)
"""


def test_a_cluster_for_one_job_leaves_nothing_behind_and_ray_says_nothing(tmp_path: Path) -> None:
    home, scratch = (
        tmp_path / "home",
        Path(tempfile.mkdtemp(prefix="o", dir="/tmp")),
    )  # short enough for Ray's sockets
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", str(scratch))
        (scratch / "ov-ray-999999999-left").mkdir()  # of a program that was killed
        with program(tmp_path, OWN) as own:
            tree, hosts, nice = eval(own.line())
            assert own.line() == "token 64 True", (
                "and what the program does on SIGTERM is its own affair"
            )
            listens = set(eval(own.line()))
            assert listens
            assert listens <= LOOPBACK, "nobody on another machine reaches it"
            assert set(nice.values()) == {os.getpriority(os.PRIO_PROCESS, 0)}, "not Ray's 15 more"
            assert len(list(scratch.glob("ov-ray-*"))) == 1, (
                "one of its own, and what others left is gone"
            )
            own.say("go")
            assert own.line() == "10"
            assert own.line() == "{}", "the environment is as it was"
            code, out, err = own.end()
            assert (code, out) == (0, "")
            assert [
                line
                for line in err.splitlines()
                if "loader-worker/0" not in line and "rolled back to" not in line
            ] == []
            assert left_after([*tree, *hosts.values()], GONE_S) == []
        assert list(scratch.glob("*ray*")) == []
        shutil.rmtree(scratch)
        assert not (home / ".ray").exists()


def test_nothing_outlives_a_launching_process_that_is_killed(tmp_path: Path) -> None:
    with program(tmp_path, OWN) as own:
        tree, hosts, _ = eval(own.line())
        tree = [
            pid for pid in tree if "agent" not in command_of(pid).lower()
        ]  # two of Ray's own exit within a minute
        assert len(tree) >= 5
        os.kill(own.pid, signal.SIGKILL)
        assert left_after([*tree, *hosts.values()], GONE_S) == []


def test_a_cluster_that_is_not_there_is_reported_with_its_address() -> None:
    code = (
        "import overlord as ov; from tests.scenarios.test_process import job; "
        "ov.launch(job(), 'ray', address='127.0.0.1:9')"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environ,
        timeout=120,
        check=False,
    )
    assert (
        "JobError: launch: address: '127.0.0.1:9' could not be reached as a Ray cluster; "
        "expected host:port of its head" in done.stderr
    )


def test_without_ray_it_is_said_what_to_install() -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nfrom tests.scenarios.test_process import "
        "job, ov\nov.launch(job(), 'ray')"
    )
    environ = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environ,
        timeout=60,
        check=False,
    )
    assert "pip install 'overlord-data[ray]'" in done.stderr
    assert "JobError" in done.stderr


# an existing cluster

JOINS = """
    import logging, os, shutil, socket, tempfile, threading
    from concurrent.futures import ThreadPoolExecutor

    os.environ.update(HOME=os.getcwd(), RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "OVERLORD_INTERFACE"):
        os.environ.pop(name, None)
    import ray
    import overlord as ov
    from overlord.ray import cluster as ray_cluster
    from overlord.ray import connection as ray_connection
    from overlord.cli import detached_jobs as ray_jobs
    from overlord.ray.launcher import ray_actors
    from tests.processes import halt
    from tests.scenarios.test_process import job
    from tests.scenarios.test_ray import Crashes


    def refused(address):
        try:
            with ray_cluster.cluster(address):
                print("it was used", flush=True)
        except ov.JobError as error:
            print(error, flush=True)


    def service(address):
        door, (host, port) = socket.create_server(("127.0.0.1", 0)), address.split(":")

        def carry(one, other):
            try:
                while data := one.recv(65536):
                    other.sendall(data)
            except OSError:
                pass

        def serve():
            while True:
                here, there = door.accept()[0], socket.create_connection((host, int(port)))
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=carry, args=ends, daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        return "127.0.0.1:" + str(door.getsockname()[1])


    def main():
        from ray.cluster_utils import Cluster

        small = {"object_store_memory": 80 * 2**20, "include_dashboard": False, "num_cpus": 1}
        del os.environ["RAY_AUTH_MODE"]  # so are clusters where nobody has thought of it
        open_one = Cluster(
            initialize_head=True, head_node_args={"node_ip_address": "127.0.0.2", **small}
        )
        refused(open_one.address)
        os.environ["RAY_AUTH_TOKEN"] = "1" * 64
        refused(open_one.address)
        os.environ["RAY_AUTH_MODE"] = "disabled"
        before, said = dict(os.environ), []
        logging.getLogger("overlord").addFilter(lambda record: said.append(record.getMessage()))
        with ray_cluster.cluster(open_one.address):
            with ray_actors(open_one.address) as control:
                actor = control.spawn(dict, name="actor")
                print(control.address, control.get(control.call(actor, "copy"), 60.0), flush=True)
                crashes = control.spawn(Crashes, name="crashes")
                print(control.call(crashes, "end").exception(60.0), flush=True)
            os.environ["OVERLORD_INTERFACE"] = "127.0.0.3"
            with ray_actors(open_one.address) as control:
                print(control.address, flush=True)
            del os.environ["OVERLORD_INTERFACE"]
        print(said, os.environ == before, flush=True)
        ray.init(open_one.address, log_to_driver=False, logging_level=logging.ERROR)
        del os.environ["RAY_AUTH_MODE"]
        refused(None)
        os.environ["RAY_AUTH_MODE"] = "disabled"
        refused("127.0.0.1:9")
        refused("localhost:" + open_one.address.rpartition(":")[2])
        refused(service(open_one.address))
        ray.shutdown()
        ray_jobs.submit(job(name="open"), address=open_one.address)
        print([(j.name, j.state) for j in ray_jobs.jobs(open_one.address)], flush=True)
        with (
            ray_cluster.cluster(open_one.address),
            ThreadPoolExecutor(2) as both,
        ):  # at the same time: both end it
            ask, ready = ray_cluster.ask, threading.Barrier(2)
            ray_cluster.ask = lambda *args, **how: (ready.wait(60), ask(*args, **how))[1]
            print(
                list(both.map(lambda _: ray_jobs.stop("open", open_one.address), range(2))),
                flush=True,
            )
            ray_cluster.ask, ray_jobs.STOP_S = ask, 3.0
            keeper = ray_cluster.create_detached(ray_jobs.JobActor, "still")
            try:
                ray_jobs.served("still", open_one.address)
            except ov.OverlordError as error:
                print(error, flush=True)
            halt(ray.get(keeper.__ray_call__.remote(lambda keeper: os.getpid()), timeout=60))
            print(
                ray_jobs.stop("still", open_one.address),
                "|",
                ray_jobs.jobs(open_one.address),
                flush=True,
            )
        os.environ["RAY_AUTH_MODE"] = "token"
        ray_connection.reread_environment()
        ray.init(
            open_one.address, log_to_driver=False, logging_level=logging.ERROR
        )  # a head that asks for none takes any
        refused(None)
        ray.shutdown()
        open_one.shutdown()
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
            del os.environ[name]
        before, ends = dict(os.environ), ray.shutdown

        def interrupted():
            ray.shutdown = ends
            raise KeyboardInterrupt

        try:
            with ray_cluster.cluster() as own:
                ours, ray.shutdown = own._connection.folder.path, interrupted
        except KeyboardInterrupt:
            print(ray.is_initialized(), ours.exists(), os.environ == before, own._users, flush=True)
        folder = tempfile.mkdtemp(prefix="o", dir="/tmp")
        ray.init(
            "local",
            num_cpus=1,
            include_dashboard=False,
            _temp_dir=folder,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        print(ray.is_initialized(), flush=True)
        ray.shutdown()
        shutil.rmtree(folder)
"""


def test_an_open_cluster_needs_an_explicit_setting_and_the_program_can_use_its_own_ray_after(
    tmp_path: Path,
) -> None:
    with program(tmp_path, JOINS) as there:
        assert (
            "is not used: expected the token of the cluster in "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or" in there.line()
        )
        said = there.line()
        assert (
            "is not used: it requires no token, so everyone who reaches its ports can run code "
            "there: start it with RAY_AUTH_MODE=token" in said
        )
        assert (
            "only RAY_AUTH_MODE=disabled in the environment of this program turns "
            "authentication off" in said
        )
        address, answer = there.line().split()
        assert address.startswith("overlord://127.0.0.2:"), "where Ray says that this node is"
        assert answer == "{}"
        words = re.search(
            r"; its last output is in (/\S+\.err) and (/\S+\.out) on node 127.0.0.2$", there.line()
        )
        assert words, "the cluster stays, and so do its files"
        assert Path(words[1]).read_text().endswith("its last words\n")
        assert there.line().startswith("overlord://127.0.0.3:"), "unless it was said"
        [warned, *exposed, last], same = eval(there.line().replace(" True", ", True"))
        assert warned.startswith(
            "the cluster is used without token authentication: everyone who reaches its ports "
            "can run code in it"
        )
        assert [line.partition(",")[0] for line in exposed] in (
            [],
            ["every account of this machine can replace the sockets and logs of its Ray"],
        )
        assert last == "last output of crashes:\n  its last words"
        assert same, "the environment is as it was"
        said = there.line()
        assert "the cluster that the program connected to is not used: it requires no token" in said
        said = there.line()
        assert (
            "address: '127.0.0.1:9' was requested, but this process is connected to the "
            "cluster at '127.0.0.2:" in said
        )
        assert "by a ray.init of its own" in said
        assert there.line() == "it was used", "by another name of the same machine"
        assert there.line() == "it was used", "by the address of something before it"
        assert there.line() == "[('open', 'running')]", (
            "where that was said by name, a job may live there by itself, too"
        )
        assert there.line() == "['', '']", "whoever stops it while another does has stopped it"
        assert there.line() == (
            "job 'still': expected a running job, got one that is submitted; trainers can "
            "connect only to a running job"
        ), "it was not told its name yet"
        assert there.line() == "it did not stop within 3 s | []"
        assert (
            "the cluster that the program connected to is not used: it requires no token"
            in there.line()
        ), "though one was shown"
        assert there.line() == "False False True 0", "Ctrl-C at its end leaves nothing of a cluster"
        assert there.line() == "True", "the program's own, after one of ours"
        assert there.end()[0] == 0


# a cluster of several nodes

NODES = """
    import os, subprocess, sys, time
    from dataclasses import replace
    from tests import rays

    on_disk = rays.on_disk(os.path.abspath("gcs"))
    os.environ.update(rays.of_a_cluster(**rays.ATTENTIVE, **on_disk))
    import overlord as ov
    from tests.internals import constructor_addresses, runtime_of
    from overlord.ray import cluster as ray_cluster
    from overlord.ray import head as ray_head
    from overlord.cli import detached_jobs as ray_jobs
    from tests.processes import workers_of, launch, play, run, runs, until, written
    from tests.scenarios.test_process import job


    def where(session):
        names = {n.id: n.name for n in ray_cluster.CLUSTER.nodes()}
        return {
            a["name"]: names.get(a.get("node"), "none")
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
        calm = run(job(until=40), "local")
        refuse(cluster.address)
        try:
            launch(job(), "ray", address=cluster.address, rank_nodes=["gpu-0", "gpu-7"])
        except ov.JobError as error:
            assert "no node of the cluster is called 'gpu-7'" in str(error), error
        else:
            raise AssertionError("a node that is not there was passed over")
        apart = {
            "rank_nodes": ["gpu-0", "gpu-1"],
            "hosts": 2,
            "sources_per_host": 2,
            "ports": "21000-21199",
        }
        with launch(job(until=40), "ray", address=cluster.address, **apart) as session:
            print(where(session), flush=True)
            print(runtime_of(session).actor_system.asked(), flush=True)
            print([a.split("/")[2].rpartition(":")[2] for a in constructor_addresses(runtime_of(session))], flush=True)
            took = []

            def remove(session):
                cluster.remove_node(nodes["gpu-1"], allow_graceful=False)
                start = time.monotonic()
                until(
                    lambda: any(
                        a["state"] != "running"
                        for a in session.metrics()["actors"]
                        if a["role"] == "host"
                    )
                )
                took.append(time.monotonic() - start)

            print(play(session, act={9: remove}) == calm, flush=True)
            print(where(session), flush=True)
            print(*took, flush=True)
        submit = "import sys; from overlord.cli import detached_jobs as ray_jobs; "
        submit += "from tests.scenarios.test_process import job; "
        submit += "made = job(until=40, name='alone', journal=sys.argv[2]); "
        submit += "resume = sys.argv[3] if sys.argv[3:] else None; "
        submit += "served = ray_jobs.submit(made, address=sys.argv[1], resume=resume); "
        submit += "print(served.address, served.token, served.resumed)"
        journal = os.path.abspath("alone")
        out = subprocess.run(
            [sys.executable, "-c", submit, cluster.address, journal], capture_output=True, text=True
        )
        print(out.stdout.strip() or out.stderr.replace(chr(10), " "), flush=True)
        input()
        until(
            lambda: [j.taken for j in ray_jobs.jobs(cluster.address)] == [9]
        )  # the session hears of a step a moment after it was taken
        [found] = ray_jobs.jobs(cluster.address)
        print(found.name, found.state, found.taken, [p["node"] for p in found.workers], flush=True)
        ray_jobs.stop("alone", cluster.address)
        until(lambda: not any(runs(p["pid"]) for p in found.workers))
        print(ray_jobs.jobs(cluster.address), flush=True)
        lose_who_submitted(cluster.address, submit, journal)
        lose_the_head(cluster, calm)
        cluster.shutdown()


    def refuse(address):
        right, os.environ["RAY_AUTH_TOKEN"] = os.environ["RAY_AUTH_TOKEN"], "0" * 64
        start = time.monotonic()
        try:
            launch(job(), "ray", address=address)
        except ov.JobError as error:
            print(time.monotonic() - start < 20.0, error, flush=True)
        os.environ["RAY_AUTH_TOKEN"] = right
        try:
            ray_jobs.submit(job(name="late"), address=address, start_s=0.2)
        except ov.DataStall as error:
            print(error, flush=True)


    def lose_who_submitted(address, submit, journal):
        with ray_cluster.cluster(address):
            code = submit.replace("print(", "input(); print(")  # it never says what it was told
            submitter = subprocess.Popen(
                [sys.executable, "-c", code, address, journal, "auto"], stdin=subprocess.PIPE
            )
            until(lambda: [j.state for j in ray_jobs.jobs(address)] in (["starting"], ["running"]))
            submitter.kill()
            submitter.wait()
            until(lambda: [(j.state, j.taken) for j in ray_jobs.jobs(address)] == [("running", 9)])
            print(
                ray_cluster.ask(
                    ray_cluster.find_detached("alone"), "resumed", timeout_s=20, what="where it goes on"
                ),
                flush=True,
            )
            served = ray_jobs.served("alone", address)
            print(next(ov.connect(served.address, 0, token=served.token)).step, flush=True)
            ray_jobs.stop("alone", address)


    def lose_the_head(cluster, calm):
        got = {0: [], 1: []}
        session = launch(
            job(until=40, journal="journal"),
            "ray",
            address=cluster.address,
            hosts=1,
            sources_per_host=3,
        )
        clients, pids = [session.client(rank) for rank in range(2)], workers_of(session)

        def take(steps):
            for _ in range(steps):
                for rank, client in enumerate(clients):
                    got[rank].append(written(next(client)))

        take(5)
        if on_disk:
            cluster.head_node.kill_gcs_server()
        os.kill(pids["loader-worker/0"], 9)
        if on_disk:
            cluster.head_node.start_gcs_server()  # it finds its state on its disk
        take(10)
        print([r["part"] for r in session.metrics()["recoveries"]], flush=True)
        pids = workers_of(session)
        ray_head.TIMEOUTS = replace(ray_head.TIMEOUTS, head_s=2.0)
        cluster.head_node.kill_gcs_server()
        take(5)
        print(got == {rank: steps[:20] for rank, steps in calm.steps.items()}, flush=True)
        os.kill(pids["loader-worker/0"], 9)
        try:
            take(1000)
        except ov.ActorLost as error:
            print(error, flush=True)
        session.close()
        until(lambda: not any(runs(pid) for pid in pids.values()))
        again = run(job(until=40, journal="journal"), "process", resume="auto")
        print(
            again.steps == {rank: steps[len(got[rank]) :] for rank, steps in calm.steps.items()},
            flush=True,
        )
"""


@pytest.mark.timeout(300)
def test_workers_go_where_the_ranks_are_a_node_may_go_a_job_may_live_alone_and_the_head_may_go(
    calm: Played, tmp_path: Path
) -> None:
    with program(tmp_path, NODES) as there:
        assert "True launch: address: the cluster at '" in (said := there.line()), "at once"
        assert (
            "is not used: it rejects the token in RAY_AUTH_TOKEN, "
            "RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token" in said
        )
        assert there.line() == "waited 0.2 s for job 'late' to start (start_s sets the limit)"
        before = eval(there.line())
        assert before["constructor-worker/0"] == "gpu-0"
        assert before["constructor-worker/1"] == "gpu-1"
        assert {before["loader-worker/0"], before["loader-worker/1"]} == {"gpu-0", "gpu-1"}, (
            "half of four cores each, one for a constructor"
        )
        asked = eval(there.line())
        assert asked.pop("planner")["cores"] == 0.0
        assert set(asked) == set(before)
        assert {a["cores"] for a in asked.values()} == {1.0}, "there is room for all"
        assert min(a["memory"] for a in asked.values()) >= 2**27
        assert all(21000 <= int(port) < 21200 for port in eval(there.line()))
        assert there.line() == "True", "to the byte"
        assert set(eval(there.line()).values()) == {"gpu-0"}
        assert float(there.line()) < 14.0, (
            "with these health checks two seconds, with Ray's own fourteen; machines are noisy"
        )
        address, token = there.line().split()
        clients = [
            ov.connect(address, rank, token=token) for rank in range(2)
        ]  # this process has no Ray of that cluster
        from tests.processes import written

        got = {
            rank: [written(next(client)) for _ in range(1)] for rank, client in enumerate(clients)
        }
        for _ in range(9):
            for rank, client in enumerate(clients):
                got[rank].append(written(next(client)))
        assert got == {rank: steps[:10] for rank, steps in calm.steps.items()}
        there.say("go")
        assert there.line().startswith("alone running 9 [")
        assert there.line() == "[]"
        for client in clients:
            client.close()
        assert there.line().startswith(
            "continues with step 10: step 9 is the last that all ranks took"
        )
        assert there.line() == "10", (
            "who submitted died and said nothing: whoever reaches the cluster finds out "
            "how to connect"
        )
        assert there.line() == "['loader-worker/0']", "started when the head was there again"
        assert there.line() == "True", "a job goes on without the cluster's head"
        said = there.line()
        assert said.startswith("loader-worker/0 is lost: "), "until it needs it"
        assert "Ray head at " in said
        assert "resume the job from its journal on another cluster or runtime" in said
        assert there.line() == "True", "elsewhere it goes on from where it stood"
        assert there.end(60)[0] == 0
