"""Costs by name: the built-in ones, and those that users register."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from overlord.checks import did_you_mean
from overlord.errors import PlanError
from overlord.planning.cost.base import CostFn, LengthCost
from overlord.planning.cost.models import llama_12b, mixtral_8x7b, tmoe_25b, vit_1b, vit_2b
from overlord.sample import Column, Columns
from overlord.user_code import cannot_take

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
