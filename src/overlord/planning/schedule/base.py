"""What all schedules of the library share: their parts, their names, their state, and one check
that lists every problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

from overlord.errors import JobError
from overlord.job.job import mixture_problems

Feedback = Mapping[str, float]
Weights = Mapping[str, float] | Sequence[float]


class Schedule(Protocol):
    """``schedule(step, feedback) -> weights``. Called once for every planned step, in step
    order.
    """

    def __call__(self, step: int, feedback: Feedback) -> Weights: ...


Part = Mapping[str, float] | Schedule  # what may stand where a schedule asks for weights


class Base:
    """A schedule as a frozen dataclass: equal parameters, equal schedules; what it learned is no
    parameter.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def __repr__(self) -> str:
        return self._written(repr)

    @property
    def fingerprint(self) -> str:
        """What a saved state is compared by, the same in every process."""
        return self._written(stable)

    def _written(self, form: Callable[[Any], str]) -> str:
        given = {
            name: dict(v.weights) if isinstance(v, Constant) else v
            for name, v in self.parameters().items()
        }
        return f"{self.kind}({', '.join(f'{name}={form(value)}' for name, value in given.items())})"

    def parameters(self) -> dict[str, Any]:
        """The arguments that make this schedule again, without those that stand at their
        defaults.
        """
        given = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.init}  # type: ignore[arg-type]
        return {
            name: value
            for name, (value, default) in given.items()
            if default is MISSING or value != default
        }

    def parts(self) -> dict[str, Any]:
        """The schedules inside this one, by the name they have in its state."""
        return {f.name: value for f in fields(self) if callable(value := getattr(self, f.name))}  # type: ignore[arg-type]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of sources that it weighs, as far as it was told them."""
        return tuple(
            dict.fromkeys(
                name for part in self.parts().values() for name in getattr(part, "sources", ())
            )
        )

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Self:
        """This schedule with what only the job knows filled in: the sources' own weights, and their
        sizes in rows.
        """
        inner = {name: bind(part, weights, rows) for name, part in self.parts().items()}
        changed = {name: part for name, part in inner.items() if part is not getattr(self, name)}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    @property
    def takes_feedback(self) -> bool:
        """Whether reports change what it says: where they do not, planning need not wait for
        them.
        """
        return any(learns(part) for part in self.parts().values())

    def state_dict(self) -> dict[str, Any]:
        """What it learned, as plain JSON values; nothing where it learns nothing."""
        kept = {key: part.state_dict() for key, part in self.parts().items() if has_state(part)}
        return {key: state for key, state in kept.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = self.parts()
        if unknown := [key for key in state if not has_state(parts.get(key))]:
            raise ValueError(
                f"schedule {self.kind}: the state is of another schedule, it has {unknown[0]!r}"
            )
        for key, inner in state.items():
            parts[key].load_state_dict(inner)


@dataclass(frozen=True, slots=True, repr=False)
class Constant(Base):
    """The same weights at every step; also how weights stand inside other schedules."""

    kind: ClassVar[str] = "constant"
    # pairs (name, weight), sorted by name: the order in which they were given means nothing
    weights: Any

    def __post_init__(self) -> None:
        check = Check(self)
        if check.mapping("weights", self.weights):
            check.found += [
                f"weights{p.removeprefix('mixture')}" for p in weight_problems(self.weights)
            ]
        check.done()
        check.set(
            "weights",
            tuple(sorted((name, float(weight)) for name, weight in dict(self.weights).items())),
        )

    def __call__(self, step: int, feedback: Feedback) -> dict[str, float]:
        return dict(self.weights)

    def parameters(self) -> dict[str, Any]:
        return {"weights": dict(self.weights)}

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.weights)


class Check:
    """Collects what is wrong with the arguments of a schedule, so that all of it is said at
    once.
    """

    def __init__(self, schedule: Base):
        self.schedule = schedule
        self.found: list[str] = []

    def done(self) -> None:
        if self.found:
            raise JobError(self.found, f"schedule.{self.schedule.kind}")

    def set(self, name: str, value: Any) -> None:
        """A field in its checked form; the object is frozen once it is made."""
        object.__setattr__(self.schedule, name, value)

    def whole(self, least: int, *names: str) -> None:
        for name in names:
            value = getattr(self.schedule, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                self.found.append(
                    f"{name}: expected a whole number of at least {least}, got {value!r}"
                )

    def real(self, wanted: str, fits: Callable[[float], bool], *names: str) -> bool:
        before = len(self.found)
        for name in names:
            value = getattr(self.schedule, name)
            if not is_real(value) or not fits(value):
                self.found.append(f"{name}: expected {wanted}, got {value!r}")
            else:
                self.set(name, float(value))
        return len(self.found) == before

    def text(self, *names: str) -> None:
        for name in names:
            if not isinstance(value := getattr(self.schedule, name), str) or not value:
                self.found.append(f"{name}: expected a name, got {value!r}")

    def mapping(self, name: str, value: Any) -> bool:
        # A made Constant is copied with pairs in place of the mapping.
        if isinstance(value, Mapping) or (
            isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value)
        ):
            return True
        self.found.append(f"{name}: expected a mapping of source name to number, got {value!r}")
        return False

    def part(self, name: str, value: Any) -> Any:
        """Weights as a schedule, or the schedule that stands in their place."""
        if isinstance(value, Mapping):
            try:
                return Constant(value)
            except JobError as fault:
                self.found += [name + problem.removeprefix("weights") for problem in fault.problems]
        elif not callable(value) or isinstance(value, type):
            self.found.append(
                f"{name}: expected weights by source name or a schedule, got {value!r}"
            )
        elif hasattr(value, "prefer"):
            self.found.append(
                f"{name}: {value!r} chooses samples, so it stands outermost; give it this "
                "schedule as its weights"
            )
        return value

    def set_parts(self, *names: str) -> None:
        for name in names:
            self.set(name, self.part(name, getattr(self.schedule, name)))


def bind(part: Any, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Any:
    """A mixture with what only the job knows filled in; a schedule that asks for nothing stays as
    it is.
    """
    return part.bound(weights, rows) if callable(getattr(part, "bound", None)) else part


def has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )


def learns(part: Any) -> bool:
    """A schedule says so (``takes_feedback``), or has a state; a plain function of the step does
    not.
    """
    said = getattr(part, "takes_feedback", None)
    return has_state(part) if said is None else bool(said)


def follows_from_step(part: Any) -> bool:
    """Whether its weights are a function of the step alone, with nothing of the user's in it: then
    it may be asked about any step.
    """
    return (
        isinstance(part, Base)
        and not learns(part)
        and all(follows_from_step(inner) for inner in part.parts().values())
    )


def weight_problems(weights: Any) -> list[str]:
    given = dict(weights)
    wrong = [
        f"mixture: expected the name of a source, got {name!r}"
        for name in given
        if not isinstance(name, str) or not name
    ]
    return wrong + mixture_problems(given, given)


def shares(weights: Mapping[str, float]) -> dict[str, float]:
    """Weights that sum to 1. One rounding per operation and an exactly rounded sum: equal on every
    machine.
    """
    top = max(weights.values())
    scaled = {name: weight / top for name, weight in weights.items()}
    total = math.fsum(scaled.values())
    return {name: weight / total for name, weight in scaled.items()}


def named(said: Weights, step: int, where: str) -> Mapping[str, float]:
    """What a schedule inside another one said, which must be by name: only the job knows the order
    of its sources.
    """
    if not isinstance(said, Mapping):
        raise JobError(
            [f"{where}: expected weights by source name at step {step}, got {said!r}"], "schedule"
        )
    right = all(type(w) is float and 0 <= w < math.inf for w in said.values()) and any(
        said.values()
    )
    if not right and (problems := weight_problems(said)):
        raise JobError(
            [f"{where}: at step {step}, {p.removeprefix('mixture: ')}" for p in problems],
            "schedule",
        )
    return said


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def stable(value: Any) -> str:
    """A value as text without addresses: a function without a ``fingerprint`` goes by its name."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {stable(inner)}" for key, inner in value.items()) + "}"
    if isinstance(said := getattr(value, "fingerprint", None), str):
        return said
    text = repr(value)
    if " at 0x" not in text:
        return text
    what = value if hasattr(value, "__qualname__") else type(value)
    return f"{what.__module__}.{what.__qualname__}"
