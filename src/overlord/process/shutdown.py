"""The end of what was started, which anything may interrupt: Ctrl-C most of all, since people press
it while they wait for that end.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

Steps = list[Callable[[], object]]


def in_turn(steps: Steps) -> None:
    """Do each, whatever becomes of those before it, and raise what went wrong first. What was done
    is off the list: called again, this does what could not be done.
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
    """Steps that are done once, however often and by whomever they are asked for."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._steps: Steps | None = None

    def go(self, steps: Callable[[], Steps]) -> None:
        """Whoever comes while another is at it leaves it to them: it may be the handler of a
        signal, which has interrupted that one.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._steps is None:
                self._steps = steps()
            in_turn(self._steps)
        finally:
            self._lock.release()
