"""Demands of a trainer on a hybrid schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from overlord.checks import did_you_mean, is_int, is_real
from overlord.errors import PlanError
from overlord.plan.tasks import TaskRules


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
    virtual: chunks of a pipeline stage (interleaved stages).
    equal_counts: all ranks run the same number of tasks and wait for each other in each; empty ones
        are added. The schedule then minimizes the sum of the slowest tasks by index.
    count_multiple: the number of tasks of each rank is a multiple of it.
    multiple: 0: documents are cut unevenly. Else each is padded to a multiple of 2 x ring size x
        this number.
    offload_share: share of the memory of a token that ratio 1 moves to the host, as
        (layers - 2) / layers; 0: no offload.
    offload_base, offload_slope: computation of a document of s tokens hides a ratio of
        base + slope x s, at most 1.
    offload_bytes: bytes on the host of a token at ratio 1, on all tensor-parallel ranks of it:
        (layers - 2) x bytes of activations of a layer. 0: unknown.
    host_memory: bytes of host memory of a node for offload; 0: no limit. Each rank of a node has an
        equal share. Documents get more ranks and a smaller ratio if it binds.
    """

    ranks: int
    capacity: int
    groups: Literal["any", "power_of_two"] = "any"
    node: int = 8
    stages: int = 1
    virtual: int = 1
    equal_counts: bool = False
    count_multiple: int = 1
    multiple: int = 0
    offload_share: float = 0.0
    offload_base: float = 0.0
    offload_slope: float = 0.0
    offload_bytes: float = 0.0
    host_memory: float = 0.0

    def task_rules(self) -> TaskRules:
        """Return the rules of the table.

        With offload the capacity is one of memory: tokens whose activations stay on the rank.
        """
        return TaskRules(
            ranks=self.ranks,
            stages=self.stages,
            capacity=0 if self.offload_share else self.capacity,
            multiple=self.multiple,
            equal_counts=self.equal_counts,
            count_multiple=self.count_multiple,
            memory_capacity=float(self.capacity) if self.offload_share else 0.0,
            host_bytes=float(self.offload_bytes) if self.offload_share else 0.0,
            host_memory=float(self.host_memory) if self.offload_share else 0.0,
            node=min(self.node, self.ranks),
            virtual=self.virtual,
        )

    def host_tokens(self) -> float:
        """Return the tokens of a rank whose offload at ratio 1 fits its share of host memory."""
        if not self.host_memory:
            return np.inf
        held = min(self.node, self.ranks) * self.task_rules().in_flight()
        return self.host_memory / (held * self.offload_bytes)


WHOLE, SWITCHES = ("node", "virtual", "count_multiple"), ("equal_counts", "padded")
SHARES = ("offload_share", "offload_base", "offload_slope", "offload_bytes", "host_memory")
ARGUMENTS = (*SWITCHES, *WHOLE, *SHARES)  # of ``DGraph.split``, besides capacity and groups


def check_arguments(capacity: Any, groups: Any, rules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are given; raise ``PlanError`` for one without a meaning.

    None stands for the default of an argument.
    """
    given = {name: value for name, value in rules.items() if value is not None}
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise PlanError(
                f"expected a known argument, got {name!r}{did_you_mean(name, ARGUMENTS)}"
            )
        if name in SWITCHES and not isinstance(value, bool | np.bool_):
            raise PlanError(f"expected {name} to be True, False or None, got {value!r}")
        if name in SHARES and not is_real(value):
            raise PlanError(f"expected {name} to be a number, got {value!r}")
    if groups not in ("any", "power_of_two"):
        raise PlanError(
            f'expected groups "any" or "power_of_two", got {groups!r}', remedy="choose one of them"
        )
    whole = {name: given[name] for name in WHOLE if name in given}
    for name, value in (whole if capacity is None else {"capacity": capacity, **whole}).items():
        if not (is_int(value) or isinstance(value, np.integer)) or value < 1:
            raise PlanError(f"expected {name} to be a whole number of at least 1, got {value!r}")
    return given


def check(lengths: np.ndarray, rules: HybridRules) -> None:
    """Raise ``PlanError`` for rules or lengths outside of their ranges."""
    least = {"ranks": 1, "capacity": 1, "node": 1, "stages": 1, "virtual": 1, "count_multiple": 1}
    for name, bound in {**least, "multiple": 0}.items():
        if getattr(rules, name) < bound:
            raise PlanError(
                f"hybrid schedule: expected {name} of at least {bound}, got {getattr(rules, name)}",
                remedy="give a value in this range",
            )
    if rules.groups not in ("any", "power_of_two"):
        raise PlanError(
            f'hybrid schedule: expected groups "any" or "power_of_two", got {rules.groups!r}',
            remedy="choose one of them",
        )
    for name in SHARES:
        most = 1.0 if name in ("offload_share", "offload_base") else np.inf
        if not 0 <= getattr(rules, name) <= most:
            raise PlanError(
                f"hybrid schedule: expected {name} of 0 to {most:g}, got {getattr(rules, name)}",
                remedy="give a value in this range",
            )
    if rules.host_memory and not rules.offload_bytes:
        raise PlanError(
            "hybrid schedule: expected offload_bytes with host_memory, got none",
            remedy="give the bytes of a token at ratio 1: (layers - 2) x activations of a layer",
        )
    lengths = np.asarray(lengths)
    whole = not len(lengths) or (lengths.dtype.kind in "iu" and lengths.min() >= 0)
    if lengths.ndim != 1 or not whole:
        raise PlanError(
            "hybrid schedule: expected lengths as one column of whole numbers of at least 0, got "
            f"{lengths.dtype} of shape {lengths.shape}",
            remedy="give the tokens of every sample",
        )
