"""Offloaded activations: gradients are equal bit by bit, memory is really given back, and backward
has the next layer loaded before it needs it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import overlord.torch as ot
from overlord.errors import PlanError

pytest.importorskip("torch")

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from overlord.torch import hdp
from overlord.torch.host_pool import ALIGN, HostPool
from tests.torch.ranks.hdp_decoder import Decoder, Layer

TOKENS = 70


class Deep(Decoder):
    """Five layers, of which the three in the middle are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(5)).double()


def attend(q: Any, k: Any, v: Any) -> Any:
    return hdp.ring_attention(q, k, v, hdp.Ring([TOKENS - 1, 1]))


def loss_of(model: Deep) -> Any:
    tokens = torch.arange(TOKENS) % 13
    hidden = model(tokens, torch.arange(TOKENS), attend)
    return ot.token_loss(hidden, (tokens + 1) % 13, TOKENS, head=model.head, chunk=20)


def grads(model: Deep, ratio: float | None, layers: bool = True, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    made = None
    if ratio is None:
        loss = loss_of(model)
    else:
        with ot.offload(ratio, model.layers if layers else None, **options) as made:
            loss = loss_of(model)
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters()], made


@pytest.mark.parametrize("layers", [True, False])
@pytest.mark.parametrize("ratio", [0.0, 0.001, 0.37, 1.0])
def test_gradients_are_equal_bit_by_bit(ratio: float, layers: bool) -> None:
    model = Deep()
    wanted, _ = grads(model, None)
    found, made = grads(model, ratio, layers)
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert made.offloaded_bytes == pytest.approx(ratio * made.saved_bytes, rel=1e-3, abs=200)
    assert (made.offloaded_bytes > 0) == (ratio > 0)


def test_first_and_last_layer_stay() -> None:
    _, inner = grads(Deep(), 1.0, True)
    _, everything = grads(Deep(), 1.0, False)
    model = Deep()
    with ot.offload(1.0, list(model.layers)[:2]) as made:
        loss_of(model)
    assert made.offloaded_bytes == 0
    assert 0.4 * everything.saved_bytes < inner.saved_bytes < 0.8 * everything.saved_bytes


def test_backward_can_run_twice() -> None:
    model = Deep()
    wanted, _ = grads(model, None)
    with ot.offload(0.6, model.layers):
        loss = loss_of(model)
    model.zero_grad()
    for times in (1, 2):
        loss.backward(retain_graph=True)
        assert all(
            torch.allclose(times * g, p.grad, rtol=1e-13, atol=0)
            for g, p in zip(wanted, model.parameters(), strict=True)
        ), times
        if times == 1:
            assert all(
                torch.equal(g, p.grad) for g, p in zip(wanted, model.parameters(), strict=True)
            )


def test_activations_leave_the_device_and_parameters_do_not() -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(64, 64) * 2
    held = StorageWeakRef(x.untyped_storage())
    with ot.offload(1.0) as made:
        y = x @ weight.t()
        del x
    assert held.expired(), "autograd still holds the memory of the activation"
    assert made.offloaded_bytes == made.saved_bytes == 64 * 64 * 4
    y.sum().backward()
    assert weight.grad is not None


def test_a_part_on_the_device_is_a_part_only() -> None:
    x = torch.randn(1000, requires_grad=True) * 2
    with ot.offload(0.25) as made:
        y = x.exp().sin()
    assert (made.saved_bytes, made.offloaded_bytes) == (4000, 1000)
    y.sum().backward()


def test_views_of_one_memory_are_stored_once() -> None:
    a = torch.randn(300, 4, requires_grad=True) * 1.5
    left, right = a.unbind(1)[0], a[:, 1]
    with ot.offload(1.0) as made:
        y = left * right
    assert made.saved_bytes == made.offloaded_bytes == a.numel() * 4
    y.sum().backward()


def test_memory_that_was_changed_between_two_saves_is_stored_twice() -> None:
    a = torch.ones(300, requires_grad=True) * 2
    with ot.offload(1.0):
        first = a * a.detach()
        with torch.no_grad():
            a.detach().mul_(0.5)
        second = a * a.detach()
    assert torch.equal(
        torch.autograd.grad(first.sum(), a, retain_graph=True)[0], torch.full((300,), 2.0)
    )
    assert torch.equal(torch.autograd.grad(second.sum(), a)[0], torch.full((300,), 1.0))


def test_what_is_small_a_sliver_or_expanded_stays() -> None:
    big = torch.randn(100_000, requires_grad=True) * 1.0
    tiny = torch.randn(8, requires_grad=True) * 1.0
    wide = (torch.randn(400, 1, requires_grad=True) * 1.0).expand(400, 50)
    with ot.offload(1.0) as made:
        y = (big[:500] * big[500:1000]).sum() + tiny.exp().sum()
    assert made.offloaded_bytes == 0
    with ot.offload(1.0) as made:
        z = wide * wide
    assert made.offloaded_bytes == 1600, "the memory is stored, not its expansion"
    assert torch.equal(torch.autograd.grad(z.sum(), wide)[0], 2 * wide)
    y.backward()


def test_the_layer_before_is_loaded_while_a_layer_runs_backward() -> None:
    model, seen = Deep(), []
    with ot.offload(0.5, model.layers) as made:
        for i, layer in enumerate(model.layers):
            layer.register_full_backward_hook(lambda *_, i=i: seen.append((i, made.loaded())))
        loss = loss_of(model)
    loss.backward()
    assert [i for i, _ in seen] == [4, 3, 2, 1, 0]
    after = dict(seen)
    assert 3 in after[4]
    assert 2 in after[3]
    assert 1 in after[2]
    assert all(max([*loaded, 0]) <= i for i, loaded in seen), "layers behind are forgotten"


def test_host_memory_is_reused() -> None:
    pool, model = HostPool(1 << 16), Deep()
    grads(model, 1.0, pool=pool)
    held = pool.bytes
    for _ in range(3):
        _, made = grads(model, 1.0, pool=pool)
        del made
        gc.collect()
    assert pool.bytes <= held + (1 << 17)
    assert held > 1 << 16


@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), max_size=40))
def test_regions_of_a_pool_never_overlap(requests: list[tuple[int, bool]]) -> None:
    pool, live = HostPool(8192), []
    for number, (size, release) in enumerate(requests):
        region = pool.take(size, pinned=False)
        assert len(region.memory) == size
        region.memory.fill_(number % 251)
        live.append((region, number % 251))
        if release and len(live) > 1:
            pool.release(live.pop(0)[0])
        assert all((r.memory == value).all() for r, value in live)
    room = sum(-(-size // ALIGN) * ALIGN for size, _ in requests)
    assert pool.bytes <= 2 * max(8192, room) + 8192


@pytest.mark.parametrize("ratio", [-0.1, 1.01, float("nan")])
def test_a_ratio_that_is_none_is_refused(ratio: float) -> None:
    with pytest.raises(PlanError, match="offload: expected a ratio of 0 to 1"):
        ot.offload(ratio)


def test_ratios_come_as_microbatches_have_them() -> None:
    np = pytest.importorskip("numpy")
    make: Callable[[Any], Any] = ot.offload
    assert make(np.float32(0.5)).ratio == make(torch.tensor(0.5)).ratio == 0.5
