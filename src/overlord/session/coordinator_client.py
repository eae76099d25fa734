"""The planner of a job in several processes, as its session reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from overlord.cluster.coordinator_actor import Counted
from overlord.cluster.launcher import Launcher
from overlord.errors import ActorLost
from overlord.messages.control import EncodedState, EndOfJob, PlannedStep, StreamState
from overlord.planning.spec import Quarantined
from overlord.sample import Buffer


class RemotePlans:
    """The recent plans of the coordinator, fetched on demand."""

    def __init__(self, launcher: Launcher):
        self._launcher = launcher

    def of(self, step: int) -> list[PlannedStep]:
        """Return the kept plans of one step, without fetching all plans, which may be large."""
        stages: list[PlannedStep] = self._launcher.ask("stages", step)
        return stages

    def steps(self) -> list[int]:
        steps: list[int] = self._launcher.ask("steps")
        return steps

    def __iter__(self) -> Iterator[PlannedStep]:
        stages: list[PlannedStep] = self._launcher.ask("stages")
        return iter(stages)


class SourceNames(NamedTuple):
    """The fields of the planner's spec that a session reads."""

    names: tuple[str, ...]


class StepNumber(NamedTuple):
    """The fields of a plan that the server of a session reads."""

    step: int


class CoordinatorClient:
    """The part of a remote planner's interface that a session uses.

    Only the end of the job and the quarantined rows are stored in this process.
    """

    def __init__(self, launcher: Launcher):
        self._launcher = launcher
        self.finished: EndOfJob | None = None
        self.listed: dict[Quarantined, None] = {}
        self.spoiled: dict[Quarantined, None] = {}

    @property
    def spec(self) -> SourceNames:
        return SourceNames(tuple(self._launcher.prepared.job.names))

    @property
    def ledger(self) -> CoordinatorClient:
        """This object, since it has the method ``bad_rows`` of a ledger."""
        return self

    def bad_rows(self) -> list[Quarantined]:
        """Return the bad rows that this coordinator and earlier ones have listed.

        If no coordinator runs any more, return those that were recorded here.
        """
        try:
            rows: list[Quarantined] = self._launcher.ask("bad_rows")
        except ActorLost:  # the coordinator is not restarted
            rows = []
        now = set(rows)
        before = [row for row in self.listed if row not in now]
        return [*before, *rows] + [row for row in self.spoiled if row not in now]

    @property
    def open_step(self) -> int:
        return int(self._launcher.ask("open_step"))

    @property
    def next_step(self) -> int:
        return self.state().step

    def state(self) -> StreamState:
        state: StreamState = self._launcher.ask("state")
        return state

    def refuse_planned(self, step: int) -> None:
        self._launcher.ask("refuse_planned", step)

    def summary_buffer(self) -> Buffer:
        buffer: Buffer = self._launcher.ask("summary_buffer")
        return buffer

    def counted(self) -> Counted:
        counted: Counted = self._launcher.ask("counted")
        return counted


@dataclass(frozen=True, slots=True)
class PlannedSummary:
    """The fields of a planned step that the server of a session uses."""

    plan: StepNumber
    after: StreamState | EncodedState
    skipped: bool
