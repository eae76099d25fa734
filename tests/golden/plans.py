"""Small plans, written out: every strategy on two meshes, every balance method at every level.
``plans.json`` holds them.

A line of ``buckets`` is one bucket: its microbatches, apart by ``|``, each with the numbers of its
samples (or items) in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import overlord as ov
from overlord.planning.balance.balance import METHODS
from overlord.planning.balance.methods import BUILT_IN
from overlord.planning.strategies import STRATEGIES

FILE = Path(__file__).with_name("plans.json")
TREES = {"dp=3": ov.ClientPlaceTree(dp=3), "dp=2 cp=2 tp=2": ov.ClientPlaceTree(dp=2, cp=2, tp=2)}
BY_SYNC = (
    "llm_balance",
    "backbone_balance",
    "look_ahead_balance",
    "vlm_hybrid",
)  # the others place alike, whenever ranks wait
WAYS: dict[str, dict[str, Any]] = {
    "iteration": {"objective": "iteration"},
    "microbatch": {"objective": "microbatch"},
    "inter": {"level": "inter", "objective": "iteration"},
    "inter, microbatch": {"level": "inter", "objective": "microbatch"},
    "intra": {"level": "intra"},
    "interleaved": {"level": "interleaved"},
    "keep_order": {"keep_order": True},
}


def numbers(seed: int, n: int, most: int) -> list[int]:
    """1 to ``most``, the small ones oftener, by a linear congruence: the same with every version of
    everything.
    """
    found, x = [], seed
    for _ in range(n):
        x = (x * 1103515245 + 12345) % 2**31
        u = (x >> 8) % 1000
        found.append(1 + u * u * (most - 1) // 999**2)
    return found


def texts(n: int = 26, microbatches: int = 2) -> ov.Buffer:
    """Samples of two sources in turn, of 1 to 64 tokens, two sub-draws."""
    tokens = numbers(7, n, 64)
    columns = {
        name: {"tokens": tokens[i::2], "bytes": [4 * t + 9 for t in tokens[i::2]]}
        for i, name in enumerate(("web", "code"))
    }
    buffer = ov.Buffer.from_columns(
        columns, batch=ov.Batch(samples=n, microbatches=microbatches, context=64)
    )
    turn = np.argsort(buffer.row * 2 + buffer.source, kind="stable")
    return replace(buffer.take(turn), drawn=True, substep=(np.arange(n) * 2 // n).astype(np.int32))


def pictures(n: int = 12) -> ov.Buffer:
    """Samples with no image, one or two; an image has a token for every patch."""
    patches, tokens = iter(numbers(11, 2 * n, 24)), numbers(5, n, 16)
    images = [[next(patches) for _ in range(i % 3)] for i in range(n)]
    columns = {
        "pairs": {
            "tokens": [t + sum(p) for t, p in zip(tokens, images, strict=True)],
            "image_patches": images,
        }
    }
    return replace(
        ov.Buffer.from_columns(columns, batch=ov.Batch(samples=n, context=64)), drawn=True
    )


def cases() -> dict[str, Callable[[], ov.LoadingPlan]]:
    found: dict[str, Callable[[], ov.LoadingPlan]] = {}
    for name, strategy in STRATEGIES.items():
        for place, tree in TREES.items():
            found[f"{name}, images, {place}"] = lambda s=strategy, t=tree: s(pictures(), t)
            if "image_patches" in texts().meta or name not in ("encoder_balance", "vlm_hybrid"):
                found[f"{name}, text, {place}"] = lambda s=strategy, t=tree: s(texts(), t)
            for kind, made in {"text": texts, "images": pictures}.items():
                if name in BY_SYNC and f"{name}, {kind}, {place}" in found:
                    found[f"{name}, {kind}, {place}, sync step"] = (
                        lambda s=strategy, t=tree, b=made: s(replace(b(), sync="step"), t)
                    )
    once = WAYS["iteration"]
    for method in BUILT_IN:
        assert method in METHODS
        for way, settings in WAYS.items():
            found[f"balance {method}, {way}"] = lambda m=method, w=settings: (
                _graph(4).balance(m, **w).plan()
            )
    found["balance greedy, groups of 2"] = lambda: (
        _graph(4, group_size=2).balance("greedy", **once).plan()
    )
    found["balance greedy, bounded memory"] = lambda: (
        _graph(4, memory=True).balance("greedy", memory_capacity=240, **once).plan()
    )
    found["balance greedy, one capacity of its own"] = lambda: (
        _graph(4).balance("greedy", capacity=80, **once).plan()
    )
    return found


def _graph(dp: int, group_size: int | None = None, memory: bool = False) -> ov.DGraph:
    graph = (
        ov.DGraph.from_buffer(texts(), ov.ClientPlaceTree(dp=dp))
        .mix()
        .distribute("DP", group_size=group_size)
    )
    return graph.cost("quadratic", memory=(lambda columns: columns["bytes"]) if memory else None)


def written(plan: ov.LoadingPlan) -> dict[str, Any]:
    """The plan as it stands in the file."""
    buckets: dict[str, list[str]] = {}
    for name in plan.modules:
        a = plan.pieces(name)
        order, bins = a.order(), a.bins()
        rows = [
            [
                order[bins[order] == b * a.n_microbatches + k].tolist()
                for k in range(a.n_microbatches)
            ]
            for b in range(a.n_buckets)
        ]
        buckets[name] = [
            " | ".join(" ".join(map(str, items)) or "-" for items in row) for row in rows
        ]
    return {"digest": plan.digest(), "buckets": buckets}


def write() -> None:
    kept = {name: written(make()) for name, make in cases().items()}
    FILE.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
