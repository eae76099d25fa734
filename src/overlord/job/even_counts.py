"""Rules of a job with the strategy ``even``: equal numbers of samples in all microbatches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from overlord.batch_ramp import Ramp
from overlord.job.stages import are_stages, batches
from overlord.mesh import Batch, Mesh

if TYPE_CHECKING:
    from overlord.job.job import Job

EVEN = "even"


def problems(job: Job) -> list[str]:
    """Return every reason why microbatches could not have equal numbers of samples, as text."""
    batch, place = job.batch, job.place
    if not isinstance(batch, Batch) or not isinstance(place, Mesh):
        return []
    if not are_stages(job.stages):
        return []
    parts = batches(job).parts
    if any(part.batch.samples is None for part in parts):
        return ["batch.tokens: expected samples= with strategy 'even', got tokens=; set samples"]
    if batch.pads:
        return [
            "strategy: expected one that fills microbatches by tokens with packing='concat' or "
            "shape='fixed', got 'even', which counts samples; use 'llm_balance'"
        ]
    found = []
    for part in parts:
        given: Any = part.batch.samples
        least = place.n_buckets("DP") * part.batch.microbatches
        if (given.unit if isinstance(given, Ramp) else given) % least:
            found.append(
                f"batch.samples: expected a multiple of {least} (dp x microbatches) with strategy "
                f"'even', got {given}"
            )
    if job.overflow != "grow":
        found.append(
            f"overflow: expected 'grow' with strategy 'even', got {job.overflow!r}; samples that "
            "wait change the counts"
        )
    return found
