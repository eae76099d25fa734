"""A loop that executes commands in order: follow-up commands are appended, and it is never
re-entered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Done = Callable[[Any, BaseException | None], None]


class BlockingWork(Protocol):
    """Work that may wait for storage, for minutes or forever. So it must not run on the event loop,
    on which others wait.
    """

    @property
    def many(self) -> bool:
        """Whether it waits for replies rather than for a core: many such calls may run
        concurrently.
        """
        ...

    @property
    def quick(self) -> bool:
        """Whether it never hangs: work that was short so far may run at once, under ``hasty``."""
        ...

    def hasty(self) -> AbstractContextManager[None]:
        """Return a context in which work raises ``errors.WouldBlock`` instead of waiting."""
        ...

    def overdue(self) -> Exception | None:
        """Return an error if the work should be given up. Another thread calls it now and then. A
        result that arrives later is dropped.
        """
        ...


class Executor(Protocol):
    """Runs work elsewhere and passes its result to ``done`` on the event loop. The cost of work of
    one name is proportional to ``size``.
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
    """A queue of commands and the loop that empties it. A subclass implements ``_carry_out``."""

    def __init__(self, *, check: bool = False):
        self._check = check
        self._queue: deque[Any] = deque()  # commands that are not executed yet
        self._running = False

    def run(self, commands: Sequence[Any] = ()) -> None:
        """Execute commands in order, including those that they lead to."""
        self._queue.extend(commands)
        if self._running:
            return
        self._running = True
        try:
            while self._queue:
                self._turn(self._queue.popleft())
                if self._check:
                    self.check()
        finally:
            self._running = False

    def _turn(self, command: Any) -> None:
        self._carry_out(command)

    def _carry_out(self, command: Any) -> None:
        raise NotImplementedError

    def check(self) -> None:
        """Verify invariants, in tests."""
