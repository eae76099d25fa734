"""A machine that vanishes closes no connection: its peers must not wait for that."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import overlord as ov
from overlord.cluster.launcher import Launcher
from overlord.errors import ActorLost
from overlord.rpc import peers
from overlord.rpc.actors import ActorHandle
from overlord.rpc.launched_actors import LaunchedActorSystem
from overlord.rpc.peers import RpcServer
from overlord.rpc.process_launcher import process_actors
from overlord.session.cluster_runtime import ClusterRuntime
from tests.actors import Sent, Worker
from tests.internals import launcher_of, lease_id_of, runtime_of
from tests.processes import (
    KILLED,
    WAIT_S,
    Played,
    halt,
    launch,
    left_after,
    play,
    run,
    workers_lost,
    workers_of,
)
from tests.scenarios.test_coordinator_process import planner_of
from tests.scenarios.test_process import APART, job

pytestmark = pytest.mark.timeout(4 * WAIT_S)

STEPS = 24
GETFD = 438  # the number of pidfd_getfd on every platform of Linux


@pytest.fixture(scope="module")
def alone() -> Played:
    return run(job(until=STEPS), "local")


# an actor system that started others


@pytest.fixture
def elsewhere() -> Iterator[LaunchedActorSystem]:
    with process_actors() as control:
        yield control


@pytest.fixture
def here() -> Iterator[RpcServer]:
    with RpcServer() as made:
        yield made


def sent(elsewhere: LaunchedActorSystem, here: RpcServer) -> tuple[ActorHandle, int]:
    """Return a worker that was started elsewhere and connected here, and its lease id."""
    there = elsewhere.spawn(Sent, "worker", Worker, (), name="worker")
    handle, ticket = here.expect("worker")
    elsewhere.tell(there, "meet", here.address, here.token, ticket)
    assert here.get(here.call(handle, "echo", "here"), WAIT_S) == "here"
    return handle, ticket


def test_one_that_is_said_to_have_died_is_lost_though_its_link_never_ends(
    elsewhere: LaunchedActorSystem, here: RpcServer
) -> None:
    """A suspended process sends nothing, like a lost machine."""
    handle, ticket = sent(elsewhere, here)
    told, came = list[str](), threading.Event()
    here.on_death(handle, lambda handle, reason: (told.append(reason), came.set()))  # type: ignore[func-returns-value]
    assert handle.pid is not None
    halt(handle.pid)
    answer = here.call(handle, "echo", "there")
    here.died(ticket, "its node is gone")
    assert came.wait(WAIT_S)
    assert (told, handle.alive) == (["its node is gone"], False)
    with pytest.raises(ActorLost, match="its node is gone"):
        here.get(answer, 0.0)
    here.kill(handle)  # does not wait
    here.expect("worker")  # its name is free


def test_what_is_on_its_way_is_heard_when_its_sender_is_said_to_have_died(
    elsewhere: LaunchedActorSystem, here: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, ticket = sent(elsewhere, here)
    assert handle.pid is not None
    halt(handle.pid)
    answer = here.call(handle, "echo", "last words")
    monkeypatch.setattr(peers, "TIMEOUTS", replace(peers.TIMEOUTS, death_notice_s=4 * WAIT_S))
    here.died(ticket, "its node is gone")
    os.kill(handle.pid, signal.SIGCONT)
    assert here.get(answer, WAIT_S) == "last words"
    assert handle.alive
    gone = threading.Event()
    here.on_death(handle, lambda handle, reason: gone.set())
    os.kill(handle.pid, signal.SIGKILL)
    assert gone.wait(WAIT_S), "the end of its link came by itself"


# a worker of a job


def kept(pid: int, peer: int) -> list[socket.socket]:
    """Return copies of the sockets that connect a process to another. While they exist no
    connection ends, whatever happens to the process, as if its machine had vanished.
    """
    libc, found = ctypes.CDLL(None, use_errno=True), []
    pidfd = os.pidfd_open(pid)
    try:
        for fd in [
            int(entry.name)
            for entry in Path(f"/proc/{pid}/fd").iterdir()
            if os.readlink(entry).startswith("socket:")
        ]:
            if (copy := libc.syscall(GETFD, pidfd, fd, 0)) < 0:
                pytest.skip(
                    "this machine lends nobody sockets of another process: "
                    f"{os.strerror(ctypes.get_errno())}"
                )
            sock = socket.socket(fileno=copy)
            ours = sock.family == socket.AF_UNIX and sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, 12
            )
            if ours and struct.unpack("3i", ours)[0] == peer:
                found.append(sock)
            else:
                sock.close()
    finally:
        os.close(pidfd)
    assert found, "it has no link there"
    return found


@contextlib.contextmanager
def vanished(session: ov.Session, name: str) -> Iterator[None]:
    """Kill a worker so that the coordinator sees no end of its connection."""
    pid = workers_of(session)[name]
    halt(pid)  # it opens and closes no file meanwhile
    links = kept(pid, planner_of(session))
    try:
        os.kill(pid, signal.SIGKILL)
        assert not left_after([pid], WAIT_S)
        yield
    finally:
        for link in links:
            link.close()


@pytest.mark.parametrize("name", ["loader-worker/0", "constructor-worker/0"])
def test_a_worker_whose_machine_vanished_is_started_again_by_a_coordinator_elsewhere(
    alone: Played, tmp_path: Path, name: str
) -> None:
    with (
        contextlib.ExitStack() as stack,
        launch(job(until=STEPS, journal=str(tmp_path)), **APART) as session,
    ):
        assert (
            play(session, act={5: lambda session: stack.enter_context(vanished(session, name))})
            == alone
        )
        assert [(row["part"], row["reason"]) for row in session.metrics()["recoveries"]] == [
            (name, KILLED)
        ]


def test_a_worker_that_is_to_be_killed_and_is_gone_already_is_known_to_be_dead(
    alone: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planner has not received its death notice and finds it silent. The launcher has nothing
    left to kill.
    """
    with (
        contextlib.ExitStack() as stack,
        launch(job(until=STEPS, journal=str(tmp_path)), lost_after_s=2.0, **APART) as session,
    ):
        runtime = runtime_of(session)
        assert isinstance(runtime, ClusterRuntime)
        launcher, missed = launcher_of(runtime), list[str]()

        def strike(session: ov.Session) -> None:
            tell_of_no_death(launcher, "loader-worker/0", missed, monkeypatch)
            stack.enter_context(vanished(session, "loader-worker/0"))

        assert play(session, act={5: strike}) == alone
        assert missed == [KILLED]
        reasons = [
            row["reason"]
            for row in session.metrics()["recoveries"]
            if row["part"] == "loader-worker/0"
        ]
        assert reasons
        assert [
            reason for reason in reasons if not reason.startswith("it answered nothing for ")
        ] == []


def tell_of_no_death(
    launcher: Launcher, name: str, missed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hold back the death notice of the current worker of this name, in the returned list."""
    tell, ours = launcher.control.tell, lease_id_of(launcher, name)

    def deaf(handle: ActorHandle, method: str, *args: Any) -> None:
        if method == "died" and args[0] == ours and not missed:
            missed.append(args[1])
        else:
            tell(handle, method, *args)

    monkeypatch.setattr(launcher.control, "tell", deaf)


@pytest.mark.parametrize("with_planner", [False, True], ids=["hosts", "hosts and planner"])
def test_workers_that_are_silent_are_killed_at_the_same_time(
    alone: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_planner: bool
) -> None:
    """If their machine is silent too, each takes as long as the deadline of a kill."""
    with launch(job(until=STEPS, journal=str(tmp_path)), lost_after_s=2.0, **APART) as session:
        runtime = runtime_of(session)
        assert isinstance(runtime, ClusterRuntime)
        silent, kill = (
            {"loader-worker/0", "constructor-worker/0"},
            launcher_of(runtime).control.kill,
        )
        all_there, stopped = threading.Barrier(len(silent), timeout=WAIT_S), set[int]()

        def waits_for_the_others(handle: ActorHandle) -> None:
            if handle.name in silent and handle.pid in stopped:
                all_there.wait()
            kill(handle)

        monkeypatch.setattr(launcher_of(runtime).control, "kill", waits_for_the_others)

        def strike(session: ov.Session) -> None:
            stopped.update(pid for name, pid in workers_of(session).items() if name in silent)
            for pid in stopped:
                halt(pid)
            if with_planner:
                os.kill(planner_of(session), signal.SIGKILL)

        assert play(session, act={5: strike}) == alone
        assert not all_there.broken
        hit = silent | ({"planner"} if with_planner else set())
        assert workers_lost(session.metrics()["recoveries"], hit) == hit
