"""Ring attention without processes: blocks of every position, kernels, refusals, one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord.torch as ot
from overlord.errors import PlanError

pytest.importorskip("torch")

import torch

from overlord.torch import hdp
from overlord.torch.hdp import kernels
from overlord.torch.hdp.layout import Block, RingLayout
from tests.torch.ranks.hdp_decoder import HEAD, HEADS, KV_HEADS, plain

CPU = torch.device("cpu")
documents = st.lists(st.integers(0, 30), min_size=1, max_size=5)


def rows_of(rows: Any, n: int) -> np.ndarray:
    return np.arange(n)[rows] if isinstance(rows, slice) else rows.numpy()


def pairs(lengths: list[int], d: int, position: int) -> list[tuple[int, int]]:
    """All (query, key) of a position over all steps, as tokens of the whole buffer."""
    layout, found = RingLayout(lengths, d, position), []
    own = layout.token_index()
    for step in range(d):
        block = layout.block(step, CPU)
        if block is None:
            continue
        theirs = RingLayout(lengths, d, layout.source(step)).token_index()
        queries, keys = (
            own[rows_of(block.queries, len(own))],
            theirs[rows_of(block.keys, len(theirs))],
        )
        for i in range(len(block.query_bounds) - 1):
            q = queries[block.query_bounds[i] : block.query_bounds[i + 1]]
            k = keys[block.key_bounds[i] : block.key_bounds[i + 1]]
            assert len(q)
            assert len(k)
            found += [
                (int(a), int(b))
                for n, a in enumerate(q)
                for m, b in enumerate(k)
                if not block.causal or m <= n
            ]
    return found


@given(documents, st.integers(1, 5))
def test_every_pair_of_a_document_is_computed_once(lengths: list[int], d: int) -> None:
    found = [pair for k in range(d) for pair in pairs(lengths, d, k)]
    ends = np.cumsum(lengths)
    wanted = [
        (q, k)
        for end, n in zip(ends.tolist(), lengths, strict=True)
        for q in range(end - n, end)
        for k in range(end - n, q + 1)
    ]
    assert sorted(found) == wanted


@given(documents, st.integers(1, 6), st.data())
def test_both_ends_of_a_hop_agree_on_its_size(
    lengths: list[int], d: int, data: st.DataObject
) -> None:
    position, step = data.draw(st.integers(0, d - 1)), data.draw(st.integers(0, d - 1))
    here, there = RingLayout(lengths, d, position), RingLayout(lengths, d, (position + 1) % d)
    assert here.tokens(step) == there.tokens(step + 1)
    assert here.tokens(d) == here.tokens(0) == len(here.token_index())


def test_one_long_document_is_sliced_without_copies() -> None:
    layout = RingLayout([100], 4, 1)
    blocks = [layout.block(step, CPU) for step in range(4)]
    assert all(isinstance(b.queries, slice) and isinstance(b.keys, slice) for b in blocks if b)
    assert blocks[1] is layout.block(1, CPU), "made once for all layers"


def given_rows(n: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(n)
    return [torch.randn(n, h, HEAD, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS)]


@given(documents)
def test_a_ring_of_one_is_plain_attention_over_packed_documents(lengths: list[int]) -> None:
    given, other = ([x.requires_grad_() for x in given_rows(sum(lengths))] for _ in range(2))
    weight = torch.randn(sum(lengths), HEADS, HEAD, dtype=torch.float64)
    found = hdp.ring_attention(*given, hdp.Ring(lengths))
    parts = zip(*(x.split(lengths) for x in other), strict=True)
    wanted = torch.cat([plain(*part) for part in parts])
    (found * weight).sum().backward()
    (wanted * weight).sum().backward()
    assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    for a, b in zip(given, other, strict=True):
        assert a.grad is not None
        assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-11)


def test_gradcheck() -> None:
    given = [x.requires_grad_() for x in given_rows(6)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: hdp.ring_attention(q, k, v, hdp.Ring([5, 1]), scale=0.4), given
    )


# the CUDA kernel, which needs a device: its calls, and what it does with their results


def test_the_calls_of_the_cuda_kernel_fit_the_operators_of_torch() -> None:
    """The operators' own shapes, computed without a device."""
    meta = torch.device("meta")
    block = RingLayout([40, 9], 2, 1).block(1, meta)
    assert block is not None
    q, k = block.query_bounds[-1], block.key_bounds[-1]
    rows = [
        torch.empty(n, h, 64, dtype=torch.bfloat16, device=meta)
        for n, h in ((q, 8), (k, 2), (k, 2))
    ]
    out, lse = kernels.CudaKernel().forward(*rows, block, 0.125)
    assert tuple(out.shape) == (q, 8, 64)
    assert tuple(lse.shape) == (q, 8)
    made = kernels.CudaKernel().backward(out, tuple(rows), out, lse, block, 0.125)
    assert [tuple(x.shape) for x in made] == [tuple(x.shape) for x in rows]


def stand_in() -> Any:
    """The two operators as the CUDA kernel calls them, computed on the CPU."""
    cpu = kernels.CpuKernel()

    def block_of(
        at: torch.Tensor, to: torch.Tensor, longest: tuple[int, int], causal: bool
    ) -> Block:
        made = Block(
            queries=slice(0, int(at[-1])),
            keys=slice(0, int(to[-1])),
            query_bounds=at.numpy(),
            key_bounds=to.numpy(),
            on_device=(at, to),
            causal=causal,
        )
        assert at.dtype == to.dtype == torch.int32
        assert made.longest == longest
        return made

    def forward(q, k, v, at, to, most_q, most_k, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        out, lse = cpu.forward(q, k, v, block_of(at, to, (most_q, most_k), causal), scale)
        return out, lse.t().contiguous(), None, None, None

    def backward(
        grad, q, k, v, out, lse, at, to, most_q, most_k, dropout, causal, seed, unused, *, scale
    ):
        assert lse.is_contiguous()
        assert (dropout, len(seed), len(unused)) == (0.0, 2, 0)
        block = block_of(at, to, (most_q, most_k), causal)
        return cpu.backward(grad, (q, k, v), out, lse.t(), block, scale)

    return SimpleNamespace(_flash_attention_forward=forward, _flash_attention_backward=backward)


@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_cuda_kernel_means_the_same_as_the_one_of_the_cpu(
    step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = RingLayout([31, 1, 17], 3, 1).block(step, CPU)
    assert block is not None
    q, k = (int(b[-1]) for b in (block.query_bounds, block.key_bounds))
    rows = (given_rows(q)[0], *given_rows(k)[1:])
    wanted, logs = kernels.CpuKernel().forward(*rows, block, 0.3)
    grads = kernels.CpuKernel().backward(wanted, rows, wanted, logs, block, 0.3)
    fake = stand_in()
    monkeypatch.setattr(
        kernels,
        "aten",
        SimpleNamespace(
            **vars(fake),
            **{
                name: getattr(torch.ops.aten, name)
                for name in (
                    "_scaled_dot_product_flash_attention_for_cpu",
                    "_scaled_dot_product_flash_attention_for_cpu_backward",
                )
            },
        ),
    )
    out, lse = kernels.CudaKernel().forward(*rows, block, 0.3)
    assert torch.equal(out, wanted)
    assert torch.equal(lse, logs)
    found = kernels.CudaKernel().backward(wanted, rows, wanted, logs, block, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(found, grads, strict=True))


def test_a_kernel_with_another_lse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(q, *_, **__):
        return q, torch.zeros(1, HEADS, 128), None, None, None

    monkeypatch.setattr(kernels, "aten", SimpleNamespace(_flash_attention_forward=forward))
    block = RingLayout([9], 1, 0).block(0, CPU)
    with pytest.raises(PlanError, match=r"expected an lse of \[heads, tokens\], got \(1, 4, 128\)"):
        kernels.CudaKernel().forward(*given_rows(9), block, 1.0)


# refusals


def test_wrong_rows_are_refused() -> None:
    q, k, v = given_rows(9)
    ring = hdp.Ring([8])
    with pytest.raises(PlanError, match=r"expected q \[8, heads, width\] .* got \(9, 4, 4\)"):
        hdp.ring_attention(q, k, v, ring)
    with pytest.raises(PlanError, match="expected heads to be a multiple of 3 kv_heads, got 4"):
        hdp.ring_attention(q, *[x.repeat(1, 2, 1)[:, :3] for x in (k, v)], hdp.Ring([9]))
    with pytest.raises(PlanError, match=r"expected one dtype and device, got torch.float64 on cpu"):
        hdp.ring_attention(q, k.float(), v, hdp.Ring([9]))
    with pytest.raises(PlanError, match=r"float16 on CUDA, got torch.float32 on meta"):
        kernels.kernel_of(torch.empty(0, device="meta"))


def test_wrong_rings_are_refused() -> None:
    for ranks, position, text in (
        ([0, 1, 0], 1, "expected distinct ranks"),
        ([0], 1, "a position of 0 to 0, got position 1"),
        ([0, 1], 0, "expected a process group, got none; call torch.distributed.init"),
    ):
        with pytest.raises(PlanError, match=text):
            hdp.Ring([4], ranks, position)
    with pytest.raises(
        PlanError, match=r"expected a flat list of lengths of at least 0, got \[-1\]"
    ):
        hdp.Ring([-1])


def test_a_ring_comes_from_the_keys_of_a_microbatch() -> None:
    mb: dict[str, Any] = {"cu_seqlens_padded": torch.tensor([0, 4, 9], dtype=torch.int32)}
    assert repr(hdp.Ring.of(mb)) == "Ring([0], position 0, 2 documents, 9 of 9 tokens)"
    mb |= {"cp_ranks": np.array([7], np.int32), "cp_rank": np.int32(0)}
    assert hdp.Ring.of(mb).ranks == (7,)
    mb["document_lengths"] = np.array([3], np.int64)
    assert hdp.Ring.of(mb).layout.lengths.tolist() == [3]


def test_a_pipeline_of_one_stage_needs_no_processes() -> None:
    weight = torch.ones(3, requires_grad=True)
    stage = hdp.Stage(number=0, count=1)
    run = hdp.Pipeline(stage, lambda mb, x: (weight * mb).sum(), lambda mb: ()).run
    losses = run([torch.ones(3), 2 * torch.ones(3)])
    assert [loss.item() for loss in losses] == [3, 6]
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3]
    assert run([]) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (
            1,
            r"stage 0: expected torch.float32 of shape \(\), got .* the last stage returns the loss",
        ),
        (2, r"stage 0: expected torch.float32 of shape \(4, 5\), got torch.float64 of \(4, 3\)"),
    ],
)
def test_activations_of_another_shape_are_refused(count: int, text: str) -> None:
    def forward(mb: Any, x: Any) -> Any:
        return torch.ones(4, 3, dtype=torch.float64)

    made = hdp.Pipeline(hdp.Stage(number=0, count=count), forward, lambda mb: (4, 5))
    with pytest.raises(PlanError, match=text):
        made.run([None])


def test_the_loss_never_has_the_logits_of_all_tokens() -> None:
    weight, most = torch.randn(9, 5, requires_grad=True), []
    hidden = torch.randn(50, 5, requires_grad=True)

    def head(rows: torch.Tensor) -> torch.Tensor:
        most.append(len(rows))
        return rows @ weight.t()

    saved: list[int] = []
    labels = torch.arange(50) % 9
    labels[::3] = -100
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.numel()) or t, lambda t: t
    ):
        loss = ot.token_loss(hidden, labels, 7, head=head, chunk=8)
    loss.backward()
    assert max(most) == 8
    assert max(saved, default=0) <= hidden.numel()
    logits = hidden.detach() @ weight.detach().t()
    wanted = (
        torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum") / 7
    )
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
