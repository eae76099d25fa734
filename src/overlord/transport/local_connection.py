"""Connections within a process: values are passed by reference, through two bounded queues."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import deque
from typing import Any, Self

from overlord.errors import ActorLost, DataStall
from overlord.transport.connection import TIMEOUT, Connection
from overlord.transport.shared_memory import SharedMemoryPool

PAIR_MESSAGES = 64


class _Direction:
    """One direction of a pair: a queue, and the reason for its end (None while it is open)."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.values: deque[Any] = deque()
        self.reason: str | None = None
        self.wakeup: tuple[socket.socket, socket.socket] | None = None

    def end(self, reason: str) -> None:
        with self.changed:
            self.reason = self.reason or reason
            self.notify()
            self.changed.notify_all()

    def notify(self) -> None:
        if self.wakeup is not None:
            with contextlib.suppress(BlockingIOError):
                self.wakeup[1].send(b"\0")


class LocalConnection:
    """One end of a connection within a process, as ``pair`` returns it."""

    def __init__(self, peer: str, out: _Direction, into: _Direction, pool: SharedMemoryPool | None):
        self.peer, self.pool = peer, pool
        self._out, self._in = out, into

    def send(self, value: Any, *, timeout_s: float = 60.0) -> None:
        direction = self._out
        with direction.changed:
            if not direction.changed.wait_for(
                lambda: len(direction.values) < PAIR_MESSAGES or direction.reason is not None,
                timeout_s,
            ):
                raise DataStall(
                    f"{self.peer} to accept one of {len(direction.values)} messages", timeout_s
                )
            if direction.reason is not None:
                raise ActorLost(self.peer, direction.reason)
            direction.values.append(value)
            direction.notify()
            direction.changed.notify_all()

    def recv(self, timeout_s: float) -> Any:
        direction = self._in
        with direction.changed:
            if not direction.changed.wait_for(
                lambda: direction.values or direction.reason is not None, timeout_s
            ):
                return TIMEOUT
            if not direction.values:
                raise ActorLost(self.peer, direction.reason or "")
            value = direction.values.popleft()
            if direction.wakeup is not None and not direction.values and direction.reason is None:
                with contextlib.suppress(BlockingIOError):
                    while direction.wakeup[0].recv(4096):
                        pass
            direction.changed.notify_all()
            return value

    def flush(self) -> None:
        pass

    @property
    def remote_held(self) -> int:
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def fileno(self) -> int:
        with self._in.changed:
            if self._in.wakeup is None:
                self._in.wakeup = socket.socketpair()
                for end in self._in.wakeup:
                    end.setblocking(False)
                if self._in.values or self._in.reason is not None:
                    self._in.notify()
            return self._in.wakeup[0].fileno()

    def close(self, reason: str = "") -> None:
        text = f"the connection was closed{': ' if reason else ''}{reason}"
        self._out.end(text)
        with self._in.changed:
            self._in.values.clear()
        self._in.end(text)
        with self._in.changed:
            if self._in.wakeup is not None:
                for end in self._in.wakeup:
                    end.close()
                self._in.wakeup = None


def pair(
    pool: SharedMemoryPool | None = None, *, names: tuple[str, str] = ("left", "right")
) -> tuple[Connection, Connection]:
    """Return two connected ends within this process.

    Values are passed by reference; at most ``PAIR_MESSAGES`` of them wait in each direction.
    ``names``: of the two ends, in the order of the result; each error names the other end.
    """
    there, back = _Direction(), _Direction()
    return LocalConnection(names[1], there, back, pool), LocalConnection(
        names[0], back, there, pool
    )
