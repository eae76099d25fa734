"""The plan of one step without running the job up to it: earlier steps are drawn and skipped, nothing is built for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from overlord.errors import JobError, PlanError
from overlord.placetree import AXES, ClientPlaceTree

if TYPE_CHECKING:
    from overlord.job import Job
    from overlord.plan import LoadingPlan


def parse_place(text: str, base: ClientPlaceTree) -> ClientPlaceTree:
    """``dp=64`` or ``dp=8,cp=2`` over the job's place."""
    degrees: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, degree = part.partition("=")
        if axis not in AXES or not degree.isdigit():
            raise JobError([f"wanted axis=number with one of {', '.join(AXES)}, as in dp=64 or dp=8,tp=2, found {part!r}"], "--place")
        degrees[axis] = int(degree)
    return base.replace(**degrees)


def plan_step(job: Job, step: int, progress: Callable[[int], None] | None = None) -> LoadingPlan:
    """The plan of a step as a run of the job would make it. ``progress`` is told how many steps are planned."""
    import overlord as ov

    with ov.launch(job, prefetch=1) as session:
        if step:
            session.skip(range(step))
        client = session.client(0)
        outcome: list[BaseException | None] = []

        def take() -> None:
            try:
                next(client)
                outcome.append(None)
            except BaseException as fault:
                outcome.append(fault)

        thread = threading.Thread(target=take, name="overlord-plan", daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            if progress:
                progress(min(step + 1, int(session.metrics()["planned_steps"])))
        if isinstance(outcome[0], StopIteration):
            raise PlanError(f"the job has no such step: its data ends after {session.metrics()['planned_steps']} steps", step)
        if outcome[0] is not None:
            raise outcome[0]
        return session.plan(step)
