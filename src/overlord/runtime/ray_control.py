"""Actors that Ray places, starts and watches. The only file that imports Ray.

Ray does what it is good at: it finds a machine, starts a process there, says when that ends, and gives it a name others can find. An actor
then comes back by a link of ours (``ray_actor.py``), and all that is said goes that way. So calls, errors and deadlines are those of
``peers.py``; here stands how an actor is started and how it ends. ``docs/ray.md`` has the settings, and what each of them avoids.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from overlord.errors import DataStall, JobError, OverlordError
from overlord.job import did_you_mean
from overlord.runtime.actor import ITSELF, factory_failed, open_reply
from overlord.runtime.control import HURRY_S, SHUT_DOWN, SHUTDOWN_S, Actors, Handle
from overlord.runtime.front import Hands
from overlord.runtime.machine import Machine, Networked
from overlord.runtime.options import n_cores
from overlord.runtime.peers import PeerRecord, Peers
from overlord.runtime.ray_actor import Body, Home

try:
    import ray
    from ray import exceptions
    from ray._private import worker as ray_worker
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError as missing:  # said where the runtime is asked for, with what to do
    raise JobError([f"runtime: 'ray' needs Ray, which cannot be imported ({missing}); pip install 'overlord[ray]'"], "launch") from missing

_raylet: Any = ray._raylet  # its stubs do not know all of it
log = logging.getLogger("overlord")

KILLED = "killed"
KILL_S = 8.0  # for Ray to say that an actor is gone
CUT_S = 1.0  # between the end of a link and Ray's word that the process died, in either order
MAX_IDLE = 16  # processes that wait for an actor of their name
STORE_BYTES = 80 * 2**20  # near the least that Ray takes: no payload passes through its store
FOLDER = "overlord-ray-"
# Ray's own settings, where nobody has said otherwise. Workers beside a busy trainer starve at Ray's niceness of 15. A driver that has lost
# its cluster's head ends the whole program after a minute: a trainer must not die of that.
SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "RAY_gcs_rpc_server_reconnect_timeout_s": "3600"}


# the cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What Ray is told of where an actor is to be."""

    num_cpus: float = 0.0
    memory: float | None = None
    resources: tuple[tuple[str, float], ...] = ()
    node: str | None = None  # its id

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.memory:
            found["memory"] = self.memory
        if self.resources:
            found["resources"] = dict(self.resources)
        if self.node:
            found["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=self.node, soft=False)
        return found


Key = tuple[str, str, Place]  # of a process: whose job, which actor, where


class Cluster:
    """The one cluster that this process is connected to, for as long as somebody holds it."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holders = 0
        self._ours = False  # whether it ends with us
        self.address: str | None = None
        self._folder: Path | None = None
        self._before: dict[str, str | None] = {}  # of the environment
        self._idle: list[tuple[Key, Any]] = []  # actors that have left, whose processes are there
        self._numbers = itertools.count(1)
        self._namespace = ""

    def hold(self, address: str | None) -> None:
        """Connect, or start one of this machine alone; a program that has connected already decides for us."""
        with self._lock:
            if self._holders == 0:
                self._ours = not ray.is_initialized()
                if self._ours:
                    self._begin(address)
                self.address = address
                self._namespace = secrets.token_hex(4)
            elif address is not None and address != self.address:
                now = self.address or "a cluster of this machine"
                raise JobError([f"address: {address!r} was asked for, but this process is connected to {now}: close that first"], "launch")
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
            while self._idle:
                _kill(self._idle.pop()[1])
            if self._ours:
                self._end()

    @property
    def far(self) -> bool:
        """Whether it may have other machines."""
        return not self._ours or self.address is not None

    def actor(self, key: Key) -> Any:
        """A process for an actor: of one of the same name that has left (a session that goes back starts all its parts again), or a new
        one. A name is used once: Ray keeps that of an actor that was killed for as long as somebody remembers it."""
        with self._lock:
            for i, (of, actor) in enumerate(self._idle):
                if of == key:
                    del self._idle[i]
                    return actor
            job, name, place = key
            named = {"name": f"{name}#{next(self._numbers)}", "namespace": f"overlord-{job}-{self._namespace}"}
        return ray.remote(Hosted).options(max_restarts=0, max_task_retries=0, **named, **place.options()).remote()

    def give_back(self, key: Key, actor: Any) -> None:
        """It left when it was asked to."""
        with self._lock:
            if self._holders and len(self._idle) < MAX_IDLE:
                self._idle.append((key, actor))
                return
        _kill(actor)

    def _begin(self, address: str | None) -> None:
        self._set(SETTINGS)
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "overlord"}
        try:
            if address is None:
                self._folder = _new_folder()
                self._set({"RAY_AUTH_MODE": "token"} | ({} if _has_token(named=True) else {"RAY_AUTH_TOKEN": secrets.token_hex(32)}))
                quiet |= {"num_cpus": n_cores(), "include_dashboard": False, "object_store_memory": STORE_BYTES}
                quiet |= {"_temp_dir": str(self._folder)}
            elif _has_token():  # Ray would not look for it where an address is given
                self._set({"RAY_AUTH_MODE": "token"})
            _raylet.Config.initialize("")  # the environment counts as it is now, though Ray may have been imported long ago
            _raylet.AuthenticationTokenLoader.instance().reset_cache()
            ray.init(address or "local", **quiet)
        except BaseException as fault:
            self._end()
            if isinstance(fault, Exception):
                raise JobError([f"{_cannot(address)}: {type(fault).__name__}: {str(fault)[:500]}"], "launch") from fault
            raise
        ray_worker.print_to_stdstream = _said_by_ray  # Ray prints a paragraph for every process that is killed

    def _end(self) -> None:
        ray_worker.print_to_stdstream = _prints
        ray.shutdown()
        for key, value in self._before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._before = {}
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _set(self, settings: Mapping[str, str]) -> None:
        for key, value in settings.items():
            if key not in os.environ:
                self._before[key] = None
                os.environ[key] = value


def _kill(actor: Any) -> None:
    with contextlib.suppress(Exception):  # it is gone already, or the cluster is
        ray.kill(actor, no_restart=True)


CLUSTER = Cluster()
_prints = getattr(ray_worker, "print_to_stdstream", None)


@contextlib.contextmanager
def cluster(address: str | None = None) -> Iterator[Cluster]:
    """Connected for as long as the block takes: control planes within it need not wait for a cluster to start."""
    CLUSTER.hold(address)
    try:
        yield CLUSTER
    finally:
        CLUSTER.release()


def _said_by_ray(data: Mapping[str, Any], *_: Any, **__: Any) -> None:
    log.debug("ray: %s", " ".join(map(str, data.get("lines", ()))))


def _has_token(*, named: bool = False) -> bool:
    """Whether there is a token, ``named`` by the environment."""
    by_name = any(os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return by_name or (not named and (Path.home() / ".ray" / "auth_token").exists())


def _cannot(address: str | None) -> str:
    if address is None:
        return "runtime: 'ray' could not start a cluster of this machine"
    return f"address: {address!r} could not be reached as a Ray cluster; wanted host:port of its head, and its token in RAY_AUTH_TOKEN_PATH"


def _new_folder() -> Path:
    """A folder of its own for a cluster: nothing that another one left behind is found there. Those of programs that were killed go."""
    root = Path(tempfile.gettempdir())
    for old in root.glob(f"{FOLDER}*"):
        pid = old.name.removeprefix(FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and old.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))


# actors


class Hosted(Body):
    """An actor's life in a process of Ray's."""

    def begin(self, home: Home, far: bool, code: bytes) -> int | None:
        """Code comes with the start, and is opened when it is known where its modules are."""
        return self.live(home, ray.util.get_node_ip_address() if far else "", lambda: ray.cloudpickle.loads(code))


class RayRecord(PeerRecord):
    """An actor that Ray started and that comes to us."""

    def __init__(self, name: str):
        super().__init__(name)
        self.actor: Any = None
        self.killed = self.leaving = self.spoiled = False  # spoiled: it did not close well


class RayControl(Peers):
    """Actors of a Ray cluster. Callbacks of futures and deaths run in threads of this class."""

    _kind = RayRecord

    def __init__(self, address: str | None = None, *, job: str = "overlord"):
        CLUSTER.hold(address)
        try:
            self.machine = Networked() if CLUSTER.far else Machine()
            super().__init__(end=self._end_by_name, cut=self._cut_off, machine=self.machine)
        except BaseException:
            CLUSTER.release()
            raise
        self._job = job
        self._news = Hands(1, "ray")  # what Ray says is heard in a thread of ours: in its own nothing may be asked of it
        self._home = {"address": self.address, "token": self.token, "path": tuple(p for p in sys.path if p)}
        self._far = CLUSTER.far

    # starting

    def spawn(
        self, factory: Callable[..., Any], *args: Any, name: str, resources: Mapping[str, float] | None = None, node: str | None = None
    ) -> Handle:
        return Actors.spawn(self, factory, *args, name=name, resources=resources, node=node)

    def _place(self, name: str, resources: Mapping[str, float], node: str | None) -> Place:
        wanted = {key: value for key, value in resources.items() if key not in ("cpus", "memory")}
        ids = None if node is None else _node_id(node, name)
        return Place(num_cpus=resources.get("cpus", 0.0), memory=resources.get("memory"), resources=tuple(sorted(wanted.items())), node=ids)

    def _start(self, record: PeerRecord, factory: Callable[..., Any], args: tuple[Any, ...]) -> Handle:
        assert isinstance(record, RayRecord)
        code = _pickled(record.name, factory, args)
        record.ticket = next(self._tickets)
        record.handle = Handle(record.name, None, record)
        self._by_ticket[record.ticket] = record
        here = {} if self._far else {"environ": dict(os.environ), "directory": os.getcwd()}
        home = Home(name=record.name, ticket=record.ticket, **here, **self._home)  # type: ignore[arg-type]
        try:
            record.actor = CLUSTER.actor((self._job, record.name, record.place))
            life = record.actor.begin.remote(home, self._far, code)
        except Exception as fault:
            self._by_ticket.pop(record.ticket, None)
            raise JobError([f"Ray cannot start it: {type(fault).__name__}: {str(fault)[:500]}"], f"actor {record.name!r}") from fault
        life.future().add_done_callback(lambda future: self._news.do(lambda: self._life_over(record, future)))
        return record.handle

    # ending

    def kill(self, handle: Handle) -> None:
        record = self._mine(handle)
        assert isinstance(record, RayRecord)
        if record.reason is None:
            self._kill(record)
            if not self._in_callback() and not record.gone.wait(KILL_S):
                raise DataStall(f"the process of actor {handle.name!r} to end after it was killed", KILL_S)

    def _kill(self, record: RayRecord) -> None:
        record.killed = True
        _kill(record.actor)

    def _in_callback(self) -> bool:
        return self._server.in_its_thread or self._news.is_me()

    def _end_by_name(self, name: str, ticket: int, why: str) -> None:
        if isinstance(record := self._by_ticket.get(ticket), RayRecord):
            self._kill(record)

    def _cut_off(self, name: str, ticket: int, why: str) -> None:
        """Its link ended: nearly always because its process did, which Ray tells by itself. One that lives is of no use."""
        self._after(CUT_S, lambda: self._end_by_name(name, ticket, why))

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, act)
        timer.daemon = True
        timer.start()

    def _life_over(self, record: RayRecord, future: Future[Any]) -> None:
        """Ray says that it is over. What the actor said before still counts: the end of its link says that all was read."""
        error = future.exception()
        code = None if error else future.result()
        if record.leaving and not record.killed and not record.spoiled and error is None and code is None:
            CLUSTER.give_back((self._job, record.name, record.place), record.actor)
        else:
            _kill(record.actor)
        reason = _reason(record, error, code)
        if (link := record.link) is not None:
            self._after(CUT_S, lambda: link.close("Ray says that it is gone"))  # of a machine that vanished no end would come
        self.died(record.ticket, reason, record.fault)

    def _ended(self, record: PeerRecord) -> None:
        assert isinstance(record, RayRecord)
        assert record.end is not None
        if record.leaving:
            self._over(record, SHUT_DOWN, quiet=True)
        elif record.fault is not None:
            self._over(record, factory_failed(record.fault), fault=record.fault)
        else:
            self._over(record, record.end[0])
        record.gone.set()

    def _message(self, link: Any, value: Any) -> None:
        match value:
            case (int(number), bytes(header), list(columns)) if number == ITSELF:
                self._of_itself(self._of_link[link], header, columns)
            case _:
                super()._message(link, value)

    def _of_itself(self, record: PeerRecord, header: bytes, columns: list[np.ndarray]) -> None:
        _, fault = open_reply(record.name, header, columns)
        if isinstance(record, RayRecord) and record.leaving:
            record.spoiled = True
            log.warning("actor %s did not close well: %s", record.name, fault)
        else:
            record.fault = fault

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> None:
        """Every actor finishes its calls, is closed and goes; one that has not at the deadline is killed."""
        if self._in_callback():
            raise OverlordError("shutdown waits for the thread that runs callbacks; call it from another thread")
        if not self._close_once():
            return
        deadline = time.monotonic() + timeout_s
        records = [r for r in self._living() if isinstance(r, RayRecord) and r.actor is not None]
        for record in records:
            record.leaving = True
            self._send(record, ITSELF, b"", [])
        late = [r for r in records if not r.gone.wait(max(0.0, deadline - time.monotonic()))]
        for record in late:
            log.warning("actor %s did not leave in %.1f s and was killed", record.name, timeout_s)
            self._kill(record)
        for record in late:
            record.gone.wait(HURRY_S)
            self._over(record, SHUT_DOWN, quiet=True)  # one that stands is ended by Ray in a few seconds
        self._server.close(HURRY_S)
        self._news.close()
        CLUSTER.release()


def _pickled(name: str, factory: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        pickled: bytes = ray.cloudpickle.dumps((factory, args))
    except Exception as fault:
        raise JobError([f"factory or arguments cannot be sent to another process: {fault}"], f"actor {name!r}") from fault
    return pickled


def _reason(record: RayRecord, error: BaseException | None, code: int | None) -> str:
    if record.killed:
        return KILLED
    if error is None:
        return f"exit code {code or 0}"
    if isinstance(error, exceptions.RayTaskError):
        return f"its process could not start it: {type(error.cause).__name__}: {error.cause}"
    said = str(error).strip().splitlines()
    return f"its process died: {said[-1][:300]}" if said else f"its process died: {type(error).__name__}"


def _node_id(node: str, actor: str) -> str:
    """A node by its name, address or id."""
    known: dict[str, str] = {}
    for found in ray.nodes():
        if found["Alive"]:
            known |= {str(found[key]): found["NodeID"] for key in ("NodeName", "NodeManagerAddress", "NodeID") if found.get(key)}
    if node in known:
        return known[node]
    if not CLUSTER.far:
        raise JobError([f"node {node!r} was asked for, but this runtime has one machine; leave node out"], f"actor {actor!r}")
    raise JobError([f"unknown node {node!r}{did_you_mean(node, known)}"], f"actor {actor!r}")
