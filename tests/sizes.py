"""How much of the large families of tests runs: a part in ``make test``, all of it with
``OVERLORD_TEST_ALL=1`` (``make test-all``).

A law that is left out on one size or runtime is checked there on another, so that a fault shows in
both. Families differ in what they cost: a process with torch takes three seconds of CPU to start, a
worker on Ray one second.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import pytest

Value = TypeVar("Value")

ALL = os.environ.get("OVERLORD_TEST_ALL", "") not in ("", "0")


def part(few: Sequence[Value], rest: Sequence[Value]) -> list[Value]:
    """The values of a family that run: ``few``, or these and ``rest``."""
    return [*few, *(rest if ALL else ())]


def on_runtimes(
    cases: Mapping[str, Value], runtimes: Sequence[str], on_ray: Collection[str]
) -> list[Any]:
    """Parameters ``(runtime, case)``: every case on every runtime, but few of them on Ray."""
    return [
        pytest.param(runtime, case, id=f"{name}-{runtime}")
        for name, case in cases.items()
        for runtime in runtimes
        if ALL or runtime != "ray" or name in on_ray
    ]
