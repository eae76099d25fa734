"""Host memory for offloaded activations: large slabs that are filled in turn and reused whole.

Pinning memory takes milliseconds, and each microbatch needs other sizes. So regions are taken from
slabs one after another. A slab is free again when all of its regions are released.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch

SLAB = 64 << 20  # bytes
ALIGN = 256  # bytes


@dataclass(slots=True, eq=False)
class Slab:
    """One allocation, from which regions are taken from its start to its end."""

    memory: torch.Tensor
    used: int = 0  # bytes
    live: int = 0  # regions that are not released


class Region(NamedTuple):
    """A range of bytes of a slab."""

    memory: torch.Tensor  # uint8
    slab: Slab
    reused: bool  # the first region of a reused slab: copies from the slab may still run


class HostPool:
    """A pool of host memory, pinned for CUDA. Runs on: any thread.

    ``bytes``: memory that the pool holds. It grows to the peak of concurrent use, and stays until
    the pool is deleted.
    """

    def __init__(self, slab_bytes: int = SLAB):
        self._slab_bytes = slab_bytes
        self._lock = threading.Lock()
        self._slabs: dict[bool, list[Slab]] = {False: [], True: []}
        self._current: dict[bool, Slab | None] = {False: None, True: None}
        self._returned: deque[Slab] = deque()

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(len(slab.memory) for slabs in self._slabs.values() for slab in slabs)

    def take(self, size: int, pinned: bool) -> Region:
        """Return a region of ``size`` bytes; the caller gives it back by ``release``."""
        room = -(-size // ALIGN) * ALIGN
        with self._lock:
            while self._returned:
                self._returned.popleft().live -= 1
            slab, reused = self._current[pinned], False
            if slab is None or slab.used + room > len(slab.memory):
                slab = self._free(room, pinned)
                reused = slab is not None
                if slab is None:
                    length = max(self._slab_bytes, room)
                    slab = Slab(torch.empty(length, dtype=torch.uint8, pin_memory=pinned))
                    self._slabs[pinned].append(slab)
                self._current[pinned] = slab
            start = slab.used
            slab.used, slab.live = start + room, slab.live + 1
            return Region(slab.memory[start : start + size], slab, reused)

    def release(self, region: Region) -> None:
        """Give a region back to the pool.

        This takes no lock: the garbage collector may call it anywhere, also inside ``take``.
        """
        self._returned.append(region.slab)

    def _free(self, room: int, pinned: bool) -> Slab | None:
        """Return the smallest free slab of at least ``room`` bytes; None if there is none."""
        free = [s for s in self._slabs[pinned] if not s.live and len(s.memory) >= room]
        if not free:
            return None
        found = min(free, key=lambda slab: len(slab.memory))
        found.used = 0
        return found
