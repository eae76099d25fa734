"""Reading and writing of the batch and the stages of a job file.

``batch: {samples: {schedule: linear, start: 64, end: 256, steps: 1000}, context: 8192}`` has a
ramp. ``stages:`` is a list of mappings with the fields of ``ov.Stage``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from overlord.job.stages import Stage
from overlord.jobfile.mixture import invalid_schedule, is_schedule, read_mixture, write_mixture
from overlord.jobfile.yaml_scalars import short_repr
from overlord.mesh import SIZES, Batch

# (class, plain, at, **given): an object from the mapping at key ``at``; None: it is invalid
Make = Callable[..., Any]


def read_batch(plain: Any, at: str, make: Make, problems: list[str]) -> Batch | None:
    """Return the batch that a mapping describes; None if it is invalid."""
    given: dict[str, Any] = {}
    for name in SIZES if isinstance(plain, dict) else ():
        if is_schedule(plain.get(name)):
            given[name] = read_mixture(plain[name], f"{at}.{name}", problems)
    if invalid_schedule in given.values():
        return None
    batch: Batch | None = make(Batch, plain, at, **given)
    return batch


def read_stages(plain: Any, make: Make, problems: list[str]) -> tuple[Stage, ...]:
    """Return the stages of a list; an empty tuple if one is invalid, which is reported."""
    if not isinstance(plain, list):
        problems.append(f"stages: expected a list, got {short_repr(plain)}")
        return ()
    found = [_read_stage(entry, f"stages[{k}]", make, problems) for k, entry in enumerate(plain)]
    return () if None in found else tuple(stage for stage in found if stage is not None)


def _read_stage(plain: Any, at: str, make: Make, problems: list[str]) -> Stage | None:
    given: dict[str, Any] = {}
    if isinstance(plain, dict) and plain.get("batch") is not None:
        given["batch"] = read_batch(plain["batch"], f"{at}.batch", make, problems)
    if isinstance(plain, dict) and plain.get("mixture") is not None:
        given["mixture"] = read_mixture(plain["mixture"], f"{at}.mixture", problems)
    stage: Stage | None = make(Stage, plain, at, **given)
    return stage


def write_batch(batch: Batch, at: str, problems: list[str]) -> dict[str, Any]:
    """Return a batch as plain values, without fields at their default."""
    return {
        name: write_mixture(value, f"{at}.{name}", problems)
        for name, value in changed_fields(batch).items()
    }


def write_stages(stages: tuple[Stage, ...], problems: list[str]) -> list[dict[str, Any]]:
    """Return stages as plain values, without fields at their default."""
    return [_write_stage(stage, f"stages[{k}]", problems) for k, stage in enumerate(stages)]


def _write_stage(stage: Stage, at: str, problems: list[str]) -> dict[str, Any]:
    plain = changed_fields(stage)
    if stage.batch is not None:
        plain["batch"] = write_batch(stage.batch, f"{at}.batch", problems)
    if stage.mixture is not None:
        plain["mixture"] = write_mixture(stage.mixture, f"{at}.mixture", problems)
    return plain


def changed_fields(thing: Any) -> dict[str, Any]:
    """Return the fields of an object that differ from their default or have none."""
    return {
        f.name: getattr(thing, f.name)
        for f in fields(thing)
        if f.default is MISSING or getattr(thing, f.name) != f.default
    }
