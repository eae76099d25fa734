"""The command loop of a process, and the executor that runs its slow work."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

Done = Callable[[Any, BaseException | None], None]


class BlockingWork(Protocol):
    """Work that may wait for storage, for minutes or for ever: the pump, which others wait for,
    does not do it itself.
    """

    @property
    def many(self) -> bool:
        """Whether it waits for answers rather than for a core: many such may be under way."""
        ...

    @property
    def quick(self) -> bool:
        """Whether it never hangs: what has shown to be short may be done at once, under
        ``hasty``.
        """
        ...

    def hasty(self) -> AbstractContextManager[None]:
        """Where work raises ``sources.patience.Later`` rather than wait."""
        ...

    def overdue(self) -> Exception | None:
        """Asked by another thread now and then: an error if it is to be given up. Its outcome is
        then dropped, should it ever come.
        """
        ...


class Executor(Protocol):
    """Runs work somewhere, some time, and hands its outcome to ``done`` in the pump. Works of one
    name cost alike by ``size``.
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
    """Executes commands in order, never re-entered: commands that an execution adds come after it.

    ``check`` runs after every command (invariants, for tests), ``after`` once the queue is empty.
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
        """Add commands and execute all that are queued, unless an execution is under way."""
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
        """Remove queued commands."""
        self.queue = deque(command for command in self.queue if not unwanted(command))
