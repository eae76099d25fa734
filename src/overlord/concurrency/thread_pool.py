"""The threads of a process that execute blocking work, shared by all its sessions.

A training and an evaluation job in one process would otherwise have a thread for every core each.
Owners take turns, so that none of them starves.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from overlord.concurrency.timeouts import TIMEOUTS

WAITING = 32  # concurrent reads of object stores: they wait for replies, not for a CPU core


@dataclass(slots=True, eq=False)
class Task:
    """Work of an owner. ``run`` executes it, ``report`` passes an error instead of its result.

    ``waits``: the properties of work that may hang; None for other work.
    """

    owner: object
    run: Callable[[Task], None]
    report: Callable[[Task, Any, BaseException], None]
    work: Callable[[], Any]
    name: str
    done: Callable[[Any, BaseException | None], None]
    size: int = 1
    waits: Any = None
    began: float = 0.0
    reported: bool = False  # its result was reported, or it was given up


@dataclass(slots=True, eq=False)
class _Share:
    """The queued tasks of one owner, and the most threads that it has a use for."""

    max_threads: int
    urgent: deque[Task] = field(default_factory=deque)
    normal: deque[Task] = field(default_factory=deque)

    def __len__(self) -> int:
        return len(self.urgent) + len(self.normal)


class WorkerThreads:
    """Daemon threads that execute queued tasks. Owners take turns; urgent tasks of one go first.

    Another thread starts when all are busy, up to the largest ``max_threads`` of an owner. A thread
    that is stuck in a read does not count. Runs on: any thread.
    """

    def __init__(self, name: str):
        self._name = name
        self._shares: dict[object, _Share] = {}  # the owner whose turn is next comes first
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._finished = threading.Condition(lock)  # a task has ended
        self._idle = self._started = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._running: set[Task] = set()

    def join(self, owner: object, max_threads: int) -> None:
        """Add an owner of tasks."""
        with self._changed:
            self._shares[owner] = _Share(max_threads)

    def put(self, task: Task, urgent: bool) -> None:
        """Queue a task; drop it if its owner has left."""
        with self._changed:
            if (share := self._shares.get(task.owner)) is None:
                return
            (share.urgent if urgent else share.normal).append(task)
            self._grow()
            self._changed.notify()

    @property
    def _limit(self) -> int:
        most = max((share.max_threads for share in self._shares.values()), default=0)
        return most + self._stuck()

    def _queued(self) -> int:
        return sum(map(len, self._shares.values()))

    def _grow(self) -> None:
        if self._queued() <= self._idle or self._closed:
            return
        if len(self._threads) < self._limit:
            self._started += 1
            name = f"{self._name}-{self._started - 1}"
            self._threads.append(threading.Thread(target=self._loop, name=name, daemon=True))
            self._threads[-1].start()

    def _stuck(self) -> int:
        now = time.monotonic()
        return sum(
            task.waits is not None and now - task.began > TIMEOUTS.stuck_s for task in self._running
        )

    def _next(self) -> Task | None:
        """Return the next task, and give the turn to the next owner. The caller holds the lock."""
        for owner, share in self._shares.items():
            if share:
                del self._shares[owner]
                self._shares[owner] = share  # after all others
                return (share.urgent or share.normal).popleft()
        return None

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while (task := self._next()) is None and not self._ends():
                    self._changed.wait()
                self._idle -= 1
                if task is None:
                    self._threads.remove(threading.current_thread())
                    return
                task.began = time.monotonic()
                self._running.add(task)
            task.run(task)
            with self._changed:
                self._running.discard(task)
                del task
                self._finished.notify_all()  # an owner that leaves waits for its tasks
                # The stuck thread that this one replaced has returned.
                if self._ends():
                    self._threads.remove(threading.current_thread())
                    return

    def _ends(self) -> bool:
        """Return whether the current thread is superfluous. The caller holds the lock."""
        return self._closed or len(self._threads) > self._limit

    def watch(self) -> list[Task]:
        """Return running tasks that can hang, and start a thread for each stuck one."""
        with self._changed:
            self._grow()
            return [task for task in self._running if task.waits is not None]

    def leave(self, owner: object, timeout_s: float) -> None:
        """Drop the queued tasks of an owner; wait for its running ones up to ``timeout_s``."""
        current = threading.current_thread()
        with self._changed:
            self._shares.pop(owner, None)
            self._changed.notify_all()  # superfluous threads end
            if current not in self._threads:
                self._finished.wait_for(lambda: not self._has_running(owner), timeout_s)

    def _has_running(self, owner: object) -> bool:
        return any(task.owner is owner for task in self._running)

    def close(self, timeout_s: float) -> None:
        """Drop queued tasks and end the threads; wait for them up to ``timeout_s`` in all.

        A thread that is still in a read then ends by itself: it is a daemon.
        """
        with self._changed:
            self._closed = True
            self._shares.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s / max(1, len(threads)))


class ThreadPool:
    """The threads of a process: some for work, others for reads of object stores.

    A store that does not answer must not block other work. One more thread gives up reads that
    never end.
    """

    def __init__(self) -> None:
        self._workers = WorkerThreads("overlord-worker")
        self._waiting = WorkerThreads("overlord-store")
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()

    def join(self, owner: object, workers: int) -> None:
        """Add an owner that has a use for ``workers`` threads."""
        self._workers.join(owner, workers)
        self._waiting.join(owner, max(workers, WAITING))

    def put(self, task: Task, urgent: bool) -> None:
        """Queue a task."""
        if task.waits is not None:
            self._start_watch()
        many = task.waits is not None and task.waits.many
        (self._waiting if many else self._workers).put(task, urgent)

    def _start_watch(self) -> None:
        with _lock:
            if self._watch is None and not self._closed.is_set():
                self._watch = threading.Thread(
                    target=self._watch_reads, name="overlord-watch", daemon=True
                )
                self._watch.start()

    def _watch_reads(self) -> None:
        """Give up reads that never end.

        It runs in its own thread, since the threads of such reads hang.
        """
        while not self._closed.wait(TIMEOUTS.watch_s):
            for task in (*self._workers.watch(), *self._waiting.watch()):
                try:
                    error = None if task.reported else task.waits.overdue()
                except Exception as fault:  # one failure must not end the watch of all others
                    error = fault
                if error is not None:
                    task.report(task, None, error)

    def leave(self, owner: object, timeout_s: float) -> None:
        """Drop the queued tasks of an owner; wait for its running ones up to ``timeout_s``."""
        self._workers.leave(owner, timeout_s / 2)
        self._waiting.leave(owner, timeout_s / 2)

    def close(self, timeout_s: float) -> None:
        """End all threads."""
        self._closed.set()
        self._workers.close(timeout_s / 2)
        self._waiting.close(timeout_s / 2)
        if self._watch is not None and self._watch is not threading.current_thread():
            self._watch.join(timeout_s)


# ----------------------------------------------------------------------------
# The pool of this process. It exists while it has an owner.

_lock = threading.Lock()
_pool: ThreadPool | None = None
_owners: set[object] = set()


def join_pool(owner: object, workers: int) -> ThreadPool:
    """Return the pool of this process with one more owner; the first owner creates it."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPool()
        _owners.add(owner)
        _pool.join(owner, workers)
        return _pool


def leave_pool(owner: object, timeout_s: float) -> None:
    """Remove an owner from the pool of this process; the last one ends the threads. Idempotent."""
    global _pool
    with _lock:
        if owner not in _owners or _pool is None:
            return
        _owners.remove(owner)
        pool, last = _pool, not _owners
        if last:
            _pool = None
    if last:
        pool.close(timeout_s)
    else:
        pool.leave(owner, timeout_s)


def _forget() -> None:
    """Start without a pool in a forked process: a fork copies no thread."""
    global _lock, _pool, _owners
    _lock, _pool, _owners = threading.Lock(), None, set()


os.register_at_fork(after_in_child=_forget)
