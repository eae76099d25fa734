"""Messages on a socket: a fixed header, then a body.

Reading and writing never block; both resume where the socket stopped. Open files (shared memory)
are sent with the first byte of the message that announces them.
"""

from __future__ import annotations

import array
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from overlord.errors import FrameError
from overlord.transport.frame import MAX_FRAME_BYTES

HEAD = struct.Struct("<2sBBIQ")  # magic, kind, open files, reserved, bytes of the body
MAGIC = b"OV"
FRAME, SHARED, FORGET, POOL, BYE = range(1, 6)
SMALL_BODY = 2**16  # limit of FORGET, POOL and BYE, and of the read-ahead
MAX_FILES = 128  # in one message; the kernel allows 253
JOINED_BYTES = 2**15
_STAGE = 2**16
_PIECES = 512  # for one sendmsg; the kernel allows 1024
# Plain numbers: combining the enumerations of the socket module costs more than a system call.
_NOSIGNAL, _CLOEXEC, _CTRUNC = (
    int(getattr(socket, f"MSG_{name}", 0)) for name in ("NOSIGNAL", "CMSG_CLOEXEC", "CTRUNC")
)
_INT = array.array("i").itemsize
_FILES_SPACE = socket.CMSG_SPACE(MAX_FILES * _INT) if hasattr(socket, "CMSG_SPACE") else 0

Memory = Callable[[int], np.ndarray]


class IncomingMessage(NamedTuple):
    kind: int
    body: bytes | np.ndarray
    files: list[int]  # the consumer of the message closes them


class OutgoingMessage:
    """One message to send.

    It keeps alive the memory and the files that it refers to.
    """

    __slots__ = ("files", "keep", "nbytes", "pieces")

    def __init__(
        self,
        kind: int,
        pieces: Sequence[bytes | memoryview],
        files: Sequence[int] = (),
        keep: object = None,
    ):
        size = sum(len(piece) for piece in pieces)
        head = HEAD.pack(MAGIC, kind, len(files), 0, size)
        self.pieces: deque[bytes | memoryview] = deque((head, *pieces))
        if size < JOINED_BYTES:  # a small copy costs less than sending several pieces
            self.pieces = deque((b"".join(self.pieces),))
        self.files, self.keep, self.nbytes = files, keep, size + HEAD.size

    @classmethod
    def raw(cls, data: bytes) -> OutgoingMessage:
        """Return a message of these bytes without a header: the last packet of a handshake."""
        message = cls(BYE, ())
        message.pieces, message.nbytes = deque((data,)), len(data)
        return message

    @property
    def sent(self) -> bool:
        return not self.pieces

    def write(self, sock: socket.socket) -> int:
        """Write to the socket and return the number of bytes that it accepted.

        Raise ``BlockingIOError`` if the socket accepts none.
        """
        if len(self.pieces) == 1 and not self.files:  # the usual case
            taken = sock.send(self.pieces[0], _NOSIGNAL)
            if taken == len(self.pieces[0]):
                self.pieces.clear()
            else:
                self.pieces[0] = memoryview(self.pieces[0])[taken:]
            return taken
        some = [self.pieces[i] for i in range(min(_PIECES, len(self.pieces)))]
        if self.files:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", self.files))]
            taken = sock.sendmsg(some, rights, _NOSIGNAL)
        else:
            taken = sock.sendmsg(some, (), _NOSIGNAL)
        self.files = ()
        left = taken
        while self.pieces and left >= len(self.pieces[0]):
            left -= len(self.pieces.popleft())
        if left:
            self.pieces[0] = memoryview(self.pieces[0])[left:]
        return taken


class SendBuffer:
    """Messages to send, in order, that the socket has not accepted yet."""

    def __init__(self) -> None:
        self._messages: deque[OutgoingMessage] = deque()
        self.nbytes = 0
        self.taken = 0  # bytes that the socket has accepted: shows progress of a slow peer

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: OutgoingMessage, *, first: bool = False) -> None:
        (self._messages.appendleft if first else self._messages.append)(message)
        self.nbytes += message.nbytes

    def write(self, sock: socket.socket) -> bool:
        """Write queued messages; return False if the socket accepts no more for now."""
        try:
            while self._messages:
                message = self._messages[0]
                taken = message.write(sock)
                self.nbytes -= taken
                self.taken += taken
                if message.sent:
                    self._messages.popleft()
        except (BlockingIOError, InterruptedError):
            return False
        return True

    def clear(self) -> None:
        self._messages.clear()
        self.nbytes = 0


class ReceiveBuffer:
    """A parser of received bytes into messages.

    Large bodies are read directly into reused memory.
    """

    def __init__(self, memory: Memory, *, files: bool):
        self._memory, self._takes_files = memory, files
        self._stage = bytearray(_STAGE)
        self._view = memoryview(self._stage)
        self._start = self._end = 0  # range that is read and not yet parsed
        self._large: np.ndarray | None = None
        self._filled = 0
        self._head = (0, 0)  # kind and open files of the large body
        self._files: list[int] = []
        self.ready: deque[IncomingMessage] = deque()

    def read(self, sock: socket.socket) -> bool:
        """Read once; return False once the peer has closed.

        Raise ``BlockingIOError`` if no data has arrived.
        """
        target = (
            self._view[self._end :]
            if self._large is None
            else memoryview(self._large)[self._filled :]  # type: ignore[arg-type]
        )
        if self._takes_files:
            n, ancillary, flags, _ = sock.recvmsg_into([target], _FILES_SPACE, _CLOEXEC)
            self._take_files(ancillary, flags)
        else:
            n = sock.recv_into(target)
        if not n:
            return False
        if self._large is not None:
            self._filled += n
            if self._filled == len(self._large):
                self._finish(*self._head, self._large)
                self._large = None
        else:
            self._end += n
            self._parse()
        if self._files and (
            len(self._files) > MAX_FILES or (self._start == self._end and self._large is None)
        ):
            raise FrameError(
                f"expected no open files, got {len(self._files)} that no message announced"
            )
        return True

    def _take_files(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._files += array.array("i", data[: len(data) - len(data) % _INT])
        if flags & _CTRUNC:
            raise FrameError(
                f"expected at most {MAX_FILES} open files at once, got more, or this "
                "process may open no more"
            )

    def _parse(self) -> None:
        while self._end - self._start >= HEAD.size:
            kind, files, size = self._parse_head()
            body_at = self._start + HEAD.size
            if size > SMALL_BODY - HEAD.size:
                self._begin_large(kind, files, size, body_at)
                return
            if self._end - body_at < size:
                break
            self._start = body_at + size
            self._finish(kind, files, bytes(self._view[body_at : self._start]))
        self._shift()

    def _parse_head(self) -> tuple[int, int, int]:
        magic, kind, files, reserved, size = HEAD.unpack_from(self._stage, self._start)
        if magic != MAGIC or not FRAME <= kind <= BYE or reserved:
            raise FrameError(
                "expected a message, got "
                f"{bytes(self._view[self._start : self._start + HEAD.size])!r}"
            )
        if size > (MAX_FRAME_BYTES if kind in (FRAME, SHARED) else SMALL_BODY - HEAD.size):
            raise FrameError(f"expected a shorter message, got kind {kind} of {size} bytes")
        if files > MAX_FILES or (files and not self._takes_files):
            raise FrameError(
                f"expected at most {MAX_FILES if self._takes_files else 0} open files, "
                f"got {files} announced"
            )
        return kind, files, size

    def _begin_large(self, kind: int, files: int, size: int, body_at: int) -> None:
        try:
            self._large = self._memory(size)[:size]
        except MemoryError as e:
            raise FrameError(f"expected memory for a body of {size} bytes, got none") from e
        self._filled = self._end - body_at
        self._large[: self._filled] = self._view[body_at : self._end]
        self._head = (kind, files)
        self._start = self._end = 0

    def _finish(self, kind: int, n_files: int, body: bytes | np.ndarray) -> None:
        if n_files > len(self._files):
            raise FrameError(
                f"expected {n_files} open files with this message, got {len(self._files)}"
            )
        files, self._files = self._files[:n_files], self._files[n_files:]
        self.ready.append(IncomingMessage(kind, body, files))

    def _shift(self) -> None:
        """Make room for the rest of a partial message."""
        rest = self._end - self._start
        if self._start and rest:
            self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest

    def close(self) -> None:
        """Close received files that no consumer took."""
        for fd in self._files + [fd for message in self.ready for fd in message.files]:
            os.close(fd)
        self._files.clear()
        self.ready.clear()
