"""Client side of a connection: connect by unix socket or TCP, then authenticate.

The unix socket is used if it answers, TCP otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from typing import Any

from overlord.errors import ActorLost, DataStall, LinkRefused, OverlordError
from overlord.transport.address import HAS_SHARED_MEMORY, Address, shown, tune
from overlord.transport.connection import MAX_HELD, SocketConnection
from overlord.transport.handshake import TryLater, client_side
from overlord.transport.shared_memory import SharedMemoryPool
from overlord.transport.timeouts import TIMEOUTS

TRANSPORTS = ("auto", "unix", "tcp")
MAX_HOLD = 2**16
AGAIN_S = TIMEOUTS.retry_s


def open_connection(
    address: str,
    token: str,
    hello: dict[str, Any],
    *,
    timeout_s: float,
    ring: SharedMemoryPool | None = None,
    transport: str = "auto",
    name: str = "",
) -> tuple[SocketConnection, dict[str, Any]]:
    """Connect to the server at ``address``; return the connection and the server's welcome.

    The server uses ``name`` for this client in its errors.
    """
    if transport not in TRANSPORTS:
        raise OverlordError(f"transport {transport!r}: expected one of {', '.join(TRANSPORTS)}")
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _open_connection(
                address, token, {"hello": hello, "name": name}, deadline, timeout_s, ring, transport
            )
        # Retry: this process was suspended for seconds, or a thousand others connected first.
        except TryLater as later:
            if time.monotonic() + AGAIN_S > deadline:
                raise DataStall(
                    f"{shown(address)} to accept a connection, which it refuses temporarily "
                    f"({later.reason})",
                    timeout_s,
                ) from None
        time.sleep(AGAIN_S)


def _open_connection(
    address: str,
    token: str,
    hello: dict[str, Any],
    deadline: float,
    timeout_s: float,
    ring: SharedMemoryPool | None,
    transport: str,
) -> tuple[SocketConnection, dict[str, Any]]:
    where = shown(address)
    sock = _connect(Address.parse(address), transport, deadline)
    try:
        answer = _handshake(sock, where, token, hello, deadline, timeout_s)
        welcome, hold = answer.get("welcome"), answer.get("hold")
        if not isinstance(welcome, dict) or type(hold) is not int or not 0 <= hold <= MAX_HOLD:
            raise LinkRefused(where, "expected a welcome in its answer, got none")
        tune(sock)
        return SocketConnection(sock, where, ring=ring, max_held=MAX_HELD + hold), welcome
    except BaseException:
        sock.close()
        raise


def _connect(address: Address, transport: str, deadline: float) -> socket.socket:
    if transport == "unix" or (transport == "auto" and HAS_SHARED_MEMORY):
        try:
            return _connect_local(address, deadline)
        except OSError as e:
            if transport == "unix" or not address.port:
                raise ActorLost(
                    shown(str(address)), f"its local socket does not answer: {e.strerror or e}"
                ) from e
    try:
        return socket.create_connection(
            (address.host, address.port), max(0.001, deadline - time.monotonic())
        )
    except OSError as e:
        raise ActorLost(str(address), f"it does not answer: {e.strerror or e}") from e


def _connect_local(address: Address, deadline: float) -> socket.socket:
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.setblocking(False)
        try:
            sock.connect(address.local_name)
            return sock
        except OSError as e:
            sock.close()
            if e.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise
        time.sleep(0.1)  # the accept queue is full, and no event reports free space


def _handshake(
    sock: socket.socket,
    address: str,
    token: str,
    hello: dict[str, Any],
    deadline: float,
    timeout_s: float,
) -> dict[str, Any]:
    steps = client_side(token, hello, address)
    step, answer = next(steps), b""
    try:
        while True:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            if isinstance(step, bytes):
                # The peer may have closed already: its reason can still be read.
                with contextlib.suppress(BrokenPipeError):
                    sock.sendall(step)
                step = next(steps)
                continue
            some = sock.recv(step - len(answer))
            if not some:
                raise ActorLost(address, "it closed the connection in the handshake")
            answer += some
            if len(answer) == step:
                whole, answer = answer, b""
                step = steps.send(whole)
    except StopIteration as done:
        return done.value
    except TimeoutError as e:
        raise DataStall(f"{address} to answer the handshake", timeout_s) from e
    except OSError as e:
        raise ActorLost(address, f"the connection broke in the handshake: {e.strerror or e}") from e
