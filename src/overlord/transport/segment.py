"""Segments of shared memory: one memfd each, sealed so that no receiver can shrink it.

Without seals a peer could truncate the file under a mapping; reading it would kill the process
(SIGBUS). The owner maps a segment before it forbids new writable mappings, so only the owner ever
writes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import weakref

import numpy as np

from overlord.errors import FrameError, OverlordError
from overlord.transport.address import HAS_SHARED_MEMORY

SHRINK, GROW, SEAL, FUTURE_WRITE = 0x0002, 0x0004, 0x0001, 0x0010  # linux/fcntl.h
_ADD_SEALS, _GET_SEALS = 1033, 1034
# madvise(2). MAP_POPULATE would touch the pages before huge pages are requested.
_HUGE, _POPULATE_READ, _POPULATE_WRITE = 14, 22, 23


def sealed_memfd(name: str, nbytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """Return a sealed memfd of ``nbytes`` and our mapping of it; ``name`` names its owner."""
    try:
        return _sealed_memfd(f"overlord-{name}", nbytes, others_write=others_write)
    except OSError as e:
        raise OverlordError(
            f"{name}: expected {nbytes} bytes of shared memory, got: {e.strerror or e}; "
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
    """Check a memfd of a peer and map it.

    Reading a file that can shrink, or is shorter than announced, would kill this process.
    """
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise FrameError("expected shared memory, got another kind of file", what)
    try:
        seals = fcntl.fcntl(fd, _GET_SEALS)
    except OSError as e:
        raise FrameError("expected shared memory, got a file that cannot be sealed", what) from e
    if not seals & SHRINK:
        raise FrameError("expected memory that cannot shrink, got no seal", what)
    if nbytes <= 0 or found.st_size != nbytes:
        raise FrameError(f"expected {nbytes} bytes, as announced, got {found.st_size}", what)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    try:
        mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
    except (OSError, ValueError) as e:
        raise FrameError(f"expected to map {nbytes} bytes: {e}", what) from e
    # Holes stay untouched: touching them would allocate memory that the peer only announced.
    if found.st_blocks * 512 >= nbytes:
        _advise(mapped, _HUGE, _POPULATE_READ)
    return mapped


def _advise(mapped: mmap.mmap, *advice: int) -> None:
    """Populate all pages at once, and request huge pages.

    Page faults one by one cost as much as the copy.
    """
    for each in advice:
        # An older kernel, or one without huge pages for shared memory.
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
        """Return a new array over the segment.

        The array is the base of all its views, so it dies with the last view.
        """
        root = np.frombuffer(self.map, np.uint8)
        self._local = weakref.ref(root, on_death)  # type: ignore[arg-type]
        return root[:nbytes]
