"""The length of an evaluation, where the indexes of its sources have the lengths of all samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlord.job.job import Job
from overlord.messages.control import PlannedStep
from overlord.session.launch import launch_planning
from overlord.session.session import Session

INDEXED = ("megatron",)  # formats whose index has the length of every document
KEEPING = ("tokens", "select")  # transforms that keep the number and lengths of documents
AT_ONCE = 1024  # steps that are planned between two checks for the end


@dataclass(frozen=True, slots=True)
class PassLength:
    """The steps of an evaluation, and the microbatches of a rank; None if ranks differ."""

    steps: int
    microbatches: int | None


def pass_length(job: Job) -> PassLength:
    """Return the length of an evaluation; raise ``TypeError`` if it is unknown.

    The pass is planned from the indexes alone. Rows with invalid ids, which a run quarantines,
    count as samples.
    """
    for source in job.sources:
        if changing := [t.kind for t in source.transforms if t.kind not in KEEPING]:
            raise _unknown(f"got {changing[0]} in source {source.name!r}")
    with launch_planning(replace(job, journal=None)) as session:
        indexes = session.internals.generation.prepared.indexes
        for source, index in zip(job.sources, indexes, strict=True):
            if index.format not in INDEXED:
                raise _unknown(f"got {index.format!r} as the format of source {source.name!r}")
        return _planned(session)


def _planned(session: Session) -> PassLength:
    """Return the length of a pass that a session plans; few of its steps are built."""
    counts: list[int | None] = []

    def count(stage: PlannedStep) -> None:
        plan = stage.plan
        counts.append(None if plan.tasks is not None else plan.n_microbatches)

    session.internals.runtime.on_stage.append(count)
    client, beyond = session.client(0), session.internals.options.prefetch + 2
    session.skip(range(AT_ONCE))
    stop = AT_ONCE
    for step in client:
        if step.step >= stop:  # an event needs a step that is not planned yet
            stop = step.step + beyond + AT_ONCE
            session.skip(range(stop - AT_ONCE, stop))
    known = [n for n in counts if n is not None]
    return PassLength(len(counts), sum(known) if len(known) == len(counts) else None)


def _unknown(got: str) -> TypeError:
    return TypeError(
        f"len(): expected sources whose index has the length of every document ({INDEXED[0]}) and "
        f"no transform that changes it, {got}; iterate without len()"
    )
