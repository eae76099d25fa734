"""Progress bars on stderr, with the remaining time; only on a terminal, and only for long work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console

DELAY_S = 1.0  # work that ends before this time shows no bar


class Advance(Protocol):
    """Called with finished and total work; without a total that is unknown, or unchanged."""

    def __call__(self, done: float, of: float | None = None) -> None: ...


AdvanceTask = Callable[[str, float, float | None], None]  # the same, after the name of a task


@dataclass(slots=True)
class _Task:
    done: float = 0.0
    total: float | None = None
    shown: Any = None  # the task of rich; None before the bars are shown


class ProgressBars:
    """One bar for each task, shown ``delay_s`` after the work began. Runs on: any thread."""

    def __init__(self, err: Console, delay_s: float = DELAY_S) -> None:
        self._err = err
        self._lock = threading.Lock()
        self._tasks: dict[str, _Task] = {}
        self._bars: Any = None
        self._closed = not err.is_terminal
        self._timer = threading.Timer(delay_s, self._show)
        self._timer.daemon = True
        if not self._closed:
            self._timer.start()

    def advance(self, what: str, done: float, total: float | None = None) -> None:
        """Set the finished work of a task; the first call of a task adds its bar."""
        with self._lock:
            if self._closed:
                return
            task = self._tasks.setdefault(what, _Task())
            task.done, task.total = done, task.total if total is None else total
            if self._bars is not None:
                self._draw(what, task)

    def close(self) -> None:
        """Remove the bars. Idempotent."""
        self._timer.cancel()
        with self._lock:
            self._closed = True
            bars, self._bars = self._bars, None
        if bars is not None:
            bars.stop()

    def _show(self) -> None:
        from rich.progress import (
            BarColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )

        with self._lock:
            if self._closed:
                return
            self._bars = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[count]}", markup=False),
                TimeRemainingColumn(),
                TextColumn("left"),
                console=self._err,
                transient=True,
            )
            for what, task in self._tasks.items():
                self._draw(what, task)
            self._bars.start()

    def _draw(self, what: str, task: _Task) -> None:
        count = _count(task)
        if task.shown is None:
            task.shown = self._bars.add_task(what, total=task.total, count=count)
        self._bars.update(task.shown, completed=task.done, total=task.total, count=count)


def _count(task: _Task) -> str:
    """Return "3/12" for a task that counts whole things; else an empty text."""
    if task.total is None or task.done != int(task.done) or task.total != int(task.total):
        return ""
    return f"{int(task.done):,}/{int(task.total):,}"


@contextmanager
def progress_bars(err: Console) -> Iterator[AdvanceTask]:
    """Show a bar for each task that the value of the context is called with."""
    bars = ProgressBars(err)
    try:
        yield bars.advance
    finally:
        bars.close()


@contextmanager
def progress_bar(err: Console, what: str, total: float | None = None) -> Iterator[Advance]:
    """Show one bar; the value of the context is called with finished and total work."""
    with progress_bars(err) as advance:
        advance(what, 0, total)

        def one(done: float, of: float | None = None) -> None:
            advance(what, done, of)

        yield one
