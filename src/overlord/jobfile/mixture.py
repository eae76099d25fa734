"""Reading and writing of the mixture of a job file.

``mixture: {schedule: cosine, start: {...}, end: {...}, steps: 1000}``: a mapping with the key
``schedule`` is a schedule, wherever weights are allowed. Its other keys are the arguments of the
function of that name in ``ov.schedule``, or of the factory given to ``register_schedule``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from overlord.batch_ramp import Ramp
from overlord.checks import describe_error, did_you_mean
from overlord.errors import JobError
from overlord.jobfile.yaml_scalars import short_repr
from overlord.planning.schedule import BUILT_IN, Registered, factories, make
from overlord.planning.schedule.base import Base, Constant, Feedback, is_real


def is_schedule(plain: Any) -> bool:
    """Return whether a mapping is a schedule, not weights that name a source "schedule"."""
    return isinstance(plain, Mapping) and "schedule" in plain and not is_real(plain["schedule"])


def read_mixture(plain: Any, at: str, problems: list[str]) -> Any:
    """Return weights unchanged, or the schedule that the mapping at key ``at`` describes.

    If a schedule cannot be made, return ``invalid_schedule`` and add its problems to ``problems``.
    """
    if isinstance(plain, list):
        return [read_mixture(inner, f"{at}[{i}]", problems) for i, inner in enumerate(plain)]
    if not isinstance(plain, Mapping):
        return plain
    before = len(problems)
    given = {
        key: read_mixture(
            inner, f"{at}.{key}" if isinstance(key, str) else f"{at}[{key!r}]", problems
        )
        for key, inner in plain.items()
    }
    if not is_schedule(plain):
        return given
    kind, known = given.pop("schedule"), factories()
    if not isinstance(kind, str) or kind not in known:
        problems.append(
            f"{at}.schedule: expected a known schedule, got {short_repr(kind)}"
            + did_you_mean(kind, known)
        )
        return invalid_schedule
    given, missing = _arguments(known[kind], given, at, problems)
    # A user's factory is called only with valid arguments.
    if len(problems) > before and kind not in BUILT_IN:
        return invalid_schedule
    made = _made(kind, given | dict.fromkeys(missing), missing, at, problems)
    return made if len(problems) == before else invalid_schedule


def invalid_schedule(step: int, feedback: Feedback) -> dict[str, float]:
    """Raise; this function replaces a schedule that could not be made, so that checks continue."""
    raise AssertionError("expected a valid schedule, got one that could not be made")


def _arguments(
    factory: Any, given: dict[Any, Any], at: str, problems: list[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the known arguments of a factory, and the names of required ones that are missing.

    Unknown and missing arguments are added to ``problems``.
    """
    named = {
        n: p
        for n, p in inspect.signature(factory).parameters.items()
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(factory).parameters.values())
    unknown = [
        key for key in given if not isinstance(key, str) or (key not in named and not takes_any)
    ]
    problems += [
        f"{at}.{key}: expected a known argument, got {key!r}{did_you_mean(key, named)}"
        for key in unknown
    ]
    missing = [name for name, p in named.items() if p.default is p.empty and name not in given]
    problems += [f"{at}.{name}: expected a value, got none" for name in missing]
    return {key: value for key, value in given.items() if key not in unknown}, missing


def _made(
    kind: str, given: dict[str, Any], missing: list[str], at: str, problems: list[str]
) -> Any:
    try:
        return make(kind, **given)
    except JobError as fault:  # missing arguments are reported already
        problems += [
            f"{at}.{problem}"
            for problem in fault.problems
            if not problem.startswith(tuple(f"{name}:" for name in missing))
        ]
    except Exception as fault:  # a registered factory is the user's code
        problems.append(f"{at}: {kind} raised {describe_error(fault)}")
    return invalid_schedule


def write_mixture(mixture: Any, at: str, problems: list[str]) -> Any:
    """Return weights or a schedule as plain values for a file; ``at`` is its key there.

    Code without a registered name is added to ``problems``.
    """
    if isinstance(mixture, Mapping):
        return {
            key: write_mixture(inner, f"{at}.{key}", problems) for key, inner in mixture.items()
        }
    if isinstance(mixture, (list, tuple)):
        return [write_mixture(inner, f"{at}[{i}]", problems) for i, inner in enumerate(mixture)]
    if isinstance(mixture, (Base, Ramp, Registered)):
        given = {
            name: dict(value.weights) if isinstance(value, Constant) else value
            for name, value in mixture.parameters().items()
        }
        return {"schedule": mixture.kind, **write_mixture(given, at, problems)}
    if isinstance(mixture, (str, bool, int, float, type(None))):
        return mixture
    problems.append(
        f"{at}: expected a named schedule, got the code {short_repr(mixture)}; make it with "
        "ov.register_schedule"
    )
    return None
