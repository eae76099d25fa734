"""Cost functions: the compute cost of a sample, from its metadata.

A cost function takes a mapping of metadata columns and returns one float64 array: ``cost({"tokens":
lengths})``. Only ratios matter. The functions below use one rounding per operation and no maths
library. So costs, and with them plans, are equal on every machine. Costs can be added and scaled:
``cost.llama_12b + cost.vit_2b``, ``3 * cost.tokens``.

A cost function of yours may be any function; ``register_cost`` gives it a name. Set its attribute
``fingerprint`` if its parameters can change, and ``unit = "s"`` if it returns seconds.
"""

from __future__ import annotations

from overlord.planning.cost.fit import Fitted, fit
from overlord.planning.cost.models import (
    Cost,
    CostFn,
    LengthCost,
    ModelCost,
    Scaled,
    Sum,
    Transformer,
    checked_costs,
    encoder_of,
    fingerprint_of,
    llama_12b,
    mixtral_8x7b,
    named,
    of_model,
    quadratic,
    register_cost,
    title_of,
    tmoe_25b,
    tokens,
    transformer,
    unit_of,
    vit,
    vit_1b,
    vit_2b,
)
from overlord.planning.cost.on_rings import ring, ring_of
from overlord.planning.cost.ring import RingCosts, SizeFit

__all__ = [
    "Cost",
    "CostFn",
    "Fitted",
    "LengthCost",
    "ModelCost",
    "RingCosts",
    "Scaled",
    "SizeFit",
    "Sum",
    "Transformer",
    "checked_costs",
    "encoder_of",
    "fingerprint_of",
    "fit",
    "llama_12b",
    "mixtral_8x7b",
    "named",
    "of_model",
    "quadratic",
    "register_cost",
    "ring",
    "ring_of",
    "title_of",
    "tmoe_25b",
    "tokens",
    "transformer",
    "unit_of",
    "vit",
    "vit_1b",
    "vit_2b",
]
