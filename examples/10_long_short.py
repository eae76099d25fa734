"""Text of very different lengths: the first use case of the paper.

It compares three cases: no planning, balancing, and balancing that may hold very long samples back
to place them together (look-ahead). Each prints its time relative to the mean rank, if ranks wait
for each other after every microbatch.

Run it: python examples/10_long_short.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

import overlord as ov

COST = ov.cost.transformer(hidden=4608, layers=45, heads=36)
RANKS, STEPS = 8, 24


def long_short(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    # Without look-ahead, mix(prefer=...) has no choice and equals mix().
    graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix(prefer=ov.hold_long(COST))
    return graph.distribute("DP").cost(COST).balance("greedy").broadcast_at("TP").plan()


def documents(shard: int) -> Iterator[dict[str, Any]]:
    """Write documents of log-normal lengths with a long tail."""
    chance = np.random.default_rng(shard)
    yield from (
        {"tokens": [1] * int(length)}
        for length in np.clip(chance.lognormal(5.0, 1.5, 4000), 8, 8192)
    )


def time_over_mean(strategy: Any, look_ahead: int) -> float:
    job = ov.Job(
        name="long-short",
        sources=[
            ov.Source(
                "text",
                ov.Factory(documents, shards=2, fingerprint="1"),
                transforms=[ov.Tokens("tokens")],
            )
        ],
        place=ov.Mesh(dp=RANKS),
        batch=ov.Batch(samples=8 * RANKS, context=8192),
        strategy=strategy,
        look_ahead=look_ahead,
        until=STEPS,
    )
    slowest = mean = 0.0
    with ov.launch(job) as session:
        for step in session.client(rank=0):
            loads = session.plan(step.step).loads()  # by rank and microbatch
            slowest, mean = slowest + loads.max(axis=0).sum(), mean + loads.sum(axis=1).mean()
    return slowest / mean


def main() -> None:
    for name, strategy, look_ahead in (
        ("vanilla", "vanilla", 1),
        ("balanced", long_short, 1),
        ("balanced, look-ahead 4", long_short, 4),
    ):
        print(
            f"{name}: {STEPS} steps take {time_over_mean(strategy, look_ahead):.3f} times "
            "the mean rank's time"
        )


if __name__ == "__main__":
    main()
