"""The virtual world: one queue of events in place of time, and processes that can be killed,
stopped and woken.

One thing runs at a time, and what runs next depends on the seed alone, so a run is replayed
exactly. Code that waits (a trainer for its step, a coordinator for a worker to start) runs in a
*fiber*: a thread that has the baton, or stands still.
"""

from __future__ import annotations

import _thread
import heapq
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """Unwinds a fiber whose process is gone. No ``except Exception`` sees it."""


def _signal() -> threading.Lock:
    """A lock that is taken: whoever takes it again waits until it is let go."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Process:
    """A process of the world. Everything that happens in it is an event of it: dead, none happens;
    stopped, they wait.
    """

    def __init__(self, world: World, name: str):
        self.world, self.name = world, name
        self.alive, self.stopped = True, False
        self.disk = 1.0  # how many times longer reads take
        self._waiting: deque[Callable[[], None]] = deque()  # what happened while it was stopped
        self.fibers: dict[Fiber, None] = {}
        self.on_end: list[Callable[[], None]] = []

    def run(self, call: Callable[[], None]) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._waiting.append(call)
            return
        before, self.world.process = self.world.process, self
        try:
            call()
        except Killed:  # in the middle of it
            pass
        finally:
            self.world.process = before

    def stop(self) -> None:
        """As SIGSTOP does: it does nothing and notices nothing."""
        self.stopped = True

    def wake(self) -> None:
        if not self.stopped or not self.alive:
            return
        self.stopped = False
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            self.world.at(0.0, call, self)

    def kill(self) -> None:
        """As SIGKILL does."""
        if not self.alive:
            return
        self.alive = False
        self._waiting.clear()
        for fiber in list(self.fibers):
            self.world.at(0.0, fiber.unwind, None)
        for told in self.on_end:
            told()
        if (
            self.world.process is self
            and self.world.fiber is not None
            and self.world.fiber.process is self
        ):
            raise Killed  # it ended itself


class Fiber:
    """Code that may wait. It runs when it is resumed and gives the baton back when it waits or
    ends.
    """

    def __init__(self, world: World, process: Process, work: Callable[[], None]):
        self.process, self._world, self._work = process, world, work
        self._go, self._over, self._dead = _signal(), False, False
        self._error: BaseException | None = None
        self._begun = False
        process.fibers[self] = None

    def _main(self) -> None:
        self._go.acquire()
        try:
            if not self._dead:
                self._work()
        except Killed:
            pass
        except BaseException as error:
            self._error = error
        self._over = True
        self.process.fibers.pop(self, None)
        self._world.baton.release()

    def resume(self) -> None:
        if self._over:
            return
        if not self._begun:
            self._begun = True
            _thread.start_new_thread(
                self._main, ()
            )  # a Thread waits until it has begun, which costs as much again
        before, self._world.fiber = self._world.fiber, self
        self._go.release()
        self._world.baton.acquire()
        self._world.fiber = before
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def unwind(self) -> None:
        """Its process is gone: what it holds is let go, and nothing it does on its way out is
        seen.
        """
        self._dead = True
        if not self._begun:
            self._over = True
            self.process.fibers.pop(self, None)
        else:
            self.resume()

    def park(self) -> None:
        self._world.baton.release()
        self._go.acquire()
        if self._dead:
            raise Killed


class World:
    """Time, chance, and everything that is about to happen."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.now = 0.0
        self.baton = _signal()
        self.process: Process | None = None  # whose event is running
        self.fiber: Fiber | None = None
        self.processes: list[Process] = []
        self._events: list[tuple[float, int, Process | None, Callable[[], None]]] = []
        self._count = 0
        self.happened = 0  # events so far

    def start(self, name: str) -> Process:
        self.processes.append(process := Process(self, name))
        return process

    def delay(self, median_s: float, sigma: float = 1.0) -> float:
        return median_s * math.exp(sigma * self.random.gauss(0.0, 1.0))

    def at(self, after_s: float, call: Callable[[], None], process: Process | None) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + after_s, self._count, process, call))

    def step(self) -> bool:
        """One event; False where nothing is left."""
        if not self._events:
            return False
        when, _, process, call = heapq.heappop(self._events)
        self.now = max(self.now, when)
        self.happened += 1
        if process is None:
            call()
        else:
            process.run(call)
        return True

    # waiting, in a fiber

    def spawn(self, process: Process, work: Callable[[], None], after_s: float = 0.0) -> Fiber:
        fiber = Fiber(self, process, work)
        self.at(after_s, fiber.resume, process)
        return fiber

    def wait(self, timeout_s: float, register: Callable[[Callable[[], None]], Any]) -> bool:
        """Until what ``register`` was given is called (True), or the time is over."""
        fiber = self.fiber
        assert fiber is not None, "only a fiber can wait"
        woken: list[bool] = []

        def wake(called: bool) -> None:
            if not woken:
                woken.append(called)
                self.at(0.0, fiber.resume, fiber.process)

        register(lambda: wake(True))
        if not woken and timeout_s < math.inf:
            self.at(max(0.0, timeout_s), lambda: wake(False), fiber.process)
        fiber.park()
        return woken[0]

    def sleep(self, seconds: float) -> None:
        self.wait(seconds, lambda wake: None)

    def close(self) -> None:
        """Every fiber ends: no thread is left behind."""
        for process in self.processes:
            if process.alive:
                process.alive = False
                process.on_end.clear()
            for fiber in list(process.fibers):
                fiber.unwind()
        self._events.clear()
