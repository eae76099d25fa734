"""The command loop of a process, and the executor that runs its slow work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

Done = Callable[[Any, BaseException | None], None]


class BlockingWork(Protocol):
    """Work that may wait for storage, for minutes or forever.

    So it must not run on the event loop.
    """

    @property
    def many(self) -> bool:
        """Whether the work waits for replies rather than for a core.

        Many such calls may run concurrently.
        """
        ...

    @property
    def quick(self) -> bool:
        """Whether the work never hangs.

        Such work may run on the event loop, under ``hasty``, if it was short so far.
        """
        ...

    def hasty(self) -> AbstractContextManager[None]:
        """Return a context in which work raises ``errors.WouldBlock`` instead of waiting."""
        ...

    def overdue(self) -> Exception | None:
        """Return an error if the work should be given up.

        Another thread calls it periodically. A result that arrives later is dropped.
        """
        ...


class Executor(Protocol):
    """Runs work in threads and passes its result to ``done`` on the event loop.

    The cost of work of one name is proportional to ``size``.
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
