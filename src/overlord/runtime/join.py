"""``join``: one call in every process of a torchrun job. One rank serves, the others connect: never one pipeline for each rank.

The address and the token travel by torchrun's own rendezvous, so nothing has to be set up. What goes wrong on the rank that
launches is told to all: nobody waits for a session that will never be.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import os
import socket
import sys
import time
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any

from overlord.channel.codec import decode, encode
from overlord.channel.frame import pack, unpack
from overlord.client.client import Client
from overlord.client.connect import connect
from overlord.errors import DataStall, JobError
from overlord.job import Job
from overlord.runtime.launch import launch

if TYPE_CHECKING:
    from overlord.runtime.session import Session

LOOK_S = 0.1  # between looks into the store: its own wait cannot be interrupted
HEARD_S = 10.0  # for all ranks to hear of a failure before the one who keeps the store goes
_calls = count()  # every rank joins the same jobs in the same order


def join(job: Job, *, rank: int | None = None, timeout_s: float = 600.0, leave_s: float = 60.0, **launch_options: Any) -> Client:
    """The client of this process's rank, under torchrun. Rank 0 launches the job and serves it, the others connect.

    ``WORLD_SIZE`` must be that of ``job.place``. The client of rank 0 has the session as ``client.session`` and ends it when it is
    closed, after the others have left (or ``leave_s``). ``timeout_s``: for rank 0 to launch. Without torchrun's environment the
    job is launched here, for one client. Between nodes the session binds to the address of ``MASTER_ADDR``, or ``OVERLORD_HOST``.
    """
    if not isinstance(job, Job):
        raise JobError([f"wanted a Job, found {type(job).__name__}"], "join")
    if "WORLD_SIZE" not in os.environ or "RANK" not in os.environ:
        session = launch(job, **launch_options)
        return _owning(session, session.client(rank or 0), 0.0)
    rank, world = _whole("RANK") if rank is None else rank, _whole("WORLD_SIZE")
    if world != job.place.world_size:
        raise JobError([f"place: wanted the {world} ranks of WORLD_SIZE, found {job.place.world_size} in {job.place}"], "join")
    if world == 1:
        session = launch(job, **launch_options)
        return _owning(session, session.client(0), 0.0)
    store = _Board(rank, world, timeout_s)
    if rank == 0:
        return _serve(job, store, leave_s, launch_options)
    said = store.read(timeout_s)
    if isinstance(said.get("error"), BaseException):
        raise said["error"]
    stalls = {name: launch_options[name] for name in ("stall_warn_s", "stall_limit_s", "on_stall") if name in launch_options}
    return connect(said["address"], rank, said["token"], **stalls)


def _serve(job: Job, store: _Board, leave_s: float, launch_options: dict[str, Any]) -> Client:
    session: Session | None = None
    try:
        host = _host()
        session = launch(job, **launch_options)
        client = session.client(0)
        served = session.serve(host=host)
    except BaseException as error:
        if session is not None:
            session.close()
        store.write({"error": error})
        store.wait_until_all_read(HEARD_S)
        raise
    store.write({"address": served.address, "token": served.token})
    return _owning(session, client, leave_s, store)


def _owning(session: Session, client: Client, leave_s: float, store: _Board | None = None) -> Client:
    """Closing this client ends the session, once nobody else needs it. Where rank 0 keeps the store, it lives as long."""
    client.session, leave = session, client._close

    def close(store: _Board | None = store) -> None:
        atexit.unregister(at_exit)
        leave()
        if not client._failed and session._serving is not None:
            session._serving.wait_until_left(leave_s)
        session.close()

    def at_exit() -> None:
        """A trainer that ends without a word must not take the steps of the others with it; one that failed goes at once."""
        client._failed = client._failed or getattr(sys, "last_value", None) is not None
        client.close()

    client._close = close
    atexit.register(at_exit)
    return client


class _Board:
    """Where rank 0 writes and the others read: torchrun's store, with a name of its own for every call and every restart."""

    def __init__(self, rank: int, world: int, timeout_s: float):
        self._world, self._store = world, _store(rank, world, timeout_s)
        self._key = f"overlord/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"

    def write(self, value: dict[str, Any]) -> None:
        self._store.set(self._key, b"".join(bytes(piece) for piece in pack(*encode(value))))

    def read(self, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while not self._store.check([self._key]):
            if time.monotonic() >= deadline:
                raise DataStall("rank 0 to launch the job and to say where it serves it", timeout_s)
            time.sleep(LOOK_S)
        frame = unpack(self._store.get(self._key))
        self._store.add(f"{self._key}/read", 1)
        said: dict[str, Any] = decode(frame.header, frame.columns)
        return said

    def left(self) -> None:
        """This rank needs the session no more, though it has no connection that would tell."""
        with contextlib.suppress(Exception):  # the store has gone, and with it whoever would wait
            self._store.add(f"{self._key}/left", 1)

    def wait_until_left(self, n: int, timeout_s: float) -> None:
        """Until so many ranks without a connection have left."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            while self._store.add(f"{self._key}/left", 0) < n and time.monotonic() < deadline:
                time.sleep(LOOK_S)

    def wait_until_all_read(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):  # the store has gone, and with it those who would read
            while self._store.add(f"{self._key}/read", 0) < self._world - 1 and time.monotonic() < deadline:
                time.sleep(LOOK_S)


def _store(rank: int, world: int, timeout_s: float) -> Any:
    """The store of the process group, or the one that torchrun offers: as ``env://`` finds it."""
    try:
        import torch.distributed as dist
    except ImportError as fault:
        raise JobError([f"the ranks of torchrun meet in torch's store, and torch cannot be imported: {fault}"], "join") from fault
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise JobError([f"{', '.join(missing)}: not set; start the processes with torchrun, or set them as it does"], "join")
    store, _, _ = next(dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s)))
    return store


def _whole(name: str) -> int:
    said = os.environ[name]
    if not said.isdecimal():
        raise JobError([f"{name}: wanted a whole number, found {said!r}"], "join")
    return int(said)


def _host() -> str:
    """Where to serve: on this machine only, unless ranks live on others."""
    if said := os.environ.get("OVERLORD_HOST"):
        return said
    if int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"]) >= int(os.environ["WORLD_SIZE"]):
        return "127.0.0.1"
    for name in (os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()):
        with contextlib.suppress(OSError, ValueError):
            found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
            if not ipaddress.ip_address(found).is_loopback and _is_here(found):
                return found
    raise JobError(
        ["ranks live on several nodes, and no address of this one was found that they can reach; set OVERLORD_HOST on rank 0"], "join"
    )


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
