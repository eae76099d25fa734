"""Memory for microbatches, reused: touching fresh pages costs more than filling them.

A slab is free again when nothing views it any more. Arrays handed to the trainer are views whose
``base`` is the slab, and so are tensors made from them, so its reference count tells; no one has to
give anything back. Without the interpreter's lock a count is read while it changes, and tells
nothing: then nothing is reused.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np


def _references(slabs: list[np.ndarray], i: int) -> int:
    slab = slabs[i]
    return sys.getrefcount(slab)


# References to a slab that only the pool holds. Measured, by the very code that counts:
# interpreters differ in what a call adds.
UNUSED = _references([np.empty(1, np.uint8)], 0)

# far above what prefetch keeps under way; a trainer that keeps every array must not make the search
# long
MAX_SLABS = 64


class BufferPool:
    """Slabs of about the asked size. Holds at most ``max_bytes`` of unused memory; beyond that it
    allocates and forgets.
    """

    def __init__(self, max_bytes: int = 2**30):
        self._slabs: list[np.ndarray] = []
        self._max_bytes = max_bytes
        self._reuses: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, of a bucket that has it say, is a pool of its own."""
        return BufferPool, (self._max_bytes,)

    def __call__(self, nbytes: int) -> np.ndarray:
        """At least nbytes of memory that nobody views; its content is undefined."""
        if not self._reuses:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            for i in range(len(self._slabs)):
                # More than a quarter larger would waste what the budget counts as used.
                if (
                    nbytes <= self._slabs[i].nbytes <= nbytes + nbytes // 4 + 4096
                    and _references(self._slabs, i) <= UNUSED
                ):
                    # a view: while it or a view of it lives, the slab counts as used
                    return self._slabs[i][:]
            slab = np.empty(nbytes + nbytes // 8, np.uint8)
            self._slabs.append(slab)
            self._trim()
            return slab[:]

    def _trim(self) -> None:
        """Forget the oldest slabs beyond the budget; those in use live on with their views."""
        held = sum(slab.nbytes for slab in self._slabs)
        while (held > self._max_bytes or len(self._slabs) > MAX_SLABS) and len(self._slabs) > 1:
            held -= self._slabs.pop(0).nbytes

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs)

    def close(self) -> None:
        with self._lock:
            self._slabs.clear()
