"""The longest sample of a job (``Job.max_document``), and what it demands of batch and mesh.

Without rings a rank has whole samples, of at most ``Batch.context`` tokens: the largest of all
stages. Smaller stages cut them (``stages.cut_samples``). In a hybrid job the
context is the capacity of one rank, and a ring of ranks can share a longer sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.checks import is_int
from overlord.errors import JobError
from overlord.job import stages
from overlord.job.hooks import CONSTRUCTOR, Hook
from overlord.mesh import Batch, Mesh

if TYPE_CHECKING:
    from overlord.job.job import Job

ALONE = "with samples that ranks share"


def ring_ranks(place: Mesh) -> int:
    """Return the ranks that can share one sample: those of one stage and tensor-parallel rank."""
    return place.dp * place.cp


def of_ring(job: Job) -> int:
    """Return the tokens of the longest sample that all ranks of a hybrid job can share."""
    return _capacity(job) * ring_ranks(job.place)


def _capacity(job: Job) -> int:
    """Return the capacity of a rank in a hybrid job, rounded down to what pieces can fill."""
    own, context = getattr(job.strategy, "capacity", None), job.batch.context
    if not isinstance(own, int) or not 0 < own < context:
        return context
    unit = _unit(job) if ring_ranks(job.place) > 1 else 1
    return own // unit * unit


def _unit(job: Job) -> int:
    """Return the number that divides the tokens of every padded piece."""
    return 2 * job.batch.pad_multiple * (job.place.tp if job.batch.sequence_parallel else 1)


def problems(job: Job) -> list[str]:
    """Return every reason why the longest sample could not be placed, as text."""
    given, batch, place = job.max_document, job.batch, job.place
    if given is not None and (not is_int(given) or given < 1):
        return [f"max_document: expected a whole number of at least 1, got {given!r}"]
    if not isinstance(batch, Batch) or not isinstance(place, Mesh):
        return []
    if job.hybrid:
        return _hybrid_problems(job)
    if given is None or batch.in_chunks or given <= (context := _largest_context(job)):
        return []
    if not isinstance(job.strategy, str):
        return []
    return [
        f"max_document: expected at most batch.context={context} with strategy "
        f"{job.strategy!r}, which splits no sample, got {given}; use 'hdp_balance'"
    ]


def _largest_context(job: Job) -> int:
    try:
        return max(stages.contexts(job))
    except (JobError, AttributeError, TypeError):  # ``stages.problems`` reports it
        return job.batch.context


def _hybrid_problems(job: Job) -> list[str]:
    batch, ranks, found = job.batch, ring_ranks(job.place), list[str]()
    unit, capacity = _unit(job), _capacity(job)
    if ranks > 1 and batch.context % unit:
        found.append(
            f"batch.context: expected a multiple of {unit} {ALONE}, since a rank has two chunks "
            f"of each, got {batch.context}"
        )
    if (limit := job.document_limit) > capacity * ranks:
        what = "context" if capacity == batch.context else "capacity"
        found.append(
            f"max_document: expected at most {capacity * ranks}, the {what} of {ranks} "
            f"ranks, got {limit}; use more dp or cp ranks, or a larger {what}"
        )
    if batch.layout != "packed":
        found.append(f'batch.layout: expected "packed" {ALONE}, got {batch.layout!r}')
    if batch.cp_split != "zigzag":
        found.append(
            f'batch.cp_split: expected "zigzag" {ALONE}, got {batch.cp_split!r}; each rank of a '
            "ring has chunks k and 2d-1-k"
        )
    if job.overflow != "grow":
        found.append(f'overflow: expected "grow" {ALONE}, got {job.overflow!r}')
    hooks = job.hooks if isinstance(job.hooks, tuple) else ()
    if any(hook.kind == CONSTRUCTOR for hook in hooks if isinstance(hook, Hook)):
        found.append(
            f"hooks: expected no constructor_do_plan {ALONE}, since it builds whole samples; use "
            "ov.loader_do_plan"
        )
    return found
