"""What people told a planner elsewhere, and did not see answered in time: it may come to it all the
same, and then it has happened.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from overlord.errors import DataStall

KEPT = 64  # events that were taken, to tell one that was said twice from one that was said once
MAY_STILL = (
    "the planner may still come to it: then it has happened, and is in the states that are "
    "saved from there on"
)


@dataclass(slots=True, eq=False)
class _Saying:
    event: Any
    late: Callable[[], None]
    taken: bool = False
    given_up: bool = False


class EventOutbox:
    """Whoever says something waits for the answer, but not for ever. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Saying] = []
        self._taken: deque[Any] = deque(maxlen=KEPT)
        self._to_hear: deque[Any] = deque(maxlen=KEPT)  # were answered, and will be told of as well

    @property
    def unsettled(self) -> bool:
        """Of something that was given up it is not known yet whether it happens. Until it is,
        nothing else is to be said: of two changes for one step the last one counts, and sources
        have numbers.
        """
        return any(saying.given_up for saying in list(self._open))

    def say(self, event: Any, ask: Callable[[], Any], late: Callable[[], None]) -> None:
        """``ask`` returns when a planner has taken the event. Where that is given up, ``late`` is
        called should one take it after all.
        """
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
            with self._lock:
                self._open.remove(saying)
            raise
        with self._lock:
            self._open.remove(saying)
            if not saying.taken:
                self._taken.append(event)
                self._to_hear.append(event)

    def heard(self, event: Any) -> None:
        """A planner has taken an event, and says so beside its answer."""
        with self._lock:
            if event in self._to_hear:
                self._to_hear.remove(event)
                return
            late = self._take(
                next((s for s in self._open if not s.taken and s.event == event), None)
            )
        late()

    def found(self, events: Sequence[Any]) -> None:
        """A planner found these in the journal of the one before it, which may have died before it
        could say so.
        """
        for saying in list(self._open):
            with self._lock:
                new = (
                    not saying.taken
                    and saying in self._open
                    and events.count(saying.event) > self._taken.count(saying.event)
                )
                late = self._take(saying if new else None)
            late()

    def settle(self, events: Sequence[Any]) -> None:
        """All that the planner has taken, asked of it behind what was given up: what is not among
        it has not happened, and will not.
        """
        self.found(events)
        with self._lock:
            self._open = [saying for saying in self._open if not saying.given_up]

    def _take(self, saying: _Saying | None) -> Callable[[], None]:
        """Under the lock; what is to be called outside it."""
        if saying is None:
            return lambda: None
        saying.taken = True
        self._taken.append(saying.event)
        if not saying.given_up:
            return lambda: None
        self._open.remove(saying)
        return saying.late
