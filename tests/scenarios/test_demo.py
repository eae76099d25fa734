"""The demonstration end to end on a tiny corpus: it writes what it says, from the run, and works
again.
"""

from __future__ import annotations

import io
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import overlord as ov
from overlord.cli.main import cli
from overlord.demo.corpus import Shape, later_mixture, make_corpus, make_job
from overlord.demo.formats import DemoFormats
from overlord.demo.report import mix_rows, placing_rows, report, tiles
from overlord.demo.result import DemoResult
from overlord.demo.run import run_demo
from overlord.observe.source_inspection import inspect_job
from overlord.planning.strategies import DENSE_12B
from tests.unit.test_report import parse

TINY = Shape(seed=5, rows=60, vocab=400, ranks=3, samples=24, context=2048)
STEPS = 6


def demo(out: Path, width: int = 100) -> tuple[DemoResult, str]:
    screen = io.StringIO()
    figures = run_demo(
        out, TINY, STEPS, Console(file=screen, width=width), "overlord demo --tiny", compute_s=0.0
    )
    return figures, screen.getvalue()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, DemoResult, str]:
    out = tmp_path_factory.mktemp("demo") / "not" / "yet" / "there"
    return (out, *demo(out))


def test_the_report_stands_alone_and_says_what_made_it(done: tuple[Path, DemoResult, str]) -> None:
    page = (done[0] / "report.html").read_text()
    assert parse(page).tags.count("svg") == 4
    assert not re.search(r"https?://", page)
    assert page.count("Made by <code>overlord demo --tiny</code>") == 7


def test_report_and_terminal_show_the_figures_of_the_run(
    done: tuple[Path, DemoResult, str],
) -> None:
    out, figures, screen = done
    page = (out / "report.html").read_text()
    for row in (*mix_rows(figures), *placing_rows(figures)):
        assert "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" in page
        assert re.search(r"\s+".join(re.escape(cell) for cell in row if cell), screen)
    for figure, _ in tiles(figures):
        assert f"<b>{escape(figure)}</b>" in page


def test_the_report_says_what_became_of_long_documents_and_counts_lost_tokens(
    done: tuple[Path, DemoResult, str],
) -> None:
    out, figures, _ = done
    page = (out / "report.html").read_text()
    assert figures.lost == dict.fromkeys(figures.names, 0), (
        "the job of the demonstration splits them"
    )
    assert "longer than the context of 2,048 tokens were split into pieces of that length." in page
    name = figures.names[0]
    cut = report(
        replace(
            figures,
            on_long="truncate",
            lost={**figures.lost, name: int(figures.lengths[name].sum())},
        ),
        "",
    ).to_html()
    assert "tokens were truncated to it" in cut
    assert f"<td>{int(figures.lengths[name].sum()):,} (50.0%)</td>" in cut
    assert '<th scope="col">lost tokens</th>' in cut


def test_the_figures_are_those_of_the_stream(done: tuple[Path, DemoResult, str]) -> None:
    """Runs the written job again, by itself, and computes the figures from what arrives."""
    out, figures, _ = done
    job = ov.Job.from_yaml(out / "job.yaml")
    with ov.launch(job) as session:
        session.set_mixture(later_mixture(), at=STEPS // 2)
        clients = [session.client(rank) for rank in range(TINY.ranks)]
        for k in range(STEPS):
            pieces = [
                piece
                for client in clients
                for microbatch in next(client)
                for piece in microbatch.samples
            ]
            counts = [sum(piece.sample.source == name for piece in pieces) for name in job.names]
            assert figures.realised[k].tolist() == pytest.approx([n / TINY.samples for n in counts])
            costs = DENSE_12B({"tokens": session.plan(k).tokens})
            unplanned = np.array(
                [costs[rank :: TINY.ranks].sum() for rank in range(TINY.ranks)]
            )  # sample i to rank i mod ranks
            assert figures.compared["vanilla"].bucket[k] == pytest.approx(
                unplanned.max() / unplanned.mean()
            )
            assert figures.compared["llm_balance"].bucket[k] == pytest.approx(
                session.plan(k).imbalance()["bucket"]
            )
            # Of the k * ranks + 1 dearest samples some rank holds k + 1: pieces of split documents
            # are of the same size.
            dearest = [
                np.sort(costs)[::-1][: n * TINY.ranks + 1][-n - 1 :].sum()
                for n in range((len(costs) - 1) // TINY.ranks + 1)
            ]
            assert figures.bound[k] == pytest.approx(max(1.0, max(dearest) / unplanned.mean()))


def test_the_mix_changes_half_way_as_wanted(done: tuple[Path, DemoResult, str]) -> None:
    figures = done[1]
    assert figures.changed_at == STEPS // 2
    assert np.abs((figures.realised - figures.wanted).sum(axis=0) * TINY.samples).max() < 2
    assert not np.allclose(figures.wanted[0], figures.wanted[-1])


def test_planning_beats_no_planning(done: tuple[Path, DemoResult, str]) -> None:
    figures = done[1]
    planned, unplanned = (figures.compared[name].bucket for name in ("llm_balance", "vanilla"))
    assert (planned <= unplanned + 1e-9).all()
    assert (planned >= figures.bound - 1e-9).all()


def test_a_second_demo_uses_the_corpus_and_shows_the_same_plans(
    done: tuple[Path, DemoResult, str],
) -> None:
    out, figures, _ = done
    before = {p: p.stat().st_mtime_ns for p in (out / "corpus").rglob("*")}
    again, screen = demo(out, width=80)
    assert "found in" in screen
    assert {p: p.stat().st_mtime_ns for p in (out / "corpus").rglob("*")} == before
    assert mix_rows(again) == mix_rows(figures)
    assert placing_rows(again) == placing_rows(figures)
    assert (
        max(
            len(line)
            for line in screen.splitlines()
            if "report" not in line and str(out) not in line
        )
        <= 80
    )


def test_the_corpus_is_the_same_wherever_it_is_made(
    done: tuple[Path, DemoResult, str], tmp_path: Path
) -> None:
    assert make_corpus(tmp_path, TINY, lambda words: None)
    files = [
        p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".tar"
    ]
    assert len({p.suffix for p in files}) >= 5
    assert all((tmp_path / p).read_bytes() == (done[0] / p).read_bytes() for p in files)


def test_a_corpus_left_half_made_is_made_again(tmp_path: Path) -> None:
    make_corpus(tmp_path, TINY, lambda words: None)
    (tmp_path / "corpus" / "made-from.json").write_text("{")
    assert make_corpus(tmp_path, TINY, lambda words: None)
    assert not make_corpus(tmp_path, TINY, lambda words: None)


def test_nothing_in_the_corpus_is_broken(done: tuple[Path, DemoResult, str]) -> None:
    job = ov.Job.from_yaml(done[0] / "job.yaml")
    found = inspect_job(job, full=True)
    assert [(r.failures, r.bad) for r in found] == [([], {})] * len(job.sources)
    assert len({r.format for r in found}) >= 4
    medians = [float(np.median(r.tokens)) for r in found]
    assert max(medians) > 20 * min(medians)  # the sources are skewed


def test_a_folder_that_cannot_be_written_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(
        cli, ["demo", "--out", str(tmp_path / "file" / "demo"), "--steps", "1"]
    )
    assert result.exit_code == 2
    assert "choose another folder with --out" in result.stderr
    assert "Traceback" not in result.output


def test_it_ends_with_a_drill_in_which_nothing_is_lost(done: tuple[Path, DemoResult, str]) -> None:
    out, figures, screen = done
    assert figures.drill is not None
    assert [s.name for s in figures.drill.disturbed.strikes] == [
        "loader-worker/0",
        "planner",
        "constructor-worker/0",
    ]
    line = "3 kills, 0 samples lost, 0 repeated, digest equal to the undisturbed run"
    assert figures.drill.sentence() == line
    assert line in screen
    assert line in (out / "report.html").read_text()


def test_without_optional_packages_the_sources_hold_ids_and_the_job_runs(tmp_path: Path) -> None:
    plain = DemoFormats(tokenizers=False, zstandard=False)
    assert make_corpus(tmp_path, TINY, lambda words: None, plain)
    assert not make_corpus(tmp_path, TINY, lambda words: None, plain)
    assert not (tmp_path / "tokenizer.json").exists()
    job = replace(make_job(tmp_path, TINY, plain), until=2)
    assert {Path(str(source.uri)).suffix for source in job.sources} == {
        ".jsonl",
        ".gz",
        ".parquet",
        ".arrow",
    }
    with ov.launch(job) as session:
        steps = list(session.client(0))
    assert [step.step for step in steps] == [0, 1]
    assert (
        max(int(microbatch["tokens"].max()) for step in steps for microbatch in step) < TINY.vocab
    )
    assert "without tokenizers" in plain.note
    assert DemoFormats(tokenizers=True, zstandard=True).note == ""
