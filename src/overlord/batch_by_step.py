"""The batch of every step of a job: of its stages, with the sizes of ramps. Pure."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

from overlord.batch_ramp import Ramp
from overlord.mesh import SIZES, Batch


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The batch from step ``first`` on; its ramps count steps from ``origin``."""

    first: int
    batch: Batch
    origin: int = 0
    name: str | None = None  # of the stage

    def at(self, step: int) -> Batch:
        return self.batch.at(step - self.origin)

    @property
    def most(self) -> Batch:
        """The batch of the largest step, without ramps."""
        ramps = ((name, getattr(self.batch, name)) for name in SIZES)
        sizes: Any = {name: ramp.most for name, ramp in ramps if isinstance(ramp, Ramp)}
        return replace(self.batch, **sizes)


@dataclass(frozen=True, slots=True)
class BatchByStep:
    """The batches of a job; those of a job without stages have one part."""

    parts: tuple[BatchPart, ...]
    staged: bool = False  # whether the parts are stages of the job

    @staticmethod
    def of(batch: Batch | BatchByStep) -> BatchByStep:
        """Return the batches of a job whose batch has no stages; ``BatchByStep`` is unchanged."""
        return batch if isinstance(batch, BatchByStep) else BatchByStep((BatchPart(0, batch),))

    def number(self, step: int) -> int:
        """Return the number of the part to which a step belongs."""
        return max(0, bisect_right([part.first for part in self.parts], step) - 1)

    def at(self, step: int) -> Batch:
        """Return the batch of a step, without ramps."""
        return self.parts[self.number(step)].at(step)

    def stage(self, step: int) -> str | int | None:
        """Return the name of a step's stage, or its number; None for a job without stages."""
        number = self.number(step)
        return (self.parts[number].name or number) if self.staged else None

    @property
    def largest_number(self) -> int:
        """The number of the part with the largest steps."""
        return max(range(len(self.parts)), key=lambda k: size_of(self.parts[k].most))

    @property
    def largest(self) -> Batch:
        """The batch of the largest step of all, without ramps, for estimates of memory and load."""
        return self.parts[self.largest_number].most


def size_of(batch: Batch) -> tuple[int, int]:
    """Return the samples or tokens of a step and its context, to compare batches of a job."""
    return batch.tokens_of_chunks or batch.tokens or batch.samples, batch.context
