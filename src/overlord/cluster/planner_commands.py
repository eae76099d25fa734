"""The execution of the planner's commands: requests to loaders, planned steps, and the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlord.cluster.placement import AttachedRanks
from overlord.errors import PlanError
from overlord.journal.write_ahead import lose_source
from overlord.messages.control import (
    Consumed,
    DropHeldSamples,
    EndOfJob,
    PlannedStep,
    Refill,
    RestartLoader,
    SourceLost,
    StreamState,
)
from overlord.messages.data import Announce, DecodeFailures
from overlord.transport.codec import encode_state

if TYPE_CHECKING:
    from overlord.cluster.coordinator import Coordinator


class PlannerCommands:
    """The execution of commands and events in the order of the command loop.

    A planned step is sent once it is in the journal and equals its first plan. Runs on: event loop.
    """

    def __init__(self, coordinator: Coordinator, ranks: AttachedRanks):
        self._coordinator, self._ranks = coordinator, ranks

    def execute(self, command: Any) -> None:
        """Execute a command, or let the planner handle an event, once the journal admits it."""
        coordinator = self._coordinator
        pool, queue, planner = coordinator.pool, coordinator.commands.queue, coordinator.planner
        match coordinator.gate.admit(command):
            case None:
                pass
            case Refill(loader=loader) as refill:
                pool.send(coordinator.placement.worker(loader), refill)
                if (standby := coordinator.placement.standby_of.get(loader)) is not None:
                    pool.send(standby, refill)
            case (Announce() | DecodeFailures()) as event:
                queue.extend(planner.handle(event))
            case Consumed() as taken:
                queue.extend(planner.handle(taken))
                self._progress()
                coordinator.rebalancer.acked()
            case PlannedStep() as stage:
                self._publish(stage)
            case EndOfJob() as finish:
                self._finish(finish)
            case DropHeldSamples(loaders=loaders) as drop:
                coordinator.router.forget(loaders)
                pool.broadcast(drop)
            case SourceLost() as lost:
                lose_source(lost, coordinator.event, coordinator.on_lost)
            case RestartLoader() as restart:
                coordinator.rebalancer.restart(restart)
            case unknown:
                raise TypeError(
                    f"coordinator: expected a known command, got {type(unknown).__name__}; "
                    "this is a bug in Overlord: report it"
                )

    def _progress(self) -> None:
        history, taken = self._coordinator.history, self._coordinator.planner.taken
        if taken is not None and history.taken(taken):
            self._coordinator.recovery.acked(history.acked)

    def _publish(self, stage: PlannedStep) -> None:
        """Send a planned step to its workers, unless the job ends before it."""
        assert isinstance(stage.after, StreamState)
        coordinator, planner = self._coordinator, self._coordinator.planner
        step, ends = stage.plan.step, planner.finished
        if (ends is not None and step >= ends.step) or (first := self._is_first(stage)) is None:
            return
        # a step that an earlier coordinator planned may not be listed here yet
        if first or not coordinator.plans.of(step):
            coordinator.plans.keep(stage)
            for watcher in coordinator.on_stage:
                watcher(stage)
        after, acked = encode_state(stage.after), coordinator.history.acked
        routed = coordinator.router.route(stage, after, self._ranks.served, acked)
        for c, plan in routed.constructor_plans.items():
            coordinator.pool.constructors[c].out.append(plan)
        for h, loader_plan in routed.loader_plans.items():
            coordinator.pool.send(h, loader_plan)
        coordinator.recovery.planned(step, planner.floor)

    def _is_first(self, stage: PlannedStep) -> bool | None:
        """Return whether a step is new; None if it differs from its first plan: the job ends."""
        coordinator = self._coordinator
        try:
            return coordinator.history.planned(stage)
        except PlanError as error:
            ends = coordinator.planner.handle(EndOfJob(stage.plan.step, error))
            coordinator.commands.queue.extend(ends)
            return None

    def _finish(self, finish: EndOfJob) -> None:
        """Send the end of the job to constructor workers, once the planner has accepted it."""
        coordinator = self._coordinator
        if coordinator.planner.finished is not finish:
            coordinator.commands.queue.extend(coordinator.planner.handle(finish))
            return
        for worker in coordinator.pool.constructors.values():
            worker.out.append(finish)
