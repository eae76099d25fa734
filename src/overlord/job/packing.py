"""What ``Batch(packing="concat")`` and ``Batch(shape="fixed")`` demand of the rest of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.job.hooks import CONSUME
from overlord.mesh import Mesh

if TYPE_CHECKING:
    from overlord.job.job import Job

CHUNKS = 'with packing="concat"'
FIXED = 'with shape="fixed"'
# strategies that place samples in stream order, and so cannot keep a number of microbatches
IN_STREAM_ORDER = ("vanilla", "packed", "backbone_balance", "encoder_balance")


def problems(job: Job) -> list[str]:
    """Return every reason why a job cannot have the packing or shape of its batch, as text."""
    batch, found = job.batch, list[str]()
    if job.hybrid:
        what = CHUNKS if batch.in_chunks else FIXED
        found.append(
            f"strategy: expected whole samples {what}, got one that splits samples over ranks; "
            "use 'llm_balance'"
        )
    if batch.in_chunks:
        return found + _of_chunks(job)
    return found + _of_fixed_documents(job)


def _of_chunks(job: Job) -> list[str]:
    found = [
        f"{name}: expected {wanted!r} {CHUNKS}, {why}, got {got!r}; leave it out, or set "
        'packing="documents"'
        for name, wanted, got, why in (
            ("draw", "exact", job.draw, "which draws exact numbers of tokens"),
            ("mix_every", "step", job.mix_every, "whose chunks are mixed by tokens"),
            ("look_ahead", 1, job.look_ahead, "which takes tokens in order"),
            ("overflow", "grow", job.overflow, "in which every step fits"),
            ("hooks", (), job.hooks, "since they work with whole samples"),
        )
        if got != wanted and not (name == "mix_every" and got == "epoch")
    ]
    sources = job.sources if isinstance(job.sources, tuple) else ()
    transforms = [t for s in sources for t in getattr(s, "transforms", ())]
    if any(getattr(t, "kind", "") == "images" for t in transforms):
        found.append(
            f"sources: expected no images {CHUNKS}, since a chunk may end inside the placeholders "
            'of an image, got ov.Images; set packing="documents"'
        )
    place, batch = job.place, job.batch
    if isinstance(place, Mesh) and place.cp > 1 and batch.cp_split == "zigzag":
        found.append(
            f'batch.cp_split: expected "zigzag_whole", "contiguous" or "none" {CHUNKS}, whose '
            f'pieces are not padded to a multiple of 2*cp, got "zigzag" with cp={place.cp}'
        )
    return found


def _of_fixed_documents(job: Job) -> list[str]:
    batch, found = job.batch, list[str]()
    if isinstance(job.strategy, str) and job.strategy in IN_STREAM_ORDER:
        found.append(
            f"strategy: expected one that packs tightly {FIXED}, got {job.strategy!r}, which may "
            "need more microbatches in some steps; use 'llm_balance', or packing=\"concat\""
        )
    if batch.layout == "padded" and batch.max_documents is None:
        found.append(
            f'batch.max_documents: expected a number {FIXED} and layout="padded", the rows of a '
            "microbatch, got None"
        )
    if job.mix_every == "microbatch":
        found.append(f'mix_every: expected "step" or "epoch" {FIXED}, got "microbatch"')
    hooks = job.hooks if isinstance(job.hooks, tuple) else ()
    if hasattr(job.mixture, "prefer") or any(getattr(h, "kind", "") == CONSUME for h in hooks):
        found.append(
            f"look_ahead: expected a choice by size alone {FIXED}, got a mixture or a hook that "
            'chooses among candidates; set shape="free"'
        )
    return found
