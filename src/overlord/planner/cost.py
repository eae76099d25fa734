"""Cost functions: what a sample costs to compute, from its metadata.

A cost function takes a mapping of metadata columns and returns one float64 array: ``cost({"tokens": lengths})``. Only
ratios matter. All of these use one rounding per operation and nothing of a maths library, so costs, and with them plans,
are equal on every machine. Yours may be any function; give it a ``fingerprint`` if its parameters change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from overlord.errors import PlanError

CostFn = Callable[[Mapping[str, np.ndarray]], np.ndarray]


@dataclass(frozen=True, slots=True)
class LengthCost:
    """``linear * length + square * length ** 2``."""

    linear: float = 0.0
    square: float = 0.0
    column: str = "tokens"

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        length = lengths(columns, self.column)
        return self.linear * length + self.square * (length * length)

    @property
    def fingerprint(self) -> str:
        return repr(self)


@dataclass(frozen=True, slots=True)
class Transformer:
    """Forward FLOPs of a transformer over one document: projections and feed-forward by token, attention by token pair."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    causal: bool = True
    gated: bool = True  # three feed-forward matrices (SwiGLU) instead of two
    vocab: int = 0  # the output layer counts where this is given
    active_experts: int = 1  # mixture of experts: feed-forwards that each token passes
    column: str = "tokens"

    def __call__(self, columns: Mapping[str, Any]) -> np.ndarray:
        length = lengths(columns, self.column)
        return self.per_token * length + self.per_pair * (length * length)

    @property
    def per_token(self) -> float:
        kv = self.hidden * self.kv_heads // self.heads
        matrices = 2 * self.hidden * (self.hidden + kv) + (3 if self.gated else 2) * self.hidden * self.ffn * self.active_experts
        return 2.0 * (self.layers * matrices + self.hidden * self.vocab)

    @property
    def per_pair(self) -> float:
        """Scores and weighted sum are 2 FLOPs each by channel; a causal mask leaves half of the pairs."""
        return (2.0 if self.causal else 4.0) * self.hidden * self.layers

    @property
    def fingerprint(self) -> str:
        return repr(self)


tokens = LengthCost(linear=1.0)
quadratic = LengthCost(square=1.0)  # attention alone


def transformer(
    *, hidden: int, layers: int, heads: int, kv_heads: int | None = None, ffn: int | None = None, causal: bool = True,
    gated: bool = True, vocab: int = 0, active_experts: int = 1, column: str = "tokens",
) -> Transformer:  # fmt: skip
    """The cost of a model by its layer shapes; ``ffn`` defaults to 8/3 of hidden (4 without a gate)."""
    shapes = {"hidden": hidden, "layers": layers, "heads": heads, "kv_heads": kv_heads or heads, "active_experts": active_experts}
    wrong = [f"{name}={value!r}" for name, value in shapes.items() if not isinstance(value, int) or value < 1]
    if wrong:
        raise PlanError(f"cost.transformer: wanted whole numbers of at least 1, found {', '.join(wrong)}")
    if ffn is None:
        ffn = 8 * hidden // 3 if gated else 4 * hidden
    return Transformer(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads or heads, ffn=ffn, causal=causal, gated=gated,
        vocab=vocab, active_experts=active_experts, column=column,
    )  # fmt: skip


def lengths(columns: Mapping[str, Any], name: str) -> np.ndarray:
    """One metadata column as float64."""
    if name not in columns:
        raise PlanError(f"the cost needs metadata {name!r}; known: {', '.join(sorted(columns))}", remedy="select it or add it with ov.Meta")
    return np.asarray(columns[name], np.float64)
