"""Sources whose storage was given up, and that may leave: the planner asks for the event, and a
step is planned without them once it is in the log. So when storage was given up depends on timing,
and the stream on the log alone. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from overlord.checks import did_you_mean
from overlord.errors import PlanError, StorageError
from overlord.messages.control import DropHeldSamples, SourceLost, StreamState
from overlord.planning.demand import Demand
from overlord.planning.events import in_order, lost
from overlord.planning.status import Answers


class Leaving(Answers):
    """The part of ``Planner`` that lets sources go."""

    _demand: Demand
    _replay: dict[int, Any]
    _unbegun: StreamState | None  # the state before the step was begun

    def _asks_to_leave(self, need: Mapping[int, int]) -> list[SourceLost]:
        """What is to be said of the streams that broke before a draw; nothing if the job ends
        there. A step that was planned before, or that lies before the one at which the log says
        that they leave, has samples of them: it comes out the same or not at all.
        """
        state = self._state
        broken = {i: error for i in sorted(need) if (error := self._streams[i].error) is not None}
        known, specs = {e.name for e in lost(state.events)}, self.spec.sources
        leave = all(
            specs[i].leaves and specs[i].name not in known and isinstance(error, StorageError)
            for i, error in broken.items()
        )
        others = any(
            w and a
            for i, (w, a) in enumerate(zip(self._weights, state.active, strict=True))
            if i not in broken
        )
        as_it_was = self._begun != state.step or (
            self._unbegun is not None and self._unbegun.active == state.active
        )
        if not leave or not others or not as_it_was or state.step < self.floor:
            return []
        return [
            SourceLost(state.step, self.spec.sources[i].name, _reason(error))
            for i, error in broken.items()
        ]

    def _lose(self, event: SourceLost) -> None:
        """An event of the log: asked for by this planner, or by one that it stands for."""
        if event.name not in self.spec.names:
            raise PlanError(
                f"unknown source {event.name!r}{did_you_mean(event.name, self.spec.names)}"
            )
        if any(e.name == event.name for e in lost(self._state.events)):
            return  # asked for twice, since others were heard meanwhile
        here = event.at == self._state.step
        if not here or event.at < self.floor:
            self.refuse_planned(event.at)
        if self.ended is not None:
            return
        # the step begins without it, as it will when it is planned again
        if here and self._begun == event.at:
            assert self._unbegun is not None
            self._state, self._begun = self._unbegun, -1
        self._state = replace(self._state, events=in_order((*self._state.events, event)))
        self._waiting = {}

    def _leave_lost(self) -> list[DropHeldSamples]:
        """Before a step is drawn: those that are lost by then are not drawn from. What was read of
        them and not drawn is of no use.
        """
        state = self._state
        gone = {e.name for e in lost(state.events) if e.at <= state.step}
        leaving = [i for i, s in enumerate(self.spec.sources) if s.name in gone and state.active[i]]
        if not leaving:
            return []
        active, owed, commands = list(state.active), list(state.owed), list[DropHeldSamples]()
        for i in leaving:
            active[i], owed[i] = False, 0
            self._replay.pop(i, None)
            if self._reserve is not None and self._reserve.give_back(i)[1]:
                commands.append(DropHeldSamples(tuple(self._demand.of(i))))
        ahead = state.ahead and tuple(
            a[:0] if i in leaving else a for i, a in enumerate(state.ahead)
        )
        self._state = replace(state, active=tuple(active), owed=tuple(owed), ahead=ahead)
        return commands

    def _nothing_left(self) -> StorageError | None:
        """Why no source is left to draw from, where all that the mixture weighs were lost; None:
        they have given all they had.
        """
        reasons = {e.name: e.reason for e in lost(self._state.events)}
        weighed = [s.name for s, w in zip(self.spec.sources, self._weights, strict=True) if w]
        if not weighed or any(name not in reasons for name in weighed):
            return None
        return StorageError(
            weighed[0],
            f"it was given up, and the mixture weighs no other source: {reasons[weighed[0]]}",
        )


def _reason(error: Exception) -> str:
    assert isinstance(error, StorageError)
    return f"{error.path}: {error.problem}" if error.path else error.problem
