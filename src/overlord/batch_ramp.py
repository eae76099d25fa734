"""Sizes of a batch by step: ``Batch(samples=ov.schedule.linear(64, 256, steps=1000))``. Pure.

The size of a step follows from its number alone, in whole numbers, so every process computes the
same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from overlord.checks import is_int
from overlord.errors import JobError


class Ramp:
    """A whole number of at least 1 for every step; ``ov.schedule`` makes ramps from numbers."""

    __slots__ = ()
    kind: ClassVar[str]

    def at(self, step: int) -> int:
        """Return the number of a step."""
        raise NotImplementedError

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers that were given; those of all steps are between them."""
        raise NotImplementedError

    @property
    def unit(self) -> int:
        """A number of which the numbers of all steps are multiples."""
        return 1

    @property
    def most(self) -> int:
        """The largest number of a step."""
        return max(self.numbers)

    def parameters(self) -> dict[str, Any]:
        """Return the arguments that make an equal ramp, without those at their default."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        defaults = {f.name: f.default for f in fields(self)}  # type: ignore[arg-type]
        return {
            name: value
            for name, value in found.items()
            if defaults[name] is MISSING or value != defaults[name]
        }

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.parameters().items())
        return f"{self.kind}({given})"


@dataclass(frozen=True, slots=True, repr=False)
class LinearRamp(Ramp):
    """A ramp in equal steps, rounded down to a multiple of ``multiple``."""

    kind: ClassVar[str] = "linear"
    start: int
    end: int
    steps: int
    begin: int = 0
    multiple: int = 1

    def __post_init__(self) -> None:
        found = [
            f"{name}: expected a whole number of at least {least}, got {getattr(self, name)!r}"
            for name, least in (
                ("start", 1),
                ("end", 1),
                ("steps", 1),
                ("begin", 0),
                ("multiple", 1),
            )
            if not is_int(getattr(self, name)) or getattr(self, name) < least
        ]
        found = found or [
            f"{name}: expected a multiple of {self.multiple}, got {getattr(self, name)}"
            for name in ("start", "end")
            if getattr(self, name) % self.multiple
        ]
        if found:
            raise JobError(found, "schedule.linear")

    def at(self, step: int) -> int:
        done = min(max(step - self.begin, 0), self.steps)
        exact = self.start + (self.end - self.start) * done // self.steps
        return exact // self.multiple * self.multiple

    @property
    def numbers(self) -> tuple[int, ...]:
        return self.start, self.end

    @property
    def unit(self) -> int:
        return self.multiple


@dataclass(frozen=True, slots=True, repr=False)
class StagedRamp(Ramp):
    """A number for each range of steps, by the first step of the range."""

    kind: ClassVar[str] = "staged"
    stages: Any  # given as a mapping; stored as pairs (first step, number), in order

    def __post_init__(self) -> None:
        given = dict(self.stages)
        found = [
            f"stages: expected the first step of a range, a whole number of at least 0, got {k!r}"
            for k in given
            if not is_int(k) or k < 0
        ]
        found += [
            f"stages[{k!r}]: expected a whole number of at least 1, got {n!r}"
            for k, n in given.items()
            if not is_int(n) or n < 1
        ]
        if not found and 0 not in given:
            found.append(f"stages: expected a number from step 0 on, got one from {min(given)} on")
        if found:
            raise JobError(found, "schedule.staged")
        object.__setattr__(self, "stages", tuple(sorted(given.items())))

    def at(self, step: int) -> int:
        found: int = self.stages[bisect_right([k for k, _ in self.stages], step) - 1][1]
        return found

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(n for _, n in self.stages)

    @property
    def unit(self) -> int:
        return math.gcd(*self.numbers)

    def parameters(self) -> dict[str, Any]:
        return {"stages": dict(self.stages)}
