"""The messages that open a loader at a state of the stream. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from overlord.cluster.placement import Placement
from overlord.messages.control import Cursor, FollowLoader, LoaderStart, StreamState
from overlord.planning.planner import Planner
from overlord.setup.prepared_job import PreparedJob


class LoaderStarts:
    """Builds ``LoaderStart`` messages of the current job. ``prepared`` returns that job."""

    def __init__(self, prepared: Callable[[], PreparedJob], placement: Placement):
        self._prepared, self._placement = prepared, placement

    def at(self, state: StreamState) -> list[LoaderStart]:
        """Return the starts of all loaders at a state."""
        prepared = self._prepared()
        cursors = [Cursor(*c) for c in state.cursors.tolist()]
        return [o for i, cursor in enumerate(cursors) for o in prepared.loader_starts(i, cursor)]

    def of(self, loader: int, cursor: Cursor, generation: int) -> LoaderStart:
        """Return the start of one loader."""
        source = self._placement.source_of(loader)
        starts = self._prepared().loader_starts(source, cursor)
        start = starts[loader - self._placement.loaders_of(source).start]
        return replace(start, generation=generation)

    def follow(self, loader: int, planner: Planner) -> list[Any]:
        """Return the messages to a worker that follows a loader from the next planned step on."""
        cursor, generation, refill = planner.opening(loader)
        return [FollowLoader(self.of(loader, cursor, generation)), refill]
