"""The peer's slots as this side sees them: mapped once, read-only, each message counted until its
last view has died.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from overlord.errors import FrameError
from overlord.transport.segment import map_foreign

MAX_SLOTS = 4096  # of one peer: as many as a ring may have
MAX_CELLS = 2**16


class RemoteNotifier:
    """The peer's bell. Lives as long as a message that may ring it."""

    def __init__(self, fd: int):
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class PeerSegments:
    """Slots by number, and what of them is held."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._cells: mmap.mmap | None = None
        self._bell: RemoteNotifier | None = None
        self._live: dict[int, int] = {}  # cell -> slot, of messages that somebody still views

    @property
    def held(self) -> int:
        """Slots of which a view lives."""
        return len(set(self._live.values()))

    @property
    def mapped(self) -> int:
        return len(self._maps)

    def crowded(self, more: list[int], limit: int) -> bool:
        """Whether more than ``limit`` slots were held with these."""
        if len(self._live) + len(more) <= limit:  # messages are quicker to count, and never fewer
            return False
        return len({*more, *self._live.values()}) > limit

    def open(self, cells_fd: int, bell_fd: int, n_cells: int) -> None:
        """The peer's ring: where to note what is free again."""
        if self._cells is not None or not 0 < n_cells <= MAX_CELLS:
            raise FrameError(
                f"expected one ring of at most {MAX_CELLS} cells, got another, or {n_cells} cells"
            )
        if os.readlink(f"/proc/self/fd/{bell_fd}") != "anon_inode:[eventfd]":
            raise FrameError("expected an eventfd as the ring's bell, got another kind of file")
        self._cells = map_foreign(cells_fd, n_cells, what="cells of a ring", write=True)
        os.set_blocking(bell_fd, False)
        self._bell = RemoteNotifier(os.dup(bell_fd))

    def add(self, slot: int, nbytes: int, fd: int) -> None:
        if slot in self._maps or len(self._maps) >= MAX_SLOTS:
            raise FrameError(
                f"expected a new slot, and at most {MAX_SLOTS}, got slot {slot} beside "
                f"{len(self._maps)}"
            )
        self._maps[slot] = map_foreign(fd, nbytes, what=f"slot {slot}")

    def forget(self, slots: Sequence[int]) -> None:
        """The peer has let these go. Views that live keep their mapping."""
        for slot in slots:
            self._maps.pop(slot, None)

    def root(self, slot: int, cell: int) -> np.ndarray:
        """A fresh read-only array over a slot; when the last view of it dies, the peer is told."""
        memory, cells, bell = self._maps.get(slot), self._cells, self._bell
        if memory is None or cells is None or bell is None:
            raise FrameError(
                f"expected a slot that was passed, got slot {slot}; known are "
                f"{sorted(self._maps)[:20]}"
            )
        if cell >= len(cells) or cell in self._live:
            raise FrameError(f"expected a cell that is free, got {cell} of {len(cells)}")
        root = np.frombuffer(memory, np.uint8)
        self._live[cell] = slot
        weakref.finalize(root, _let_go, self._live, cell, cells, bell, os.getpid()).atexit = False
        return root

    def close(self) -> None:
        """Nothing more is read. Messages that are still viewed keep their slot, their cell and the
        bell.
        """
        self._maps.clear()
        self._cells = self._bell = None


def _let_go(
    live: dict[int, int], cell: int, cells: mmap.mmap, bell: RemoteNotifier, pid: int
) -> None:
    """Runs wherever the last view dies, even inside the collector: it takes no lock and waits for
    nothing.
    """
    if os.getpid() != pid:
        return  # a forked child lets go of its copy; the parent still reads
    live.pop(cell, None)  # first: once the cell is written the peer may use it for the next message
    cells[cell] = 1
    with contextlib.suppress(OSError):
        os.eventfd_write(bell.fd, 1)
