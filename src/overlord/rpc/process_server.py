"""The inside of an actor that is a process: build it, then execute calls from its socket.

The socket closes when the parent exits, for any reason. Then this process exits too, even in the
middle of a method.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from overlord.errors import FrameError
from overlord.process import forkserver
from overlord.process.exit import exit_now
from overlord.rpc.server import CONTROL, ActorServer, exit_code
from overlord.transport.codec import encode
from overlord.transport.frame import pack, unpack
from overlord.transport.socket_io import FRAME, OutgoingMessage, ReceiveBuffer

_NUMBER = struct.Struct("<Q")
HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
# The parent takes the end of the socket for the end of the process, so it is kept open.
_open_sockets: list[socket.socket] = []


class CallSocket:
    """The actor's end of the socket: it receives calls and sends replies.

    Any thread may reply.
    """

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._sock, self._lock = sock, threading.Lock()
        self._buffer = ReceiveBuffer(allocate, files=False)

    def next_call(self) -> tuple[int, memoryview, list[np.ndarray]]:
        """Wait for the next call; exit if the parent has exited."""
        while not self._buffer.ready:
            if not self._buffer.read(self._sock):
                exit_now(1)
        return decode_message(self._buffer.ready.popleft().body)

    def reply(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        """Send a reply; exit if the parent has exited."""
        message = encode_message(number, header, columns)
        with self._lock:
            try:
                while not message.sent:
                    message.write(self._sock)
            except OSError:  # the parent is gone
                exit_now(1)


def encode_message(number: int, header: bytes, columns: list[np.ndarray]) -> OutgoingMessage:
    """Return a call or a reply as a message; the number of the call precedes its header."""
    return OutgoingMessage(FRAME, pack(_NUMBER.pack(number) + header, columns))


def decode_message(body: bytes | np.ndarray) -> tuple[int, memoryview, list[np.ndarray]]:
    """Return number, header and columns of a call or a reply."""
    header, columns = unpack(body)
    if len(header) < _NUMBER.size:
        raise FrameError(f"expected the number of a call, got {len(header)} bytes")
    return _NUMBER.unpack_from(header)[0], header[_NUMBER.size :], columns


def allocate(nbytes: int) -> np.ndarray:
    """Return new memory for one large message."""
    return np.empty(nbytes, np.uint8)


def serve(
    sock: socket.socket,
    name: str,
    environ: Mapping[str, str],
    factory: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Run the process of an actor.

    Factory and arguments are sent with its start, the only time that code crosses a process
    boundary.
    """
    # Ctrl-C reaches the whole process group; the parent decides when to exit.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forkserver.die_with_parent()
    forkserver.share_server()
    threading.Thread(
        target=_exit_with_parent, args=(sock,), name="overlord watch", daemon=True
    ).start()
    _open_sockets.append(sock)
    _adopt_environment(environ)
    calls = CallSocket(sock)
    # Started: later failures are not caused by the import of the program's main file.
    calls.reply(CONTROL, *encode((True, None)))
    server = ActorServer(name, calls.reply)
    try:
        if not server.build(lambda: factory(*args)):
            _exit_now(1)
        while True:
            number, header, columns = calls.next_call()
            if number == CONTROL:
                break
            server.perform(number, header, columns)
    except SystemExit as e:
        _exit_now(exit_code(e))
    server.close()


def _adopt_environment(environ: Mapping[str, str]) -> None:
    """Replace the environment by the current one of the parent.

    The environment of the fork server is older.
    """
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    os.environ.update(environ)


def _exit_with_parent(sock: socket.socket) -> None:
    """Exit when the parent exits, whatever the main thread is doing."""
    poller, parent = select.poll(), multiprocessing.parent_process()
    poller.register(sock, HANGUP)
    if parent is not None and hasattr(os, "pidfd_open"):
        # A forked copy of the parent (a DataLoader worker) holds the socket open, but not this.
        try:
            poller.register(os.pidfd_open(parent.pid), select.POLLIN)  # type: ignore[arg-type]
        except ProcessLookupError:
            exit_now(1)
        except OSError:  # a sandbox that forbids it; the socket must suffice
            pass
    poller.poll()
    exit_now(1)


def _exit_now(code: int) -> NoReturn:
    """Flush the output and exit without waiting for threads of the actor."""
    sys.stdout.flush()
    sys.stderr.flush()
    exit_now(code)
