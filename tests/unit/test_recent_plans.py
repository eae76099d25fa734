"""The plans that are kept for status queries: bounded by steps and by samples."""

from __future__ import annotations

import pytest

from overlord.messages.control import PlannedStep
from overlord.planning import spec
from overlord.planning.spec import RecentPlans


class Plan:
    """A plan of so many samples."""

    def __init__(self, step: int, n: int):
        self.step, self._n = step, n

    def __len__(self) -> int:
        return self._n


def kept(*sizes: int) -> list[int]:
    """The steps that are kept after steps of these sizes."""
    plans = RecentPlans()
    for step, n in enumerate(sizes):
        plans.keep(
            PlannedStep(plan=Plan(step, n), pops=None, doc=None, digest="", after=None)  # type: ignore[arg-type]
        )
    return plans.steps()


def test_large_steps_before_a_small_one_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "KEPT_SAMPLES", 20)
    assert kept(8, 8, 8, 1, 1, 1) == [1, 2, 3, 4, 5], "19 samples"
    assert kept(8, 8, 8, 1, 1, 1, 2) == [2, 3, 4, 5, 6], "13 samples, and 21 with step 1"


def test_small_steps_before_a_large_one_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "KEPT_SAMPLES", 20)
    assert kept(1, 1, 1, 15) == [0, 1, 2, 3]
    assert kept(1, 1, 1, 30) == [3], "the last one stays, whatever its size"


def test_steps_that_leave_by_their_number_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "KEPT_SAMPLES", 20)
    assert len(kept(*[0] * 1000)) == spec.KEPT_PLANS
    monkeypatch.setattr(spec, "KEPT_SAMPLES", 10**9)
    assert kept(*[5] * 1000) == list(range(1000 - spec.KEPT_PLANS, 1000))
    monkeypatch.setattr(spec, "KEPT_SAMPLES", spec.KEPT_PLANS)
    assert len(kept(*[1] * 1000)) == spec.KEPT_PLANS
