"""An evaluation on every runtime: the same samples in the same steps, whatever the mesh."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

import overlord as ov
import overlord.torch as ot
from tests.processes import WORKER_RUNTIME
from tests.reference import reference_stream
from tests.scenarios.test_runtime import rows, run

pytestmark = pytest.mark.timeout(200)
SIZES = {"a": 17, "b": 26}
BATCH = ov.Batch(samples=10, context=32, microbatches=2)
SMALL = ov.Model(64, 2, 2, ffn=128, window=16, global_layers=1)


def evaluation(mesh: ov.Mesh, **fields: Any) -> ov.Job:
    sources = [
        ov.Source(name, rows(n, 1000 * i), transforms=[ov.Tokens()])
        for i, (name, n) in enumerate(SIZES.items())
    ]
    return ov.evaluation(sources, BATCH, mesh, slice_rows=8, **fields)


@pytest.fixture(scope="module")
def expected() -> dict[int, list[Any]]:
    """Samples with their tokens of each step, on one rank of the embedded runtime."""
    outcome = run("local", evaluation(ov.Mesh()))
    assert outcome.error == {0: None}
    return {step: sorted(found) for step, found in outcome.together().items()}


def test_the_order_is_that_of_the_second_implementation(expected: dict[int, list[Any]]) -> None:
    steps = enumerate(reference_stream(evaluation(ov.Mesh())))
    stream = {k: sorted((tuple(key), list(tokens)) for key, tokens in step) for k, step in steps}
    assert expected == stream
    assert len(stream) == 5


@pytest.mark.parametrize("runtime", ["local", "simulated", WORKER_RUNTIME])
def test_every_runtime_delivers_the_same_steps_on_several_ranks(
    runtime: str, expected: dict[int, list[Any]]
) -> None:
    outcome = run(runtime, evaluation(ov.Mesh(dp=3), model=SMALL))
    assert set(outcome.error.values()) == {None}
    assert outcome.numbers() == [list(range(5))] * 3, "every rank ends at the same step"
    assert outcome.together() == expected
    assert outcome.quarantine == []


def test_processes_evaluate_again_and_again_with_the_same_result() -> None:
    job = evaluation(ov.Mesh())
    with ot.StatefulLoader(job, runtime=WORKER_RUNTIME) as loader:
        passes = [[tuple(p.sample) for mb in chain(*loader) for p in mb.samples] for _ in range(2)]
    assert passes[0] == passes[1]
    assert len(set(passes[0])) == sum(SIZES.values())
