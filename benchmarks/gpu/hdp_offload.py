"""The share of activations that offload moves to the host before a step takes longer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import overlord.torch as ot
from gpu.record import Record, Row
from gpu.rings import LLAMA_12B, TINY, Shape, angles, attention, layer
from gpu.timing import settle
from overlord.torch import hdp
from overlord.torch.host_pool import HostPool

K = 1024
UNTIL = 0.3  # of the budget
RISE = 0.02  # of the step time, from which offload counts as not hidden
EARLIER = (0.31, 1.04e-5)  # r_max = a + b s of an earlier fit, at an assumed 53 GB/s


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """One document of ``tokens``, through ``layers``; every ratio is timed ``times``.

    The first ratios are the most important: others are left out if time is short.
    """

    tokens: int
    layers: int
    times: int
    ratios: tuple[float, ...] = (0.0, 1.0, 0.5, 0.75, 0.25)


FINE = (0.0, 1.0, 0.5, 0.75, 0.25, 0.375, 0.625, 0.875)
STACKS = (
    Stack(tokens=8 * K, layers=6, times=5, ratios=FINE),
    Stack(tokens=16 * K, layers=6, times=5, ratios=FINE),
    Stack(tokens=32 * K, layers=6, times=3, ratios=FINE),
    Stack(tokens=64 * K, layers=4, times=3),
)
SMALL = (Stack(tokens=64, layers=4, times=1), Stack(tokens=128, layers=4, times=1))


def predicted(
    ratio: float, layers: int, forward: float, backward: float, out: float, back: float
) -> float:
    """Return the seconds of a step by a timeline of the device and both directions of copies.

    ``forward`` and ``backward``: seconds of a layer. ``out`` and ``back``: seconds to copy all of
    its activations. The first and the last layer stay. Backward loads one layer ahead.
    """
    now, free, done = 0.0, 0.0, np.zeros(layers)
    for i in range(layers):
        if 0 < i < layers - 1:
            free = done[i] = max(max(free, now) + ratio * out, now + forward)
        now += forward
    ready, free = 0.0, 0.0
    for i in reversed(range(layers)):
        now = max(now, ready)
        if 0 < i - 1 < layers - 1:
            ready = free = max(free, now, done[i - 1]) + ratio * back
        else:
            ready = now
        now += backward
    return now


class Model:
    """Layers of the 12B shape with one document."""

    def __init__(self, shape: Shape, layers: int, tokens: int, device: torch.device):
        dtype, drawn = torch.bfloat16, torch.Generator(device=device).manual_seed(2)
        self.device, self.pool = device, HostPool(4 << 30 if device.type == "cuda" else 1 << 20)
        self.layers = [layer(shape, device, dtype, seed=i) for i in range(layers)]
        self.turn = angles(tokens, shape.width, device, dtype)
        self.x, self.slope = (
            torch.randn(tokens, shape.hidden, device=device, dtype=dtype, generator=drawn)
            for _ in range(2)
        )

    def step(self, stack: Stack, ratio: float) -> Row:
        """Run one step; return its seconds, those of its forward, and its memory."""
        cuda, n = self.device.type == "cuda", stack.tokens
        layers, ring = self.layers[: stack.layers], hdp.Ring([n])
        turn = self.turn[0][:n], self.turn[1][:n]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, ring)

        ring.layout.block(0, self.x.device)  # with an index, as tensors have
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated() if cuda else 0
        settle(self.device)
        marks = [_mark(self.device)]
        context = ot.offload(ratio, layers, pool=self.pool)
        with context:
            x = self.x[:n].detach().requires_grad_()
            for block in layers:
                x = block(x, turn, attend)
        marks.append(_mark(self.device))
        x.backward(self.slope[:n])
        marks.append(_mark(self.device))
        settle(self.device)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
        del x
        return {
            "seconds": _between(marks[0], marks[2]),
            "forward_s": _between(marks[0], marks[1]),
            "peak_gb": peak / 1e9,
            "base_gb": base / 1e9,
            "saved_bytes": context.saved_bytes,
            "offloaded_bytes": context.offloaded_bytes,
        }


def _mark(device: torch.device) -> float | torch.cuda.Event:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(a: float | torch.cuda.Event, b: float | torch.cuda.Event) -> float:
    if isinstance(a, float) or isinstance(b, float):
        return b - a  # type: ignore[operator]
    return a.elapsed_time(b) / 1e3


def bandwidth(device: torch.device, size: int) -> Row:
    """Return bytes per second between pinned memory and the device, by direction and both."""
    cuda = device.type == "cuda"
    host = [torch.empty(size, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
    there = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)] if cuda else [None, None]

    def copy(out: bool, back: bool) -> float:
        settle(device)
        began = time.perf_counter()
        for _ in range(4):
            for wanted, to, given, stream in (
                (out, host[0], there[0], streams[0]),
                (back, there[1], host[1], streams[1]),
            ):
                if wanted:
                    with torch.cuda.stream(stream):
                        to.copy_(given, non_blocking=True)
        settle(device)
        return 4 * size / (time.perf_counter() - began)

    copy(True, True)
    both = copy(True, True)
    return {
        "bytes": size,
        "out": copy(True, False),
        "back": copy(False, True),
        "each of both": both,
    }


def offloading(record: Record, device: torch.device, *, tiny: bool) -> None:
    """Measure bandwidth, then steps by tokens and ratio, and compare with the formula."""
    stacks, shape = (SMALL, TINY) if tiny else (STACKS, LLAMA_12B)
    found = record.attempt(
        "d, bandwidth", bandwidth, device, 1 << (20 if tiny else 30), expected=1.5
    )
    if found:
        record.add("d bandwidth", found)
    most = max(s.layers for s in stacks), max(s.tokens for s in stacks)
    model = record.attempt("d, model", Model, shape, *most, device, expected=2.0)
    if model is None:
        return
    for stack in stacks:
        _stack(record, model, stack, found)


def _stack(record: Record, model: Model, stack: Stack, copied: Row | None) -> None:
    n = stack.tokens
    guess = stack.layers * (n * 2.7e-6 + n * n * 1.1e-10)
    pinning = (stack.layers - 2) * n * 250_000 / 4e9
    name = f"d, {n} tokens, {stack.layers} layers"
    warm = record.attempt(
        f"{name}, warm-up", _warm, model, stack, expected=2.2 * guess + pinning, until=UNTIL
    )
    if warm is None:
        return
    once, measured = warm["seconds"], dict[float, float]()
    for ratio in stack.ratios:
        row = record.attempt(
            f"{name}, ratio {ratio}",
            _median,
            model,
            stack,
            ratio,
            expected=1.3 * once * stack.times,
            until=UNTIL,
        )
        if row is None:
            continue
        measured[ratio] = row["seconds"]
        record.add("d", {"tokens": n, "layers": stack.layers, "ratio": ratio, **row})
        if ratio == 0.0:
            once = row["seconds"]
    rows = [r for r in record.rows("d") if r["tokens"] == n]
    if copied and len(measured) > 1 and 0.0 in measured:
        record.attempt(f"{name}, formula", _formula, record, stack, rows, copied)


def _warm(model: Model, stack: Stack) -> Row:
    """Run once with all offloaded, which pins memory, and once with none."""
    model.step(stack, 1.0)
    return model.step(stack, 0.0)


def _median(model: Model, stack: Stack, ratio: float) -> Row:
    rows = sorted((model.step(stack, ratio) for _ in range(stack.times)), key=_seconds)
    return {**rows[len(rows) // 2], "times": len(rows)}


def _seconds(row: Row) -> float:
    return float(row["seconds"])


def _formula(record: Record, stack: Stack, rows: Sequence[Row], copied: Row) -> None:
    """Record the ratio at which the time rises, by measurement, formula and timeline."""
    by = {r["ratio"]: r for r in rows}
    zero, layers, inner = by[0.0], stack.layers, stack.layers - 2
    act = max(r["saved_bytes"] for r in rows) / inner
    forward = zero["forward_s"] / layers
    backward = (zero["seconds"] - zero["forward_s"]) / layers
    out, back = act / copied["out"], act / copied["back"]
    told = {r: predicted(r, layers, forward, backward, out, back) for r in sorted(by)}
    rise = {r: by[r]["seconds"] / zero["seconds"] - 1 for r in sorted(by)}
    risen = [r for r in sorted(by) if rise[r] > RISE]
    exact = np.linspace(0, 1, 101)
    line = [predicted(r, layers, forward, backward, out, back) / told[0.0] - 1 for r in exact]
    record.add(
        "d formula",
        {
            "tokens": stack.tokens,
            "layers": layers,
            "bytes a token and layer": act / stack.tokens,
            "forward_s": forward,
            "backward_s": backward,
            "r_max": forward / out,
            "earlier r_max": EARLIER[0] + EARLIER[1] * stack.tokens,
            "timeline rises at": next(
                (float(r) for r, x in zip(exact, line, strict=True) if x > RISE), None
            ),
            "first ratio that rises": risen[0] if risen else None,
            "rise": {str(r): x for r, x in rise.items()},
            "timeline": {str(r): told[r] / told[0.0] - 1 for r in told},
        },
    )
