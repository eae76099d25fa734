"""Leaving a node whose Ray does not answer any more: stopped, or in the hands of a disk that hangs.
Nothing of Ray is imported here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Iterator

log = logging.getLogger("overlord")

_kept: list[socket.socket] = []  # for as long as this process lives


@contextlib.contextmanager
def not_waited_for(path: str, seconds: float) -> Iterator[None]:
    """Whoever waits for an answer by a socket of this machine hears after that time that none will
    come. Ray waits without end for its node to say that it may leave.
    """
    timer = threading.Timer(seconds, lambda: _give_up(path, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(path: str, seconds: float) -> None:
    if hang_up(path):
        log.warning(
            "Ray's process of this node has not answered for %g s that this program "
            "leaves it, which is not waited for",
            seconds,
        )


def hang_up(path: str) -> int:
    """Nothing more is heard from there; how many waited.

    The other end must not find the link closed when it wakes: Ray kills a program whose link ended,
    though it has said that it leaves, and which of the two it sees first is chance. So this side
    stays open for writing, by a copy of it.
    """
    found = 0
    for fd in [int(name) for name in os.listdir("/dev/fd")]:
        with contextlib.suppress(OSError):  # no socket, not connected, or closed by now
            copy = socket.fromfd(fd, socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                if copy.getpeername() == path:
                    copy.shutdown(socket.SHUT_RD)
                    _kept.append(copy)
                    found += 1
            finally:
                if copy not in _kept:
                    copy.close()
    return found
