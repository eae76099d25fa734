"""The event loop of a process, its command loop, and the threads that do its blocking work."""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from overlord.concurrency.thread_pool import Task, join_pool, leave_pool
from overlord.concurrency.timeouts import TIMEOUTS
from overlord.errors import ActorLost, DataStall, WouldBlock

log = logging.getLogger("overlord")

# ----------------------------------------------------------------------------
# The command loop of a process, and the executor that runs its slow work.

Done = Callable[[Any, BaseException | None], None]


class BlockingWork(Protocol):
    """The properties of work that may wait for storage, for minutes or forever.

    Such work runs on the event loop only if ``quick`` allows it.
    """

    @property
    def many(self) -> bool:
        """Whether the work waits for replies and not for a CPU core.

        Then many calls may run concurrently.
        """
        ...

    @property
    def quick(self) -> bool:
        """Whether the work never hangs.

        Such work may run on the event loop, within ``no_wait()``, if it was short so far.
        """
        ...

    def no_wait(self) -> AbstractContextManager[None]:
        """Return a context in which work raises ``errors.WouldBlock`` instead of waiting."""
        ...

    def overdue(self) -> Exception | None:
        """Return an error if the work exceeded its deadline and is to be given up, else None.

        A watch thread calls it periodically. A result that arrives later is dropped.
        """
        ...


class Executor(Protocol):
    """An executor of work, which calls ``done(result, error)`` on the event loop.

    ``error`` is None if the work succeeded. Work of one name takes time in proportion to ``size``.
    """

    def submit(
        self,
        name: str,
        work: Callable[[], Any],
        done: Done,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: BlockingWork | None = None,
    ) -> None: ...
    def close(self) -> None: ...


class CommandLoop:
    """A loop that executes commands in order and is never re-entered.

    Commands that an execution adds are executed after it. ``check`` runs after every command
    (invariants, for tests), ``after`` once the queue is empty.
    """

    def __init__(
        self,
        execute: Callable[[Any], None],
        *,
        check: Callable[[], None] | None = None,
        after: Callable[[], None] | None = None,
    ):
        self._execute, self._check, self._after = execute, check, after
        self.queue: deque[Any] = deque()  # commands that are not executed yet
        self.running = False

    def run(self, commands: Iterable[Any] = ()) -> None:
        """Add commands and execute all queued ones, unless an execution is in progress."""
        self.queue.extend(commands)
        if self.running:
            return
        self.running = True
        try:
            while self.queue:
                self._execute(self.queue.popleft())
                if self._check is not None:
                    self._check()
        finally:
            self.running = False
        if self._after is not None:
            self._after()

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """Remove queued commands for which ``unwanted`` returns True."""
        self.queue = deque(command for command in self.queue if not unwanted(command))


# ----------------------------------------------------------------------------
# The event loop and the thread pool of a process.
#
# One thread runs all state machines by direct call; a pool of threads reads, transforms and builds.
# Threads suffice because pyarrow, tokenizers, zstd and numpy's large copies release the
# interpreter lock. A source whose transform holds it gets a worker process
# (``transforms/transform_process.py``).

OURS = str(Path(__file__).resolve().parents[1])  # the folder of this package


class EventLoop:
    """One thread that runs posted calls in order.

    All state machines run on it, so none needs a lock.
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._thread = threading.Thread(
            target=self._loop, name=f"overlord-loop-{name}", daemon=True
        )
        self.broken: BaseException | None = None
        self.call_started = 0.0  # start time of the running call
        self._after: Callable[[], float | None] = lambda: None

    def start(
        self,
        failed: Callable[[BaseException], None],
        after: Callable[[], float | None] = lambda: None,
    ) -> None:
        """Start the thread.

        ``failed`` receives an exception that no call handled; the loop ends with it. ``after`` runs
        after calls. If it returns a number of seconds, it runs again after that time without a
        call.
        """
        self._failed, self._after = failed, after
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        """Run a call on the loop, without waiting for it."""
        self._calls.put(call)

    def call(self, call: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        """Run a call on the loop, wait for it, and return its result or raise its exception.

        ``what`` is the subject of the ``DataStall`` at the deadline. Raise ``ActorLost`` if the
        loop ends first. On the loop itself, or after a clean stop, run the call directly.
        """
        if threading.current_thread() is self._thread or (self.stopped and self.broken is None):
            return call()  # after a clean stop nothing runs concurrently: state can be read
        done = threading.Event()
        box: list[tuple[Any, Exception | None]] = []

        def run() -> None:
            try:
                box.append((call(), None))
            except Exception as error:
                box.append((None, error))
            done.set()

        self._calls.put(run)
        waited = 0.0
        while not done.wait(0.1):
            waited += 0.1
            if not self._thread.is_alive():
                reason = (
                    f"{type(self.broken).__name__}: {self.broken}"
                    if self.broken
                    else "it was stopped"
                )
                raise ActorLost("the event loop", reason) from self.broken
            if waited >= timeout_s:
                raise DataStall(what, waited)
        result, error = box[0]
        if error is not None:
            raise error
        return result

    def _loop(self) -> None:
        last, idle_s = 0.0, None
        while (call := self._next(idle_s)) is not None:
            self.call_started = time.perf_counter()
            try:
                call()
                # Several calls in a row share one run of ``after``, unless that would be late.
                if self._calls.empty() or time.perf_counter() - last > TIMEOUTS.turn_s:
                    idle_s = self._after()
                    last = time.perf_counter()
            except BaseException as error:
                self.broken = error
                log.exception("event loop stopped: a call failed")
                self._failed(error)
                return

    def _next(self, idle_s: float | None) -> Callable[[], None] | None:
        """Return the next call; a call without effect if none arrives in ``idle_s``."""
        try:
            return self._calls.get(timeout=idle_s)
        except queue.Empty:
            return _nothing

    def running_call(self) -> str:
        """Return function, file and line of the running call, as text.

        If Overlord has called other code, it is the first function of that code.
        """
        frame, calls = sys._current_frames().get(self._thread.ident or 0), []
        while frame is not None:
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
            frame = frame.f_back
        # The first frames of a thread are of the standard library.
        inside = itertools.dropwhile(lambda call: not call[0].startswith(OURS), reversed(calls))
        file, line, name = next(
            (call for call in inside if not call[0].startswith(OURS)),
            (*calls, ("no file", 0, "nothing"))[0],
        )
        return f"in {name} ({file}, line {line})"

    @property
    def stopped(self) -> bool:
        """Whether the thread has ended."""
        return self._thread.ident is not None and not self._thread.is_alive()

    def stop(self, timeout_s: float = 1.0) -> None:
        """End the loop after the calls posted so far; wait for its thread up to ``timeout_s``."""
        self._calls.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _nothing() -> None:
    pass


class ThreadExecutor:
    """An owner of the thread pool of the process, whose results arrive on one event loop.

    All executors of a process share its threads (``concurrency/thread_pool.py``). Work that was
    short so far runs at once, on the event loop. Once it takes longer, work of the same name runs
    in the threads again. Reads of a mount or a store never run on the loop, since they may hang;
    nor does user code. Very short reads of a local disk do, unless they fail: longer ones release
    the interpreter lock, and overlap with each other and with the loop.
    """

    def __init__(
        self,
        workers: int,
        loop: EventLoop,
        inline_s: float = TIMEOUTS.inline_s,
        inline_read_s: float = TIMEOUTS.inline_read_s,
    ):
        self._loop = loop
        self._inline_s, self._inline_read_s = inline_s, inline_read_s
        self._seconds: dict[str, list[float]] = {}  # name -> seconds per unit, the last four times
        self._pool = join_pool(self, workers)
        self._report_lock = threading.Lock()

    def submit(
        self,
        name: str,
        work: Callable[[], Any],
        done: Done,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: BlockingWork | None = None,
    ) -> None:
        """Run ``work`` at once if it was short so far, else in a thread; then call ``done``.

        ``urgent``: before other queued work. ``waits``: the work may wait for storage. Runs on:
        event loop.
        """
        if (waits is None or waits.quick) and self._run_inline(name, work, done, size, waits):
            return
        task = Task(self, self._run, self._report, work, name, done, size, waits)
        self._pool.put(task, urgent)

    def _run_inline(
        self, name: str, work: Callable[[], Any], done: Done, size: int, waits: BlockingWork | None
    ) -> bool:
        """Run the work on the event loop if it was short so far; return whether it completed."""
        # Use the minimum of four: waiting for the interpreter lock prolongs some of them, waiting
        # for storage prolongs all.
        limit = self._inline_s if waits is None else self._inline_read_s
        if size * min(self._seconds.get(name, (1.0,))) >= limit:
            return False
        with nullcontext() if waits is None else waits.no_wait():
            outcome = self._timed(name, work, size)
        if isinstance(outcome[1], WouldBlock):
            return False
        if time.perf_counter() - self._loop.call_started < TIMEOUTS.turn_s:
            done(*outcome)
        else:  # other calls wait for the loop: the follow-up goes after them
            self._loop.post(lambda: done(*outcome))
        return True

    def _timed(
        self, name: str, work: Callable[[], Any], size: int
    ) -> tuple[Any, BaseException | None]:
        start = time.perf_counter()
        try:
            return work(), None
        except BaseException as error:
            return None, error
        finally:
            took = time.perf_counter() - start
            unit = took / max(1, size)
            self._seconds[name] = (
                [unit] * 4 if took > TIMEOUTS.slow_s else [*self._seconds.get(name, [])[-3:], unit]
            )

    def _run(self, task: Task) -> None:
        self._report(task, *self._timed(task.name, task.work, task.size))

    def _report(self, task: Task, outcome: Any, failure: BaseException | None) -> None:
        """Pass the result of a task to its callback, unless the task was given up before."""
        with self._report_lock:
            late, task.reported = task.reported, True
        if not late:
            self._loop.post(lambda: task.done(outcome, failure))

    def close(self, timeout_s: float = 0.5) -> None:
        """Drop queued work. The last executor of the process ends the threads."""
        leave_pool(self, timeout_s)


# ----------------------------------------------------------------------------
# A queue of calls with its own daemon threads.


class ThreadQueue:
    """A queue of calls that ``n`` daemon threads start in order."""

    def __init__(self, n: int, name: str):
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._loop, name=f"overlord-{name}-{i}", daemon=True)
            for i in range(n)
        ]
        for thread in self._threads:
            thread.start()

    def do(self, work: Callable[[], None]) -> None:
        """Append a call to the queue."""
        self._work.put(work)

    def is_current(self) -> bool:
        """Return whether the calling thread is one of the queue's threads."""
        return threading.current_thread() in self._threads

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("queued call of %s failed", threading.current_thread().name)

    def close(self) -> None:
        """End the threads after the queued calls; wait for them up to ``Timeouts.close_s``.

        A thread that is still in a call then ends with the process: it is a daemon.
        """
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(TIMEOUTS.close_s / (2 * len(self._threads)))
