"""A queue of calls that a few daemon threads execute in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

log = logging.getLogger("overlord")

CLOSE_S = 0.5  # that closing waits for calls in progress


class ThreadQueue:
    """A few daemon threads that do what they are handed, in order."""

    def __init__(self, n: int, name: str):
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"overlord-{name}-{i}", daemon=True)
            for i in range(n)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def is_me(self) -> bool:
        """Whether one of them is who asks."""
        return threading.current_thread() in self._threads

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("a request could not be answered")

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        for thread in (
            self._threads
        ):  # one in the middle of a long request is left to end by itself: it is a daemon
            if thread is not threading.current_thread():
                thread.join(CLOSE_S / (2 * len(self._threads)))
