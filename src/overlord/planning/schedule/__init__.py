"""Mixing schedules, as ``ov.schedule``: source weights by step and by trainer reports.

A schedule is any function ``schedule(step, feedback) -> weights``. It returns weights by source
name (sources without one have weight 0), or one weight for every source in order. It is called once
for every planned step, in step order, so it may learn. A schedule that learns has ``state_dict()``
(plain JSON values) and ``load_state_dict(state)``. One with ``prefer(step, candidates) -> scores``
also chooses among look-ahead candidates, the lowest scores first. ``register_schedule`` gives your
schedule a name for job files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from overlord.checks import did_you_mean
from overlord.errors import JobError
from overlord.job.mixture_weights import mixture_problems
from overlord.planning.schedule.base import (
    Base,
    Constant,
    Feedback,
    Part,
    Schedule,
    Weights,
    bind,
    stable,
)
from overlord.planning.schedule.curriculum import (
    Curriculum,
    LengthWarmup,
    curriculum,
    length_warmup,
)
from overlord.planning.schedule.odm import Odm, odm
from overlord.planning.schedule.schedules import (
    Cosine,
    Linear,
    Staged,
    Temperature,
    constant,
    cosine,
    linear,
    staged,
    temperature,
)

__all__ = [
    "Base",
    "Constant",
    "Cosine",
    "Curriculum",
    "Feedback",
    "LengthWarmup",
    "Linear",
    "Odm",
    "Part",
    "Registered",
    "Schedule",
    "Staged",
    "Temperature",
    "Weights",
    "as_float",
    "bind",
    "by_source",
    "constant",
    "cosine",
    "curriculum",
    "length_warmup",
    "linear",
    "make",
    "odm",
    "register_schedule",
    "staged",
    "temperature",
]

BUILT_IN: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "constant": constant,
        "staged": staged,
        "linear": linear,
        "cosine": cosine,
        "temperature": temperature,
        "curriculum": curriculum,
        "length_warmup": length_warmup,
        "odm": odm,
    }
)
_registered: dict[str, Callable[..., Any]] = {}


class Registered:
    """A schedule made by a registered factory.

    It has all attributes of the schedule, and keeps the factory's name and arguments for job files.
    """

    def __init__(self, kind: str, arguments: Mapping[str, Any], made: Any):
        self.kind, self._arguments, self._made = kind, dict(arguments), made

    def __call__(self, step: int, feedback: Feedback) -> Any:
        return self._made(step, feedback)

    def __getattr__(self, name: str) -> Any:
        # the attribute does not exist yet while the object is copied
        if name.startswith("__") or "_made" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._made, name)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Registered)
            and self.kind == other.kind
            and self._arguments == other.parameters()
        )

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._arguments.items())
        return f"{self.kind}({given})"

    @property
    def fingerprint(self) -> str:
        own = getattr(self._made, "fingerprint", None)
        given = ", ".join(f"{name}={stable(value)}" for name, value in self._arguments.items())
        return f"{self.kind}({given})" + (f" {own}" if isinstance(own, str) else "")

    def parameters(self) -> dict[str, Any]:
        return dict(self._arguments)

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Registered:
        made = bind(self._made, weights, rows)
        return self if made is self._made else Registered(self.kind, self._arguments, made)


def register_schedule(name: str, factory: Callable[..., Any]) -> Callable[..., Registered]:
    """Allow job files to use ``mixture: {schedule: name, ...}`` with the factory's arguments.

    Return a function that makes the schedule from these arguments in Python. A name can be
    registered again only for a factory of the same module and name, such as an edited one.
    """
    if not isinstance(name, str) or not name or not callable(factory):
        raise JobError(
            [f"expected a name and a function, got {name!r} and {factory!r}"], "register_schedule"
        )
    known = BUILT_IN.get(name) or _registered.get(name)
    if known is not None and _place(known) != _place(factory):
        raise JobError(
            [f"expected an unused name, got {name!r} of {_place(known)}; choose another name"],
            "register_schedule",
        )
    if name not in BUILT_IN:
        _registered[name] = factory
    return lambda **arguments: make(name, **arguments)


def registered() -> dict[str, Callable[..., Any]]:
    """Return the factories that users registered in this process."""
    return dict(_registered)


def restore(factories: Mapping[str, Callable[..., Any]]) -> None:
    """Register factories that another process has registered."""
    _registered.update(factories)


def factories() -> dict[str, Callable[..., Any]]:
    """Return the factories of all named schedules, built-in and registered."""
    return {**BUILT_IN, **_registered}


def make(name: str, /, **arguments: Any) -> Any:
    """Return the schedule that the factory of a name makes from ``arguments``."""
    if name in BUILT_IN:
        return BUILT_IN[name](**arguments)
    if name not in _registered:
        raise JobError([f"unknown schedule {name!r}{did_you_mean(name, factories())}"], "schedule")
    made = _registered[name](**arguments)
    if not callable(made):
        raise JobError(
            [f"factory of {name!r}: expected a function of step and feedback, got {made!r}"],
            "schedule",
        )
    return Registered(name, arguments, made)


def _place(fn: Any) -> str:
    return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', type(fn).__qualname__)}"


def by_source(weights: Weights, names: Sequence[str]) -> list[float]:
    """Return one weight for every source in order; raise ``JobError`` for invalid weights.

    Sources that a mapping does not name have weight 0. Numbers and arrays of numpy are accepted.
    """
    given = weights.tolist() if hasattr(weights, "tolist") else weights
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, (str, bytes)):
        raise JobError(
            [f"mixture: expected weights, by source name or one for each source, got {weights!r}"],
            "mixture",
        )
    if not isinstance(given, Mapping):
        if len(given) != len(names):
            raise JobError(
                [f"mixture: expected {len(names)} weights, one for each source, got {len(given)}"],
                "mixture",
            )
        given = dict(zip(names, given, strict=True))
    given = {name: as_float(weight) for name, weight in given.items()}
    known = [given.get(name, 0.0) for name in names]
    # Called at every step, so valid weights take a fast check. Only invalid ones are examined in
    # detail.
    right = (
        all(type(w) is float and 0 <= w < math.inf for w in known)
        and any(known)
        and len(given.keys() & set(names)) == len(given)
    )
    if not right and (problems := mixture_problems(given, names)):
        raise JobError(problems, "mixture")
    return [float(w) for w in known]


def as_float(weight: Any) -> Any:
    """Return a number of Python or numpy as a float, and any other value unchanged."""
    return (
        float(weight)
        if isinstance(weight, (int, float, np.integer, np.floating))
        and not isinstance(weight, bool)
        else weight
    )
