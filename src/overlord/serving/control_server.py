"""The control server of a session: it answers the requests of clients in other processes.

One server thread reads all connections and must not block. ``N_THREADS`` other threads answer
requests. One more thread answers why a client waits, even while all others are busy.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

from overlord.client.client import State, StepQueue
from overlord.concurrency.event_loop import ThreadQueue
from overlord.constructor.build import BucketBatch
from overlord.errors import ActorLost, DataStall, OverlordError
from overlord.messages.control import Report, SentReport
from overlord.messages.data import StepInfo
from overlord.serving.session_api import SessionApi, call
from overlord.serving.step_publisher import StepPublisher
from overlord.transport.server import Server
from overlord.transport.server_connection import ServerConnection
from overlord.transport.shared_memory import SharedMemoryPool

log = logging.getLogger("overlord")

N_THREADS = 4  # threads that answer requests
CLOSE_S = 0.5  # seconds for errors to be sent before all connections are closed


class ControlServer:
    """The server of control connections. Data connections go to ``publisher``, if there is one."""

    def __init__(
        self,
        api: SessionApi,
        publisher: StepPublisher | None,
        *,
        prefetch: int,
        token: str,
        host: str,
        port: int,
        pool: SharedMemoryPool | None,
    ):
        self._api, self._publisher = api, publisher
        self.session_id = secrets.token_hex(8)  # a client must reconnect to the same session
        self._ranks: dict[ServerConnection, int] = {}  # of control connections
        # connections of ranks that take no steps here: another rank fetches their steps
        self._broadcast: set[ServerConnection] = set()
        self._lock = threading.Lock()
        self._n_clients = itertools.count(1)
        self._threads, self._why_thread = ThreadQueue(N_THREADS, "control"), ThreadQueue(1, "why")
        self._server = Server(
            token=token,
            on_open=self._opened,
            on_message=self._message,
            on_close=self._closed,
            pool=pool,
            host=host,
            port=port,
            hold=prefetch,
        )
        self.address = self._server.address

    # callbacks; run on: server thread

    def _opened(self, link: ServerConnection, hello: dict[str, Any]) -> dict[str, Any]:
        rank, role = hello.get("rank"), hello.get("role")
        if role == "client" and self._publisher is not None:
            return self._publisher.opened(link, hello)
        if role not in ("control", "served") or type(rank) is not int:
            raise OverlordError(
                f"control server: expected a hello with role 'control' and a rank, got "
                f"{hello!r:.100}; run the same version in all processes"
            )
        if role == "served":
            self._api.admit_broadcast(rank)
            with self._lock:
                self._ranks[link] = rank
                self._broadcast.add(link)
            return self._welcome()
        self._api.admit(rank)
        with self._lock:
            former = [
                other
                for other, r in self._ranks.items()
                if r == rank and other not in self._broadcast
            ]
            self._ranks[link] = rank
            for other in former:
                del self._ranks[other]
        for other in former:
            words = (
                f"rank {rank}: another client of this rank connected, and this one was "
                "disconnected; run one client per rank"
            )
            log.warning("control connection replaced: %s", words)
            _close_with(other, OverlordError(words))
        self._api.connected(rank, link.peer)
        return self._welcome()

    def _welcome(self) -> dict[str, Any]:
        """Return the session, its use of reports, and a number of this connection.

        The number distinguishes the clients that a rank has one after the other.
        """
        settings = self._api.report_settings
        return {"session": self.session_id, "client": next(self._n_clients), **settings}

    def _message(self, link: ServerConnection, value: Any) -> None:
        rank = self._ranks.get(link)
        if rank is None:
            if self._publisher is not None:
                self._publisher.message(link, value)
            return
        if (
            not isinstance(value, dict)
            or type(value.get("id")) is not int
            or not isinstance(value.get("ask"), str)
        ):
            raise OverlordError(
                f"rank {rank}: expected a request with 'ask' and 'id', got {value!r:.100}; run the "
                "same version in all processes"
            )
        threads = self._why_thread if value["ask"] == "why" else self._threads
        threads.do(lambda: self._answer(link, rank, value))

    def _closed(self, link: ServerConnection, reason: str) -> None:
        with self._lock:
            rank, broadcast = self._ranks.pop(link, None), link in self._broadcast
            self._broadcast.discard(link)
        if broadcast:
            return
        if rank is not None:
            self._api.disconnected(rank)
        elif self._publisher is not None:
            self._publisher.closed(link, reason)

    # runs on: threads that may block

    def _answer(self, link: ServerConnection, rank: int, request: Mapping[str, Any]) -> None:
        reply: dict[str, Any] = {"id": request["id"]}
        try:
            reply["value"] = call(self._api, rank, request, broadcast=link in self._broadcast)
        except Exception as error:  # any error is the answer
            reply["error"] = error
        try:
            link.send(reply)
        except (ActorLost, DataStall) as fault:  # the client repeats its request later
            log.debug("rank %d: answer to %r not sent: %s", rank, request["ask"], fault)

    def close(self, error: Exception) -> None:
        """Send ``error`` to every connected client, then close."""
        with self._lock:
            links = list(self._ranks)
        for link in links:
            _close_with(link, error)
        self._threads.close()
        self._why_thread.close()
        self._server.close(CLOSE_S)


def _close_with(link: ServerConnection, error: Exception) -> None:
    with contextlib.suppress(ActorLost, DataStall):
        link.send({"over": error}, timeout_s=0.0)
    link.close(str(error))


class RemoteClient:
    """The session's record of a client in another process: its position and its connection.

    The lock of the session guards ``queue`` and ``position``.
    """

    def __init__(self, rank: int, queue: StepQueue, position: State):
        self.rank, self.queue, self.position = rank, queue, position
        self.steps = 0
        self.waited_s = 0.0
        self.peer = ""  # process or address, as its connection states
        self.there = False  # whether the client is connected
        self._since = time.monotonic()  # when it connected, disconnected or was first expected

    def set_connected(self, *, connected: bool, peer: str = "") -> None:
        self.there, self.peer, self._since = connected, peer or self.peer, time.monotonic()

    def count_step(self, *, new: bool, waited_s: float) -> None:
        """Count a step that is new, and record the seconds that the trainer has waited so far."""
        self.steps, self.waited_s = self.steps + new, waited_s

    def move_to(self, queue: StepQueue, position: State) -> None:
        """Use the queue and the start position of a new generation."""
        self.queue, self.position = queue, position

    @property
    def whereabouts(self) -> tuple[int | None, str]:
        """The process id of the client, and the state of its connection as text.

        The process id is None unless the client is connected and on this machine.
        """
        kind, _, number = self.peer.partition(" ")
        state = "connected" if self.there else "disconnected" if self.peer else "not connected yet"
        local = kind == "process" and self.there and number.isdecimal()
        return int(number) if local else None, state

    @property
    def absent(self) -> str:
        """The reason why the client takes no steps; empty while it is connected."""
        if self.there:
            return ""
        for_s = time.monotonic() - self._since
        return (
            f"whose client ({self.peer}) disconnected {for_s:.0f} s ago"
            if self.peer
            else "which has not connected yet"
        )


class WorkerServedQueue:
    """The queue of a rank whose steps come from a constructor worker, not from this process."""

    def __init__(self, rank: int, generation: int):
        self.rank, self.generation = rank, generation

    def put(self, info: StepInfo, bucket: BucketBatch) -> None:
        raise OverlordError(
            f"rank {self.rank}: expected a rank that this process serves, got one that a "
            "constructor worker serves; this is a bug in Overlord: report it"
        )

    def get(self, timeout_s: float) -> tuple[StepInfo, BucketBatch] | None:
        raise OverlordError(
            f"rank {self.rank}: expected a client of this process, got one that a constructor "
            "worker serves; this is a bug in Overlord: report it"
        )

    def end(self, error: BaseException | None, *, drop: bool = False) -> None:
        """Do nothing: the client receives the end from the control server."""

    def ack(self, step: int) -> None:
        """Do nothing: the client sends its acks to the constructor worker."""

    def report(self, report: Report, in_time: bool) -> None:
        """Do nothing: the client sends its reports to the constructor worker."""

    def reports(self) -> tuple[SentReport, ...]:
        """Return nothing: the constructor worker has the reports that arrived."""
        return ()

    def __len__(self) -> int:
        return 0
