"""The number of microbatches of every step, for trainers that fix it for the whole run."""

from __future__ import annotations

from overlord.errors import JobError
from overlord.job.job import Job


def fixed_microbatches(job: Job, where: str) -> int:
    """Return the microbatches of a step; raise ``JobError`` if stages differ in it."""
    counts = sorted({part.batch.microbatches for part in job.batches.parts})
    if len(counts) > 1:
        listed = ", ".join(map(str, counts))
        raise JobError(
            [
                f"stages: expected one number of Batch.microbatches, got {listed}: this trainer "
                "takes the same number for every optimizer step; give the stages the same"
            ],
            where,
        )
    return counts[0]
