"""The ids of applied events: an event that is sent again is ignored. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from overlord.messages.control import AddSource, EventId, Report, SetMixture, Skip, SourceLost

SESSION, PLANNER = "session", "planner"  # origins of events
RANK = "rank "  # first part of the origin of reports


def origin_of(event: object) -> str:
    """Return the origin of an event of the stream, or of a report; empty for other messages."""
    match event:
        case Report(rank=rank):
            return f"{RANK}{rank}"
        case SetMixture() | Skip() | AddSource():
            return SESSION
        case SourceLost():
            return PLANNER
    return ""


class AppliedIds:
    """The last applied event of each origin in one launch.

    The events of an origin are applied in the order of their numbers, so the last one is enough.
    """

    def __init__(self, launch: str = "", ids: Iterable[EventId] = ()):
        self.launch = launch
        self._last: dict[str, int] = {}
        for applied in ids:
            self.add(applied)

    def id_of(self, event: object, number: int | None = None) -> EventId | None:
        """Return the id of an event; None for a message that is not an event of the stream.

        ``number`` None: the next one of its origin, for events that are never sent again.
        """
        if not (origin := origin_of(event)):
            return None
        return EventId(self.launch, origin, self.last(origin) + 1 if number is None else number)

    def last(self, origin: str) -> int:
        """Return the number of the last applied event of an origin; 0 if there is none."""
        return self._last.get(origin, 0)

    def is_new(self, event_id: EventId) -> bool:
        """Return whether an event was not applied yet."""
        return event_id.number > self.last(event_id.origin)

    def add(self, event_id: EventId) -> None:
        """Record that an event was applied. Numbers of other launches mean nothing here."""
        if event_id.launch == self.launch:
            self._last[event_id.origin] = max(event_id.number, self.last(event_id.origin))

    def ids(self) -> list[EventId]:
        """Return the last applied event of each origin."""
        return [EventId(self.launch, origin, n) for origin, n in sorted(self._last.items())]

    def reports(self) -> dict[int, int]:
        """Return the number of the last applied report of each rank."""
        found = (origin.split() for origin in self._last if origin.startswith(RANK))
        return {int(rank): self._last[RANK + rank] for _, rank in found}

    def clear(self) -> None:
        """Forget all events: a rewind begins a new stream of events."""
        self._last.clear()
