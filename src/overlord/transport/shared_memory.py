"""Shared memory to build messages in: a few slots, filled again and again. Touching fresh pages
costs more than the copy.

A slot is handed out as an array. It is free again when no view of it lives in this process and no
peer holds it: a peer notes in a byte of shared memory (a *cell*, one for each message) that its
last view has died, and rings the ring's bell (an eventfd). So the owner learns of it without
reading a socket, and whoever waits for a slot is woken.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from bisect import bisect_right
from collections import Counter, deque

import numpy as np

from overlord.errors import DataStall, OverlordError
from overlord.transport.address import HAS_SHARED_MEMORY
from overlord.transport.segment import Segment, sealed_memfd

# messages by reference that one peer may hold; beyond it they are copied through the socket
CELLS = 1024
SMALLEST = 2**16
LOST_WAKE_S = 1.0  # how long a wake-up that was lost can cost
_HANGUP = getattr(select, "POLLRDHUP", 0)


class Lease:
    """What the peer of one link holds of a ring."""

    def __init__(self, name: str, hangup_fd: int = -1):
        self.name, self.hangup_fd = name, hangup_fd
        self.known: set[int] = set()  # slots whose memfd was passed
        self.forgets: deque[int] = deque()  # of these, the ones that are no more
        self.held: dict[int, Segment] = {}  # by cell
        self.gone = False
        self.fd, self._map = sealed_memfd("the cells of a link", CELLS, others_write=True)
        self._unused = list(range(CELLS - 1, -1, -1))

    def hold(self, slot: Segment) -> int:
        """Counts one more message that refers to the slot; -1 if there are too many."""
        if self.gone or not self._unused:
            return -1
        cell = self._unused.pop()
        self.held[cell] = slot
        slot.holds += 1
        return cell

    def collect(self) -> None:
        """Take back what the peer has let go."""
        if not self.held:
            return
        said = self._map[
            :
            # a copy: it changes while we look. A peer may write what it likes there; only its own
            # messages count
        ]
        for cell in [cell for cell in self.held if said[cell]]:
            self.held.pop(cell).holds -= 1
            self._map[cell] = 0
            self._unused.append(cell)

    def drop(self) -> None:
        """The peer went away. What it held it may still read, if only its link is gone: such slots
        are not filled again.
        """
        self.collect()
        self.gone = True
        for slot in self.held.values():
            slot.holds -= 1
            slot.retired = True
        self.held.clear()
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class SharedMemoryPool:
    """Called with a size it gives a ``uint8`` array in shared memory that nobody views, as
    ``SlabPool`` does; waits when all is in use.
    """

    def __init__(
        self, *, max_bytes: int = 2**30, max_slots: int = 64, name: str = "", wait_s: float = 60.0
    ):
        self.max_bytes, self.max_slots, self.name, self.wait_s = max_bytes, max_slots, name, wait_s
        self._lock = (
            threading.Lock()
        )  # a leaf: nothing else is locked, and nothing waits, while it is held
        self._turn = threading.Lock()  # held by the one who waits for a slot
        self._fresh()

    def _fresh(self) -> None:
        self._slots: list[Segment] = []
        self._addresses: list[int] = []  # of the slots, rising
        self._by_address: list[Segment] = []
        self._holders: list[Lease] = []
        self._turns = self._ids = 0
        self._waiting = False
        self._pid = os.getpid()
        self.bell = Notifier()
        self.slots_made = 0  # over the ring's life: in steady state it stands still

    def __call__(self, nbytes: int) -> np.ndarray:
        """nbytes of memory that nobody views, content undefined; ``DataStall`` after ``wait_s``
        without any.
        """
        return self.wait(nbytes, self.wait_s)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    @property
    def n_slots(self) -> int:
        return len(self._slots)

    # taking

    def take(self, nbytes: int) -> np.ndarray | None:
        """The same without waiting: None if there is none. For threads that others wait for."""
        with self._lock:
            if os.getpid() != self._pid:  # a forked child must not fill what its parent fills
                self._fresh()
            for holder in self._holders:
                holder.collect()
            self._drop_retired()
            slot = self._fitting(nbytes, 2 * nbytes + SMALLEST) or self._grown(nbytes)
            if slot is None:
                return None
            self._turns += 1
            slot.turn = self._turns
            return slot.hand_out(nbytes, self._on_death)

    def wait(self, nbytes: int, wait_s: float) -> np.ndarray:
        """The same, waiting up to ``wait_s``."""
        if nbytes > self.max_bytes:
            raise OverlordError(
                f"ring {self.name!r}: {nbytes} bytes were asked for, max_bytes is "
                f"{self.max_bytes}; raise it (launch: ring_bytes)"
            )
        found = self.take(nbytes)
        if found is not None:
            return found
        deadline = time.monotonic() + wait_s
        if not self._turn.acquire(timeout=max(0.0, wait_s)):
            raise DataStall(self._who_holds(nbytes), wait_s)
        try:
            self._waiting = True
            while (found := self.take(nbytes)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DataStall(self._who_holds(nbytes), wait_s)
                self._sleep(min(left, LOST_WAKE_S))
            return found
        finally:
            self._waiting = False
            self._turn.release()

    def _fitting(self, nbytes: int, at_most: int) -> Segment | None:
        """The free slot that was used last: its memory may still be in the cache."""
        fits = [s for s in self._slots if nbytes <= s.nbytes <= at_most and s.free]
        return max(fits, key=lambda s: s.turn, default=None)

    def _grown(self, nbytes: int) -> Segment | None:
        """A new slot if the budget allows; else one that is too large; else a new one in the place
        of free ones that are too small.
        """
        size = min(slot_size(nbytes), self.max_bytes)
        if size < nbytes:
            return None
        if not self._has_room(size):
            if (loose := self._fitting(nbytes, self.max_bytes)) is not None:
                return loose
            free = sorted((s for s in self._slots if s.free), key=lambda s: s.turn)
            if size > self.max_bytes - self.nbytes + sum(s.nbytes for s in free) or (
                not free and len(self._slots) >= self.max_slots
            ):
                return None
            while not self._has_room(size):
                self._remove(free.pop(0))
        elif small := [s for s in self._slots if nbytes // 2 <= s.nbytes < nbytes and s.free]:
            self._remove(
                min(small, key=lambda s: s.turn)
            )  # messages have grown a little: it would not be used again
        self._ids += 1
        self.slots_made += 1
        slot = Segment(self._ids, size, self.name)
        self._slots.append(slot)
        self._sort()
        return slot

    def _sort(self) -> None:
        self._by_address = sorted(self._slots, key=lambda slot: slot.address)
        self._addresses = [slot.address for slot in self._by_address]

    def _has_room(self, size: int) -> bool:
        return len(self._slots) < self.max_slots and self.nbytes + size <= self.max_bytes

    def _remove(self, slot: Segment) -> None:
        """Forget a slot; its memory goes when the last mapping of it does."""
        self._slots.remove(slot)
        self._sort()
        for holder in self._holders:
            if slot.id in holder.known:
                holder.known.discard(slot.id)
                holder.forgets.append(slot.id)

    def _drop_retired(self) -> None:
        for slot in [s for s in self._slots if s.retired and not s.holds]:
            self._remove(
                slot
            )  # views of it in this process keep the memory, not the place in the ring

    # waiting

    def _on_death(self, _: object) -> None:
        """The last local view of a slot died. Runs inside the collector, anywhere: it must not take
        a lock.
        """
        if self._waiting:
            self.bell.ring()

    def _sleep(self, seconds: float) -> None:
        """Until the bell rings, or a peer without a thread of ours hangs up."""
        if self.bell.fd < 0:
            time.sleep(min(seconds, 0.1))
            return
        poll = select.poll()
        poll.register(self.bell.fd, select.POLLIN)
        with self._lock:
            watched = {h.hangup_fd: h for h in self._holders if h.hangup_fd >= 0}
        for fd in watched:
            poll.register(fd, _HANGUP)
        for fd, _ in poll.poll(seconds * 1000):
            if fd in watched:
                self.detach(watched[fd])
            else:
                self.bell.silence()

    def _who_holds(self, nbytes: int) -> str:
        with self._lock:
            viewed = sum(slot.viewed for slot in self._slots)
            peers = {
                h.name: n
                for h in self._holders
                if (n := len(Counter(slot.id for slot in h.held.values())))
            }
        held = ", ".join(f"{name} holds {n}" for name, n in peers.items())
        used = [f"{viewed} are viewed here"] * bool(viewed) + [held] * bool(held)
        return (
            f"a free slot of {nbytes} bytes in ring {self.name!r}: of its {len(self._slots)} slots "
            f"({self.nbytes} of {self.max_bytes} bytes) {'; '.join(used) or 'none is large enough'}"
        )

    # links

    def locate(self, array: np.ndarray) -> tuple[Segment, int] | None:
        """The slot an array lies in, and where."""
        if not self._addresses:
            return None
        address: int = array.__array_interface__["data"][0]
        with self._lock:
            i = bisect_right(self._addresses, address) - 1
            slot = self._by_address[i] if i >= 0 else None
        if slot is None or address + array.nbytes > slot.address + slot.nbytes:
            return None
        return slot, address - slot.address

    def attach(self, holder: Lease) -> None:
        with self._lock:
            self._holders.append(holder)

    def detach(self, holder: Lease) -> None:
        """The peer is gone, and with it its claims."""
        with self._lock:
            if holder in self._holders:
                self._holders.remove(holder)
            if not holder.gone:
                holder.drop()
            self._drop_retired()
        if self._waiting:
            self.bell.ring()

    def hold(self, holder: Lease, slot: Segment) -> int:
        """The cell of one more message to this peer; -1: it has too many."""
        with self._lock:
            holder.collect()
            return holder.hold(slot)

    def close(self) -> None:
        """Forget all slots. Views that live keep their memory, peers theirs."""
        with self._lock:
            for holder in self._holders:
                holder.drop()
            self._holders.clear()
            self._slots.clear()
            self._sort()


class Notifier:
    """An eventfd that anyone may ring, and that never makes the one who rings it wait."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if HAS_SHARED_MEMORY else -1

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it rings already
            os.eventfd_write(self.fd, 1)

    def silence(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_read(self.fd)

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


def slot_size(nbytes: int) -> int:
    """At least so much, in steps of a quarter of a power of two: sizes that vary a little share
    their slots.
    """
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return max(SMALLEST, -(-nbytes // step) * step)
