"""Transformer layers over packed microbatches, as in current models: the measured work."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812, its usual name

STD = 0.02  # of the weights: random numbers of the usual size, since a GPU computes zeros faster
BASE = 10_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of one stack of layers."""

    hidden: int
    heads: int
    ffn: int
    layers: int
    gated: bool = True  # three feed-forward matrices instead of two
    causal: bool = True

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    def __str__(self) -> str:
        kind = "causal" if self.causal else "bidirectional"
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, feed-forward "
            f"{self.ffn}, {kind}"
        )


LLAMA_12B = Shape(
    hidden=4608, heads=36, ffn=12_288, layers=4
)  # layers of the paper's backbone; a model has 45
VIT_1B = Shape(
    hidden=1408, heads=16, ffn=6144, layers=4, gated=False, causal=False
)  # of its encoder; a model has 39
TINY = Shape(hidden=32, heads=2, ffn=64, layers=1)
TINY_VIT = Shape(hidden=32, heads=2, ffn=64, layers=1, gated=False, causal=False)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Packed documents in the form that a layer needs."""

    bounds: torch.Tensor  # int32 [n + 1] on the device
    positions: torch.Tensor  # int64 [tokens] on the device
    lengths: tuple[int, ...]
    longest: int

    @staticmethod
    def of(lengths: Sequence[int] | np.ndarray, device: torch.device) -> Packed:
        given = np.asarray(lengths, np.int64)
        bounds = np.concatenate([[0], np.cumsum(given)])
        positions = np.arange(bounds[-1]) - np.repeat(bounds[:-1], given)
        on = (
            torch.from_numpy(bounds.astype(np.int32)).to(device),
            torch.from_numpy(positions).to(device),
        )
        return Packed(*on, tuple(given.tolist()), int(given.max()))

    def __len__(self) -> int:
        return len(self.positions)


@cache
def varlen() -> Any:
    """Return torch's own attention over packed documents; None if this torch has none."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: Packed, causal: bool
) -> torch.Tensor:
    """Return the attention of every document separately, [tokens, heads, head_dim]."""
    if q.device.type == "cuda" and (attention := varlen()) is not None:
        known = inspect.signature(attention).parameters  # it was renamed between versions
        mask: dict[str, Any] = (
            {"window_size": (-1, 0) if causal else (-1, -1)}
            if "window_size" in known
            else {"is_causal": causal}
        )
        return attention(
            q, k, v, packed.bounds, packed.bounds, packed.longest, packed.longest, **mask
        )
    parts = [x.split(packed.lengths) for x in (q, k, v)]
    done = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv), is_causal=causal)[
            0
        ].transpose(0, 1)
        for qkv in zip(*parts, strict=True)
    ]
    return torch.cat(done)


class Layer(nn.Module):
    """Attention and feed-forward, each after its norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        wide = shape.ffn * (2 if shape.gated else 1)
        self.shape = shape
        self.norm = nn.ParameterList([torch.ones(shape.hidden), torch.ones(shape.hidden)])
        self.qkv, self.out = (nn.Linear(shape.hidden, n * shape.hidden, bias=False) for n in (3, 1))
        self.up, self.down = (
            nn.Linear(shape.hidden, wide, bias=False),
            nn.Linear(shape.ffn, shape.hidden, bias=False),
        )

    def forward(
        self, x: torch.Tensor, packed: Packed, turn: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        shape = self.shape
        q, k, v = (
            self.qkv(F.rms_norm(x, (shape.hidden,), self.norm[0]))
            .view(-1, 3, shape.heads, shape.head_dim)
            .unbind(1)
        )
        if turn is not None:
            q, k = turned(q, turn), turned(k, turn)
        x = x + self.out(attend(q, k, v, packed, shape.causal).flatten(1))
        inner = self.up(F.rms_norm(x, (shape.hidden,), self.norm[1]))
        if shape.gated:
            gate, inner = inner.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * inner)
        return x + self.down(F.gelu(inner, approximate="tanh"))


def turned(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return values with rotary positions applied."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = turn
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Stack(nn.Module):
    """Layers over embeddings [tokens, hidden]."""

    def __init__(self, shape: Shape, longest: int = 0):
        """Create the layers.

        ``longest``: rotary positions up to it; 0: none, as in encoders of images.
        """
        super().__init__()
        self.shape = shape
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        angles = torch.outer(
            torch.arange(longest), BASE ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        turn = (
            (self.cos[packed.positions, None], self.sin[packed.positions, None])
            if len(self.cos)
            else None
        )
        for layer in self.layers:
            x = layer(x, packed, turn)
        return x


class Encoder(nn.Module):
    """An encoder of images: patches in, tokens of the backbone out."""

    def __init__(self, shape: Shape, patch: int, outputs: int):
        super().__init__()
        self.embedding, self.stack = nn.Linear(patch, shape.hidden, bias=False), Stack(shape)
        self.head = nn.Linear(shape.hidden, outputs, bias=False)

    def forward(self, patches: torch.Tensor, packed: Packed) -> torch.Tensor:
        return self.head(self.stack(self.embedding(patches), packed))


class Llama(nn.Module):
    """A whole language model: embedding, layers, output layer and loss."""

    def __init__(self, shape: Shape, longest: int, vocabulary: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, shape.hidden)
        self.stack = Stack(shape, longest)
        self.head = nn.Linear(shape.hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, packed: Packed) -> torch.Tensor:
        """Return the loss summed over tokens, to be divided by the tokens of the whole step."""
        x = self.stack(self.embedding(tokens), packed)
        logits = self.head(F.rms_norm(x, (x.shape[-1],)))
        return F.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


def made(model: Any, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """Return the module on the device, with random weights."""
    model.to(device=device, dtype=dtype)
    drawn = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, STD, generator=drawn)
    return model
