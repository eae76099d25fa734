"""A thread-safe cache, bounded by number of items and by bytes.

The least recently used item is evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """A cache that calls ``on_evict`` for evicted and cleared values, not for taken ones.

    ``on_evict`` is called outside the lock.
    """

    def __init__(self, max_items: int, max_bytes: int, on_evict: Callable[[V], None] | None = None):
        self.max_items, self.max_bytes = max_items, max_bytes
        self.nbytes = 0
        self.evictions = 0
        self._items: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = Lock()
        self._on_evict = on_evict

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: K) -> V | None:
        with self._lock:
            if key not in self._items:
                return None
            self._items.move_to_end(key)
            return self._items[key][0]

    def take(self, key: K) -> V | None:
        """Get and remove a value atomically, so that only one thread has it."""
        with self._lock:
            if key not in self._items:
                return None
            value, nbytes = self._items.pop(key)
            self.nbytes -= nbytes
            return value

    def put(self, key: K, value: V, nbytes: int) -> None:
        """Store the value; even one larger than all bounds stays until the next ``put``."""
        removed: list[V] = []
        with self._lock:
            if key in self._items:
                removed.append(self._drop(key))
            self._items[key] = (value, nbytes)
            self.nbytes += nbytes
            while len(self._items) > 1 and (
                len(self._items) > self.max_items or self.nbytes > self.max_bytes
            ):
                removed.append(self._drop(next(iter(self._items))))
                self.evictions += 1
        self._evicted(removed)

    def clear(self, owned: Callable[[K], bool] = lambda _: True) -> None:
        """Remove all keys, or those for which ``owned`` returns true."""
        with self._lock:
            removed = [self._drop(key) for key in [k for k in self._items if owned(k)]]
        self._evicted(removed)

    def _drop(self, key: K) -> V:
        value, nbytes = self._items.pop(key)
        self.nbytes -= nbytes
        return value

    def _evicted(self, removed: list[V]) -> None:
        if self._on_evict is not None:
            for value in removed:
                self._on_evict(value)
