"""Encode values as messages and decode them.

The encoder decides which arrays are sent by reference and which are copied. An array in a segment
of our pool is sent as (segment, offset); the memfd of the segment is passed once. Other arrays are
copied together into one segment, or into the frame if they are small. Over TCP all arrays are in
the frame.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.errors import FrameError
from overlord.transport import codec, frame
from overlord.transport.frame import (
    CODES,
    DTYPES,
    FORGET,
    FRAME,
    MAX_DIMS,
    POOL,
    SHARED,
    IncomingMessage,
    Memory,
    OutgoingMessage,
)
from overlord.transport.shared_memory import (
    RELEASE_FLAGS,
    Lease,
    Segment,
    SharedMemoryPool,
    map_peer_memfd,
)
from overlord.transport.value_codec import owned

# ----------------------------------------------------------------------------
# The peer's segments in this process: each is mapped once, read-only.
#
# Every message counts as held until its last view dies.

MAX_SEGMENTS = 4096  # segments of one peer: as many as a pool may have
MAX_FLAGS = 2**16
_SAME_VERSION = "run the same version of Overlord on both sides"


class RemoteNotifier:
    """The peer's eventfd for released segments. Every message that may use it keeps it alive."""

    def __init__(self, fd: int):
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class PeerSegments:
    """The mapped segments of one peer by id, and which of them are held."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._flags: mmap.mmap | None = None
        self._notifier: RemoteNotifier | None = None
        self._live: dict[int, int] = {}  # flag -> segment, of messages that are still viewed

    @property
    def held(self) -> int:
        """Number of segments with a live view."""
        return len(set(self._live.values()))

    @property
    def mapped(self) -> int:
        """Number of mapped segments."""
        return len(self._maps)

    def crowded(self, more: list[int], limit: int) -> bool:
        """Return whether the held segments and those in ``more`` are more than ``limit``."""
        if len(self._live) + len(more) <= limit:  # messages are faster to count, and never fewer
            return False
        return len({*more, *self._live.values()}) > limit

    def attach(self, flags_fd: int, notifier_fd: int, n_flags: int) -> None:
        """Map the peer's release flags and duplicate its notifier.

        Raise ``FrameError`` for a second pool, a number of flags outside 1 to MAX_FLAGS, or files
        of another kind.
        """
        if self._flags is not None or not 0 < n_flags <= MAX_FLAGS:
            raise FrameError(
                f"expected one pool of 1 to {MAX_FLAGS} release flags, got a second pool, or "
                f"{n_flags} flags",
                remedy=_SAME_VERSION,
            )
        if os.readlink(f"/proc/self/fd/{notifier_fd}") != "anon_inode:[eventfd]":
            raise FrameError(
                "expected an eventfd as the notifier of the pool, got another kind of file",
                remedy=_SAME_VERSION,
            )
        self._flags = map_peer_memfd(flags_fd, n_flags, what="release flags", write=True)
        os.set_blocking(notifier_fd, False)
        self._notifier = RemoteNotifier(os.dup(notifier_fd))

    def add(self, segment: int, nbytes: int, fd: int) -> None:
        """Map a new segment of the peer from its memfd ``fd``, which stays open."""
        if segment in self._maps or len(self._maps) >= MAX_SEGMENTS:
            raise FrameError(
                f"expected a new segment, and at most {MAX_SEGMENTS} in all, got segment {segment} "
                f"while {len(self._maps)} are mapped",
                remedy=_SAME_VERSION,
            )
        self._maps[segment] = map_peer_memfd(fd, nbytes, what=f"segment {segment}")

    def forget(self, segments: Sequence[int]) -> None:
        """Unmap segments that the peer removed. Live views keep their mapping."""
        for segment in segments:
            self._maps.pop(segment, None)

    def view(self, segment: int, flag: int) -> np.ndarray:
        """Return a new read-only array over a segment; raise ``FrameError`` for an unknown one.

        The release flag ``flag`` is set when the last view of the array dies.
        """
        memory, flags, notifier = self._maps.get(segment), self._flags, self._notifier
        if memory is None or flags is None or notifier is None:
            raise FrameError(
                f"expected one of the mapped segments {sorted(self._maps)[:20]}, got segment "
                f"{segment}",
                remedy=_SAME_VERSION,
            )
        if flag >= len(flags) or flag in self._live:
            raise FrameError(
                f"expected a free release flag below {len(flags)}, got flag {flag}",
                remedy=_SAME_VERSION,
            )
        root = np.frombuffer(memory, np.uint8)
        self._live[flag] = segment
        weakref.finalize(
            root, _release, self._live, flag, flags, notifier, os.getpid()
        ).atexit = False
        return root

    def close(self) -> None:
        """Unmap all segments.

        Messages that are still viewed keep their segment, release flag and notifier.
        """
        self._maps.clear()
        self._flags = self._notifier = None


def _release(
    live: dict[int, int], flag: int, flags: mmap.mmap, notifier: RemoteNotifier, pid: int
) -> None:
    """Set the release flag of a message, and notify the peer.

    It runs where the last view dies, even inside the garbage collector. So it takes no lock and
    never waits.
    """
    if os.getpid() != pid:
        return  # a forked child drops its copy; the parent still reads
    live.pop(flag, None)  # first: once the flag is set, the peer may reuse it
    flags[flag] = 1
    with contextlib.suppress(OSError):
        os.eventfd_write(notifier.fd, 1)


INLINE_BYTES = 2**15  # below this, two copies through the socket cost less than a segment
CHUNK_BYTES = 2**16
# A message by reference starts with the numbers of grants and references, then both lists, padded
# to a multiple of 64 bytes. The frame follows.
_COUNTS = struct.Struct("<II")
# segment, release flag, bytes of the segment if this message passes it for the first time
_GRANT = struct.Struct("<QQQ")
_REFERENCE = struct.Struct(f"<QQQBB6x{MAX_DIMS}Q")  # column, grant, offset, dtype, dims, shape
_NO_DIMS = [(0,) * (MAX_DIMS - n) for n in range(MAX_DIMS + 1)]
_POOL_BODY = struct.Struct("<I")
NOTHING = object()  # result of decoding a message without a value
Take = Callable[[int], np.ndarray | None]


# ----------------------------------------------------------------------------
# The encoder of outgoing messages and the decoder of incoming ones.


@dataclass(slots=True, kw_only=True)
class EncodedMessage:
    """An encoded value: its header, its columns, and the columns that are in segments."""

    header: bytes
    columns: list[np.ndarray]
    placed: dict[int, tuple[Segment, int]]  # column -> segment, offset
    keep: np.ndarray | None = None


class MessageEncoder:
    """The encoder of the outgoing messages of one connection."""

    def __init__(self, pool: SharedMemoryPool | None, name: str, hangup_fd: int = -1):
        self.pool, self._name, self._hangup_fd = pool, name, hangup_fd
        self._lease: Lease | None = None

    def encode(self, value: Any, take: Take) -> EncodedMessage:
        """Encode a value, and copy arrays that are not in a segment into memory from ``take``.

        They stay in the frame if they have at most ``INLINE_BYTES`` in all, or ``take`` returns
        None. Call without a lock: it may take long or wait for a segment.
        """
        header, columns = codec.encode(value)
        encoded = EncodedMessage(header=header, columns=columns, placed={})
        if self.pool is None or not columns:
            return encoded
        loose, total = [], 0
        for i, column in enumerate(columns):
            place = self.pool.locate(column) if column.nbytes and not owned(column) else None
            if place is not None:
                encoded.placed[i] = place
            elif column.nbytes:
                loose.append((i, total))
                total += -(-column.nbytes // frame.ALIGN) * frame.ALIGN
        if total > INLINE_BYTES and (memory := take(total)) is not None:
            self._copy(encoded, loose, memory)
        return encoded

    def _copy(
        self, encoded: EncodedMessage, loose: list[tuple[int, int]], memory: np.ndarray
    ) -> None:
        assert self.pool is not None
        found = self.pool.locate(memory)
        if found is None:
            return  # the pool was closed meanwhile
        for i, at in loose:
            column = encoded.columns[i]
            np.copyto(memory[at : at + column.nbytes], column.reshape(-1).view(np.uint8))
            encoded.placed[i] = (found[0], found[1] + at)
        encoded.keep = memory

    def messages(self, encoded: EncodedMessage) -> list[OutgoingMessage]:
        """Return the messages to send, in order.

        Call with the connection's lock held, because the first message with a segment also passes
        its memfd.
        """
        out = self.forget_notices()
        flags: dict[int, tuple[int, Segment]] = {}  # segment number -> flag, segment
        if encoded.placed:
            out += self._announce_pool()
            flags = self._grant(encoded)
        if not flags:
            return [*out, OutgoingMessage(FRAME, frame.pack(encoded.header, encoded.columns))]
        return [*out, self._by_reference(encoded, flags)]

    @property
    def has_notices(self) -> bool:
        """Whether segments were removed that the peer has not been told of."""
        return self._lease is not None and len(self._lease.forgets) > 0

    def forget_notices(self) -> list[OutgoingMessage]:
        """Return the notice that lists removed segments, so that the peer unmaps them.

        The list is empty if no segment was removed since the last call.
        """
        if self._lease is None or not self._lease.forgets:
            return []
        gone = [self._lease.forgets.popleft() for _ in range(min(len(self._lease.forgets), 4096))]
        return [OutgoingMessage(FORGET, [np.array(gone, "<i8").tobytes()])]

    def _announce_pool(self) -> list[OutgoingMessage]:
        """Return the message that passes release flags and notifier; empty after the first call."""
        assert self.pool is not None
        if self._lease is not None:
            return []
        self._lease = Lease(self._name, self._hangup_fd)
        self.pool.attach(self._lease)
        return [
            OutgoingMessage(
                POOL,
                [_POOL_BODY.pack(RELEASE_FLAGS)],
                [self._lease.fd, self.pool.notifier.fd],
                keep=(self._lease, self.pool.notifier),
            )
        ]

    def _grant(self, encoded: EncodedMessage) -> dict[int, tuple[int, Segment]]:
        """Return the release flag of every segment that the message refers to, by segment id.

        A column for which no flag is free is removed from ``encoded.placed``.
        """
        assert self.pool is not None
        assert self._lease is not None
        flags: dict[int, tuple[int, Segment]] = {}
        for i, (segment, _) in list(encoded.placed.items()):
            if segment.id not in flags:
                flag = self.pool.grant(self._lease, segment)
                # The peer holds too many messages, so this column is copied through the socket.
                if flag < 0:
                    del encoded.placed[i]
                    continue
                flags[segment.id] = (flag, segment)
        return flags

    def _by_reference(
        self, encoded: EncodedMessage, flags: dict[int, tuple[int, Segment]]
    ) -> OutgoingMessage:
        assert self._lease is not None
        order = {number: k for k, number in enumerate(flags)}
        fresh = [segment for _, segment in flags.values() if segment.id not in self._lease.known]
        parts = [_COUNTS.pack(len(flags), len(encoded.placed))]
        parts += [
            _GRANT.pack(n, flag, segment.nbytes if segment in fresh else 0)
            for n, (flag, segment) in flags.items()
        ]
        for i, (segment, offset) in encoded.placed.items():
            shape = encoded.columns[i].shape
            code = CODES[encoded.columns[i].dtype]
            parts.append(
                _REFERENCE.pack(
                    i, order[segment.id], offset, code, len(shape), *shape, *_NO_DIMS[len(shape)]
                )
            )
        size = sum(map(len, parts))
        parts.append(bytes(-size % frame.ALIGN))
        inline = [column for i, column in enumerate(encoded.columns) if i not in encoded.placed]
        self._lease.known.update(segment.id for segment in fresh)
        pieces = [b"".join(parts), *frame.pack(encoded.header, inline)]
        return OutgoingMessage(SHARED, pieces, [segment.fd for segment in fresh], keep=fresh)

    def close(self) -> None:
        """End the lease, so that the pool no longer waits for this peer."""
        if self.pool is not None and self._lease is not None:
            self.pool.detach(self._lease)


class MessageDecoder:
    """The decoder of the incoming messages of one connection."""

    def __init__(self, memory: Memory, max_held: int):
        self._memory = memory
        self.segments = PeerSegments()
        self.max_held = max_held
        self.copied = 0  # messages that were copied because too many segments were held

    def decode(self, message: IncomingMessage) -> Any:
        """Return the value of a message, or ``NOTHING`` for a notice.

        Raise ``FrameError`` for an invalid message.
        """
        try:
            if message.kind == FRAME:
                self._check_files(message, 0)
                return codec.decode(*frame.unpack(message.body))
            if message.kind == SHARED:
                return self._decode_shared(message)
            self._apply_notice(message)
            return NOTHING
        finally:
            for fd in message.files:
                os.close(fd)

    @staticmethod
    def _check_files(message: IncomingMessage, n: int) -> None:
        if len(message.files) != n:
            raise FrameError(
                f"expected {n} open files with a message of kind {message.kind}, got "
                f"{len(message.files)}",
                remedy=_SAME_VERSION,
            )

    def _apply_notice(self, message: IncomingMessage) -> None:
        body = bytes(message.body)
        if message.kind == FORGET:
            self._check_files(message, 0)
            if len(body) % 8:
                raise FrameError(
                    f"expected segment ids of 8 bytes each in a notice, got {len(body)} bytes",
                    remedy=_SAME_VERSION,
                )
            self.segments.forget(np.frombuffer(body, "<i8").tolist())
        elif message.kind == POOL:
            self._check_files(message, 2)
            if len(body) != _POOL_BODY.size:
                raise FrameError(
                    f"expected {_POOL_BODY.size} bytes in the message that announces a pool, got "
                    f"{len(body)}",
                    remedy=_SAME_VERSION,
                )
            self.segments.attach(*message.files, *_POOL_BODY.unpack(body))

    def _decode_shared(self, message: IncomingMessage) -> Any:
        grants, references, at = _table(message.body)
        header, columns = frame.unpack(memoryview(message.body)[at:])  # type: ignore[arg-type]
        fresh = [(segment, nbytes) for segment, _, nbytes in grants if nbytes]
        self._check_files(message, len(fresh))
        for (segment, nbytes), fd in zip(fresh, message.files, strict=True):
            self.segments.add(segment, nbytes, fd)
        crowded = self.segments.crowded([segment for segment, _, _ in grants], self.max_held)
        views = [self.segments.view(segment, flag) for segment, flag, _ in grants]
        joined = _merge_columns(references, columns, views)
        if crowded:
            self.copied += 1
            joined = [self._copied(column) for column in joined]
        return codec.decode(header, joined)

    def _copied(self, column: np.ndarray) -> np.ndarray:
        if column.nbytes < CHUNK_BYTES:
            out = column.copy()
        else:
            out = (
                self._memory(column.nbytes)[: column.nbytes]
                .view(column.dtype)
                .reshape(column.shape)
            )
            np.copyto(out, column)
        out.flags.writeable = False
        return out

    def close(self) -> None:
        self.segments.close()


def _table(body: bytes | np.ndarray) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int]:
    """Return the grants and references of a shared message, and the offset of its frame."""
    if len(body) < _COUNTS.size:
        raise FrameError(
            f"expected at least {_COUNTS.size} bytes in a shared message, got {len(body)}",
            remedy=_SAME_VERSION,
        )
    n_grants, n_references = _COUNTS.unpack_from(body)  # type: ignore[arg-type]
    middle = _COUNTS.size + n_grants * _GRANT.size
    end = middle + n_references * _REFERENCE.size
    at = -(-end // frame.ALIGN) * frame.ALIGN
    if at > len(body):
        raise FrameError(
            f"expected {n_grants} grants and {n_references} references, got {len(body)} bytes",
            remedy=_SAME_VERSION,
        )
    view = memoryview(body)  # type: ignore[arg-type]
    return (
        list(_GRANT.iter_unpack(view[_COUNTS.size : middle])),
        list(_REFERENCE.iter_unpack(view[middle:end])),
        at,
    )


def _merge_columns(
    rows: list[tuple[int, ...]], inline: list[np.ndarray], views: list[np.ndarray]
) -> list[np.ndarray]:
    """Return all columns in order: referenced ones at their index, inline ones between them."""
    placed = {row[0]: row for row in rows}
    total = len(rows) + len(inline)
    if len(placed) != len(rows) or max(placed, default=0) >= max(1, total):
        raise FrameError(
            f"expected {len(rows)} references to distinct columns below {total}, got columns "
            f"{sorted(placed)[:20]}",
            remedy=_SAME_VERSION,
        )
    rest = iter(inline)
    return [_view(placed[i], views) if i in placed else next(rest) for i in range(total)]


def _view(row: tuple[int, ...], views: list[np.ndarray]) -> np.ndarray:
    """Return the array to which a reference points, as a view of its segment.

    Every field of the reference is checked before it is used.
    """
    i, grant, offset, code, dims = row[:5]
    if grant >= len(views) or code >= len(DTYPES) or dims > MAX_DIMS:
        raise FrameError(
            f"expected a grant below {len(views)}, a dtype code below {len(DTYPES)} and at most "
            f"{MAX_DIMS} dimensions, got {grant}, {code} and {dims}",
            f"column {i}",
            _SAME_VERSION,
        )
    shape, root, dtype = row[5 : 5 + dims], views[grant], DTYPES[code]
    if offset + math.prod(shape) * dtype.itemsize > len(root):
        raise FrameError(
            f"expected a range within the {len(root)} bytes of its segment, got "
            f"{dtype}{list(shape)} at {offset}",
            f"column {i}",
            _SAME_VERSION,
        )
    try:
        return np.ndarray(shape, dtype, root, offset)
    except (ValueError, OverflowError) as e:
        raise FrameError(
            f"expected a shape that fits memory, got {shape}", f"column {i}", _SAME_VERSION
        ) from e
