"""Correctness of ring positions, and their times by length and ring size."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812, its usual name
from torch.nn.attention import SDPBackend, sdpa_kernel

import overlord as ov
from gpu.record import Record, Row
from gpu.rings import Bench, LocalRing, Shape, attention, by_reference
from gpu.timing import Work, all_seconds, host_seconds, seconds_of, settle, warm_up
from hybrid.measure import MODEL
from overlord.planning.cost.ring import RingCosts
from overlord.torch import hdp

K = 1024
RATE = 4e14  # FLOP/s assumed before anything is measured, to leave out what takes too long
MOST_S = 2.8  # of a cell
NAMES = ("output", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What parts a and b run."""

    exact: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]  # lengths, ring sizes
    single: int  # longest document compared with float32 too
    tokens: tuple[int, ...]  # s
    sizes: tuple[int, ...]  # d
    least: int  # tokens of a position
    short: tuple[tuple[int, int], ...]  # documents, tokens of each: microbatches of one rank
    several: tuple[tuple[int, int], ...]  # documents, tokens of each on a rank: of every ring
    equal: tuple[int, tuple[int, ...]]  # s, and ring sizes all of whose positions run
    whole: int  # most tokens of a ring
    local: int  # most tokens of a position


REAL = Grid(
    exact=(
        ((5003,), (2, 3, 4, 6, 8)),
        ((1, 777, 2048, 15, 3000), (2, 3, 4, 6, 8)),
        ((4096, 8192, 1000), (2, 3, 4, 6, 8)),
        ((65_539,), (3, 8)),
    ),
    single=6000,
    tokens=tuple(n * K for n in (8, 16, 32, 64, 128, 192, 256, 384, 512)),
    sizes=(1, 2, 4, 8, 16, 32, 64),
    least=2 * K,
    short=((128, 64), (16, 512), (4, 2 * K), (64, 64), (256, 64), (2, 8 * K)),
    several=((2, 4 * K), (8, 1 * K), (4, 1 * K)),
    equal=(64 * K, (2, 3, 4, 6, 8)),
    whole=512 * K,
    local=128 * K,
)
SMALL = Grid(
    exact=(((67,), (2, 3)), ((1, 20, 9), (4,))),
    single=100,
    tokens=(32, 64, 96, 128, 192, 256),
    sizes=(1, 2, 4),
    least=16,
    short=((8, 4), (2, 16)),
    several=((2, 16),),
    equal=(64, (2, 3)),
    whole=512,
    local=512,
)


# part a


def reference(inputs: Sequence[Tensor], slope: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return output and gradients of flash attention over whole documents."""
    mine = [x.detach().requires_grad_() for x in inputs]
    bounds = np.concatenate(([0], np.cumsum(lengths))).tolist()
    backends = [SDPBackend.FLASH_ATTENTION]
    if inputs[0].dtype == torch.float32:
        backends = [SDPBackend.MATH]
    with sdpa_kernel(backends):
        parts = [
            F.scaled_dot_product_attention(
                *(x[a:b].transpose(0, 1)[None] for x in _repeated(mine)), is_causal=True
            )[0].transpose(0, 1)
            for a, b in pairwise(bounds)
        ]
    out = torch.cat(parts)
    return [out.detach(), *torch.autograd.grad(out, mine, slope)]


def _repeated(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return q, k and v with as many heads of keys and values as of queries."""
    q, k, v = inputs
    groups = q.shape[1] // k.shape[1]
    return [q, *(x.repeat_interleave(groups, dim=1) for x in (k, v))]


def on_ring(
    inputs: Sequence[Tensor], slope: Tensor, lengths: Sequence[int], d: int
) -> list[Tensor]:
    """Return output and gradients by all positions of a ring, one after another."""
    layouts = [hdp.RingLayout(lengths, d, p) for p in range(d)]
    index = [torch.from_numpy(x.token_index()).to(slope.device) for x in layouts]
    blocks = [torch.stack((inputs[1][i], inputs[2][i])) for i in index]
    totals = [torch.zeros(b.shape, dtype=torch.float32, device=b.device) for b in blocks]
    zeros = torch.zeros_like(max(totals, key=lambda t: t.shape[1]))
    found = [torch.empty_like(x) for x in (inputs[0], *inputs)]
    with by_reference():
        for p, layout in enumerate(layouts):
            ring = LocalRing(layout, blocks.__getitem__, zeros, totals)
            mine = [
                x.detach().requires_grad_() for x in (inputs[0][index[p]], *blocks[p].unbind(0))
            ]
            out = attention(*mine, ring)
            found[0][index[p]] = out.detach()
            found[1][index[p]] = torch.autograd.grad(out, mine, slope[index[p]])[0]
    for i, total in zip(index, totals, strict=True):
        found[2][i], found[3][i] = total.to(slope.dtype).unbind(0)
    return found


def compared(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Row:
    """Return relative errors and cosines of output and gradients."""
    row: Row = {}
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        x, y = a.double().flatten(), b.double().flatten()
        row[f"{name} error"] = float((x - y).norm() / y.norm())
        row[f"{name} cosine"] = float(x @ y / (x.norm() * y.norm()))
    return row


def correctness(record: Record, shape: Shape, grid: Grid, device: torch.device) -> None:
    """Compare rings with flash attention over whole documents, and both with float32."""
    for lengths, sizes in grid.exact:
        torch.manual_seed(sum(lengths))
        n, heads = sum(lengths), (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        *inputs, slope = (
            torch.randn(n, h, shape.width, device=device, dtype=torch.bfloat16) for h in heads
        )
        about = {"documents": len(lengths), "tokens": n, "longest": max(lengths)}
        name = f"a, documents of {list(lengths)}"
        whole = record.attempt(
            f"{name}, whole", reference, inputs, slope, lengths, expected=1.0, until=0.25
        )
        exact = None
        if max(lengths) <= grid.single:
            wide = [x.float() for x in inputs]
            exact = record.attempt(
                f"{name}, float32",
                reference,
                wide,
                slope.float(),
                lengths,
                expected=1.0,
                until=0.25,
            )
        if whole is not None and exact is not None:
            record.add("a exact", {**about, "way": "flash", **compared(whole, exact)})
        for d in sizes:
            found = record.attempt(
                f"{name}, ring of {d}", on_ring, inputs, slope, lengths, d, expected=1.0, until=0.25
            )
            if found is None:
                continue
            if whole is not None:
                record.add("a", {**about, "ring": d, **compared(found, whole)})
            if exact is not None and d == sizes[-1]:
                record.add("a exact", {**about, "way": f"ring of {d}", **compared(found, exact)})


# part b


def timed(work: Work, device: torch.device, expected: float) -> Row:
    """Return the median seconds of a piece, and those of the host to queue it if it is short."""
    row: Row = {}
    times, host_s = _times_of(expected), None
    if times > 1:
        work()
        settle(device)
        began = time.perf_counter()
        work()
        row["host_s"] = time.perf_counter() - began
        settle(device)
        host_s = np.full(times, row["host_s"])
    seconds = seconds_of([work] * times, device, host_s)
    spread = float((seconds.max() - seconds.min()) / np.median(seconds))
    return {"seconds": float(np.median(seconds)), "times": times, "spread": spread, **row}


def _times_of(expected: float) -> int:
    return 5 if expected < 0.05 else 3 if expected < 0.2 else 2 if expected < 0.7 else 1


def _cell_s(expected: float) -> float:
    """Return the seconds of a cell, with its runs that are not timed."""
    times = _times_of(expected)
    return expected * (times + 2 if times > 1 else 1) + 0.05


def expected_s(shape: Shape, lengths: Sequence[int], d: int) -> float:
    pairs = sum(n * n for n in lengths) / 2
    return 3.5 * 4 * shape.heads * shape.width * pairs / d / RATE


def cells(shape: Shape, grid: Grid) -> list[tuple[tuple[int, ...], int, int]]:
    """Return lengths, ring size and position of every cell; the cheapest first."""
    found = [((n,) * count, 1, 0) for count, n in grid.short]
    found += [
        ((n * d,) * count, d, d // 2)
        for count, n in grid.several
        for d in grid.sizes
        if d > 1 and count * n * d <= grid.whole
    ]
    found += [
        ((s,), d, d // 2)
        for s in grid.tokens
        for d in grid.sizes
        if s >= d * grid.least and s <= d * grid.local
    ]
    kept = [cell for cell in found if expected_s(shape, cell[0], cell[1]) <= MOST_S]
    return sorted(kept, key=lambda cell: expected_s(shape, cell[0], cell[1]))


def times(record: Record, bench: Bench, grid: Grid, least_s: float) -> RingCosts:
    """Measure attention by s and d and the linear part by tokens; return the fitted costs."""
    device, todo = bench.device, cells(bench.shape, grid)
    middle = grid.tokens[0]
    with by_reference():
        record.attempt(
            "b, warm-up",
            lambda: warm_up([bench.whole_layer([middle], 1, 0)], device, least_s),  # type: ignore[list-item]
        )
        held = sorted({sum(lengths) // d for lengths, d, _ in todo})
        for n in held:
            _linear(record, bench, n)
        for d in grid.equal[1]:
            _equal(record, bench, grid.equal[0], d)
        for lengths, d, position in todo:
            _attention(record, bench, lengths, d, position)
    return _fit(record)


def _linear(record: Record, bench: Bench, tokens: int) -> None:
    expected = tokens * 3e-6
    found = record.attempt(
        f"b, linear part of {tokens} tokens",
        lambda: timed(bench.linear(tokens), bench.device, expected),
        expected=_cell_s(expected),
        until=0.45,
    )
    if found:
        record.add("b linear", {"tokens": tokens, **found})


def _attention(
    record: Record, bench: Bench, lengths: tuple[int, ...], d: int, position: int
) -> None:
    expected = expected_s(bench.shape, lengths, d)
    found = record.attempt(
        f"b, attention of {len(lengths)} x {lengths[0]} tokens, ring of {d}",
        lambda: timed(bench.attention(lengths, d, position), bench.device, expected),
        expected=_cell_s(expected),
        until=0.45,
    )
    if found:
        flops = expected * RATE / found["seconds"] / 1e12
        about = {"documents": len(lengths), "length": lengths[0], "ring": d, "position": position}
        record.add("b", {**about, "tflops": flops, **found})


def _equal(record: Record, bench: Bench, s: int, d: int) -> None:
    """Time all positions of a ring in random orders."""
    passes = 5

    def run() -> np.ndarray:
        works = [bench.attention([s], d, p) for p in range(d)]
        host_s = host_seconds(works, bench.device, np.ones(d, bool))
        found = all_seconds(works, bench.device, passes=passes, host_s=host_s)
        return np.median(found, axis=0)

    expected = expected_s(bench.shape, [s], d) * d * (passes + 1)
    found = record.attempt(f"b, all positions of {d}", run, expected=expected + 0.2, until=0.45)
    if found is not None:
        spread = float((found.max() - found.min()) / found.mean())
        about = {"tokens": s, "ring": d, "apart": spread}
        record.add("b equal", {**about, "seconds": found.tolist()})


def _fit(record: Record) -> RingCosts:
    """Fit ``t(s, d)`` of a layer to attention and linear part; the known model if that fails."""
    rows, linear = record.rows("b"), record.rows("b linear")

    def fit() -> RingCosts:
        at = [r["tokens"] for r in linear]
        part = [r["seconds"] for r in linear]
        lengths = [[r["length"]] * r["documents"] for r in rows]
        ranks = [r["ring"] for r in rows]
        seconds = [
            r["seconds"] + float(np.interp(sum(n) / d, at, part))
            for r, n, d in zip(rows, lengths, ranks, strict=True)
        ]
        enough = [d for d in set(ranks) if ranks.count(d) >= 4]
        kept = [i for i, d in enumerate(ranks) if d in enough]
        costs = ov.cost.fit(
            [lengths[i] for i in kept], [seconds[i] for i in kept], ranks=[ranks[i] for i in kept]
        )
        for i in kept:
            told = _told(costs, lengths[i], ranks[i])
            rows[i].update(layer_s=seconds[i], fit_s=told, error=told / seconds[i] - 1)
        return costs

    costs = record.attempt("b, fit", fit)
    if costs is None:
        record.about(costs={"from": "hybrid.measure.MODEL, since the fit failed"})
        return MODEL
    sizes = [asdict(one) for one in costs.fitted]
    record.about(costs={"from": "this run", "fitted": sizes})
    for one in sizes:
        record.say("fit: " + ", ".join(f"{k} {v:.4g}" for k, v in one.items()))
    return costs


def _told(costs: RingCosts, lengths: Sequence[int], d: int) -> float:
    n = np.asarray(lengths, np.float64)
    args: Any = (np.array([n.sum()]), np.array([(n * n).sum()]), np.array([d]))
    return float(costs.compute(*args)[0])
