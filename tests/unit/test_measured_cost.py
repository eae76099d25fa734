"""Plans of several strategies compare by one cost, whatever costs the strategies used."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

import overlord as ov
from overlord.documents import LENGTHS
from overlord.observe.documents import plan_document
from overlord.observe.tables import plan_view
from overlord.planning.cost.models import of_model
from overlord.planning.strategies import hdp_balance

PLACE = ov.Mesh(dp=4)
BATCH = ov.Batch(samples=80, microbatches=2, context=8192)
MODEL = ov.Model(layers=24, hidden=1024, heads=16)


def drawn(**meta: object) -> ov.Buffer:
    lengths = [20 + 4000 // (1 + i * 7 % 31) for i in range(80)]

    buffer = ov.Buffer.from_columns({"web": {"tokens": lengths, **meta}}, batch=BATCH)
    buffer = ov.DGraph.from_buffer(buffer, PLACE).mix({"web": 1.0}).buffer
    return replace(buffer, model=MODEL)


def by_tokens(buffer: ov.Buffer, place: ov.Mesh) -> ov.LoadingPlan:
    graph = ov.DGraph.from_buffer(buffer, place, meta="tokens").mix().distribute("DP")
    return graph.cost("tokens").balance("greedy").plan()


def job(strategy: object) -> ov.Job:
    source = ov.Source.from_dataset("web", [{"tokens": [1]}])
    return ov.Job(
        name="m", sources=[source], batch=BATCH, place=PLACE, model=MODEL, strategy=strategy
    )


def test_the_default_strategy_has_the_same_figures_by_the_cost_of_its_model() -> None:
    plan = ov.strategy.llm_balance(drawn(), PLACE)
    assert plan.imbalance(cost=of_model(MODEL)) == plan.imbalance()


def test_a_plan_is_measured_by_a_cost_that_its_strategy_did_not_use() -> None:
    plan, other = by_tokens(drawn(), PLACE), ov.cost.llama_12b
    found = plan.imbalance(cost=other)
    assert found["microbatch"] > plan.imbalance()["microbatch"]
    assert plan.imbalance(cost="tokens") == plan.imbalance()
    costs = other({"tokens": plan.tokens})[plan.main.sample]
    loads = np.bincount(plan.main.bucket, weights=costs, minlength=4)
    assert found["bucket"] == pytest.approx(loads.max() / loads.mean())


def test_documents_of_a_sample_are_measured_one_by_one() -> None:
    lengths = drawn().column("tokens").tolist()
    halves = [[n // 2, n - n // 2] for n in lengths]
    plan = ov.strategy.llm_balance(drawn(**{LENGTHS: halves}), PLACE)
    assert plan.documents is not None
    assert plan.imbalance(cost=of_model(MODEL)) == plan.imbalance()


@pytest.mark.parametrize(
    ("measure", "says"),
    [
        (lambda plan: plan.imbalance(cost=lambda c: c["patches"]), "expected metadata of tokens"),
        (lambda plan: plan.imbalance(cost="tokns"), "did you mean 'tokens'"),
        (lambda plan: plan.imbalance("encoder", cost="tokens"), "expected module 'backbone'"),
        (
            lambda plan: hdp_balance(drawn(), PLACE).imbalance(cost="tokens"),
            "got one with rings of ranks",
        ),
    ],
)
def test_a_cost_that_cannot_measure_a_plan_is_refused(measure, says: str) -> None:
    with pytest.raises(ov.PlanError, match=says):
        measure(by_tokens(drawn(), PLACE))


def printed(strategy: object, plan: ov.LoadingPlan) -> str:
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan_view(job(strategy), plan, 200))
    return console.export_text()


def test_overlord_plan_measures_every_strategy_by_the_model_and_names_it() -> None:
    plan = by_tokens(drawn(), PLACE)
    here, own = plan.imbalance(cost=of_model(MODEL)), plan.imbalance()
    text, found = printed(by_tokens, plan), plan_document(job(by_tokens), plan)
    assert f"by microbatch {here['microbatch']:.3f}; no placement" in text
    assert f"FLOPs of {MODEL.title}, for every strategy" in text
    lines = [line.rstrip() for line in text.splitlines() if line.startswith("by its own cost")]
    assert lines[0].endswith(f"by microbatch {own['microbatch']:.3f}")
    assert (found["imbalance"], found["own_imbalance"]) == (here, own)
    assert found["cost"].startswith("FLOPs of")


def test_overlord_plan_has_one_line_where_the_strategy_uses_the_model() -> None:
    assert "by its own cost" not in printed("llm_balance", ov.strategy.llm_balance(drawn(), PLACE))
    hybrid = printed("hdp_balance", hdp_balance(drawn(), PLACE))
    assert "the strategy's own, with transfers of rings" in hybrid
