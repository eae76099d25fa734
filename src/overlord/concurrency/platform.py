"""What a host has from the machine it runs on: time, threads, memory that is shared, links to
others.

Hosts take all of it from here and from nowhere else, so that the very same hosts run in a simulated
cluster, where each has a machine of its own that is slow, cut off or gone when a seed says so.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

from overlord.concurrency.command_loop import Executor
from overlord.concurrency.event_loop import EventLoop, ThreadExecutor
from overlord.process.malloc import limit_arenas
from overlord.process.time_slice import in_background
from overlord.transport.address import HAS_SHARED_MEMORY, is_loopback, reachable
from overlord.transport.connection import Connection
from overlord.transport.server import OnClose, OnMessage, OnOpen, Server, dial
from overlord.transport.shared_memory import SharedMemoryPool

# the environment's word for the address at which other machines reach this one
INTERFACE = "OVERLORD_INTERFACE"
NODE = "OVERLORD_NODE"  # and for what a cluster calls it
# far above the steps of a prefetch window times the constructor hosts; bytes are what is bounded
MAX_SLOTS = 4096


class Platform:
    """The real one. It travels with a host's settings, so it holds nothing but what was asked
    for.
    """

    ports: range | None = (
        None  # those that servers may listen at, where there is a network; None: any
    )

    def __init__(self, ports: range | None = None):
        self.ports = ports

    def node(self) -> str:
        """What the cluster calls it; empty where there is none."""
        return os.environ.get(NODE, "")

    def inside(self) -> dict[str, Any]:
        """Where servers for other hosts of the job listen: all are here, and need no network."""
        return {"tcp": not HAS_SHARED_MEMORY}

    def outside(self, host: str) -> dict[str, Any]:
        """And for clients, who were told to come to this interface."""
        return {
            "host": host,
            "tcp": not is_loopback(host) or not HAS_SHARED_MEMORY,
            "port": self.ports or 0,
        }

    def prepare(self, workers: int, *, links: int = 0, background: bool = False) -> None:
        """Set up a process that is a host's own: ``workers`` threads that work at the same time,
        one thread for each of ``links``. ``background``: nobody waits for each of them.
        """
        limit_arenas(workers, links)
        if background:
            in_background()

    def pump(self, name: str) -> EventLoop:
        return EventLoop(name)

    def executor(self, workers: int, pump: EventLoop) -> Executor:
        return ThreadExecutor(workers, pump)

    def thread(self, work: Callable[[], None], name: str) -> None:
        """Run something beside the pump; it may wait."""
        threading.Thread(target=work, name=name, daemon=True).start()

    def every(self, seconds: float, call: Callable[[], None], name: str) -> Callable[[], None]:
        """Call again and again, beside the pump, until what is returned is called."""
        stopped = threading.Event()

        def beat() -> None:
            while not stopped.wait(seconds):
                call()

        self.thread(beat, name)
        return stopped.set

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Not in a pump."""
        time.sleep(seconds)

    def ring(self, name: str, max_bytes: int) -> SharedMemoryPool:
        return SharedMemoryPool(name=name, max_bytes=max_bytes, max_slots=MAX_SLOTS)

    def serve(
        self,
        token: str,
        ring: SharedMemoryPool,
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
            ring=ring,
            **where,
        )

    def dial(
        self,
        address: str,
        token: str,
        hello: dict[str, Any],
        *,
        timeout_s: float,
        ring: SharedMemoryPool | None = None,
    ) -> tuple[Connection, dict[str, Any]]:
        link, welcome = dial(address, token, hello, timeout_s=timeout_s, ring=ring)
        link.waits_for_slots = False
        return link, welcome

    def end(self, code: int) -> None:
        """Of the whole process, at once."""
        os._exit(code)


class NetworkPlatform(Platform):
    """One of several: hosts of a job reach each other by the network, and by shared memory where
    they share a machine. ``interface``: of this process alone, for a machine that does not travel;
    what the environment says goes first.
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
        """The interface was named for the machine of the session; this may be another."""
        return self.inside()
