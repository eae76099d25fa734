"""The base class of worker processes: an event loop that executes messages and reports events.

The coordinator sends messages with ``do`` and requests events with ``events``, a long poll.
``turn`` does both in one call, since every call wakes two processes. Payload goes directly from
loader workers to constructor workers.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from overlord.concurrency.event_loop import CommandLoop
from overlord.concurrency.platform import Platform
from overlord.messages.batches import join_announcements
from overlord.rpc.peers import RpcEndpoint

log = logging.getLogger("overlord")

# Events that are not urgent are sent at this interval: each message wakes two processes, and the
# planner answers most of them.
QUIET_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The settings that all workers of a job share."""

    name: str  # of the job
    token: str = field(repr=False)
    generation: int = 0  # of the session: clients of other generations are refused
    workers: int = 1  # threads of this worker
    open_files: int = 512
    open_bytes: int = 2**28
    ring_bytes: int = 2**30
    build_ahead: int = 2
    broadcast: bool = True  # False: every rank fetches its own data
    # loaders of a source share a transform worker: there are more loaders than run concurrently
    one_worker: bool = False
    # payload is sent in the smallest integer type; False for hooks, which get the source's type
    narrow: bool = True
    check: bool = False
    feedback_lag: int = 8  # of the job: how long reports are kept
    failover: bool = False  # lost workers are restarted, and the others roll back
    # Number of the start: of two workers of one name the later one counts. Clocks of machines
    # differ, so starts are counted; 0: use the clock.
    incarnation: int = 0
    machine: Platform = field(default_factory=Platform, repr=False)  # simulations replace it


class EventQueue:
    """Events that the coordinator has not requested yet.

    The event loop adds them, and the RPC thread requests them.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        join: Callable[[Sequence[Any]], list[Any]] = list,
        quiet_s: float = QUIET_S,
    ) -> None:
        """``join`` returns the events of an answer as fewer messages.

        ``quiet_s``: the interval at which events are sent that are not urgent.
        """
        self._lock, self._now, self._join = threading.Lock(), now, join
        self._quiet_s = quiet_s
        self._queued: list[Any] = []
        self._waiting: Future[list[Any]] | None = None
        self._hurry = False  # an urgent event is queued
        self._answered = 0.0

    def put(self, event: Any, *, hurry: bool = True) -> None:
        with self._lock:
            self._queued.append(event)
            self._hurry = self._hurry or hurry

    def hurry(self) -> None:
        with self._lock:
            self._hurry = True

    def ask(self) -> Future[list[Any]]:
        with self._lock:
            self._waiting = waiting = Future[list[Any]]()
        self.answer()
        return waiting

    def answer(self) -> float | None:
        """Answer the pending call with all queued events, if one is urgent or time has passed.

        The event loop calls this after every turn. Return the seconds after which it must call
        again; None: after the next turn.
        """
        with self._lock:
            now = self._now()
            if (
                self._queued
                and not self._hurry
                and (left := self._answered + self._quiet_s - now) > 0
            ):
                return left
            if self._waiting is None or not self._queued:
                return None
            waiting, events, self._waiting, self._queued = self._waiting, self._queued, None, []
            self._hurry, self._answered = False, now
        waiting.set_result(self._join(events))
        return None


class Worker(ABC):
    """A worker process: its event loop, its threads, and the events for the coordinator."""

    BACKGROUND = False  # True: low scheduling priority, since the worker reads ahead

    def __init__(self, name: str, settings: WorkerConfig, links: int = 0):
        """Start the threads of the worker; each of ``links`` connections gets one."""
        self.commands = CommandLoop(self._execute, check=self.check if settings.check else None)
        self.name, self._platform = name, settings.machine
        self._platform.prepare(settings.workers, links=links, background=self.BACKGROUND)
        self._events = EventQueue(self._platform.now, join_announcements)
        self._event_loop = self._platform.event_loop(name)
        self._executor = self._platform.executor(settings.workers, self._event_loop)
        self._rpc = RpcEndpoint(
            name,
            self,
            open_connection=self._platform.open_connection,
            exit_process=self._platform.end,
        )

    @abstractmethod
    def _execute(self, command: Any) -> None:
        """Execute a command of this worker's loaders or constructors."""

    @abstractmethod
    def _take(self, message: Any) -> None:
        """Handle a message of the coordinator."""

    @abstractmethod
    def check(self) -> None:
        """Check invariants, for tests."""

    def run(self, commands: Sequence[Any] = ()) -> None:
        self.commands.run(commands)

    def _start(self) -> None:
        self._event_loop.start(self._loop_failed, self._after_turn)

    def _loop_failed(self, error: BaseException) -> None:
        """Exit: after an error on the event loop no state of this process can be trusted.

        The coordinator detects an exit at once, and a silent process only after a deadline.
        """
        log.critical(
            "event loop of %s failed, exiting: %s: %s", self.name, type(error).__name__, error
        )
        self._platform.end(70)

    def _after_turn(self) -> float | None:
        return self._events.answer()

    def do(self, messages: Sequence[Any]) -> None:
        self._event_loop.post(lambda: self._do(messages))

    def _do(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._take(message)
        self.run()

    def node(self) -> str:
        """Return the cluster node of this worker; an answer implies that it has started."""
        return self._platform.node()

    def beat(self) -> Future[bool]:
        """Return a future that the event loop sets, so that a blocked loop is detected."""
        answer = Future[bool]()
        self._event_loop.post(lambda: answer.set_result(True))
        return answer

    def events(self) -> Future[list[Any]]:
        return self._events.ask()

    def turn(self, messages: Sequence[Any]) -> Future[list[Any]]:
        """Execute messages; return a future of the next events: one round trip instead of two."""
        if messages:
            self.do(messages)
        return self._events.ask()

    def redirect(self, address: str, token: str, lease_id: int) -> None:
        """Connect to a coordinator, which calls this worker from now on."""
        self._rpc.redirect(address, token, lease_id)

    def close(self) -> None:
        self._rpc.close()
        self._event_loop.stop()
        self._executor.close()
