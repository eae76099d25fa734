"""A constructor worker that receives its share of a hybrid plan builds what it would build of the
whole: the documents of all rings of its ranks arrive, and no others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.cluster.placement import Placement
from overlord.cluster.plan_router import PlanRouter
from overlord.constructor.pieces import build_pieces
from overlord.messages.control import EncodedState, PlannedStep
from overlord.sample import Ragged
from overlord.transport.codec import decode, encode
from tests.properties.test_hybrid_plans import steps

AFTER = EncodedState(1, np.zeros(3, np.uint8))


def written(made: Any, ranks: int) -> list[list[dict[str, Any]]]:
    cut = made.arrays.cut(0, made.arrays.n)
    first = made.first.tolist()
    return [
        [
            {k: (v.dtype.str, v.tolist()) for k, v in mb.items()}
            for mb in cut[first[r] : first[r + 1]]
        ]
        for r in range(ranks)
    ]


@given(steps(), st.data())
@settings(max_examples=80, deadline=None)
def test_a_share_of_a_hybrid_plan_gives_the_microbatches_of_the_whole(
    step: Any, data: st.DataObject
) -> None:
    plan, documents, batch = step
    place: ov.Mesh = plan.place
    n, groups = len(plan), place.dp
    constructor_of = [data.draw(st.integers(0, 2)) for _ in range(groups)]
    numbers = {c: i for i, c in enumerate(sorted(set(constructor_of)))}
    constructor_of = [numbers[c] for c in constructor_of]
    served = np.array([data.draw(st.booleans()) for _ in range(groups)])
    loader = np.array([data.draw(st.integers(0, 2)) for _ in range(n)])
    worker_of = [data.draw(st.integers(0, 1)) for _ in range(3)]
    router = PlanRouter(Placement([1, 1, 1], worker_of, constructor_of))
    # rows of a loader follow each other in any order; payload is numbered loader by loader
    order = np.lexsort((np.array(data.draw(st.permutations(range(n)))), loader))
    doc = np.empty(n, np.int64)
    doc[order] = np.arange(n)
    stage = PlannedStep(plan, np.bincount(loader, minlength=3), doc, "digest", AFTER)
    routed = router.route(stage, AFTER, served)

    whole = Ragged.from_rows(documents, np.uint16)
    everything = built(plan, np.arange(n), whole, range(plan.main.n_buckets), batch)
    held = {w: [int(row) for row in order if worker_of[loader[row]] == w] for w in set(worker_of)}
    of_group = place.bucket_of("DP")
    of_bucket = place.bucket_of("CP")
    group_of = {int(b): int(g) for b, g in zip(of_bucket, of_group, strict=True)}
    for c, share in routed.constructor_plans.items():
        share = decode(*encode(share))
        tokens = []
        for w in share.origins:
            sent = routed.loader_plans[w]
            takes = sent.take[sent.to.index(c)] if sent.take else range(len(held[w]))
            tokens += [documents[held[w][int(k)]] for k in takes]
        assert len(tokens) == len(share.stage.plan), "each document once"
        buckets = [b for b, g in sorted(group_of.items()) if constructor_of[g] == c and served[g]]
        found = built(
            share.stage.plan, share.stage.doc, Ragged.from_rows(tokens, np.uint16), buckets, batch
        )
        assert found == [everything[b] for b in buckets]
    assert set(routed.constructor_plans) == {constructor_of[g] for g in range(groups) if served[g]}


def built(plan: Any, doc: np.ndarray, tokens: Ragged, ranks: Any, batch: Any) -> Any:
    return written(build_pieces(plan, doc, tokens, list(ranks), batch), len(ranks))
