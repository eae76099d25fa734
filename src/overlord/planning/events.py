"""What people change in mid-run. Each event names its step; a state keeps those that still matter,
not the history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from overlord.messages.control import (
    AddSource,
    Cursor,
    Report,
    SetMixture,
    Skip,
    SourceLost,
    StreamState,
)

Event = SetMixture | Skip | AddSource | SourceLost


def last_step(event: Event) -> int:
    """The last step at which an event does something new: behind it, it is folded into the state or
    forgotten.
    """
    return event.last if isinstance(event, Skip) else event.at


def latest(events: Sequence[Event], after: int, step: int) -> list[SetMixture]:
    """The change of mixture that holds at a step, of those behind ``after``: that of the latest
    step, the last said of equals.
    """
    changes = [e for e in events if isinstance(e, SetMixture) and after < e.at <= step]
    return sorted(changes, key=lambda e: e.at)[-1:]


def still_in_force(
    events: Sequence[Event], step: int, mix_step: int, lag: int = 0
) -> tuple[Event, ...]:
    """The folded log behind a step: sources that were added, the mixture in force and what is still
    to come.

    Under ``mix_every="epoch"`` the mixture in force is that of ``mix_step``, and a later one waits
    for the next epoch. A skip is remembered for ``lag`` steps more: feedback from before it is not
    used.
    """
    coming = (
        e
        for e in events
        if not isinstance(e, (AddSource, SourceLost))
        and last_step(e) + (lag if isinstance(e, Skip) else 0) > step
    )
    return (
        *joined(events),
        *lost(events),
        *latest(events, -1, mix_step),
        *latest(events, mix_step, step),
        *coming,
    )


def joined(events: Sequence[Event]) -> tuple[AddSource, ...]:
    """Sources that were added, in their order. Kept for ever: the job lists them too, but not since
    when.
    """
    return tuple(e for e in events if isinstance(e, AddSource))


def lost(events: Sequence[Event]) -> tuple[SourceLost, ...]:
    """Sources that were given up. Kept for ever, with their reasons: that they are not drawn from
    does not say why.
    """
    return tuple(e for e in events if isinstance(e, SourceLost))


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """As states hold them, whenever they were said: who joined, who was lost, and the rest, each as
    they were said.
    """
    every = tuple(events)
    return (
        *joined(every),
        *lost(every),
        *(e for e in every if not isinstance(e, (AddSource, SourceLost))),
    )


def present(names: Sequence[str], events: Sequence[Event], step: int) -> tuple[str, ...]:
    """The sources that a plan of a step knows: whether one that joins later was announced already
    must not be seen in it.
    """
    n, coming = len(names), {e.name for e in joined(events) if e.at > step}
    while coming and names[n - 1] in coming:
        n -= 1
    return tuple(names[:n])


def skipped(events: Sequence[Event], first: int, stop: int) -> bool:
    """Whether one of steps first to stop - 1 is not delivered."""
    return any(e.between(first, stop) for e in events if isinstance(e, Skip))


def said_of_all(change: SetMixture, names: Sequence[str]) -> SetMixture:
    """A change of mixture with a weight for every source there is, so that a source added later is
    one it does not name.
    """
    if all(name in change.weights for name in names):
        return change
    return replace(change, weights={**dict.fromkeys(names, 0.0), **change.weights})


def widened(state: StreamState, n: int) -> StreamState:
    """A state with room for sources that were added behind it: at their beginning, nothing owed."""
    more = n - len(state.owed)
    if more <= 0:
        return state
    return replace(
        state,
        cursors=np.concatenate([state.cursors, np.array([Cursor()] * more, np.int64)]),
        owed=(*state.owed, *(0,) * more),
        active=(*state.active, *(True,) * more),
        weights=(*state.weights, *(0.0,) * more) if state.weights else (),
        counts={
            name: np.concatenate([c, np.zeros(more, np.int64)]) for name, c in state.counts.items()
        },
        ahead=(*state.ahead, *(np.zeros(0, np.int32),) * more) if state.ahead else (),
    )


class EventLog:
    """What was said lately: states of steps planned before it do not hold it, since prefetch runs
    ahead of what people say.
    """

    def __init__(self, lag: int):
        self._lag = lag
        self._events: tuple[Event, ...] = ()
        self._reports: dict[tuple[int, int], Report] = {}
        self._unheard: dict[tuple[int, int], Report] = {}
        self._many = 64  # reports at which old ones are let go

    def add(self, event: Event, first: int) -> None:
        """``first``: the lowest step at which some client's state stands; what lies behind it is in
        every state.
        """
        self._events = (*(e for e in self._events if last_step(e) >= first), event)

    def report(self, report: Report, first: int) -> None:
        """Of reports only those that came in time, or a resumed run would know what this one did
        not.
        """
        self._reports[report.step, report.rank] = report
        if len(self._reports) >= self._many:
            self._reports = {
                key: r for key, r in self._reports.items() if r.step >= first - self._lag
            }
            self._many = 64 + 2 * len(self._reports)

    def expect(self, report: Report) -> None:
        """One that is in time whenever the planner hears of it: it may be on its way for long, and
        a state that is saved meanwhile must hold it, since trainers do not say it again.
        """
        self._unheard[report.step, report.rank] = report

    def heard(self, report: Report) -> None:
        """The planner knows of it, and has said what becomes of it."""
        # else the rank has said something else since
        if self._unheard.get((report.step, report.rank)) is report:
            del self._unheard[report.step, report.rank]

    def completed(
        self, state: StreamState, names: Sequence[str], *, ahead: bool = False
    ) -> StreamState:
        """A state of the sources of these names with all that was said since its step was planned.
        ``ahead``: also what was reported of steps behind it, for trainers that stand where they are
        and say nothing twice.
        """
        late, held = list[Event](), list(state.events)
        # what was said twice is there twice; a state that came from another process has copies
        for e in self._events:
            if e in held:
                held.remove(e)
            elif last_step(e) >= state.step:
                late.append(e)
        # before those that were heard: what is in neither place now was nowhere
        unheard = dict(self._unheard)
        every = {**self._reports, **unheard}
        since = {
            key: r
            for key, r in every.items()
            if state.step - self._lag <= r.step and (ahead or r.step < state.step)
        }
        reports: Iterable[Report] = state.reports
        if since:
            known: Mapping[tuple[int, int], Report] = {
                (r.step, r.rank): r for r in state.reports
            } | since
            reports = (known[key] for key in sorted(known))
        events = in_order(
            (*state.events, *(e for e in late if not isinstance(e, AddSource) or e.name in names))
        )
        return replace(widened(state, len(names)), events=events, reports=tuple(reports))
