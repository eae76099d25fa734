"""Hybrid plans and the microbatches that are built of them, for any samples, ranks and rules."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.constructor.pieces import build_pieces
from overlord.plan.pieces import pieces_of
from overlord.planning.strategies import hdp
from overlord.sample import Ragged
from tests.reference_pieces import reference_microbatches


@st.composite
def steps(draw: st.DrawFn) -> tuple[ov.LoadingPlan, list[list[int]], ov.Batch]:
    """A plan of one step, its documents and its batch."""
    pp, dp, cp = (draw(st.integers(1, n)) for n in (2, 4, 3))
    multiple = draw(st.sampled_from([0, 0, 1, 3]))
    context = 12 * draw(st.integers(1, 6))
    longest = context * dp * cp
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=14))
    batch = ov.Batch(
        samples=len(lengths),
        context=context,
        pad_multiple=max(1, multiple),
        pad_id=draw(st.sampled_from([0, 7])),
        labels=draw(st.sampled_from(["shifted", "unshifted"])),
    )
    documents = [[int(x) for x in 100 * i + np.arange(n) % 90] for i, n in enumerate(lengths)]
    half = len(lengths) // 2
    columns = {
        name: {"tokens": np.array(part, np.int64)}
        for name, part in (("a", lengths[:half]), ("b", lengths[half:]))
    }
    buffer = ov.Buffer.from_columns(columns, batch=batch)
    buffer = replace(buffer, drawn=True, sync=draw(st.sampled_from(["microbatch", "step"])))
    rules: dict[str, Any] = {
        "groups": draw(st.sampled_from(["any", "power_of_two"])),
        "node": draw(st.sampled_from([2, 8])),
        "count_multiple": draw(st.integers(1, 2)),
        "padded": multiple > 0,
    }
    plan = hdp(ov.cost.LengthCost(1.0, draw(st.sampled_from([0.0, 0.01]))), **rules)(
        buffer, ov.Mesh(pp=pp, dp=dp, cp=cp)
    )
    return plan, documents, batch


def built(plan: ov.LoadingPlan, documents: list[list[int]], batch: ov.Batch) -> list[list[Any]]:
    """The microbatches of every rank, built together."""
    tokens = Ragged.from_rows(documents, np.uint16)
    made = build_pieces(plan, np.arange(len(plan)), tokens, range(plan.main.n_buckets), batch)
    cut = made.arrays.cut(0, made.arrays.n)
    first = made.first.tolist()
    return [cut[a:b] for a, b in pairwise(first)]


@given(steps())
@settings(max_examples=150, deadline=None)
def test_every_rank_gets_what_the_reference_says(step: Any) -> None:
    plan, documents, batch = step
    ranks = built(plan, documents, batch)
    for rank, microbatches in enumerate(ranks):
        wanted = reference_microbatches(
            plan, documents, rank, pad_id=batch.pad_id, labels=batch.labels
        )
        assert len(microbatches) == len(wanted)
        for found, expected in zip(microbatches, wanted, strict=True):
            assert {k: v.reshape(-1).tolist() for k, v in found.items()} == expected


@given(steps())
@settings(max_examples=60, deadline=None)
def test_pieces_of_all_ranks_are_the_documents_and_no_rank_holds_too_much(step: Any) -> None:
    plan, documents, batch = step
    held: Counter[tuple[int, int]] = Counter()  # (token, position) of all ranks
    for microbatches in built(plan, documents, batch):
        for mb in microbatches:
            assert len(mb["tokens"]) <= batch.context
            content = np.concatenate(
                [
                    np.arange(a, b)
                    for a, b, n in zip(
                        mb["cu_seqlens_local"][:-1],
                        mb["cu_seqlens_local"][1:],
                        mb["source_ids"],
                        strict=True,
                    )
                    if n >= 0
                ]
                or [np.zeros(0, np.int64)]
            )
            lengths = np.diff(mb["cu_seqlens"]).repeat(np.diff(mb["cu_seqlens_local"]))
            content = content[mb["position_ids"][content] < lengths[content]]
            held.update(
                zip(
                    mb["tokens"][content].tolist(),
                    mb["position_ids"][content].tolist(),
                    strict=True,
                )
            )
    wanted = Counter((token, k) for d in documents for k, token in enumerate(d))
    assert held == wanted


@given(steps())
@settings(max_examples=60, deadline=None)
def test_a_hybrid_plan_survives_its_bytes_and_counts_every_token_once(step: Any) -> None:
    plan = step[0]
    again = ov.LoadingPlan.from_bytes(plan.to_bytes())
    assert again.digest() == plan.digest()
    assert again.to_bytes() == plan.to_bytes()
    pieces = pieces_of(plan)
    whole = np.bincount(pieces.sample, weights=pieces.size, minlength=len(plan))
    assert np.array_equal(whole, plan.tasks.lengths(plan.tokens))
    assert np.isclose(plan.loads().sum(), plan.main.cost.sum())
    assert plan.summary()["tokens"] == int(plan.tokens.sum())
    assert plan.imbalance()["bucket"] >= 1.0 - 1e-9
