"""Stages of a job as text, for reports of the command line and for explanations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from overlord.batch_ramp import Ramp
from overlord.job import stages

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.mesh import Batch


def stage_name(stage: str | int) -> str:
    """Return a stage by its name, or by its number from 0."""
    return repr(stage) if isinstance(stage, str) else str(stage)


def stage_of_step(job: Job, step: int) -> str:
    """Return the stage and the size of a step; empty for a job without stages and ramps."""
    batches = job.batches
    size = _size(batches.at(step))
    if (stage := batches.stage(step)) is None:
        return size if batches.at(step) != job.batch else ""
    number = batches.number(step)
    first, of = batches.parts[number].first, job.stages[number].steps
    length = "" if of is None else f" of {of:,}"
    return (
        f"{stage_name(stage)}, stage {number} of {len(job.stages)}: its step {step - first:,}"
        f"{length}, {size}"
    )


def stage_lines(job: Job) -> list[str]:
    """Return a line for each stage of a job: its steps, size and mixture."""
    lines = []
    for k, (first, stage) in enumerate(zip(stages.starts(job), job.stages, strict=True)):
        steps = "on" if stage.steps is None else f"to {first + stage.steps - 1:,}"
        mixture = "" if stage.mixture is None else f", mixture {_mixture(stage.mixture)}"
        name = k if stage.name is None else stage.name
        lines.append(
            f"stage {stage_name(name)}: steps {first:,} {steps}, "
            f"{_size(stage.batch_of(job))}{mixture}"
        )
    return lines


def _size(batch: Batch) -> str:
    value = batch.tokens if batch.samples is None else batch.samples
    unit = "tokens" if batch.samples is None else "chunks" if batch.in_chunks else "samples"
    shown = repr(value) if isinstance(value, Ramp) else f"{value:,}"
    return f"{shown} {unit}, context {batch.context:,}"


def _mixture(mixture: object) -> str:
    text = repr(dict(mixture)) if isinstance(mixture, dict) else repr(mixture)
    return text if len(text) <= 80 else text[:77] + "..."
