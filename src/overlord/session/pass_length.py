"""The length of an evaluation, where the indexes of its sources have the lengths of all samples."""

from __future__ import annotations

from dataclasses import dataclass, replace

from overlord.job.job import Job, Source
from overlord.messages.control import PlannedStep
from overlord.session.launch import launch_planning
from overlord.session.session import Session
from overlord.sources.index import Index

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
        if changing := _changing(source):
            raise _unknown(f"got {changing} in source {source.name!r}")
    with launch_planning(replace(job, journal=None)) as session:
        indexes = session.internals.generation.prepared.indexes
        for source, index in zip(job.sources, indexes, strict=True):
            if index.format not in INDEXED:
                raise _unknown(f"got {index.format!r} as the format of source {source.name!r}")
        return _planned(session)


def lengths_indexed(source: Source, index: Index) -> bool:
    """Return whether the index of a source has the length of every sample."""
    return index.format in INDEXED and not _changing(source)


def _changing(source: Source) -> str:
    """Return the first transform that may change numbers or lengths of documents; "" if none."""
    return next((t.kind for t in source.transforms if t.kind not in KEEPING), "")


def plan_all(session: Session, first: int = 0) -> None:
    """Plan all steps of a session from its ``first`` step on; few of them are built."""
    client, beyond = session.client(0), session.internals.options.prefetch + 2
    stop = first + AT_ONCE
    session.skip(range(first, stop))
    for step in client:
        if step.step >= stop:  # an event needs a step that is not planned yet
            stop = step.step + beyond + AT_ONCE
            session.skip(range(stop - AT_ONCE, stop))


def _planned(session: Session) -> PassLength:
    """Return the length of a pass that a session plans."""
    counts: list[int | None] = []

    def count(stage: PlannedStep) -> None:
        plan = stage.plan
        counts.append(None if plan.tasks is not None else plan.n_microbatches)

    session.internals.runtime.on_stage.append(count)
    plan_all(session)
    known = [n for n in counts if n is not None]
    return PassLength(len(counts), sum(known) if len(known) == len(counts) else None)


def _unknown(got: str) -> TypeError:
    return TypeError(
        f"len(): expected sources whose index has the length of every document ({INDEXED[0]}) and "
        f"no transform that changes it, {got}; iterate without len()"
    )
