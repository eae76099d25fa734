"""A machine of the virtual world: what ``concurrency/platform.py`` gives a worker, on a virtual
clock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from overlord.concurrency.event_loop import Done, EventLoop, Executor, ThreadQueue
from overlord.concurrency.platform import Platform
from overlord.transport.connection import Connection
from overlord.transport.server import OnClose, OnMessage, OnOpen, Server
from overlord.transport.shared_memory import SharedMemoryPool
from tests.simulation.world.net import Net, SimServer
from tests.simulation.world.world import Process, World

MEDIANS_S = {
    "read": 0.004,
    "evaluate": 0.002,
    "build": 0.003,
    "send": 0.0005,
}  # of work, by the first word of its name


class SimPump:
    """Posted calls in order, a turn at a time, as ``EventLoop`` runs them."""

    def __init__(self, world: World, process: Process, name: str):
        self._world, self._process, self._name = world, process, name
        self._calls: deque[Callable[[], None]] = deque()
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._after: Callable[[], float | None] = lambda: None
        self._scheduled = self._started = self._running = self.stopped = False
        self._timer = 0
        self.broken: BaseException | None = None
        self.call_started = 0.0

    def start(
        self,
        failed: Callable[[BaseException], None],
        after: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._failed, self._after, self._started = failed, after, True
        self._schedule()

    def post(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._schedule()

    def _schedule(self) -> None:
        if self._started and not self._scheduled and not self.stopped and self._calls:
            self._scheduled = True
            self._world.at(self._world.random.random() * 0.0002, self._run, self._process)

    def _run(self) -> None:
        """All that waits; what is posted meanwhile has the next turn."""
        self._scheduled = False
        calls, self._calls = self._calls, deque()
        self._turn(calls)
        self._schedule()

    def _turn(self, calls: deque[Callable[[], None]]) -> None:
        if self.stopped or self.broken is not None:
            return
        self._timer += 1
        self._running = True
        try:
            while calls and not self.stopped:
                calls.popleft()()
            patience = self._after()
            if patience is not None:
                timer = self._timer
                self._world.at(
                    patience,
                    lambda: self._turn(deque()) if timer == self._timer else None,
                    self._process,
                )
        except Exception as error:
            self.broken = error
            self._failed(error)
        finally:
            self._running = False

    def call(self, call: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
        return call()

    def stop(self, timeout_s: float = 1.0) -> None:
        self.stopped = True


class SimExecutor:
    """Work ends when the seed says so; reads as late as the disk is slow."""

    def __init__(self, world: World, process: Process, pump: EventLoop):
        self._world, self._process, self._pump = world, process, pump
        self._closed = False

    def submit(
        self,
        name: str,
        work: Callable[[], Any],
        done: Done,
        *,
        size: int = 1,
        urgent: bool = False,
        waits: Any = None,
    ) -> None:
        def finish() -> None:
            if self._closed:
                return
            try:
                outcome, error = work(), None
            except Exception as raised:
                outcome, error = None, raised
            self._pump.post(lambda: done(outcome, error))

        kind = name.split(" ")[0]
        seconds = self._world.delay(MEDIANS_S.get(kind, 0.001))
        self._world.at(
            seconds * self._process.disk if kind == "read" else seconds, finish, self._process
        )

    def close(self) -> None:
        self._closed = True


class SimQueue:
    """Calls are made at once: whoever gives one waits for nobody else's."""

    def do(self, work: Callable[[], None]) -> None:
        work()

    def close(self) -> None:
        pass


class SimCondition:
    """Excludes nobody, since one event runs at a time; while a fiber waits, the world goes on."""

    def __init__(self, world: World):
        self._world = world
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_for(self, holds: Callable[[], bool], timeout: float) -> bool:
        deadline = self._world.now + timeout
        while not holds() and (left := deadline - self._world.now) > 0:
            self._world.wait(left, self._waiting.append)
        return bool(holds())

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


class SimRing:
    """No memory is shared: everything is handed over as it is."""

    max_bytes, nbytes, n_slots = 2**62, 0, 0

    def take(self, nbytes: int) -> np.ndarray | None:
        return None

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, eq=False)
class SimMachine(Platform):
    """Where one process of the world lives."""

    world: World
    net: Net
    process: Process

    def prepare(self, workers: int, *, links: int = 0, background: bool = False) -> None:
        pass  # all machines are in one process

    def event_loop(self, name: str) -> EventLoop:
        return cast(EventLoop, SimPump(self.world, self.process, name))

    def executor(self, workers: int, pump: EventLoop) -> Executor:
        return SimExecutor(self.world, self.process, pump)

    def thread(self, work: Callable[[], None], name: str) -> None:
        self.world.spawn(self.process, work)

    def every(self, seconds: float, call: Callable[[], None], name: str) -> Callable[[], None]:
        going = [True]

        def beat() -> None:
            if going:
                call()
                self.world.at(seconds, beat, self.process)

        self.world.at(seconds, beat, self.process)
        return going.clear

    def queue(self, n: int, name: str) -> ThreadQueue:
        return cast(ThreadQueue, SimQueue())

    def condition(self) -> threading.Condition:
        return cast(threading.Condition, SimCondition(self.world))

    def pss_bytes(self) -> int:
        """Return the same for all: the system would count pages of the process that simulates."""
        return 2**27

    def now(self) -> float:
        return self.world.now

    def sleep(self, seconds: float) -> None:
        self.world.sleep(min(seconds, math.inf))

    def memory_pool(self, name: str, max_bytes: int) -> SharedMemoryPool:
        return cast(SharedMemoryPool, SimRing())

    def serve(
        self,
        token: str,
        pool: SharedMemoryPool,
        on_message: OnMessage,
        on_open: OnOpen,
        on_close: OnClose,
        **where: Any,
    ) -> Server:
        return cast(Server, SimServer(self.net, self.process, token, on_message, on_open, on_close))

    def open_connection(
        self,
        address: str,
        token: str,
        hello: dict[str, Any],
        *,
        timeout_s: float,
        pool: SharedMemoryPool | None = None,
    ) -> tuple[Connection, dict[str, Any]]:
        return self.net.open_connection(self.process, address, token, hello, timeout_s)

    def end(self, code: int) -> None:
        self.process.kill()
