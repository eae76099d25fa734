"""Positions of a ring on one device: `ring_attention` itself, with transfers by reference.

A position runs the code that it runs on a rank. Only the transfers are replaced: keys and values of
other positions are in memory already, and gradients for them are dropped or added up here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, its usual name

from gpu.model import BASE, made, turned
from gpu.timing import Work
from overlord.torch import hdp
from overlord.torch.hdp import attention as ring_code

Lengths = Sequence[int] | np.ndarray
Turn = tuple[Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of a layer with grouped queries."""

    hidden: int
    heads: int
    kv_heads: int
    width: int
    ffn: int

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden}, {self.heads} heads and {self.kv_heads} of keys and values of "
            f"width {self.width}, gated feed-forward {self.ffn}"
        )


LLAMA_8B = Shape(hidden=4096, heads=32, kv_heads=8, width=128, ffn=14_336)
LLAMA_12B = Shape(hidden=4608, heads=36, kv_heads=36, width=128, ffn=12_288)
TINY = Shape(hidden=32, heads=4, kv_heads=2, width=8, ffn=64)


class LocalRing:
    """One position of a ring whose other positions are in the memory of this process.

    ``blocks(p)`` returns the keys and values of position p, [2, tokens, kv_heads, width].
    ``zeros``: zeros of that shape in float32, for at least as many tokens. ``totals``: by position,
    where gradients of its keys and values are added up; None drops them.
    """

    def __init__(
        self,
        layout: hdp.RingLayout,
        blocks: Callable[[int], Tensor],
        zeros: Tensor,
        totals: Sequence[Tensor] | None = None,
    ):
        self.layout, self.blocks, self.zeros, self.totals = layout, blocks, zeros, totals
        self.dtype = blocks(layout.position).dtype
        for step in range(layout.size):
            layout.block(step, zeros.device)  # made now: later only the kernels take time


class _Arrived:
    """A transfer that is already done."""

    def __init__(self, block: Tensor):
        self._block = block

    def wait(self) -> Tensor:
        return self._block


def _by_reference(block: Tensor, ring: LocalRing, step: int) -> _Arrived:
    """Return what the previous position sends, in place of a transfer.

    Keys and values have the dtype of the ring, gradients are wider.
    """
    layout = ring.layout
    if layout.size == 1:
        return _Arrived(block)
    if block.dtype == ring.dtype:
        return _Arrived(ring.blocks(layout.source(step + 1)))
    if ring.totals is not None:
        ring.totals[layout.source(step)].add_(block)
    return _Arrived(ring.zeros[:, : layout.tokens(step + 1)])


@contextmanager
def by_reference() -> Iterator[None]:
    """Replace the transfers of `ring_attention` inside the context."""
    before, ring_code.rotate = ring_code.rotate, _by_reference
    try:
        yield
    finally:
        ring_code.rotate = before


def attention(q: Tensor, k: Tensor, v: Tensor, ring: Any) -> Tensor:
    return hdp.ring_attention(q, k, v, ring)


class _NoAttention(torch.autograd.Function):
    """Queries in place of attention: what is left is the linear part of a layer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.kv_heads = k.shape[1]
        return q.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        grad = grads[0]
        return grad, grad[:, : ctx.kv_heads], grad[:, : ctx.kv_heads]


def no_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _NoAttention.apply(q, k, v)


class Layer(nn.Module):
    """Attention with grouped queries and a gated feed-forward, each after its norm."""

    def __init__(self, shape: Shape):
        super().__init__()
        q, kv = shape.heads * shape.width, shape.kv_heads * shape.width
        self.shape = shape
        self.norm = nn.ParameterList([torch.ones(shape.hidden), torch.ones(shape.hidden)])
        self.qkv = nn.Linear(shape.hidden, q + 2 * kv, bias=False)
        self.out = nn.Linear(q, shape.hidden, bias=False)
        self.up = nn.Linear(shape.hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor, turn: Turn, attend: Attend) -> Tensor:
        shape = self.shape
        inner = self.qkv(F.rms_norm(x, (shape.hidden,), self.norm[0]))
        q, k, v = inner.view(len(x), -1, shape.width).split(
            [shape.heads, shape.kv_heads, shape.kv_heads], dim=1
        )
        x = x + self.out(attend(turned(q, turn), turned(k, turn), v).flatten(1))
        gate, inner = self.up(F.rms_norm(x, (shape.hidden,), self.norm[1])).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * inner)


def layer(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Layer:
    """Return a layer with random weights, created on the device."""
    with torch.device(device):
        return made(Layer(shape), device, dtype, seed)


def angles(tokens: int, width: int, device: torch.device, dtype: torch.dtype) -> Turn:
    """Return cosines and sines of rotary positions, [tokens, 1, width / 2] each."""
    rates = BASE ** (-torch.arange(0, width, 2, device=device) / width)
    found = torch.outer(torch.arange(tokens, device=device), rates)[:, None]
    return found.cos().to(dtype), found.sin().to(dtype)


def positions(layout: hdp.RingLayout) -> np.ndarray:
    """Return the position in its document of every token of a ring position: int64."""
    bounds = np.concatenate(([0], np.cumsum(layout.lengths)))
    index = layout.token_index()
    return index - bounds[np.searchsorted(bounds, index, side="right") - 1]


class Bench:
    """Pieces of work of one ring position: attention alone, a layer, or its linear part.

    ``whole``: most tokens of the documents of a ring. ``local``: most tokens of a position.
    """

    def __init__(self, shape: Shape, whole: int, local: int, device: torch.device):
        self.shape, self.device, self.dtype = shape, device, torch.bfloat16
        drawn = torch.Generator(device=device).manual_seed(1)

        def random(*size: int) -> Tensor:
            return torch.randn(size, device=device, dtype=self.dtype, generator=drawn)

        self.q, self.slope = (random(local, shape.heads, shape.width) for _ in range(2))
        self.kv = random(2, whole, shape.kv_heads, shape.width)
        self.x, self.x_slope = (random(local, shape.hidden) for _ in range(2))
        self.zeros = torch.zeros(
            (2, local, shape.kv_heads, shape.width), device=device, dtype=torch.float32
        )
        self.layer = layer(shape, device, self.dtype)
        self.turn = angles(whole, shape.width, device, self.dtype)

    def ring(self, lengths: Lengths, d: int, position: int) -> LocalRing:
        layout = hdp.RingLayout(lengths, d, position)
        held = [layout.tokens((position - p) % d) for p in range(d)]
        bounds = np.concatenate(([0], np.cumsum(held))).tolist()
        return LocalRing(layout, lambda p: self.kv[:, bounds[p] : bounds[p + 1]], self.zeros)

    def attention(self, lengths: Lengths, d: int, position: int) -> Work:
        """Return attention of a position as a piece of work, forward and backward."""
        ring = self.ring(lengths, d, position)
        n = ring.layout.tokens()
        inputs = [
            x.detach().requires_grad_() for x in (self.q[:n], *ring.blocks(position).unbind(0))
        ]

        def run() -> None:
            torch.autograd.grad(attention(*inputs, ring), inputs, self.slope[:n])

        return run

    def whole_layer(self, lengths: Lengths, d: int, position: int) -> Work | None:
        """Return a layer of a position as a piece of work; None if it has no tokens."""
        ring = self.ring(lengths, d, position)
        if not ring.layout.tokens():
            return None
        at = torch.from_numpy(positions(ring.layout)).to(self.device)
        return self._layer(at, lambda q, k, v: attention(q, k, v, ring))

    def linear(self, tokens: int) -> Work:
        """Return a layer without attention as a piece of work."""
        return self._layer(torch.arange(tokens, device=self.device), no_attention)

    def _layer(self, at: Tensor, attend: Attend) -> Work:
        n = len(at)

        def run() -> None:
            turn = self.turn[0][at], self.turn[1][at]
            x = self.x[:n].detach().requires_grad_()
            self.layer(x, turn, attend).backward(self.x_slope[:n])

        return run
