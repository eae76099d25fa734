"""Explanations of hand-made jobs, compared with the arrays of their plans; and of rows that are in
no plan.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.cli.main import cli
from overlord.cli.plan_step import find_sample
from overlord.errors import PlanError
from overlord.observe.explanation import SampleExplanation, StepExplanation
from overlord.observe.sample_lookup import parse_id
from tests.corpus import write_rows
from tests.processes import until
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)


def rows(n: int, base: int = 0) -> list[dict[str, Any]]:
    return [{"n": k, "tokens": [base + k] * (1 + (7 * k) % 23)} for k in range(n)]


def job(tmp_path: Path, format: str = "parquet", n: int = 60, **changes: Any) -> ov.Job:
    sources = [
        ov.Source(
            "web",
            write_rows(tmp_path / "web", format, rows(n), row_group_size=8),
            transforms=[ov.Tokens("tokens")],
            weight=2,
            epochs=1,
        ),
        ov.Source(
            "code",
            write_rows(tmp_path / "code", format, rows(n, 300), row_group_size=8),
            transforms=[ov.Tokens("tokens")],
            epochs=1,
        ),
    ]
    settings: dict[str, Any] = {
        "name": "explained",
        "sources": sources,
        "batch": ov.Batch(samples=12, context=64, microbatches=2),
        "place": ov.ClientPlaceTree(dp=2),
        "seed": 3,
        "slice_rows": 4,
        "shuffle_chunks": 2,
    }
    return ov.Job(**{**settings, **changes})


def small(**changes: Any) -> ov.Job:
    """Two sources without files."""
    sources = [
        ov.Source(
            name, Rows(rows(60, base)), transforms=[ov.Tokens("tokens")], weight=weight, epochs=1
        )
        for name, base, weight in (("web", 0, 2), ("code", 300, 1))
    ]
    settings: dict[str, Any] = {
        "name": "small",
        "sources": sources,
        "batch": ov.Batch(samples=12, context=64, microbatches=2),
        "place": ov.ClientPlaceTree(dp=2),
        "slice_rows": 4,
    }
    return ov.Job(**{**settings, **changes})


def of_step(session: ov.Session, step: int) -> StepExplanation:
    found = session.explain(step)
    assert isinstance(found, StepExplanation)
    return found


def of_sample(session: ov.Session, sample: ov.SampleId | str) -> SampleExplanation:
    found = session.explain(sample)
    assert isinstance(found, SampleExplanation)
    return found


def ids(plan: ov.LoadingPlan) -> list[ov.SampleId]:
    return [plan.sample_id(i) for i in range(len(plan))]


def every_step(made: ov.Job) -> list[ov.LoadingPlan]:
    with ov.launch(made) as session:
        return [session.plan(step.step) for step in session.client(0)]


# a step


def test_a_step_is_told_by_source_with_its_files_and_rows(tmp_path: Path) -> None:
    with ov.launch(job(tmp_path)) as session:
        next(session.client(0))
        plan, found = session.plan(0), of_step(session, 0)
    assert (found.step, found.samples, found.tokens, found.digest) == (
        0,
        12,
        int(plan.tokens.sum()),
        plan.digest(),
    )
    assert [(s.name, s.samples, s.wanted) for s in found.sources] == [
        ("web", 8, 2 / 3),
        ("code", 4, 1 / 3),
    ]
    for i, source in enumerate(found.sources):
        mine = plan.source == i
        assert source.tokens == plan.tokens[mine].sum()
        assert source.realised == source.samples / 12
        assert [(f.file, f.samples) for f in source.files] == [
            (int(file), int((plan.file[mine] == file).sum())) for file in np.unique(plan.file[mine])
        ]
        for f in source.files:
            held = plan.row[mine & (plan.file == f.file)]
            assert (f.first, f.last, f.unit) == (held.min(), held.max(), "row")
            assert f.path.endswith(f"{source.name}/part-{f.file:05d}.parquet")


def test_shares_of_a_batch_in_tokens_are_shares_of_tokens() -> None:
    with ov.launch(small(batch=ov.Batch(tokens=200, context=64))) as session:
        next(session.client(0))
        plan, found = session.plan(0), of_step(session, 0)
    assert found.unit == "tokens"
    assert found.sources[0].realised == plan.tokens[plan.source == 0].sum() / plan.tokens.sum()


def test_the_slowest_bucket_is_told_with_what_makes_it_dear() -> None:
    with ov.launch(small(strategy="vanilla")) as session:
        next(session.client(0))
        plan, found = session.plan(0), of_step(session, 0)
    [m], a = found.modules, plan.main
    loads = plan.loads().sum(axis=1)
    assert m.slowest == loads.argmax()
    assert m.slowest_ranks == (int(loads.argmax()),)
    assert m.slowest_over_mean == pytest.approx(plan.imbalance()["bucket"])
    inside = np.flatnonzero(a.bucket == m.slowest)
    dearest = inside[np.argsort(-a.cost[inside], kind="stable")][:5]
    assert [d.sample for d in m.dearest] == [str(plan.sample_id(int(a.sample[i]))) for i in dearest]
    assert m.dearest[0].share == pytest.approx(a.cost[dearest[0]] / loads.max())
    held = np.bincount(a.bins(), weights=a.size, minlength=4)
    assert (m.peak_tokens, m.peak_at) == (held.max(), divmod(int(held.argmax()), a.n_microbatches))
    assert m.imbalance == plan.imbalance()


def test_the_weights_in_force_are_told_with_what_set_them() -> None:
    with ov.launch(small(), prefetch=1) as session:
        session.set_mixture({"web": 1, "code": 3}, at=2)
        client = session.client(0)
        for _ in range(3):
            next(client)
        before, after = of_step(session, 1), of_step(session, 2)
    assert before.weights_from == "the sources' own weights"
    assert [s.weight for s in before.sources] == [2, 1]
    assert after.weights_from == "set_mixture from step 2"
    assert [s.wanted for s in after.sources] == [0.25, 0.75]


@pytest.mark.parametrize(
    ("mixture", "words"),
    [
        ({"web": 1.0, "code": 1.0}, "the job's mixture"),
        (ov.schedule.constant({"web": 1, "code": 1}), "the job's schedule constant("),
    ],
)
def test_a_mixture_of_the_job_is_named_as_such(mixture: Any, words: str) -> None:
    with ov.launch(small(mixture=mixture)) as session:
        next(session.client(0))
        assert of_step(session, 0).weights_from.startswith(words)


def test_weights_that_hold_for_an_epoch_say_since_when() -> None:
    with ov.launch(small(mix_every="epoch")) as session:
        client = session.client(0)
        next(client)
        next(client)
        assert (
            of_step(session, 1).weights_from
            == "the sources' own weights, in force since step 0 (mix_every='epoch')"
        )


def test_a_step_prints_as_a_table_and_turns_into_plain_values() -> None:
    with ov.launch(small()) as session:
        next(session.client(0))
        found = of_step(session, 0)
    lines = str(found).splitlines()
    assert lines[0].split() == ["step", "0", "(planned)"]
    web = next(line for line in lines if line.startswith("web"))
    assert web.split()[1:6] == ["2", "66.67%", "66.67%", "8", str(found.sources[0].tokens)]
    assert any(line.startswith("slowest") for line in lines)
    assert json.loads(json.dumps(found.to_dict()))["modules"][0]["buckets"] == 2
    with pytest.raises(FrozenInstanceError):
        found.step = 4  # type: ignore[misc]


def refusal(session: ov.Session, step: int) -> str:
    with pytest.raises(PlanError) as error:
        session.explain(step)
    return str(error.value)


def test_the_error_for_a_step_that_is_not_planned_names_the_slow_source() -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(row: dict[str, Any]) -> dict[str, Any]:
        if row["tokens"][0] == 20:
            reached.set()
            go_on.wait(60)
        return row

    rows = [{"tokens": [k]} for k in range(64)]
    transforms = [ov.Map(slow, rows=True), ov.Tokens()]
    job = ov.Job(
        name="waits",
        sources=[ov.Source.from_dataset("web", rows, transforms=transforms, shuffle=False)],
        batch=ov.Batch(samples=8, context=64),
        slice_rows=8,
        until=8,
    )
    with ov.launch(job, prefetch=1) as session:
        client = session.client(0)
        taker = threading.Thread(target=lambda: list(client))
        taker.start()
        try:
            assert reached.wait(60)
            until(lambda: "waiting for samples that step 2 draws: " in refusal(session, 7))
            assert re.search(r" of source 'web' .*; name a step", refusal(session, 7))
        finally:
            go_on.set()
            taker.join(60)


def test_a_step_that_is_not_there_is_refused_with_what_is() -> None:
    with ov.launch(small(), prefetch=1) as session:
        with pytest.raises(PlanError, match="not planned yet; wait until a step is planned"):
            session.explain(0)
        next(session.client(0))
        waiting = (
            r"plan of step 7: it is not planned yet, waiting for .*rank 0, .*; name a step "
            r"whose plan is kept: 0 to"
        )
        until(lambda: re.search(waiting, refusal(session, 7)) is not None)
        with pytest.raises(PlanError, match="it does not exist"):
            session.explain(-1)
        with pytest.raises(
            PlanError, match=r"expected the number of a step, a SampleId or its text, got 1\.5"
        ):
            session.explain(1.5)  # type: ignore[arg-type]


def test_a_plan_that_is_no_longer_kept_is_told_from_one_to_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlord.planning.spec.KEPT_SAMPLES", 24)
    with ov.launch(small(), prefetch=1) as session:
        client = session.client(0)
        first = session.plan(next(client).step)
        for _ in range(5):
            next(client)
        with pytest.raises(
            PlanError,
            match="was planned, but its plan is no longer kept; name a step whose plan is kept",
        ):
            session.explain(0)
        found = of_sample(session, first.sample_id(0))
    assert found.status == "gone"
    assert "no longer kept" in found.words


# a sample


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
@pytest.mark.parametrize("strategy", ["llm_balance", "vanilla"])
def test_every_sample_is_where_the_plan_has_it(tmp_path: Path, format: str, strategy: str) -> None:
    with ov.launch(job(tmp_path, format, strategy=strategy), loaders={"web": 2}) as session:
        client = session.client(0)
        plans = [session.plan(next(client).step) for _ in range(3)]
        for plan in plans:
            a, graph = plan.main, session.graph(plan.step)
            where = np.argsort(a.sample)
            for i, sample in enumerate(ids(plan)):
                found = of_sample(session, sample)
                [p], k = found.placed, int(where[i])
                assert (found.status, found.step, found.position, found.of_samples) == (
                    "placed",
                    plan.step,
                    i,
                    12,
                )
                assert (found.tokens, found.sample) == (plan.tokens[i], str(sample))
                assert found.path.endswith(f"{sample.source}/part-{sample.file:05d}.{format}")
                assert found.row_unit == ("row" if format == "parquet" else "byte")
                assert (p.bucket, p.microbatch, p.slot, p.size, p.cost) == tuple(
                    getattr(a, name)[k] for name in ("bucket", "microbatch", "slot", "size", "cost")
                )
                assert (p.ranks, p.constructor) == ((p.bucket,), f"constructor/{p.bucket}")
                assert found.loader == graph.loader[k]


def test_why_a_sample_is_there_is_told_by_its_cost() -> None:
    with ov.launch(small()) as session:
        next(session.client(0))
        plan = session.plan(0)
        found = [of_sample(session, plan.sample_id(i)) for i in range(len(plan))]
    falling = np.argsort(-plan.main.cost, kind="stable")
    for nth, k in enumerate(falling.tolist(), 1):
        [p] = found[int(plan.main.sample[k])].placed
        assert p.nth_of_step == nth
        assert p.nth_of_bucket == sum(plan.main.bucket[j] == p.bucket for j in falling[:nth])
    dearest = found[int(plan.main.sample[falling[0]])]
    assert "cost rank 1 of 12 in the step" in dearest.placed[0].why
    assert "balance(greedy" in dearest.placed[0].why
    assert dearest.placed[0].share == pytest.approx(
        plan.main.cost.max() / plan.main.cost[plan.main.bucket == dearest.placed[0].bucket].sum()
    )


def test_the_id_may_be_text_and_the_answer_prints() -> None:
    with ov.launch(small()) as session:
        next(session.client(0))
        sample = session.plan(0).sample_id(3)
        assert of_sample(session, str(sample)) == of_sample(session, sample)
        lines = str(of_sample(session, sample)).splitlines()
    assert lines[0].split() == ["sample", str(sample)]
    assert any(line.startswith("drawn") and "number 3 of 12 of step 0" in line for line in lines)
    assert any(line.startswith("backbone") and "bucket" in line for line in lines)


def test_a_sample_of_a_skipped_step_was_drawn_and_not_delivered() -> None:
    with ov.launch(small()) as session:
        session.skip([0])
        assert next(session.client(0)).step == 1
        found = of_sample(session, session.plan(0).sample_id(0))
        assert of_step(session, 0).skipped
    assert (found.status, found.step) == ("skipped", 0)
    assert "not delivered" in found.words


@pytest.mark.parametrize("shuffle", [True, False])
def test_what_is_not_drawn_yet_is_told_from_what_was(tmp_path: Path, shuffle: bool) -> None:
    made = job(tmp_path)
    made = ov.Job(
        **{
            **{n: getattr(made, n) for n in made.__dataclass_fields__},
            "sources": [
                ov.Source(
                    s.name,
                    s.uri,
                    transforms=s.transforms,
                    weight=s.weight,
                    shuffle=shuffle,
                    epochs=2,
                )
                for s in made.sources
            ],
        }
    )
    whole = every_step(made)
    assert len(whole) == 20
    for steps in (1, 4, 13):
        with ov.launch(made, prefetch=1) as session:
            client = session.client(0)
            for _ in range(steps):
                next(client)
            planned = (
                steps + 1
            )  # it is read in a thread of its own, and the planner waits for what it draws
            until(lambda s=session, n=planned: s.metrics()["planned_steps"] == n)
            for plan in whole:
                wanted = "placed" if plan.step < planned else "ahead"
                assert {of_sample(session, sample).status for sample in ids(plan)[::3]} == {
                    wanted
                }, plan.step


def test_after_a_resume_what_was_drawn_before_is_gone_and_the_rest_ahead(tmp_path: Path) -> None:
    made = job(tmp_path)
    whole = every_step(made)
    with ov.launch(made, prefetch=1) as session:
        client = session.client(0)
        for _ in range(4):
            next(client)
        state = client.state_dict()
    with ov.launch(made, resume=state) as session:
        for plan in whole:
            assert {of_sample(session, s).status for s in ids(plan)} == {
                "gone" if plan.step < 4 else "ahead"
            }, plan.step


def test_a_row_of_lines_in_the_open_group_is_not_judged(tmp_path: Path) -> None:
    made = job(tmp_path, "jsonl")
    last = ids(every_step(made)[-1])[0]
    with ov.launch(made, prefetch=1) as session:
        next(session.client(0))
        found = of_sample(session, last)
    assert found.status in ("undecided", "ahead")
    assert "epoch 0, group 0" in found.words


def test_a_byte_at_which_no_row_begins_is_refused_with_the_ids_near_it(tmp_path: Path) -> None:
    write_rows(tmp_path, "jsonl", [{"tokens": [k, k]} for k in range(1, 30)], files=1)
    [path] = tmp_path.glob("*.jsonl")
    begins = [0, *(m.end() for m in re.finditer(b"\n", path.read_bytes()))]

    def keep(row: dict[str, Any]) -> bool:
        return row["tokens"][0] != 5

    transforms = [ov.Filter(keep, rows=True), ov.Tokens()]
    source = ov.Source("web", str(path), transforms=transforms, shuffle=False, epochs=1)
    made = ov.Job(name="bytes", sources=[source], batch=ov.Batch(samples=7, context=64), until=4)
    with ov.launch(made) as session:
        list(session.client(0))
        said = r"got byte 3, where no row begins; the id of the line with this byte is web/e0/f0/r0"
        with pytest.raises(
            PlanError, match=f"{said}, and that of line 4 is web/e0/f0/r{begins[3]}"
        ):
            session.explain("web/e0/f0/r3")
        dropped = of_sample(session, f"web/e0/f0/r{begins[4]}")
        assert (dropped.row, dropped.row_unit) == (begins[4], "byte")
        assert dropped.status in ("no sample", "undecided")
        assert of_sample(session, f"web/e0/f0/r{begins[6]}").status == "placed"
    with pytest.raises(PlanError, match=said):
        find_sample(made, parse_id("web/e0/f0/r3"), 4)


def test_a_row_in_quarantine_is_told_with_its_reason() -> None:
    data = rows(60)
    data[5]["tokens"] = []
    source = ov.Source("web", Rows(data), transforms=[ov.Tokens("tokens")], shuffle=False, epochs=1)
    with ov.launch(small(sources=[source])) as session:
        next(session.client(0))
        found = of_sample(session, "web/e0/f0/r5")
        [listed] = session.quarantine()
    assert found.status == "quarantined"
    assert listed["reason"] in found.words


def odd(row: dict[str, Any]) -> bool:
    return row["n"] % 2 == 1


def test_a_row_that_a_filter_dropped_is_no_sample() -> None:
    source = ov.Source(
        "web",
        Rows(rows(60)),
        transforms=[ov.Filter(odd, rows=True), ov.Tokens("tokens")],
        shuffle=False,
        epochs=1,
    )
    with ov.launch(small(sources=[source])) as session:
        next(session.client(0))
        found = of_sample(session, "web/e0/f0/r4")
        assert of_sample(session, "web/e0/f0/r5").status == "placed"
    assert found.status == "no sample"
    assert "filter dropped the row" in found.words


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ("wb/e0/f0/r0", "unknown source 'wb'; did you mean 'web'?"),
        ("web/e0/f7/r0", "source 'web' has files 0 to 1"),
        ("web/e3/f0/r0", "expected epoch 0 of source 'web', got 3"),
        ("web/e0/f0/r30", "part-00000.parquet has no row 30"),
        ("web/e0/f0", "expected a sample id such as web/e0/f2/r17"),
        ("web/e0/f0/r-1", "expected a sample id such as"),
        ("", "expected a sample id such as"),
    ],
)
def test_an_id_that_no_step_can_hold_is_refused(tmp_path: Path, sample: str, words: str) -> None:
    with ov.launch(job(tmp_path)) as session, pytest.raises(PlanError) as refused:
        session.explain(sample)
    assert words in str(refused.value)


@given(st.text(min_size=1, max_size=12), *(st.integers(0, 2**31 - 1) for _ in range(4)))
def test_an_id_is_read_back_from_its_text(
    source: str, epoch: int, file: int, row: int, part: int
) -> None:
    sample = ov.SampleId(source.strip() or "x", epoch, file, row, part)
    assert parse_id(str(sample)) == sample


# a job that does not run


def test_a_sample_is_found_without_running_the_job(tmp_path: Path) -> None:
    made = job(tmp_path)
    for plan in every_step(made)[::3]:
        sample = plan.sample_id(5)
        found = find_sample(made, sample, within=100)
        assert (found.status, found.step, found.position) == ("placed", plan.step, 5)
    heard: list[tuple[str, float]] = []

    def hear(what: str, done: float, total: float | None) -> None:
        heard.append((what, done))

    assert find_sample(made, sample, within=1, progress=hear).status in ("ahead", "placed")
    assert heard
    assert max(done for what, done in heard if what == "searched steps") <= 1


def test_the_search_ends_when_the_stream_has_passed_the_row() -> None:
    source = ov.Source(
        "web",
        Rows(rows(60)),
        transforms=[ov.Filter(odd, rows=True), ov.Tokens("tokens")],
        shuffle=False,
        epochs=None,
    )
    found = find_sample(small(sources=[source]), ov.SampleId("web", 0, 0, 4), within=100_000)
    assert found.status == "no sample"


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(cli, [str(a) for a in args])


def job_file(folder: Path) -> Path:
    sources = {
        name: {
            "uri": write_rows(folder / name, "parquet", rows(60, base), row_group_size=8),
            "weight": weight,
            "epochs": 1,
            "transforms": [{"tokens": {"column": "tokens"}}],
        }
        for name, base, weight in (("web", 0, 2), ("code", 300, 1))
    }
    path = folder / "job.yaml"
    batch = {"samples": 12, "context": 64, "microbatches": 2}
    path.write_text(
        yaml.safe_dump(
            {"name": "small", "sources": sources, "batch": batch, "place": {"dp": 2}, "seed": 3}
        )
    )
    return path


def test_the_command_explains_a_step_and_a_sample(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    plan = every_step(ov.Job.from_yaml(path))[2]
    result = overlord("explain", path, "--step", "2")
    assert result.exit_code == 0, result.output
    assert plan.digest() in result.stdout
    result = overlord("explain", path, "--sample", str(plan.sample_id(4)))
    assert result.exit_code == 0, result.output
    assert "number 4 of 12 of step 2" in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--step", "99"), 2, "expected a step below 10, where the job ends, got 99"),
        (("--sample", "wb/e0/f0/r0"), 2, "did you mean 'web'"),
        (("--sample", "web"), 2, "expected a sample id such as"),
        ((), 2, "either --step K or --sample ID"),
        (("--step", "1", "--sample", "web/e0/f0/r0"), 2, "either --step K or --sample ID"),
    ],
)
def test_the_command_says_what_is_wrong_with_a_question(
    tmp_path: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    result = overlord("explain", job_file(tmp_path), *args)
    assert result.exit_code == code, result.output
    assert words in result.stderr


def test_a_sample_behind_the_steps_looked_through_is_said_to_be_ahead(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    last = every_step(ov.Job.from_yaml(path))[-1].sample_id(0)
    result = overlord("explain", path, "--sample", str(last), "--within", "2")
    assert result.exit_code == 1
    assert "Not drawn yet" in result.stdout
    assert "not in the first 2 steps; --within N searches more" in result.stderr


def test_plan_writes_the_page_of_its_step(tmp_path: Path) -> None:
    path, out = job_file(tmp_path), tmp_path / "plan.html"
    result = overlord("plan", path, "--step", "2", "--html", out)
    assert result.exit_code == 0, result.output
    assert str(out) in result.stdout.replace("\n", "")
    assert every_step(ov.Job.from_yaml(path))[2].digest() in out.read_text()
    missing = overlord("plan", path, "--step", "0", "--html", tmp_path / "no" / "plan.html")
    assert missing.exit_code == 2
    assert "cannot be written" in missing.stderr
