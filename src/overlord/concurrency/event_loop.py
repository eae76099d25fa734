"""The local runtime: one pump thread runs all cores by direct call; a pool of threads reads,
transforms and builds.

Threads are enough because pyarrow, tokenizers, zstd and numpy's large copies release the
interpreter lock; a source whose transform holds it gets a worker process
(``transforms/transform_process.py``).
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.concurrency.command_loop import BlockingWork, Done
from overlord.errors import ActorLost, DataStall, WouldBlock

log = logging.getLogger("overlord")

OURS = str(Path(__file__).resolve().parents[1])  # where this package is

# Handing work to a thread and back costs 0.1 to 0.3 ms, and data that crosses cores costs more
# again: below this, one core is
# cheaper by a third and hardly slower (benchmarks/throughput.py, null job). Tokenizing blocks are
# sized above it.
INLINE_S = 0.005
TURN_S = 0.02  # short work may lead to more short work for ever: so long at a time
SLOW_S = 0.020  # work done in the pump that took this long is not done there again soon
WAITING = 32  # reads of stores at a time: they wait for answers, not for a core
STUCK_S = 1.0  # a read that takes longer waits for storage: another thread takes its place
TICK_S = 0.25  # between two looks at reads that are under way


class EventLoop:
    """One thread that runs posted calls in order. All cores live in it, so none needs a lock."""

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._thread = threading.Thread(
            target=self._loop, name=f"overlord-pump-{name}", daemon=True
        )
        self.broken: BaseException | None = None
        self.turn = 0.0  # when the call that is running began
        self._after: Callable[[], float | None] = lambda: None

    def start(
        self,
        failed: Callable[[BaseException], None],
        after: Callable[[], float | None] = lambda: None,
    ) -> None:
        """``failed`` is told of an error that no core could handle; nothing is pumped after it.
        ``after`` runs behind calls, and once more after so many seconds without one if it says so.
        """
        self._failed, self._after = failed, after
        self._thread.start()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def ask(self, call: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        """Run a call in the pump and wait for its result."""
        if threading.current_thread() is self._thread or (self.stopped and self.broken is None):
            return (
                call()
            )  # after a clean stop nothing runs beside it: what was found can still be asked for
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
                raise ActorLost("the pump", reason) from self.broken
            if waited >= timeout_s:
                raise DataStall(what, waited)
        result, error = box[0]
        if error is not None:
            raise error
        return result

    def _loop(self) -> None:
        told, patience = 0.0, None
        while (call := self._next(patience)) is not None:
            self.turn = time.perf_counter()
            try:
                call()
                # Several calls in a row lead to one message, unless that would be late.
                if self._calls.empty() or time.perf_counter() - told > TURN_S:
                    patience = self._after()
                    told = time.perf_counter()
            except BaseException as error:
                self.broken = error
                log.exception("the pump stopped")
                self._failed(error)
                return

    def _next(self, patience: float | None) -> Callable[[], None] | None:
        """The next call; one that does nothing where none has come in time."""
        try:
            return self._calls.get(timeout=patience)
        except queue.Empty:
            return _nothing

    def at(self) -> str:
        """Where the call is that runs now: in which function of somebody else, if it is in one;
        else in which of ours.
        """
        frame, calls = sys._current_frames().get(self._thread.ident or 0), []
        while frame is not None:
            calls.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
            frame = frame.f_back
        inside = itertools.dropwhile(
            lambda call: not call[0].startswith(OURS), reversed(calls)
        )  # threads begin elsewhere
        file, line, name = next(
            (call for call in inside if not call[0].startswith(OURS)),
            (*calls, ("no file", 0, "nothing"))[0],
        )
        return f"in {name} ({file}, line {line})"

    @property
    def stopped(self) -> bool:
        return self._thread.ident is not None and not self._thread.is_alive()

    def stop(self, timeout_s: float = 1.0) -> None:
        self._calls.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False)
class _Task:
    name: str
    work: Callable[[], Any]
    done: Done
    size: int
    waits: BlockingWork | None = None
    began: float = 0.0
    over: bool = False  # its outcome was told, or is not wanted any more


class _WorkerThreads:
    """Daemon threads and the work before them; what a step waits for goes first. One more starts
    when all are busy, up to ``most``; a thread whose read does not end does not count.
    """

    def __init__(self, name: str, most: int, run: Callable[[_Task], None]):
        self._name, self._most, self._run = name, most, run
        self._urgent, self._later = deque[_Task](), deque[_Task]()
        self._changed = threading.Condition()
        self._idle = self._started = 0
        self._closed = False
        self._threads: list[threading.Thread] = []
        self._under_way: set[_Task] = set()

    def put(self, task: _Task, urgent: bool) -> None:
        with self._changed:
            (self._urgent if urgent else self._later).append(task)
            self._grow()
            self._changed.notify()

    def _grow(self) -> None:
        if len(self._urgent) + len(self._later) <= self._idle or self._closed:
            return
        if len(self._threads) < self._most or len(self._threads) < self._most + self._stuck():
            self._started += 1
            self._threads.append(
                threading.Thread(
                    target=self._loop, name=f"{self._name}-{self._started - 1}", daemon=True
                )
            )
            self._threads[-1].start()

    def _stuck(self) -> int:
        now = time.monotonic()
        return sum(
            task.waits is not None and now - task.began > STUCK_S for task in self._under_way
        )

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                while not self._urgent and not self._later and not self._closed:
                    self._changed.wait()
                self._idle -= 1
                if self._closed:
                    return
                task = (self._urgent or self._later).popleft()
                task.began = time.monotonic()
                self._under_way.add(task)
            self._run(task)
            with self._changed:
                self._under_way.discard(task)
                del task
                if (
                    len(self._threads) > self._most + self._stuck()
                ):  # the one whose place this took is back
                    self._threads.remove(threading.current_thread())
                    return

    def watch(self) -> list[_Task]:
        """Reads under way that were to be looked after; where they are stuck, others get
        threads.
        """
        with self._changed:
            self._grow()
            return [task for task in self._under_way if task.waits is not None]

    def close(self, timeout_s: float) -> None:
        """Stop taking work. A thread in the middle of a read is left to end by itself: it is a
        daemon.
        """
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._later.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s / max(1, len(threads)))


class ThreadExecutor:
    """A few threads for work, and more for reads that wait for a store: one that does not answer
    must not hold up the others.

    Work that has shown to be short is done at once, in the pump. Long work of the same name goes to
    the threads again as soon as it is seen to be long. Reads of a mount or a store are never done
    there, for it may hang; nor are those that run a user's code. Those of a disk are, unless they
    fail.
    """

    def __init__(self, workers: int, pump: EventLoop, inline_s: float = INLINE_S):
        self._pump = pump
        self._inline_s = inline_s
        self._seconds: dict[
            str, list[float]
        ] = {}  # name -> seconds for a unit of its work, the last four times
        self._workers = _WorkerThreads("overlord-worker", workers, self._run)
        self._waiting = _WorkerThreads("overlord-store", max(workers, WAITING), self._run)
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()
        self._telling = threading.Lock()

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
        if (waits is None or waits.quick) and self._at_once(name, work, done, size, waits):
            return
        if waits is not None and self._watch is None:
            self._watch = threading.Thread(target=self._look, name="overlord-watch", daemon=True)
            self._watch.start()
        lane = self._waiting if waits is not None and waits.many else self._workers
        lane.put(_Task(name, work, done, size, waits), urgent)

    def _at_once(
        self, name: str, work: Callable[[], Any], done: Done, size: int, waits: BlockingWork | None
    ) -> bool:
        """Whether it was done here and now, since it has shown to be short."""
        # The least of four: waiting for the interpreter lock lengthens some, waiting for storage
        # lengthens all.
        if size * min(self._seconds.get(name, (1.0,))) >= self._inline_s:
            return False
        with nullcontext() if waits is None else waits.hasty():
            outcome = self._do(name, work, size)
        if isinstance(outcome[1], WouldBlock):
            return False
        if time.perf_counter() - self._pump.turn < TURN_S:
            done(*outcome)
        else:  # others wait for the pump: what this leads to comes behind them
            self._pump.post(lambda: done(*outcome))
        return True

    def _look(self) -> None:
        """Reads that never end are given up by somebody else than the thread that hangs in them."""
        while not self._closed.wait(TICK_S):
            for task in (*self._workers.watch(), *self._waiting.watch()):
                assert task.waits is not None
                try:
                    error = None if task.over else task.waits.overdue()
                except (
                    Exception
                ) as fault:  # whoever looks after all others must not end with one of them
                    error = fault
                if error is not None:
                    self._tell(task, None, error)

    def _do(
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
                [unit] * 4 if took > SLOW_S else [*self._seconds.get(name, [])[-3:], unit]
            )

    def _run(self, task: _Task) -> None:
        self._tell(task, *self._do(task.name, task.work, task.size))

    def _tell(self, task: _Task, outcome: Any, failure: BaseException | None) -> None:
        """Once: what comes after a task was given up is dropped."""
        with self._telling:
            late, task.over = task.over, True
        if not late:
            self._pump.post(lambda: task.done(outcome, failure))

    def close(self, timeout_s: float = 0.5) -> None:
        self._closed.set()
        self._workers.close(timeout_s / 2)
        self._waiting.close(timeout_s / 2)
