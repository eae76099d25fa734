"""Schedules by step alone: constant, staged, linear, cosine, temperature.

``staged`` and ``linear`` of numbers are ramps, for the size of a batch.

Only the ratios of weights matter. A ramp goes from the shares of one mixture to those of another,
so the sums of their weights do not matter either. At its ends, and beyond, the weights are exactly
the given ones. Every argument that takes weights also takes another schedule.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from overlord.batch_ramp import LinearRamp, StagedRamp
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
    """Return a schedule with the same weights at every step."""
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
                f"stages: expected a first stage at step 0, got the first at step {min(given)}; "
                "give weights from step 0 on"
            )
        made = {first: check.part(f"stages[{first!r}]", part) for first, part in given.items()}
        check.done()
        check.set("stages", tuple(sorted(made.items(), key=lambda stage: stage[0])))

    def __call__(self, step: int, feedback: Feedback) -> Any:
        # Every stage is called at every step, so that one that learns receives every report.
        weights = [part(step, feedback) for _, part in self.stages]
        return weights[bisect_right([first for first, _ in self.stages], step) - 1]

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


def staged(stages: Mapping[int, Any]) -> Any:
    """Return a schedule with weights by step ranges; ``stages`` maps first steps to weights.

    Each entry is in force until the next one starts, as in
    ``staged({0: {"web": 1}, 1000: {"web": 1, "code": 1}})``. An entry for step 0 is required. With
    whole numbers instead of weights, return a ramp for ``Batch.samples`` or ``Batch.tokens``.
    """
    if isinstance(stages, Mapping) and stages and all(map(is_real, stages.values())):
        return StagedRamp(stages)
    return Staged(stages)


@dataclass(frozen=True, slots=True, repr=False)
class Linear(Base):
    """A ramp in equal steps; ``linear`` describes its arguments."""

    kind: ClassVar[str] = "linear"
    start: Any
    end: Any
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        _check_ramp(self)

    def __call__(self, step: int, feedback: Feedback) -> Any:
        return _ramp_weights(self, step, feedback, lambda k, n: k / n)


@dataclass(frozen=True, slots=True, repr=False)
class Cosine(Base):
    """A ramp along half a cosine; ``cosine`` describes its arguments."""

    kind: ClassVar[str] = "cosine"
    start: Any
    end: Any
    steps: int
    begin: int = 0

    def __post_init__(self) -> None:
        _check_ramp(self)

    def __call__(self, step: int, feedback: Feedback) -> Any:
        return _ramp_weights(self, step, feedback, integer_math.half_cosine)


def _check_ramp(ramp: Linear | Cosine) -> None:
    check = Check(ramp)
    check.set_parts("start", "end")
    check.whole(1, "steps")
    check.whole(0, "begin")
    check.done()


def _ramp_weights(
    ramp: Linear | Cosine, step: int, feedback: Feedback, curve: Callable[[int, int], float]
) -> Any:
    """Return the weights of a ramp at a step.

    ``curve(k, n)``: the fraction, 0 to 1, of the way from ``start`` to ``end`` after k of n steps.
    """
    # Both ends are called at every step, so that one that learns receives every report.
    first = named(ramp.start(step, feedback), step, f"{ramp.kind}.start")
    last = named(ramp.end(step, feedback), step, f"{ramp.kind}.end")
    done = min(max(step - ramp.begin, 0), ramp.steps)
    if done in (0, ramp.steps):
        return last if done else first
    return _between(shares(first), shares(last), curve(done, ramp.steps))


def _between(first: Mapping[str, float], last: Mapping[str, float], t: float) -> dict[str, float]:
    """Return shares at fraction ``t`` from ``first`` to ``last``; rounding never exceeds these."""
    out = {}
    for name in sorted({*first, *last}):
        a, b = first.get(name, 0.0), last.get(name, 0.0)
        out[name] = min(max(a + (b - a) * t, min(a, b)), max(a, b))
    return out


def linear(start: Any, end: Any, steps: int, begin: int = 0, *, multiple: int = 1) -> Any:
    """Return a ramp from ``start`` to ``end`` in equal steps, from step ``begin`` on.

    It ends at step ``begin + steps``. With whole numbers instead of weights, the ramp is for
    ``Batch.samples`` or ``Batch.tokens``. Its numbers are rounded down to a multiple of
    ``multiple``, of which ``start`` and ``end`` are multiples too.
    """
    if is_real(start) and is_real(end):
        return LinearRamp(start, end, steps, begin, multiple)
    if multiple != 1:
        problem = f"multiple: expected 1 for a ramp of weights, got {multiple!r}; leave it out"
        raise JobError([problem], "schedule.linear")
    return Linear(start, end, steps, begin)


def cosine(start: Part, end: Part, steps: int, begin: int = 0) -> Cosine:
    """Return a ramp from ``start`` to ``end`` along half a cosine, fastest in the middle.

    It begins at step ``begin`` and ends at step ``begin + steps``.
    """
    return Cosine(start, end, steps, begin)


@dataclass(frozen=True, slots=True, repr=False)
class Temperature(Base):
    kind: ClassVar[str] = "temperature"
    tau: float = 1.0
    # pairs (name, size), sorted; None: rows of the sources, set at launch
    sizes: Any = None
    end_tau: float | None = None
    steps: int | None = None
    begin: int = 0
    # logarithm of each size over the largest; None if the size is 0
    logs: Any = field(default=(), init=False, compare=False)

    def __post_init__(self) -> None:
        check = Check(self)
        ramped = self.end_tau is not None or self.steps is not None
        if ramped and (self.end_tau is None or self.steps is None):
            check.found.append(
                "end_tau, steps: expected both for a ramp of the temperature, got one of them"
            )
        elif ramped:
            check.real("a finite number above 0", lambda tau: 0 < tau < math.inf, "tau", "end_tau")
            check.whole(1, "steps")
        else:
            check.real("a number above 0 (infinity: equal weights)", lambda tau: tau > 0, "tau")
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
                    f"sizes: expected formats that store their number of rows, got {some} without "
                    f"it; give sizes={{name: rows}}"
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
        f"sizes: the size of {name!r}: expected a finite number of at least 0, got {size!r}"
        for name, size in wrong.items()
    ]
    return (
        found
        if found or any(sizes.values())
        else ["sizes: expected at least one above 0, got only zeros"]
    )


def temperature(
    tau: float = 1.0,
    sizes: Mapping[str, float] | None = None,
    end_tau: float | None = None,
    steps: int | None = None,
    begin: int = 0,
) -> Temperature:
    """Return a schedule with weights ``size ** (1/tau)``.

    A ``tau`` of 1 gives weights proportional to the sizes, and infinity gives equal weights. Larger
    values favour small sources.

    ``sizes`` are rows, tokens or bytes by source. The default is the number of rows, if the format
    of the files stores it. With ``end_tau`` and ``steps`` the temperature goes from ``tau`` to
    ``end_tau`` in ``steps`` equal steps from step ``begin`` on.
    """
    return Temperature(tau, sizes, end_tau, steps, begin)
