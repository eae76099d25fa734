"""Rules of a job with the strategy ``even``: equal numbers of samples in all microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.mesh import Batch, Mesh

if TYPE_CHECKING:
    from overlord.job.job import Job

EVEN = "even"


def problems(job: Job) -> list[str]:
    """Return every reason why microbatches could not have equal numbers of samples, as text."""
    batch, place = job.batch, job.place
    if job.strategy != EVEN or not isinstance(batch, Batch) or not isinstance(place, Mesh):
        return []
    if batch.samples is None:
        return ["batch.tokens: expected samples= with strategy 'even', got tokens=; set samples"]
    if batch.pads:
        return [
            "strategy: expected one that fills microbatches by tokens with packing='concat' or "
            "shape='fixed', got 'even', which counts samples; use 'llm_balance'"
        ]
    found = []
    least = place.n_buckets("DP") * batch.microbatches
    if batch.samples % least:
        found.append(
            f"batch.samples: expected a multiple of {least} (dp x microbatches) with strategy "
            f"'even', got {batch.samples}"
        )
    if job.overflow != "grow":
        found.append(
            f"overflow: expected 'grow' with strategy 'even', got {job.overflow!r}; samples that "
            "wait change the counts"
        )
    return found
