"""What every host process of a job is: a pump with some cores in it, told what to do and asked what
happened.

What the planner says comes by ``do``; what it is to know goes by ``events``, a call that is
answered when there is something to tell; ``turn`` is both, since every message wakes somebody.
Payload goes from loader hosts (``loaderhost.py``) to constructor hosts (``constructorhost.py``)
through links, never through here.
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

from overlord.concurrency.command_loop import CommandLoop
from overlord.concurrency.platform import Platform
from overlord.rpc.peers import RpcEndpoint

log = logging.getLogger("overlord")

# What was read ahead and nobody waits for is told so often: each word wakes two processes, and the
# planner answers most of them.
QUIET_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What all hosts are told when they are started."""

    name: str  # of the job
    token: str = field(repr=False)
    generation: int = 0  # of the session: whoever comes for another one is refused
    workers: int = 1  # threads of this host
    open_files: int = 512
    open_bytes: int = 2**28
    ring_bytes: int = 2**30
    build_ahead: int = 2
    broadcast: bool = True  # False: every rank fetches its own
    # loaders of a source share a worker process: they are more than would run side by side
    one_worker: bool = False
    # payload travels in as few bytes as its ids need; hooks see the type that the source has
    narrow: bool = True
    check: bool = False
    failover: bool = False  # parts that are lost are started anew, and the others go back
    # of two hosts of a name the later one is heard, and machines differ in their clocks; 0: nobody
    # counts
    born: int = 0
    machine: Platform = field(
        default_factory=Platform, repr=False
    )  # where the host lives: this one, but in simulations


class EventQueue:
    """What happened and was not asked for yet. Filled in the pump, asked for by the actor's
    thread.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._lock, self._now = threading.Lock(), now
        self._happened: list[Any] = []
        self._asked: Future[list[Any]] | None = None
        self._hurry = False  # someone waits for what happened
        self._answered = 0.0

    def put(self, event: Any, *, hurry: bool = True) -> None:
        with self._lock:
            self._happened.append(event)
            self._hurry = self._hurry or hurry

    def hurry(self) -> None:
        with self._lock:
            self._hurry = True

    def ask(self) -> Future[list[Any]]:
        with self._lock:
            self._asked = asked = Future[list[Any]]()
        self.answer()
        return asked

    def answer(self) -> float | None:
        """Called when the pump has done a piece of work: what it led to is told together, at once
        if someone waits for it. Else it waits for more of its kind, and the seconds are returned
        after which this is to be called again.
        """
        with self._lock:
            now = self._now()
            if self._happened and not self._hurry and (left := self._answered + QUIET_S - now) > 0:
                return left
            if self._asked is None or not self._happened:
                return None
            asked, happened, self._asked, self._happened = self._asked, self._happened, None, []
            self._hurry, self._answered = False, now
        asked.set_result(happened)
        return None


class Worker(ABC):
    """An event loop, threads that work for it, and the events for the coordinator."""

    BACKGROUND = False  # it reads ahead, so others may go before it

    def __init__(self, name: str, settings: WorkerConfig, links: int = 0):
        """``links``: connections that get a thread each."""
        self.commands = CommandLoop(self._execute, check=self.check if settings.check else None)
        self.name, self._machine = name, settings.machine
        self._machine.prepare(settings.workers, links=links, background=self.BACKGROUND)
        self._events = EventQueue(self._machine.now)
        self._pump = self._machine.pump(name)
        self._executor = self._machine.executor(settings.workers, self._pump)
        self._sibling = RpcEndpoint(name, self, dial=self._machine.dial, leave=self._machine.end)

    @abstractmethod
    def _execute(self, command: Any) -> None:
        """Execute a command of this worker's cores."""

    @abstractmethod
    def _take(self, message: Any) -> None:
        """Handle a message of the coordinator."""

    @abstractmethod
    def check(self) -> None:
        """Check invariants, for tests."""

    def run(self, commands: Sequence[Any] = ()) -> None:
        self.commands.run(commands)

    def _start(self) -> None:
        self._pump.start(self._broke, self._after_turn)

    def _broke(self, error: BaseException) -> None:
        """A core is broken: nothing this process holds can be trusted. Its death is seen at once,
        its silence only by a deadline.
        """
        log.critical("%s ends itself: %s: %s", self.name, type(error).__name__, error)
        self._machine.end(70)

    def _after_turn(self) -> float | None:
        return self._events.answer()

    def do(self, messages: Sequence[Any]) -> None:
        self._pump.post(lambda: self._do(messages))

    def _do(self, messages: Sequence[Any]) -> None:
        for message in messages:
            self._take(message)
        self.run()

    def at(self) -> str:
        """The node of a cluster that this is on; asked of a host that was started, to know that it
        is there.
        """
        return self._machine.node()

    def beat(self) -> Future[bool]:
        """Answered by the pump: a host whose pump stands is of no use, though its process lives."""
        answer = Future[bool]()
        self._pump.post(lambda: answer.set_result(True))
        return answer

    def events(self) -> Future[list[Any]]:
        return self._events.ask()

    def turn(self, messages: Sequence[Any]) -> Future[list[Any]]:
        """Both in one message: what to do, and what has happened when something has."""
        if messages:
            self.do(messages)
        return self._events.ask()

    def meet(self, address: str, token: str, ticket: int) -> None:
        """A planner in a process of its own is there, and calls from now on."""
        self._sibling.meet(address, token, ticket)

    def close(self) -> None:
        self._sibling.close()
        self._pump.stop()
        self._executor.close()
