"""What a planner has planned and not every rank has taken: enough to go back behind any of it.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from overlord.errors import NO_FUNCTION, PlanError
from overlord.messages.control import PlannedStep, Report, StreamState
from overlord.planning.events import Event, EventLog

if TYPE_CHECKING:
    pass


class PlanHistory:
    """States behind steps from the last one that all ranks took on, digests of the plans behind it,
    and what was said since.

    ``planned``: digests of steps behind the state that others planned before.
    """

    def __init__(self, start: StreamState, lag: int, planned: Mapping[int, str] | None = None):
        self._states: dict[int, StreamState] = {start.step - 1: start}
        self._digests: dict[int, str] = dict(planned or {})
        self._log = EventLog(lag)
        self._next = (
            start.step
        )  # to be planned; steps behind it may be taken already, where they are planned again
        self.acked = start.step - 1  # every rank took the steps up to here

    def staged(self, stage: PlannedStep) -> bool:
        """A step is planned; whether for the first time. One that comes out different the second
        time is a PlanError.
        """
        step, assured = stage.plan.step, self._digests.get(stage.plan.step)
        if assured is not None and assured != stage.digest:
            what = (
                "after a part was lost the step was planned again, and came out different "
                f"({stage.digest}, first {assured})"
            )
            raise PlanError(what, step, NO_FUNCTION)
        assert isinstance(stage.after, StreamState)
        if step >= self.acked:
            self._states[step] = stage.after
        self._digests[step], self._next = stage.digest, step + 1
        return assured is None

    def said(self, event: Event) -> None:
        self._log.add(event, self.acked + 1)

    def reported(self, report: Report) -> None:
        """One that came in time."""
        self._log.report(report, self.acked + 1)

    def took(self, step: int) -> bool:
        """All ranks have taken the steps up to this one; whether that is news."""
        behind = max((s for s in self._states if s <= step), default=self.acked)
        if behind <= self.acked:
            return False
        self.acked = behind
        self._states = {s: state for s, state in self._states.items() if s >= behind}
        self._digests = {
            s: digest for s, digest in self._digests.items() if s > min(behind, self._next - 1)
        }
        return True

    def rollback(self, names: Sequence[str]) -> StreamState:
        """The state behind the last step that all took, with what was said since it was planned:
        from there all is planned again.
        """
        self._next = self.acked + 1
        return self._log.completed(self._states[self.acked], names, ahead=True)


KEPT_PLANS = 256


KEPT_SAMPLES = (
    2**21
)  # of the plans kept for people: about 100 bytes each, and a step may have 262,144


class RecentPlans(deque[PlannedStep]):
    """The last plans, for people who ask: so many, and so many samples."""

    def __init__(self) -> None:
        super().__init__(maxlen=KEPT_PLANS)

    def of(self, step: int) -> list[PlannedStep]:
        return [stage for stage in self if stage.plan.step == step]

    def steps(self) -> list[int]:
        return [stage.plan.step for stage in self]

    def keep(self, stage: PlannedStep) -> None:
        self.append(stage)
        while len(self) > 1 and len(self) * len(stage.plan) > KEPT_SAMPLES:
            self.popleft()
