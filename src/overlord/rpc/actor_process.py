"""The inside of an actor's process: it connects to its launching process and executes its calls.

Whatever starts the process passes it a ``LaunchSpec``: an address, a token and a lease id. All
calls and replies use the one connection that the process opens with them.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.errors import ActorLost, FrameError
from overlord.process.code import build_code
from overlord.process.exit import exit_now
from overlord.rpc.actors import CONTROL, ActorServer, exit_code
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.connection import TIMEOUT, SocketConnection, open_connection

HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Call = tuple[int, bytes, list[np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """The data with which an actor connects to its launching process."""

    name: str
    address: str
    token: str = field(repr=False)
    lease_id: int


class CallConnection:
    """The actor's end of the connection to its launching process.

    The thread that executes the calls also reads them. Another thread watches for the end of the
    connection, and for one of the files ``ends`` to become readable. Then the process exits, even
    in the middle of a method.
    """

    def __init__(self, connection: SocketConnection, ends: Sequence[int] = ()):
        # messages are kept for long, so they are copied out of the segments of the peer
        connection.max_held, connection.waits_for_segments = 0, False
        self._connection, self._ends, self._closing = connection, ends, False
        self.faulty = False  # whether the actor failed to start or to close
        threading.Thread(target=self._watch, name="overlord-watch", daemon=True).start()

    @classmethod
    def open(
        cls, spec: LaunchSpec, hello: Mapping[str, Any], ends: Sequence[int] = ()
    ) -> CallConnection:
        """Connect to the launching process; ``hello`` adds to the name, lease id and pid."""
        hello = {"name": spec.name, "lease_id": spec.lease_id, "pid": os.getpid(), **hello}
        connection, _ = open_connection(
            spec.address, spec.token, hello, timeout_s=TIMEOUTS.connect_back_s
        )
        return cls(connection, ends)

    def serve(self, name: str, code: bytes) -> int | None:
        """Build the actor, and execute its calls until the launching process requests its exit.

        ``code`` has its factory and arguments (``pack_code``). Later messages contain no code.
        Return None after that, or the exit code of the actor; 1 if it failed to start or to close.
        """
        server = ActorServer(name, self.reply)
        try:
            if server.build(lambda: build_code(code)):
                while (call := self._next_call())[0] != CONTROL:
                    server.perform(*call)
                server.close()
        except SystemExit as e:
            return exit_code(e)
        return 1 if self.faulty else None

    def _next_call(self) -> Call:
        try:
            while (call := self._connection.recv(TIMEOUTS.idle_s)) is TIMEOUT:
                pass
        except (ActorLost, FrameError):
            self._exit()
            raise SystemExit(1) from None
        return call

    def reply(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Send a reply; end this process if the launching one has exited or disconnected."""
        self.faulty = self.faulty or number == CONTROL
        try:
            self._connection.send((number, header, columns), timeout_s=TIMEOUTS.launcher_reply_s)
        except ActorLost:
            self._exit()

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._connection.fileno(), HANGUP)
        for fd in self._ends:
            poller.register(fd, select.POLLIN)
        poller.poll()
        self._exit()

    def _exit(self) -> None:
        """Exit, because the launching process has exited or disconnected.

        This also ends a process that its launcher wrongly considers dead.
        """
        if not self._closing:
            exit_now(1)

    def close(self) -> None:
        self._closing = True
        self._connection.close("it exits")
