"""Reused memory for microbatches: touching fresh pages costs more than filling them.

A buffer is free again when no array views it. Arrays given to the trainer are views whose ``base``
is the buffer, and so are tensors made from them. So the reference count of a buffer shows whether
it is free, and callers need not return it. Without the interpreter lock a count may change while it
is read; then no buffer is reused.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np


def _references(buffers: list[np.ndarray], i: int) -> int:
    buffer = buffers[i]
    return sys.getrefcount(buffer)


# References to a buffer that only the pool holds. They are measured, since interpreters differ in
# the references that a call adds.
UNUSED = _references([np.empty(1, np.uint8)], 0)

# Far above the number that prefetch keeps in use: a trainer that keeps every array must not make
# the search slow.
MAX_BUFFERS = 64


class BufferPool:
    """A pool of reused buffers; a call with a size returns an unused ``uint8`` array.

    It keeps at most ``max_bytes`` and ``MAX_BUFFERS`` buffers, used ones included, but at least the
    newest one. An older buffer beyond that is freed with its last view.
    """

    def __init__(self, max_bytes: int = 2**30):
        self._buffers: list[np.ndarray] = []
        self._max_bytes = max_bytes
        self._reuses: bool = getattr(sys, "_is_gil_enabled", lambda: True)()
        self._lock = threading.Lock()
        # The number of the buffer returned last: a client that expands microbatches in turn frees
        # one buffer and needs one of the same size.
        self._last = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the pool as a new, empty one: the copy of a bucket has its own memory."""
        return BufferPool, (self._max_bytes,)

    def __call__(self, nbytes: int) -> np.ndarray:
        """Return an unused array of at least ``nbytes`` bytes; its content is undefined."""
        if not self._reuses:
            return np.empty(nbytes, np.uint8)
        with self._lock:
            n = len(self._buffers)
            for i in (*range(self._last, n), *range(min(self._last, n))):
                # A buffer more than a quarter larger would waste memory that the budget counts as
                # used.
                if (
                    nbytes <= self._buffers[i].nbytes <= nbytes + nbytes // 4 + 4096
                    and _references(self._buffers, i) <= UNUSED
                ):
                    # a view: while it or a view of it exists, the buffer counts as used
                    self._last = i
                    return self._buffers[i][:]
            buffer = np.empty(nbytes + nbytes // 8, np.uint8)
            self._buffers.append(buffer)
            self._trim()
            return buffer[:]

    def _trim(self) -> None:
        """Drop the oldest buffers beyond the limits; buffers in use stay alive with their views."""
        held = sum(buffer.nbytes for buffer in self._buffers)
        while (held > self._max_bytes or len(self._buffers) > MAX_BUFFERS) and len(
            self._buffers
        ) > 1:
            held -= self._buffers.pop(0).nbytes

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def close(self) -> None:
        with self._lock:
            self._buffers.clear()
