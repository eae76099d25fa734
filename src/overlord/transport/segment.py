"""Pieces of shared memory: one memfd each, sealed so that no one who was handed it can make it
shorter under our feet.

Without seals a peer could truncate the file behind a mapping, and reading would end the process
(SIGBUS). The owner maps a slot before it forbids new writable mappings, so only the owner ever
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
_HUGE, _POPULATE_READ, _POPULATE_WRITE = (
    14,
    22,
    23,
)  # madvise(2); mmap's own populating would come before huge pages are asked for


def sealed_memfd(name: str, nbytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """A memfd of a fixed size and our mapping of it. ``name``: whose it is."""
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
            f"the limit of the size of files, which counts for it too, is {limit} bytes: "
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
            with contextlib.suppress(
                OSError
            ):  # kernels before 5.1 do not know it; receivers map read-only anyway
                fcntl.fcntl(fd, _ADD_SEALS, FUTURE_WRITE)
        fcntl.fcntl(fd, _ADD_SEALS, seals)
    except BaseException:
        os.close(fd)
        raise
    return fd, mapped


def map_foreign(fd: int, nbytes: int, *, what: str, write: bool = False) -> mmap.mmap:
    """A peer's memfd, looked at before it is mapped: a file that can shrink, or is shorter than
    said, would kill the reader.
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
        raise FrameError(f"expected {nbytes} bytes, as was said, got {found.st_size}", what)
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    try:
        mapped = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, access)
    except (OSError, ValueError) as e:
        raise FrameError(f"expected to map {nbytes} bytes: {e}", what) from e
    if (
        found.st_blocks * 512 >= nbytes
    ):  # holes are left alone: to touch them would be to pay for what the peer only announced
        _advise(mapped, _HUGE, _POPULATE_READ)
    return mapped


def _advise(mapped: mmap.mmap, *advice: int) -> None:
    """All pages at once, and large ones where the machine allows it: one by one, on first touch,
    they cost as much as the copy.
    """
    for each in advice:
        with contextlib.suppress(
            OSError
        ):  # an older kernel, or one that has none for shared memory
            mapped.madvise(each)


class Segment:
    """One piece of a ring. Free when no array of it lives here and no peer holds it."""

    __slots__ = (
        "__weakref__",
        "_local",
        "address",
        "fd",
        "holds",
        "id",
        "map",
        "nbytes",
        "retired",
        "turn",
    )

    def __init__(self, id: int, nbytes: int, name: str):
        self.id, self.nbytes = id, nbytes
        self.holds = 0  # by peers; the ring's lock guards it
        self.retired = False  # a peer went away that may still read it: it is never filled again
        self.turn = 0
        self._local: weakref.ref[np.ndarray] | None = None
        if HAS_SHARED_MEMORY:
            self.fd, self.map = sealed_memfd(name, nbytes, others_write=False)
            weakref.finalize(self, os.close, self.fd).atexit = False
        else:
            self.fd, self.map = -1, mmap.mmap(-1, nbytes)
        self.address: int = np.frombuffer(self.map, np.uint8).__array_interface__["data"][0]

    @property
    def viewed(self) -> bool:
        """Whether an array that was handed out, or a view of it, lives in this process."""
        return self._local is not None and self._local() is not None

    @property
    def free(self) -> bool:
        return not self.holds and not self.viewed

    def hand_out(self, nbytes: int, on_death: object) -> np.ndarray:
        """A fresh array over the slot. All views of it have it as their base, so its death says
        that the last view has died.
        """
        root = np.frombuffer(self.map, np.uint8)
        self._local = weakref.ref(root, on_death)  # type: ignore[arg-type]
        return root[:nbytes]
