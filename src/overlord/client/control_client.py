"""Requests of a client to the control server of its session.

One request is sent at a time. Each has a deadline, and is repeated after a lost connection.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from overlord.errors import ActorLost, DataStall, LinkRefused, OverlordError
from overlord.transport.connection import TIMEOUT, Connection, open_connection

CONTROL_SERVER = "the session's control server"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # pauses between attempts to connect


class ControlClient:
    """The control connection of one rank; requests are idempotent, so they may be repeated.

    ``role``: ``"served"`` for a rank that takes no steps and only sends queries and reports, else
    ``"control"``. ``__init__`` connects, and raises ``ActorLost`` after ``timeout_s``.
    """

    def __init__(
        self, address: str, token: str, rank: int, *, timeout_s: float, role: str = "control"
    ):
        self.address, self.token, self.rank, self._role = address, token, rank, role
        self._connect_s = timeout_s  # timeout of a connection; an answer may take longer
        self._lock = threading.Lock()
        self._last_id = 0
        self._over: Exception | None = None  # the error that every later request raises
        self._link: Connection | None = None
        self.welcome: dict[str, Any] = {}
        self._connected(time.monotonic() + timeout_s)

    def ask(self, what: str, *, timeout_s: float, **given: Any) -> Any:
        """Send a request; return the answer of the server, or raise the error that it sent.

        Raise ``DataStall`` or ``ActorLost`` after ``timeout_s`` without an answer.
        """
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=timeout_s):
            raise DataStall(
                f"another request to {CONTROL_SERVER} at {self.address}", timeout_s, rank=self.rank
            )
        try:
            self._last_id += 1
            return _unwrap(
                self._answer({"ask": what, "id": self._last_id, **given}, deadline, timeout_s)
            )
        finally:
            self._lock.release()

    def _answer(self, request: dict[str, Any], deadline: float, timeout_s: float) -> dict[str, Any]:
        while True:
            link = self._connected(min(deadline, time.monotonic() + self._connect_s))
            try:
                # Skip answers to requests that timed out; an error before a close is raised.
                while self._received(link, 0.0) is not TIMEOUT:
                    pass
                link.send(request, timeout_s=max(0.01, deadline - time.monotonic()))
                while (
                    reply := self._received(link, max(0.0, deadline - time.monotonic()))
                ) is not TIMEOUT:
                    if isinstance(reply, dict) and reply.get("id") == request["id"]:
                        return reply
                raise DataStall(
                    f"{CONTROL_SERVER} at {self.address} to answer {request['ask']!r}",
                    timeout_s,
                    rank=self.rank,
                )
            except ActorLost:
                self._drop()
                if time.monotonic() >= deadline:
                    raise
            except DataStall:
                raise
            except BaseException:  # Ctrl-C in the middle of a message, or damaged bytes
                self._drop()
                raise

    def _received(self, link: Connection, seconds: float) -> Any:
        reply = link.recv(seconds)
        if isinstance(reply, dict) and isinstance(reply.get("over"), Exception):
            self._over = reply["over"]
            self._drop()
            raise self._over
        return reply

    def _connected(self, deadline: float) -> Connection:
        """Return the open connection, or open a new one, with retries until the deadline."""
        pause, fault, start = FIRST_PAUSE_S, None, time.monotonic()
        while self._link is None:
            if self._over is not None:
                raise self._over
            left = deadline - time.monotonic()
            if left <= 0:
                reason = (
                    f"{self.address} could not be reached for {time.monotonic() - start:.1f} "
                    f"s: {reason_of(fault)}"
                )
                raise ActorLost(CONTROL_SERVER, reason) from fault
            try:
                link, welcome = open_connection(
                    self.address,
                    self.token,
                    {"role": self._role, "rank": self.rank},
                    timeout_s=left,
                )
                self._check(welcome)
                self._link, self.welcome = link, welcome
            except (ActorLost, DataStall) as problem:
                fault = problem
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                pause = min(2 * pause, LONGEST_PAUSE_S)
        return self._link

    def _check(self, welcome: dict[str, Any]) -> None:
        if self.welcome and welcome.get("session") != self.welcome.get("session"):
            self._over = LinkRefused(
                self.address,
                "expected the session of this client, got another one at this address; "
                "connect again, and load a saved state",
            )
            raise self._over

    def _drop(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def close(self) -> None:
        self._over = self._over or OverlordError(f"the client of rank {self.rank} is closed")
        self._drop()


def _unwrap(reply: dict[str, Any]) -> Any:
    if isinstance(error := reply.get("error"), BaseException):
        raise error
    return reply.get("value")


def reason_of(fault: BaseException | None) -> str:
    """Return the text of a fault's first cause: follow ``ActorLost`` along ``__cause__``."""
    while isinstance(fault, ActorLost) and isinstance(fault.__cause__, (ActorLost, DataStall)):
        fault = fault.__cause__
    return fault.reason if isinstance(fault, ActorLost) else str(fault)
