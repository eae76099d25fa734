"""Attention kernels that return the logarithm of the softmax's denominator: one block of a ring.

A kernel computes packed documents: queries [Q, heads, width], keys and values
[K, kv_heads, width]. Its lse is [Q, heads], natural logarithm. ``backward`` takes the output and
lse of the whole softmax, so the gradients of all blocks add up to the exact ones.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from overlord.errors import PlanError
from overlord.torch.hdp.layout import Block

aten = torch.ops.aten
# Operators without a public name in torch. Only they return the lse and accept it in backward.
CPU_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
CPU_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
CUDA_FORWARD = "_flash_attention_forward"
CUDA_BACKWARD = "_flash_attention_backward"
HALF = (torch.bfloat16, torch.float16)  # the dtypes that the CUDA kernel supports


class Kernel(Protocol):
    """One block of attention, forward and backward."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return output [Q, heads, width] and lse [Q, heads]."""
        ...

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the block's part of the gradients of queries, keys and values."""
        ...


def kernel_of(q: Tensor) -> Kernel:
    """Return the kernel for the device and dtype of the queries."""
    if q.device.type == "cpu":
        return CpuKernel()
    if q.device.type == "cuda" and q.dtype in HALF:
        return CudaKernel()
    raise PlanError(
        f"ring_attention: expected tensors on the CPU, or bfloat16 or float16 on CUDA, got "
        f"{q.dtype} on {q.device.type}"
    )


class CpuKernel:
    """The kernel for the CPU: torch's flash attention, one document at a time, any floating dtype.

    It does not support grouped queries, so keys and values are repeated here, after the transfer.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
        groups = q.shape[1] // k.shape[1]
        for at, to in _documents(block):
            part, logs = _operator(CPU_FORWARD)(
                _heads_first(q[at]),
                _heads_first(k[to], groups),
                _heads_first(v[to], groups),
                0.0,
                block.causal,
                scale=scale,
            )
            out[at], lse[at] = part[0].transpose(0, 1), logs[0].transpose(0, 1)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = inputs
        groups = q.shape[1] // k.shape[1]
        made = (q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape))
        for at, to in _documents(block):
            parts = _operator(CPU_BACKWARD)(
                _heads_first(grad[at]),
                _heads_first(q[at]),
                _heads_first(k[to], groups),
                _heads_first(v[to], groups),
                _heads_first(out[at]),
                lse[at].transpose(0, 1)[None],
                0.0,
                block.causal,
                scale=scale,
            )
            made[0][at] = parts[0][0].transpose(0, 1)
            for whole, part in zip(made[1:], parts[1:], strict=True):
                whole[to] = part[0].unflatten(0, (-1, groups)).sum(1).transpose(0, 1)
        return made


class CudaKernel:
    """The kernel for CUDA: flash attention of packed documents, as in torch.nn.attention.varlen.

    Written from the source of torch 2.13, whose lse of packed documents is [heads, Q]. The kernel
    supports grouped queries.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = _operator(CUDA_FORWARD)(
            q, k, v, *block.on_device, *block.longest, 0.0, block.causal, False, scale=scale
        )
        if tuple(lse.shape) != (q.shape[1], q.shape[0]):
            raise PlanError(
                f"ring_attention: expected an lse of [heads, tokens], got {tuple(lse.shape)} from "
                f"torch {torch.__version__}; use torch 2.13"
            )
        return out, lse.transpose(0, 1)

    def backward(
        self,
        grad: Tensor,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        lse: Tensor,
        block: Block,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = inputs
        # The state of dropout's random generator; dropout is 0.
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        unused = torch.empty(0, device=q.device)
        dq, dk, dv = _operator(CUDA_BACKWARD)(
            grad.contiguous(),
            q,
            k,
            v,
            out,
            lse.transpose(0, 1).contiguous(),
            *block.on_device,
            *block.longest,
            0.0,
            block.causal,
            seed,
            unused,
            scale=scale,
        )
        return dq, dk, dv


def _operator(name: str) -> Callable[..., Any]:
    """Return an operator of torch by name; raise ``PlanError`` if this version has none."""
    found: Callable[..., Any] | None = getattr(aten, name, None)
    if found is None:
        raise PlanError(
            f"ring_attention: expected the operator aten.{name}, got torch {torch.__version__} "
            "without it; use torch 2.13"
        )
    return found


def _documents(block: Block) -> Any:
    return zip(
        (slice(a, b) for a, b in pairwise(block.query_bounds.tolist())),
        (slice(a, b) for a, b in pairwise(block.key_bounds.tolist())),
        strict=True,
    )


def _heads_first(rows: Tensor, groups: int = 1) -> Tensor:
    """Return [1, heads, tokens, width] of [tokens, heads, width], each head ``groups`` times."""
    repeated = rows.repeat_interleave(groups, dim=1) if groups > 1 else rows
    return repeated.transpose(0, 1)[None]
