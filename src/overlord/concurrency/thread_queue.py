"""A queue of calls that a few daemon threads execute in order."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from overlord.concurrency.timeouts import TIMEOUTS

log = logging.getLogger("overlord")


class ThreadQueue:
    """A few daemon threads that run calls in order."""

    def __init__(self, n: int, name: str):
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"overlord-{name}-{i}", daemon=True)
            for i in range(n)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Append a call."""
        self._work.put(work)

    def is_current(self) -> bool:
        """Return whether the caller runs in one of the threads."""
        return threading.current_thread() in self._threads

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("queued call failed")

    def close(self) -> None:
        """End the threads after the queued calls.

        A thread in a long call is not awaited: it is a daemon.
        """
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(TIMEOUTS.close_s / (2 * len(self._threads)))
