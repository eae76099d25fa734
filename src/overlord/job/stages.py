"""Stages of a job, such as pretraining, annealing and long-context extension.

A stage starts on the step where the previous stages end. It can change the mixture, and of the
batch the sizes, the microbatches and the context. Everything follows from the number of a step, so
all ranks and workers change at the same step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from overlord.batch_by_step import BatchByStep, BatchPart
from overlord.batch_ramp import Ramp
from overlord.checks import is_int, signature_problem
from overlord.errors import JobError
from overlord.job.mixture_weights import mixture_problems, schedule_problems
from overlord.mesh import SIZES, Batch

if TYPE_CHECKING:
    from overlord.job.job import Job

# fields of the batch that stages may change; the others shape the arrays and the model's inputs
CHANGED = (*SIZES, "microbatches", "context", "max_documents")
CUTS = ("split", "truncate")  # values of ``Job.on_long`` that need no other samples


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a job; fields that are not given are those of the job.

    Arguments
    ---------
    steps: number of steps. None: until the end of the job, for the last stage only. Default None.
    batch: size and form of its steps, an ``ov.Batch``; other fields than ``samples``, ``tokens``,
        ``microbatches``, ``context`` and ``max_documents`` must equal those of the job's batch.
        Its ramps count steps from the start of the stage. Default None: the job's batch.
    mixture: weights or a schedule, as in ``Job.mixture``; a schedule counts steps from the start
        of the stage. Default None: the job's mixture, which counts from the start of the job.
    context: the job's batch with another context. Default None: the context of the batch.
    name: name of the stage in ``Step.stage`` and in reports. Default None: its number, from 0.
    """

    steps: int | None = None
    batch: Batch | None = field(default=None, kw_only=True)
    mixture: Any = field(default=None, kw_only=True)
    context: int | None = field(default=None, kw_only=True)
    name: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise JobError(problems, "stage")

    def problems(self) -> list[str]:
        """Return every problem of the fields, each as one text."""
        found = []
        for name in ("steps", "context"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                found.append(
                    f"stage.{name}: expected a whole number of at least 1, or None, got {value!r}"
                )
        if self.name is not None and (not isinstance(self.name, str) or not self.name):
            found.append(f"stage.name: expected a name or None, got {self.name!r}")
        if self.batch is not None and not isinstance(self.batch, Batch):
            found.append(f"stage.batch: expected a Batch or None, got {self.batch!r}")
        if self.batch is not None and self.context is not None:
            found.append(
                "stage.context: expected None with batch=, got "
                f"{self.context!r}; set the context of the batch"
            )
        return found

    def with_mixture(self, mixture: Any) -> Stage:
        """Return the stage with another mixture."""
        return replace(self, mixture=mixture)

    def batch_of(self, job: Job) -> Batch:
        """Return the batch of the stage in a job."""
        if self.batch is not None:
            return self.batch
        return job.batch if self.context is None else replace(job.batch, context=self.context)


def starts(job: Job) -> list[int]:
    """Return the first step of every stage."""
    lengths = [stage.steps or 0 for stage in job.stages]
    return list(accumulate(lengths, initial=0))[: len(lengths)]


def end(job: Job) -> int | None:
    """Return the step before which the stages or ``until`` end a job; None if neither does."""
    ends = [job.until] if isinstance(job.until, int) else []
    if job.stages and (last := job.stages[-1].steps) is not None:
        ends.append(starts(job)[-1] + last)
    return min(ends, default=None)


def batches(job: Job) -> BatchByStep:
    """Return the batch of every step."""
    if not job.stages:
        return BatchByStep.of(job.batch)
    return BatchByStep(
        tuple(
            BatchPart(first, stage.batch_of(job), first if stage.batch else 0, stage.name)
            for first, stage in zip(starts(job), job.stages, strict=True)
        ),
        staged=True,
    )


def shown_size(job: Job) -> str:
    """Return the size of the steps of a job as text, or the number of its stages."""
    batch = job.batch
    if job.stages:
        return f"{len(job.stages)} stages"
    if batch.in_chunks:
        return f"{batch.samples or batch.chunks} chunks of {batch.context} tokens a step"
    return f"{_size(batch)} {'samples' if batch.tokens is None else 'tokens'} a step"


def contexts(job: Job) -> list[int]:
    """Return the context of every stage, or that of the job's batch."""
    return [part.batch.context for part in batches(job).parts]


def smallest_context(job: Job) -> int:
    """Return the smallest context of a microbatch in any stage."""
    return min(contexts(job))


def are_stages(given: object) -> bool:
    """Return whether ``Job.stages`` holds stages only, or nothing."""
    return isinstance(given, tuple) and all(isinstance(stage, Stage) for stage in given)


def cut_samples(job: Job) -> str | None:
    """Return how the planner cuts samples that are longer than the context of their stage.

    It is ``Job.on_long``; None if no sample can be longer. Chunks are always cut.
    """
    if not job.stages or job.batch.in_chunks or job.hybrid:
        return None
    limit, sizes = job.document_limit, contexts(job)
    return job.on_long if min(sizes) < limit <= max(sizes) else None


def problems(job: Job) -> list[str]:
    """Return every problem of the stages of a job, and of its ramps, as text."""
    if not isinstance(job.stages, tuple):
        return [f"stages: expected a list of ov.Stage, got {job.stages!r:.80}"]
    if job.evaluation and job.stages:
        return ["stages: expected none in an evaluation, which is one pass; leave them out"]
    if job.evaluation and isinstance(size := _size(job.batch), Ramp):
        return [f"batch: expected one size of all steps in an evaluation, got {size!r}"]
    if not job.stages:
        return []
    if wrong := [
        f"stages[{k}]: expected an ov.Stage, got {stage!r:.80}"
        for k, stage in enumerate(job.stages)
        if not isinstance(stage, Stage)
    ]:
        return wrong
    found = _step_problems(job) + _mixture_problems(job)
    for k, stage in enumerate(job.stages):
        found += [f"stages[{k}].batch{text}" for text in _batch_problems(job, stage)]
    found = found or _context_problems(job)
    for k, stage in enumerate(() if found else job.stages):
        found += [f"stages[{k}].{text}" for text in _problems_alone(job, stage)]
    return found


def _size(batch: Batch) -> Any:
    return batch.tokens if batch.samples is None else batch.samples


def _step_problems(job: Job) -> list[str]:
    found = [
        f"stages[{k}].steps: expected a number of steps, got None; only the last stage may last "
        "until the job ends"
        for k, stage in enumerate(job.stages[:-1])
        if stage.steps is None
    ]
    names = [stage.name for stage in job.stages if stage.name is not None]
    found += [
        f"stages: expected different names, got {name!r} twice"
        for name in sorted({n for n in names if names.count(n) > 1})
    ]
    last = job.stages[-1].steps
    if not found and last is not None and is_int(job.until):
        total = starts(job)[-1] + last
        if int(job.until) > total:
            found.append(
                f"until: expected at most {total}, the steps of all stages, got {job.until}; set "
                "steps=None for the last stage"
            )
    return found


def _mixture_problems(job: Job) -> list[str]:
    found = list[str]()
    own = [(k, stage.mixture) for k, stage in enumerate(job.stages) if stage.mixture is not None]
    for k, mixture in own:
        if isinstance(mixture, Mapping):
            texts = mixture_problems(mixture, job.names)
        elif not callable(mixture) or isinstance(mixture, type):
            texts = [f"mixture: expected a mapping of weights or a schedule, got {mixture!r}"]
        elif problem := signature_problem(mixture, ("step", "feedback")):
            texts = [f"mixture: {problem}"]
        elif hasattr(mixture, "prefer"):
            texts = [
                f"mixture: expected weights, got {mixture!r}, which chooses among candidates; make "
                "it the job's mixture"
            ]
        else:
            texts = schedule_problems(mixture, job.names)
        found += [f"stages[{k}].{text}" for text in texts]
    if own and hasattr(job.mixture, "prefer"):
        found.append(
            f"stages[{own[0][0]}].mixture: expected None, since the job's mixture chooses among "
            f"candidates in all stages, got {own[0][1]!r}; give that mixture a schedule of weights"
        )
    if own and job.mix_every == "epoch":
        found.append(
            'mix_every: expected "step" or "microbatch" with mixtures of stages, which change at '
            'the start of a stage, got "epoch"; leave it out'
        )
    return found


def _batch_problems(job: Job, stage: Stage) -> list[str]:
    """Return the problems of a stage's batch, without the key of the batch."""
    try:
        stage.batch_of(job)
    except JobError as fault:
        return [problem.removeprefix("batch") for problem in fault.problems]
    if stage.batch is None:
        return []
    found = [
        f".{f.name}: expected {wanted!r} as in Job.batch, got {got!r}; stages change only "
        f"{', '.join(CHANGED)}"
        for f in fields(Batch)
        if f.name not in CHANGED
        and (got := getattr(stage.batch, f.name)) != (wanted := getattr(job.batch, f.name))
    ]
    if not job.batch.in_chunks and (stage.batch.tokens is None) != (job.batch.tokens is None):
        unit = "samples" if job.batch.tokens is None else "tokens"
        found.append(
            f": expected a size in {unit}, as in Job.batch, got one in "
            f"{'tokens' if unit == 'samples' else 'samples'}; the mixture counts in one unit"
        )
    return found


def _context_problems(job: Job) -> list[str]:
    """Return the problems of stages with different contexts."""
    sizes = contexts(job)
    if len({*sizes, job.batch.context if job.hybrid else sizes[0]}) > 1 and job.hybrid:
        return [
            f"stages: expected one context with strategy {job.strategy!r}, the capacity of a rank, "
            f"got {', '.join(map(str, sizes))}; ranks share longer samples"
        ]
    if cut_samples(job) is None:
        return []
    transforms = [t for s in job.sources for t in s.transforms]
    reasons = [
        (job.on_long not in CUTS, f"on_long={job.on_long!r}"),
        (job.batch.fixed, 'shape="fixed"'),
        (job.look_ahead > 1, f"look_ahead={job.look_ahead}"),
        (job.overflow != "grow", f"overflow={job.overflow!r}"),
        (bool(job.hooks), "hooks"),
        (any(getattr(t, "kind", "") == "images" for t in transforms), "images"),
    ]
    limit, least = job.document_limit, min(sizes)
    return [
        f"stages: expected samples that fit the context of every stage with {what}, got contexts "
        f"from {least} to {max(sizes)} and samples of up to {limit} tokens; set "
        f'max_document={least}, or packing="concat"'
        for wrong, what in reasons
        if wrong
    ]


def _problems_alone(job: Job, stage: Stage) -> list[str]:
    """Return the problems of a job that has one stage only."""
    batch = stage.batch_of(job)
    longest: dict[str, Any] = (
        {} if job.hybrid else {"max_document": min(job.document_limit, batch.context)}
    )
    mixture = job.mixture if stage.mixture is None else stage.mixture
    if batch.in_chunks:
        longest = {"max_document": job.document_limit}
    try:
        replace(job, stages=(), batch=batch, mixture=mixture, **longest)
    except JobError as fault:
        return fault.problems
    return []
