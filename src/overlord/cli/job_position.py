"""Read the position of a job from its journal.

Nothing is locked and nothing is written, so the job may be running.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from overlord.journal.job_journal import entries
from overlord.journal.log import read_if_any
from overlord.journal.replay import Recovered
from overlord.messages.control import Skip
from overlord.setup.state_json import state_to_json
from overlord.uris import scrub

if TYPE_CHECKING:
    from overlord.job.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPosition:
    """A state from which planning can begin; ``state=None``: the beginning of the job."""

    state: dict[str, Any] | None = None
    first: int = 0  # the step at which planning begins
    digest: str = ""  # digest of the wanted step's plan in the run; empty: unknown
    place: str = ""  # the mesh that the run planned for
    skipped: tuple[Skip, ...] = ()  # ranges of steps that calls of `skip` removed from the run
    note: str = ""  # a remark for the user; empty: none


@dataclass(frozen=True, slots=True)
class RecordedSteps:
    """The content of a job's journal at one moment, without an unfinished record at its end."""

    job: Job
    found: Recovered

    @staticmethod
    def of(job: Job) -> RecordedSteps:
        records = [] if job.journal is None else read_if_any(job.journal)
        return RecordedSteps(job, Recovered.of(entries(records), keeping=True))

    @property
    def journal_text(self) -> str:
        return scrub(str(self.job.journal))

    @property
    def oldest(self) -> int:
        """The first step that the journal still holds."""
        return self.found.snapshots[0]

    def position_before(self, step: int) -> JobPosition:
        """Return the newest state from which a step can be planned as in the run.

        Without records, or for a step older than the journal, return the beginning of the job.
        """
        found = self.found
        if found.empty:
            return JobPosition()
        if step < self.oldest:
            note = (
                f"journal {self.journal_text}: expected step {step}, got steps from {self.oldest} "
                "on; the answer follows from the job file alone"
            )
            return JobPosition(note=note)
        first = min(step, found.open_step)
        note = (
            f"step {step} has no plan in journal {self.journal_text} yet; it is planned as the run "
            "will plan it if nothing changes"
        )
        return self._from(
            first, found.planned.get(step, ""), note if step >= found.open_step else ""
        )

    def oldest_state(self) -> JobPosition:
        """Return the oldest state of the journal, from which every later step can be planned."""
        return JobPosition() if self.found.empty else self._from(self.oldest, "", "")

    def _from(self, first: int, digest: str, note: str) -> JobPosition:
        state = self.found.state(first - 1)
        return JobPosition(
            state=state_to_json(
                state,
                self.job.name,
                self.found.names,
                self.found.fingerprint,
                self.job.batches.stage(state.step),
            ),
            first=first,
            digest=digest,
            place=self.found.place,
            skipped=tuple(e for e in self.found.events if isinstance(e, Skip)),
            note=note,
        )
