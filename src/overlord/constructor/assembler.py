"""The Data Constructor core of one bucket: which steps can be built, who gets them, when they may
go. Pure.

A step is built once for all ranks of the bucket, delivered in step order, and let go when every
rank has taken it. Only a few steps are built ahead of the fastest rank: built wide, a step is ten
times what its payload is.

Everything may be said twice: after a fault the planner goes back and plans steps again that are
here already. Such a step stays what it is, and one that misses its payload waits for it in its
place, so that none behind it overtakes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlord.messages.constructor import (
    Build,
    Built,
    Deliver,
    EndRank,
    PayloadReady,
    Release,
    Unfinish,
)
from overlord.messages.control import Attach, Consumed, Detach, EndOfJob, PlannedStep, Rollback

Command = Build | Deliver | Release | EndRank | Unfinish

PLANNED, STAGED, BUILDING, BUILT, FAILED = "planned", "staged", "building", "built", "failed"
BUILD_AHEAD = 2
WAITS_FOR = {
    PLANNED: "its payload",
    STAGED: "an earlier one to be taken",
    BUILDING: "its microbatches to be built",
    FAILED: "the end of the job: it could not be built",
}


class Assembler:
    """``handle(event) -> commands``."""

    def __init__(self, bucket: int, ranks: Sequence[int], build_ahead: int = BUILD_AHEAD):
        self.bucket, self.ranks, self._ahead = bucket, tuple(ranks), build_ahead
        self._wanted: dict[int, int] = {}  # attached rank -> last step it took
        self._delivered: dict[int, int] = {}  # attached rank -> last step sent to it
        self._steps: dict[int, str] = {}  # step -> status, in step order
        self._finish: EndOfJob | None = None
        self._ended: set[int] = set()  # ranks that were told

    def handle(self, event: Any, now: float = 0.0) -> list[Command]:
        match event:
            case PlannedStep(plan=plan, skipped=skipped):
                if not skipped and not self._is_over(plan.step):
                    self._plan(plan.step)
            case PayloadReady(step=step):
                return self._staged(step)
            case Built(step=step):
                return self._built(step)
            case Attach(rank=rank) if rank in self.ranks:
                # The window opens at the first step nobody of the bucket has taken: steps before it
                # are gone.
                first = min(self._steps, default=0) - 1
                self._wanted.setdefault(rank, first)
                self._delivered.setdefault(rank, first)
                return self._deliver()
            case Detach(rank=rank) if rank in self.ranks:
                self._wanted.pop(rank, None)
                self._delivered.pop(rank, None)
                self._ended.discard(rank)
                return [*self._release(), *self._build()]
            case Consumed(rank=rank, step=step) if rank in self._wanted:
                self._wanted[rank] = max(step, self._wanted[rank])
                self._delivered[rank] = max(
                    step, self._delivered[rank]
                )  # one of another process may have handed it out
                return [*self._release(), *self._build(), *self._deliver()]
            case EndOfJob():
                return self._finished(event)
            case Rollback(step=step):
                return self._back(step)
            case Attach() | Detach() | Consumed():
                pass
            case _:
                raise TypeError(f"an assembler does not know {type(event).__name__}")
        return []

    def _plan(self, step: int) -> None:
        if self._wanted and step <= min(self._wanted.values()):
            return  # it was handed out by a process of before
        known = self._steps.setdefault(step, PLANNED)
        if known == FAILED:
            self._steps[step] = PLANNED
        elif step != next(reversed(self._steps)):  # it comes again, and those behind it are here
            self._steps = dict(sorted(self._steps.items()))

    def _staged(self, step: int) -> list[Command]:
        status = self._steps.get(step)
        if status in (STAGED, BUILDING, BUILT):
            return []
        if (
            status is None
            or not self._wanted
            or self._is_over(step)
            or step <= min(self._wanted.values())
        ):
            self._forget(step)
            return [Release(step, self.bucket), *self._deliver()]
        self._steps[step] = STAGED
        return self._build()

    def _built(self, step: int) -> list[Command]:
        if (
            step not in self._steps or not self._wanted or self._is_over(step)
        ):  # it is over, or everyone detached, while it was being built
            self._forget(step)
            return [Release(step, self.bucket), *self._deliver()]
        self._steps[step] = BUILT
        return [*self._deliver(), *self._release()]

    def _forget(self, step: int) -> None:
        """What is here of it goes. Behind the end of the job its place stays: the end may be
        undone, and none may overtake it then.
        """
        if self._is_over(step) and step in self._steps:
            self._steps[step] = PLANNED
        else:
            self._steps.pop(step, None)

    def _finished(self, finish: EndOfJob) -> list[Command]:
        if not self._is_over(finish.step):
            self._finish = finish
        # A step that could not be built ends the job before it, though some behind it were planned
        # already.
        over = [
            s for s, status in self._steps.items() if self._is_over(s) and status in (STAGED, BUILT)
        ]
        for step in over:
            self._forget(step)
        return [*(Release(s, self.bucket) for s in over), *self._deliver()]

    def _back(self, step: int) -> list[Command]:
        """All behind a step is planned again. What is here stays; an end behind it was that of a
        fault, or is found again.
        """
        for s, status in self._steps.items():
            if status == FAILED:
                self._steps[s] = PLANNED
        if self._finish is None or self._finish.step <= step:
            return []
        self._finish, ended = None, sorted(self._ended)
        self._ended.clear()
        return [Unfinish(rank) for rank in ended]

    def wants(self, step: int) -> bool:
        """Whether payload of this step is missing here."""
        return self._steps.get(step, PLANNED) in (PLANNED, FAILED)

    def failed(self, step: int) -> None:
        """It could not be built: it and those behind it are delivered to nobody, unless it is
        planned again.
        """
        if self._steps.get(step) == BUILDING:
            self._steps[step] = FAILED

    def _build(self) -> list[Command]:
        """Those of the next steps whose payload is here: a few beyond what the fastest rank has
        taken, so that a slow one holds back nobody. Payload may come out of order; which steps are
        next does not depend on it.
        """
        if not self._wanted:
            return []
        taken, commands = max(self._wanted.values()), list[Command]()
        place = 0  # of the step among those that the fastest rank has not taken
        for step, status in self._steps.items():
            if status == STAGED and place < self._ahead:
                self._steps[step] = BUILDING
                commands.append(Build(step, self.bucket))
            place += step > taken
        return commands

    def come_along(self, step: int) -> bool:
        """Another bucket's step is built now: whether this one's is with it, though its own ranks
        are not so near yet.
        """
        if self._wanted and self._steps.get(step) == STAGED:
            self._steps[step] = BUILDING
            return True
        return False

    def _is_over(self, step: int) -> bool:
        return self._finish is not None and step >= self._finish.step

    def _deliver(self) -> list[Command]:
        """Send built steps in order; a step that is still being built holds back those behind
        it.
        """
        commands: list[Command] = []
        steps = [(step, status) for step, status in self._steps.items() if not self._is_over(step)]
        for step, status in steps:
            if status != BUILT:
                break
            for rank, last in self._delivered.items():
                if last < step:
                    self._delivered[rank] = step
                    commands.append(Deliver(step, rank))
        if self._finish is not None and all(status == BUILT for _, status in steps):
            commands += [
                EndRank(rank, self._finish.error)
                for rank in self._delivered
                if rank not in self._ended
            ]
            self._ended.update(self._delivered)
        return commands

    def _release(self) -> list[Command]:
        """What is being built goes when it is. Of a step that was never built here, nothing may be
        here yet.
        """
        if self._wanted:
            taken = min(self._wanted.values())
            gone = {
                s: status for s, status in self._steps.items() if s <= taken and status != BUILDING
            }
        else:  # nobody is left
            gone = {s: status for s, status in self._steps.items() if status in (STAGED, BUILT)}
        for step in gone:
            del self._steps[step]
        return [
            Release(step, self.bucket) for step, status in gone.items() if status in (STAGED, BUILT)
        ]

    def waiting(self) -> str:
        """What the next undelivered step waits for, in words; empty when no step is planned."""
        for step, status in self._steps.items():
            if status != BUILT and not self._is_over(step):
                return f"step {step}: {WAITS_FOR[status]}"
        return ""

    def check(self) -> None:
        steps = list(self._steps)
        assert steps == sorted(steps), steps
