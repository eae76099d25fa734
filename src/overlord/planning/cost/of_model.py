"""Costs of a job's model: on one rank, on rings of ranks, and of its image encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from overlord.job.model import Model
from overlord.planning.cost.models import Cost, over_lengths, transformer, vit_1b
from overlord.planning.cost.ring import RingCosts

# the backbone of the Overlord paper (arXiv 2504.09844); only ratios matter
DENSE_12B = transformer(hidden=4608, layers=45, heads=36)
VIT_1B = vit_1b  # the encoder of the same paper
# Links and speed of a rank, assumed and not measured: 500 TFLOP/s, NVLink, 400 Gb/s.
SPEED, INSIDE, ACROSS = 500e12, 450e9, 50e9
# Seconds of the same model on rings, derived and not measured: forward and backward; keys and
# values in bfloat16 travel once forward, and with their gradients thrice backward.
RING_12B = RingCosts(
    linear=3 * DENSE_12B.per_token / SPEED,
    square=3 * DENSE_12B.per_pair / SPEED,
    token_bytes=4.0 * 4 * 36 * 128 * 45,
    inside=INSIDE,
    across=ACROSS,
)


@dataclass(frozen=True, slots=True)
class ModelCost(Cost):
    """Forward FLOPs of documents in a ``Model``."""

    model: Model
    column: str = "tokens"
    unit: str = "FLOPs"

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        return over_lengths(columns, self.column, self.model.flops)

    @property
    def title(self) -> str:
        return f"Model({self.model.title})"

    @property
    def linear(self) -> float:
        """FLOPs of a token, with the attention of whole windows.

        A document shorter than a window costs less, so this is an upper bound for it.
        """
        model, window = self.model, float(self.model.window or 0)
        pairs = 2.0 * window if model.causal else window
        return model.per_token + (model.layers - model.full_layers) * model.per_pair * pairs

    @property
    def square(self) -> float:
        """FLOPs per length squared, of the layers without a window."""
        return self.model.full_layers * self.model.per_pair


def of_model(model: Model | None) -> Cost:
    """Return the cost of a document on one rank; without a model that of a 12B Llama."""
    return DENSE_12B if model is None else ModelCost(model)


def encoder_of(model: Model | None) -> Cost:
    """Return the cost of an image, by its patches; without an encoder that of a ViT of 1B."""
    if model is None or model.encoder is None:
        return VIT_1B
    return ModelCost(model.encoder, column="image_patches")


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
