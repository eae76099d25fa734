"""Rules of a job with samples of several documents (``Pair``, ``Group``).

Such a sample is placed as a whole, in one microbatch of one bucket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.documents import MOST_PADDING, SHARE, reserve
from overlord.job.stages import are_stages, cut_samples, smallest_context
from overlord.mesh import Batch, Mesh

if TYPE_CHECKING:
    from overlord.job.job import Job

KINDS = ("pair", "group")


def grouped(sources: Any) -> list[tuple[str, Any]]:
    """Return the name and the Pair or Group of each source that has one."""
    return [
        (source.name, t)
        for source in sources
        for t in source.transforms
        if getattr(t, "kind", "") in KINDS
    ]


def problems(job: Job) -> list[str]:
    """Return every reason why samples of several documents could not be placed, as text."""
    if not isinstance(job.sources, tuple) or not all(hasattr(s, "transforms") for s in job.sources):
        return []
    specs = grouped(job.sources)
    if not specs:
        return []
    found = []
    name, first = specs[0]
    where = f"source {name!r}"
    if job.hybrid:
        found.append(
            f"strategy: expected one that places whole samples, since those of {where} have "
            f"several documents ({first!r:.80}), got {job.strategy!r:.40}; use 'llm_balance'"
        )
    batch = job.batch
    if isinstance(batch, Batch) and batch.pads:
        name_of = ("packing", batch.packing) if batch.in_chunks else ("shape", batch.shape)
        wanted = "documents" if batch.in_chunks else "free"
        found.append(
            f"batch.{name_of[0]}: expected {wanted!r}, since samples of {where} have several "
            f"documents that stay together, got {name_of[1]!r}; leave it out"
        )
    if isinstance(batch, Batch) and are_stages(job.stages) and cut_samples(job) is not None:
        found.append(
            f"max_document: expected at most {smallest_context(job)}, the smallest context of the "
            f"stages, since samples of {where} have several documents that are not cut again, "
            f"got {job.document_limit}; set max_document={smallest_context(job)}"
        )
    images = [s.name for s in job.sources for t in s.transforms if t.kind == "images"]
    if images:
        found.append(
            f"sources: expected no images next to samples of several documents ({where}), got "
            f"some in {images[0]!r}; give each its own job"
        )
    return found + _padding_problems(job, specs)


def _padding_problems(job: Job, specs: list[tuple[str, Any]]) -> list[str]:
    """Return a problem if the mesh pads documents by more than samples leave free for it."""
    batch, place = job.batch, job.place
    if not isinstance(batch, Batch) or not isinstance(place, Mesh) or not are_stages(job.stages):
        return []
    context, multiple = smallest_context(job), job.document_multiple
    found = []
    for name, t in specs:
        several = getattr(t, "size", None) or 2
        free = int(reserve(context, np.array([several]))[0])
        if several > 1 and multiple - 1 > free:
            least = SHARE * several * (multiple - 1)
            remedy = f"use batch.context of at least {least}"
            if multiple - 1 > MOST_PADDING:
                remedy = "use fewer cp or tp ranks, or a smaller pad_multiple"
            found.append(
                f"batch.context: expected room for {several} documents of source {name!r} that are "
                f"padded to a multiple of {multiple}, got {context}; {remedy}"
            )
    return found
