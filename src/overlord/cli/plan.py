"""The plan of one step without running the job up to it: earlier steps are drawn and skipped,
nothing is built for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from overlord.cli.job_position import JobPosition, RecordedSteps
from overlord.errors import JobError, PlanError, StateMismatch
from overlord.mesh import AXES, ClientPlaceTree
from overlord.observe.explain import SampleExplanation, explain_sample, find
from overlord.planning.events import skipped
from overlord.session.inspection import current_knowledge

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.messages.control import PlannedStep
    from overlord.plan.plan import LoadingPlan
    from overlord.sample import SampleId
    from overlord.session.session import Session


Say = Callable[[str], None]
QUIET: dict[str, Any] = {
    "prefetch": 1,
    "partition": "off",
    "watch_s": 0.0,
}  # nothing is measured, so nothing is kept
MANY = 4  # differences that are named


def silent(words: str) -> None:
    """Drop what is said."""


def parse_place(text: str, base: ClientPlaceTree) -> ClientPlaceTree:
    """``dp=64`` or ``dp=8,cp=2`` over the job's place."""
    degrees: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, degree = part.partition("=")
        if axis not in AXES or not degree.isdigit():
            raise JobError(
                [
                    f"expected axis=number with one of {', '.join(AXES)}, as in dp=64 or "
                    f"dp=8,tp=2, got {part!r}"
                ],
                "--place",
            )
        degrees[axis] = int(degree)
    return base.replace(**degrees)


@contextmanager
def planned(
    job: Job,
    step: int,
    progress: Callable[[int], None] | None = None,
    *,
    what_if: bool = False,
    say: Say = silent,
) -> Iterator[Session]:
    """Yield a session that has planned a step as a run of the job plans it. ``progress`` receives
    the number of planned steps.

    With a journal, planning begins at the state that the journal has before the step. Nothing is
    written and nothing is locked. ``what_if``: the job has another place or strategy than its run.
    ``say`` receives what a reader must know about the answer.
    """
    begin = RecordedSteps.of(job).at(step)
    with _looking(job, begin, say, allow=("strategy",) if what_if else ()) as (session, first):
        if step > first:
            session.skip(range(first, step))
        taking = _Taking(session)
        while taking.waits():
            if progress:
                progress(min(step + 1, int(session.metrics()["planned_steps"])))
        if taking.ended and (ends := int(session.metrics()["planned_steps"])) <= step:
            raise PlanError(f"the job has no such step: it ends after {ends} steps", step)
        if not what_if and first == begin.first:
            _compare(session, step, begin, say)
        yield session


def plan_step(job: Job, step: int, progress: Callable[[int], None] | None = None) -> LoadingPlan:
    """The plan of a step as a run of the job would make it."""
    with planned(job, step, progress) as session:
        return session.plan(step)


def find_sample(
    job: Job,
    sample: SampleId,
    within: int,
    progress: Callable[[int], None] | None = None,
    *,
    say: Say = silent,
) -> SampleExplanation:
    """Where a run of the job puts a sample, looked for in the first steps. It ends as soon as the
    stream has passed the row.

    With a journal the search begins at its oldest state. A row that the stream had passed by then
    is looked for from the job file alone.
    """
    past = RecordedSteps.of(job)
    answer = _found(job, sample, within, progress, past.oldest_state(), say)
    if answer.status != "gone":
        return answer
    say(
        f"journal {past.shown}: expected the step of {sample}, got steps from "
        f"{past.oldest} on; the answer follows from the job file alone"
    )
    return _found(job, sample, within, progress, JobPosition(), say)


def _found(
    job: Job,
    sample: SampleId,
    within: int,
    progress: Callable[[int], None] | None,
    begin: JobPosition,
    say: Say,
) -> SampleExplanation:
    with _looking(job, begin, say) as (session, first):
        explain_sample(
            sample, current_knowledge(session.internals)
        )  # an id that no step can hold is refused before anything is read
        found: list[PlannedStep] = []
        session.internals.runtime.on_stage.append(
            lambda stage: found.append(stage) if find(sample, stage.plan) >= 0 else None
        )
        session.skip(range(first, first + within))
        taking, over = _Taking(session), False
        while True:
            # before ``found`` is read: all steps of this snapshot are in it
            known = current_knowledge(session.internals)
            if progress:
                progress(min(within, known.state.step - first))
            # All steps were watched, so none counts as forgotten; of those that are not delivered,
            # the job skips its own alone.
            watched = [
                replace(s, skipped=skipped(begin.skipped, s.plan.step, s.plan.step + 1))
                for s in found
            ]
            answer = explain_sample(sample, replace(known, stages=watched))
            if over or answer.status not in ("ahead", "undecided"):
                return answer
            over = not taking.waits()


@contextmanager
def _looking(
    job: Job, begin: JobPosition, say: Say, allow: tuple[str, ...] = ()
) -> Iterator[tuple[Session, int]]:
    """Yield a session without a journal or a profile, and the step at which it begins."""
    import overlord as ov

    quiet, first = replace(job, journal=None), begin.first
    try:
        session = ov.launch(quiet, resume=begin.state, allow=allow, **QUIET)
    except StateMismatch as fault:
        parts = ", ".join(sorted(fault.differences)[:MANY]) + (
            f" and {n} more" if (n := len(fault.differences) - MANY) > 0 else ""
        )
        say(
            f"journal: expected this job's, got one that differs in {parts}; the answer "
            "follows from the job file alone"
        )
        session, first = ov.launch(quiet, **QUIET), 0
    else:
        if begin.note:
            say(begin.note)
    with session:
        yield session, first


def _compare(session: Session, step: int, begin: JobPosition, say: Say) -> None:
    """Report a plan that differs from the journal's: files changed since, or the job has another
    mesh or sync.
    """
    from overlord.journal.job_journal import slots_of  # needed only here

    made = session.plan(step).digest()
    if begin.digest and begin.digest != made:
        slots = slots_of(session.job)
        elsewhere = (
            ""
            if begin.place == slots
            else f": the run had {begin.place}, and the job file has {slots}"
        )
        say(f"step {step}: expected digest {begin.digest} as in the journal, got {made}{elsewhere}")


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
