"""Zigzag ring attention over any ring of ranks of one process group.

Keys and values rotate around the ring, one position per step. Every rank computes attention of its
queries over the block that it holds, and merges outputs by their log-sum-exp (lse). In backward,
keys and values rotate again, together with their gradients. After the last step one more transfer
returns the gradients to their owner. All transfers are batched point-to-point operations between
neighbours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from overlord.errors import PlanError
from overlord.torch.hdp.kernels import kernel_of
from overlord.torch.hdp.ring import Ring
from overlord.torch.hdp.rows import add, merge, take


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, ring: Ring, *, scale: float | None = None
) -> Tensor:
    """Return causal attention of this rank's tokens over their whole documents.

    ``q`` [tokens, heads, width], ``k`` and ``v`` [tokens, kv_heads, width]: this rank's pieces, in
    the order of ``ring.token_index()``, with rotary positions applied. All ranks of the ring call
    it, forward and backward, also a rank without tokens. ``scale``: width^-1/2 by default.
    """
    _check(q, k, v, ring)
    scale = float(q.shape[-1]) ** -0.5 if scale is None else float(scale)
    made: Tensor = _RingAttention.apply(q, k, v, ring, scale)
    return made


def _check(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> None:
    if (
        q.ndim != 3
        or k.shape != v.shape
        or k.shape[::2] != q.shape[::2]
        or len(q) != ring.layout.tokens()
    ):
        raise PlanError(
            f"ring_attention: expected q [{ring.layout.tokens()}, heads, width] and k, v "
            f"[{ring.layout.tokens()}, kv_heads, width] for {ring}, got {tuple(q.shape)}, "
            f"{tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[1] % k.shape[1]:
        raise PlanError(
            f"ring_attention: expected heads to be a multiple of {k.shape[1]} kv_heads, got "
            f"{q.shape[1]}"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise PlanError(
            "ring_attention: expected one dtype and device, got "
            + ", ".join(f"{t.dtype} on {t.device}" for t in (q, k, v))
        )


class _RingAttention(torch.autograd.Function):  # type: ignore[misc]
    """The whole ring as one function: backward needs q, k, v, the final output and its lse."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float) -> Tensor:
        kernel = kernel_of(q)
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
        block = torch.stack((k, v))
        for step in range(ring.layout.size):
            coming = rotate(block, ring, step) if step + 1 < ring.layout.size else None
            if (at := ring.layout.block(step, q.device)) is not None:
                keys, values = (take(x, at.keys) for x in block)
                part = kernel.forward(take(q, at.queries), keys, values, at, scale)
                merge(out, lse, at.queries, *part)
            block = block if coming is None else coming.wait()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        ctx.ring, ctx.scale = ring, scale
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        ring, kernel, grad = ctx.ring, kernel_of(q), grads[0].contiguous()
        d_query = torch.zeros(q.shape, dtype=lse.dtype, device=q.device)
        block, home = torch.stack((k, v)), None
        for step in range(ring.layout.size):
            coming = rotate(block, ring, step) if step + 1 < ring.layout.size else None
            d_block = torch.zeros(block.shape, dtype=lse.dtype, device=q.device)
            if (at := ring.layout.block(step, q.device)) is not None:
                keys, values = (take(x, at.keys) for x in block)
                dq, dk, dv = kernel.backward(
                    take(grad, at.queries),
                    (take(q, at.queries), keys, values),
                    take(out, at.queries),
                    take(lse, at.queries),
                    at,
                    ctx.scale,
                )
                add(d_query, at.queries, dq)
                add(d_block[0], at.keys, dk)
                add(d_block[1], at.keys, dv)
            if home is not None:
                d_block += home.wait()  # gradients that earlier positions added for this block
            home = rotate(d_block, ring, step)
            block = block if coming is None else coming.wait()
        d_key, d_value = (d_block if home is None else home.wait()).to(k.dtype)
        return d_query.to(q.dtype), d_key, d_value, None, None


class _Transfer:
    """A transfer to the next position of the ring, in progress."""

    __slots__ = ("_received", "_sent", "_works")

    def __init__(self, sent: Tensor, received: Tensor, works: list[Any]):
        self._sent, self._received, self._works = sent, received, works

    def wait(self) -> Tensor:
        """Wait for the send and the receive; return the received block."""
        for work in self._works:
            work.wait()
        return self._received


def rotate(block: Tensor, ring: Ring, step: int) -> _Transfer:
    """Send the block of a step to the next position, and receive the block of the next step.

    Blocks without tokens are not sent: both ends compute their sizes. On a ring of one rank the
    received block is the given one.
    """
    if ring.layout.size == 1:
        return _Transfer(block, block, [])
    here, coming = ring.layout.tokens(step), ring.layout.tokens(step + 1)
    received = block.new_empty((block.shape[0], coming, *block.shape[2:]))
    operations = []
    if here:
        operations.append(dist.P2POp(dist.isend, block, ring.following, ring.group))
    if coming:
        operations.append(dist.P2POp(dist.irecv, received, ring.previous, ring.group))
    return _Transfer(block, received, dist.batch_isend_irecv(operations) if operations else [])
