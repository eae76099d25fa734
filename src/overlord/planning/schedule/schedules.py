"""Schedules by step alone: constant, staged, linear, cosine, temperature.

Weights are relative: only their ratios are drawn. A ramp goes from the shares of one mixture to
those of another, so that it is even whatever the two sum to; at its ends, and beyond, the weights
are exactly the ones that were given. Everywhere that weights are asked for, another schedule may
stand in their place.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from overlord.errors import JobError
from overlord.planning import integer_math
from overlord.planning.schedule.base import (
    Base,
    Check,
    Constant,
    Feedback,
    Part,
    bind,
    is_real,
    named,
    shares,
)


def constant(weights: Mapping[str, float]) -> Constant:
    """The same weights at every step."""
    return Constant(weights)


@dataclass(frozen=True, slots=True, repr=False)
class Staged(Base):
    kind: ClassVar[str] = "staged"
    stages: Any  # pairs (first step, schedule), in order

    def __post_init__(self) -> None:
        check = Check(self)
        given = dict(self.stages) if isinstance(self.stages, (Mapping, tuple)) else {}
        if not given:
            check.found.append(
                f"stages: expected a mapping of first step to weights, got {self.stages!r}"
            )
        wrong = [
            first
            for first in given
            if not isinstance(first, int) or isinstance(first, bool) or first < 0
        ]
        check.found += [
            "stages: expected the first step of a stage, a whole number of at least 0, "
            f"got {first!r}"
            for first in wrong
        ]
        if given and not wrong and 0 not in given:
            check.found.append(
                f"stages: the first stage begins at step {min(given)}; say what steps "
                "before it draw, from 0 on"
            )
        made = {first: check.part(f"stages[{first!r}]", part) for first, part in given.items()}
        check.done()
        check.set("stages", tuple(sorted(made.items(), key=lambda stage: stage[0])))

    def __call__(self, step: int, feedback: Feedback) -> Any:
        # Every stage is asked at every step, so that one that learns from feedback has learned when
        # its time comes.
        said = [part(step, feedback) for _, part in self.stages]
        return said[bisect_right([first for first, _ in self.stages], step) - 1]

    def parameters(self) -> dict[str, Any]:
        return {
            "stages": {
                first: dict(part.weights) if isinstance(part, Constant) else part
                for first, part in self.stages
            }
        }

    def parts(self) -> dict[str, Any]:
        return {str(first): part for first, part in self.stages}

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Staged:
        return Staged(tuple((first, bind(part, weights, rows)) for first, part in self.stages))


def staged(stages: Mapping[int, Part]) -> Staged:
    """Weights by step ranges: ``staged({0: {"web": 1}, 1000: {"web": 1, "code": 1}})``; each holds
    until the next begins.
    """
    return Staged(stages)


@dataclass(frozen=True, slots=True, repr=False)
class Ramp(Base):
    """From one mixture to another over ``steps`` steps from ``begin`` on."""

    start: Any
    end: Any
    steps: int
    begin: int = 0
    curve: ClassVar[Callable[[int, int], float]]

    def __post_init__(self) -> None:
        check = Check(self)
        check.set_parts("start", "end")
        check.whole(1, "steps")
        check.whole(0, "begin")
        check.done()

    def __call__(self, step: int, feedback: Feedback) -> Any:
        # Both are asked at every step: one that learns must see every report.
        first = named(self.start(step, feedback), step, f"{self.kind}.start")
        last = named(self.end(step, feedback), step, f"{self.kind}.end")
        done = min(max(step - self.begin, 0), self.steps)
        if done in (0, self.steps):
            return last if done else first
        return _between(shares(first), shares(last), type(self).curve(done, self.steps))


def _between(first: Mapping[str, float], last: Mapping[str, float], t: float) -> dict[str, float]:
    """Shares on the way; held between their ends, which rounding could pass by a bit."""
    out = {}
    for name in sorted({*first, *last}):
        a, b = first.get(name, 0.0), last.get(name, 0.0)
        out[name] = min(max(a + (b - a) * t, min(a, b)), max(a, b))
    return out


@dataclass(frozen=True, slots=True, repr=False)
class Linear(Ramp):
    kind: ClassVar[str] = "linear"
    curve: ClassVar[Callable[[int, int], float]] = staticmethod(lambda k, n: k / n)


@dataclass(frozen=True, slots=True, repr=False)
class Cosine(Ramp):
    kind: ClassVar[str] = "cosine"
    curve: ClassVar[Callable[[int, int], float]] = staticmethod(integer_math.half_cosine)


def linear(start: Part, end: Part, steps: int, begin: int = 0) -> Linear:
    """From ``start`` to ``end`` in equal steps: ``end`` is reached at step ``begin + steps``."""
    return Linear(start, end, steps, begin)


def cosine(start: Part, end: Part, steps: int, begin: int = 0) -> Cosine:
    """From ``start`` to ``end`` along half a cosine: slow at both ends, fastest in the middle."""
    return Cosine(start, end, steps, begin)


@dataclass(frozen=True, slots=True, repr=False)
class Temperature(Base):
    kind: ClassVar[str] = "temperature"
    tau: float = 1.0
    sizes: Any = (
        None  # pairs (name, size), sorted; None: rows of the sources, when the job is launched
    )
    end_tau: float | None = None
    steps: int | None = None
    begin: int = 0
    logs: Any = field(
        default=(), init=False, compare=False
    )  # logarithm of each size over the largest; None where the size is 0

    def __post_init__(self) -> None:
        check = Check(self)
        ramped = self.end_tau is not None or self.steps is not None
        if ramped and (self.end_tau is None or self.steps is None):
            check.found.append("end_tau, steps: a ramp of the temperature needs both")
        elif ramped:
            check.real("a finite number above 0", lambda tau: 0 < tau < math.inf, "tau", "end_tau")
            check.whole(1, "steps")
        else:
            check.real("a number above 0 (infinity: all sources alike)", lambda tau: tau > 0, "tau")
        check.whole(0, "begin")
        if self.sizes is not None and check.mapping("sizes", self.sizes):
            check.found += _size_problems(dict(self.sizes))
        check.done()
        if self.sizes is not None:
            self._take_sizes(check)

    def _take_sizes(self, check: Check) -> None:
        sizes = tuple(sorted((name, float(size)) for name, size in dict(self.sizes).items()))
        logs = [integer_math.log(size) if size else None for _, size in sizes]
        top = max(value for value in logs if value is not None)
        check.set("sizes", sizes)
        check.set("logs", tuple(None if value is None else value - top for value in logs))

    def __call__(self, step: int, feedback: Feedback) -> dict[str, float]:
        if self.sizes is None:
            raise JobError(
                ["sizes: not known outside a job; give sizes={name: rows or tokens}"],
                "schedule.temperature",
            )
        tau = self.tau
        if self.end_tau is not None and self.steps is not None:
            done = min(max(step - self.begin, 0), self.steps)
            tau = (
                self.end_tau
                if done == self.steps
                else tau + (self.end_tau - tau) * (done / self.steps)
            )
        if tau == 1:
            return dict(self.sizes)
        power = 1 / tau
        powers = (
            0.0 if value is None else integer_math.power_below_one(value, power)
            for value in self.logs
        )
        return {name: weight for (name, _), weight in zip(self.sizes, powers, strict=True)}

    def parameters(self) -> dict[str, Any]:
        given = Base.parameters(self)
        return given if self.sizes is None else {**given, "sizes": dict(self.sizes)}

    @property
    def sources(self) -> tuple[str, ...]:
        return () if self.sizes is None else tuple(name for name, _ in self.sizes)

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Temperature:
        if self.sizes is not None:
            return self
        if unread := [name for name in weights if rows.get(name) is None]:
            some = ", ".join(unread[:5]) + (", ..." if len(unread) > 5 else "")
            raise JobError(
                [
                    f"sizes: how many rows {some} has is known only by reading it; give "
                    f"sizes={{name: rows}}"
                ],
                "schedule.temperature",
            )
        return replace(self, sizes={name: rows[name] for name in weights})


def _size_problems(sizes: Mapping[Any, Any]) -> list[str]:
    found = [
        f"sizes: expected the name of a source, got {name!r}"
        for name in sizes
        if not isinstance(name, str) or not name
    ]
    wrong = {
        name: size for name, size in sizes.items() if not is_real(size) or not 0 <= size < math.inf
    }
    found += [
        f"sizes: the size of {name!r} must be a finite number of at least 0, got {size!r}"
        for name, size in wrong.items()
    ]
    return (
        found
        if found or any(sizes.values())
        else ["sizes: all are zero, so no sample would ever be drawn"]
    )


def temperature(
    tau: float = 1.0,
    sizes: Mapping[str, float] | None = None,
    end_tau: float | None = None,
    steps: int | None = None,
    begin: int = 0,
) -> Temperature:
    """Weights ``size ** (1/tau)``: 1 draws in proportion, more lifts small sources, infinity draws
    all alike.

    ``sizes`` are rows, tokens or bytes; left out, the rows of the files, where their format tells
    them. With ``end_tau`` and ``steps`` the temperature goes from ``tau`` to ``end_tau`` in equal
    steps from ``begin`` on.
    """
    return Temperature(tau, sizes, end_tau, steps, begin)
