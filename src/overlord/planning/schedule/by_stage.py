"""The mixture of a job with stages: one schedule that is made of the schedules of all stages.

The job's own schedule counts steps from the start of the job, and is called at every step, so its
learning does not depend on stages. That of a stage is called in its stage alone, with the number
of steps since the start of the stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from overlord.job import stages
from overlord.planning.schedule.base import Base, Constant, Feedback, bind

if TYPE_CHECKING:
    from overlord.job.job import Job

JOB = "job"  # name of the job's own schedule in a state


@dataclass(frozen=True, slots=True, repr=False)
class ByStage(Base):
    """The schedules of a job and of its stages."""

    kind: ClassVar[str] = "by_stage"
    job: Any  # schedule of stages without one
    stages: tuple[tuple[int, Any], ...]  # (first step, schedule or None), in order

    def __call__(self, step: int, feedback: Feedback) -> Any:
        everywhere = self.job(step, feedback)
        number = max(0, bisect_right([first for first, _ in self.stages], step) - 1)
        first, own = self.stages[number]
        return everywhere if own is None else own(step - first, feedback)

    def parts(self) -> dict[str, Any]:
        own = {f"stages[{k}]": part for k, (_, part) in enumerate(self.stages) if part is not None}
        return {JOB: self.job, **own}

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> ByStage:
        raise AssertionError("the schedules are bound before they are joined")


def job_schedule(job: Job, added: tuple[str, ...] = ()) -> Any:
    """Return the mixture of all steps of a job: its weights by name, or a schedule.

    ``added``: sources that were added in mid-run, whose weights the job's mixture does not have.
    """
    mixture = job.mixture
    if mixture is None:
        mixture = {s.name: float(s.weight) for s in job.sources if s.name not in added}
    elif isinstance(mixture, Mapping):
        mixture = {name: float(weight) for name, weight in mixture.items()}
    if all(stage.mixture is None for stage in job.stages):
        return mixture
    firsts = stages.starts(job)
    return ByStage(
        _schedule(mixture),
        tuple(
            (first, None if stage.mixture is None else _schedule(stage.mixture))
            for first, stage in zip(firsts, job.stages, strict=True)
        ),
    )


def _schedule(mixture: Any) -> Any:
    return Constant(mixture) if isinstance(mixture, Mapping) else mixture


def bound_mixtures(
    job: Job, weights: Mapping[str, float], rows: Mapping[str, int | None]
) -> dict[str, Any]:
    """Return the fields of a job whose schedules get defaults from its sources, bound to them."""
    changes: dict[str, Any] = {}
    if (mixture := bind(job.mixture, weights, rows)) is not job.mixture:
        changes["mixture"] = mixture
    own = [bind(stage.mixture, weights, rows) for stage in job.stages]
    if any(new is not stage.mixture for new, stage in zip(own, job.stages, strict=True)):
        changes["stages"] = tuple(
            stage.with_mixture(new) for stage, new in zip(job.stages, own, strict=True)
        )
    return changes


def mixture_starts(job: Job) -> tuple[int, ...]:
    """Return the first steps of the stages with a mixture of their own."""
    firsts = stages.starts(job)
    return tuple(
        first for first, stage in zip(firsts, job.stages, strict=True) if stage.mixture is not None
    )
