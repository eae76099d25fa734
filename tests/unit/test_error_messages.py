"""Plausible mistakes in a strategy, a plan or a session get a named error that says what was wanted
and what was found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import overlord as ov

PLACE = ov.ClientPlaceTree(dp=2)


def buffer(columns: Mapping[str, Any] | None = None, samples: int = 8) -> ov.Buffer:
    given = columns or {
        "web": {
            "tokens": [100] * 20,
            "image_patches": [[4, 8]] * 10 + [[]] * 10,
            "hard": np.arange(20.0)[::-1],
        },
        "code": {"tokens": [300] * 20, "hard": np.arange(20.0)},
    }
    return ov.Buffer.from_columns(given, batch=ov.Batch(samples=samples, context=1024))


def candidates() -> ov.DGraph:
    return ov.DGraph.from_buffer(buffer(), PLACE)


def drawn(samples: int = 8) -> ov.DGraph:
    return ov.DGraph.from_buffer(buffer(samples=samples), PLACE).mix({"web": 1, "code": 1})


def texts() -> ov.DGraph:
    return drawn().select("tokens").distribute("DP")


def images() -> ov.DGraph:
    return drawn().select("image_patches").distribute("WORLD")


def plan() -> ov.LoadingPlan:
    return texts().balance().plan()


def raw(fn: Callable[..., Any]) -> ov.LoadingPlan:
    return ov.plan_raw(fn)(drawn().buffer, PLACE)


def looked_ahead(prefer: Any) -> ov.DGraph:
    return candidates().mix({"web": 1}, look_ahead=2, prefer=prefer)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "tokens instead of their number": (
        lambda: buffer({"web": {"tokens": [[1, 2], [3]]}}),
        "'tokens' of source 'web': expected a whole number",
    ),
    "lengths that are no whole numbers": (
        lambda: buffer({"web": {"tokens": [1.5, 2.5]}}),
        "expected a whole number of at least 0",
    ),
    "negative lengths": (
        lambda: buffer({"web": {"tokens": [5, -1]}}),
        "expected a whole number of at least 0",
    ),
    "a source without names of columns": (
        lambda: buffer({"web": [1, 2]}),
        "source 'web': expected a mapping of metadata name to column",
    ),
    "one number for all samples": (lambda: buffer({"web": {"tokens": 5}}), "got 5"),
    "text as metadata": (
        lambda: buffer({"web": {"tokens": [1], "kind": ["a"]}}),
        "'kind' of source 'web': expected a number for each sample",
    ),
    "numbers and lists in one column": (
        lambda: buffer({"web": {"tokens": [1, 2], "p": [3, [4, 5]]}}),
        "'p' of source 'web'",
    ),
    "lists and numbers in one column": (
        lambda: buffer({"web": {"tokens": [1, 2], "p": [[4, 5], 3]}}),
        "'p' of source 'web'",
    ),
    "no batch": (
        lambda: ov.Buffer.from_columns({"web": {"tokens": [1]}}, batch=8),
        "expected a Batch, got 8",
    ),  # type: ignore[arg-type]
    "arguments swapped": (
        lambda: ov.DGraph.from_buffer(PLACE, buffer()),
        "expected a Buffer as buffer, got Mesh",
    ),  # type: ignore[arg-type]
    "a number of ranks for a place": (
        lambda: ov.DGraph.from_buffer(buffer(), 4),
        "expected a Mesh as place, got int",
    ),  # type: ignore[arg-type]
    "a list of columns": (
        lambda: drawn().select(["tokens"]),
        r"expected metadata of hard, image_patches, tokens, got \['tokens'\]",
    ),  # type: ignore[arg-type]
    "a schedule of the step alone": (
        lambda: candidates().mix(lambda step: {"web": 1}),
        r"expected a function of \(step, feedback\)",
    ),  # type: ignore[arg-type, misc]
    "another draw than the job's": (
        lambda: ov.DGraph.from_buffer(drawn().buffer, PLACE).mix(draw="random"),
        "has drawn this step already",
    ),
    "scores instead of a function": (
        lambda: looked_ahead(np.zeros(16)),
        "prefer: expected a function, got ndarray",
    ),
    "a preference of one argument": (
        lambda: looked_ahead(lambda rows: rows),
        r"prefer: expected a function of \(candidates, place\)",
    ),
    "a preference without return": (
        lambda: looked_ahead(lambda rows, place: None),
        "prefer: expected 16 numbers",
    ),
    "a preference in words": (
        lambda: looked_ahead(lambda rows, place: ["low"] * 16),
        "prefer: expected 16 numbers",
    ),
    "a preference by unknown metadata": (
        lambda: looked_ahead(lambda rows, place: rows.meta["easy"]),
        "step 0: expected metadata of hard, .*, got 'easy'",
    ),
    "an axis in a list": (lambda: drawn().distribute(["DP"]), "expected an axis of"),  # type: ignore[arg-type]
    "groups in words": (
        lambda: drawn().distribute("DP", group_size="2").balance(),
        "group_size: .* got '2'",
    ),  # type: ignore[arg-type]
    "a cost by unknown metadata": (
        lambda: texts().cost(lambda c: c["length"]),
        "step 0: expected metadata of tokens, got 'length'",
    ),
    "a cost in words": (
        lambda: texts().cost(lambda c: ["dear"] * 8),
        "expected 8 numbers, got list",
    ),  # type: ignore[arg-type, return-value]
    "costs instead of a function": (lambda: texts().cost([1.0, 2.0]), r"unknown cost \[1.0, 2.0\]"),  # type: ignore[arg-type]
    "a capacity in words": (
        lambda: texts().balance(capacity="1k"),
        "capacity: expected a whole number of tokens",
    ),  # type: ignore[arg-type]
    "a capacity below 0": (
        lambda: texts().balance(capacity=-5),
        "capacity: expected a whole number of tokens",
    ),
    "memory in words": (
        lambda: texts().cost("tokens", memory="tokens").balance(memory_capacity="5"),
        "expected a number above 0",
    ),  # type: ignore[arg-type]
    "a method in a list": (lambda: texts().balance(["greedy"]), "expected a balance method"),  # type: ignore[arg-type]
    "a plan for a graph": (
        lambda: texts().balance().plan(encoder=plan()),
        "module 'encoder': expected a DGraph, got LoadingPlan",
    ),  # type: ignore[arg-type]
    "following a plan": (lambda: images().follow(plan()), "expected a DGraph, got LoadingPlan"),  # type: ignore[arg-type]
    "following other samples": (
        lambda: images().follow(drawn(4).select("tokens").distribute("DP").balance()),
        "expected a graph of the same samples",
    ),
    "imbalance of no module": (
        lambda: plan().imbalance("encoder"),
        "module 'encoder': expected one of backbone; .*plan",
    ),
    "loads of no module": (lambda: plan().loads("encoder"), "module 'encoder'"),
    "fetchers of no module": (lambda: plan().fetchers("encoder"), "module 'encoder'"),
    "served by no module": (lambda: plan().served_by("encoder"), "module 'encoder'"),
    "fetches of no module": (lambda: plan().fetches(0, "encoder"), "module 'encoder'"),
    "routes of no module": (
        lambda: plan().routes(),
        "module 'encoder': expected one of backbone; .*plan",
    ),
    "no bytes": (
        lambda: ov.LoadingPlan.from_bytes("OVPL"),
        "expected the bytes of a plan, got str",
    ),  # type: ignore[arg-type]
    "a rank from the environment": (
        lambda: PLACE.coords("1"),
        "expected a rank as a whole number, got '1'",
    ),  # type: ignore[arg-type]
    "a place from the environment": (lambda: PLACE.rank(dp="1"), "got dp='1'"),  # type: ignore[arg-type]
    "replicas in words": (
        lambda: PLACE.add_replicas("2"),
        "expected a whole number of at least 0, got '2'",
    ),  # type: ignore[arg-type]
    "a broadcast by number": (
        lambda: PLACE.fetchers(3),
        "expected broadcast axes of TP, CP, PP, DP, got 3",
    ),  # type: ignore[arg-type]
    "lengths in words": (
        lambda: ov.cost.fit([["a"]] * 4, [1.0] * 4),
        "expected the lengths of a microbatch's documents",
    ),
    "seconds in words": (
        lambda: ov.cost.fit([[1], [2], [3], [5]], ["1 s"] * 4),
        "expected seconds above 0 for every microbatch",
    ),  # type: ignore[list-item]
    "measurements without the column": (
        lambda: ov.cost.fit([{"tokens": [1]}], [1.0], column="length"),
        "expected column 'length' in every microbatch, got only tokens",
    ),
    "no measurements": (lambda: ov.cost.fit(None, [1.0]), "expected a list of microbatches"),  # type: ignore[arg-type]
    "a method named by number": (
        lambda: ov.register_balance(5, lambda *a: a[0]),
        "expected a name and a function",
    ),  # type: ignore[arg-type]
    "a cost named by number": (
        lambda: ov.register_cost(5, lambda c: c),
        "expected a name and a function",
    ),  # type: ignore[arg-type, return-value]
    "a method of costs alone": (
        lambda: ov.register_balance("alone", lambda costs, n: costs),
        "capacity_aware=False",
    ),
    "lengths instead of columns": (
        lambda: ov.cost.llama_12b([1, 2]),
        "expected metadata columns by name, got list",
    ),  # type: ignore[arg-type]
    "a cost of no argument": (
        lambda: texts().cost(lambda: 1.0),
        r"cost: expected a function of \(columns\)",
    ),  # type: ignore[arg-type, misc]
    "a name for weights": (
        lambda: candidates().mix("web"),
        "expected weights, by source name or one for each source, got 'web'",
    ),  # type: ignore[arg-type]
    "a fetcher outside the mesh": (
        lambda: plan().fetches(9),
        "expected a rank from 0 to 1 .*, got 9",
    ),
    "a raw plan of columns alone": (
        lambda: ov.plan_raw(lambda columns: columns),
        r"expected a function of \(columns, place, batch, step\)",
    ),  # type: ignore[arg-type, misc]
    "a hook of no argument": (
        lambda: ov.loader_do_plan(lambda: 0),
        r"expected a function of \(samples\)",
    ),  # type: ignore[arg-type, misc]
    "a raw plan by unknown metadata": (
        lambda: raw(lambda columns, place, batch, step: columns["length"]),
        "step 0: expected metadata of .*, got 'length'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_plausible_mistake_is_named(mistake: str) -> None:
    make, words = MISTAKES[mistake]
    with pytest.raises(ov.OverlordError, match=words):
        make()


def job(**fields: Any) -> ov.Job:
    rows = ov.Factory(
        lambda shard: ({"tokens": [7] * (1 + i % 30), "hard": i % 10} for i in range(200))
    )
    source = ov.Source("web", rows, transforms=[ov.Tokens(), ov.Meta("hard", "hard")])
    return ov.Job(
        **(
            {
                "name": "mistakes",
                "sources": [source],
                "place": PLACE,
                "batch": ov.Batch(samples=8, context=64),
                "until": 3,
            }
            | fields
        )
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"strategy": lambda buffer: None},
            r"strategy: expected a function of \(buffer, place\), got <lambda>\(buffer\)",
        ),
        (
            {"mixture": lambda step: {"web": 1}},
            r"mixture: expected a function of \(step, feedback\), got <lambda>\(step\)",
        ),
        (
            {"mixture": ov.schedule.linear},
            r"mixture: expected a function of \(step, feedback\), got linear\(",
        ),
    ],
)
def test_a_function_that_cannot_be_called_as_it_will_be_is_refused_before_the_job_runs(
    fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ov.JobError, match=words):
        job(**fields)


class Prefers:
    """A schedule whose preference is whatever it was given."""

    def __init__(self, scores: Any) -> None:
        self.scores = scores

    def __call__(self, step: int, feedback: Mapping[str, float]) -> dict[str, float]:
        return {"web": 1.0}

    def prefer(self, step: int, candidates: ov.Buffer) -> Any:
        return self.scores


@pytest.mark.parametrize("scores", [None, np.zeros(3), ["low"] * 16])
def test_a_schedule_whose_preference_is_none_is_refused(scores: Any) -> None:
    with (
        ov.launch(job(mixture=Prefers(scores), look_ahead=2)) as session,
        pytest.raises(ov.PlanError, match="prefer: expected 16 numbers"),
    ):
        next(session.client(0))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda s: s.plan("0"), "session.plan: expected the number of a step, got '0'"),
        (lambda s: s.graph("0"), "session.graph: expected the number of a step, got '0'"),
        (lambda s: s.client("0"), "expected a rank as a whole number, got '0'"),
        (
            lambda s: s.explain(ov.SampleId("web", "0", "0", "3")),
            "expected the number of a step, a SampleId",
        ),  # type: ignore[arg-type]
        (
            lambda s: s.explain(ov.SampleId("web", -1, 0, 3)),
            "expected an epoch of at least 0, got -1",
        ),
        (lambda s: s.explain(ov.SampleId("web", 0, -1, 3)), "has files 0 to 0"),
    ],
)
def test_a_session_names_what_it_cannot_answer(
    ask: Callable[[ov.Session], object], words: str
) -> None:
    with ov.launch(job()) as session:
        next(session.client(0))
        with pytest.raises(ov.OverlordError, match=words):
            ask(session)


def test_a_curriculum_chooses_on_a_buffer_made_by_hand_too() -> None:
    easy = ov.schedule.curriculum("hard", low=3, high=19, steps=10, weights={"web": 1})
    taken = candidates().mix(easy, look_ahead=2).buffer
    assert sorted(np.asarray(taken.meta["hard"]).tolist()) == [
        4.0,
        5.0,
        6.0,
        7.0,
        8.0,
        9.0,
        10.0,
        11.0,
    ]


def test_what_a_graph_holds_cannot_be_written() -> None:
    graph = drawn()
    with pytest.raises(TypeError):
        graph.columns["more"] = np.zeros(8)  # type: ignore[index]
    for column in (graph.columns["tokens"], graph.buffer.meta["tokens"]):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7  # type: ignore[index]


def test_one_broadcast_may_be_named_without_a_list() -> None:
    raw = ov.plan_raw(
        lambda columns, place, batch, step: {
            "bucket": columns["row"] % 2,
            "microbatch": columns["row"],
        },
        broadcast="TP",
    )
    assert raw(drawn().buffer, PLACE).main.broadcast == ("TP",)


def test_one_source_may_be_selected_by_its_name() -> None:
    assert len(drawn().select("tokens", sources="web").sample) == 4
