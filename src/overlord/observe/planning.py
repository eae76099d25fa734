"""The plan of one step without running the job up to it: earlier steps are drawn and skipped, nothing is built for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from overlord.errors import JobError, PlanError
from overlord.observe.explain import SampleExplanation, explain_sample, find
from overlord.placetree import AXES, ClientPlaceTree

if TYPE_CHECKING:
    from overlord.job import Job
    from overlord.messages import Stage
    from overlord.plan import LoadingPlan
    from overlord.runtime.session import Session
    from overlord.sample import SampleId


def parse_place(text: str, base: ClientPlaceTree) -> ClientPlaceTree:
    """``dp=64`` or ``dp=8,cp=2`` over the job's place."""
    degrees: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, degree = part.partition("=")
        if axis not in AXES or not degree.isdigit():
            raise JobError([f"wanted axis=number with one of {', '.join(AXES)}, as in dp=64 or dp=8,tp=2, found {part!r}"], "--place")
        degrees[axis] = int(degree)
    return base.replace(**degrees)


@contextmanager
def planned(job: Job, step: int, progress: Callable[[int], None] | None = None) -> Iterator[Session]:
    """A session that has planned a step as a run of the job would. ``progress`` is told how many steps are planned."""
    import overlord as ov

    with ov.launch(job, prefetch=1) as session:
        if step:
            session.skip(range(step))
        taking = _Taking(session)
        while taking.waits():
            if progress:
                progress(min(step + 1, int(session.metrics()["planned_steps"])))
        if taking.ended:
            raise PlanError(f"the job has no such step: it ends after {session.metrics()['planned_steps']} steps", step)
        yield session


def plan_step(job: Job, step: int, progress: Callable[[int], None] | None = None) -> LoadingPlan:
    """The plan of a step as a run of the job would make it."""
    with planned(job, step, progress) as session:
        return session.plan(step)


def find_sample(job: Job, sample: SampleId, within: int, progress: Callable[[int], None] | None = None) -> SampleExplanation:
    """Where a run of the job puts a sample, looked for in its first steps. It ends as soon as the stream has passed the row."""
    import overlord as ov

    with ov.launch(job, prefetch=1) as session:
        explain_sample(sample, session._known())  # an id that no step can hold is refused before anything is read
        found: list[Stage] = []
        session._host.on_stage.append(lambda stage: found.append(stage) if find(sample, stage.plan) >= 0 else None)
        session.skip(range(within))
        taking, over = _Taking(session), False
        while True:
            known = session._pump.ask(session._known, "the planner")  # before looking at what was found: it was found before this
            if progress:
                progress(min(within, known.state.step))
            # All steps were watched, so none counts as forgotten; that they are not delivered is our doing and not the job's.
            answer = explain_sample(sample, replace(known, stages=[replace(s, skipped=False) for s in found]))
            if over or answer.status not in ("ahead", "undecided"):
                return answer
            over = not taking.waits()


class _Taking:
    """Rank 0 takes its next step in a thread, so that Ctrl-C is heard meanwhile."""

    def __init__(self, session: Session):
        client = session.client(0)
        self.ended = False
        self._fault: BaseException | None = None

        def take() -> None:
            try:
                next(client)
            except StopIteration:
                self.ended = True
            except BaseException as fault:
                self._fault = fault

        self._thread = threading.Thread(target=take, name="overlord-plan", daemon=True)
        self._thread.start()

    def waits(self) -> bool:
        """Waits a moment; whether it must be waited for longer. Raises what the job raised."""
        self._thread.join(0.1)
        if self._thread.is_alive():
            return True
        if self._fault is not None:
            raise self._fault
        return False
