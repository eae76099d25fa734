"""Processes at the other end of a connection, for tests. Each does one thing, reports it through a
pipe, and waits to be killed.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as PipeEnd
from typing import Any

import numpy as np

from overlord.transport.address import Address, client_side
from overlord.transport.connection import Connection, open_connection
from overlord.transport.server import Server
from overlord.transport.shared_memory import SharedMemoryPool

MB = 2**20
TOKEN = "a token of the tests"
SOON_S = 30.0  # a deadline for operations of milliseconds: the machine may be busy


class Child:
    """A real process that runs ``body(pipe, *args)``."""

    def __init__(self, body: Callable[..., None], *args: Any):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=body, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def hears(self) -> Any:
        assert self.pipe.poll(SOON_S), "the child sends nothing"
        return self.pipe.recv()

    def kill(self) -> None:
        """Send SIGKILL: the process cannot react."""
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SOON_S)


@contextlib.contextmanager
def child(body: Callable[..., None], *args: Any) -> Iterator[Child]:
    made = Child(body, *args)
    try:
        yield made
    finally:
        made.kill()
        made.pipe.close()
        made.process.close()


def message(k: int, nbytes: int = MB) -> dict[str, Any]:
    return {"k": k, "data": np.full(nbytes, k % 251, np.uint8), "small": np.arange(k % 7)}


def is_message(value: Any, k: int, nbytes: int = MB) -> bool:
    return (
        value["k"] == k
        and len(value["data"]) == nbytes
        and bool((value["data"] == k % 251).all())
        and len(value["small"]) == k % 7
    )


def wait_until(what: Callable[[], Any], seconds: float = SOON_S) -> None:
    """Poll for a condition without an event, at most fifty times a second, with a deadline."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "the condition did not become true"
        time.sleep(0.02)


class Story:
    """A server that records its events."""

    def __init__(self, *, echo: bool = False, **options: Any):
        self.opened: list[Connection] = []
        self.hellos: list[dict[str, Any]] = []
        self.got: list[Any] = []
        self.closed: list[tuple[Connection, str]] = []
        self.changed = threading.Condition()
        self.echo, self.keep = echo, True
        self.server = Server(
            token=TOKEN,
            on_message=self._on_message,
            on_open=self._on_open,
            on_close=self._on_close,
            **options,
        )
        self.address = self.server.address

    def _on_open(self, link: Connection, hello: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            self.opened.append(link)
            self.hellos.append(hello)
            self.changed.notify_all()
        return {"seen": len(self.opened)}

    def _on_message(self, link: Connection, value: Any) -> None:
        if self.echo:
            link.send(value)
        if self.keep:
            with self.changed:
                self.got.append(value)
                self.changed.notify_all()

    def _on_close(self, link: Connection, reason: str) -> None:
        with self.changed:
            self.closed.append((link, reason))
            self.changed.notify_all()

    def wait(self, what: Callable[[Story], Any]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: what(self), SOON_S), (
                "the condition did not become true"
            )

    def forget(self) -> None:
        """Drop every connection and value."""
        for noted in (self.opened, self.got, self.closed):
            noted.clear()

    def __enter__(self) -> Story:
        return self

    def __exit__(self, *exc: object) -> None:
        self.server.close()


@contextlib.contextmanager
def watched_story(handshake_s: float = SOON_S) -> Iterator[Story]:
    """Run a server with a well-behaved connection, which must still work at the end. Then no passed
    file is open.
    """
    with Story(handshake_s=handshake_s) as story:
        gc.collect()
        files = len(os.listdir("/proc/self/fd"))
        with dialled(story.address) as good:
            story.wait(lambda s: s.opened)
            yield story
            story.got.clear()
            good.send(message(1))
            story.wait(lambda s: s.got)
            assert is_message(story.got[-1], 1)
        del good
        story.forget()
        wait_until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) <= files)


def dialled(address: str, transport: str = "auto", **options: Any) -> Any:
    return open_connection(address, TOKEN, {}, timeout_s=SOON_S, transport=transport, **options)[0]


def raw(address: str, *, transport: str = "unix") -> socket.socket:
    """Return a socket after the handshake, for data that no connection of ours would send."""
    parsed = Address.parse(address)
    sock = raw_silent(parsed, transport)
    steps = client_side(TOKEN, {"hello": {}, "name": "hostile"}, address)
    step = next(steps)
    try:
        while True:
            if isinstance(step, bytes):
                sock.sendall(step)
                step = next(steps)
            else:
                step = steps.send(exactly(sock, step))
    except StopIteration:
        return sock


def raw_silent(address: Address, transport: str = "unix") -> socket.socket:
    if transport == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(address.local_name)
    else:
        sock = socket.create_connection((address.host, address.port))
    sock.settimeout(SOON_S)
    return sock


def exactly(sock: socket.socket, n: int) -> bytes:
    got = b""
    while len(got) < n:
        some = sock.recv(n - len(got))
        if not some:
            raise ConnectionResetError(f"closed after {len(got)} of {n} bytes")
        got += some
    return got


# bodies of the other process


def serve_messages(
    pipe: PipeEnd, n: int, nbytes: int, key: str | None = None, port: int = 0
) -> None:
    """Send n messages to every peer that sends one, and report when they are sent."""

    def on_message(link: Connection, value: Any) -> None:
        def send() -> None:
            for k in range(n):
                link.send(message(k, nbytes))
            pipe.send("sent")

        threading.Thread(target=send, daemon=True).start()

    server = Server(
        token=TOKEN,
        on_message=on_message,
        key=key,
        port=port,
        pool=SharedMemoryPool(max_bytes=4 * n * nbytes + MB, name="child"),
    )
    pipe.send(server.address)
    pipe.poll(None)


def hold_messages(pipe: PipeEnd, address: str, n: int, transport: str = "auto") -> None:
    """Read n messages, keep them, and report it."""
    link, _ = open_connection(
        address, TOKEN, {}, timeout_s=SOON_S, transport=transport, name="the holder"
    )
    link.max_held = n
    held = [link.recv(SOON_S) for _ in range(n)]
    pipe.send([value["k"] for value in held])
    pipe.poll(None)


def read_nothing(pipe: PipeEnd, address: str, transport: str = "auto") -> None:
    link, _ = open_connection(
        address, TOKEN, {}, timeout_s=SOON_S, transport=transport, name="the deaf one"
    )
    pipe.send(link.peer)
    pipe.poll(None)


def send_messages(
    pipe: PipeEnd,
    address: str,
    n: int,
    nbytes: int,
    transport: str = "auto",
    max_segments: int = 64,
) -> None:
    """Send n messages; then report how many segments the pool ever had, or the error."""
    ring = SharedMemoryPool(max_segments=max_segments, name="sender")
    link, _ = open_connection(
        address, TOKEN, {}, timeout_s=SOON_S, transport=transport, pool=ring, name="the sender"
    )
    try:
        for k in range(n):
            link.send(message(k, nbytes))
    except Exception as e:
        pipe.send(f"{type(e).__name__}: {e}")
    else:
        pipe.send(ring.segments_made)
    pipe.poll(None)


def ping(pipe: PipeEnd, address: str) -> None:
    """Send and receive until the process is killed."""
    link, _ = open_connection(address, TOKEN, {}, timeout_s=SOON_S)
    for k in range(10**9):
        link.send(message(k))
        assert is_message(link.recv(SOON_S), k)
        if k == 20:
            pipe.send("going")


def serve_echo(pipe: PipeEnd, key: str) -> None:
    server = Server(token=TOKEN, on_message=lambda link, value: link.send(value), key=key)
    pipe.send(server.address)
    pipe.poll(None)
