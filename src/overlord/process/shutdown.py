"""Idempotent, interruptible shutdown.

Completed steps are not repeated when the shutdown is called again after Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Steps = list[Callable[[], object]]


def run_all(steps: Steps) -> None:
    """Run every step, even if earlier ones fail, and raise the first exception.

    Completed steps are removed from the list, so another call runs only the failed ones.
    """
    first: BaseException | None = None
    for step in list(steps):
        try:
            step()
            steps.remove(step)
        except BaseException as fault:
            first = first or fault
    if first is not None:
        raise first


class CloseOnce:
    """Shutdown steps that run once, even if several threads request the shutdown."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._steps: Steps | None = None

    def run(self, steps: Callable[[], Steps]) -> None:
        """Run the remaining steps; return at once if another call is running them.

        The caller may be a signal handler that has interrupted that call.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._steps is None:
                self._steps = steps()
            run_all(self._steps)
        finally:
            self._lock.release()
