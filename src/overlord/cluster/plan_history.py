"""The planned steps that not every rank has acknowledged: what a rollback needs. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlord.errors import NO_FUNCTION, PlanError
from overlord.messages.control import PlannedStep, Report, StreamState
from overlord.planning.events import Event, EventLog


class PlanHistory:
    """States and digests since the last step that all ranks acknowledged, and the events since.

    ``planned`` has digests of steps after ``start`` that an earlier coordinator planned.
    """

    def __init__(self, start: StreamState, lag: int, planned: Mapping[int, str] | None = None):
        self._states: dict[int, StreamState] = {start.step - 1: start}
        self._digests: dict[int, str] = dict(planned or {})
        self._log = EventLog(lag)
        # the next step to plan; after a rollback, later steps may be acknowledged already
        self._next = start.step
        self.acked = start.step - 1  # every rank acknowledged the steps up to here

    def planned(self, stage: PlannedStep) -> bool:
        """Note a planned step and return whether it is planned for the first time.

        A second plan that differs from the first is a PlanError.
        """
        step, assured = stage.plan.step, self._digests.get(stage.plan.step)
        if assured is not None and assured != stage.digest:
            what = (
                "after a worker was lost the step was planned again, and came out different "
                f"({stage.digest}, first {assured})"
            )
            raise PlanError(what, step, NO_FUNCTION)
        assert isinstance(stage.after, StreamState)
        if step >= self.acked:
            self._states[step] = stage.after
        self._digests[step], self._next = stage.digest, step + 1
        return assured is None

    def applied(self, event: Event) -> None:
        """Keep an event for the next rollback."""
        self._log.add(event, self.acked + 1)

    def reported(self, report: Report) -> None:
        """Keep a report that came in time for a plan."""
        self._log.report(report, self.acked + 1)

    def taken(self, step: int) -> bool:
        """Note that all ranks took the steps up to this one; return whether that is new."""
        step_acked = max((s for s in self._states if s <= step), default=self.acked)
        if step_acked <= self.acked:
            return False
        self.acked = step_acked
        self._states = {s: state for s, state in self._states.items() if s >= step_acked}
        self._digests = {
            s: digest for s, digest in self._digests.items() if s > min(step_acked, self._next - 1)
        }
        return True

    def rollback(self, names: Sequence[str]) -> StreamState:
        """Return the state after the last acknowledged step, with all events since its plan."""
        self._next = self.acked + 1
        return self._log.completed(self._states[self.acked], names, ahead=True)
