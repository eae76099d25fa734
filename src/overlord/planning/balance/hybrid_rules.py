"""Demands of a trainer on a hybrid schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from overlord.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRules:
    """The demands of a trainer on a schedule.

    Arguments
    ---------
    ranks: ranks of the HDP axis: one pipeline stage, one tensor-parallel rank.
    capacity: most tokens of a rank in one microbatch.
    groups: "any" ring, or "power_of_two": aligned blocks of 1, 2, 4, ... ranks, and all ranks.
    node: ranks of a node. Rings stay in one node, or have whole nodes, as far as possible.
    stages: pipeline stages. Members of a ring then run it as microbatch of the same number.
    equal_counts: all ranks run the same number of tasks; empty ones are added.
    count_multiple: the number of tasks of each rank is a multiple of it.
    multiple: 0: documents are cut unevenly. Else each is padded to a multiple of 2 x ring size x
        this number.
    """

    ranks: int
    capacity: int
    groups: Literal["any", "power_of_two"] = "any"
    node: int = 8
    stages: int = 1
    equal_counts: bool = False
    count_multiple: int = 1
    multiple: int = 0


def check(lengths: np.ndarray, rules: HybridRules) -> None:
    """Refuse rules and lengths that have no meaning."""
    for name in ("ranks", "capacity", "node", "stages", "count_multiple"):
        if getattr(rules, name) < 1:
            raise PlanError(
                f"hybrid schedule: expected {name} of at least 1, got {getattr(rules, name)}",
                remedy="correct the rules",
            )
    if rules.groups not in ("any", "power_of_two"):
        raise PlanError(
            f'hybrid schedule: expected groups "any" or "power_of_two", got {rules.groups!r}',
            remedy="choose one of them",
        )
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or (
        len(lengths) and (lengths.dtype.kind not in "iu" or lengths.min() < 0)
    ):
        raise PlanError(
            "hybrid schedule: expected lengths as one column of whole numbers of at least 0, got "
            f"{lengths.dtype} of shape {lengths.shape}",
            remedy="give the tokens of every sample",
        )
