"""Startup watchdog: detects workers that are stopped (``SIGSTOP``) before they answer heartbeats.

A start may take long, since sources are opened and a store may be slow. So a stopped process is
detected from outside, in ``/proc/<pid>/stat``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from overlord.cluster.supervisor import TICKS
from overlord.rpc.actors import ActorHandle, ActorSystem


def is_stopped(pid: int) -> bool:
    """Return whether a signal stopped a process.

    False where the system does not say: then only the deadline of a start applies.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class StartupWatchdog:
    """Watches starting workers. One thread calls ``look`` ``TICKS`` times in ``lost_after_s``."""

    def __init__(self, control: ActorSystem, lost_after_s: float):
        self._control, self._lost_after_s = control, lost_after_s
        # of actor systems whose processes get their id later, or run elsewhere
        self._pid_here: Callable[[ActorHandle], int] | None = getattr(control, "pid_here", None)
        self._there: dict[ActorHandle, Future[Any]] = {}
        self._ticks: dict[ActorHandle, int] = {}
        self._given_up: dict[str, str] = {}

    def watch(self, handle: ActorHandle) -> None:
        """Watch a worker whose process is visible here. Runs on: any thread."""
        if handle.pid is not None or self._pid_here is not None:
            self._there[handle] = self._control.call(handle, "beat")  # answered once it has started

    def look(self) -> list[ActorHandle]:
        """Return the workers to kill: they were stopped at every look for ``lost_after_s``."""
        found = []
        for handle, there in list(self._there.items()):
            if there.done():
                del self._there[handle]
                self._ticks.pop(handle, None)
                continue
            pid = handle.pid or 0 if self._pid_here is None else self._pid_here(handle)
            self._ticks[handle] = self._ticks.get(handle, 0) + 1 if pid and is_stopped(pid) else 0
            if self._ticks[handle] > TICKS:
                self._given_up[handle.name] = (
                    f"it was stopped for {self._lost_after_s:g} s while it was being started"
                )
                found.append(handle)
        return found

    def why(self, name: str, reason: str) -> str:
        """Return the reason of a loss: a worker that was killed here was stopped before."""
        return self._given_up.pop(name, reason)
