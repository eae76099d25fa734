"""Parallel map for work at launch.

Every wait has a deadline, and the error names the path that hangs. The threads are daemons. A
thread pool of the standard library joins its threads at exit, and a thread that hangs in a mount
never ends.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from overlord.errors import StorageError
from overlord.sources.retry import deadline_s
from overlord.sources.timeouts import TIMEOUTS

log = logging.getLogger("overlord")

T = TypeVar("T")
R = TypeVar("R")
# Called when a thread starts to wait: (source, path, number of deadlines that the wait may take).
OnWait = Callable[[str, str, int], None]


@dataclass(frozen=True, slots=True)
class Wait:
    source: str
    path: str
    deadlines: int
    since: float = field(default_factory=time.monotonic)


class SerialMap:
    """Map in the calling thread, for work that never waits for storage.

    Starting threads would take longer than such work.
    """

    def map(
        self,
        work: Callable[[T, OnWait], R],
        items: Sequence[T],
        done: Callable[[R], None] = lambda _: None,
    ) -> list[R]:
        results = []
        for item in items:
            results.append(work(item, lambda *what: None))
            done(results[-1])
        return results


class ParallelMap:
    """Map that starts daemon threads for each call and abandons hanging ones."""

    def __init__(self, workers: int, name: str):
        self._workers, self._name = max(1, workers), name

    def map(
        self,
        work: Callable[[T, OnWait], R],
        items: Sequence[T],
        done: Callable[[R], None] = lambda _: None,
    ) -> list[R]:
        """Return the result of each item, in order.

        ``done`` is called in the calling thread with each result as it arrives. Raises the first
        error of an item, and StorageError if an item waits longer than allowed.
        """
        todo, answers = (
            queue.SimpleQueue[int](),
            queue.SimpleQueue[tuple[int, Any, BaseException | None]](),
        )
        waits: dict[int, Wait] = {}  # the current wait of each thread
        for k in range(len(items)):
            todo.put(k)

        def run() -> None:
            me = threading.get_ident()
            while True:
                try:
                    k = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    answers.put(
                        (k, work(items[k], lambda *what: waits.__setitem__(me, Wait(*what))), None)
                    )
                except BaseException as error:
                    answers.put((k, None, error))
                waits.pop(me, None)

        for n in range(min(self._workers, len(items))):
            threading.Thread(target=run, name=f"{self._name}-{n}", daemon=True).start()
        results: dict[int, Any] = {}
        warn_after = TIMEOUTS.warn_after_s
        while len(results) < len(items):
            try:
                k, answer, error = answers.get(timeout=0.25)
            except queue.Empty:
                warn_after = self._check_waits(waits, warn_after)
                continue
            if error is not None:
                raise error
            results[k], warn_after = answer, TIMEOUTS.warn_after_s
            done(answer)
        return [results[k] for k in range(len(items))]

    def _check_waits(self, waits: dict[int, Wait], warn_after: float) -> float:
        """Check the oldest wait, and return the seconds of waiting before the next warning.

        Logs a warning if the wait is slow. Raises StorageError if it exceeds its limit.
        """
        now, limit = time.monotonic(), deadline_s()
        oldest = min(list(waits.values()), key=lambda wait: wait.since, default=None)
        if oldest is None or (seconds := now - oldest.since) <= min(warn_after, limit):
            return warn_after
        if seconds > limit * oldest.deadlines + TIMEOUTS.slack_s:
            raise StorageError(
                oldest.source,
                f"expected a response of storage, got none for {seconds:.0f} s",
                oldest.path,
                "check the disk or the mount: it hangs",
            )
        if seconds > warn_after:
            log.warning(
                "source %r, %s: waiting for storage for %.0f s", oldest.source, oldest.path, seconds
            )
            return warn_after * 2
        return warn_after
