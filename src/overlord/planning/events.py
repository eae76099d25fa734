"""Events that change a running job, each with its first step.

A state keeps the events that still have an effect, not the history.
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
    """Return the last step at which an event has a new effect.

    After it, the event is folded into the state or dropped.
    """
    return event.last if isinstance(event, Skip) else event.at


def latest(events: Sequence[Event], after: int, step: int) -> list[SetMixture]:
    """Return the change of mixture in force at a step, among those after ``after``.

    The change with the latest step counts; of equals, the one added last.
    """
    changes = [e for e in events if isinstance(e, SetMixture) and after < e.at <= step]
    return sorted(changes, key=lambda e: e.at)[-1:]


def still_in_force(
    events: Sequence[Event], step: int, mix_step: int, lag: int = 0
) -> tuple[Event, ...]:
    """Return the folded log after a step: added sources, the mixture in force and future events.

    Under ``mix_every="epoch"`` the mixture in force is that of ``mix_step``, and a later one waits
    for the next epoch. A skip stays for ``lag`` steps more: feedback from before it is not used.
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
    """Return added sources in their order; they are never dropped.

    The job lists them, too, but not their steps.
    """
    return tuple(e for e in events if isinstance(e, AddSource))


def lost(events: Sequence[Event]) -> tuple[SourceLost, ...]:
    """Return lost sources; they are never dropped, because a state shows the reason only there."""
    return tuple(e for e in events if isinstance(e, SourceLost))


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return events in the order of a state: added sources, lost sources, the rest.

    Each kind is in the order in which it was added.
    """
    every = tuple(events)
    return (
        *joined(every),
        *lost(every),
        *(e for e in every if not isinstance(e, (AddSource, SourceLost))),
    )


def present(names: Sequence[str], events: Sequence[Event], step: int) -> tuple[str, ...]:
    """Return the sources that the plan of a step contains.

    It must not depend on whether a source that joins later has been added already.
    """
    n, coming = len(names), {e.name for e in joined(events) if e.at > step}
    while coming and names[n - 1] in coming:
        n -= 1
    return tuple(names[:n])


def skipped(events: Sequence[Event], first: int, stop: int) -> bool:
    """Return whether one of steps first to stop - 1 is not delivered."""
    return any(e.between(first, stop) for e in events if isinstance(e, Skip))


def with_every_weight(change: SetMixture, names: Sequence[str]) -> SetMixture:
    """Return a change of mixture with a weight for every existing source.

    It then does not apply to sources that are added later.
    """
    if all(name in change.weights for name in names):
        return change
    return replace(change, weights={**dict.fromkeys(names, 0.0), **change.weights})


def with_added_sources(state: StreamState, n: int) -> StreamState:
    """Return a state with entries for sources added later: at their start, nothing owed."""
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
    """Recent events.

    Prefetch runs ahead of events, so states of steps that are planned already do not contain them.
    """

    def __init__(self, lag: int):
        self._lag = lag
        self._events: tuple[Event, ...] = ()
        self._reports: dict[tuple[int, int], Report] = {}
        self._unheard: dict[tuple[int, int], Report] = {}
        self._many = 64  # number of reports at which old ones are dropped

    def add(self, event: Event, first: int) -> None:
        """Add an event.

        ``first``: the lowest step of any client's state; earlier events are in every state.
        """
        self._events = (*(e for e in self._events if last_step(e) >= first), event)

    def report(self, report: Report, first: int) -> None:
        """Add a report that came in time.

        Late reports are left out, or a resumed run would use what this run did not.
        """
        self._reports[report.step, report.rank] = report
        if len(self._reports) >= self._many:
            self._reports = {
                key: r for key, r in self._reports.items() if r.step >= first - self._lag
            }
            self._many = 64 + 2 * len(self._reports)

    def expect(self, report: Report) -> None:
        """Add a report that is in time whenever the planner receives it.

        It may take long to arrive. A state saved meanwhile must contain it, since trainers do not
        repeat it.
        """
        self._unheard[report.step, report.rank] = report

    def received(self, report: Report) -> None:
        """Remove an expected report: the planner has received it and decided on it."""
        # otherwise the rank has sent another report since
        if self._unheard.get((report.step, report.rank)) is report:
            del self._unheard[report.step, report.rank]

    def completed(
        self, state: StreamState, names: Sequence[str], *, ahead: bool = False
    ) -> StreamState:
        """Return a state of these sources with all events since its step was planned.

        ``ahead``: also with reports of later steps, for trainers that keep their position and do
        not repeat them.
        """
        late, held = list[Event](), list(state.events)
        # equal events may occur twice; a state from another process has copies
        for e in self._events:
            if e in held:
                held.remove(e)
            elif last_step(e) >= state.step:
                late.append(e)
        # copied before the received reports are read: a report that moves meanwhile is then in one
        # of them
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
        return replace(with_added_sources(state, len(names)), events=events, reports=tuple(reports))
