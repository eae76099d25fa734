"""Removal of sources whose storage failed for good (``Source(on_lost="leave")``). Pure.

The planner requests a ``SourceLost`` event. The first step after the event is in the log is planned
without the source. When storage fails depends on timing; the stream depends on the log alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from overlord.errors import StorageError
from overlord.messages.control import SourceLost, StreamState
from overlord.planning.events import in_order, lost, with_added_sources
from overlord.planning.spec import SourceSpec


class LostSources:
    """Decides whether a source leaves the job, and restarts a step that has begun with it.

    A step begins with the first draw that charges the accounts and gives no sample. The state
    before that draw is kept.
    """

    def __init__(self, floor: int):
        """Protect steps before ``floor``: they were planned before, with their sources."""
        self._floor = floor
        self._before: StreamState | None = None

    def begin(self, state: StreamState) -> None:
        """Record ``state`` as the state before its step, unless the step has begun already."""
        if not self.has_begun(state.step):
            self._before = state

    def has_begun(self, step: int) -> bool:
        """Return whether a draw has charged the accounts for ``step``."""
        return self._before is not None and self._before.step == step

    def requests(
        self,
        state: StreamState,
        broken: Mapping[int, Exception],
        weights: Sequence[float],
        sources: Sequence[SourceSpec],
    ) -> list[SourceLost]:
        """Return the events that let the ``broken`` sources leave at the state's step.

        The list is empty if the job must end there instead: a source may not leave, or no other
        source has a weight. A step that was planned before, or that comes before the step of an
        event in the log, has samples of the source. It is planned identically or not at all.
        """
        known = {event.name for event in lost(state.events)}
        may_leave = all(
            sources[i].leaves and sources[i].name not in known and isinstance(error, StorageError)
            for i, error in broken.items()
        )
        others = any(
            weight and active
            for i, (weight, active) in enumerate(zip(weights, state.active, strict=True))
            if i not in broken
        )
        unchanged = (
            self._before is None
            or self._before.step != state.step
            or self._before.active == state.active
        )
        if not may_leave or not others or not unchanged or state.step < self._floor:
            return []
        return [
            SourceLost(state.step, sources[i].name, _reason(error)) for i, error in broken.items()
        ]

    def apply(self, event: SourceLost, state: StreamState) -> StreamState:
        """Return the state with the event in its log.

        A step that has begun begins again, without the source, as it does when it is planned again
        later.
        """
        if self.has_begun(state.step) and event.at == state.step:
            assert self._before is not None
            # events that came since the step began stay in the log, and so do sources they added
            before = replace(self._before, events=state.events)
            state, self._before = with_added_sources(before, len(state.active)), None
        return replace(state, events=in_order((*state.events, event)))


def without_lost(
    state: StreamState, sources: Sequence[SourceSpec]
) -> tuple[StreamState, tuple[int, ...]]:
    """Return the state without lost sources, and the numbers of those that were active until now.

    A lost source is inactive from its step on. Its samples that were pulled and not drawn are
    dropped.
    """
    gone = {event.name for event in lost(state.events) if event.at <= state.step}
    leaving = tuple(i for i, s in enumerate(sources) if s.name in gone and state.active[i])
    if not leaving:
        return state, ()
    active, owed = list(state.active), list(state.owed)
    for i in leaving:
        active[i], owed[i] = False, 0
    ahead = state.ahead and tuple(a[:0] if i in leaving else a for i, a in enumerate(state.ahead))
    return replace(state, active=tuple(active), owed=tuple(owed), ahead=ahead), leaving


def all_lost(
    state: StreamState, weights: Sequence[float], sources: Sequence[SourceSpec]
) -> StorageError | None:
    """Return the error of a job all of whose weighted sources were lost; None if one was not."""
    reasons = {event.name: event.reason for event in lost(state.events)}
    weighed = [s.name for s, weight in zip(sources, weights, strict=True) if weight]
    if not weighed or any(name not in reasons for name in weighed):
        return None
    return StorageError(
        weighed[0],
        f"it was given up, and the mixture weighs no other source: {reasons[weighed[0]]}",
    )


def _reason(error: Exception) -> str:
    assert isinstance(error, StorageError)
    return f"{error.path}: {error.problem}" if error.path else error.problem
