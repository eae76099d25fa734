"""Memory for microbatches, reused: touching fresh pages costs more than filling them.

A slab is free again when nothing views it any more. Arrays handed to the trainer are views whose ``base`` is the slab, and
so are tensors made from them, so its reference count tells; no one has to give anything back.
"""

from __future__ import annotations

import sys
import threading

import numpy as np

UNUSED = 3  # references to a slab that only the pool holds: the list's, the loop's, and getrefcount's own argument


class SlabPool:
    """Slabs of about the asked size. Holds at most ``max_bytes`` of unused memory; beyond that it allocates and forgets."""

    def __init__(self, max_bytes: int = 2**30):
        self._slabs: list[np.ndarray] = []
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> np.ndarray:
        """At least nbytes of memory that nobody views; its content is undefined."""
        with self._lock:
            for slab in self._slabs:
                # More than a quarter larger would waste what the budget counts as used.
                if nbytes <= slab.nbytes <= nbytes + nbytes // 4 + 4096 and sys.getrefcount(slab) <= UNUSED:
                    return slab[:]  # a view: while it or a view of it lives, the slab counts as used
            slab = np.empty(nbytes + nbytes // 8, np.uint8)
            self._slabs.append(slab)
            self._trim()
            return slab[:]

    def _trim(self) -> None:
        """Forget the oldest slabs beyond the budget; those in use live on with their views."""
        held = sum(slab.nbytes for slab in self._slabs)
        while held > self._max_bytes and len(self._slabs) > 1:
            held -= self._slabs.pop(0).nbytes

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        with self._lock:
            self._slabs.clear()
