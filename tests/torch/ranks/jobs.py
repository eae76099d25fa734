"""Jobs of a few hundred short documents, the same on every rank, and strategies that broadcast
along any axes.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import overlord as ov
from tests.torch.ranks.models import CONTEXT, VOCABULARY
from tests.worlds import Rows


@functools.cache
def rows(seed: int, n: int = 160, longest: int = 40) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [
        {
            "n": k,
            "tokens": [
                rng.randrange(VOCABULARY) for _ in range(rng.choice((2, 5, 9, 17, longest)))
            ],
        }
        for k in range(n)
    ]


def job(
    place: ov.ClientPlaceTree,
    strategy: Any = "vanilla",
    *,
    batch: dict[str, Any] | None = None,
    **changes: Any,
) -> ov.Job:
    sources = [
        ov.Source("web", Rows(rows(1)), transforms=[ov.Tokens("tokens")], weight=0.7),
        ov.Source("code", Rows(rows(2, longest=60)), transforms=[ov.Tokens("tokens")], weight=0.3),
    ]
    size = {"samples": 24, "microbatches": 2, "context": CONTEXT} | (batch or {})
    settings = {
        "name": "ranks",
        "sources": sources,
        "place": place,
        "batch": ov.Batch(**size),
        "strategy": strategy,
        "seed": 5,
        "until": 40,
    }
    return ov.Job(**{**settings, **changes})


def broadcasting(*axes: str, split: str = "DP", method: str = "greedy") -> Any:
    """A balanced plan whose trainers broadcast along these axes."""

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        graph = (
            ov.DGraph.from_buffer(buffer, place, meta="tokens")
            .mix()
            .distribute(split)
            .cost(ov.cost.transformer(hidden=64, layers=2, heads=4))
        )
        graph = graph.balance(method)
        return (graph.broadcast_at(*axes) if axes else graph).plan()

    return strategy


def samples_of(steps: Sequence[Sequence[str]]) -> list[list[str]]:
    return [sorted(step) for step in steps]
