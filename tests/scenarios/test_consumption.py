"""``loader_do_plan(consume=fn)``: a user's choice of samples, within the rules of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import JobError, PlanError, StateMismatch
from tests.processes import WORKER_RUNTIME, launch, run, written
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)

APART = {"sources_per_host": 1, "hosts": 3, "constructor_hosts": 2}


def rows(n: int, first: int) -> Rows:
    return Rows([{"tokens": [first + k] * (1 + 7 * k % 11)} for k in range(n)])


def shortest_first(candidates: ov.Candidates) -> np.ndarray:
    return np.argsort(candidates.meta["tokens"], kind="stable")


def by_chance(candidates: ov.Candidates) -> np.ndarray:
    """By chance, and by the number of candidates: neither may depend on loaders."""
    order = np.argsort(candidates.chance("order"), kind="stable")
    return np.roll(order, len(candidates))


def last_first(candidates: ov.Candidates) -> list[int]:
    return list(range(len(candidates)))[::-1]


def job(consume: Callable[[ov.Candidates], Any] | None, **changes: Any) -> ov.Job:
    sources = [
        ov.Source(name, rows(50, first), transforms=[ov.Tokens("tokens")], epochs=1, weight=weight)
        for name, first, weight in (("a", 100, 0.7), ("b", 1000, 0.3))
    ]
    usual: dict[str, Any] = {
        "name": "consuming",
        "sources": sources,
        "batch": ov.Batch(samples=8, microbatches=2, context=64),
        "place": ov.Mesh(dp=2),
        "seed": 3,
        "slice_rows": 4,
        "look_ahead": 3,
        "max_age": 2,
        "strategy": "vanilla",
        "hooks": [] if consume is None else [ov.loader_do_plan(consume=consume)],
    }
    return ov.Job(**{**usual, **changes})


def plans(made: ov.Job, **options: Any) -> list[ov.LoadingPlan]:
    found = []
    with launch(made, "local", **options) as session:
        for step in session.client(0):
            found.append(session.plan(step.step))
    return found


def ids(plan: ov.LoadingPlan) -> list[str]:
    return [str(plan.sample_id(i)) for i in range(len(plan))]


@pytest.mark.parametrize("consume", [shortest_first, by_chance, last_first])
def test_no_choice_loses_or_repeats_a_sample_or_changes_the_mixture(consume: Any) -> None:
    mine, plain = plans(job(consume)), plans(job(None))
    assert Counter(i for p in mine for i in ids(p)) == Counter(i for p in plain for i in ids(p))
    assert max(Counter(i for p in mine for i in ids(p)).values()) == 1
    assert [np.bincount(p.source, minlength=2).tolist() for p in mine] == [
        np.bincount(p.source, minlength=2).tolist() for p in plain
    ]
    assert [sorted(ids(p)) for p in mine] != [sorted(ids(p)) for p in plain]


def test_the_choice_is_the_hooks_and_due_samples_come_first() -> None:
    asked: list[ov.Candidates] = []

    def watch(candidates: ov.Candidates) -> np.ndarray:
        asked.append(candidates)
        return shortest_first(candidates)

    found = plans(job(watch, until=6))
    assert any(candidates.due.any() for candidates in asked)
    for candidates in asked:
        plan, i = found[candidates.step], ("a", "b").index(candidates.source)
        taken = {str(plan.sample_id(k)) for k in np.flatnonzero(plan.source == i).tolist()}
        order = [*np.flatnonzero(candidates.due).tolist(), *shortest_first(candidates).tolist()]
        wanted = list(dict.fromkeys(str(candidates[k]) for k in order))[: candidates.wanted]
        assert taken == set(wanted)
        assert not candidates.meta["tokens"].flags.writeable
        assert not candidates.row.flags.writeable


@pytest.mark.parametrize("consume", [shortest_first, by_chance])
def test_the_stream_of_a_choice_is_the_same_on_every_runtime(consume: Any) -> None:
    made = job(consume)
    alone = run(made, "local")
    assert alone.error == ""
    for seed in range(3):
        simulated = ov.simulate(made, seed=seed, check=True, loaders={"a": 1 + seed})
        steps = {rank: [written(s) for s in found] for rank, found in simulated.steps.items()}
        assert steps == alone.steps
    apart = run(made, WORKER_RUNTIME, loaders={"b": 2}, **APART)
    assert apart.steps == alone.steps
    assert apart.states == alone.states


def test_a_killed_loader_does_not_change_a_choice() -> None:
    made = job(by_chance)
    wanted = [p.digest() for p in plans(made)]
    with launch(made, WORKER_RUNTIME, **APART) as session:
        clients, digests = [session.client(rank) for rank in range(2)], []
        for steps in zip(*clients, strict=True):
            digests.append(steps[0].plan_digest)
            if len(digests) == 3:
                session.kill("loader-worker/0")
    assert digests == wanted


def test_a_run_goes_on_from_a_state_with_the_same_choice_and_refuses_another() -> None:
    made = job(shortest_first)
    wanted = [ids(p) for p in plans(made)]
    with launch(made, "local") as session:
        client = session.client(0)
        for _ in range(3):
            next(client)
        state = client.state_dict()
    assert [ids(p) for p in plans(made, resume=state)] == wanted[3:]
    with pytest.raises(StateMismatch, match="hooks"):
        launch(job(last_first), "local", resume=state)


def test_other_hooks_of_loaders_get_the_chosen_samples() -> None:
    def marked(samples: ov.Popped) -> ov.Ragged:
        return ov.Ragged(samples.tokens.values + 5000, samples.tokens.offsets)

    both = [ov.loader_do_plan(consume=last_first), ov.loader_do_plan(marked)]
    with launch(job(None, hooks=both, until=3), "local") as session:
        tokens = [t for step in session.client(0) for mb in step for t in mb["tokens"].tolist()]
    assert min(t for t in tokens if t) >= 5100


@pytest.mark.parametrize(
    ("consume", "text"),
    [
        (lambda c: None, r"source 'a': expected whole numbers, got NoneType; return numbers of"),
        (lambda c: np.zeros(len(c)), "expected whole numbers, got float64"),
        (lambda c: np.arange(len(c)) + 1, r"expected 0 to \d+, got 1 to"),
        (lambda c: [0, 0, *range(1, len(c))], "expected each candidate once, got one twice"),
        (lambda c: np.arange(c.wanted - 1), r"at least the \d+ samples of the draw, got"),
        (lambda c: c.pixels, r"loader_do_plan\(consume=<lambda>\) raised AttributeError"),
        (lambda c: c.meta["easy"], "expected metadata of bytes, tokens, got 'easy'"),
    ],
)
def test_a_choice_that_is_none_ends_the_job_at_its_step(consume: Any, text: str) -> None:
    def from_step_2(candidates: ov.Candidates) -> Any:
        return consume(candidates) if candidates.step >= 2 else last_first(candidates)

    from_step_2.__name__ = "<lambda>"
    with launch(job(from_step_2), "local") as session:
        client = session.client(0)
        assert [next(client).step, next(client).step] == [0, 1]
        with pytest.raises(PlanError, match=text) as e:
            next(client)
    assert e.value.step == 2


def test_what_cannot_choose_is_refused_before_a_launch() -> None:
    with pytest.raises(JobError, match=r"look_ahead: expected more than 1 for loader_do_plan"):
        job(last_first, look_ahead=1)
    with pytest.raises(JobError, match=r"hooks\[1\]: expected one ov.loader_do_plan\(consume=fn\)"):
        job(None, hooks=[ov.loader_do_plan(consume=last_first)] * 2)
    with pytest.raises(JobError, match=r"expected fn or consume=, got both; make a hook of each"):
        ov.loader_do_plan(last_first, consume=last_first)  # type: ignore[arg-type]
    with pytest.raises(JobError, match=r"expected fn or consume=, got neither"):
        ov.loader_do_plan()
    with pytest.raises(JobError, match="loader_do_plan"):
        ov.loader_do_plan(consume=lambda: 0)  # type: ignore[misc, arg-type]
