"""The inside of an actor's process: it connects to its launching process and executes its calls.

``ActorServer`` executes calls, of whichever connection. Whatever starts the process passes it a
``LaunchSpec``: an address, a token and a lease id. All calls and replies of the launching process
use the one connection that the process opens with them.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from overlord.errors import ActorLost, FrameError, OverlordError
from overlord.process.code import build_code
from overlord.process.exit import exit_now
from overlord.rpc.actors import CONTROL, NO_REPLY, encode_message
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.codec import decode, encode
from overlord.transport.connection import TIMEOUT, SocketConnection, open_connection

log = logging.getLogger("overlord")

HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)

Call = tuple[int, bytes, list[np.ndarray]]
Reply = Callable[[int, bytes, list[np.ndarray]], None]


class ActorServer:
    """The executor of encoded calls (method, arguments) of one actor.

    Replies are encoded too: (success, value or error).
    """

    def __init__(self, name: str, reply: Reply):
        self.name, self._reply, self._actor = name, reply, None

    def build(self, make: Callable[[], Any]) -> bool:
        """Build the actor; if that fails, reply with the exception and return False."""
        try:
            self._actor = make()
        except Exception as e:
            self._respond(CONTROL, "its factory", False, e)
            return False
        return True

    def perform(self, number: int, header: Any, columns: list[np.ndarray]) -> None:
        """Execute one call, and reply with the result or the exception of the method.

        If the method returns a future, the reply is sent later from another thread. A
        ``SystemExit`` of the method is raised here instead.
        """
        method = "a call"
        try:
            method, args = decode(header, columns)
            value = self._find(method)(*args)
        except SystemExit:  # as in any program, this ends the actor and is not a reply
            raise
        except BaseException as e:
            self._respond(number, method, False, e)
            return
        if isinstance(value, Future):
            value.add_done_callback(lambda future: self._reply_later(number, method, future))
        else:
            self._respond(number, method, True, value)

    def close(self) -> None:
        """Call ``close()`` of the actor if it has one; reply with its exception, if any."""
        close = getattr(self._actor, "close", None)
        if callable(close):
            try:
                close()
            except Exception as e:
                self._respond(CONTROL, "close", False, e)

    def _find(self, method: str) -> Callable[..., Any]:
        found = None if method.startswith("_") else getattr(self._actor, method, None)
        if callable(found):
            return found
        known = [
            n
            for n in dir(self._actor)
            if not n.startswith("_") and callable(getattr(type(self._actor), n, None))
        ]
        raise AttributeError(
            f"actor {self.name!r}: expected one of its public methods "
            f"({', '.join(known) or 'none'}), got {method!r}"
        )

    def _reply_later(self, number: int, method: str, future: Future[Any]) -> None:
        try:
            value = future.result()
        except BaseException as e:
            self._respond(number, method, False, e)
        else:
            self._respond(number, method, True, value)

    def _respond(self, number: int, method: str, ok: bool, value: Any) -> None:
        if not ok:
            self._add_location(method, value)
        if number == NO_REPLY:
            if not ok:
                log.error(
                    "call of %s of actor %s failed, and no caller waits for the result: %s",
                    method,
                    self.name,
                    value,
                    exc_info=value,
                )
            return
        try:
            self._reply(number, *encode_message((ok, value)))
        except FrameError as e:
            where = f"result of {method!r} of actor {self.name!r}{e.where.removeprefix('value[1]')}"
            self._reply(number, *encode((False, FrameError(e.problem, where, e.remedy))))

    def _add_location(self, method: str, error: BaseException) -> None:
        """Add actor and method to an error as a note, with the stack unless it is an OverlordError.

        The stack does not reach the caller otherwise.
        """
        where = f"in actor {self.name!r}, {method}"
        if not isinstance(error, OverlordError):
            where += ":\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip()
        error.add_note(where)


def exit_code(error: SystemExit) -> int:
    """Return the exit code of a program that ends with this exception."""
    return error.code if isinstance(error.code, int) else 0 if error.code is None else 1


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
