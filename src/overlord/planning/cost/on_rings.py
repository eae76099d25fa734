"""Costs of documents on one rank, and those of a job's model, as costs on rings."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from overlord.errors import PlanError
from overlord.job.model import Model
from overlord.planning.cost.fit import Fitted
from overlord.planning.cost.models import (
    DENSE_12B,
    CostFn,
    LengthCost,
    ModelCost,
    Scaled,
    Sum,
    Transformer,
)
from overlord.planning.cost.ring import RingCosts

# Links and speed of a rank, assumed and not measured: 500 TFLOP/s, NVLink, 400 Gb/s.
SPEED, INSIDE, ACROSS = 500e12, 450e9, 50e9
# Seconds of the default model on rings, derived and not measured: forward and backward; keys and
# values in bfloat16 travel once forward, and with their gradients thrice backward.
RING_12B = RingCosts(
    linear=3 * DENSE_12B.per_token / SPEED,
    square=3 * DENSE_12B.per_pair / SPEED,
    token_bytes=4.0 * 4 * 36 * 128 * 45,
    inside=INSIDE,
    across=ACROSS,
)


@lru_cache(maxsize=16)
def ring_of(model: Model | None) -> RingCosts:
    """Return the cost of a document on a ring of ranks, with the links of a usual cluster.

    Grouped queries make the transfers shorter, and windows make attention linear.
    """
    if model is None:
        return RING_12B
    cost = ModelCost(model)
    return RingCosts(
        linear=3 * cost.linear / SPEED,
        square=3 * cost.square / SPEED,
        token_bytes=4.0 * model.kv_bytes,
        inside=INSIDE,
        across=ACROSS,
    )


def ring(
    cost: CostFn,
    *,
    token_bytes: float = 0.0,
    inside: float = math.inf,
    across: float = math.inf,
    latency: float = 0.0,
    constant: float | None = None,
    per_second: float = 1.0,
) -> RingCosts:
    """Return the cost of documents on rings, from a cost of documents on one rank.

    ``per_second``: units of ``cost`` that a rank does in a second, for a cost in FLOPs.
    ``constant`` defaults to that of a fit. The other arguments are those of ``RingCosts``.
    """
    if not per_second > 0:
        raise PlanError(f"cost.ring: expected per_second above 0, got {per_second!r}")
    if isinstance(cost, RingCosts):
        measured, known = cost, cost.constant
    else:
        linear, square, known, column = _terms_of(cost)
        measured = RingCosts(linear=linear / per_second, square=square / per_second, column=column)
        known /= per_second
    return replace(
        measured,
        token_bytes=token_bytes,
        inside=inside,
        across=across,
        latency=latency,
        constant=known if constant is None else constant,
    )


def _terms_of(cost: CostFn) -> tuple[float, float, float, str]:
    """Return linear, square, constant and column of a cost."""
    if isinstance(cost, Fitted):
        return cost.linear, cost.square, cost.constant, cost.column
    if isinstance(cost, ModelCost):
        return cost.linear, cost.square, 0.0, cost.column
    if isinstance(cost, LengthCost):
        return cost.linear, cost.square, 0.0, cost.column
    if isinstance(cost, Transformer) and not cost.window:
        return cost.per_token, cost.per_pair, 0.0, cost.column
    if isinstance(cost, Scaled):
        linear, square, constant, column = _terms_of(cost.of)
        return cost.factor * linear, cost.factor * square, cost.factor * constant, column
    if isinstance(cost, Sum):
        terms = [_terms_of(part) for part in cost.parts]
        if len({column for *_, column in terms}) == 1:
            sums = [math.fsum(values) for values in zip(*(t[:3] for t in terms), strict=True)]
            return sums[0], sums[1], sums[2], terms[0][3]
    raise PlanError(
        "cost.ring: expected a cost of one column in lengths and their squares, got "
        f"{getattr(cost, 'title', cost)!r:.80}",
        remedy="fit one with cost.fit, or give cost.RingCosts(linear=, square=)",
    )
