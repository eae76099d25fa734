"""Processes that stand still (``SIGSTOP``) while they are being started. Nobody can ask them
whether they live before they are there, and a start may take long: sources are opened, a store may
be slow. So whether they are stopped is seen from outside.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from overlord.cluster.supervisor import TICKS
from overlord.rpc.actors import ActorHandle, ActorSystem


def is_stopped(pid: int) -> bool:
    """By a signal, not by a debugger. False where that cannot be seen: then a start has its
    deadline, and no other.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


class StartupWatchdog:
    """Those that are being started. ``look`` is to be called ``TICKS`` times in ``lost_after_s``,
    by one thread.
    """

    def __init__(self, control: ActorSystem, lost_after_s: float):
        self._control, self._lost_after_s = control, lost_after_s
        self._pid_here: Callable[[ActorHandle], int] | None = getattr(
            control, "pid_here", None
        )  # where they are known later, or elsewhere
        self._there: dict[ActorHandle, Future[Any]] = {}
        self._ticks: dict[ActorHandle, int] = {}
        self._given_up: dict[str, str] = {}

    def watch(self, handle: ActorHandle) -> None:
        """From any thread. Of processes of others nothing can be seen."""
        if handle.pid is not None or self._pid_here is not None:
            self._there[handle] = self._control.call(handle, "beat")  # answered when it is there

    def look(self) -> list[ActorHandle]:
        """Those that are to be killed: they stood still at every look for so long."""
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
        """What a part died of: one that was killed for it was stopped before."""
        return self._given_up.pop(name, reason)
