"""A custom strategy: a function from the drawn samples of a step to a plan, with a custom cost.

The example runs it on a buffer made by hand, without files or a session. A job takes it as
``Job(strategy=windowed)``.

Run it: python examples/04_custom_strategy.py
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import overlord as ov

WINDOW = 1024


def sliding_window(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the cost of attention over the last WINDOW tokens.

    It is linear for long documents, while full attention is quadratic.
    """
    n = np.asarray(columns["tokens"], np.float64)
    return 4096 * n + n * np.minimum(n, WINDOW)


def windowed(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    return (
        ov.DGraph.from_buffer(buffer, place, meta="tokens")
        # The buffer of a running job is drawn already.
        .mix(None if buffer.drawn else {"web": 0.8, "books": 0.2})
        .distribute("DP")
        .cost(sliding_window)
        .balance("greedy")
        .plan()
    )


def unplanned(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    """Place the same samples with the same cost in turn."""
    graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix({"web": 0.8, "books": 0.2})
    return graph.distribute("DP").cost(sliding_window).balance("none").plan()


def main() -> None:
    chance = np.random.default_rng(0)
    tokens = {"web": chance.lognormal(5.5, 1.0, 300), "books": chance.lognormal(8.0, 0.8, 100)}
    columns = {
        name: {"tokens": np.clip(lengths, 16, 8192).astype(int)} for name, lengths in tokens.items()
    }
    buffer = ov.Buffer.from_columns(
        columns, batch=ov.Batch(samples=128, microbatches=4, context=8192)
    )
    place = ov.Mesh(dp=8)
    for name, strategy in (("dealt out in turn", unplanned), ("windowed", windowed)):
        plan = strategy(buffer, place)
        found = plan.imbalance()
        print(
            f"{name}: a step takes {found['microbatch']:.3f} of the mean rank's time, no "
            f"placement less than {found['slot_bound']:.3f}"
        )
    print("\n" + plan.to_table())


if __name__ == "__main__":
    main()
