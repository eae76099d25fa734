"""Check that a step has the number of microbatches that a trainer counts."""

from __future__ import annotations

from typing import Any

from overlord.errors import PlanError


def check_count(step: Any, expected: int | None) -> None:
    """Raise ``PlanError`` if a step does not have ``expected`` microbatches; None: do not check.

    Trainers with a fixed number of accumulation steps need this check.
    """
    if expected is None or len(step) == expected:
        return
    grown = (
        f"set Batch(microbatches={len(step)}) or more, fewer samples or tokens, or a larger context"
        if len(step) > expected
        else ""
    )
    raise PlanError(
        f"expected the {expected} microbatches of Batch.microbatches, got {len(step)}: a trainer "
        "with a fixed accumulation count would mix this step with others",
        step.step,
        f"{grown or 'use a strategy that fills Batch.microbatches'}, or iterate over whole steps",
    )
