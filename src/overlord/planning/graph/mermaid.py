"""Mermaid flowcharts of graphs. A long list is shortened, with a note of its length."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from overlord.planning.balance.balance import ItemPlacement
    from overlord.planning.graph.dgraph import DGraph

SHOWN = 8  # sources, loaders and buckets with a box of their own
CELLS = 4  # microbatches of a bucket with a box of their own
_CODES = str.maketrans({c: f"#{ord(c)};" for c in '#"<>&`'})  # the entity codes of Mermaid


def escaped(text: str) -> str:
    """Return text that is valid in a quoted label of Mermaid, such as the name of a source."""
    return "".join(c if c.isprintable() else " " for c in text.translate(_CODES))


def flowchart(graph: DGraph) -> str:
    """Return a Mermaid chart of sources, loaders, primitives, buckets and microbatches.

    Only a planned step has loaders. Loads are costs over the mean bucket.
    """
    lines = ["flowchart LR", *_fronts(graph)]
    steps = graph.trail or ("samples",)
    for i, what in enumerate(steps):
        lines.append(
            f'  p{i}["{escaped(what)}"]' + (f" --> p{i + 1}" if i + 1 < len(steps) else "")
        )
    if graph.placement is not None and graph.axis is not None:
        lines += _buckets(
            graph, graph.placement, graph.mesh.n_buckets(graph.axis), f"p{len(steps) - 1}"
        )
    return "\n".join(lines)


def _fronts(graph: DGraph) -> list[str]:
    """Return the chart's lines of the sources of nodes and the loaders that held them."""
    names, of = graph.buffer.names, graph.buffer.source[graph.sample]
    counts = np.bincount(of, minlength=len(names))
    shown = _largest(counts)
    lines = []
    if graph.bound is None:
        lines += [f'  s{i}["{escaped(names[i])}: {counts[i]}"] --> p0' for i in shown]
    else:
        lines += _loaders(graph, of, counts, shown)
    if rest := int((counts > 0).sum()) - int((counts[shown] > 0).sum()):
        lines.append(f'  sx["{rest} more sources: {counts.sum() - counts[shown].sum()}"] --> p0')
    return lines


def _loaders(graph: DGraph, of: np.ndarray, counts: np.ndarray, shown: list[int]) -> list[str]:
    lines, held = [], graph.loader
    for i in shown:
        n = np.bincount(held.index[of == i], minlength=len(held.names))
        loaders = _largest(n)
        box = f'  s{i}["{escaped(graph.buffer.names[i])}: {counts[i]}"]'
        if not n.any():
            lines.append(f"{box} --> p0")
        lines += [
            f'{box} --> l{k}["{escaped(held.names[k])}: {n[k]}"] --> p0' for k in loaders if n[k]
        ]
        if rest := int((n > 0).sum()) - int((n[loaders] > 0).sum()):
            lines.append(
                f'{box} --> lx{i}["{rest} more loaders: {n.sum() - n[loaders].sum()}"] --> p0'
            )
    return lines


def _buckets(graph: DGraph, p: ItemPlacement, n: int, origin: str) -> list[str]:
    """Return the chart's lines of buckets and their microbatches.

    More than SHOWN buckets are reduced to the most expensive and the cheapest ones.
    """
    costs = graph.sizes().astype(np.float64) if graph.costs is None else graph.costs
    if graph.tasks is not None:  # a sample may be on several buckets
        pieces = graph.plan().pieces()
        p, costs = replace(p, bucket=pieces.bucket, microbatch=pieces.microbatch), pieces.cost
    flat = p.bucket.astype(np.int64) * p.n_microbatches + p.microbatch
    loads = np.bincount(flat, weights=costs, minlength=n * p.n_microbatches).reshape(
        n, p.n_microbatches
    )
    total = loads.sum(axis=1)
    mean = float(total.mean()) or 1.0
    falling = np.argsort(-total, kind="stable").tolist()
    shown = sorted(falling if n <= SHOWN else falling[: SHOWN // 2] + falling[-(SHOWN // 2) :])
    lines = []
    for b in shown:
        lines.append(f'  {origin} --> b{b}["bucket {b}: {total[b] / mean:.3f}"]')
        for m in range(min(p.n_microbatches, CELLS)):
            lines.append(f'  b{b} --> b{b}m{m}["microbatch {m}: {loads[b, m] / mean:.3f}"]')
        if p.n_microbatches > CELLS:
            rest = loads[b, CELLS:].sum() / mean
            lines.append(
                f'  b{b} --> b{b}x["{p.n_microbatches - CELLS} more microbatches: {rest:.3f}"]'
            )
    if n > SHOWN:
        low, high = total[falling[-(SHOWN // 2) - 1]] / mean, total[falling[SHOWN // 2]] / mean
        lines.append(f'  {origin} --> bx["{n - SHOWN} more buckets: {low:.3f} to {high:.3f}"]')
    return lines


def _largest(counts: np.ndarray) -> list[int]:
    """Return the indices of the largest counts, in their own order."""
    return sorted(np.argsort(-counts, kind="stable")[:SHOWN].tolist())
