"""The Ray cluster that this process is connected to. The only file that imports Ray: what the rest
wants of it has words here.

``docs/ray.md`` has the settings, and what each of them avoids.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import secrets
import signal
import socket
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from overlord.checks import did_you_mean
from overlord.concurrency.platform import NODE
from overlord.errors import ActorLost, DataStall, JobError, OverlordError
from overlord.extras import pip_install
from overlord.import_path import FirstHere
from overlord.process.malloc import system_pool
from overlord.ray.auth import (
    MODE,
    Unwelcome,
    asks_for_token,
    check_folder,
    check_joined,
    check_own_refused,
    check_token,
    is_refused,
    reach,
    same_head,
    token_named,
    warn,
)
from overlord.ray.folder import Folder, Terminated, environment_kept
from overlord.ray.head import Head
from overlord.ray.node_choice import Node
from overlord.ray.placement import RayPlace
from overlord.ray.raylet_exit import not_waited_for
from overlord.ray.versions import check_version
from overlord.ray.worker import ActorBody, Home
from overlord.ray.worker_logs import WorkerOutput
from overlord.setup.options import n_cores

try:
    with environment_kept():
        import ray

        check_version(str(ray.__version__))  # before what other versions may not have
        from ray import exceptions
        from ray._private import ray_constants
        from ray._private import state as ray_state
        from ray._private import worker as ray_worker
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:  # said where the runtime is asked for, with what to do
    raise JobError(
        [f"runtime: 'ray' needs Ray, which cannot be imported ({missing}); {pip_install('ray')}"],
        "launch",
    ) from missing

_raylet: Any = ray._raylet  # its stubs do not know all of it
log = logging.getLogger("overlord")
if (
    sys.excepthook is ray_worker.custom_excepthook
):  # it tells the head of an exception first: where that is gone, an hour later
    sys.excepthook = ray_worker.normal_excepthook

DIED = "its process died without a word: it was killed, crashed or ran out of memory"
GONE = "it is gone with its node, or before Ray could say how"
UNAVAILABLE = "it cannot be reached: its process stands still, or its node is away"
MAX_IDLE = 16  # processes that wait for an actor of their name
STORE_BYTES = 80 * 2**20  # near the least that Ray takes: no payload passes through its store
PING_S = 2.0  # for the head to answer
HOLD_S = (
    120.0  # for what others asked of Ray to come to an end: a start may have to wait for the head
)
END_S = 15.0  # for what is under way in Ray, when the last holder leaves
DEAF_S = 8.0  # for the Ray of this node to say that this process may leave it
OWN = (
    "CPU",
    "GPU",
    "memory",
    "object_store_memory",
)  # resources that Ray counts by itself; all others have the names somebody gave them
KEPT = "overlord-jobs"  # the namespace of jobs that live on by themselves
ALIVE = 0  # of a node, as the head has it
NOBODYS = "00" * 27 + "01"  # the id of no cluster
# Ray's own settings, where nobody has said otherwise. Workers beside a busy trainer starve at Ray's
# niceness of 15. A driver that has lost
# its cluster's head ends the whole program after a minute: a trainer must not die of that. Up to
# 2.55 Ray hides GPUs from actors that ask
# for none, and warns at every start that later versions do not; the last setting makes all versions
# alike.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_prints = ray_worker.print_to_stdstream


class Hosted(ActorBody):
    """An actor's life in a process of Ray's."""

    def begin(self, home: Home, far: bool, code: bytes) -> int | None:
        """Code comes with the start, and is opened when it is known where its modules are."""
        os.environ[NODE] = node_here()
        worker = ray_worker.global_worker
        words = WorkerOutput.into(here(), (worker.get_err_file_path(), worker.get_out_file_path()))
        return self.live(home, here() if far else "", lambda: opened(code), words)


def actor_of(place: RayPlace, **named: str) -> Any:
    """What Ray makes actors of; what it does not take is said here."""
    found = place.options() | named
    if place.node:
        found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            node_id=place.node, soft=False
        )
    return _hosted().options(**found)


@functools.cache
def _hosted() -> Any:
    """Made once: Ray writes every class of actors to its head, and waits for that."""
    return ray.remote(Hosted)


def _ping() -> None:
    client = ray_worker.global_worker.gcs_client
    host, _, port = client.address.rpartition(":")
    socket.create_connection(
        (host, int(port)), PING_S
    ).close()  # where nobody listens this is known at once
    client.internal_kv_keys(b"overlord", None, timeout=PING_S)


Key = tuple[str, str, RayPlace]  # of a process: whose job, which actor, where


class Cluster:
    """One at a time, for as long as somebody holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._owed: deque[None] = (
            deque()
        )  # one for each that left and is not counted yet: Ray may hang, or somebody interrupt it
        self.trusted = False  # whoever sent us here has looked whether it asks for a token
        self._terminated = Terminated()
        self._ours = False  # whether it ends with us
        self._up = False  # whether there is anything to end
        self.address: str | None = None
        self._folder: Folder | None = None
        self._set_here: list[str] = []  # what we have put into the environment
        self._idle: list[
            tuple[Key, Any, int]
        ] = []  # actors that have left, whose processes are there; their ids, on this machine
        self._numbers = itertools.count(1)
        self._pid = 0  # a forked copy of this process has no part in it
        self._run = ""  # tells the names of one connection from those of another
        self._head = Head("", _ping)
        self._nodes: list[Node] = []  # as they were when the head last answered

    def hold(self, address: str | None) -> None:
        """Connect, or start one of this machine alone; a program that has connected already decides
        for us.
        """
        with self._held("what another session asked for to come to an end"):
            if self._holders == 0:
                self._ours = not ray.is_initialized()
                self._up = True
                if self._ours:
                    self._begin(address)
                else:
                    _refuse_another(address, head_now(), "by a ray.init of its own")
                    shows = _raylet.get_authentication_mode() == _raylet.AuthenticationMode.TOKEN
                    if not shows or not (self.trusted or asks_for_token(head_now())):
                        check_own_refused()
                self.address, self._run, self._pid = address, secrets.token_hex(4), os.getpid()
                self._head, self._nodes = Head(head_now(), _ping), []
            else:
                _refuse_another(address, self._head.address, "for another session")
            self._holders += 1

    def release(self) -> None:
        self.leave()
        self.settle()

    def leave(self) -> None:
        """One who holds it says so, once; it never waits, and nothing ends yet."""
        if os.getpid() == self._pid:
            self._owed.append(None)

    def settle(self) -> None:
        """What nobody holds any more ends; also what was interrupted when it should have."""
        if os.getpid() != self._pid:
            return
        if not self._lock.acquire(
            timeout=END_S
        ):  # Ray has hung in a start: to wait for it would hang whoever closes a session
            log.warning(
                "Ray did not come to an end with what it was asked for in %g s, and is "
                "left as it is",
                END_S,
            )
            return
        try:
            self._settle()
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _held(self, what: str) -> Iterator[None]:
        """The lock, with who has left counted."""
        if not self._lock.acquire(timeout=HOLD_S):
            raise DataStall(f"Ray: {what}", HOLD_S)
        try:
            self._settle()
            try:
                yield
            finally:
                self._settle()
        finally:
            self._lock.release()

    def _settle(self) -> None:
        while self._owed:
            self._owed.pop()
            self._holders -= 1
        if self._up and not self._holders:
            self._leave()
            self._up = False

    def _leave(self) -> None:
        while self._idle:
            _, actor, pid = self._idle.pop()
            end_process(
                actor,
                pid,
                # also by its number: Ray does nothing without its head, nor where the raylet stands
                # still
            )
        if self._ours:
            self._end()

    @property
    def far(self) -> bool:
        """Whether it may have other machines."""
        return not self._ours or self.address is not None

    # actors

    def start(
        self, key: Key, home: Home, code: bytes, wanted: Callable[[], bool]
    ) -> tuple[Any, Future[Any], bool] | None:
        """An actor, its life, which is done when that is over, and whether its process waited for
        it; None: nobody wants it any more. Waits for the head. Under the lock: Ray starts a cluster
        for who asks when it is gone.
        """
        if not self._head.wait(wanted):
            return None
        with self._held(f"{key[1]} to be started, behind others"):
            if not self._holders:
                raise OverlordError("the cluster was released")
            actor, waited = self._process(key)
            life: Future[Any] = actor.begin.remote(home, self.far, code).future()
        return actor, life, waited

    def _process(self, key: Key) -> tuple[Any, bool]:
        """Of an actor of the same name that has left (a session that goes back starts all its parts
        again), or a new one. A name is used once: Ray keeps that of an actor that was killed for as
        long as somebody remembers it.
        """
        for i, (of, actor, _) in enumerate(self._idle):
            if of == key:
                del self._idle[i]
                return actor, True
        job, name, place = key
        if place.num_cpus:  # it would wait for what those have that wait for it
            self._make_room(place.node)
        named = {
            "name": f"{name}#{next(self._numbers)}",
            "namespace": f"overlord-{job}-{self._run}",
        }
        return actor_of(place, **named).remote(), False

    def _make_room(self, node: str | None) -> None:
        for entry in [e for e in self._idle if e[0][2].num_cpus and node in (None, e[0][2].node)]:
            self._idle.remove(entry)
            kill(entry[1])

    def give_back(self, key: Key, actor: Any, pid: int) -> None:
        """It left when it was asked to."""
        if self._lock.acquire(timeout=END_S):
            try:
                if self._holders and len(self._idle) < MAX_IDLE:
                    self._idle.append((key, actor, pid))
                    return
            finally:
                self._lock.release()
        end_process(actor, pid)

    def has_process(self, actor: Any) -> bool | None:
        """Whether Ray has found a process for it; one for which its node has no room has none.
        None: the head is away.
        """
        return (
            bool(ray_state.actors(actor._actor_id.hex()).get("Address", {}).get("Port"))
            if self._head.answers()
            else None
        )

    def nodes(self) -> list[Node]:
        """Those that live, and what they have left; while the head is away, those that lived
        before.
        """
        if self._head.answers() or (not self._nodes and self._head.wait()):
            self._look_at_nodes()
        return self._nodes

    def _look_at_nodes(self) -> None:
        """Ask Ray under the lock, since every call of Ray starts a cluster where none is connected.
        Keep the nodes known before where the lock is taken.
        """
        if self._lock.acquire(timeout=PING_S if self._nodes else HOLD_S):
            try:
                if self._holders > len(self._owed):
                    self._nodes = [self._with_idle(node) for node in _living_nodes()]
            finally:
                self._lock.release()

    def _with_idle(self, node: Node) -> Node:
        """What processes have that wait for an actor is there for the next one."""
        waiting = [place for (_, _, place), _, _ in list(self._idle) if place.node == node.id]
        cores, memory, more = (
            sum(p.num_cpus for p in waiting),
            sum(p.memory or 0.0 for p in waiting),
            dict(node.idle_resources),
        )
        for key, value in (pair for place in waiting for pair in place.resources):
            more[key] = more.get(key, 0.0) + value
        return replace(
            node,
            idle_cores=node.idle_cores + cores,
            idle_memory=node.idle_memory + memory,
            idle_resources=more,
        )

    def node_id(self, node: str, actor: str) -> str:
        """A node by its name, address or id."""
        known = self.nodes()
        for found in known:
            if found.is_called(node):
                return found.id
        if not self.far:
            raise JobError(
                [f"node {node!r} was asked for, but this runtime has one machine; leave node out"],
                f"actor {actor!r}",
            )
        raise JobError(
            [f"unknown node {node!r}{did_you_mean(node, [n.name for n in known])}"],
            f"actor {actor!r}",
        )

    # connecting

    def _begin(self, address: str | None) -> None:
        self._set(SETTINGS)
        settings: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": logging.ERROR,
            "namespace": "overlord",
        }
        settings["job_config"] = config = ray.job_config.JobConfig()
        config._py_driver_sys_path = FirstHere()
        try:
            refused = is_refused()
            self._set({MODE: "token"})
            if address is None:
                if refused:
                    warn(
                        "the cluster of this machine that is started", "every user of this machine"
                    )
                self._folder = Folder()
                self._set({} if token_named() else {"RAY_AUTH_TOKEN": secrets.token_hex(32)})
                settings |= {
                    "num_cpus": n_cores(),
                    "include_dashboard": False,
                    "object_store_memory": STORE_BYTES,
                }
                settings |= {"_temp_dir": str(self._folder.for_ray)}
            else:
                reach(address)
                _as_it_is_now()
                check_token(_has_token, lambda with_token: _lets_in(address, with_token))
                _as_it_is_now()
                check_joined(_nodes_at(address), address)
            _as_it_is_now()
            # The pool is for workers: Ray loads Arrow in them before they do anything of ours.
            with (
                environment_kept(),
                system_pool(),
                _loopback() if address is None else contextlib.nullcontext(),
            ):
                self._terminated = Terminated()
                try:
                    ray.init(address or "local", **settings)
                finally:
                    self._terminated.keep()
        except BaseException as fault:
            self._end()
            if isinstance(fault, Exception):
                raise JobError([_cannot(address, fault)], "launch") from fault
            raise
        ray_worker.print_to_stdstream = (
            _said_by_ray  # Ray prints a paragraph for every process that is killed
        )

    def _end(self) -> None:
        try:
            if self.address is None:
                _wake_own()
            with not_waited_for(_socket_of_node(), DEAF_S):
                try:
                    ray.shutdown()
                except (
                    BaseException
                ):  # Ctrl-C: half of a cluster would stay for as long as the program lives
                    ray.shutdown()
                    raise
        finally:
            self._terminated.restore()
            ray_worker.print_to_stdstream = _prints
            while self._set_here:
                os.environ.pop(self._set_here.pop(), None)
            # else a ray.init of the program's own has the mode of this cluster, and not its token
            _as_it_is_now()
            if self._folder is not None:
                self._folder.remove()
                self._folder = None

    def _set(self, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            if key not in os.environ:
                self._set_here.append(key)
                os.environ[key] = value


CLUSTER = Cluster()


@contextlib.contextmanager
def cluster(address: str | None = None) -> Iterator[Cluster]:
    """Connected for as long as the block takes: control planes within it need not wait for a
    cluster to start.
    """
    CLUSTER.hold(address)
    try:
        yield CLUSTER
    finally:
        CLUSTER.release()


def _living_nodes() -> list[Node]:
    idle = ray_state.available_resources_per_node()
    return [_node(found, idle.get(found["NodeID"], {})) for found in ray.nodes() if found["Alive"]]


def _node(found: Mapping[str, Any], idle: Mapping[str, Any]) -> Node:
    given = {
        key: float(value)
        for key, value in found["Resources"].items()
        if key not in OWN and not key.startswith("node:")
    }
    return Node(
        id=found["NodeID"],
        name=found.get("NodeName", ""),
        address=found.get("NodeManagerAddress", ""),
        labels=found.get("Labels", {}),
        idle_cores=float(idle.get("CPU", 0.0)),
        idle_memory=float(idle.get("memory", 0.0)),
        resources=given,
        idle_resources={key: float(idle.get(key, 0.0)) for key in given},
    )


def _wake_own() -> None:
    """One that was stopped would be killed where it stands, and what it started would live on for a
    minute.
    """
    for started in (
        ray_worker._global_node.all_processes.values() if ray_worker._global_node else ()
    ):
        for one in started:
            with contextlib.suppress(OSError):
                os.kill(one.process.pid, signal.SIGCONT)


def _socket_of_node() -> str:
    """Of the Ray of this node, to which this process is connected."""
    return str(ray_worker._global_node.raylet_socket_name) if ray_worker._global_node else ""


def warn_if_exposed() -> None:
    """Warn where other accounts of this machine can replace the sockets of the Ray that this
    process uses.
    """
    check_folder(_socket_of_node())


def kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it is gone already, or the cluster is
        if ray.is_initialized():
            ray.kill(actor, no_restart=True)


def end_process(actor: Any, pid: int) -> None:
    """For good. ``pid``: of this machine, or 0. Ray asks a process to go, gives one that stands
    still five seconds, and needs its head.
    """
    kill(actor)
    with contextlib.suppress(OSError):
        if pid and Path(f"/proc/{pid}/cmdline").read_bytes().startswith(
            b"ray::"
        ):  # and not another one that has its number by now
            os.kill(pid, signal.SIGKILL)


def pickled(name: str, code: tuple[Any, ...]) -> bytes:
    """Code for another process; what is defined in the program's main file travels with it."""
    try:
        found: bytes = ray.cloudpickle.dumps(code)
    except Exception as fault:
        raise JobError(
            [f"factory or arguments cannot be sent to another process: {fault}"], f"actor {name!r}"
        ) from fault
    return found


def opened(code: bytes) -> tuple[Any, ...]:
    """Only of what came with the start of a process."""
    found: tuple[Any, ...] = ray.cloudpickle.loads(code)
    return found


def here() -> str:
    """The address of this node."""
    return str(ray.util.get_node_ip_address())


def node_here() -> str:
    """Its id."""
    return str(ray.get_runtime_context().get_node_id())


# jobs that nobody waits for


def keep(factory: type, name: str) -> Any:
    """An actor that lives on when this process goes. Its calls run side by side."""
    options: dict[str, Any] = {
        "name": name,
        "namespace": KEPT,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_concurrency": 4,
        "num_cpus": 0,
    }
    try:
        return ray.remote(factory).options(**options).remote(name)
    except exceptions.ActorAlreadyExistsError:
        raise JobError(
            [f"a job called {name!r} has just been submitted to this cluster by somebody else"],
            "submit",
        ) from None


def kept() -> list[str]:
    return sorted(
        found["name"]
        for found in ray.util.list_named_actors(all_namespaces=True)
        if found["namespace"] == KEPT
    )


def kept_by(name: str) -> Any:
    """None: it was there a moment ago, and is stopped now."""
    try:
        return ray.get_actor(name, namespace=KEPT)
    except ValueError:
        return None


def ask(actor: Any, method: str, *args: Any, timeout_s: float, what: str) -> Any:
    """An answer that comes through Ray: for words that are said once. The errors are those of the
    method.
    """
    try:
        return ray.get(getattr(actor, method).remote(*args), timeout=timeout_s)
    except exceptions.GetTimeoutError:
        raise DataStall(what, timeout_s) from None
    except exceptions.RayTaskError as fault:
        raise (
            fault.cause
            if isinstance(fault.cause, OverlordError)
            else OverlordError(f"{type(fault.cause).__name__}: {fault.cause}")
        ) from None
    except exceptions.RayError as fault:
        raise ActorLost(actor_name(actor), reason_of(fault)) from None


def actor_name(actor: Any) -> str:
    return f"the actor {actor._actor_id.hex()}"


def has_no_process(error: BaseException | None) -> bool:
    """Whether Ray says this of an actor whose process is gone, and not of one that failed."""
    return isinstance(error, exceptions.RayActorError)


def reason_of(error: BaseException) -> str:
    """Why an actor is no more, in a line: Ray says it in a paragraph."""
    if isinstance(error, exceptions.RayTaskError):
        return f"its process could not start it: {type(error.cause).__name__}: {error.cause}"
    if isinstance(error, exceptions.ActorUnavailableError):
        return UNAVAILABLE
    said = " ".join(" ".join(str(error).strip().splitlines()[-1:]).split())
    if (
        "unexpectedly exits with a connection error" in said
    ):  # all that Ray knows of a signal, a crash or os._exit
        return DIED
    if "never ran" in said:  # what Ray says of an actor that did, when its node is gone
        return GONE
    return (
        "its process died: "
        f"{textwrap.shorten(said, 300, placeholder=' ...') or type(error).__name__}"
    )


def _said_by_ray(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
    log.debug("ray: %s", " ".join(map(str, data.get("lines", ()))))


def _as_it_is_now() -> None:
    """The environment counts as it is now, though Ray may have read it long ago."""
    _raylet.Config.initialize("")
    _raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def _loopback() -> Iterator[None]:
    """A cluster that is started meanwhile listens on loopback only, by Ray's own way for systems
    where it has no clusters of several machines. Else its processes listen on all interfaces, and
    127.0.0.1 as its address is replaced by that of the default route.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _has_token() -> bool:
    try:
        return bool(_raylet.AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))
    except exceptions.AuthenticationError as fault:  # a file that is named, and not there
        raise Unwelcome(str(fault).partition(". ")[0]) from fault


def _lets_in(address: str, with_token: bool) -> bool:
    """Whether the head answers who shows the token that is found here, or nothing. It looks at
    tokens first and then at the id of its cluster: that one was made up is what it says to whom it
    lets in. Ray itself would try for twenty seconds.
    """
    with environment_kept():
        if not with_token:
            os.environ[MODE] = "disabled"
        _as_it_is_now()
        try:
            _raylet.GcsClient(address=address, cluster_id=NOBODYS).internal_kv_keys(
                b"overlord", None, timeout=PING_S
            )
        except exceptions.AuthenticationError as fault:
            return "InvalidAuthToken" not in str(fault)
    return True


def _nodes_at(address: str) -> list[tuple[str, str]]:
    """Addresses and sockets of the nodes of a cluster that live. Ray looks for one of this machine
    for a minute.
    """
    found = _raylet.GcsClient(address=address).get_all_node_info(timeout=PING_S)
    return [
        (node.node_manager_address, node.raylet_socket_name)
        for node in found.values()
        if node.state == ALIVE
    ]


def head_now() -> str:
    """The address of the head, as this process knows it."""
    return str(ray.get_runtime_context().gcs_address)


def _is_connected_to(address: str) -> bool:
    """One head may have several addresses, as that of a service before it: the cluster's id
    tells.
    """
    try:
        reach(address)
        there, here = (
            _raylet.GcsClient(address=address).cluster_id,
            ray_worker.global_worker.gcs_client.cluster_id,
        )
    except Exception:  # nobody is there, or lets us in
        return False
    return bool(there == here)


def _refuse_another(address: str | None, now: str, why: str) -> None:
    """A process is connected to one cluster at a time."""
    if address is not None and not same_head(address, now) and not _is_connected_to(address):
        words = (
            f"address: {address!r} was asked for, but this process is connected to the "
            f"cluster at {now!r}, {why}"
        )
        raise JobError([f"{words}; close that first, or leave address out"], "launch")


def _cannot(address: str | None, fault: Exception) -> str:
    words = (
        str(fault)
        if isinstance(fault, (Unwelcome, OverlordError))
        else f"{type(fault).__name__}: {str(fault)[:500]}"
    )
    if address is None:
        return f"runtime: 'ray' could not start a cluster of this machine: {words}"
    if isinstance(fault, Unwelcome):
        return f"address: the cluster at {address!r} is not used: {words}"
    return (
        f"address: {address!r} could not be reached as a Ray cluster; expected host:port of its "
        f"head: {words}"
    )
