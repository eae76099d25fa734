"""The inside of an actor that is a process: built, then one call after another from its socket,
until it is asked to leave.

The socket ends with the parent, however that ends; so does this process, even in the middle of a
method.
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
from overlord.rpc.server import ITSELF, ActorServer, exit_code
from overlord.transport.codec import encode
from overlord.transport.frame import pack, unpack
from overlord.transport.socket_io import FRAME, OutgoingMessage, ReceiveBuffer

_NUMBER = struct.Struct("<Q")
HANGUP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
_kept: list[
    socket.socket
    # the parent takes the end of the socket for the end of the process, so it must not come sooner
] = []


class Line:
    """The actor's end of the socket: calls in, replies out. Replies may come from any thread."""

    def __init__(self, sock: socket.socket):
        sock.setblocking(True)
        self._sock, self._lock = sock, threading.Lock()
        self._inbox = ReceiveBuffer(room, files=False)

    def next_call(self) -> tuple[int, memoryview, list[np.ndarray]]:
        while not self._inbox.ready:
            if not self._inbox.read(self._sock):
                os._exit(1)
        return opened(self._inbox.ready.popleft().body)

    def reply(self, number: int, header: bytes, columns: list[np.ndarray]) -> None:
        parcel = packed(number, header, columns)
        with self._lock:
            try:
                while not parcel.sent:
                    parcel.write(self._sock)
            except OSError:  # there is nobody to work for
                os._exit(1)


def packed(number: int, header: bytes, columns: list[np.ndarray]) -> OutgoingMessage:
    """A call or a reply as it travels: the number of the call stands before what is encoded."""
    return OutgoingMessage(FRAME, pack(_NUMBER.pack(number) + header, columns))


def opened(body: bytes | np.ndarray) -> tuple[int, memoryview, list[np.ndarray]]:
    header, columns = unpack(body)
    if len(header) < _NUMBER.size:
        raise FrameError(f"expected the number of a call, got {len(header)} bytes")
    return _NUMBER.unpack_from(header)[0], header[_NUMBER.size :], columns


def room(nbytes: int) -> np.ndarray:
    """Memory for one large message, that lives as long as someone looks at it."""
    return np.empty(nbytes, np.uint8)


def serve(
    sock: socket.socket,
    name: str,
    environ: Mapping[str, str],
    factory: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """The life of the process. Factory and arguments came with its start, the one place where code
    crosses.
    """
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent says when to leave
    forkserver.die_with_parent()
    forkserver.share_server()
    threading.Thread(target=_watch, args=(sock,), name="overlord watch", daemon=True).start()
    _kept.append(sock)
    _take_over(environ)
    line = Line(sock)
    line.reply(
        ITSELF, *encode((True, None))
    )  # started: what fails from here on is no fault of the program's main file
    performer = ActorServer(name, line.reply)
    try:
        if not performer.build(lambda: factory(*args)):
            _leave_now(1)
        while True:
            number, header, columns = line.next_call()
            if number == ITSELF:
                break
            performer.perform(number, header, columns)
    except SystemExit as e:
        _leave_now(exit_code(e))
    performer.close()


def _take_over(environ: Mapping[str, str]) -> None:
    """The environment of the program now; that of the fork server is from when it started."""
    for key in os.environ.keys() - environ.keys():
        del os.environ[key]
    os.environ.update(environ)


def _watch(sock: socket.socket) -> None:
    """Ends the process with its parent, whatever the main thread is doing."""
    poller, parent = select.poll(), multiprocessing.parent_process()
    poller.register(sock, HANGUP)
    if parent is not None and hasattr(os, "pidfd_open"):
        # a copy of the parent that was forked (a DataLoader's worker) holds the socket open, but
        # not this
        try:
            poller.register(os.pidfd_open(parent.pid), select.POLLIN)  # type: ignore[arg-type]
        except ProcessLookupError:
            os._exit(1)
        except OSError:  # a sandbox that forbids it; the socket has to do
            pass
    poller.poll()
    os._exit(1)


def _leave_now(code: int) -> NoReturn:
    """Without waiting for threads the actor may have: nobody could call it any more."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
