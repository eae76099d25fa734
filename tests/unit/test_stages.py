"""Rules of stages and ramps: what they accept, refuse, print, save and count."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import overlord as ov
import overlord.torch as ot
from overlord.cli.main import cli
from overlord.cli.plan_end import predict_end
from overlord.errors import JobError, PlanError, StateMismatch
from overlord.planning.schedule.by_stage import job_schedule
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob

ROWS = [{"tokens": list(range(100 * i, 100 * i + n))} for i, n in enumerate((30, 7, 90, 12) * 20)]
linear, staged = ov.schedule.linear, ov.schedule.staged


def job(**changes: Any) -> ov.Job:
    settings: dict[str, Any] = {
        "name": "staged",
        "sources": [ov.Source.from_dataset(n, ROWS) for n in ("web", "code")],
        "batch": ov.Batch(samples=4, context=128),
        "stages": [
            ov.Stage(3, context=32, name="short"),
            ov.Stage(2, mixture={"code": 1}),
            ov.Stage(batch=ov.Batch(samples=linear(2, 6, 2), microbatches=2, context=64)),
        ],
        "until": 9,
    }
    return ov.Job(**{**settings, **changes})


def problems(**changes: Any) -> str:
    with pytest.raises(JobError) as caught:
        job(**changes)
    return "\n".join(caught.value.problems)


# Ramps


def test_a_ramp_is_rounded_down_to_its_multiple_and_ends_exactly() -> None:
    ramp = linear(8, 32, steps=5, begin=2, multiple=8)
    assert [ramp.at(step) for step in range(9)] == [8, 8, 8, 8, 16, 16, 24, 32, 32]
    assert [linear(9, 3, 3).at(step) for step in range(5)] == [9, 7, 5, 3, 3]
    assert [staged({0: 4, 3: 2}).at(step) for step in range(5)] == [4, 4, 4, 2, 2]
    assert repr(ramp) == "linear(start=8, end=32, steps=5, begin=2, multiple=8)"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: linear(0, 8, 2), "start: expected a whole number of at least 1, got 0"),
        (lambda: linear(1.5, 8, 2), "start: expected a whole number of at least 1, got 1.5"),
        (lambda: linear(8, 12, 2, multiple=8), "end: expected a multiple of 8, got 12"),
        (lambda: linear({"a": 1}, {"b": 1}, 2, multiple=8), "multiple: expected 1 for a ramp of w"),
        (lambda: staged({3: 8}), "stages: expected a number from step 0 on, got one from 3 on"),
        (lambda: staged({0: 8, -1: 2}), "expected the first step of a range"),
        (lambda: ov.Batch(samples=linear({"a": 1}, {"b": 1}, 2), context=8), "make a ramp from n"),
        (
            lambda: ov.Batch(samples=linear(2, 4, 2), context=8, packing="concat", shape="fixed"),
            'batch.samples: expected a number with shape="fixed"',
        ),
        (
            lambda: ov.Batch(tokens=linear(64, 128, 2), context=32, packing="concat"),
            "give multiple=32, or set samples",
        ),
    ],
)
def test_a_wrong_ramp_is_refused(make: Any, text: str) -> None:
    with pytest.raises(JobError) as caught:
        make()
    assert text in str(caught.value)


def test_a_job_with_a_ramp_alone_draws_the_size_of_each_step() -> None:
    ramp = linear(2, 8, steps=3)
    steps = ov.simulate(job(stages=(), until=6, batch=ov.Batch(samples=ramp, context=128))).steps[0]
    assert [len(step.info) for step in steps] == [2, 4, 6, 8, 8, 8]
    assert steps[0].stage is None


def test_a_ramp_of_chunks_changes_their_number() -> None:
    batch = ov.Batch(tokens=linear(64, 192, 2, multiple=64), context=64, packing="concat")
    steps = ov.simulate(job(stages=(), until=4, batch=batch)).steps[0]
    assert [len(step) for step in steps] == [1, 2, 3, 3]


# Rules


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stages": "all"}, "stages: expected a list of ov.Stage, got 'all'"),
        ({"stages": [3]}, "stages[0]: expected an ov.Stage, got 3"),
        (
            {"stages": [ov.Stage(), ov.Stage(3)]},
            "stages[0].steps: expected a number of steps, got None; only the last stage may last",
        ),
        (
            {"stages": [ov.Stage(3), ov.Stage(4)]},
            "until: expected at most 7, the steps of all stages, got 9; set steps=None",
        ),
        (
            {"stages": [ov.Stage(3, name="a"), ov.Stage(name="a")]},
            "stages: expected different names, got 'a' twice",
        ),
        (
            {"stages": [ov.Stage(mixture={"nobody": 1})]},
            "stages[0].mixture: expected a source of the job, got 'nobody'",
        ),
        (
            {"stages": [ov.Stage(mixture=ov.schedule.length_warmup(8, 32, 10))], "look_ahead": 2},
            "make it the job's mixture",
        ),
        (
            {"stages": [ov.Stage(mixture={"web": 1})], "mix_every": "epoch"},
            'mix_every: expected "step" or "microbatch" with mixtures of stages',
        ),
        (
            {"stages": [ov.Stage(batch=ov.Batch(samples=4, context=64, layout="padded"))]},
            "stages[0].batch.layout: expected 'packed' as in Job.batch, got 'padded'; stages change",
        ),
        (
            {"stages": [ov.Stage(batch=ov.Batch(tokens=99, context=64))]},
            "stages[0].batch: expected a size in samples, as in Job.batch, got one in tokens",
        ),
        (
            {"stages": [ov.Stage(context=30)], "place": ov.Mesh(cp=2)},
            "stages[0].batch.context: expected a multiple of 4 (pad_multiple, cp), got 30",
        ),
        (
            {"stages": [ov.Stage(2, context=64), ov.Stage()], "on_long": "drop"},
            "with on_long='drop', got contexts from 64 to 128 and samples of up to 128 tokens; set "
            'max_document=64, or packing="concat"',
        ),
        (
            {"stages": [ov.Stage(2, context=64), ov.Stage()], "look_ahead": 2},
            "stages: expected samples that fit the context of every stage with look_ahead=2",
        ),
        (
            {"stages": [ov.Stage(2, context=64), ov.Stage()], "overflow": "defer"},
            "stages: expected samples that fit the context of every stage with overflow='defer'",
        ),
        (
            {"stages": [ov.Stage(2, context=64), ov.Stage()], "strategy": "hdp_balance"},
            "stages: expected one context with strategy 'hdp_balance', the capacity of a rank",
        ),
        ({"evaluation": True, "until": "all"}, "stages: expected none in an evaluation"),
    ],
)
def test_a_wrong_combination_is_refused_with_a_remedy(changes: Any, text: str) -> None:
    assert text in problems(**changes)


def test_an_evaluation_has_steps_of_one_size() -> None:
    batch = ov.Batch(samples=linear(2, 4, 2), context=128)
    assert "expected one size of all steps in an evaluation" in problems(
        stages=(), batch=batch, evaluation=True, until="all"
    )


def test_a_stage_checks_its_own_fields() -> None:
    with pytest.raises(JobError) as caught:
        ov.Stage(0, batch=ov.Batch(samples=1, context=8), context=7, name="")
    assert len(caught.value.problems) == 3


def test_samples_that_fit_every_stage_need_no_cut_and_allow_everything() -> None:
    made = job(look_ahead=2, on_long="drop", max_document=32, overflow="grow")
    steps = ov.simulate(made).steps[0]
    assert max(int(step.info.tokens.max()) for step in steps) <= 32
    assert all((step.info.offset == 0).all() for step in steps)


def test_the_longest_sample_is_that_of_the_largest_stage() -> None:
    assert job().document_limit == 128
    assert job(stages=[ov.Stage(2), ov.Stage(context=512)]).document_limit == 512
    assert job(max_document=64).document_limit == 64


# The end, and lengths


def test_stages_with_an_end_end_the_job() -> None:
    made = job(stages=[ov.Stage(2), ov.Stage(3)], until="all")
    assert made.end_step == 5
    assert len(ov.simulate(made).steps[0]) == 5
    assert job(stages=[ov.Stage(2), ov.Stage()], until="all").end_step is None
    assert job(stages=[ov.Stage(2), ov.Stage(30)], until=4).end_step == 4


def test_the_length_of_a_dataset_counts_the_microbatches_of_each_stage() -> None:
    made = job()
    assert len(ot.Dataset(made, rank=0)) == 9
    assert len(ot.Dataset(made, rank=0, microbatches=True)) == 3 + 2 + 4 * 2
    shorter = job(until=6, stages=[*made.stages[:2], replace(made.stages[2], steps=20)])
    assert len(ot.Dataset(shorter, rank=0, microbatches=True)) == 3 + 2 + 1 * 2


def test_a_flat_iterator_checks_the_microbatches_of_the_stage() -> None:
    rows = [{"tokens": list(range(8))}] * 40
    made = job(
        sources=[ov.Source.from_dataset("web", rows)],
        batch=ov.Batch(samples=4, context=32),
        stages=[
            ov.Stage(2),
            ov.Stage(2, batch=ov.Batch(samples=4, context=32, microbatches=3)),
            ov.Stage(batch=ov.Batch(samples=40, context=32, microbatches=2)),
        ],
        until=6,
    )
    with ov.launch(made) as session:
        flat = session.client(0).microbatches()
        assert [next(flat) is not None for _ in range(2 * 1 + 2 * 3)]
        with pytest.raises(PlanError, match="expected the 2 microbatches"):
            next(flat)


def test_tensors_of_a_dataset_have_the_stage_and_its_microbatches() -> None:
    rows = [{"tokens": list(range(8))}] * 40
    made = job(
        sources=[ov.Source.from_dataset("web", rows)],
        batch=ov.Batch(samples=4, context=32),
        stages=[
            ov.Stage(2, name="one"),
            ov.Stage(batch=ov.Batch(samples=4, context=32, microbatches=3)),
        ],
        until=4,
    )
    with ov.launch(made) as session:
        dataset = ot.Dataset(session.client(0))
        assert [(step.stage, len(step)) for step in dataset] == [("one", 1)] * 2 + [(1, 3)] * 2
    with ov.launch(made) as session:
        flat = list(ot.Dataset(session.client(0), microbatches=True))
        assert len(flat) == 2 * 1 + 2 * 3
    with ot.Loader(made, microbatches=True) as loader:
        assert len(list(loader)) == len(flat)


# States


def state_of(made: ov.Job, steps: int) -> dict[str, Any]:
    with ov.launch(made) as session:
        client = session.client(0)
        for _ in range(steps):
            next(client)
        return dict(json.loads(json.dumps(client.state_dict())))


def test_a_state_names_the_stage_of_the_next_step_and_its_changes_are_noticed() -> None:
    made = job()
    state = state_of(made, 3)
    assert state["stage"] == 1
    assert state_of(made, 2)["stage"] == "short"
    other = job(stages=[*made.stages[:2], ov.Stage(mixture={"web": 1})])
    with pytest.raises(StateMismatch) as caught:
        ov.launch(other, resume=state)
    assert list(caught.value.differences) == ["stage 2"]
    with ov.launch(other, resume=state, allow=("stage 2",)) as session:
        steps = list(session.client(0))
    assert [step.stage for step in steps] == [1, 1, 2, 2, 2, 2]


def test_a_job_without_stages_has_the_fingerprint_and_state_of_before() -> None:
    plain = job(stages=())
    prepared = PreparedJob(plain, Options())
    try:
        assert not [key for key in prepared.fingerprint if key.startswith("stage")]
    finally:
        prepared.close()
    assert "stage" not in state_of(plain, 1)


def test_a_run_without_stages_continues_with_stages() -> None:
    plain = job(stages=(), batch=ov.Batch(samples=4, context=128))
    state = state_of(plain, 3)
    more = job(stages=[ov.Stage(5), ov.Stage(mixture={"code": 1})])
    allow = tuple(f"stage {k}" for k in range(2))
    with ov.launch(more, resume=state, allow=allow) as session:
        steps = list(session.client(0))
    assert [step.step for step in steps] == [3, 4, 5, 6, 7, 8]
    assert {str(steps[-1].info.sample_id(i).source) for i in range(4)} == {"code"}


class Learner:
    """A schedule that counts its calls and the steps it received."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    takes_feedback = True

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        self.steps.append(step)
        return {"web": 1.0, "code": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": list(self.steps)}

    def load_state_dict(self, state: Any) -> None:
        self.steps = list(state["steps"])


def test_schedules_of_stages_count_from_their_start_and_keep_their_state() -> None:
    made = job(
        mixture=Learner(),
        stages=[ov.Stage(3), ov.Stage(2, mixture=Learner()), ov.Stage()],
        until=7,
        feedback_lag=8,
    )
    done = ov.simulate(made, save=True)
    found = done.states[6]["schedule"]
    assert found == {"job": {"steps": [0, 1, 2, 3, 4, 5, 6]}, "stages[1]": {"steps": [0, 1]}}
    rest = ov.simulate(made, resume=done.states[3], save=True)
    assert rest.states[6]["schedule"] == found
    assert job_schedule(made).takes_feedback


# Files, commands, explanations


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[ov.Job, Path]:
    for name in ("web", "code"):
        table = pa.table({"tokens": pa.array([row["tokens"] for row in ROWS])})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    made = job(
        sources=[ov.Source(n, str(tmp_path / f"{n}.parquet")) for n in ("web", "code")],
        batch=ov.Batch(samples=staged({0: 4, 2: 6}), context=128),
        journal=str(tmp_path / "journal"),
    )
    path = tmp_path / "job.yaml"
    path.write_text(made.to_yaml())
    return made, path


def test_a_job_file_has_stages_and_ramps(on_disk: tuple[ov.Job, Path]) -> None:
    made, path = on_disk
    assert ov.Job.from_yaml(path) == made
    assert "schedule: staged" in path.read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("stages: 3", "stages: expected a list, got 3"),
        ("stages: [{steps: 2, name: [a]}]", "stages[0].name: expected a name or None, got ['a']"),
        ("stages: [{step: 2}]", "stages[0].step: expected a known field, got 'step'"),
        (
            "stages: [{batch: {samples: {schedule: linear, start: 4}, context: 8}}]",
            "stages[0].batch.samples.end: expected a value, got none",
        ),
        (
            "stages: [{batch: {samples: 4, context: 0}}]",
            "stages[0].batch.context: expected a whole number of at least 1, got 0",
        ),
        ("stages: [{mixture: {schedule: linier}}]", "stages[0].mixture.schedule: expected a known"),
    ],
)
def test_a_wrong_stage_of_a_job_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: a\nsources: {{web: {{uri: x.parquet}}}}\nbatch: {{samples: 2, context: 8}}\n{text}\n"
    )
    with pytest.raises(JobError) as caught:
        ov.Job.from_yaml(path)
    assert problem in str(caught.value)


def test_commands_name_the_stage(on_disk: tuple[ov.Job, Path]) -> None:
    _, path = on_disk

    def output(*arguments: str) -> str:
        done = CliRunner(env={"COLUMNS": "200"}).invoke(cli, arguments)
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    assert "stage 'short', stage 0 of 3: its step 1 of 3, 4 samples, context 32" in output(
        "plan", str(path), "--step", "1"
    )
    listed = output("inspect", str(path))
    assert "stage 'short': steps 0 to 2, staged(stages={0: 4, 2: 6}) samples, context 32" in listed
    assert "stage 2: steps 5 on, linear(start=2, end=6, steps=2) samples, context 64" in listed
    assert "stages 1: steps 3 to 4" in output("run", str(path))
    journal = output("journal", "show", str(path.parent / "journal"))
    assert "stage 'short'" in journal
    assert "stage 2, 2 samples" in journal
    assert "stage 1, stage 1 of 3: its step 1 of 2" in output("explain", str(path), "--step", "4")


def test_an_explanation_names_the_stage_and_the_origin_of_the_weights() -> None:
    made = job(mixture={"web": 1, "code": 1})
    with ov.launch(made, prefetch=1) as session:
        client = session.client(0)
        session.set_mixture({"web": 3, "code": 1}, at=2)
        for _ in range(6):
            next(client)
        found = {k: session.explain(k) for k in range(6)}
        metrics = session.metrics()
    assert [found[k].stage for k in range(6)] == ["short", "short", "short", 1, 1, 2]
    assert found[1].weights_from == "the job's mixture"
    assert found[2].weights_from == "set_mixture from step 2"
    assert found[3].weights_from == "the mixture of the stage"
    assert found[5].weights_from == "the job's mixture"
    assert "stage" in str(found[5])
    assert metrics["stage"] == 2


def test_one_word_describes_a_job_with_stages() -> None:
    assert "3 stages" in repr(job())
    assert "linear(start=2, end=4, steps=2) samples a step" in repr(
        job(stages=(), batch=ov.Batch(samples=linear(2, 4, 2), context=128))
    )


def test_the_end_is_predicted_with_the_sizes_of_the_stages(on_disk: tuple[ov.Job, Path]) -> None:
    made, _ = on_disk
    once = replace(
        made,
        sources=[replace(source, epochs=1) for source in made.sources],
        until="all",
        journal=None,
    )
    steps = len(ov.simulate(once).steps[0])
    plain = replace(once, stages=(), batch=ov.Batch(samples=4, context=128))
    assert abs(len(ov.simulate(plain).steps[0]) - steps) > 2
    exact, estimated = predict_end(once, exact=True), predict_end(once)
    assert exact.forecast.steps == steps
    assert abs(estimated.forecast.steps - steps) <= 1


def test_a_budget_counts_the_tokens_that_stages_deliver() -> None:
    made = job(
        sources=[
            ov.Source.from_dataset("web", ROWS, max_tokens=700),
            ov.Source.from_dataset("code", ROWS, epochs=1),
        ],
        on_long="truncate",
        until="all",
    )
    found = ov.simulate(made)
    steps = found.steps[0]
    tokens = sum(int(step.info.tokens[step.info.source == 0].sum()) for step in steps)
    assert found.error is None
    assert 700 - 128 < tokens <= 700


def test_stages_with_samples_of_several_documents_need_one_limit_for_all() -> None:
    batch, stages = ov.Batch(samples=8, context=64), [ov.Stage(2), ov.Stage(None, context=256)]
    source = ov.Source("pairs", "p.jsonl", transforms=[ov.Pair(chosen="c", rejected="r")])
    with pytest.raises(ov.JobError, match="max_document: expected at most 64"):
        ov.Job(name="j", sources=[source], batch=batch, stages=stages)
    ov.Job(name="j", sources=[source], batch=batch, stages=stages, max_document=64)


def test_the_strategy_even_needs_multiples_in_every_stage_and_ramp() -> None:
    ramp = ov.schedule.linear(8, 16, steps=4, multiple=2)
    source, place = ov.Source("web", "w.jsonl"), ov.Mesh(dp=4)
    with pytest.raises(ov.JobError, match=r"multiple of 4 .* with strategy 'even'"):
        ov.Job(
            name="j",
            sources=[source],
            batch=ov.Batch(samples=ramp, context=64),
            place=place,
            strategy="even",
        )
    stages = [ov.Stage(2), ov.Stage(None, batch=ov.Batch(samples=6, context=64))]
    with pytest.raises(ov.JobError, match=r"multiple of 4 .* got 6"):
        ov.Job(
            name="j",
            sources=[source],
            batch=ov.Batch(samples=8, context=64),
            place=place,
            strategy="even",
            stages=stages,
        )
