"""The weights of every step, from the schedule, reports of trainers and events of users. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from overlord.errors import JobError, PlanError
from overlord.job.mixture_weights import mixture_problems
from overlord.messages.control import (
    AddSource,
    Cursor,
    Report,
    SetMixture,
    Skip,
    SourceLost,
    StreamState,
)
from overlord.planning.schedule import Weights, as_float, by_source
from overlord.planning.schedule.base import follows_from_step, has_state

# ----------------------------------------------------------------------------
# Reports of trainers, and the plans that use them.
#
# Plan t uses the reports of step t - ``feedback_lag`` alone, so that the prefetch window never
# decides what a schedule receives. Values are stored by rank until then. The order of their arrival
# does not matter: equal reports give equal streams.

COUNTS = ("received", "used", "late")


def reduce_reports(reports: Iterable[Report]) -> dict[str, float]:
    """Return one value for each metric of a step: the mean over the ranks that reported it.

    A metric ``<kind>/<source>`` is weighted by ``tokens/<source>`` if all these ranks reported
    tokens. Token counts themselves are summed. Sums are exactly rounded, so the order of the ranks
    does not matter.
    """
    ranks = list(reports)
    names = sorted({name for r in ranks for name in r.metrics})
    return {
        name: _reduce_metric(name, [r.metrics for r in ranks if name in r.metrics])
        for name in names
    }


def _reduce_metric(name: str, ranks: list[Mapping[str, float]]) -> float:
    """Return the sum of a token count, or the mean of another metric, over these ranks' metrics."""
    kind, _, source = name.partition("/")
    values = [r[name] for r in ranks]
    if kind == "tokens" and source:
        return math.fsum(values)
    tokens = [r[f"tokens/{source}"] for r in ranks if f"tokens/{source}" in r] if source else []
    most = max(tokens, default=0.0)
    if len(tokens) < len(values) or not most > 0:
        return math.fsum(values) / len(values)
    shares = [t / most for t in tokens]  # so that no product underflows
    return math.fsum(v * t for v, t in zip(values, shares, strict=True)) / math.fsum(shares)


class Feedback:
    """Reports of trainers, stored until the plans that use them, and counts of reports."""

    def __init__(self, lag: int, takes: bool, reports: Iterable[Report] = (), floor: int = 0):
        self._lag, self.takes, self._floor = lag, takes, floor
        self._steps: dict[int, dict[int, Report]] = {}
        self._counts: Counter[str] = Counter()
        for report in reports if takes else ():
            self._steps.setdefault(report.step, {})[report.rank] = report

    def in_time(self, report: Report, planned: int) -> bool:
        """Return whether a later plan will use a report.

        ``planned``: the last step whose weights are computed already.
        """
        return self.takes and report.step + self._lag > planned

    def add(self, report: Report, planned: int) -> None:
        self._counts["received"] += 1
        if self.in_time(report, planned):
            # a rank's later report of a step replaces its earlier one
            self._steps.setdefault(report.step, {})[report.rank] = report
        elif self.takes:
            self._counts["late"] += 1

    def use(self, step: int, skipped: bool) -> dict[str, float]:
        """Return the feedback for the plan of ``step``, and remove the reports that it consists of.

        They are those of step ``step - lag``. ``skipped``: a step from there to ``step`` is
        skipped, so the feedback is empty. Planning then runs ahead of the reports, by an amount
        that depends on the speed of the trainers.
        """
        reports = self._steps.pop(step - self._lag, {})
        if step >= self._floor:  # the previous planner counted the reports of earlier plans
            self._counts["late" if skipped else "used"] += len(reports)
        if skipped:
            return {}
        return reduce_reports(reports[rank] for rank in sorted(reports))

    def adopt(self, before: Feedback) -> None:
        """Replace the counts by those of the previous planner, to continue them."""
        self._counts = Counter({name: n for name, n in before.counts().items() if name in COUNTS})

    def pending(self) -> tuple[Report, ...]:
        return tuple(
            self._steps[step][rank]
            for step in sorted(self._steps)
            for rank in sorted(self._steps[step])
        )

    def counts(self) -> dict[str, int]:
        return {
            **{name: self._counts[name] for name in COUNTS},
            "pending": sum(map(len, self._steps.values())),
        }


# ----------------------------------------------------------------------------
# Events that change a running job, each with its first step.
#
# A state keeps the events that still have an effect, not the history.

Event = SetMixture | Skip | AddSource | SourceLost


def last_step(event: Event) -> int:
    """Return the last step at which an event has a new effect.

    After it, the event is folded into the state or dropped.
    """
    return event.last if isinstance(event, Skip) else event.at


def latest(
    events: Sequence[Event], after: int, step: int, starts: Sequence[int] = ()
) -> list[SetMixture]:
    """Return the SetMixture in force at ``step``, in a list that is empty if there is none.

    Only changes with ``after`` < ``at`` <= ``step`` count. The one with the highest ``at`` is in
    force; of equals, the one added last. ``starts``: first steps of stages with a mixture of their
    own, which end the changes before them.
    """
    after = max(after, max((first for first in starts if first <= step), default=0) - 1)
    changes = [e for e in events if isinstance(e, SetMixture) and after < e.at <= step]
    return sorted(changes, key=lambda e: e.at)[-1:]


def still_in_force(
    events: Sequence[Event], step: int, mix_step: int, lag: int = 0, starts: Sequence[int] = ()
) -> tuple[Event, ...]:
    """Return the events that still have an effect after a step.

    They are added and lost sources, the mixture in force, and future events. Under
    ``mix_every="epoch"`` the mixture in force is that of ``mix_step``, and a later one waits for
    the next epoch. A skip stays for ``lag`` steps more: feedback from before it is not used.
    """
    coming = (
        e
        for e in events
        if not isinstance(e, (AddSource, SourceLost))
        and last_step(e) + (lag if isinstance(e, Skip) else 0) > step
    )
    return (
        *added_sources(events),
        *lost_sources(events),
        *latest(events, -1, mix_step, starts),
        *latest(events, mix_step, step, starts),
        *coming,
    )


def added_sources(events: Sequence[Event]) -> tuple[AddSource, ...]:
    """Return the AddSource events in their order.

    A state keeps them permanently: the job lists the sources, too, but not their first steps.
    """
    return tuple(e for e in events if isinstance(e, AddSource))


def lost_sources(events: Sequence[Event]) -> tuple[SourceLost, ...]:
    """Return the SourceLost events in their order; a state keeps them permanently."""
    return tuple(e for e in events if isinstance(e, SourceLost))


def in_order(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return events in the order of a state: added sources, lost sources, the rest.

    Each kind is in the order in which it was added.
    """
    every = tuple(events)
    return (
        *added_sources(every),
        *lost_sources(every),
        *(e for e in every if not isinstance(e, (AddSource, SourceLost))),
    )


def sources_of_step(names: Sequence[str], events: Sequence[Event], step: int) -> tuple[str, ...]:
    """Return the sources of the plan of a step: ``names`` without those added at a later step."""
    n, coming = len(names), {e.name for e in added_sources(events) if e.at > step}
    while coming and names[n - 1] in coming:
        n -= 1
    return tuple(names[:n])


def skipped(events: Sequence[Event], first: int, stop: int) -> bool:
    """Return whether a Skip event contains one of the steps ``first`` to ``stop - 1``."""
    return any(e.between(first, stop) for e in events if isinstance(e, Skip))


def with_every_weight(change: SetMixture, names: Sequence[str]) -> SetMixture:
    """Return a change of mixture with weight 0 for every existing source that it does not name.

    Sources that are added later keep their own weight.
    """
    if all(name in change.weights for name in names):
        return change
    return replace(change, weights={**dict.fromkeys(names, 0.0), **change.weights})


def checked_change(change: SetMixture, names: Sequence[str], events: Sequence[Event]) -> SetMixture:
    """Return a change of mixture with a weight for every source of ``names``.

    Raise ``PlanError`` if its weights are invalid, or none is for a source that exists at its step.
    """
    if problems := mixture_problems(change.weights, names):
        raise PlanError("; ".join(problems))
    if coming := _not_yet_added(change.weights, events, change.at):
        raise PlanError(
            "set_mixture: expected a weight above 0 for a source that exists at this step, "
            f"got weights only for {', '.join(coming)}, added at a later step",
            change.at,
            "give another source a weight, or name a later step",
        )
    return with_every_weight(change, names)


def _not_yet_added(weights: Mapping[str, float], events: Sequence[Event], step: int) -> list[str]:
    """Return the sources with a weight if all of them are added after ``step``, else no source."""
    coming = {e.name for e in added_sources(events) if e.at > step}
    weighed = [name for name, weight in weights.items() if weight]
    return weighed if all(name in coming for name in weighed) else []


def with_added_sources(state: StreamState, n: int) -> StreamState:
    """Return a state extended to n sources; new sources are at their start, with nothing owed."""
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
        cut=(*state.cut, *(0,) * more) if state.cut else (),
    )


MANY_EVENTS = 8  # number of events at which old ones are dropped


class EventLog:
    """Recent events and reports, to complete the states of steps that were planned before them."""

    def __init__(self, lag: int):
        self._lag = lag
        self._events: tuple[Event, ...] = ()
        self._reports: dict[tuple[int, int], Report] = {}
        self._many = 64  # number of reports at which old ones are dropped

    def add(self, event: Event, first: Callable[[], int]) -> None:
        """Add an event; of many, drop those that every state contains.

        ``first``: returns the lowest step of any client's state. Events whose last step is before
        it are dropped.
        """
        if len(self._events) >= MANY_EVENTS:
            step = first()
            self._events = tuple(e for e in self._events if last_step(e) >= step)
        self._events += (event,)

    def report(self, report: Report, first: int) -> None:
        """Add a report that came in time, and sometimes drop reports too old for any state.

        The caller must not pass late reports: this run ignores them, but a resumed run would use
        them. ``first``: the lowest step of any client's state.
        """
        self._reports[report.step, report.rank] = report
        if len(self._reports) >= self._many:
            self._reports = {
                key: r for key, r in self._reports.items() if r.step >= first - self._lag
            }
            self._many = 64 + 2 * len(self._reports)

    def reports(self) -> list[Report]:
        """Return the kept reports, by step and rank."""
        return [self._reports[key] for key in sorted(self._reports)]

    def completed(
        self,
        state: StreamState,
        names: Sequence[str],
        *,
        reports: Iterable[Report] = (),
        ahead: bool = False,
    ) -> StreamState:
        """Return a state with the events and reports that were added since its step was planned.

        ``names`` are the sources of the state. ``reports``: more reports; of one rank and step the
        last counts. ``ahead``: include reports of later steps, for trainers that keep their
        position and do not repeat them.
        """
        late, held = list[Event](), list(state.events)
        # equal events may occur twice; a state from another process has copies
        for e in self._events:
            if e in held:
                held.remove(e)
            elif last_step(e) >= state.step:
                late.append(e)
        every = self._reports | {(r.step, r.rank): r for r in reports}
        since = {
            key: r
            for key, r in every.items()
            if state.step - self._lag <= r.step and (ahead or r.step < state.step)
        }
        known = {(r.step, r.rank): r for r in state.reports} | since
        events = in_order(
            (*state.events, *(e for e in late if not isinstance(e, AddSource) or e.name in names))
        )
        return replace(
            with_added_sources(state, len(names)),
            events=events,
            reports=tuple(known[key] for key in sorted(known)),
        )


# ----------------------------------------------------------------------------
# The weights in force at each step.
#
# The schedule is called once for every planned step, in step order, whether or not its weights
# are used. Its learning must not depend on ``set_mixture`` or ``mix_every``, nor on how often a
# blocked draw is repeated.

Schedule = Callable[[int, Mapping[str, float]], Weights]


class Mixture:
    """The weights in force, updated step by step. Only this object calls the schedule."""

    def __init__(
        self,
        schedule: Schedule | Mapping[str, float],
        *,
        every: str,
        lag: int,
        takes_feedback: bool,
        state: StreamState,
        floor: int = 0,
        starts: Sequence[int] = (),
    ):
        """Start at ``state``; ``starts``: first steps of stages with a mixture of their own."""
        self._schedule, self._every, self.starts = schedule, every, tuple(starts)
        self._fixed = isinstance(schedule, Mapping)
        self._stateful = not self._fixed and has_state(schedule)
        if self._stateful and state.schedule is not None:
            schedule.load_state_dict(state.schedule)  # type: ignore[union-attr]
        self._lag = lag if takes_feedback else 0
        # the last step for which the schedule was called, and the first step never planned
        self._called, self._floor = (state.step - 1, floor)
        self._scheduled: Weights = ()
        # cache of weights from fixed numbers, which seldom change
        self._known: tuple[Any, tuple[str, ...], list[float]] | None = None
        self.feedback = Feedback(lag, takes_feedback, state.reports, floor)
        self.weights: list[float] = list(state.weights)

    @property
    def lag(self) -> int:
        """Number of steps between a report and the plan that uses it; 0 without feedback."""
        return self._lag

    def report(self, report: Report) -> None:
        """Store a report for the plan that uses it; a late report is only counted."""
        self.feedback.add(report, max(self._called, self._floor - 1))

    def in_time(self, report: Report) -> bool:
        """Return whether a later plan will use a report."""
        return self.feedback.in_time(report, max(self._called, self._floor - 1))

    def update(self, state: StreamState, own: Mapping[str, float]) -> StreamState:
        """Compute the weights for the state's step, and return the updated state.

        ``own``: every source's own weight, in source order. Raise ``PlanError`` for invalid
        weights.
        """
        self._call_schedule(state)
        if self._every != "epoch":
            self.weights = self._weigh(state, own)
            return replace(state, mix_step=state.step)
        joins = any(e.at == state.step for e in added_sources(state.events))
        epoch = self._lowest_epoch(state)
        # a blocked draw is repeated: its epoch was checked already
        repeated = state.mix_step == state.step
        if self.weights and not repeated and not joins and epoch <= state.mix_epoch:
            return state
        self.weights = self._weigh(state, own)
        if joins:  # an added source starts with its own first epoch
            epoch = self._lowest_epoch(state)
        return replace(
            state,
            mix_step=state.step,
            mix_epoch=state.mix_epoch if repeated and not joins else epoch,
        )

    def _call_schedule(self, state: StreamState) -> None:
        if self._called == state.step:
            return
        feedback = (
            self.feedback.use(state.step, skipped(state.events, state.step - self.lag, state.step))
            if self.feedback.takes
            else {}
        )
        self._called = state.step
        self._scheduled = (
            self._schedule
            if isinstance(self._schedule, Mapping)
            else self._schedule(state.step, feedback)
        )

    def _weigh(self, state: StreamState, own: Mapping[str, float]) -> list[float]:
        change = latest(state.events, -1, state.step, self.starts)
        given = change[0].weights if change else self._scheduled
        here = tuple(e.name for e in added_sources(state.events) if e.at <= state.step)
        if (
            self._known is not None
            and self._known[0] is given
            and self._known[1] == here
            and len(self._known[2]) == len(own)
        ):
            return self._known[2]
        try:
            weights = weights_of_all(
                given,
                own,
                added_sources(state.events),
                state.step,
                as_shares=not change and not self._fixed,
            )
        except JobError as e:
            raise PlanError("; ".join(e.problems), state.step, "correct the schedule") from None
        self._known = (given, here, weights) if change or self._fixed else None
        return weights

    def foreseen(
        self, state: StreamState, step: int, own: Mapping[str, float]
    ) -> list[float] | None:
        """Return the weights of a later step, or None if they depend on more than step and events.

        A user's schedule is called once for every step, in order, so it is not called in advance.
        """
        change = latest(state.events, -1, step, self.starts)
        if not change and (
            self._every == "epoch" or not (self._fixed or follows_from_step(self._schedule))
        ):
            return None
        try:
            given = (
                change[0].weights
                if change
                else self._schedule
                if isinstance(self._schedule, Mapping)
                else self._schedule(step, {})
            )
            return weights_of_all(
                given,
                own,
                added_sources(state.events),
                step,
                as_shares=not change and not self._fixed,
            )
        except JobError:  # the error is raised when the step is planned
            return None

    def _lowest_epoch(self, state: StreamState) -> int:
        """Return the lowest epoch of active sources with a weight; 0 if there are none."""
        rows = zip(state.cursors[:, 0].tolist(), self.weights, state.active, strict=False)
        return min((epoch for epoch, weight, active in rows if weight and active), default=0)

    def grow(self, n: int) -> None:
        """Extend the weights to n sources; added sources have weight 0 until the next update."""
        self.weights = [*self.weights, *(0.0,) * (n - len(self.weights))] if self.weights else []

    def still_in_force(self, state: StreamState) -> tuple[Event, ...]:
        """Return the events that still have an effect after the state's step."""
        events, step = state.events, state.step
        return still_in_force(events, step, state.mix_step, self._lag, self.starts)

    def saved(self) -> dict[str, Any]:
        """Return the fields of a StreamState that the mixture sets after a planned step."""
        weights = tuple(self.weights) if self._every == "epoch" else ()
        return {
            "weights": weights,
            "schedule": self._schedule_state(),
            "reports": self.feedback.pending(),
        }

    def _schedule_state(self) -> dict[str, Any] | None:
        """Return the schedule's state after a round trip through JSON; None if it has none.

        The round trip makes it the same whether or not it was saved before. Raise ``PlanError``
        for a state that is not plain JSON.
        """
        if not self._stateful:
            return None
        state = self._schedule.state_dict()  # type: ignore[union-attr]
        try:
            made: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as e:
            problem = f"schedule: expected plain JSON from state_dict(), got another value: {e}"
            raise PlanError(
                problem, self._called, "return only numbers, text, lists and dicts"
            ) from None
        return made or None


def weights_of_all(
    given: Weights,
    own: Mapping[str, float],
    added: Sequence[AddSource],
    step: int,
    as_shares: bool = False,
) -> list[float]:
    """Return one weight for every source in the order of ``own``, added sources included.

    An added source has weight 0 before its step. From then on it has the weight of the mixture, or
    its own weight if the mixture does not name it. ``as_shares``: scale that own weight to the sum
    of the schedule's weights, which may change from step to step. Raise ``JobError`` for invalid
    weights.
    """
    names = tuple(own)
    if not added:
        return by_source(given, names)
    if hasattr(given, "tolist"):
        given = given.tolist()
    if isinstance(given, Sequence) and len(names) - len(added) <= len(given) < len(names):
        given = dict(zip(names, given, strict=False))
    coming = {e.name for e in added if e.at > step}
    if isinstance(given, Mapping):
        new = {e.name: own[e.name] for e in added if e.name not in coming}
        first = names[: len(names) - len(added)]
        scale = (
            _scale([as_float(given.get(n, 0.0)) for n in first], [own[n] for n in first])
            if as_shares
            else 1.0
        )
        given = {n: w * scale for n, w in new.items()} | {
            n: w for n, w in given.items() if n not in coming
        }
    weights = by_source(given, names)
    return [0.0 if name in coming else w for name, w in zip(names, weights, strict=True)]


def _scale(given: Sequence[Any], own: Sequence[float]) -> float:
    """Return the factor from the sources' own weights to those of a schedule; 1 if unknown.

    Invalid weights are ignored here; ``by_source`` raises for them.
    """
    scheduled = sum(w for w in given if isinstance(w, float) and 0 < w < math.inf)
    return scheduled / total if scheduled and (total := sum(own)) > 0 else 1.0
