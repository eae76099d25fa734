"""Two random plans of one batch, compared with one process and with each other.

Rank 0 runs Hypothesis and sends every example to the others; all report whether theirs was right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings

from tests.torch.ranks.hdp_decoder import alone, check_plan
from tests.torch.ranks.hdp_plans import Plan, two_plans

DEFAULT = 20


def compare(first: Plan, second: Plan) -> None:
    """Raise on every rank if it is wrong on any."""
    problem = ""
    try:
        wanted = alone(first)
        found, other = check_plan(first, wanted), check_plan(second, wanted)
        for name in found.keys() & other.keys():
            scale = max(1e-3, float(wanted[0][name].abs().max()))
            assert float((found[name] - other[name]).abs().max()) < 1e-11 * scale
    except AssertionError as wrong:  # any other error leaves ranks waiting: it ends the world
        problem = str(wrong) or repr(wrong)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, problem)
    if any(every):
        raise AssertionError("; ".join(f"rank {r}: {text}" for r, text in enumerate(every) if text))


def random_plans(out: Path) -> None:
    torch.set_num_threads(1)
    if dist.get_rank():
        while (plans := _shared(None)) is not None:
            try:
                compare(*plans)
            except AssertionError:
                continue  # rank 0 reports it, and may ask for smaller ones
        return
    examples = int(os.environ.get("OVERLORD_HDP_EXAMPLES", DEFAULT))

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(two_plans(dist.get_world_size()))
    def every(plans: tuple[Plan, Plan]) -> None:
        compare(*_shared(plans))

    try:
        every()
    finally:
        _shared(None)


def _shared(plans: Any) -> Any:
    box = [plans]
    dist.broadcast_object_list(box, src=0)
    return box[0]


CHECKS = {"random_plans": random_plans}
