"""Edges of a graph lead from candidates to microbatches, as the plan says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import overlord as ov
from overlord.planning.graph.edges import Edge
from tests.processes import launch
from tests.worlds import Rows

images = st.lists(st.integers(4, 40), max_size=4)


def joined(edges: list[Edge]) -> list[tuple[int, int]]:
    """The paths along some edges, as (node of the first state, node of the last)."""
    paths = list(zip(edges[0].source.tolist(), edges[0].target.tolist(), strict=True))
    for edge in edges[1:]:
        onwards: dict[int, list[int]] = {}
        for a, b in zip(edge.source.tolist(), edge.target.tolist(), strict=True):
            onwards.setdefault(a, []).append(b)
        paths = [(start, end) for start, middle in paths for end in onwards.get(middle, [])]
    return paths


def candidates(rows: list[list[int]], wanted: int) -> ov.Buffer:
    columns = {"tokens": [20 + sum(n) for n in rows], "image_patches": rows}
    other = {"tokens": [9] * 5, "image_patches": [[], [8], [], [], [4, 4]]}
    batch = ov.Batch(samples=wanted, microbatches=2, context=256)
    return ov.Buffer.from_columns({"seen": columns, "more": other}, batch=batch)


@given(st.lists(images, min_size=6, max_size=20), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_paths_of_edges_lead_from_each_candidate_to_its_microbatch(
    rows: list[list[int]], early: bool, items: bool, narrowed: bool
) -> None:
    buffer = candidates(rows, 6)
    graph = ov.DGraph.from_buffer(buffer, ov.Mesh(dp=3))
    column, sources = "image_patches" if items else "tokens", ["seen"] if narrowed else None
    if early:
        graph = graph.select(column, sources=sources).mix({"seen": 1.0, "more": 0.0})
    else:
        graph = graph.mix({"seen": 1.0, "more": 0.0}).select(column, sources=sources)
    graph = graph.distribute("WORLD").cost("tokens" if not items else lambda c: c[column])
    graph = graph.balance("greedy").broadcast_at("TP")
    edges = graph.edges()
    states = ["selected", "drawn"] if early else ["drawn", "selected"]
    assert [e.after for e in edges] == [*states, "distributed", "weighed", "placed", "pruned"]
    assert [e.before for e in edges] == ["buffered", *(e.after for e in edges[:-1])]
    assert [e.what for e in edges] == list(graph.trail)
    kinds = [e.kind for e in edges[2:]]
    assert kinds == ["null", "transformation", "dependency", "null"]
    p = graph.placement
    assert p is not None
    drawn = {str(graph.buffer[i]): i for i in range(len(graph.buffer))}
    wanted = []
    for node, sample in enumerate(graph.sample.tolist()):
        start = next(i for i in range(len(buffer)) if str(buffer[i]) == str(graph.buffer[sample]))
        wanted.append((start, int(p.bucket[node]) * p.n_microbatches + int(p.microbatch[node])))
    assert sorted(joined(edges)) == sorted(wanted)
    assert {str(buffer[a]) for a, _ in joined(edges)} <= set(drawn)


@given(st.lists(images, min_size=3, max_size=9))
def test_items_keep_their_number_and_samples_lead_to_all_their_items(rows: list[list[int]]) -> None:
    graph = ov.DGraph.from_buffer(candidates(rows, 3), ov.Mesh()).mix([1, 1])
    there = graph.select("image_patches")
    edge = there.edges()[-1]
    assert np.array_equal(graph.sample[edge.source], there.sample[edge.target])
    assert np.array_equal(edge.target, np.arange(len(there.sample)))
    again = there.select("image_patches").edges()[-1]
    assert np.array_equal(again.source, again.target)
    back = there.select("tokens").edges()[-1]  # every item leads to its sample
    assert len(back.source) == len(there.sample)
    assert np.array_equal(there.sample[back.source], back.target)


def test_a_graph_without_primitives_has_no_edges() -> None:
    assert ov.DGraph.from_buffer(candidates([[4]], 1), ov.Mesh()).edges() == []


@pytest.mark.parametrize("axis", ["DP", "CP"])
def test_edges_of_a_planned_step_end_at_its_constructors(axis: str) -> None:
    def strategy(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
        graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute(axis)
        return graph.cost("tokens").balance("greedy").broadcast_at("TP").plan()

    rows = Rows([{"tokens": [1] * (1 + i % 7)} for i in range(40)])
    job = ov.Job(
        name="edges",
        sources=[ov.Source("a", rows, transforms=[ov.Tokens()])],
        place=ov.Mesh(dp=2, cp=2),
        batch=ov.Batch(samples=8, microbatches=2, context=64),
        strategy=strategy,
        until=2,
    )
    with launch(job, "local") as session:
        next(session.client(0))
        graph, plan = session.graph(0), session.plan(0)
        edges = graph.edges()
        assert [e.after for e in edges][-3:] == ["placed", "pruned", "planned"]
        ends = dict(joined(edges))
        for node, bucket in enumerate(plan.main.bucket.tolist()):
            assert graph.constructor[bucket] == f"constructor/{ends[node]}"
