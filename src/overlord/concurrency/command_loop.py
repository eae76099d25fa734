"""Carrying out commands: in order, those they lead to behind them, never re-entered. What a host
does, whatever it hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
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
    """A queue of commands and the loop that empties it."""

    def __init__(self, *, check: bool = False):
        self._check = check
        self._queue: deque[Any] = deque()  # commands not yet carried out
        self._running = False

    def run(self, commands: Sequence[Any] = ()) -> None:
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
        """Invariants, for tests."""
