"""Launch of a job with a journal: a new job, a resumed one, or one at a given state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlord.errors import StateMismatch
from overlord.job.job import Job
from overlord.journal.job_journal import JobJournal, slots_of
from overlord.journal.replay import Recovered
from overlord.journal.write_ahead import JournalStart, ResumePoint
from overlord.messages.control import StreamState
from overlord.session.session import Session
from overlord.setup.options import Options
from overlord.setup.partition import profiled
from overlord.setup.prepared_job import PreparedJob
from overlord.setup.state_json import describe_batches, removed_before, state_to_json
from overlord.sources.index import RemovedSource

log = logging.getLogger("overlord")

MAY_GROW = ("sources", "mixture")  # parts of a fingerprint that an added source changes


def launch_with_journal(
    job: Job,
    runtime: str,
    resume: Mapping[str, Any] | str | None,
    allow: Sequence[str],
    options: Options,
) -> Session:
    """Start a job with a journal, and return its session.

    Other writers of the journal are fenced off before files are indexed.
    """
    assert job.journal is not None
    if resume is None:
        journal, found = JobJournal.fresh(job.journal, job.name), Recovered()
    else:
        journal, found = JobJournal.resumed(job.journal, job.name, allow)
    try:
        begin = _by_state(resume) if isinstance(resume, Mapping) else _by_journal
        removed = _removed_sources(job, resume, found)
        indexed = PreparedJob(job, options, removed, reads_datasets=runtime == "local")
        prepared, state, beginning = begin(profiled(indexed, runtime), journal, found, tuple(allow))
    except BaseException:
        journal.close()
        raise
    if resume == "auto" and beginning.resumed is None:
        beginning = replace(beginning, resumed=ResumePoint(0, found.why))
    if (resumed := beginning.resumed) is not None:
        log.info("job %r resumed at step %d: %s", job.name, resumed.step, resumed.why)
    return Session(job, prepared, state, runtime, beginning)


def _removed_sources(
    job: Job, resume: Mapping[str, Any] | str | None, found: Recovered
) -> dict[str, RemovedSource]:
    """Return the sources that were removed before the step at which the job resumes."""
    if isinstance(resume, Mapping):
        return removed_before(resume, job.shuffle_chunks)
    saved = (
        {}
        if found.empty
        else state_to_json(found.state(found.acked), job.name, found.names, found.fingerprint)
    )
    return removed_before(saved, job.shuffle_chunks)


Begun = tuple[PreparedJob, StreamState | None, JournalStart]


def _by_journal(
    prepared: PreparedJob, journal: JobJournal, found: Recovered, allow: tuple[str, ...]
) -> Begun:
    """Resume after the last step that all ranks took, or start if the journal is empty.

    Later steps in the journal are replanned, and compared with the recorded plans. If ``allow``
    permits another job, they are planned anew.
    """
    if found.empty:
        return prepared, None, JournalStart(journal)
    saved = state_to_json(
        found.state(found.acked), prepared.job.name, found.names, found.fingerprint
    )
    prepared = prepared.for_saved_state(saved)
    state = prepared.restore(saved, allow)
    # ``allow`` permits another job: recorded steps are not replanned
    if prepared.fingerprint != found.fingerprint:
        why = f"{found.why}; the job differs (allow), so later steps are planned anew"
        return prepared, state, JournalStart(journal, ResumePoint(state.step, why), anew=True)
    # on another mesh every step has the same samples, in other slots
    other_mesh = slots_of(prepared.job) != found.place
    return (
        prepared,
        state,
        JournalStart(journal, ResumePoint(state.step, found.why), found.next_step, anew=other_mesh),
    )


def _by_state(
    resume: Mapping[str, Any],
) -> Callable[[PreparedJob, JobJournal, Recovered, tuple[str, ...]], Begun]:
    def begin(
        prepared: PreparedJob, journal: JobJournal, found: Recovered, allow: tuple[str, ...]
    ) -> Begun:
        """Start at the given state, and restart the journal there."""
        prepared = prepared.for_saved_state(resume)
        state = prepared.restore(resume, allow)
        if not found.empty:
            _same_job(found.fingerprint, prepared, allow)
        why = (
            f"it is the position of the given state; {found.why}"
            if not found.empty
            else "it is the position of the given state"
        )
        return (
            prepared,
            state,
            JournalStart(journal, ResumePoint(state.step, why), anew=not found.empty),
        )

    return begin


def _same_job(then: Mapping[str, str], prepared: PreparedJob, allow: Sequence[str]) -> None:
    """Raise ``StateMismatch`` if the journal, of fingerprint ``then``, is of another job.

    Sources may have been added since the state was saved.
    """
    now = prepared.fingerprint
    parts = [
        p for p in sorted({*then} & {*now}) if then[p] != now[p] and p not in (*MAY_GROW, *allow)
    ]
    if parts:
        remedy = f"give this job its own journal, or pass allow=({', '.join(map(repr, parts))},)"
        differ = {p: (then[p], now[p]) for p in parts}
        if "batch" in differ:
            differ["batch"] = describe_batches(*differ["batch"], prepared.job)
        raise StateMismatch(differ, remedy, "the journal belongs to another job")
