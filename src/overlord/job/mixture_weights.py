"""Checks of the names and weights of a mixture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from overlord.checks import did_you_mean, is_real


def mixture_problems(weights: Mapping[str, float], names: Iterable[str]) -> list[str]:
    """Return every problem of a mapping of source name to weight; ``names``: all sources."""
    known, found = tuple(names), []
    for name, weight in weights.items():
        if name not in known:
            found.append(
                f"mixture: expected a source of the job, got {name!r}{did_you_mean(name, known)}"
            )
        elif not is_real(weight) or not math.isfinite(weight) or weight < 0:
            found.append(
                f"mixture: the weight of {name!r}: expected a finite number of at least 0, "
                f"got {weight!r}"
            )
    if not found and not any(weights.values()):
        found.append("mixture: expected a weight above 0, got only zeros")
    return found


def schedule_problems(mixture: Any, names: Iterable[str]) -> list[str]:
    """Return a problem for each name in a schedule that is not a source of the job.

    A schedule without a list ``sources`` is checked when it returns weights.
    """
    named, known = getattr(mixture, "sources", ()), tuple(names)
    listed = named if isinstance(named, (tuple, list)) else ()
    return [
        f"mixture: expected a source of the job, got {name!r}{did_you_mean(name, known)}"
        for name in listed
        if name not in known
    ]
