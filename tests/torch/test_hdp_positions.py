"""All positions of a ring in one process, one after another, with the real kernels: on the CPU in
float64, and on a CUDA device in bfloat16 where there is one.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

import overlord.torch as ot
from overlord.torch import hdp
from overlord.torch.hdp.kernels import kernel_of
from overlord.torch.hdp.rows import add, merge, take
from tests.laws import examples

Tensors = list[torch.Tensor]
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_positions(
    given: Tensors, weight: torch.Tensor, lengths: list[int], d: int
) -> tuple[torch.Tensor, Tensors]:
    """Output and gradients of whole documents, computed by the blocks of all positions. Blocks are
    passed by reference, so nothing is sent.
    """
    device, scale = given[0].device, given[0].shape[-1] ** -0.5
    wide = torch.promote_types(given[0].dtype, torch.float32)
    layouts = [hdp.RingLayout(lengths, d, k) for k in range(d)]
    index = [torch.from_numpy(x.token_index()).to(device) for x in layouts]
    pieces = [[x[i] for x in given] for i in index]
    result = torch.empty_like(given[0])
    grads = [torch.zeros(x.shape, dtype=wide, device=device) for x in given]
    for position, layout in enumerate(layouts):
        q = pieces[position][0]
        kernel = kernel_of(q)
        out = torch.zeros(q.shape, dtype=wide, device=device)
        lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=device)
        blocks = [
            (block, layout.source(step))
            for step in range(d)
            if (block := layout.block(step, device)) is not None
        ]
        for block, source in blocks:
            k, v = (take(x, block.keys) for x in pieces[source][1:])
            merge(
                out, lse, block.queries, *kernel.forward(take(q, block.queries), k, v, block, scale)
            )
        final, grad = out.to(q.dtype), weight[index[position]]
        result[index[position]] = final
        for block, source in blocks:
            k, v = (take(x, block.keys) for x in pieces[source][1:])
            rows = [take(x, block.queries) for x in (grad, q, final, lse)]
            made = kernel.backward(rows[0], (rows[1], k, v), rows[2], rows[3], block, scale)
            for whole, part, mine, at in zip(
                grads,
                made,
                (block.queries, block.keys, block.keys),
                (position, source, source),
                strict=True,
            ):
                add(whole, take(index[at], mine), part)
    return result, grads


def on_one(
    given: Tensors, weight: torch.Tensor, lengths: list[int]
) -> tuple[torch.Tensor, Tensors]:
    mine = [x.clone().requires_grad_() for x in given]
    out = hdp.ring_attention(*mine, hdp.Ring(lengths))
    out.backward(weight)
    return out.detach(), [x.grad for x in mine if x.grad is not None]


def random_rows(
    tokens: int, heads: tuple[int, int], width: int, dtype: torch.dtype, device: str
) -> tuple[Tensors, torch.Tensor]:
    torch.manual_seed(tokens)
    sizes = (heads[0], heads[1], heads[1], heads[0])
    *given, weight = (torch.randn(tokens, h, width).to(device, dtype) for h in sizes)
    return given, weight


@examples(30)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 6))
def test_blocks_of_all_positions_are_the_whole(lengths: list[int], d: int) -> None:
    rows, weight = random_rows(sum(lengths), (4, 2), 4, torch.float64, "cpu")
    out, grads = on_positions(rows, weight, lengths, d)
    wanted, wanted_grads = on_one(rows, weight, lengths)
    for a, b in zip((out, *grads), (wanted, *wanted_grads), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@cuda
@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("lengths", [[4096], [1, 777, 2048, 15, 3000]])
def test_the_cuda_kernel_agrees_with_flash_attention_over_whole_documents(
    lengths: list[int], d: int
) -> None:
    rows, weight = random_rows(sum(lengths), (16, 4), 128, torch.bfloat16, "cuda")
    found = on_positions(rows, weight, lengths, d)
    bounds = [0, *np.cumsum(lengths).tolist()]
    mine = [x.clone().requires_grad_() for x in rows]
    parts = [
        torch.nn.functional.scaled_dot_product_attention(
            *(x[a:b].transpose(0, 1)[None] for x in mine), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        for a, b in pairwise(bounds)
    ]
    wanted = torch.cat(parts)
    wanted.backward(weight)
    for a, b in zip((found[0], *found[1]), (wanted, *(x.grad for x in mine)), strict=True):
        assert b is not None
        cosine = torch.nn.functional.cosine_similarity(
            a.double().flatten(), b.detach().double().flatten(), dim=0
        )
        assert float(cosine) > 0.9999


@cuda
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_offload_on_a_device_changes_no_bit_and_frees_memory(ratio: float) -> None:
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(8))
    ).cuda()
    x = torch.randn(8192, 512, device="cuda")

    def run(share: float) -> tuple[Tensors, int]:
        layers.zero_grad()
        with ot.offload(share, layers):
            loss = layers(x).square().sum()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        loss.backward()
        return [p.grad.clone() for p in layers.parameters()], held

    run(0.0)
    (wanted, before), (found, after) = run(0.0), run(ratio)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert after < before
