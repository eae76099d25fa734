"""The plans of the last steps, for status queries. Pure."""

from __future__ import annotations

from collections import deque

from overlord.messages.control import PlannedStep

KEPT_PLANS = 256
KEPT_SAMPLES = 2**21  # of the kept plans: about 100 bytes each, and a step may have 262,144


class RecentPlans(deque[PlannedStep]):
    """The last plans, for status queries: at most KEPT_PLANS, and KEPT_SAMPLES in all."""

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
