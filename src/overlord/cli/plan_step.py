"""Plan one step of a job without running the steps before it.

Samples of earlier steps are drawn and skipped; no batch is built for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from overlord.cli.job_position import JobPosition, RecordedSteps
from overlord.errors import JobError, PlanError, StateMismatch
from overlord.mesh import AXES, ClientPlaceTree
from overlord.observe.explain import explain_sample, find, refuse_no_row
from overlord.observe.explanation import SampleExplanation
from overlord.planning.mixture import skipped
from overlord.session.inspection import current_knowledge
from overlord.session.launch import launch_planning

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.messages.control import PlannedStep
    from overlord.observe.progress_bars import AdvanceTask
    from overlord.plan.plan import LoadingPlan
    from overlord.sample import SampleId
    from overlord.session.session import Session


Note = Callable[[str], None]
MANY = 4  # most differences that a remark names


def no_note(text: str) -> None:
    """Ignore a remark."""


def no_progress(what: str, done: float, total: float | None) -> None:
    """Ignore progress."""


def parse_place(text: str, base: ClientPlaceTree) -> ClientPlaceTree:
    """Return the mesh of ``dp=64`` or ``dp=8,cp=2``; other axes have the degree in ``base``.

    Raise ``JobError`` for a malformed text.
    """
    degrees: dict[str, int] = {}
    for word in text.replace(" ", "").split(","):
        axis, _, degree = word.partition("=")
        if axis not in AXES or not degree.isdigit():
            raise JobError(
                [
                    f"expected axis=number with one of {', '.join(AXES)}, as in dp=64 or "
                    f"dp=8,tp=2, got {word!r}"
                ],
                "--place",
            )
        degrees[axis] = int(degree)
    return base.replace(**degrees)


@contextmanager
def planned(
    job: Job,
    step: int,
    progress: AdvanceTask = no_progress,
    *,
    what_if: bool = False,
    note: Note = no_note,
) -> Iterator[Session]:
    """Yield a session that has planned a step as a run of the job plans it.

    With a journal, planning begins at the state that the journal has before the step. Nothing is
    written and nothing is locked. ``progress`` receives the numbers of indexed files and of
    planned steps. ``what_if``: the job has another place or strategy than its run. ``note``
    receives remarks for the user. Raise ``PlanError`` if the job ends before the step.
    """
    begin = RecordedSteps.of(job).position_before(step)
    allow = ("strategy",) if what_if else ()
    with planning_session(job, begin, note, progress, allow) as (session, first):
        if step > first:
            session.skip(range(first, step))
        taker = _StepTaker(session)
        while taker.waits():
            done = min(step + 1, int(session.metrics()["planned_steps"]))
            progress("planned steps", done - first, step + 1 - first)
        if taker.ended and (ends := int(session.metrics()["planned_steps"])) <= step:
            raise PlanError(
                f"expected a step below {ends}, where the job ends, got {step}",
                step,
                "give an earlier step",
            )
        if not what_if and first == begin.first:
            _compare(session, step, begin, note)
        yield session


def plan_step(job: Job, step: int) -> LoadingPlan:
    """Return the plan of a step, as a run of the job would plan it."""
    with planned(job, step) as session:
        return session.plan(step)


def find_sample(
    job: Job,
    sample: SampleId,
    within: int,
    progress: AdvanceTask = no_progress,
    *,
    note: Note = no_note,
) -> SampleExplanation:
    """Find the place of a sample within the first ``within`` steps of a run of the job.

    The search ends as soon as the stream has passed the row. With a journal it begins at the
    journal's oldest state. If the stream had passed the row before that state, the search is
    repeated from the job file alone.
    """
    recorded = RecordedSteps.of(job)
    answer = _search(job, sample, within, progress, recorded.oldest_state(), note)
    if answer.status != "gone":
        return answer
    note(
        f"journal {recorded.journal_text}: expected the step of {sample}, got steps from "
        f"{recorded.oldest} on; the answer follows from the job file alone"
    )
    return _search(job, sample, within, progress, JobPosition(), note)


def _search(
    job: Job, sample: SampleId, within: int, progress: AdvanceTask, begin: JobPosition, note: Note
) -> SampleExplanation:
    with planning_session(job, begin, note, progress) as (session, first):
        # Refuse an id that no step can hold before the search.
        refuse_no_row(explain_sample(sample, current_knowledge(session.internals)))
        found: list[PlannedStep] = []
        session.internals.runtime.on_stage.append(
            lambda stage: found.append(stage) if find(sample, stage.plan) >= 0 else None
        )
        session.skip(range(first, first + within))
        taker, over = _StepTaker(session), False
        while True:
            # Read before `found`, so that `found` holds every step that this state counts.
            known = current_knowledge(session.internals)
            progress("searched steps", min(within, known.state.step - first), within)
            # This search skips every step; only steps that the job itself skips count as skipped.
            watched = [
                replace(s, skipped=skipped(begin.skipped, s.plan.step, s.plan.step + 1))
                for s in found
            ]
            answer = explain_sample(sample, replace(known, stages=watched))
            if over or answer.status not in ("ahead", "undecided"):
                return answer
            over = not taker.waits()


@contextmanager
def planning_session(
    job: Job,
    begin: JobPosition,
    note: Note,
    progress: AdvanceTask = no_progress,
    allow: tuple[str, ...] = (),
) -> Iterator[tuple[Session, int]]:
    """Yield a session that only plans, and the step at which it begins.

    If the job does not fit the state of the journal, pass a remark to ``note`` and begin at step 0.
    """
    quiet, first = replace(job, journal=None), begin.first

    def indexed(done: int, total: int) -> None:
        progress("indexed files", done, total)

    try:
        session = launch_planning(quiet, begin.state, allow, indexed)
    except StateMismatch as fault:
        fields = ", ".join(sorted(fault.differences)[:MANY]) + (
            f" and {n} more" if (n := len(fault.differences) - MANY) > 0 else ""
        )
        note(
            f"journal: expected this job's, got one that differs in {fields}; the answer "
            "follows from the job file alone"
        )
        session, first = launch_planning(quiet, progress=indexed), 0
    else:
        if begin.note:
            note(begin.note)
    with session:
        yield session, first


def _compare(session: Session, step: int, begin: JobPosition, note: Note) -> None:
    """Pass a remark to ``note`` if the plan differs from the plan in the journal.

    That happens if files have changed since, or if the job file has another mesh or sync.
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
        note(
            f"step {step}: expected digest {begin.digest} as in the journal, got {made}{elsewhere}"
        )


class _StepTaker:
    """A thread that takes the next step of rank 0, so that the main thread can handle Ctrl-C."""

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
        """Wait up to 0.1 s; return whether the step is still missing; raise the job's error."""
        self._thread.join(0.1)
        if self._thread.is_alive():
            return True
        if self._fault is not None:
            raise self._fault
        return False
