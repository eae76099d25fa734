"""Maps of one step with and without rings: a row for each rank, a column for each microbatch, a
colour for the longest document.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from drawing import Drawing

import overlord as ov
from overlord.observe.svg import series_color

CONTEXT, RANKS, TALL = 8192, 12, 24.0
LONG = [61_000, 38_000, 26_000, 20_500, 12_000, 9000]


def buffer(context: int) -> ov.Buffer:
    """Many short documents, and a few far longer than a rank."""
    draw = np.random.default_rng(5)
    short = np.clip(300_000 // draw.integers(40, 1000, 60), 300, 7000)
    batch = ov.Batch(samples=66, context=context)
    columns = {"code": {"tokens": np.concatenate((LONG, short))}}
    return replace(ov.Buffer.from_columns(columns, batch=batch), drawn=True, sync="step")


def split() -> str:
    """One step of the same documents: whole on ranks of 64K tokens, and shared by ranks of 8K."""
    to = Drawing(390, "a step with whole documents, and with documents that ranks share")
    whole = ov.strategy.llm_balance(buffer(8 * CONTEXT), ov.Mesh(dp=RANKS))
    shared = ov.strategy.hdp_balance(buffer(CONTEXT), ov.Mesh(dp=RANKS))
    for x, name, plan in (
        (60.0, "whole, 65,536 tokens a rank", whole),
        (480.0, "shared, 8,192 tokens a rank", shared),
    ):
        slow = plan.imbalance()["bucket"]
        to.text(x, 22, f"{name}: slowest rank {slow:.2f} x the mean", "label")
        _map(to, plan, x, 44, 340)
    to.text(60, 364, "rows: ranks; columns: microbatches; numbers: tokens of the rank", "tick")
    to.text(
        60, 380, "a colour: the longest document, if longer than 8,192 tokens; grey: packed", "tick"
    )
    return to.done()


def _map(to: Drawing, plan: ov.LoadingPlan, left: float, top: float, wide: float) -> None:
    pieces = plan.pieces()
    tokens = np.zeros((RANKS, pieces.n_microbatches), np.int64)
    np.add.at(tokens, (pieces.bucket, pieces.microbatch), pieces.size)
    longest = np.full(tokens.shape, len(LONG))  # LONG falls: the first of its documents
    np.minimum.at(longest, (pieces.bucket, pieces.microbatch), pieces.sample)
    each = wide / pieces.n_microbatches
    for r in range(RANKS):
        y = top + r * TALL
        to.text(left - 8, y + 16, str(r), "tick", "end")
        for m in np.flatnonzero(tokens[r]).tolist():
            first = int(longest[r, m])
            long = first < len(LONG)
            color = series_color(first) if long else "var(--muted)"
            to.box(left + m * each + 1, y + 1, each - 2, TALL - 2, color, 0.5 if long else 0.1)
            to.text(left + (m + 0.5) * each, y + 16, f"{tokens[r, m]:,}", "tick", "middle")
