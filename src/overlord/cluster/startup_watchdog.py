"""The startup watchdog: it detects workers that are stopped (``SIGSTOP``) during their start.

They do not answer heartbeats yet. A start may take long, since sources are opened and a store may
be slow. So a stopped process is detected from outside, in ``/proc/<pid>/stat``.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from overlord.cluster.supervisor import TICKS
from overlord.rpc.actors import ActorHandle, ActorSystem


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal, such as SIGSTOP.

    False also if the process has ended, or if the system has no ``/proc``.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class StartupWatchdog:
    """The detection of starting workers that are stopped by a signal.

    One thread calls ``overdue`` TICKS times in ``lost_after_s``.
    """

    def __init__(self, control: ActorSystem, lost_after_s: float):
        self._control, self._lost_after_s = control, lost_after_s
        # set by actor systems whose processes get their id later, or run on other machines
        self._pid_here: Callable[[ActorHandle], int] | None = getattr(control, "pid_here", None)
        self._starting: dict[ActorHandle, Future[Any]] = {}  # first heartbeats of starting workers
        self._ticks: dict[ActorHandle, int] = {}  # consecutive calls that found the worker stopped
        self._given_up: dict[str, str] = {}  # reasons of the kills, by name

    def watch(self, handle: ActorHandle) -> None:
        """Watch a starting worker, if its process id can be known here. Runs on: any thread."""
        if handle.pid is not None or self._pid_here is not None:
            self._starting[handle] = self._control.call(handle, "beat")

    def overdue(self) -> list[ActorHandle]:
        """Return the starting workers that more than TICKS consecutive calls have found stopped.

        The caller must kill them. Each worker is returned once.
        """
        found = []
        for handle, heartbeat in list(self._starting.items()):
            if heartbeat.done():
                del self._starting[handle]
                self._ticks.pop(handle, None)
                continue
            pid = handle.pid or 0 if self._pid_here is None else self._pid_here(handle)
            self._ticks[handle] = self._ticks.get(handle, 0) + 1 if pid and is_stopped(pid) else 0
            if self._ticks[handle] > TICKS:
                self._given_up[handle.name] = (
                    f"it was stopped for {self._lost_after_s:g} s while it was being started"
                )
                del self._starting[handle], self._ticks[handle]
                found.append(handle)
        return found

    def reason_of(self, name: str, reason: str) -> str:
        """Return ``reason``, or for a worker that ``overdue`` returned, its own reason once."""
        return self._given_up.pop(name, reason)
