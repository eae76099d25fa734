"""What people told a planner elsewhere, and did not see answered in time: it may come to it all the same, and then it has happened."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from overlord.errors import DataStall

KEPT = 64  # events that were taken, to tell one that was said twice from one that was said once
MAY_STILL = "the planner may still come to it: then it has happened, and is in the states that are saved from there on"


@dataclass(slots=True, eq=False)
class _Saying:
    event: Any
    late: Callable[[], None]
    taken: bool = False
    given_up: bool = False


class Sayings:
    """Whoever says something waits for the answer, but not for ever. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Saying] = []
        self._taken: deque[Any] = deque(maxlen=KEPT)

    def say(self, event: Any, ask: Callable[[], Any], late: Callable[[], None]) -> None:
        """``ask`` returns when a planner has taken the event. Where that is given up, ``late`` is called should one take it after all."""
        saying = _Saying(event, late)
        with self._lock:
            self._open.append(saying)
        try:
            ask()
        except DataStall as stall:
            with self._lock:
                if not saying.taken:
                    saying.given_up = True
                    stall.add_note(MAY_STILL)
                    raise
        except BaseException:
            self._close(saying)
            raise
        self._close(saying, taken=True)

    def _close(self, saying: _Saying, *, taken: bool = False) -> None:
        with self._lock:
            self._open.remove(saying)
            if taken and not saying.taken:
                self._taken.append(saying.event)

    def heard(self, event: Any) -> None:
        """A planner has taken an event, and says so beside its answer."""
        self._settle(next((s for s in list(self._open) if not s.taken and s.event == event), None))

    def found(self, events: Sequence[Any]) -> None:
        """A planner found these in the journal of the one before it, which may have died before it could say so."""
        for saying in list(self._open):
            if not saying.taken and events.count(saying.event) > self._taken.count(saying.event):
                self._settle(saying)

    def _settle(self, saying: _Saying | None) -> None:
        if saying is None:
            return
        with self._lock:
            saying.taken = True
            self._taken.append(saying.event)
            if late := saying.given_up:
                self._open.remove(saying)
        if late:
            saying.late()
