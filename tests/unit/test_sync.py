"""``Job.sync``: when ranks wait for each other. It decides the slots of a step, never its
samples.
"""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import overlord as ov
from overlord.job.job import SYNCS
from overlord.journal import job_journal
from overlord.journal.timeouts import Timeouts
from overlord.observe.tables import plan_view
from overlord.setup.job_agreement import difference, parts_of
from overlord.setup.prepared_job import Options, PreparedJob

ROWS = [{"tokens": [i] * (1 + i * i * i % 61)} for i in range(240)]
PLACE = ov.ClientPlaceTree(dp=2)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that closed a journal opens it again: a slow sync must not be in the way."""
    monkeypatch.setattr(job_journal, "TIMEOUTS", Timeouts(close_s=30.0))


def job(**changes: Any) -> ov.Job:
    source = ov.Source.from_dataset("rows", ROWS, transforms=[ov.Tokens("tokens")], epochs=1)
    given = {
        "sources": [source],
        "batch": ov.Batch(samples=24, microbatches=3, context=256),
        "place": PLACE,
        "seed": 4,
    }
    return ov.Job(name="sync", **{**given, **changes})


def steps(session: ov.Session, n: int) -> list[tuple[list[ov.SampleId], str]]:
    """The samples of the next steps, and their plans."""
    clients, found = [session.client(rank) for rank in range(PLACE.world_size)], []
    for _ in range(n):
        taken = [next(client) for client in clients]
        found.append(
            (
                sorted(s.sample for step in taken for mb in step for s in mb.samples),
                taken[0].plan_digest,
            )
        )
    return found


def test_ranks_wait_at_every_microbatch_unless_the_job_says_otherwise() -> None:
    assert job().sync == "microbatch"
    assert "sync step" in repr(job(sync="step"))
    with pytest.raises(ov.JobError, match=r"sync: expected one of microbatch, step, got 'epoch'"):
        job(sync="epoch")


def test_a_file_may_say_when_ranks_wait(tmp_path: Path) -> None:
    made = ov.Job(
        name="sync",
        sources=[ov.Source("a", str(tmp_path / "*.parquet"))],
        batch=ov.Batch(samples=8, context=64),
        sync="step",
    )
    (tmp_path / "job.yaml").write_text(made.to_yaml())
    assert "sync: step" in made.to_yaml()
    assert ov.Job.from_yaml(tmp_path / "job.yaml") == made
    (tmp_path / "wrong.yaml").write_text(made.to_yaml().replace("sync: step", "sync: never"))
    with pytest.raises(ov.JobError, match=r"sync: expected one of microbatch, step, got 'never'"):
        ov.Job.from_yaml(tmp_path / "wrong.yaml")


def test_a_strategy_is_told_when_ranks_wait_and_balances_for_that() -> None:
    seen: list[str] = []

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        seen.append(buffer.sync)
        return ov.strategy.llm_balance(buffer, place)

    for sync in SYNCS:
        with ov.launch(job(sync=sync, strategy=strategy), prefetch=1) as session:
            next(session.client(0))
            assert session.graph(0).buffer.sync == sync
            objective = {"microbatch": "microbatch", "step": "iteration"}[sync]
            assert any(
                f"balance(greedy, both, {objective})" in what
                for what in session.plan(0).extra["trail"]
            )
    assert set(seen) == set(SYNCS)


@pytest.mark.parametrize("strategy", ["llm_balance", "backbone_balance", "vanilla"])
def test_a_state_resumes_under_another_sync_with_the_samples_of_every_step(strategy: str) -> None:
    fingerprints = [
        PreparedJob(job(sync=sync, strategy=strategy), Options()).fingerprint for sync in SYNCS
    ]
    assert fingerprints[0] == fingerprints[1]
    whole = {}
    for sync in SYNCS:
        with ov.launch(job(sync=sync, strategy=strategy)) as session:
            whole[sync] = steps(session, 8)
    assert [samples for samples, _ in whole["step"]] == [
        samples for samples, _ in whole["microbatch"]
    ]
    assert (whole["step"] == whole["microbatch"]) == (strategy == "vanilla")
    with ov.launch(job(strategy=strategy)) as session:
        first = steps(session, 3)
        state = session.state_dict()
    with ov.launch(job(sync="step", strategy=strategy), resume=state) as session:
        assert first + steps(session, 5) == whole["microbatch"][:3] + whole["step"][3:]


def test_a_journal_goes_on_under_another_sync_with_the_same_samples(tmp_path: Path) -> None:
    with ov.launch(job()) as session:
        wanted = [samples for samples, _ in steps(session, 8)]
    got = []
    for k, sync in enumerate(("microbatch", "step", "step", "microbatch")):
        with ov.launch(
            job(sync=sync, journal=str(tmp_path)), resume="auto" if k else None
        ) as session:
            got += [samples for samples, _ in steps(session, 2)]
    assert got == wanted


def test_a_journal_that_does_not_say_when_ranks_waited_goes_on_with_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Releases without ``Job.sync`` wrote the mesh alone, and their plans had other slots."""
    with ov.launch(job()) as session:
        wanted = [samples for samples, _ in steps(session, 6)]
    with monkeypatch.context() as before:
        before.setattr(job_journal, "slots_of", lambda job: repr(job.place))
        with ov.launch(
            job(sync="step", journal=str(tmp_path))
        ) as session:  # as llm_balance placed then
            got = [samples for samples, _ in steps(session, 3)]
    with ov.launch(job(journal=str(tmp_path)), resume="auto") as session:
        got += [samples for samples, _ in steps(session, 3)]
    assert got == wanted


def test_ranks_that_join_with_another_sync_are_refused_by_name() -> None:
    refused = difference(job(sync="step"), 1, parts_of(job()))
    assert refused is not None
    assert "sync: expected 'microbatch', as on rank 0, got 'step' on rank 1" in str(refused)


@pytest.mark.parametrize(
    ("sync", "key", "when"),
    [("microbatch", "microbatch", "after every microbatch"), ("step", "bucket", "once per step")],
)
def test_explain_and_plan_say_when_ranks_wait_and_what_the_step_takes(
    sync: str, key: str, when: str
) -> None:
    made = job(sync=sync)
    with ov.launch(made) as session:
        next(session.client(0))
        plan, found = session.plan(0), session.explain(0)
    said = (
        f"ranks wait for each other {when} (sync: {sync}): the step takes "
        f"{plan.imbalance()[key]:.3f} times the mean rank's time"
    )
    assert found.to_dict()["sync"] == sync
    assert said in str(found)
    console = Console(width=200, record=True, file=StringIO())
    console.print(plan_view(made, plan, 200))
    assert said in console.export_text()


def test_images_are_placed_once_a_step_whenever_ranks_wait() -> None:
    columns = {"pairs": {"tokens": [40, 50, 60] * 8, "image_patches": [[9, 16], [25], [4]] * 8}}
    loads = []
    for sync in SYNCS:
        buffer = ov.Buffer.from_columns(
            columns, batch=ov.Batch(samples=24, microbatches=4, context=512), sync=sync
        )
        graph = (
            ov.DGraph.from_buffer(buffer, ov.ClientPlaceTree(dp=4))
            .mix([1])
            .select("image_patches")
            .distribute("WORLD")
            .cost("vit_1b")
        )
        loads.append(graph.balance("greedy").placement)
    assert loads[0] is not None
    assert loads[1] is not None
    assert loads[0].n_microbatches == 1
    assert np.array_equal(loads[0].bucket, loads[1].bucket)
