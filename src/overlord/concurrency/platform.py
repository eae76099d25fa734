"""The platform of a process: clock, threads, queues, memory and connections.

Workers use these only through a platform. So the same workers run in a simulated cluster, where
machines become slow, unreachable or lost as a seed determines.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from overlord.concurrency.event_loop import EventLoop, Executor, ThreadExecutor, ThreadQueue
from overlord.process.exit import exit_now
from overlord.process.resources import in_background, limit_arenas, pss_bytes
from overlord.transport.address import HAS_SHARED_MEMORY, is_loopback, reachable
from overlord.transport.connection import Connection, open_connection
from overlord.transport.server import OnClose, OnMessage, OnOpen, Server
from overlord.transport.shared_memory import SharedMemoryPool

INTERFACE = "OVERLORD_INTERFACE"  # variable: the address at which other machines reach this one
NODE = "OVERLORD_NODE"  # variable: the id of this node in its cluster
# far above the steps of a prefetch window times the constructor workers; the limit is in bytes
MAX_SEGMENTS = 4096


class Platform:
    """The platform of a real machine.

    A platform is sent with the configuration of a worker, so it holds settings only.
    """

    ports: range | None = None  # TCP ports of servers on a network; None: any
    now: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, ports: range | None = None):
        self.ports = ports

    def node(self) -> str:
        """Return the id of this node in its cluster; empty without a cluster."""
        return os.environ.get(NODE, "")

    def inside(self) -> dict[str, Any]:
        """Return the arguments of ``Server`` for a server to which other workers connect.

        All workers are on this machine, so it needs no network.
        """
        return {"tcp": not HAS_SHARED_MEMORY}

    def outside(self, host: str) -> dict[str, Any]:
        """Return the arguments of ``Server`` for a server to which clients connect.

        ``host``: the requested interface. A loopback address needs no network.
        """
        return {
            "host": host,
            "tcp": not is_loopback(host) or not HAS_SHARED_MEMORY,
            "port": self.ports or 0,
        }

    def prepare(self, workers: int, *, links: int = 0, background: bool = False) -> None:
        """Configure malloc arenas and time slices of a worker process.

        ``workers``: threads that run concurrently. ``links``: connections with a thread each.
        ``background``: no caller waits for a single call of the worker.
        """
        limit_arenas(workers, links)
        if background:
            in_background()

    def event_loop(self, name: str) -> EventLoop:
        """Return a new event loop, which is not started."""
        return EventLoop(name)

    def executor(self, workers: int, loop: EventLoop) -> Executor:
        return ThreadExecutor(workers, loop)

    def thread(self, work: Callable[[], None], name: str) -> None:
        """Run ``work`` in a new daemon thread; it may block."""
        threading.Thread(target=work, name=name, daemon=True).start()

    def every(self, seconds: float, call: Callable[[], None], name: str) -> Callable[[], None]:
        """Repeat ``call`` every ``seconds`` in a thread; return the function that stops it.

        The first call is after ``seconds``.
        """
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(seconds):
                call()

        self.thread(beat, name)
        return stopped.set

    def queue(self, n: int, name: str) -> ThreadQueue:
        """Return a new queue of calls with ``n`` threads."""
        return ThreadQueue(n, name)

    def condition(self) -> threading.Condition:
        """Return a new condition variable with its lock."""
        return threading.Condition()

    def pss_bytes(self) -> int:
        """Return the proportional set size of this process."""
        return pss_bytes()

    def sleep(self, seconds: float) -> None:
        """Block this thread for ``seconds``; not allowed on an event loop."""
        time.sleep(seconds)

    def memory_pool(self, name: str, max_bytes: int) -> SharedMemoryPool:
        return SharedMemoryPool(name=name, max_bytes=max_bytes, max_segments=MAX_SEGMENTS)

    def serve(
        self,
        token: str,
        pool: SharedMemoryPool,
        on_message: OnMessage,
        on_open: OnOpen,
        on_close: OnClose,
        **where: Any,
    ) -> Server:
        return Server(
            token=token,
            on_message=on_message,
            on_open=on_open,
            on_close=on_close,
            pool=pool,
            **where,
        )

    def open_connection(
        self,
        address: str,
        token: str,
        hello: dict[str, Any],
        *,
        timeout_s: float,
        pool: SharedMemoryPool | None = None,
    ) -> tuple[Connection, dict[str, Any]]:
        connection, welcome = open_connection(address, token, hello, timeout_s=timeout_s, pool=pool)
        connection.waits_for_segments = False
        return connection, welcome

    def end(self, code: int) -> None:
        """End the whole process at once, with exit code ``code``."""
        exit_now(code)


class NetworkPlatform(Platform):
    """One machine of several, whose workers connect to each other over the network.

    Workers on the same machine use shared memory. ``interface`` is the address of this process
    alone: a platform with an interface is never sent. ``OVERLORD_INTERFACE`` takes precedence.
    """

    def __init__(self, ports: range | None = None, interface: str = ""):
        super().__init__(ports)
        self._interface = interface

    def inside(self) -> dict[str, Any]:
        return {
            "host": os.environ.get(INTERFACE) or self._interface or reachable(""),
            "port": self.ports or 0,
        }

    def outside(self, host: str) -> dict[str, Any]:
        """Return the arguments of ``inside``; ignore ``host``.

        ``host`` names an interface of the session's machine, and this may be another machine.
        """
        return self.inside()
