"""The Data Constructor core of one bucket: which steps can be built, who gets them, when they may go. Pure.

A step is built once for all ranks of the bucket, delivered in step order, and let go when every rank has taken it. Only a few
steps are built ahead of the fastest rank: built wide, a step is ten times what its payload is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlord.messages import Attach, Build, Built, Consumed, Deliver, Detach, End, Finish, Release, Stage, Staged

Command = Build | Deliver | Release | End

PLANNED, STAGED, BUILDING, BUILT = "planned", "staged", "building", "built"
BUILD_AHEAD = 2
WAITS_FOR = {PLANNED: "its payload", STAGED: "an earlier one to be taken", BUILDING: "its microbatches to be built"}


class Assembler:
    """``handle(event) -> commands``."""

    def __init__(self, bucket: int, ranks: Sequence[int], build_ahead: int = BUILD_AHEAD):
        self.bucket, self.ranks, self._ahead = bucket, tuple(ranks), build_ahead
        self._wanted: dict[int, int] = {}  # attached rank -> last step it took
        self._delivered: dict[int, int] = {}  # attached rank -> last step sent to it
        self._steps: dict[int, str] = {}  # step -> status, in step order
        self._finish: Finish | None = None
        self._ended: set[int] = set()  # ranks that were told

    def handle(self, event: Any, now: float = 0.0) -> list[Command]:
        match event:
            case Stage(plan=plan, skipped=skipped):
                if not skipped and not self._is_over(plan.step):
                    self._steps[plan.step] = PLANNED
            case Staged(step=step):
                if step in self._steps and self._wanted:
                    self._steps[step] = STAGED
                    return self._build()
                self._steps.pop(step, None)
                return [Release(step, self.bucket), *self._deliver()]
            case Built(step=step):
                if step not in self._steps or not self._wanted:  # it is over, or everyone detached, while it was being built
                    self._steps.pop(step, None)
                    return [Release(step, self.bucket), *self._deliver()]
                self._steps[step] = BUILT
                return self._deliver()
            case Attach(rank=rank) if rank in self.ranks:
                # The window opens at the first step nobody of the bucket has taken: steps before it are gone.
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
                return [*self._release(), *self._build()]
            case Finish(step=step):
                if not self._is_over(step):
                    self._finish = event
                # A step that could not be built ends the job before it, though some behind it were planned already.
                over = {s: status for s, status in self._steps.items() if self._is_over(s)}
                for s in over:
                    del self._steps[s]
                return [*(Release(s, self.bucket) for s, status in over.items() if status in (STAGED, BUILT)), *self._deliver()]
            case Attach() | Detach() | Consumed():
                pass
            case _:
                raise TypeError(f"an assembler does not know {type(event).__name__}")
        return []

    def _build(self) -> list[Command]:
        """Those of the next steps whose payload is here: a few beyond what the fastest rank has taken, so that a slow one holds back
        nobody. Payload may come out of order; which steps are next does not depend on it."""
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
        """Another bucket's step is built now: whether this one's is with it, though its own ranks are not so near yet."""
        if self._wanted and self._steps.get(step) == STAGED:
            self._steps[step] = BUILDING
            return True
        return False

    def _is_over(self, step: int) -> bool:
        return self._finish is not None and step >= self._finish.step

    def _deliver(self) -> list[Command]:
        """Send built steps in order; a step that is still being built holds back those behind it."""
        commands: list[Command] = []
        for step, status in self._steps.items():
            if status != BUILT:
                break
            for rank, last in self._delivered.items():
                if last < step:
                    self._delivered[rank] = step
                    commands.append(Deliver(step, rank))
        if self._finish is not None and all(status == BUILT for status in self._steps.values()):
            commands += [End(rank, self._finish.error) for rank in self._delivered if rank not in self._ended]
            self._ended.update(self._delivered)
        return commands

    def _release(self) -> list[Command]:
        taken = min(self._wanted.values()) if self._wanted else None
        if taken is None:  # nobody is left: what is being built goes when it is
            gone = [s for s, status in self._steps.items() if status in (STAGED, BUILT)]
        else:
            gone = [s for s, status in self._steps.items() if status == BUILT and s <= taken]
        for step in gone:
            del self._steps[step]
        return [Release(step, self.bucket) for step in gone]

    def waiting(self) -> str:
        """What the next undelivered step waits for, in words; empty when no step is planned."""
        for step, status in self._steps.items():
            if status != BUILT:
                return f"step {step}: {WAITS_FOR[status]}"
        return ""

    def check(self) -> None:
        steps = list(self._steps)
        assert steps == sorted(steps), steps
