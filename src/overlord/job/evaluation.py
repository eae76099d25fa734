"""``evaluation``: a job of one pass in fixed order, for metrics that no mesh changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from overlord.job.job import Job, Source
from overlord.mesh import Batch, Mesh


def evaluation(
    sources: Source | Sequence[Source],
    batch: Batch,
    place: Mesh | None = None,
    *,
    name: str = "evaluation",
    steps: int | None = None,
    **fields: Any,
) -> Job:
    """Return a job that delivers every sample of its sources once, in the order of the files.

    Every rank ends at the same step, and a rank without data has empty microbatches. The samples of
    each step do not depend on the mesh. Loaders of ``overlord.torch`` begin anew at every
    ``iter()``.

    sources: a source, or several, which take turns by their weights. ``epochs`` and ``shuffle`` of
        sources are replaced, so those of a training job may be given.
    batch: size and form of a step. The last step may be smaller.
    place: mesh of the ranks that evaluate. Default: one rank.
    name: name for display. Default "evaluation".
    steps: the most steps of a pass, for a quick evaluation. Default None: all samples.
    fields: other fields of ``Job``.
    """
    until = {} if steps is None else {"until": steps}
    return Job(
        name=name,
        sources=[sources] if isinstance(sources, Source) else sources,
        batch=batch,
        place=Mesh() if place is None else place,
        evaluation=True,
        **{**until, **fields},
    )
