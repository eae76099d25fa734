"""A strategy of one's own: a function from the step's drawn samples to a plan, with a cost of one's
own. It is tried here on a buffer made by hand, without files or a session; in a job it goes in as
``Job(strategy=windowed)``.

Run it: python examples/04_custom_strategy.py
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import overlord as ov

WINDOW = 1024


def sliding_window(columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Attention over at most WINDOW tokens back: linear for long documents, where full attention is
    quadratic.
    """
    n = np.asarray(columns["tokens"], np.float64)
    return 4096 * n + n * np.minimum(n, WINDOW)


def windowed(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    return (
        ov.DGraph.from_buffer(buffer, place, meta="tokens")
        .mix(
            None if buffer.drawn else {"web": 0.8, "books": 0.2}
        )  # a running job has drawn already
        .distribute("DP")
        .cost(sliding_window)
        .balance("greedy")
        .plan()
    )


def unplanned(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    """The same samples and the same cost, dealt out in turn."""
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
    place = ov.ClientPlaceTree(dp=8)
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
