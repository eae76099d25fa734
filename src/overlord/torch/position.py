"""Positions in the stream as states to save, also for a trainer that prefetches items."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from overlord.client.caller_check import Ahead
from overlord.errors import StateMismatch
from overlord.torch.saved_state import State

REMEDY = "save and load the result of state_dict() unchanged"


@dataclass(frozen=True, slots=True)
class Position:
    """A position after a step, or after some microbatches of the next one.

    ``stream`` returns the state after the last whole step; None: the stream has not begun.
    ``microbatches``: those delivered of the next step. ``plan``: digest of the plan of that step.
    """

    stream: Callable[[], State | None]
    microbatches: int = 0
    plan: str | None = None

    def state(self) -> State:
        """Return the state to save: a mapping with fixed keys and without nested mappings.

        torch's distributed checkpoint loads the keys that a fresh loader has, and splits mappings
        into a key for each value.
        """
        stream = self.stream()
        text = None if stream is None else json.dumps(stream, sort_keys=True)
        return {"stream": text, "microbatches": self.microbatches, "plan": self.plan}


@dataclass(frozen=True, slots=True)
class Saved:
    """A function that returns the stream of a saved state; unlike a lambda it can be pickled."""

    stream: State | None

    def __call__(self) -> State | None:
        return self.stream


NOT_BEGUN = Position(Saved(None))


def position_of(state: Any) -> Position:
    """Return the position of a saved state, which a loader or a client returned.

    An empty mapping is the start of the stream. Other values raise ``StateMismatch``.
    """
    if not isinstance(state, Mapping):
        found = type(state).__name__
        raise StateMismatch({}, REMEDY, f"state: expected a mapping, got {found}")
    if "stream" not in state:
        return Position(Saved(dict(state))) if state else NOT_BEGUN
    stream = state["stream"]
    if isinstance(stream, str):
        try:
            stream = json.loads(stream)
        except ValueError as fault:
            raise StateMismatch(
                {}, REMEDY, f"stream of the state: expected JSON, got: {fault}"
            ) from fault
    if not (stream is None or isinstance(stream, Mapping)):
        found = type(stream).__name__
        raise StateMismatch(
            {}, REMEDY, f"stream of the state: expected a mapping as JSON or None, got {found}"
        )
    return Position(
        Saved(None if stream is None else dict(stream)),
        int(state.get("microbatches") or 0),
        state.get("plan"),
    )


class Trail:
    """The positions of one pass from the last trained item on, for a trainer that prefetches.

    A trainer that prefetches ``n`` items has trained on ``n`` fewer than it requested. The request
    at the end of the stream counts too.
    """

    def __init__(self, ahead: Ahead):
        self._ahead, self._n = ahead, -1
        self._places: deque[Position] = deque()
        self._requested = self._delivered = 0

    def count_request(self, here: Callable[[], Position]) -> None:
        """Count a request for an item; ``here`` returns the position before it."""
        if self._n < 0:
            self._n = self._ahead()
            self._places = deque([here()] if self._n else [], maxlen=self._n + 1)
        self._requested += 1

    def count_delivery(self, here: Callable[[], Position]) -> None:
        """Count a delivered item; ``here`` returns the position after it."""
        self._delivered += 1
        if self._n:
            self._places.append(here())

    def empty_copy(self) -> Trail:
        """Return an empty trail for the same trainer."""
        return Trail(self._ahead)

    @property
    def held(self) -> int:
        """The number of items that the trainer has received and not trained on."""
        if self._n <= 0:
            return 0
        return self._delivered - max(0, min(self._delivered, self._requested - self._n))

    def consumed(self) -> Position | None:
        """Return the position after the last item that the trainer has trained on.

        None: that item is the last delivered one.
        """
        return self._places[-1 - self.held] if self.held else None
