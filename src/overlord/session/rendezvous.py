"""``join``: one call in every process of a distributed job. Rank 0 serves, the others connect.

Only rank 0 launches the job. The address and the token are sent through the store of
the process group, or through torchrun's rendezvous. When the launch fails on rank 0, all ranks
raise its error, and none waits for a session.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overlord.client.client import Client
from overlord.client.connect import connect
from overlord.client.world import START_GROUP, World, world_here
from overlord.errors import ActorLost, DataStall, JobError
from overlord.job.job import Job
from overlord.session.launch import launch
from overlord.setup.job_agreement import difference, parts_of
from overlord.transport.codec import decode, encode
from overlord.transport.frame import pack, unpack

if TYPE_CHECKING:
    from overlord.session.session import Session

log = logging.getLogger("overlord")

POLL_S = 0.1  # seconds between polls of the store, whose own wait cannot be interrupted
READ_ERROR_S = 10.0  # seconds for all ranks to read an error before the owner of the store exits
WARN_S = 30.0  # seconds between warnings with the reason of a wait, as in a client
MOST_LISTED = 16  # ranks that an error lists
# launch options that the client of each rank uses
STALLS = ("stall_warn_s", "stall_limit_s", "on_stall")
_calls = count()  # every rank joins the same jobs in the same order


def join(
    job: Job,
    *,
    rank: int | None = None,
    timeout_s: float = 600.0,
    leave_s: float = 60.0,
    **launch_options: Any,
) -> Client:
    """Return the client of this process's rank; rank 0 launches and serves the job.

    Rank and world size are those of ``torch.distributed`` where it is initialised, else ``RANK``
    and ``WORLD_SIZE``. The world size must be that of ``job.place``. A process without either
    launches the job for itself; its mesh has one rank, else the call is refused.

    The client of rank 0 has the session as ``client.session``. Its ``close`` ends the session after
    all other ranks have closed, or after ``leave_s`` seconds. ``timeout_s``: seconds for rank 0 to
    launch. A rank with another job than rank 0 is refused. Between nodes the session binds to the
    address of ``OVERLORD_HOST``, else of ``MASTER_ADDR``.
    """
    if not isinstance(job, Job):
        raise JobError([f"expected a Job, got {type(job).__name__}"], "join")
    here = checked_world(job)
    if here is None or here.size == 1:
        session = launch(job, **launch_options)
        return _owning(session, session.client(rank or 0), 0.0)
    rank, world = here.rank if rank is None else rank, here.size
    stalls = {name: launch_options[name] for name in STALLS if name in launch_options}
    store = _Board(rank, world, timeout_s, stalls)
    if rank == 0:
        return _serve(job, store, leave_s, launch_options)
    found = store.read()
    if isinstance(found.get("error"), BaseException):
        raise found["error"]
    if (differs := difference(job, rank, found["job"])) is not None:
        raise differs
    return connect(found["address"], rank, found["token"], **stalls)


def checked_world(job: Job) -> World | None:
    """Return the world of this process; raise ``JobError`` if the job's mesh does not fit it.

    None: this process is not part of a distributed job.
    """
    here, place = world_here("join"), job.place
    if here is not None and here.size != place.world_size:
        raise JobError(
            [
                f"place: expected the {here.size} ranks of {here.named}, got "
                f"{place.world_size} in {place}; give the job that mesh, "
                f"as ClientPlaceTree.from_env(world_size={here.size}) does. "
                "For a job of this process alone: overlord.launch(job), then session.client(rank)"
            ],
            "join",
        )
    if here is None and place.world_size > 1:
        raise JobError(
            [
                "place: expected one rank, since this process has neither a process "
                f"group nor RANK and WORLD_SIZE, got {place.world_size} in "
                f"{place}; {START_GROUP}. For all ranks in one process: overlord.launch(job), "
                "then session.client(rank)"
            ],
            "join",
        )
    return here


def _serve(job: Job, store: _Board, leave_s: float, launch_options: dict[str, Any]) -> Client:
    session: Session | None = None
    try:
        host, parts = serving_host(store), parts_of(job)
        session = launch(job, **launch_options)
        client = session.client(0)
        served = session.serve(host=host)
    except BaseException as error:
        if session is not None:
            session.close()
        store.write({"error": error})
        store.wait_until_all_read(READ_ERROR_S)
        raise
    store.write({"address": served.address, "token": served.token, "job": parts})
    return _owning(session, client, leave_s, store)


def _owning(
    session: Session, client: Client, leave_s: float, store: _Board | None = None
) -> Client:
    """Let the client end the session when it closes, after all other ranks have closed.

    Other ranks have ``leave_s`` seconds to close. ``store`` is kept open until then, since rank 0
    may own it.
    """
    client.session = session

    def close(detach: Callable[[], None], store: _Board | None = store) -> None:
        atexit.unregister(at_exit)
        detach()
        remote_ranks = session.internals.remote_ranks
        if not client.failed and remote_ranks is not None:
            remote_ranks.wait_until_left(leave_s)
        session.close()

    def at_exit() -> None:
        """Close at exit: other ranks still need their steps, unless this trainer failed."""
        if getattr(sys, "last_value", None) is not None:
            client.mark_failed()
        client.close()

    client.close_with(close)
    atexit.register(at_exit)
    return client


class _Board:
    """A store that rank 0 writes and the others read, with new keys for each call and restart."""

    def __init__(self, rank: int, world: int, timeout_s: float, stalls: Mapping[str, Any]):
        self._rank, self._world, self._deadline = rank, world, time.monotonic() + timeout_s
        # for the others to arrive after a launch that took the whole timeout
        self._least_s = min(READ_ERROR_S, timeout_s)
        self._warn_s, self._on_stall = (
            float(stalls.get("stall_warn_s", WARN_S)),
            stalls.get("on_stall"),
        )
        self._store = _store(rank, world, timeout_s)
        self._key = f"overlord/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"
        self._store.set(f"{self._key}/node/{rank}", _node())

    def write(self, value: dict[str, Any]) -> None:
        self._set(self._key, value)

    def read(self) -> dict[str, Any]:
        self._until(
            self._key, lambda: "rank 0 to launch the job and publish its address", self._deadline
        )
        found = self._get(self._key)
        self._store.add(f"{self._key}/read", 1)
        return found

    def wait_for_all(self, problem: str = "") -> None:
        """Wait for all ranks, before a collective operation that could not name a missing one.

        ``problem``: why this rank cannot continue; then all ranks raise an error.
        """
        wrong, arrived, gave_up = (f"{self._key}/{name}" for name in ("wrong", "came", "gave_up"))
        if self._store.check([gave_up]):
            raise JobError(
                [
                    f"rank {self._rank} joined after others gave up: "
                    f"{self._store.get(gave_up).decode()}; raise timeout_s"
                ],
                "join",
            )
        if problem:
            self._store.set(
                wrong, f"rank {self._rank} joined with another job than rank 0: {problem}"
            )
        self._store.set(f"{arrived}/{self._rank}", "")
        if self._store.add(arrived, 1) == self._world or problem:
            self._store.set(f"{self._key}/all", "")
        try:
            self._until(
                f"{self._key}/all",
                self._missing,
                max(self._deadline, time.monotonic() + self._least_s),
            )
        except DataStall as stall:
            self._store.set(gave_up, str(stall))
            raise
        if self._store.check([wrong]) and not problem:
            raise JobError([self._store.get(wrong).decode()], "join")

    def is_one_node(self) -> bool:
        """Return whether all ranks share a machine, by LOCAL_WORLD_SIZE, else by ``_node``."""
        if size := os.environ.get("LOCAL_WORLD_SIZE"):
            if not size.isdecimal():
                raise JobError(
                    [
                        f"LOCAL_WORLD_SIZE: expected a whole number, got {size!r}; unset "
                        "it, or let the launcher set the ranks of each node"
                    ],
                    "join",
                )
            return int(size) >= self._world
        for rank in range(self._world):
            self._until(f"{self._key}/node/{rank}", lambda: self._missing("node"), self._deadline)
        return (
            len({bytes(self._store.get(f"{self._key}/node/{rank}")) for rank in range(self._world)})
            == 1
        )

    def _missing(self, noted: str = "came") -> str:
        absent = [
            rank
            for rank in range(self._world)
            if not self._store.check([f"{self._key}/{noted}/{rank}"])
        ]
        return f"{ranks(absent)} to join; every rank must call join(), with the same job"

    def add_note(self, name: str, value: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):  # without the store no rank can read the note
            n = self._store.add(f"{self._key}/{name}", 1)
            self._set(f"{self._key}/{name}/{n}", value)

    def note(self, name: str, n: int) -> dict[str, Any] | None:
        """Return note ``n`` of this name; None if there is none, or if the store has failed."""
        with contextlib.suppress(Exception):
            if self._store.check([f"{self._key}/{name}/{n}"]):
                return self._get(f"{self._key}/{name}/{n}")
        return None

    def _set(self, key: str, value: dict[str, Any]) -> None:
        self._store.set(key, b"".join(bytes(piece) for piece in pack(*encode(value))))

    def _get(self, key: str) -> dict[str, Any]:
        frame = unpack(self._store.get(key))
        found: dict[str, Any] = decode(frame.header, frame.columns)
        return found

    def _until(self, key: str, reason: Callable[[], str], deadline: float) -> None:
        """Wait until the store has a key; log what is missing, and raise at the deadline."""
        start, warn_at = time.monotonic(), self._warn_s
        while not self._has(key):
            waited = time.monotonic() - start
            if time.monotonic() >= deadline:
                raise DataStall(reason(), waited, rank=self._rank)
            if waited >= warn_at:
                warn_at = waited + max(1.0, self._warn_s)
                self._warn(reason(), waited)
            time.sleep(POLL_S)

    def _has(self, key: str) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as fault:
            raise ActorLost(
                "the store of the process group",
                f"its owner (torchrun, or rank 0) has exited: {fault}",
            ) from fault

    def _warn(self, reason: str, seconds: float) -> None:
        if self._on_stall is not None:
            self._on_stall(reason, seconds)
        else:
            log.warning("rank %d has waited %.0f s for %s", self._rank, seconds, reason)

    def left(self) -> None:
        """Record in the store that this rank, which has no connection, has closed."""
        with contextlib.suppress(Exception):  # without the store no rank waits
            self._store.add(f"{self._key}/left", 1)

    def wait_until_left(self, n: int, timeout_s: float) -> None:
        """Wait until ``n`` ranks without a connection have closed."""
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            while self._store.add(f"{self._key}/left", 0) < n and time.monotonic() < deadline:
                time.sleep(POLL_S)

    def wait_until_all_read(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):  # without the store no rank reads
            while (
                self._store.add(f"{self._key}/read", 0) < self._world - 1
                and time.monotonic() < deadline
            ):
                time.sleep(POLL_S)


def ranks(some: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 1, 2", with at most 16 numbers."""
    listed = ", ".join(map(str, some[:MOST_LISTED])) + (
        f" and {len(some) - MOST_LISTED} more" if len(some) > MOST_LISTED else ""
    )
    return f"rank{'s' if len(some) != 1 else ''} {listed}"


def _store(rank: int, world: int, timeout_s: float) -> Any:
    """Return the store of the process group, else the one at MASTER_ADDR and MASTER_PORT."""
    try:
        import torch.distributed as dist
    except ImportError as fault:
        raise JobError(
            [f"expected torch, whose store connects the ranks, got: {fault}; install torch"], "join"
        ) from fault
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    start = time.monotonic()
    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]:
        raise JobError([f"{', '.join(missing)}: expected a value, got none; {START_GROUP}"], "join")
    try:
        store, _, _ = next(
            dist.rendezvous("env://", rank, world, timeout=timedelta(seconds=timeout_s))
        )
    except dist.DistError as fault:  # its text has only the sockets
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise DataStall(
            f"the {world} ranks of the world to connect to the store at {where}",
            time.monotonic() - start,
            rank=rank,
        ) from fault
    return store


def _node() -> str:
    """Return a text that identifies the machine and network namespace of this process."""
    found = [socket.gethostname()]
    with contextlib.suppress(OSError):
        found += [
            Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            str(os.stat("/proc/self/ns/net").st_ino),
        ]
    return " ".join(found)


def serving_host(board: _Board) -> str:
    """Return the address at which rank 0 serves.

    It is OVERLORD_HOST if set, loopback if all ranks are on one node, else one that other nodes can
    reach.
    """
    if host := os.environ.get("OVERLORD_HOST"):
        return host
    if board.is_one_node():
        return "127.0.0.1"
    for name in (os.environ.get("MASTER_ADDR", ""), socket.getfqdn(), socket.gethostname()):
        with contextlib.suppress(OSError, ValueError):
            found = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
            if not ipaddress.ip_address(found).is_loopback and _is_here(found):
                return found
    raise JobError(
        [
            "expected an address of this node that ranks on other nodes can reach, got only "
            "loopback addresses; set OVERLORD_HOST on rank 0"
        ],
        "join",
    )


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
