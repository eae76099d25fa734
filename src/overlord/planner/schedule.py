"""Mixing schedules: the weights of the sources as a function of the step and of what the trainer reported.

A schedule is any ``schedule(step, feedback) -> weights``, weights by source name (what is not named weighs nothing) or
one for every source in order. It must be a pure function of its arguments: it is called again on replay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

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
    """What a schedule said, checked, as one weight for every source in order. Numbers of numpy are numbers."""
    given = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(given, (Mapping, Sequence)):
        raise JobError([f"mixture: wanted weights, by source name or one for each source, found {weights!r}"], "mixture")
    if not isinstance(given, Mapping):
        if len(given) != len(names):
            raise JobError([f"mixture: wanted {len(names)} weights, one for each source, found {len(given)}"], "mixture")
        given = dict(zip(names, given, strict=True))
    given = {name: plain(weight) for name, weight in given.items()}
    known = [given.get(name, 0.0) for name in names]
    # Every step asks, so what is right is told at a glance; what is wrong may take its time to be named.
    right = all(type(w) is float and 0 <= w < math.inf for w in known) and any(known) and len(given.keys() & set(names)) == len(given)
    if not right and (problems := mixture_problems(given, names)):
        raise JobError(problems, "mixture")
    return [float(w) for w in known]


def plain(weight: Any) -> Any:
    """A number of whatever library as a float; anything else as it is, for the check to name it."""
    return float(weight) if isinstance(weight, (int, float, np.integer, np.floating)) and not isinstance(weight, bool) else weight
