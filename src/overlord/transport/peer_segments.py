"""The peer's segments in this process: each is mapped once, read-only.

Every message counts as held until its last view dies.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from overlord.errors import FrameError
from overlord.transport.segment import map_peer_memfd

MAX_SEGMENTS = 4096  # segments of one peer: as many as a pool may have
MAX_FLAGS = 2**16


class RemoteNotifier:
    """The peer's notifier. Every message that may use it keeps it alive."""

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
        """Return whether more than ``limit`` segments would be held after adding ``more``."""
        if len(self._live) + len(more) <= limit:  # messages are faster to count, and never fewer
            return False
        return len({*more, *self._live.values()}) > limit

    def attach(self, flags_fd: int, notifier_fd: int, n_flags: int) -> None:
        """Map the peer's release flags and keep its notifier."""
        if self._flags is not None or not 0 < n_flags <= MAX_FLAGS:
            raise FrameError(
                f"expected one pool of at most {MAX_FLAGS} release flags, got another, or {n_flags}"
            )
        if os.readlink(f"/proc/self/fd/{notifier_fd}") != "anon_inode:[eventfd]":
            raise FrameError(
                "expected an eventfd as the notifier of the pool, got another kind of file"
            )
        self._flags = map_peer_memfd(flags_fd, n_flags, what="release flags", write=True)
        os.set_blocking(notifier_fd, False)
        self._notifier = RemoteNotifier(os.dup(notifier_fd))

    def add(self, segment: int, nbytes: int, fd: int) -> None:
        """Map a new segment of the peer."""
        if segment in self._maps or len(self._maps) >= MAX_SEGMENTS:
            raise FrameError(
                f"expected a new segment, and at most {MAX_SEGMENTS}, got segment {segment} after "
                f"{len(self._maps)}"
            )
        self._maps[segment] = map_peer_memfd(fd, nbytes, what=f"segment {segment}")

    def forget(self, segments: Sequence[int]) -> None:
        """Unmap segments that the peer removed. Live views keep their mapping."""
        for segment in segments:
            self._maps.pop(segment, None)

    def view(self, segment: int, flag: int) -> np.ndarray:
        """Return a new read-only array over a segment.

        Its release flag is set when its last view dies.
        """
        memory, flags, notifier = self._maps.get(segment), self._flags, self._notifier
        if memory is None or flags is None or notifier is None:
            raise FrameError(
                f"expected a segment that was passed, got segment {segment}; known segments: "
                f"{sorted(self._maps)[:20]}"
            )
        if flag >= len(flags) or flag in self._live:
            raise FrameError(f"expected a release flag that is free, got {flag} of {len(flags)}")
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
