"""Base class of the built-in schedules: inner schedules, names, state, and argument checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Protocol, Self

from overlord.errors import JobError
from overlord.job.mixture_weights import mixture_problems

Feedback = Mapping[str, float]
Weights = Mapping[str, float] | Sequence[float]


class Schedule(Protocol):
    """A function ``schedule(step, feedback) -> weights``.

    It is called once for every planned step, in step order.
    """

    def __call__(self, step: int, feedback: Feedback) -> Weights: ...


Part = Mapping[str, float] | Schedule  # accepted wherever a schedule needs weights


class Base:
    """A built-in schedule; subclasses are frozen dataclasses whose fields are its parameters.

    Schedules with equal parameters are equal; their learned state is not a parameter.
    """

    __slots__ = ()
    kind: ClassVar[str]

    def __repr__(self) -> str:
        return self._written(repr)

    @property
    def fingerprint(self) -> str:
        """Text of the parameters for comparison with a saved state, the same in every process."""
        return self._written(stable)

    def _written(self, form: Callable[[Any], str]) -> str:
        given = {
            name: dict(v.weights) if isinstance(v, Constant) else v
            for name, v in self.parameters().items()
        }
        return f"{self.kind}({', '.join(f'{name}={form(value)}' for name, value in given.items())})"

    def parameters(self) -> dict[str, Any]:
        """Return the arguments that make an equal schedule, without those at their default."""
        given = {f.name: (getattr(self, f.name), f.default) for f in fields(self) if f.init}  # type: ignore[arg-type]
        return {
            name: value
            for name, (value, default) in given.items()
            if default is MISSING or value != default
        }

    def parts(self) -> dict[str, Any]:
        """Return the inner schedules by name; ``state_dict`` uses the same names."""
        return {f.name: value for f in fields(self) if callable(value := getattr(self, f.name))}  # type: ignore[arg-type]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the sources that the arguments mention."""
        return tuple(
            dict.fromkeys(
                name for part in self.parts().values() for name in getattr(part, "sources", ())
            )
        )

    def bound(self, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Self:
        """Return this schedule with defaults from the job: weights and rows of its sources.

        ``rows``: number of rows by source; None: unknown without reading the source.
        """
        inner = {name: bind(part, weights, rows) for name, part in self.parts().items()}
        changed = {name: part for name, part in inner.items() if part is not getattr(self, name)}
        return replace(self, **changed) if changed else self  # type: ignore[type-var]

    @property
    def takes_feedback(self) -> bool:
        """Whether reports of trainers change the weights."""
        return any(learns(part) for part in self.parts().values())

    def state_dict(self) -> dict[str, Any]:
        """Return the learned state, as plain JSON values; empty if the schedule does not learn."""
        kept = {key: part.state_dict() for key, part in self.parts().items() if has_state(part)}
        return {key: state for key, state in kept.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        parts = self.parts()
        if unknown := [key for key in state if not has_state(parts.get(key))]:
            raise ValueError(
                f"schedule {self.kind}: expected the state of such a schedule, got the state of "
                f"another schedule, with {unknown[0]!r}"
            )
        for key, inner in state.items():
            parts[key].load_state_dict(inner)


@dataclass(frozen=True, slots=True, repr=False)
class Constant(Base):
    """A schedule with the same weights at every step.

    Plain weights inside other schedules become objects of this class.
    """

    kind: ClassVar[str] = "constant"
    # given as a mapping; stored as pairs (name, weight), sorted by name
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
    """The check of a schedule's arguments; ``done`` raises one error that lists all problems."""

    def __init__(self, schedule: Base):
        self.schedule = schedule
        self.found: list[str] = []

    def done(self) -> None:
        if self.found:
            raise JobError(self.found, f"schedule.{self.schedule.kind}")

    def set(self, name: str, value: Any) -> None:
        """Set a field of the schedule to its checked form, although the dataclass is frozen."""
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
        # A copy of a Constant has pairs in place of the mapping.
        if isinstance(value, Mapping) or (
            isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value)
        ):
            return True
        self.found.append(f"{name}: expected a mapping of source name to number, got {value!r}")
        return False

    def part(self, name: str, value: Any) -> Any:
        """Return weights as a ``Constant``, or the given schedule itself; record any problem."""
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
                f"{name}: expected a schedule without prefer(), got {value!r}; make it the outer "
                "schedule, and pass this one as its weights"
            )
        return value

    def set_parts(self, *names: str) -> None:
        for name in names:
            self.set(name, self.part(name, getattr(self.schedule, name)))


def bind(part: Any, weights: Mapping[str, float], rows: Mapping[str, int | None]) -> Any:
    """Return ``part.bound(weights, rows)``: a schedule with defaults from the job.

    Schedules and weights without ``bound`` are returned unchanged.
    """
    return part.bound(weights, rows) if callable(getattr(part, "bound", None)) else part


def has_state(part: Any) -> bool:
    return callable(getattr(part, "state_dict", None)) and callable(
        getattr(part, "load_state_dict", None)
    )


def learns(part: Any) -> bool:
    """Return whether a schedule uses reports: its ``takes_feedback``, else whether it has a state.

    A plain function of the step does not.
    """
    given = getattr(part, "takes_feedback", None)
    return has_state(part) if given is None else bool(given)


def follows_from_step(part: Any) -> bool:
    """Return whether a schedule is built in, inner ones included, and uses no reports.

    Such a schedule may be called for any step, in any order.
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
    """Return weights scaled to the sum 1; at least one must be above 0.

    The result is equal on every machine: one rounding per operation, and an exactly rounded sum.
    """
    top = max(weights.values())
    scaled = {name: weight / top for name, weight in weights.items()}
    total = math.fsum(scaled.values())
    return {name: weight / total for name, weight in scaled.items()}


def named(given: Weights, step: int, where: str) -> Mapping[str, float]:
    """Return ``given``, the weights of an inner schedule; raise unless valid and by source name.

    A list is refused, since schedules do not receive the order of the sources.
    """
    if not isinstance(given, Mapping):
        raise JobError(
            [f"{where}: expected weights by source name at step {step}, got {given!r}"], "schedule"
        )
    right = all(type(w) is float and 0 <= w < math.inf for w in given.values()) and any(
        given.values()
    )
    if not right and (problems := weight_problems(given)):
        raise JobError(
            [f"{where}: at step {step}, {p.removeprefix('mixture: ')}" for p in problems],
            "schedule",
        )
    return given


def is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def stable(value: Any) -> str:
    """Return a value as text that is the same in every process.

    It is the ``fingerprint`` if the value has one, else its ``repr``. A ``repr`` with a memory
    address is replaced by the name of the function or type.
    """
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {stable(inner)}" for key, inner in value.items()) + "}"
    if isinstance(given := getattr(value, "fingerprint", None), str):
        return given
    text = repr(value)
    if " at 0x" not in text:
        return text
    what = value if hasattr(value, "__qualname__") else type(value)
    return f"{what.__module__}.{what.__qualname__}"
