"""Data of the page of a step, as JSON values.

Columns are base64 of little-endian arrays: a page may hold 30,000 samples.

A page stays below three megabytes. If a step is too large for that, loads are summed: over
microbatches first, then over the cheapest sources. Only the most expensive samples are listed, and
the page shows a note.
"""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from overlord.planning.graph.lineage import constructors_of

if TYPE_CHECKING:
    from overlord.mesh import Mesh
    from overlord.plan.plan import Assignment, LoadingPlan
    from overlord.planning.graph.edges import Edge
    from overlord.planning.graph.lineage import Binding

BUDGET = 2_600_000  # most characters of all columns; names and the page itself are extra
CELLS = 60_000  # most loads by (bucket, microbatch, source), over all modules
GRID = 32_768  # most loads by (bucket, microbatch), over all modules
SOURCES = 12  # sources with loads of their own if the others are summed
ID_COLUMNS = ("source", "epoch", "file", "row", "part", "tokens")
ITEM_COLUMNS = ("bucket", "microbatch", "slot", "size", "cost")
# boxes of the flow picture, at most
FLOW = {"sources": 14, "loaders": 20, "buckets": 16, "slots": 12}
BINS = 24  # of the histograms of lengths: powers of two


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageStep:
    """A planned step to show on a page. ``loader`` is by sample; None if loaders are unknown."""

    plan: LoadingPlan
    place: Mesh
    edges: Sequence[Edge]
    loader: Binding | None = None


def column(values: np.ndarray) -> list[str]:
    """Return [kind, base64] of a column of numbers, none negative if they are integers.

    Floats become ``f4``. Integers get the smallest kind that holds them; from 2**32 on they become
    doubles, exact to 2**53.
    """
    if values.dtype.kind == "f":
        kind = "f4"
    else:
        top = int(values.max(initial=0))
        kind = next((k for k, bits in (("u1", 8), ("u2", 16), ("u4", 32)) if top < 1 << bits), "f8")
    return [kind, b64encode(values.astype(f"<{kind}").tobytes()).decode()]


def facts(step: PageStep) -> dict[str, Any]:
    """Return all data of a step's page as a JSON value."""
    plan, n = step.plan, len(step.plan.modules)
    names = ["backbone", *sorted(name for name in plan.modules if name != "backbone")]
    modules = [_module(step, name, CELLS // n, GRID // n) for name in names]
    used = sum(_characters(m["grid"]) + _characters(m["cells"]) for m in modules)
    kept = _list_samples(step, modules, BUDGET - used)
    return {
        "step": plan.step,
        "digest": plan.digest(),
        "place": f"{step.place}",
        "samples": len(plan),
        "tokens": int(plan.tokens.sum()),
        "edges": [[e.before, e.after, e.what] for e in step.edges],
        "sources": _sources(plan),
        "loaders": [] if step.loader is None else list(step.loader.names),
        "kept": kept,
        "modules": modules,
    }


def _sources(plan: LoadingPlan) -> list[dict[str, Any]]:
    n, weights = len(plan.names), dict(plan.extra.get("weights", {}))
    total = sum(weights.values()) or 1.0
    samples = np.bincount(plan.source, minlength=n)
    tokens = np.bincount(plan.source, weights=plan.tokens, minlength=n)
    # floor(log2), exactly
    bits = np.minimum(np.frexp(np.maximum(plan.tokens, 1).astype(np.float64))[1] - 1, BINS - 1)
    lengths = np.bincount(plan.source.astype(np.int64) * BINS + bits, minlength=n * BINS).reshape(
        n, BINS
    )
    return [
        {
            "name": name,
            "samples": int(samples[i]),
            "tokens": int(tokens[i]),
            "lengths": lengths[i].tolist(),
            "wanted": float(weights.get(name, 0.0)) / total if weights else None,
        }
        for i, name in enumerate(plan.names)
    ]


def _module(step: PageStep, name: str, most_cells: int, most_grid: int) -> dict[str, Any]:
    plan, a = step.plan, step.plan.pieces(name)
    whole = plan.modules[name]
    by_size = replace(plan, modules={name: replace(whole, cost=whole.size.astype(np.float64))})
    per = -(-a.n_microbatches // max(1, min(a.n_microbatches, most_grid // a.n_buckets)))
    ranks = (a.on or step.place).buckets(a.axis)
    served = [int(c.partition("/")[2]) for c in constructors_of(step.place, a.axis, a.on)]
    return {
        "name": name,
        "axis": a.axis,
        "buckets": a.n_buckets,
        "microbatches": a.n_microbatches,
        "capacity": a.capacity,
        "broadcast": list(a.broadcast),
        "items": len(whole.sample),
        "per_item": name != "backbone",
        "imbalance": {"cost": plan.imbalance(name), "size": by_size.imbalance(name)},
        "ranks": None if ranks == [[b] for b in range(a.n_buckets)] else [spans(r) for r in ranks],
        "constructor": None if served == list(range(a.n_buckets)) else column(np.array(served)),
        "grid": _grid(a, per),
        "cells": _cells(plan, a, per, most_cells),
        "flow": _flow(step, a),
    }


def _grid(a: Assignment, per: int) -> dict[str, Any]:
    """Return loads by (bucket, microbatch), with ``per`` consecutive microbatches summed."""
    m = -(-a.n_microbatches // per)
    flat, n = a.bucket.astype(np.int64) * m + a.microbatch // per, a.n_buckets * m
    return {"per": per, "columns": m, **_sums(flat, n, a)}


def _sums(flat: np.ndarray, n: int, a: Assignment) -> dict[str, Any]:
    return {
        "cost": column(np.bincount(flat, weights=a.cost, minlength=n)),
        "size": column(np.bincount(flat, weights=a.size, minlength=n).astype(np.int64)),
        "count": column(np.bincount(flat, minlength=n)),
    }


def _cells(plan: LoadingPlan, a: Assignment, per: int, most: int) -> dict[str, Any]:
    """Return non-empty loads by (bucket, microbatch, source).

    If there are more than ``most``, they are summed over microbatches, then over cheap sources.
    """
    n, source = len(plan.names), plan.source[a.sample].astype(np.int64)
    alone: list[int] | None = None  # sources that are not summed; None: all
    for coarser in ("", "microbatches", "sources"):
        if coarser == "microbatches":
            per = a.n_microbatches
        if coarser == "sources":
            weight = np.bincount(source, weights=a.cost, minlength=n)
            alone = np.argsort(-weight, kind="stable")[
                : max(1, min(SOURCES, most // a.n_buckets - 1))
            ].tolist()
            source = np.where(np.isin(source, alone), source, n)
        m = -(-a.n_microbatches // per)
        flat = (a.bucket.astype(np.int64) * m + a.microbatch // per) * (n + 1) + source
        keys, where = np.unique(flat, return_inverse=True)
        if len(keys) <= most:
            break
    return {
        "per": per,
        "alone": alone,
        "bucket": column(keys // (n + 1) // m),
        "microbatch": column(keys // (n + 1) % m),
        "source": column(keys % (n + 1)),
        **_sums(where, len(keys), a),
    }


def _list_samples(step: PageStep, modules: list[dict[str, Any]], budget: int) -> dict[str, Any]:
    """Return the ids of listed samples, and add their slots to ``modules``.

    If all samples exceed ``budget`` characters, the most expensive ones are listed, in their order.
    """
    plan = step.plan
    whole = _listed(step, np.arange(len(plan)))
    size = _characters(whole["ids"]) + sum(map(_characters, whole["items"]))
    if size > budget:
        cost = np.zeros(len(plan))
        cost[plan.main.sample] = plan.main.cost
        # some have more items than others, so leave a margin
        n = int(len(plan) * 0.95 * budget / size)
        whole = _listed(step, np.sort(np.argsort(-cost, kind="stable")[:n]))
    for module, items in zip(modules, whole.pop("items"), strict=True):
        module["kept"] = items
    return whole


def _listed(step: PageStep, rows: np.ndarray) -> dict[str, Any]:
    plan = step.plan
    ids = {n: column(getattr(plan, n)[rows]) for n in ID_COLUMNS} | {"position": column(rows)}
    if step.loader is not None:
        ids["loader"] = column(step.loader.index[rows])
    place = np.full(len(plan), -1, np.int64)
    place[rows] = np.arange(len(rows))
    items = []
    for name in ["backbone", *sorted(n for n in plan.modules if n != "backbone")]:
        a = plan.pieces(name)
        mine = np.flatnonzero(place[a.sample] >= 0)
        items.append(
            {"sample": column(place[a.sample[mine]])}
            | {n: column(getattr(a, n)[mine]) for n in ITEM_COLUMNS}
        )
    return {"samples": len(rows), "ids": ids, "items": items}


def _characters(columns: dict[str, Any]) -> int:
    return sum(
        len(c[1])
        for c in columns.values()
        if isinstance(c, list) and len(c) == 2 and isinstance(c[1], str)
    )


def _flow(step: PageStep, a: Assignment) -> dict[str, Any]:
    """Return the flow picture: the boxes of its layers, and the loads between adjacent layers.

    The layers are sources, loaders if known, buckets and microbatches. Long lists are summed into
    ranges or one last box.
    """
    plan, source = step.plan, step.plan.source[a.sample].astype(np.int64)
    layers: list[tuple[str, list[Any], np.ndarray]] = []
    boxes, of = _top(source, a.cost, len(plan.names), FLOW["sources"])
    layers.append(("source", boxes, of))
    if step.loader is not None:
        boxes, of = _top(
            step.loader.index[a.sample].astype(np.int64),
            a.cost,
            len(step.loader.names),
            FLOW["loaders"],
        )
        layers.append(("loader", boxes, of))
    for kind, n, most, at in (
        ("bucket", a.n_buckets, FLOW["buckets"], a.bucket),
        ("microbatch", a.n_microbatches, FLOW["slots"], a.microbatch),
    ):
        wide = -(-n // most)
        layers.append(
            (
                kind,
                [[lo, min(n, lo + wide) - 1] for lo in range(0, n, wide)],
                at.astype(np.int64) // wide,
            )
        )
    links = []
    for k, ((_, left, i), (_, right, j)) in enumerate(itertools.pairwise(layers)):
        flat, n = i * len(right) + j, len(left) * len(right)
        sums = [np.bincount(flat, weights=w, minlength=n) for w in (a.cost, a.size, None)]
        for pair in np.flatnonzero(sums[2]).tolist():
            links.append(
                [k, pair // len(right), pair % len(right), *(float(f"{s[pair]:.6g}") for s in sums)]
            )
    return {"layers": [{"kind": kind, "boxes": boxes} for kind, boxes, _ in layers], "links": links}


def _top(of: np.ndarray, cost: np.ndarray, n: int, most: int) -> tuple[list[Any], np.ndarray]:
    """Return a list of boxes by number, and the position in it of every item's box.

    At most ``most`` boxes are listed: the most expensive in their order, the others as one, ``-1``.
    """
    weight, count = np.bincount(of, weights=cost, minlength=n), np.bincount(of, minlength=n)
    there = np.flatnonzero(count)
    falling = there[np.argsort(-weight[there], kind="stable")]
    alone = np.sort(falling if len(there) <= most else falling[: most - 1])
    box = np.full(n, len(alone), np.int64)
    box[alone] = np.arange(len(alone))
    return [*alone.tolist(), *([] if len(alone) == len(there) else [-1])], box[of]


def spans(numbers: Sequence[int]) -> str:
    """Return ranks as short text: "0-7" if consecutive, "0, 8, ..., 56" if evenly spaced.

    Of other lists, the first seven and the last are named.
    """
    if len(numbers) > 2:
        step = numbers[1] - numbers[0]
        if list(numbers) == list(range(numbers[0], numbers[-1] + 1, step or 1)):
            return (
                f"{numbers[0]}-{numbers[-1]}"
                if step == 1
                else f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
            )
    return (
        ", ".join(map(str, numbers))
        if len(numbers) <= 8
        else f"{', '.join(map(str, numbers[:7]))}, ..., {numbers[-1]}"
    )
