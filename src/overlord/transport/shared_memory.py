"""Shared memory between processes: sealed segments, and the pool in which messages are built."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import select
import stat
import threading
import time
import weakref
from bisect import bisect_right
from collections import Counter, deque

import numpy as np

from overlord.errors import DataStall, FrameError, OverlordError
from overlord.transport.address import HAS_SHARED_MEMORY
from overlord.transport.timeouts import TIMEOUTS

# ----------------------------------------------------------------------------
# Segments of shared memory: one memfd each, sealed so that no receiver can shrink it.
#
# Without seals a peer could truncate the file under a mapping; reading it would kill the process
# (SIGBUS). The owner maps a segment before it forbids new writable mappings, so only the owner
# ever writes.

SHRINK, GROW, SEAL, FUTURE_WRITE = 0x0002, 0x0004, 0x0001, 0x0010  # linux/fcntl.h
_ADD_SEALS, _GET_SEALS = 1033, 1034
# madvise(2). MAP_POPULATE would touch the pages before huge pages are requested.
_HUGE, _POPULATE_READ, _POPULATE_WRITE = 14, 22, 23
_SAME_VERSION = "run the same version of Overlord on both sides"


def sealed_memfd(name: str, nbytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """Return a sealed memfd of ``nbytes`` and our writable mapping of it.

    ``name``: its owner, for errors and ``/proc``. ``others_write``: peers may map it writable.
    Raise ``OverlordError`` if the memory cannot be allocated. The caller closes the descriptor.
    """
    try:
        return _sealed_memfd(f"overlord-{name}", nbytes, others_write=others_write)
    except OSError as e:
        raise OverlordError(
            f"{name}: could not allocate {nbytes} bytes of shared memory: {e.strerror or e}; "
            f"{_remedy(e)}"
        ) from e


def _remedy(error: OSError) -> str:
    if error.errno == errno.EFBIG:
        import resource  # not on every platform; neither are memfds

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return (
            f"the file size limit, which applies to shared memory, is {limit} bytes: "
            "raise it (ulimit -f unlimited)"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "raise the limit of open files (ulimit -n)"
    return "free memory on this machine, or raise the container's limit"


def _sealed_memfd(name: str, nbytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        _advise(mapped, _HUGE, _POPULATE_WRITE)
        seals = SHRINK | GROW | SEAL
        if not others_write:
            # Kernels before 5.1 do not have this seal; receivers map read-only anyway.
            with contextlib.suppress(OSError):
                fcntl.fcntl(fd, _ADD_SEALS, FUTURE_WRITE)
        fcntl.fcntl(fd, _ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd, mapped


def map_peer_memfd(fd: int, nbytes: int, *, what: str, write: bool = False) -> mmap.mmap:
    """Check a memfd of a peer and map it, read-only unless ``write``.

    Reading a file that can shrink, or is shorter than announced, would kill this process. Raise
    ``FrameError`` for such a file. ``what``: name of the memory in errors.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise FrameError("expected shared memory, got another kind of file", what, _SAME_VERSION)
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError as e:
        raise FrameError(
            "expected shared memory, got a file that cannot be sealed", what, _SAME_VERSION
        ) from e
    if not seals & SHRINK:
        raise FrameError("expected memory that cannot shrink, got no seal", what, _SAME_VERSION)
    if nbytes <= 0 or found.st_size != nbytes:
        raise FrameError(
            f"expected {nbytes} bytes, as announced, got {found.st_size}", what, _SAME_VERSION
        )
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    try:
        mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
    except (OSError, ValueError) as e:
        raise FrameError(
            f"could not map {nbytes} bytes: {e}",
            what,
            "raise the limit of address space (ulimit -v) of this process",
        ) from e
    # Holes stay untouched: touching them would allocate memory that the peer only announced.
    if found.st_blocks * 512 >= nbytes:
        _advise(mapped, _HUGE, _POPULATE_READ)
    return mapped


def _advise(mapped: mmap.mmap, *advice: int) -> None:
    """Advise the kernel to use huge pages for a mapping and to populate all its pages at once.

    Single page faults would cost as much as the copy. Unsupported advice is ignored.
    """
    for each in advice:
        # An older kernel, or one without huge pages for shared memory, refuses the advice.
        with contextlib.suppress(OSError):
            mapped.madvise(each)


class Segment:
    """One segment of a pool.

    It is free when no local array over it is alive and no peer holds it.
    """

    __slots__ = (
        "__weakref__",
        "_local",
        "address",
        "fd",
        "grants",
        "id",
        "last_use",
        "map",
        "nbytes",
        "retired",
    )

    def __init__(self, id: int, nbytes: int, name: str):
        self.id, self.nbytes = id, nbytes
        self.grants = 0  # messages to peers that refer to it; guarded by the lock of the pool
        self.retired = False  # a lost peer may still read it: it is never filled again
        self.last_use = 0
        self._local: weakref.ref[np.ndarray] | None = None
        if HAS_SHARED_MEMORY:
            self.fd, self.map = sealed_memfd(name, nbytes, others_write=False)
            weakref.finalize(self, os.close, self.fd).atexit = False
        else:
            self.fd, self.map = -1, mmap.mmap(-1, nbytes)
        self.address: int = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]

    @property
    def viewed(self) -> bool:
        """Whether an array over the segment, or a view of it, is alive in this process."""
        return self._local is not None and self._local() is not None

    @property
    def free(self) -> bool:
        return not self.grants and not self.viewed

    def new_array(self, nbytes: int, on_death: object) -> np.ndarray:
        """Return an array of the first ``nbytes`` bytes of the segment.

        All its views have the same base, and ``on_death`` is called when the last of them dies.
        """
        root = np.frombuffer(self.map, np.uint8)
        self._local = weakref.ref(root, on_death)  # type: ignore[arg-type]
        return root[:nbytes]


# ----------------------------------------------------------------------------
# A pool of shared-memory segments in which messages are built.
#
# Segments are reused, because touching fresh pages costs more than the copy. The pool returns a
# segment as an array. The segment is free again when no view of it is alive in this process and
# no peer holds it. For each message a peer has a *release flag*, one byte of shared memory. The
# peer sets the flag when its last view dies, and notifies the pool by an eventfd. So the owner
# detects a release without reading a socket, and waiting callers wake up.

# messages by reference that one peer may hold; more are copied through the socket
RELEASE_FLAGS = 1024
SMALLEST = 2**16
_HANGUP = getattr(select, "POLLRDHUP", 0)


class Lease:
    """The segments of a pool that the peer of one connection holds."""

    def __init__(self, name: str, hangup_fd: int = -1):
        self.name, self.hangup_fd = name, hangup_fd
        self.known: set[int] = set()  # ids of segments whose memfd was passed
        self.forgets: deque[int] = deque()  # ids of removed segments that the peer has to unmap
        self.held: dict[int, Segment] = {}  # by flag
        self.gone = False
        self.fd, self._map = sealed_memfd(
            "the release flags of a connection", RELEASE_FLAGS, others_write=True
        )
        self._unused = list(range(RELEASE_FLAGS - 1, -1, -1))

    def grant(self, segment: Segment) -> int:
        """Count one more message that refers to the segment; return its release flag.

        Return -1 if no flag is free.
        """
        if self.gone or not self._unused:
            return -1
        flag = self._unused.pop()
        self.held[flag] = segment
        segment.grants += 1
        return flag

    def collect(self) -> None:
        """Take back the segments that the peer has released."""
        if not self.held:
            return
        # A copy, since the peer writes concurrently. It may write anything: only its own messages
        # are affected.
        flags = self._map[:]
        for flag in [flag for flag in self.held if flags[flag]]:
            self.held.pop(flag).grants -= 1
            self._map[flag] = 0
            self._unused.append(flag)

    def drop(self) -> None:
        """End the lease of a lost peer, and retire the segments that it holds.

        The peer may still read them if only its connection is lost, so they are not filled again.
        """
        self.collect()
        self.gone = True
        for segment in self.held.values():
            segment.grants -= 1
            segment.retired = True
        self.held.clear()
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedMemoryPool:
    """A pool of shared-memory segments; a call with a size returns an unused ``uint8`` array.

    It has the interface of ``BufferPool``. A call waits while all segments are in use.
    """

    def __init__(
        self,
        *,
        max_bytes: int = 2**30,
        max_segments: int = 64,
        name: str = "",
        wait_s: float = 60.0,
    ):
        self.max_bytes, self.max_segments, self.name, self.wait_s = (
            max_bytes,
            max_segments,
            name,
            wait_s,
        )
        # A leaf lock: while it is held, no other lock is taken and nothing waits.
        self._lock = threading.Lock()
        self._wait_lock = threading.Lock()  # held by the caller that waits for a segment
        self._reset()

    def _reset(self) -> None:
        self._segments: list[Segment] = []
        self._addresses: list[int] = []  # of the segments, ascending
        self._by_address: list[Segment] = []
        self._leases: list[Lease] = []
        self._uses = self._ids = 0
        self._waiting = False
        self._pid = os.getpid()
        self.notifier = Notifier()
        self.segments_made = 0  # over the life of the pool; constant in steady state

    def __call__(self, nbytes: int) -> np.ndarray:
        """Return an unused array of ``nbytes`` bytes with undefined content.

        Raise ``DataStall`` if no segment is free within the pool's ``wait_s``, and
        ``OverlordError`` if ``nbytes`` exceeds ``max_bytes``.
        """
        return self.wait(nbytes, self.wait_s)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    @property
    def n_segments(self) -> int:
        return len(self._segments)

    # allocating

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return an unused array of ``nbytes`` bytes, or None if no segment is free; never wait."""
        with self._lock:
            if os.getpid() != self._pid:  # a forked child must not write to its parent's memory
                self._reset()
            for lease in self._leases:
                lease.collect()
            self._drop_retired()
            segment = self._find_free(nbytes, 2 * nbytes + SMALLEST) or self._grow(nbytes)
            if segment is None:
                return None
            self._uses += 1
            segment.last_use = self._uses
            return segment.new_array(nbytes, self._on_death)

    def wait(self, nbytes: int, wait_s: float) -> np.ndarray:
        """Return an unused array of ``nbytes`` bytes; wait up to ``wait_s`` for a free segment.

        Raise ``DataStall`` if none is free by then, ``OverlordError`` if ``nbytes`` exceeds
        ``max_bytes``.
        """
        if nbytes > self.max_bytes:
            raise OverlordError(
                f"shared-memory pool {self.name!r}: expected a request of at most "
                f"max_bytes={self.max_bytes}, got {nbytes} bytes; raise it (launch: ring_bytes)"
            )
        found = self.take(nbytes)
        if found is not None:
            return found
        deadline = time.monotonic() + wait_s
        if not self._wait_lock.acquire(timeout=max(0.0, wait_s)):
            raise DataStall(self._holders_text(nbytes), wait_s)
        try:
            self._waiting = True
            while (found := self.take(nbytes)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DataStall(self._holders_text(nbytes), wait_s)
                self._wait_for_release(min(left, TIMEOUTS.lost_wake_s))
            return found
        finally:
            self._waiting = False
            self._wait_lock.release()

    def _find_free(self, nbytes: int, at_most: int) -> Segment | None:
        """Return the free segment of ``nbytes`` to ``at_most`` bytes that was used last, or None.

        Its memory may still be in the caches of the processor.
        """
        fits = [s for s in self._segments if nbytes <= s.nbytes <= at_most and s.free]
        return max(fits, key=lambda s: s.last_use, default=None)

    def _grow(self, nbytes: int) -> Segment | None:
        """Return a new segment of at least ``nbytes``, or None if the pool is full.

        If the pool has no room, return a larger free segment, or else replace the free segments
        that were used longest ago.
        """
        size = min(segment_size(nbytes), self.max_bytes)
        if size < nbytes:
            return None
        if not self._has_room(size):
            if (loose := self._find_free(nbytes, self.max_bytes)) is not None:
                return loose
            free = sorted((s for s in self._segments if s.free), key=lambda s: s.last_use)
            if size > self.max_bytes - self.nbytes + sum(s.nbytes for s in free) or (
                not free and len(self._segments) >= self.max_segments
            ):
                return None
            while not self._has_room(size):
                self._remove(free.pop(0))
        elif small := [s for s in self._segments if nbytes // 2 <= s.nbytes < nbytes and s.free]:
            # Messages are slightly larger now, so this segment would not be used again.
            self._remove(min(small, key=lambda s: s.last_use))
        self._ids += 1
        self.segments_made += 1
        segment = Segment(self._ids, size, self.name)
        self._segments.append(segment)
        self._sort()
        return segment

    def _sort(self) -> None:
        self._by_address = sorted(self._segments, key=lambda segment: segment.address)
        self._addresses = [segment.address for segment in self._by_address]

    def _has_room(self, size: int) -> bool:
        return len(self._segments) < self.max_segments and self.nbytes + size <= self.max_bytes

    def _remove(self, segment: Segment) -> None:
        """Remove a segment. Its memory is freed with its last mapping."""
        self._segments.remove(segment)
        self._sort()
        for lease in self._leases:
            if segment.id in lease.known:
                lease.known.discard(segment.id)
                lease.forgets.append(segment.id)

    def _drop_retired(self) -> None:
        for segment in [s for s in self._segments if s.retired and not s.grants]:
            self._remove(segment)  # views in this process keep the memory

    # waiting

    def _on_death(self, _: object) -> None:
        """Wake a waiting caller, because the last local view of a segment died.

        It runs inside the garbage collector, so it takes no lock.
        """
        if self._waiting:
            self.notifier.notify()

    def _wait_for_release(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a segment is released or a watched peer disconnects.

        Peers with a ``hangup_fd`` are watched here, because no thread reads their connections.
        """
        if self.notifier.fd < 0:
            time.sleep(min(seconds, 0.1))
            return
        poll = select.poll()
        poll.register(self.notifier.fd, select.POLLIN)
        with self._lock:
            watched = {h.hangup_fd: h for h in self._leases if h.hangup_fd >= 0}
        for fd in watched:
            poll.register(fd, _HANGUP)
        for fd, _ in poll.poll(seconds * 1000):
            if fd in watched:
                self.detach(watched[fd])
            else:
                self.notifier.clear()

    def _holders_text(self, nbytes: int) -> str:
        with self._lock:
            viewed = sum(segment.viewed for segment in self._segments)
            peers = {
                h.name: n
                for h in self._leases
                if (n := len(Counter(segment.id for segment in h.held.values())))
            }
        held = ", ".join(f"{name} holds {n}" for name, n in peers.items())
        used = [f"{viewed} are viewed here"] * bool(viewed) + [held] * bool(held)
        return (
            f"a free segment of {nbytes} bytes in shared-memory pool {self.name!r}: of its "
            f"{len(self._segments)} segments "
            f"({self.nbytes} of {self.max_bytes} bytes) {'; '.join(used) or 'none is large enough'}"
        )

    # for connections

    def locate(self, array: np.ndarray) -> tuple[Segment, int] | None:
        """Return the segment that contains an array, and the array's offset in bytes there.

        Return None if the array is not in a segment of this pool.
        """
        if not self._addresses:
            return None
        address: int = array.__array_interface__["data"][0]
        with self._lock:
            i = bisect_right(self._addresses, address) - 1
            segment = self._by_address[i] if i >= 0 else None
        if segment is None or address + array.nbytes > segment.address + segment.nbytes:
            return None
        return segment, address - segment.address

    def attach(self, lease: Lease) -> None:
        """Register the lease of a new connection."""
        with self._lock:
            self._leases.append(lease)

    def detach(self, lease: Lease) -> None:
        """End the lease of a lost or closed connection."""
        with self._lock:
            if lease in self._leases:
                self._leases.remove(lease)
            if not lease.gone:
                lease.drop()
            self._drop_retired()
        if self._waiting:
            self.notifier.notify()

    def grant(self, lease: Lease, segment: Segment) -> int:
        """Lend a segment to the peer of a lease for one message.

        Return the release flag of the message; -1 if none is free, so that it must be copied.
        """
        with self._lock:
            lease.collect()
            return lease.grant(segment)

    def close(self) -> None:
        """End all leases and remove all segments. Live views keep their memory, here and in peers.

        Idempotent.
        """
        with self._lock:
            for lease in self._leases:
                lease.drop()
            self._leases.clear()
            self._segments.clear()
            self._sort()


class Notifier:
    """An eventfd that any process can signal without blocking."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if HAS_SHARED_MEMORY else -1

    def notify(self) -> None:
        with contextlib.suppress(OSError):  # full: it is signalled already
            os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def segment_size(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to a quarter of the power of two below it, at least 64 KiB.

    So messages of similar sizes share segments.
    """
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(SMALLEST, -(-nbytes // step) * step)
