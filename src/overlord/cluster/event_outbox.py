"""Events sent to a coordinator in another process whose answer did not arrive in time.

The coordinator may still apply such an event: then it has happened.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from overlord.errors import DataStall

KEPT = 64  # applied events, to tell an event that was sent twice from one that was sent once
MAY_STILL = (
    "the planner may still come to it: then it has happened, and is in the states that are "
    "saved from there on"
)


@dataclass(slots=True, eq=False)
class _Pending:
    """An event without an answer."""

    event: Any
    late: Callable[[], None]
    taken: bool = False
    given_up: bool = False


class EventOutbox:
    """Sends events, with a deadline for the answer. Runs on: any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_Pending] = []
        self._taken: deque[Any] = deque(maxlen=KEPT)
        self._unconfirmed: deque[Any] = deque(maxlen=KEPT)  # answered, and still to be confirmed

    @property
    def unsettled(self) -> bool:
        """Whether the outcome of an event is unknown whose answer was given up.

        Until it is known, no other event is sent: of two changes for one step the last one counts,
        and sources are numbered.
        """
        return any(pending.given_up for pending in list(self._open))

    def send(self, event: Any, ask: Callable[[], Any], late: Callable[[], None]) -> None:
        """Send an event. ``ask`` returns once a coordinator has applied it.

        If the answer is given up, ``late`` is called should the event be applied after all.
        """
        pending = _Pending(event, late)
        with self._lock:
            self._open.append(pending)
        try:
            ask()
        except DataStall as stall:
            with self._lock:
                if not pending.taken:
                    pending.given_up = True
                    stall.add_note(MAY_STILL)
                    raise
        except BaseException:
            with self._lock:
                self._open.remove(pending)
            raise
        with self._lock:
            self._open.remove(pending)
            if not pending.taken:
                self._taken.append(event)
                self._unconfirmed.append(event)

    def confirmed(self, event: Any) -> None:
        """Note the confirmation of an applied event, which is sent in addition to the answer."""
        with self._lock:
            if event in self._unconfirmed:
                self._unconfirmed.remove(event)
                return
            late = self._take(
                next((s for s in self._open if not s.taken and s.event == event), None)
            )
        late()

    def found(self, events: Sequence[Any]) -> None:
        """Note events in the journal of an earlier coordinator, which may have died unconfirmed."""
        for pending in list(self._open):
            with self._lock:
                new = (
                    not pending.taken
                    and pending in self._open
                    and events.count(pending.event) > self._taken.count(pending.event)
                )
                late = self._take(pending if new else None)
            late()

    def settle(self, events: Sequence[Any]) -> None:
        """Settle given-up events by all applied ones, which were asked for after them.

        An event that is not among these has not happened, and will not.
        """
        self.found(events)
        with self._lock:
            self._open = [pending for pending in self._open if not pending.given_up]

    def _take(self, pending: _Pending | None) -> Callable[[], None]:
        """Mark an event as applied, under the lock; return the call to make outside it."""
        if pending is None:
            return lambda: None
        pending.taken = True
        self._taken.append(pending.event)
        if not pending.given_up:
            return lambda: None
        self._open.remove(pending)
        return pending.late
