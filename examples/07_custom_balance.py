"""Custom balance methods, compared with the built-in ones: functions from costs to bins.

``dealt`` assigns samples in turn, like cards; ``by_tokens`` respects the capacity of a microbatch.
The built-in greedy method considers the cost that each bin holds so far.

Run it: python examples/07_custom_balance.py
"""

from __future__ import annotations

import numpy as np

import overlord as ov


def dealt(costs: np.ndarray, n_bins: int) -> np.ndarray:
    """Assign samples by decreasing cost, one bin after the other: all bins have equal counts."""
    bins = np.empty(len(costs), np.int64)
    bins[np.argsort(-costs, kind="stable")] = np.arange(len(costs)) % n_bins
    return bins


def by_tokens(costs: np.ndarray, n_bins: int, capacity: int, sizes: np.ndarray) -> np.ndarray:
    """Assign the longest samples first, each to the bin with the fewest tokens.

    Costs do not matter. A bin of -1 would mean that no bin has room.
    """
    held, bins = np.zeros(n_bins, np.int64), np.full(len(costs), -1)
    for i in np.argsort(-sizes, kind="stable"):
        emptiest = int(np.argmin(held))
        if not capacity or held[emptiest] + sizes[i] <= capacity:
            bins[i] = emptiest
            held[emptiest] += sizes[i]
    return bins


def main() -> None:
    # Samples that it puts into a full microbatch are moved to one with room.
    ov.register_balance("dealt", dealt, capacity_aware=False)
    ov.register_balance("by_tokens", by_tokens)
    lengths = np.clip(np.random.default_rng(0).lognormal(6.5, 1.2, 512), 16, 16_384).astype(int)
    buffer = ov.Buffer.from_columns(
        {"web": {"tokens": lengths}}, batch=ov.Batch(samples=512, context=16_384)
    )
    graph = (
        ov.DGraph.from_buffer(buffer, ov.Mesh(dp=16)).mix([1]).distribute("DP").cost("llama_12b")
    )
    print(
        "method           slowest rank / mean   after every microbatch   microbatches   "
        "fullest microbatch"
    )
    for method in ("none", "dealt", "by_tokens", "karmarkar_karp", "greedy"):
        plan = graph.balance(method).plan()
        found, fullest = (
            plan.imbalance(),
            np.bincount(plan.main.bins(), weights=plan.main.size).max(),
        )
        print(
            f"{method:15}  {found['bucket']:19.3f}   {found['microbatch']:22.3f}   "
            f"{plan.n_microbatches:12}   {fullest:11.0f} tokens"
        )


if __name__ == "__main__":
    main()
