"""Cost functions: the compute cost of a sample, from its metadata.

A cost function takes a mapping of metadata columns and returns one float64 array: ``cost({"tokens":
lengths})``. Only ratios matter. The library's functions use one rounding per operation and no maths
library. So costs, and with them plans, are equal on every machine. Costs can be added and scaled:
``cost.llama_12b + cost.vit_2b``, ``3 * cost.tokens``.

Yours may be any function, also by a name (``register_cost``). Give it a ``fingerprint`` if its
parameters change, and a ``unit`` of ``"s"`` if it returns seconds.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from overlord.checks import did_you_mean
from overlord.errors import PlanError
from overlord.planning.cost.base import (
    Cost,
    CostFn,
    LengthCost,
    Scaled,
    Sum,
    fingerprint_of,
    unit_of,
)
from overlord.planning.cost.fit import Fitted, fit
from overlord.planning.cost.models import (
    Transformer,
    llama_12b,
    mixtral_8x7b,
    tmoe_25b,
    transformer,
    vit,
    vit_1b,
    vit_2b,
)
from overlord.sample import Column, Columns
from overlord.user_code import cannot_take

__all__ = [
    "Cost",
    "CostFn",
    "Fitted",
    "LengthCost",
    "Scaled",
    "Sum",
    "Transformer",
    "checked_costs",
    "fingerprint_of",
    "fit",
    "llama_12b",
    "mixtral_8x7b",
    "named",
    "quadratic",
    "register_cost",
    "tmoe_25b",
    "tokens",
    "transformer",
    "unit_of",
    "vit",
    "vit_1b",
    "vit_2b",
]

tokens = LengthCost(linear=1.0, unit="tokens")
quadratic = LengthCost(square=1.0)  # attention alone

_BUILT_IN: dict[str, CostFn] = {
    "tokens": tokens,
    "quadratic": quadratic,
    "llama_12b": llama_12b,
    "mixtral_8x7b": mixtral_8x7b,
    "tmoe_25b": tmoe_25b,
    "vit_1b": vit_1b,
    "vit_2b": vit_2b,
}
_REGISTERED: dict[str, CostFn] = {}


def register_cost(name: str, fn: CostFn) -> None:
    """Register ``fn(columns) -> one number each`` as ``name``, for ``.cost(name)``."""
    if not isinstance(name, str) or not name or not callable(fn):
        raise PlanError(f"register_cost: expected a name and a function, got {name!r} and {fn!r}")
    if name in _BUILT_IN:
        raise PlanError(f"the cost {name!r} is built in", remedy="choose another name")
    _REGISTERED[name] = fn


def named(cost: CostFn | str) -> CostFn:
    """Return a cost by its name, or the function itself."""
    if callable(cost):
        return cost
    known = {**_BUILT_IN, **_REGISTERED}
    if not isinstance(cost, str) or cost not in known:
        raise PlanError(
            f"unknown cost {cost!r}{did_you_mean(cost, known)}", remedy="add it with register_cost"
        )
    return known[cost]


def checked_costs(
    cost: CostFn | str, columns: Mapping[str, Column], n: int, what: str = "cost"
) -> np.ndarray:
    """Return the checked costs of n nodes from a function, which may be user code."""
    fn, name = named(cost), getattr(cost, "__name__", None) or repr(cost)
    if problem := cannot_take(fn, ("columns",)):
        raise PlanError(f"{what}: {problem}")
    result = fn(Columns(columns))
    try:
        numbers = np.asarray(result, np.float64)
    except (TypeError, ValueError):
        raise PlanError(
            f"{what} function {name}: expected {n} numbers, "
            f"got {type(result).__name__} {result!r:.80}"
        ) from None
    if numbers.shape != (n,):
        raise PlanError(f"{what} function {name}: expected {n} numbers, got shape {numbers.shape}")
    if n and not (np.isfinite(numbers).all() and numbers.min() >= 0):
        raise PlanError(
            f"{what} function {name}: expected finite numbers of at least 0, "
            "got one that is negative, infinite or NaN"
        )
    return numbers
