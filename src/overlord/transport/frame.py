"""Frames (one message as bytes), and their transfer over a socket without blocking."""

from __future__ import annotations

import array
import math
import os
import socket
import struct
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from overlord.errors import FrameError

# ----------------------------------------------------------------------------
# Frames: one message as bytes, with a small header and then arrays.
#
# Neither packing nor unpacking copies the arrays.
#
#     prefix | table, one entry per column | header | column 0 | column 1 | ...
#
# Every column starts at a multiple of 64 bytes. All numbers are little-endian. The checksum
# covers prefix, table and header. It does not cover columns: damaged data breaks no code, and a
# checksum over gigabytes would cost more than the copy. Every field of a frame is checked before
# it is used.

MAGIC = b"OVFR"
VERSION = 1
ALIGN = 64  # a cache line, and the alignment of vector instructions
MAX_COLUMNS = 65_536
MAX_DIMS = 8
MAX_HEADER_BYTES = 2**24  # decoded objects may take a hundred times as much: empty maps do
MAX_FRAME_BYTES = 2**32

# The code of a dtype is its index here: append new ones at the end.
DTYPES = tuple(
    np.dtype(t)
    for t in ("?", "<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}

# magic, version, reserved, columns, header bytes, frame bytes, reserved
_START = struct.Struct("<4sHHIIQI")
_CRC = struct.Struct("<I")
# dtype code, dimensions, zeros, offset, bytes, the first size, the other sizes
_ENTRY = struct.Struct("<BB6sQQQ56s")
_SIZES = struct.Struct("<7Q")  # the other sizes; 0 for missing dimensions
PREFIX_BYTES = _START.size + _CRC.size
_PADDING = bytes(ALIGN)
_NO_SIZES, _RESERVED = bytes(_SIZES.size), bytes(6)
_DAMAGED = (
    "check that the peer runs the same version of Overlord; else its memory or network damages data"
)


class Frame(NamedTuple):
    """The content of a frame, as read-only views of its buffer."""

    header: memoryview
    columns: list[np.ndarray]


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def size_of(header: bytes, columns: Sequence[np.ndarray]) -> int:
    """Return the size in bytes of the frame that ``pack`` would build."""
    at = PREFIX_BYTES + _ENTRY.size * len(columns) + len(header)
    for column in columns:
        at = _aligned(at) + column.nbytes
    return at


def check_size(header_bytes: int, columns: int) -> None:
    """Raise ``FrameError`` if the header or the columns exceed the limit of a frame."""
    if header_bytes > MAX_HEADER_BYTES or columns > MAX_COLUMNS:
        raise FrameError(
            f"expected at most {MAX_HEADER_BYTES} bytes of header and {MAX_COLUMNS} "
            f"columns, got {header_bytes} and {columns}",
            remedy="send large data as numpy arrays, and many small arrays as one",
        )


def pack(header: bytes, columns: Sequence[np.ndarray]) -> list[bytes | memoryview]:
    """Return the pieces of a frame in order, for ``sendmsg`` or for copying.

    Columns are viewed, not copied. Raise ``FrameError`` if header or columns exceed a limit, or a
    column is not a C-ordered array of a known dtype.
    """
    check_size(len(header), len(columns))
    at = PREFIX_BYTES + _ENTRY.size * len(columns) + len(header)
    entries: list[bytes] = []
    pieces: list[bytes | memoryview] = []
    for column in columns:
        code, shape, nbytes = CODES.get(column.dtype), column.shape, column.nbytes
        if code is None or len(shape) > MAX_DIMS or not column.flags.c_contiguous:
            raise FrameError(
                _unfit(column), f"column {len(entries)}", "convert it (astype, ascontiguousarray)"
            )
        offset = -(-at // ALIGN) * ALIGN
        if len(shape) == 1:  # the usual case
            entries.append(_ENTRY.pack(code, 1, _RESERVED, offset, nbytes, shape[0], _NO_SIZES))
        else:
            sizes = (*shape, *(0,) * (MAX_DIMS - len(shape)))
            entries.append(
                _ENTRY.pack(
                    code, len(shape), _RESERVED, offset, nbytes, sizes[0], _SIZES.pack(*sizes[1:])
                )
            )
        if offset > at:
            pieces.append(_PADDING[: offset - at])
        if nbytes:  # an empty array has no bytes to view
            pieces.append(column.data.cast("B"))
        at = offset + nbytes
    if at > MAX_FRAME_BYTES:
        raise FrameError(
            f"expected a frame of at most {MAX_FRAME_BYTES} bytes, got {at}",
            remedy="send the value in parts",
        )
    start, table = (
        _START.pack(MAGIC, VERSION, 0, len(columns), len(header), at, 0),
        b"".join(entries),
    )
    crc = zlib.crc32(header, zlib.crc32(table, zlib.crc32(start)))
    return [b"".join((start, _CRC.pack(crc), table, header)), *pieces]


def _unfit(column: np.ndarray) -> str:
    """Return why an array cannot be a column."""
    if column.dtype not in CODES:
        return (
            f"expected an array of one of {', '.join(map(str, DTYPES))} in little-endian order, "
            f"got {column.dtype!r}"
        )
    return (
        f"expected an array in C order of at most {MAX_DIMS} dimensions, got shape "
        f"{column.shape} with strides {column.strides}"
    )


class _Start(NamedTuple):
    columns: int
    header_bytes: int
    frame_bytes: int
    header_at: int


def frame_bytes(prefix: Any) -> int:
    """Return the size of a frame, from its first ``PREFIX_BYTES``.

    The size is checked against the limits, so the caller may allocate a buffer of that size.
    """
    return _start(memoryview(prefix).cast("B")).frame_bytes


def _start(view: memoryview) -> _Start:
    if len(view) < PREFIX_BYTES:
        raise FrameError(
            f"expected at least {PREFIX_BYTES} bytes, got {len(view)}", remedy=_DAMAGED
        )
    magic, version, reserved, columns, header_bytes, total, reserved_too = _START.unpack_from(view)
    if magic != MAGIC:
        raise FrameError(
            f"expected a frame that starts with {MAGIC!r}, got {magic!r}", remedy=_DAMAGED
        )
    if version != VERSION:
        raise FrameError(
            f"expected version {VERSION}, got version {version}",
            remedy="run the same version of Overlord on both sides",
        )
    if reserved or reserved_too:
        raise FrameError("expected zeros in the reserved fields, got other values", remedy=_DAMAGED)
    if columns > MAX_COLUMNS or header_bytes > MAX_HEADER_BYTES or total > MAX_FRAME_BYTES:
        raise FrameError(
            f"expected at most {MAX_COLUMNS} columns, {MAX_HEADER_BYTES} bytes of header "
            f"and {MAX_FRAME_BYTES} bytes in all, got {columns}, {header_bytes} and {total}",
            remedy=_DAMAGED,
        )
    header_at = PREFIX_BYTES + _ENTRY.size * columns
    if total < header_at + header_bytes:
        raise FrameError(
            f"expected room for {columns} columns and {header_bytes} bytes of header, got "
            f"{total} bytes",
            remedy=_DAMAGED,
        )
    return _Start(columns, header_bytes, total, header_at)


def unpack(buffer: Any) -> Frame:
    """Return header and columns as read-only views of ``buffer``.

    Raise ``FrameError`` unless the buffer holds exactly one frame.
    """
    try:
        view = memoryview(buffer).cast("B").toreadonly()
    except (TypeError, ValueError) as e:
        raise FrameError(
            f"expected a contiguous buffer, got {type(buffer).__name__}",
            remedy="copy the data into bytes",
        ) from e
    start = _start(view)
    if start.frame_bytes != len(view):
        raise FrameError(
            f"expected {start.frame_bytes} bytes, as the frame states, got {len(view)}",
            remedy=_DAMAGED,
        )
    after = PREFIX_BYTES
    header_end = start.header_at + start.header_bytes
    (wanted,) = _CRC.unpack_from(view, _START.size)
    found = zlib.crc32(view[after:header_end], zlib.crc32(view[: _START.size]))
    if found != wanted:
        raise FrameError(f"expected checksum {wanted:08x}, got {found:08x}", remedy=_DAMAGED)
    return Frame(
        view[start.header_at : header_end],
        _columns(view, view[after : start.header_at], header_end),
    )


def _columns(view: memoryview, table: memoryview, at: int) -> list[np.ndarray]:
    """Return the columns of a frame, according to its table.

    Columns follow each other with no gap beyond alignment. So no column overlaps another or reaches
    beyond the frame.
    """
    columns: list[np.ndarray] = []
    end = len(view)
    for code, dims, reserved, offset, nbytes, size, others in _ENTRY.iter_unpack(table):
        if code >= len(DTYPES) or dims > MAX_DIMS or reserved != _RESERVED:
            raise _wrong(
                len(columns),
                f"expected a dtype code below {len(DTYPES)}, at most {MAX_DIMS} dimensions and "
                f"zeros in the reserved bytes, got code {code}, {dims} and {reserved!r}",
            )
        dtype = DTYPES[code]
        shape = (
            (size,)
            if dims == 1 and others == _NO_SIZES
            else _shape(len(columns), dims, size, others)
        )
        wanted = -(-at // ALIGN) * ALIGN
        if offset != wanted or nbytes != math.prod(shape) * dtype.itemsize or offset + nbytes > end:
            raise _wrong(
                len(columns),
                f"expected {dtype}{shape} at byte {wanted} of {end}, got {nbytes} bytes at byte "
                f"{offset}",
            )
        try:
            columns.append(np.ndarray(shape, dtype, view, offset))
        # An empty array may have other dimensions that are larger than any memory.
        except (ValueError, OverflowError) as e:
            raise _wrong(len(columns), f"expected a shape that fits memory, got {shape}") from e
        at = offset + nbytes
    if at != len(view):
        raise FrameError(
            f"expected the last column to end at byte {len(view)}, got an end at byte {at}",
            remedy=_DAMAGED,
        )
    return columns


def _shape(column: int, dims: int, size: int, others: bytes) -> tuple[int, ...]:
    sizes = (size, *_SIZES.unpack(others))
    if any(sizes[dims:]):
        raise _wrong(column, f"expected {dims} dimensions, got the sizes {sizes}")
    return sizes[:dims]


def _wrong(column: int, problem: str) -> FrameError:
    return FrameError(problem, f"column {column}", _DAMAGED)


# ----------------------------------------------------------------------------
# Messages on a socket: a fixed header, then a body.
#
# Reading and writing never block; both resume where the socket stopped. Open files (shared
# memory) are sent with the first byte of the message that announces them.

HEAD = struct.Struct("<2sBBIQ")  # magic, kind, open files, reserved, bytes of the body
HEAD_MAGIC = b"OV"
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
    """One message to send. It keeps the memory and files alive to which it refers."""

    __slots__ = ("files", "keep", "nbytes", "pieces")

    def __init__(
        self,
        kind: int,
        pieces: Sequence[bytes | memoryview],
        files: Sequence[int] = (),
        keep: object = None,
    ):
        size = sum(len(piece) for piece in pieces)
        head = HEAD.pack(HEAD_MAGIC, kind, len(files), 0, size)
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
        """Read from the socket once, and append complete messages to ``ready``.

        Return False if the peer has closed. Raise ``BlockingIOError`` if no data has arrived, and
        ``FrameError`` if the bytes are invalid.
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
                f"expected no open files, got {len(self._files)} that no message announced",
                remedy=_DAMAGED,
            )
        return True

    def _take_files(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._files += array.array("i", data[: len(data) - len(data) % _INT])
        if flags & _CTRUNC:
            raise FrameError(
                f"expected at most {MAX_FILES} open files at once, got more, or this process "
                "can open no more",
                remedy="raise the limit of open files (ulimit -n)",
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
        if magic != HEAD_MAGIC or not FRAME <= kind <= BYE or reserved:
            raise FrameError(
                "expected the header of a message, got "
                f"{bytes(self._view[self._start : self._start + HEAD.size])!r}",
                remedy=_DAMAGED,
            )
        limit = MAX_FRAME_BYTES if kind in (FRAME, SHARED) else SMALL_BODY - HEAD.size
        if size > limit:
            raise FrameError(
                f"expected at most {limit} bytes in a message of kind {kind}, got {size}",
                remedy=_DAMAGED,
            )
        if files > MAX_FILES or (files and not self._takes_files):
            raise FrameError(
                f"expected a message with at most {MAX_FILES if self._takes_files else 0} open "
                f"files, got a header that announces {files}",
                remedy=_DAMAGED,
            )
        return kind, files, size

    def _begin_large(self, kind: int, files: int, size: int, body_at: int) -> None:
        try:
            self._large = self._memory(size)[:size]
        except MemoryError as e:
            raise FrameError(
                f"could not allocate {size} bytes for a message",
                remedy="free memory, or raise the memory limit of this process",
            ) from e
        self._filled = self._end - body_at
        self._large[: self._filled] = self._view[body_at : self._end]
        self._head = (kind, files)
        self._start = self._end = 0

    def _finish(self, kind: int, n_files: int, body: bytes | np.ndarray) -> None:
        if n_files > len(self._files):
            raise FrameError(
                f"expected {n_files} open files with this message, got {len(self._files)}",
                remedy=_DAMAGED,
            )
        files, self._files = self._files[:n_files], self._files[n_files:]
        self.ready.append(IncomingMessage(kind, body, files))

    def _shift(self) -> None:
        """Move a partial message to the start of the buffer, to make room for the rest of it."""
        rest = self._end - self._start
        if self._start and rest:
            self._view[:rest] = bytes(self._view[self._start : self._end])
        self._start, self._end = 0, rest

    def close(self) -> None:
        """Close received files that were not consumed, and drop unread messages."""
        for fd in self._files + [fd for message in self.ready for fd in message.files]:
            os.close(fd)
        self._files.clear()
        self.ready.clear()
