"""Mixing schedules: the weights of the sources as a function of the step and of what the trainer reported.

A schedule is any ``schedule(step, feedback) -> weights``, weights by source name (what is not named weighs nothing) or
one for every source in order. It must be a pure function of its arguments: it is called again on replay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from overlord.errors import JobError
from overlord.job import mixture_problems

Feedback = Mapping[Any, Any]
Weights = Mapping[str, float] | Sequence[float]


class Schedule(Protocol):
    def __call__(self, step: int, feedback: Feedback) -> Weights: ...


@dataclass(frozen=True, slots=True)
class Constant:
    """The same weights at every step."""

    weights: tuple[tuple[str, float], ...]

    def __call__(self, step: int, feedback: Feedback) -> dict[str, float]:
        return dict(self.weights)

    @property
    def fingerprint(self) -> str:
        return repr(self)

    def state_dict(self) -> dict[str, Any]:
        return {}


def constant(weights: Mapping[str, float]) -> Constant:
    if problems := mixture_problems(weights, weights):
        raise JobError(problems, "schedule.constant")
    return Constant(tuple((name, float(weight)) for name, weight in weights.items()))


def by_source(weights: Weights, names: Sequence[str]) -> list[float]:
    """What a schedule said, checked, as one weight for every source in order."""
    if not isinstance(weights, Mapping):
        if len(weights) != len(names):
            raise JobError([f"mixture: wanted {len(names)} weights, one for each source, found {len(weights)}"], "mixture")
        weights = dict(zip(names, weights, strict=True))
    if problems := mixture_problems(weights, names):
        raise JobError(problems, "mixture")
    return [float(weights.get(name, 0.0)) for name in names]
