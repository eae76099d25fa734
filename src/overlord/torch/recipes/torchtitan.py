"""torchtitan 0.3: a data loader for its configuration, for training and for validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError

from overlord.errors import JobError
from overlord.job.job import Job
from overlord.torch.adapters import torchtitan
from overlord.torch.loader import Loader
from overlord.torch.recipes.step_shape import fixed_microbatches


def use(config: Any, job: Job, evaluation: Job | None = None, **launch_options: Any) -> Any:
    """Set a ``Trainer.Config`` to train on a job and to validate on another; return it.

    An optimizer step is a step of the job. ``config.training`` gets the sequence length, batch
    sizes and steps of the job. Call ``config.build()`` afterwards.
    """
    ranks = job.place.dp
    config.dataloader = JobDataLoader.Config(job=job, options=launch_options)
    config.training.seq_len = max(part.batch.context for part in job.batches.parts)
    config.training.local_batch_size = 1  # one microbatch, [1, tokens]
    config.training.global_batch_size = ranks * fixed_microbatches(job, "torchtitan")
    if job.end_step is not None:
        config.training.steps = job.end_step
    if evaluation is not None:
        config.validator.enable, config.validator.steps = True, -1  # a whole pass, on all ranks
        config.validator.dataloader = JobDataLoader.Config(job=evaluation, options=launch_options)
    return config


class JobDataLoader(BaseDataLoader):  # type: ignore[misc]
    """A ``BaseDataLoader`` of torchtitan over the microbatches of a job.

    A validator builds one for each pass; they share one ``Loader``, which begins anew.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """The job; ``infinite`` is set by the validator and has no effect."""

        job: Job
        options: dict[str, Any] = field(default_factory=dict)
        infinite: bool = True

        def to_dict(self) -> dict[str, Any]:
            """Return a summary for logs."""
            return {"job": self.job.name}

    def __init__(self, config: Config, *, dp_world_size: int, seq_len: int, **_: Any):
        job = config.job
        if job.place.dp != dp_world_size:
            raise JobError(
                [
                    f"place: expected dp={dp_world_size}, the ranks of torchtitan's batch mesh, "
                    f"got {job.place}; write Mesh(dp=dp_replicate * dp_shard, cp=cp, tp=tp)"
                ],
                "torchtitan",
            )
        self._loader, self._ends = _loader_of(config, seq_len), not job.evaluation

    def __iter__(self) -> Iterator[Any]:
        yield from self._loader
        if self._ends:
            raise DataloaderExhaustedError()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last trained step, with the same keys on every rank."""
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, on any number of ranks."""
        self._loader.load_state_dict(state_dict)


_evaluations: dict[int, Loader] = {}


def _loader_of(config: JobDataLoader.Config, seq_len: int) -> Loader:
    """Return a loader of microbatches; for an evaluation the same at each call."""
    made = partial(
        Loader,
        config.job,
        microbatches=True,
        transform=partial(torchtitan.flat, tokens=seq_len),
        **config.options,
    )
    if not config.job.evaluation:
        return made()
    if id(config.job) not in _evaluations:
        _evaluations[id(config.job)] = made()
    return _evaluations[id(config.job)]
