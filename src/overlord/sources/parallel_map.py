"""Work of many threads at launch, none of which is waited for without end: a mount that hangs is
named.

The threads are daemons. A pool of the standard library would wait for its threads when the program
ends, and a thread that hangs in a mount never does.
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
from overlord.sources.retry import SLACK_S, deadline_s

log = logging.getLogger("overlord")

T = TypeVar("T")
R = TypeVar("R")
At = Callable[
    [str, str, int], None
]  # a source, the path of it that a thread begins to wait for, and how many deadlines that may take

TELL_S = 10.0  # of silence, then it is told; and again each time it has doubled


@dataclass(frozen=True, slots=True)
class Wait:
    source: str
    path: str
    deadlines: int
    since: float = field(default_factory=time.monotonic)


class SerialMap:
    """The same for work that waits for nothing: starting threads would take longer."""

    def map(
        self,
        work: Callable[[T, At], R],
        items: Sequence[T],
        done: Callable[[R], None] = lambda _: None,
    ) -> list[R]:
        found = []
        for item in items:
            found.append(work(item, lambda *what: None))
            done(found[-1])
        return found


class ParallelMap:
    """Threads that are started for one call of ``map`` after the other, and forgotten if one
    hangs.
    """

    def __init__(self, workers: int, name: str):
        self._workers, self._name = max(1, workers), name

    def map(
        self,
        work: Callable[[T, At], R],
        items: Sequence[T],
        done: Callable[[R], None] = lambda _: None,
    ) -> list[R]:
        """What comes of each, in their order; ``done`` is told of each as it comes. Raises what one
        raises, and StorageError if one waits longer than it may.
        """
        todo, answers = (
            queue.SimpleQueue[int](),
            queue.SimpleQueue[tuple[int, Any, BaseException | None]](),
        )
        waits: dict[int, Wait] = {}  # of each thread
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
        found: dict[int, Any] = {}
        told = TELL_S
        while len(found) < len(items):
            try:
                k, answer, error = answers.get(timeout=0.25)
            except queue.Empty:
                told = self._look(waits, told)
                continue
            if error is not None:
                raise error
            found[k], told = answer, TELL_S
            done(answer)
        return [found[k] for k in range(len(items))]

    def _look(self, waits: dict[int, Wait], told: float) -> float:
        """Tells of what takes long, and ends what takes too long."""
        now, limit = time.monotonic(), deadline_s()
        oldest = min(list(waits.values()), key=lambda wait: wait.since, default=None)
        if oldest is None or (seconds := now - oldest.since) <= min(told, limit):
            return told
        if seconds > limit * oldest.deadlines + SLACK_S:
            raise StorageError(
                oldest.source,
                f"no answer for {seconds:.0f} s",
                oldest.path,
                "the disk or the mount hangs: look at it",
            )
        if seconds > told:
            log.warning("source %r, %s: no answer for %.0f s", oldest.source, oldest.path, seconds)
            return told * 2
        return told
