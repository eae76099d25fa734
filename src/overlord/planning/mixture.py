"""The weights in force at each step, from the schedule, trainers' reports and user's changes.

The schedule is called once for every planned step, in step order, whether or not its weights are
used. Its learning must not depend on ``set_mixture`` or ``mix_every``, nor on how often a blocked
draw is repeated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlord.errors import JobError, PlanError
from overlord.messages.control import AddSource, Report, StreamState
from overlord.planning.events import Event, joined, latest, skipped
from overlord.planning.feedback import Feedback
from overlord.planning.schedule import Weights, as_float, by_source
from overlord.planning.schedule.base import follows_from_step, has_state

Schedule = Callable[[int, Mapping[str, float]], Weights]


class Mixture:
    """Weights for one step after another. It owns its schedule: no other code may call it."""

    def __init__(
        self,
        schedule: Schedule | Mapping[str, float],
        *,
        every: str,
        lag: int,
        takes_feedback: bool,
        state: StreamState,
        floor: int = 0,
    ):
        self._schedule, self._every = schedule, every
        self._fixed = isinstance(schedule, Mapping)
        self._stateful = not self._fixed and has_state(schedule)
        if self._stateful and state.schedule is not None:
            schedule.load_state_dict(state.schedule)  # type: ignore[union-attr]
        self._lag = lag if takes_feedback else 0
        # the last step with a call of the schedule, and the first step without one
        self._called, self._floor = (state.step - 1, floor)
        self._scheduled: Weights = ()
        # cache of weights from fixed numbers, which seldom change
        self._known: tuple[Any, tuple[str, ...], list[float]] | None = None
        self.feedback = Feedback(lag, takes_feedback, state.reports, floor)
        self.weights: list[float] = list(state.weights)

    @property
    def lag(self) -> int:
        """Number of steps that feedback looks back; 0 if there is none."""
        return self._lag

    def report(self, report: Report) -> None:
        self.feedback.add(report, max(self._called, self._floor - 1))

    def in_time(self, report: Report) -> bool:
        return self.feedback.in_time(report, max(self._called, self._floor - 1))

    def at(self, state: StreamState, own: Mapping[str, float]) -> StreamState:
        """Update the weights for the state's step.

        ``own``: every source's own weight, in source order.
        """
        self._call_schedule(state)
        if self._every != "epoch":
            self.weights = self._weigh(state, own)
            return replace(state, mix_step=state.step)
        joins = any(e.at == state.step for e in joined(state.events))
        epoch = self._lowest_epoch(state)
        # a blocked draw is repeated: its epoch was checked already
        again = state.mix_step == state.step
        if self.weights and not again and not joins and epoch <= state.mix_epoch:
            return state
        self.weights = self._weigh(state, own)
        if joins:  # a source that joins starts with its own first epoch
            epoch = self._lowest_epoch(state)
        return replace(
            state, mix_step=state.step, mix_epoch=state.mix_epoch if again and not joins else epoch
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
        change = latest(state.events, -1, state.step)
        given = change[0].weights if change else self._scheduled
        here = tuple(e.name for e in joined(state.events) if e.at <= state.step)
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
                joined(state.events),
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
        """Return the weights of a later step if its number and the events determine them, or None.

        A user's schedule is called once for every step, in order, so it is not called in advance.
        """
        change = latest(state.events, -1, step)
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
                given, own, joined(state.events), step, as_shares=not change and not self._fixed
            )
        except JobError:  # the error is raised when the step is planned
            return None

    def _lowest_epoch(self, state: StreamState) -> int:
        """Return the lowest epoch of active sources with a weight.

        An inactive source would keep it low for ever.
        """
        rows = zip(state.cursors[:, 0].tolist(), self.weights, state.active, strict=False)
        return min((epoch for epoch, weight, active in rows if weight and active), default=0)

    def grow(self, n: int) -> None:
        """Add entries for sources that join: they have no weight until the next step."""
        self.weights = [*self.weights, *(0.0,) * (n - len(self.weights))] if self.weights else []

    def saved(self) -> dict[str, Any]:
        """Return the fields of a StreamState that the mixture determines, after a planned step."""
        weights = tuple(self.weights) if self._every == "epoch" else ()
        return {"weights": weights, "schedule": self._learned(), "reports": self.feedback.pending()}

    def _learned(self) -> dict[str, Any] | None:
        """Return the schedule's state in its JSON form.

        It is then the same whether the state was saved meanwhile or not.
        """
        if not self._stateful:
            return None
        state = self._schedule.state_dict()  # type: ignore[union-attr]
        try:
            made: dict[str, Any] = json.loads(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError) as e:
            what = f"the schedule's state_dict() is not plain JSON: {e}"
            raise PlanError(
                what, self._called, "it must hold numbers, text, lists and dicts"
            ) from None
        return made or None


def weights_of_all(
    given: Weights,
    own: Mapping[str, float],
    added: Sequence[AddSource],
    step: int,
    as_shares: bool = False,
) -> list[float]:
    """Return one weight for every source, including those added in mid-run.

    An added source has weight 0 before its step. From then on it has the weight of the mixture, or
    its own weight if the mixture does not name it. ``as_shares``: the scale of a schedule's numbers
    may change from step to step. So the source gets its share among the sources' own weights.
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
    """Return the factor from the sources' own weights to a schedule's.

    Invalid weights are reported by the check that follows.
    """
    scheduled = sum(w for w in given if isinstance(w, float) and 0 < w < math.inf)
    return scheduled / total if scheduled and (total := sum(own)) > 0 else 1.0


def nothing_to_draw(weights: Mapping[str, float], events: Sequence[Event], step: int) -> list[str]:
    """Return the sources of a mixture, if all of them join after its step; else an empty list."""
    coming = {e.name for e in joined(events) if e.at > step}
    weighed = [name for name, weight in weights.items() if weight]
    return weighed if all(name in coming for name in weighed) else []
