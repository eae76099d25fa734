"""Budgets of sources: what is refused, what a file and a fingerprint hold, and predictions."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

import overlord as ov
from overlord.cli.main import cli
from overlord.cli.plan_end import predict_end
from overlord.cli.run_job import never_ends
from overlord.errors import JobError, SourceError, StateMismatch
from overlord.planning.forecast import SourceSize, forecast
from overlord.setup.options import Options
from overlord.setup.prepared_job import PreparedJob
from tests.corpus import write_megatron, write_rows
from tests.laws import examples
from tests.properties.test_stream import run
from tests.worlds import Rows

BATCH = ov.Batch(samples=6, context=32)


def source(name: str = "a", n: int = 100, length: int = 5, **fields: Any) -> ov.Source:
    rows = Rows([{"tokens": [k % 90] * length} for k in range(n)])
    return ov.Source(name, rows, transforms=[ov.Tokens()], **fields)


def job(*sources: ov.Source, **changes: Any) -> ov.Job:
    return ov.Job(**{"name": "limited", "sources": sources, "batch": BATCH, **changes})


def drawn(made: ov.Job, **options: Any) -> dict[str, int]:
    """The tokens of each source, from the state after the whole run."""
    _, error, _, end = run(made, 3, **options)
    assert error is None, error
    return dict(end["counts"]["tokens"])


@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), float("inf"), True, "2", 2.0**40])
def test_epochs_that_are_no_number_above_zero_are_refused(value: Any) -> None:
    with pytest.raises(JobError, match=r"epochs: expected a number above 0, or None"):
        source(epochs=value)


@pytest.mark.parametrize("value", [0, -5, 2.5, float("nan"), float("inf"), True, "5e9"])
def test_max_tokens_that_are_no_whole_number_are_refused(value: Any) -> None:
    with pytest.raises(JobError, match=r"max_tokens: expected a whole number of at least 1"):
        source(max_tokens=value)


def test_whole_numbers_are_ints_so_that_equal_jobs_have_equal_fingerprints() -> None:
    one, other = source(epochs=2.0, max_tokens=5e9), source(epochs=2, max_tokens=5_000_000_000)
    assert (repr(one.epochs), repr(one.max_tokens)) == ("2", "5000000000")
    assert reading(one) == reading(other)
    assert reading(source(epochs=2)) == "epochs 2, shuffle True, max_sample_bytes 67108864"


def reading(of: ov.Source) -> str:
    return PreparedJob(job(of), Options()).fingerprint[f"source {of.name}: reading"]


def test_a_job_file_holds_budgets(tmp_path: Path) -> None:
    write_rows(tmp_path / "a", "jsonl", [{"tokens": [1]}], files=1)
    text = (
        "name: limited\nsources:\n  a: {uri: a/*.jsonl, epochs: 2.5, max_tokens: 5e9}\n"
        "batch: {samples: 4, context: 8}\n"
    )
    (tmp_path / "job.yaml").write_text(text)
    made = ov.Job.from_yaml(tmp_path / "job.yaml")
    assert (made.sources[0].epochs, made.sources[0].max_tokens) == (2.5, 5_000_000_000)
    (tmp_path / "again.yaml").write_text(made.to_yaml())
    assert ov.Job.from_yaml(tmp_path / "again.yaml").sources[0].max_tokens == 5_000_000_000
    (tmp_path / "job.yaml").write_text(text.replace("5e9", "5B"))
    with pytest.raises(JobError, match="max_tokens: expected a whole number"):
        ov.Job.from_yaml(tmp_path / "job.yaml")


def test_an_evaluation_has_no_budget() -> None:
    with pytest.raises(JobError, match="max_tokens: expected None in an evaluation, got 50"):
        ov.evaluation(source(max_tokens=50), BATCH)
    assert ov.evaluation(source(epochs=2.5), BATCH).sources[0].epochs == 1


@pytest.mark.parametrize(("epochs", "rows"), [(0.5, 50), (2.5, 250), (1 / 3, 33), (1.004, 100)])
def test_fractions_are_exact_to_the_row_where_rows_are_known(epochs: float, rows: int) -> None:
    assert drawn(job(source(epochs=epochs))) == {"a": 5 * rows}


def test_a_part_without_a_row_is_refused() -> None:
    with pytest.raises(JobError, match=r"expected a part with at least one row, got 0\.004"):
        PreparedJob(job(source(epochs=0.004)), Options())


def test_a_budget_is_never_exceeded_and_another_source_fills_the_steps() -> None:
    made = job(source(max_tokens=123), source("b"), until=30)
    assert drawn(made) == {"a": 120, "b": 30 * 6 * 5 - 120}


def test_with_chunks_a_budget_is_exact_to_the_token() -> None:
    chunks = ov.Batch(samples=2, context=16, packing="concat")
    made = job(source(max_tokens=123), source("b", epochs=1), batch=chunks)
    assert drawn(made) == {"a": 123, "b": 500}


def test_a_budget_below_the_first_sample_ends_the_job_with_the_remedy() -> None:
    _, error, _, _ = run(job(source(max_tokens=4), source("b")), 1)
    assert isinstance(error, SourceError)
    assert "expected max_tokens of at least 5, the tokens of its first sample, got 4" in str(error)


def test_rows_after_a_budget_are_not_in_quarantine() -> None:
    """Whether they are read ahead depends on timing."""
    rows = Rows([{"tokens": [7] * 5 if k < 10 else []} for k in range(15)])
    whole = ov.Source("a", rows, transforms=[ov.Tokens()], epochs=1, shuffle=False)
    _, _, bad, _ = run(job(whole, source("b", epochs=1)), 1)
    assert [row for *_, row in bad] == [10, 11, 12, 13, 14]
    for tokens in (50, 49):
        limited = replace(whole, max_tokens=tokens)
        _, _, bad, end = run(job(limited, source("b", epochs=1)), 1)
        assert bad == []
        assert end["counts"]["tokens"]["a"] == tokens // 5 * 5
        with ov.launch(job(limited, source("b", epochs=1)), prefetch=1) as session:
            for step in session.client(0):
                time.sleep(0.1 if step.step < 6 else 0)  # all rows are read meanwhile
            assert session.quarantine() == []


def test_until_first_ends_with_the_first_budget() -> None:
    got, _, _, end = run(job(source(max_tokens=60), source("b"), until="first"), 1)
    assert end["counts"]["tokens"]["a"] == 60
    assert len(got[0]) == 5, "the step that found it exhausted is the last"


def test_a_source_without_weight_keeps_its_budget_for_later() -> None:
    made = job(source(max_tokens=60, weight=0), source("b"), until=20)
    with ov.launch(made, prefetch=1) as session:
        client = session.client(0)
        for _ in range(4):
            next(client)
        session.set_mixture({"a": 1.0, "b": 1.0})
        assert len([*client]) == 16
        assert session.metrics()["sources"]["a"]["tokens"] == 60
        assert session.metrics()["sources"]["a"]["ended"]
        assert not session.metrics()["sources"]["b"]["ended"]


def test_skipped_steps_count_for_a_budget() -> None:
    with ov.launch(job(source(max_tokens=90), source("b"), until=12)) as session:
        session.skip([0, 1])
        steps = [*session.client(0)]
        assert [s.step for s in steps] == [*range(2, 12)]
        found = session.metrics()["sources"]["a"]
        assert (found["tokens"], found["max_tokens"], found["ended"]) == (90, 90, True)


def test_an_added_source_has_its_own_budget() -> None:
    with ov.launch(job(source(epochs=1)), prefetch=1) as session:
        client = session.client(0)
        next(client)
        session.add_source(source("late", max_tokens=77))
        rest = [*client]
        assert session.metrics()["sources"]["late"]["tokens"] == 75
        assert session.metrics()["sources"]["a"]["tokens"] == 500
    assert rest


def test_samples_after_a_budget_or_a_part_are_explained() -> None:
    made = job(source(epochs=0.5, shuffle=False), source("b", max_tokens=60, shuffle=False))
    with ov.launch(made) as session:
        for _ in session.client(0):
            pass
        assert session.explain("a/e0/f0/r49").status == "placed"
        with pytest.raises(ov.PlanError, match=r"its epoch ends before it, since epochs is 0\.5"):
            session.explain("a/e0/f0/r50")
        assert session.explain("b/e0/f0/r11").status == "placed"
        assert session.explain("b/e0/f0/r12").status == "never"


def test_another_budget_needs_the_remedy_of_the_error() -> None:
    _, _, _, end = run(job(source(max_tokens=60), source("b"), until=40), 1, steps=20)
    raised = job(source(max_tokens=200), source("b"), until=40)
    with pytest.raises(StateMismatch, match=r"pass allow=\('source a: reading',\)"):
        ov.launch(raised, resume=end)
    with ov.launch(raised, resume=end, allow=("source a: reading",)) as session:
        for _ in session.client(0):
            pass
        assert session.metrics()["sources"]["a"]["tokens"] == 200


def test_another_part_of_an_epoch_is_refused_where_rows_are_unknown(tmp_path: Path) -> None:
    write_rows(tmp_path, "jsonl", [{"tokens": [k]} for k in range(40)], files=2)
    lines = ov.Source("a", tmp_path / "*.jsonl", transforms=[ov.Tokens()], epochs=1.5)
    _, _, _, end = run(job(lines), 1)
    more, allow = job(replace(lines, epochs=1.75)), ("source a: reading",)
    with pytest.raises(StateMismatch, match="the number of its rows is unknown before reading"):
        ov.launch(more, resume=end, allow=allow)
    with pytest.raises(StateMismatch, match="list its files as another source"):
        ov.launch(job(replace(lines, epochs=2)), resume=end, allow=allow)


@pytest.mark.parametrize(
    ("limits", "until", "wanted"),
    [
        ({}, "all", True),
        ({"max_tokens": 5}, "all", False),
        ({"epochs": 0.5}, "all", False),
        ({"max_tokens": 5}, "first", False),
    ],
)
def test_a_source_with_a_budget_is_not_endless(
    limits: dict[str, Any], until: str, wanted: bool
) -> None:
    assert never_ends(job(source(**limits), until=until)) is wanted


# predictions


def files(folder: Path) -> Path:
    """A job file with three sources, one of each kind of budget."""
    for i, name in enumerate(("web", "code", "books")):
        rows = [{"tokens": [k % 90] * (1 + (k * 7 + i) % 20)} for k in range(300 + 100 * i)]
        write_rows(folder / name, ("parquet", "jsonl", "jsonl.gz")[i], rows, files=2)
    path = folder / "job.yaml"
    path.write_text(
        "name: limited\nsources:\n"
        "  web: {uri: web/*.parquet, weight: 0.5, epochs: 2.5}\n"
        "  code: {uri: code/*.jsonl, weight: 0.3, max_tokens: 1000}\n"
        "  books: {uri: books/*.jsonl.gz, weight: 0.2, epochs: 1}\n"
        "batch: {samples: 10, context: 64}\n"
    )
    return path


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(cli, [str(a) for a in args])


def test_an_exact_prediction_is_what_a_run_does(tmp_path: Path) -> None:
    path = files(tmp_path)
    found = json.loads(overlord("plan", path, "--until-end", "--exact", "--json").stdout)
    got, error, _, end = run(ov.Job.from_yaml(path), 1)
    assert error is None
    assert (found["exact"], found["steps"]) == (True, len(got[0]))
    for mine in found["sources"]:
        i = ["web", "code", "books"].index(mine["name"])
        assert mine["tokens"] == end["counts"]["tokens"][mine["name"]]
        assert mine["samples"] == end["counts"]["samples"][mine["name"]]
        assert mine["last_step"] == max(s.step for s in got[0] if i in s.info.source)
    assert sum(s["share"] for s in found["sources"]) == pytest.approx(1)


def test_an_estimate_is_labelled_and_names_its_basis(tmp_path: Path) -> None:
    path = files(tmp_path)
    exact = predict_end(ov.Job.from_yaml(path), exact=True).forecast
    estimate = predict_end(ov.Job.from_yaml(path))
    assert not estimate.exact
    assert estimate.forecast.steps == pytest.approx(exact.steps, rel=0.05)
    for mine, other in zip(estimate.forecast.sources, exact.sources, strict=True):
        assert mine.tokens == pytest.approx(other.tokens, rel=0.08)
        assert mine.last_step == pytest.approx(other.last_step, rel=0.08)
    assert estimate.basis["web"].startswith("300 rows in the index; the mean of ")
    assert estimate.basis["code"].startswith("400 rows counted in 2 of 2 chunks; the mean of ")
    shown = overlord("plan", path, "--until-end").stdout
    assert "an estimate from sampled documents; --exact reads every document" in shown
    assert "the job ends after about " in shown
    assert "about" not in overlord("plan", path, "--until-end", "--exact").stdout


def test_lengths_of_an_index_make_a_prediction_exact(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a.bin", [[[1] * (1 + k % 9)] for k in range(200)])
    made = job(ov.Source("a", tmp_path / "a.bin", transforms=[ov.Tokens()], epochs=1.5))
    found = predict_end(made)
    assert found.exact
    assert found.forecast.sources[0].samples == 300


def test_a_prediction_continues_a_journal(tmp_path: Path) -> None:
    made = job(source(max_tokens=300), source("b", epochs=1), journal=str(tmp_path / "journal"))
    with ov.launch(made) as session:
        client = session.client(0)
        for _ in range(5):
            next(client)
        session.set_mixture({"a": 1.0, "b": 9.0}, at=12)
    for exact in (True, False):
        found = predict_end(made, exact=exact)
        assert found.first > 0
        assert [s.tokens for s in found.forecast.sources] == [300, 500]
        assert found.forecast.sources[0].last_step is not None
        assert found.forecast.sources[0].last_step > 12


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "expected --step N or --until-end"),
        (("--step", "1", "--until-end"), "expected --step N or --until-end"),
        (("--step", "1", "--exact"), "expected --exact with --until-end"),
        (("--until-end", "--place", "dp=2"), "and other options with --step"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tmp_path: Path, args: tuple[str, ...], says: str
) -> None:
    result = overlord("plan", files(tmp_path), *args)
    assert result.exit_code == 2
    assert says in result.output


def test_a_job_that_never_ends_has_no_prediction(tmp_path: Path) -> None:
    path = files(tmp_path)
    path.write_text(path.read_text().replace(", epochs: 1}", "}"))
    result = overlord("plan", path, "--until-end")
    assert result.exit_code == 2
    assert "the job never ends; set epochs or max_tokens of its sources, or until" in result.output


SIZES = st.lists(
    st.tuples(st.integers(1, 4000), st.integers(1, 40), st.sampled_from((0.1, 1.0, 2.5, 7.0))),
    min_size=1,
    max_size=5,
)


@given(
    SIZES,
    st.sampled_from(
        (
            {"samples": 7},
            {"tokens": 256},
            {"samples": 3, "packing": "concat"},
            {"samples": ov.schedule.linear(3, 12, 30)},
        )
    ),
    st.sampled_from(("all", "first", 25)),
    st.booleans(),
)
@examples(40)
def test_steps_drawn_at_once_end_as_those_drawn_one_by_one(
    sizes: list[tuple[int, int, float]], batch: dict[str, Any], until: str | int, staged: bool
) -> None:
    """All samples of a source have one length, so that the estimate must be the truth."""
    sources = [
        source(f"s{i}", n=n, length=length, weight=weight, epochs=1)
        for i, (n, length, weight) in enumerate(sizes)
    ]
    last = {s.name: 1.0 + i for i, s in enumerate(sources)}
    stages = (ov.Stage(12), ov.Stage(30, context=128), ov.Stage(None, mixture=last))
    made = job(
        *sources,
        batch=ov.Batch(**{"context": 64, **batch}),
        until=until,
        stages=stages if staged and "packing" not in batch else (),
    )
    planner = PreparedJob(made, Options()).planner()
    known = [SourceSize(samples=n, tokens=length) for n, length, _ in sizes]
    found = forecast(planner.spec, planner.state(), known, [1.0] * len(sizes))
    exact = predict_end(made, exact=True).forecast
    assert abs(found.steps - exact.steps) <= 1
    for mine, other in zip(found.sources, exact.sources, strict=True):
        assert abs(mine.samples - other.samples) <= 1 + 64 * ("packing" in batch)
