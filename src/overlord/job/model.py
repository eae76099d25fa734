"""Model: the layer shapes of the trained model, and the forward FLOPs that follow from them.

A job balances by these FLOPs: a term for each token, and a term for each pair of tokens that attend
to each other. The backward pass costs about twice the forward pass in both terms, so ratios stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord import late_binding
from overlord.checks import is_int
from overlord.errors import JobError

if TYPE_CHECKING:
    from os import PathLike

AT_LEAST_1 = (
    "hidden",
    "layers",
    "heads",
    "kv_heads",
    "head_dim",
    "value_dim",
    "vocab",
    "experts",
    "active_experts",
    "expert_ffn",
    "window",
    "query_rank",
    "kv_rank",
)
AT_LEAST_0 = ("ffn", "shared_ffn", "dense_layers", "global_layers", "rope_dim", "inputs")
FLAGS = ("gated", "causal")


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """Layer shapes of the trained model. Strategies balance by its forward FLOPs.

    Arguments
    ---------
    hidden: width of the residual stream. Required.
    layers: number of transformer layers. Required.
    heads: number of query heads of a layer. Required.
    kv_heads: number of heads of keys and values. Default None: ``heads``.
    head_dim: width of a query and key head. Default None: ``hidden / heads``.
    ffn: width of the feed-forward of a dense layer. Default None: 8/3 of ``hidden``, or 4 times
        ``hidden`` without a gate.
    vocab: size of the vocabulary; counts the output layer. Default None: not counted.
    experts: number of routed experts of a layer. Default None: all layers are dense.
    active_experts: routed experts of each token (top-k). Required with ``experts``.
    expert_ffn: width of one expert. Default None: ``ffn``.
    shared_ffn: width of all experts that every token uses, together. Default 0.
    dense_layers: number of layers without experts in a model with experts. Default 0.
    gated: whether a feed-forward has three matrices (SwiGLU) instead of two. Default True.
    window: tokens back that a token attends to. Default None: all.
    global_layers: number of layers without the window. Default 0.
    value_dim: width of a value head. Default None: ``head_dim``.
    query_rank: rank of the compressed queries of latent attention. Default None: not compressed.
    kv_rank: rank of the compressed keys and values of latent attention. Default None: none.
    rope_dim: part of ``head_dim`` with rotary positions, which latent attention does not compress.
        Default 0.
    causal: whether a token attends to earlier tokens only. Default True. Without it a window is a
        block whose tokens attend to each other.
    inputs: numbers in one input that is projected, such as an image patch. Default 0: inputs are
        token ids, whose embeddings are looked up.
    encoder: the ``Model`` of the image encoder, by patches. Default None: 1B parameters, as in the
        Overlord paper.
    name: name for display. Default "".
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    experts: int | None = None
    active_experts: int | None = field(default=None, kw_only=True)
    expert_ffn: int | None = field(default=None, kw_only=True)
    shared_ffn: int = field(default=0, kw_only=True)
    dense_layers: int = field(default=0, kw_only=True)
    gated: bool = field(default=True, kw_only=True)
    window: int | None = field(default=None, kw_only=True)
    global_layers: int = field(default=0, kw_only=True)
    value_dim: int | None = field(default=None, kw_only=True)
    query_rank: int | None = field(default=None, kw_only=True)
    kv_rank: int | None = field(default=None, kw_only=True)
    rope_dim: int = field(default=0, kw_only=True)
    causal: bool = field(default=True, kw_only=True)
    inputs: int = field(default=0, kw_only=True)
    encoder: Model | None = field(default=None, kw_only=True)
    name: str = field(default="", kw_only=True, compare=False)

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise JobError(problems, "model")

    @staticmethod
    def from_config(config: str | PathLike[str] | Mapping[str, Any], **changes: Any) -> Model:
        """Return the model of a Hugging Face ``config.json``, by its path, its folder or as a dict.

        ``changes``: fields of ``Model`` that replace those of the configuration. Raise ``JobError``
        with all missing keys, or for layers whose cost these fields cannot express.
        """
        model: Model = late_binding.call("read_model", config, changes)
        return model

    def __repr__(self) -> str:
        given = [
            f"{f.name}={value!r}"
            for f in fields(self)
            if f.name != "name"
            and (value := getattr(self, f.name))
            != (f.default if f.default is not MISSING else None)
        ]
        return f"Model({', '.join([*([repr(self.name)] if self.name else []), *given])})"

    def problems(self) -> list[str]:
        """Return every problem of the fields and of their combinations, each as one text."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        found = [
            f"model.{name}: expected a whole number of at least {least}, got {given[name]!r}"
            for names, least in ((AT_LEAST_1, 1), (AT_LEAST_0, 0))
            for name in names
            if not self._left_out(name) and not (is_int(given[name]) and given[name] >= least)
        ]
        found += [
            f"model.{name}: expected true or false, got {given[name]!r}"
            for name in FLAGS
            if not isinstance(given[name], bool)
        ]
        if not isinstance(self.name, str):
            found.append(f"model.name: expected a text, got {self.name!r}")
        if self.encoder is not None and not isinstance(self.encoder, Model):
            found.append(f"model.encoder: expected an ov.Model, got {self.encoder!r}")
        return found or self._combined_problems()

    def _left_out(self, name: str) -> bool:
        return getattr(self, name) is None and name not in ("hidden", "layers", "heads")

    def _combined_problems(self) -> list[str]:
        found = []
        if self.heads % (self.kv_heads or self.heads):
            found.append(
                f"model.kv_heads: expected a divisor of heads={self.heads}, got {self.kv_heads}"
            )
        if self.head_dim is None and self.hidden % self.heads:
            found.append(
                f"model.hidden: expected a multiple of heads={self.heads}, got {self.hidden}; "
                "give head_dim"
            )
        elif self.rope_dim > self.key_dim:
            found.append(
                f"model.rope_dim: expected at most head_dim={self.key_dim}, got {self.rope_dim}"
            )
        for name in ("active_experts", "expert_ffn", "dense_layers"):
            if self.experts is None and getattr(self, name):
                found.append(f"model.{name}: expected experts next to it, got none; give experts")
        if self.experts is not None and not 1 <= (self.active_experts or 0) <= self.experts:
            found.append(
                f"model.active_experts: expected 1 to experts={self.experts}, got "
                f"{self.active_experts!r}; give the experts of each token"
            )
        for name in ("dense_layers", "global_layers"):
            if getattr(self, name) > self.layers:
                found.append(
                    f"model.{name}: expected at most layers={self.layers}, got "
                    f"{getattr(self, name)}"
                )
        if self.global_layers and self.window is None:
            found.append("model.global_layers: expected window next to it, got none; give window")
        if self.kv_rank is None and (self.query_rank or self.rope_dim):
            found.append("model.kv_rank: expected a rank for latent attention, got none; give it")
        return found

    # -- widths with their defaults

    @property
    def key_dim(self) -> int:
        """Width of a query and key head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def value_width(self) -> int:
        """Width of a value head."""
        return self.key_dim if self.value_dim is None else self.value_dim

    @property
    def ffn_width(self) -> int:
        """Width of the feed-forward of a dense layer."""
        if self.ffn is not None:
            return self.ffn
        return 8 * self.hidden // 3 if self.gated else 4 * self.hidden

    # -- forward FLOPs

    @property
    def per_token(self) -> float:
        """Forward FLOPs of a token, without attention: two for each weight it is multiplied by."""
        sparse = self.layers - self.dense_layers if self.experts else 0
        dense = self.layers - sparse
        matrices = 3 if self.gated else 2
        width = self.ffn_width if self.expert_ffn is None else self.expert_ffn
        routed = (self.active_experts or 0) * width + self.shared_ffn
        weights = (
            self.layers * self._projections()
            + dense * matrices * self.hidden * self.ffn_width
            + sparse * self.hidden * (matrices * routed + (self.experts or 0))
            + self.hidden * ((self.vocab or 0) + self.inputs)
        )
        return 2.0 * weights

    def _projections(self) -> int:
        """Return the weights of queries, keys, values and the output of one layer."""
        hidden, heads, key, value = self.hidden, self.heads, self.key_dim, self.value_width
        queries = (
            hidden * heads * key
            if self.query_rank is None
            else self.query_rank * (hidden + heads * key)
        )
        if self.kv_rank is None:
            kept = hidden * (self.kv_heads or heads) * (key + value)
        else:
            plain = key - self.rope_dim
            kept = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * heads * (plain + value)
        return queries + kept + heads * value * hidden

    @property
    def per_pair(self) -> float:
        """Forward FLOPs of attention in one layer, per length squared.

        The scores and the weighted sum take 2 FLOPs each per channel. A causal mask leaves half of
        the pairs.
        """
        return (1.0 if self.causal else 2.0) * self.heads * (self.key_dim + self.value_width)

    @property
    def full_layers(self) -> int:
        """Number of layers whose tokens attend to the whole document."""
        return self.layers if self.window is None else self.global_layers

    def flops(self, lengths: Any) -> np.ndarray:
        """Return the forward FLOPs of documents by their lengths in tokens: float64."""
        length = np.asarray(lengths, np.float64)
        total = self.per_token * length + self.full_layers * self.per_pair * (length * length)
        if self.window is None or self.full_layers == self.layers:
            return np.asarray(total)
        near = np.minimum(length, float(self.window))
        # causal: tokens inside the first window attend to all before them, later ones to a window
        pairs = near * near + 2.0 * near * (length - near) if self.causal else near * length
        return np.asarray(total + (self.layers - self.full_layers) * self.per_pair * pairs)

    @property
    def kv_bytes(self) -> float:
        """Bytes of the keys and values of a token in all layers, in 16 bits."""
        heads = self.heads if self.kv_rank is not None else self.kv_heads or self.heads
        return 2.0 * self.layers * heads * (self.key_dim + self.value_width)

    @property
    def title(self) -> str:
        """Short text for display: the name and the main shapes."""
        kind = f", {self.active_experts} of {self.experts} experts" if self.experts else ""
        reach = ""
        if self.window is not None:
            reach = f", window {self.window:,} in {self.layers - self.global_layers} layers"
        shapes = f"hidden {self.hidden:,}, {self.layers} layers{kind}{reach}"
        return f"{self.name} ({shapes})" if self.name else shapes
