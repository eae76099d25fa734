"""State machine of the constructor of one bucket: which steps to build, deliver and release.

A step is built once for all ranks of the bucket, delivered in step order, and released when every
rank has acknowledged it. Only a few steps are built ahead of the fastest rank: an expanded step is
ten times as large as its payload.

All events are idempotent. After a rollback the planner replays steps that this bucket may already
have. Such a step keeps its state. A step without payload keeps its position, so that no later
step overtakes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlord.messages.control import Attach, Consumed, Detach, EndOfJob, PlannedStep, Rollback
from overlord.messages.data import Build, Built, Deliver, EndRank, PayloadReady, Release, Unfinish

Command = Build | Deliver | Release | EndRank | Unfinish

PLANNED, STAGED, BUILDING, BUILT, FAILED = "planned", "staged", "building", "built", "failed"
BUILD_AHEAD = 2
WAITS_FOR = {
    PLANNED: "its payload",
    STAGED: "an earlier one to be acknowledged",
    BUILDING: "its microbatches to be built",
    FAILED: "the end of the job, since it could not be built",
}


class Assembler:
    """State machine of one bucket: ``handle(event) -> commands``."""

    def __init__(self, bucket: int, ranks: Sequence[int], build_ahead: int = BUILD_AHEAD):
        self.bucket, self.ranks, self._ahead = bucket, tuple(ranks), build_ahead
        self._acked: dict[int, int] = {}  # attached rank -> last step it acknowledged
        self._delivered: dict[int, int] = {}  # attached rank -> last step sent to it
        self._steps: dict[int, str] = {}  # step -> status, in step order
        self._end: EndOfJob | None = None
        self._ended: set[int] = set()  # ranks that were notified of the end

    def handle(self, event: Any, now: float = 0.0) -> list[Command]:
        match event:
            case PlannedStep(plan=plan, skipped=skipped):
                if not skipped and not self._is_over(plan.step):
                    self._plan(plan.step)
            case PayloadReady(step=step):
                return self._payload_ready(step)
            case Built(step=step):
                return self._built(step)
            case Attach(rank=rank) if rank in self.ranks:
                # The rank starts at the first step that is still held: earlier steps were released.
                first = min(self._steps, default=0) - 1
                self._acked.setdefault(rank, first)
                self._delivered.setdefault(rank, first)
                return self._deliver()
            case Detach(rank=rank) if rank in self.ranks:
                self._acked.pop(rank, None)
                self._delivered.pop(rank, None)
                self._ended.discard(rank)
                return [*self._release(), *self._build()]
            case Consumed(rank=rank, step=step) if rank in self._acked:
                self._acked[rank] = max(step, self._acked[rank])
                # Another process may have delivered it.
                self._delivered[rank] = max(step, self._delivered[rank])
                return [*self._release(), *self._build(), *self._deliver()]
            case EndOfJob():
                return self._end_of_job(event)
            case Rollback(step=step):
                return self._rollback(step)
            case Attach() | Detach() | Consumed():
                pass
            case _:
                raise TypeError(f"expected an event of an assembler, got {type(event).__name__}")
        return []

    def _plan(self, step: int) -> None:
        if self._acked and step <= min(self._acked.values()):
            return  # a previous process delivered it
        known = self._steps.setdefault(step, PLANNED)
        if known == FAILED:
            self._steps[step] = PLANNED
        elif step != next(reversed(self._steps)):  # a replayed step, and later steps are held
            self._steps = dict(sorted(self._steps.items()))

    def _payload_ready(self, step: int) -> list[Command]:
        status = self._steps.get(step)
        if status in (STAGED, BUILDING, BUILT):
            return []
        if (
            status is None
            or not self._acked
            or self._is_over(step)
            or step <= min(self._acked.values())
        ):
            self._drop(step)
            return [Release(step, self.bucket), *self._deliver()]
        self._steps[step] = STAGED
        return self._build()

    def _built(self, step: int) -> list[Command]:
        # The job ended or every rank detached while it was being built.
        if step not in self._steps or not self._acked or self._is_over(step):
            self._drop(step)
            return [Release(step, self.bucket), *self._deliver()]
        self._steps[step] = BUILT
        return [*self._deliver(), *self._release()]

    def _drop(self, step: int) -> None:
        """Drop a step; a step at or after the end of the job is reset to planned instead.

        A rollback may withdraw the end, and then no later step may overtake this one.
        """
        if self._is_over(step) and step in self._steps:
            self._steps[step] = PLANNED
        else:
            self._steps.pop(step, None)

    def _end_of_job(self, finish: EndOfJob) -> list[Command]:
        if not self._is_over(finish.step):
            self._end = finish
        # A step that could not be built ends the job before it, although later steps may be built.
        over = [
            s for s, status in self._steps.items() if self._is_over(s) and status in (STAGED, BUILT)
        ]
        for step in over:
            self._drop(step)
        return [*(Release(s, self.bucket) for s in over), *self._deliver()]

    def _rollback(self, step: int) -> list[Command]:
        """Roll back to ``step``: later steps will be planned again, and steps held here stay.

        An end after ``step`` is withdrawn: a fault caused it, or it will be reported again.
        """
        for s, status in self._steps.items():
            if status == FAILED:
                self._steps[s] = PLANNED
        if self._end is None or self._end.step <= step:
            return []
        self._end, ended = None, sorted(self._ended)
        self._ended.clear()
        return [Unfinish(rank) for rank in ended]

    def needs_payload(self, step: int) -> bool:
        """Return whether the payload of this step is missing here."""
        return self._steps.get(step, PLANNED) in (PLANNED, FAILED)

    def mark_failed(self, step: int) -> None:
        """Mark a step that could not be built as failed.

        This step and later ones are not delivered unless the step is planned again.
        """
        if self._steps.get(step) == BUILDING:
            self._steps[step] = FAILED

    def _build(self) -> list[Command]:
        """Start to build the next steps whose payload has arrived.

        These are at most ``build_ahead`` steps after the last acknowledged step of the fastest
        rank, so that a slow rank blocks no other. Payload may arrive out of order; the selection of
        steps does not depend on that order.
        """
        if not self._acked:
            return []
        taken, commands = max(self._acked.values()), list[Command]()
        place = 0  # position of the step among those that the fastest rank has not acknowledged
        for step, status in self._steps.items():
            if status == STAGED and place < self._ahead:
                self._steps[step] = BUILDING
                commands.append(Build(step, self.bucket))
            place += step > taken
        return commands

    def join_build(self, step: int) -> bool:
        """Mark a staged step as building, for a build with other buckets; return whether it was.

        The ranks of this bucket may not need the step yet.
        """
        if self._acked and self._steps.get(step) == STAGED:
            self._steps[step] = BUILDING
            return True
        return False

    def _is_over(self, step: int) -> bool:
        return self._end is not None and step >= self._end.step

    def _deliver(self) -> list[Command]:
        """Return the deliveries of built steps, in order; an unbuilt step blocks later steps."""
        commands: list[Command] = []
        steps = [(step, status) for step, status in self._steps.items() if not self._is_over(step)]
        for step, status in steps:
            if status != BUILT:
                break
            for rank, last in self._delivered.items():
                if last < step:
                    self._delivered[rank] = step
                    commands.append(Deliver(step, rank))
        if self._end is not None and all(status == BUILT for _, status in steps):
            commands += [
                EndRank(rank, self._end.error)
                for rank in self._delivered
                if rank not in self._ended
            ]
            self._ended.update(self._delivered)
        return commands

    def _release(self) -> list[Command]:
        """Release steps that all ranks acknowledged; without a rank, all staged and built steps.

        A step that is being built is released when it is built.
        """
        if self._acked:
            taken = min(self._acked.values())
            gone = {
                s: status for s, status in self._steps.items() if s <= taken and status != BUILDING
            }
        else:  # no rank is attached
            gone = {s: status for s, status in self._steps.items() if status in (STAGED, BUILT)}
        for step in gone:
            del self._steps[step]
        return [
            Release(step, self.bucket) for step, status in gone.items() if status in (STAGED, BUILT)
        ]

    def waiting(self) -> str:
        """Describe the wait of the first step that is not built; empty if there is none."""
        for step, status in self._steps.items():
            if status != BUILT and not self._is_over(step):
                return f"step {step}: {WAITS_FOR[status]}"
        return ""

    def check(self) -> None:
        steps = list(self._steps)
        assert steps == sorted(steps), steps
