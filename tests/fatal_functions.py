"""Strategies and schedules that end or block the process they run in.

The module does not import pytest: the coordinator process imports it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overlord.journal.storage import DirectoryStorage
from overlord.planning.strategies import llm_balance
from tests.internals import JOURNAL_WRITES

FATAL_STEP = 6


def deadly(buffer: Any, place: Any) -> Any:
    """Crash the process that plans that step, every time."""
    if buffer.step == FATAL_STEP:
        os._exit(3)
    return llm_balance(buffer, place)


@dataclass(frozen=True)
class Stuck:
    """A strategy that never returns at one step, once or every time."""

    flag: Path  # exists once it was stuck
    always: bool = False

    def __call__(self, buffer: Any, place: Any) -> Any:
        if buffer.step == FATAL_STEP and (self.always or not self.flag.exists()):
            self.flag.touch()
            threading.Event().wait()
        return llm_balance(buffer, place)


class HeldUp:
    """A schedule that blocks the journal of its coordinator process while a file exists, like a
    disk that hangs.
    """

    def __init__(self, flag: Path, launcher: int = 0):
        self.flag, self.launcher = flag, launcher or os.getpid()
        if self.launcher != os.getpid():
            write = JOURNAL_WRITES.real

            def held_up(self_: DirectoryStorage, name: str, data: bytes, at: int) -> None:
                while flag.exists():
                    time.sleep(0.01)
                write(self_, name, data, at)

            JOURNAL_WRITES.assign(held_up)

    def __reduce__(self) -> Any:
        return HeldUp, (self.flag, self.launcher)

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        return {"a": 1.0, "b": 2.0}

    def __repr__(self) -> str:
        return "HeldUp()"


class Halting:
    """A transform that stops the process it is sent to (``SIGSTOP``), once, if a file exists: in
    the middle of its start.
    """

    def __init__(self, flag: Path, launcher: int = 0):
        self.flag, self.launcher = flag, launcher or os.getpid()
        if self.launcher != os.getpid() and flag.exists():
            flag.unlink()
            os.kill(os.getpid(), signal.SIGSTOP)

    def __reduce__(self) -> Any:
        return type(self), (self.flag, self.launcher)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def __repr__(self) -> str:
        return "Halting()"


class Slow(Halting):
    """A transform whose process start takes as long as the file exists."""

    def __init__(self, flag: Path, launcher: int = 0):
        self.flag, self.launcher = flag, launcher or os.getpid()
        while self.launcher != os.getpid() and flag.exists():
            time.sleep(0.01)


class HaltingStrategy(Halting):
    """A strategy that stops the coordinator process during its start."""

    def __call__(self, buffer: Any, place: Any) -> Any:  # type: ignore[override]
        return llm_balance(buffer, place)
