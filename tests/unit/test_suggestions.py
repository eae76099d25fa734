"""What a person meets in the first hour: misspelled names, jobs pasted together, and whether the
words then help.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result

import overlord as ov
from overlord.cli.main import cli
from overlord.demo.run import program
from overlord.errors import JobError, SourceError
from overlord.job.job import ON_LONG
from overlord.observe.svg import Panel, bars
from overlord.sources.files import Files
from tests.corpus import write_rows

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
TEXTS = [{"id": k, "text": "one two three " * (1 + k % 5)} for k in range(40)]


def job_file(folder: Path, sources: dict[str, Any], **changes: Any) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        yaml.safe_dump(
            {"name": "first", "sources": sources, "batch": {"samples": 8, "context": 64}, **changes}
        )
    )
    return path


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli, [str(a) for a in args])


@pytest.mark.parametrize("format", ["jsonl", "jsonl.gz", "tar"])
def test_inspect_names_the_columns_that_lines_and_shards_have_when_the_wanted_one_is_misspelled(
    format: str, tokenizer: str, tmp_path: Path
) -> None:
    source = {
        "uri": write_rows(tmp_path / "web", format, TEXTS),
        "transforms": [{"tokenize": {"tokenizer": tokenizer, "text": "txt"}}],
    }
    result = overlord("inspect", job_file(tmp_path, {"web": source}))
    assert result.exit_code == 1
    found = "__key__, id, text" if format == "tar" else "id, text"
    assert f": expected the column 'txt', got {found}; did you mean 'text'?" in result.stderr


def test_inspect_lists_all_columns_of_a_source_that_is_well(tokenizer: str, tmp_path: Path) -> None:
    source = {
        "uri": write_rows(tmp_path / "web", "jsonl", TEXTS),
        "transforms": [{"tokenize": {"tokenizer": tokenizer}}],
    }
    result = overlord("inspect", job_file(tmp_path, {"web": source}))
    assert result.exit_code == 0, result.output
    assert "columns id: int64, text: string" in result.stdout


@pytest.mark.parametrize("on_long", ON_LONG)
def test_inspect_says_how_many_samples_the_context_is_too_short_for(
    on_long: str, tmp_path: Path
) -> None:
    rows = [{"tokens": [1] * n} for n in (3, 5, 90, 70, 64)]
    source = {"uri": write_rows(tmp_path / "web", "parquet", rows), "transforms": ["tokens"]}
    shown = overlord("inspect", job_file(tmp_path, {"web": source}, on_long=on_long)).stdout
    assert f"2 longer than max_document (on_long: {on_long})" in shown
    if on_long == "quarantine":
        assert "tokens 3 / 5 / 64" in shown
        assert "bad: 2 rows: more tokens than the context of 64" in shown
        assert "2 of 5" in shown
    elif on_long == "drop":
        assert "tokens 3 / 5 / 64" in shown
        assert "(on_long: drop): 160 of 232 tokens dropped (69.0%)" in shown
        assert "0 of 5" in shown
    else:
        assert "tokens 3 / 64 / 90" in shown
        assert ("(on_long: truncate): 32 of 232 tokens cut (13.8%)" in shown) == (
            on_long == "truncate"
        )
        assert "0 of 5" in shown


def test_inspect_says_so_where_every_document_would_be_dropped(tmp_path: Path) -> None:
    source = {
        "uri": write_rows(tmp_path / "web", "parquet", [{"tokens": [1] * 90}] * 2),
        "transforms": ["tokens"],
    }
    result = overlord("inspect", job_file(tmp_path, {"web": source}, on_long="drop"))
    assert result.exit_code != 0
    assert (
        "no sampled row became a sample; all 2 documents are longer than max_document, "
        "64 (on_long: drop)" in result.output
    )


def test_a_file_that_is_not_there_brings_up_the_name_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl").write_text("{}\n")
    with pytest.raises(
        SourceError, match=r"no such file or directory; did you mean plain\.jsonl\?$"
    ):
        Files.resolve(f"{tmp_path}/plian.jsonl", source="web")
    with pytest.raises(SourceError, match=r"holds 1 entries, for example plain\.jsonl$"):
        Files.resolve(f"{tmp_path}/zzz", source="web")
    with pytest.raises(SourceError, match=r"nowhere is empty or does not exist$"):
        Files.resolve(f"{tmp_path}/nowhere/a.jsonl", source="web")


def test_only_a_relative_path_is_told_where_relative_paths_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="a relative path starts at the working directory"):
        Files.resolve("gone.jsonl", source="web")


def test_a_pipe_is_not_called_missing(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(SourceError, match="expected a file or a directory, got a pipe"):
        Files.resolve(f"{tmp_path}/pipe.jsonl", source="web")


def test_a_tilde_is_the_home_directory_in_python_and_in_a_file(
    tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_rows(tmp_path / "data", "jsonl", TEXTS, files=1)
    (tmp_path / "tokenizer.json").write_bytes(Path(tokenizer).read_bytes())
    _, files = Files.resolve("~/data/*.jsonl", source="web")
    assert [f.path for f in files] == [str(tmp_path / "data" / "part-00000.jsonl")]
    (tmp_path / "jobs").mkdir()
    source = {
        "uri": "~/data/*.jsonl",
        "epochs": 1,
        "transforms": [{"tokenize": {"tokenizer": "~/tokenizer.json"}}],
    }
    result = overlord("run", job_file(tmp_path / "jobs", {"web": source}))
    assert result.exit_code == 0, result.output
    assert ov.Tokenize("~/tokenizer.json").tokenizer == str(tmp_path / "tokenizer.json")


def test_one_problem_does_not_name_its_place_twice() -> None:
    with pytest.raises(JobError) as source:
        ov.Source("web", "x.jsonl", weight=-1)
    assert (
        str(source.value) == "source 'web'.weight: expected a finite number of at least 0, got -1"
    )
    with pytest.raises(JobError) as batch:
        ov.Batch(samples=1)
    assert str(batch.value) == "batch.context: expected a whole number of at least 1, got 0"


def test_a_broken_file_is_told_by_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("name: [1\nseed: 2\n")
    with pytest.raises(
        JobError,
        match=r"expected YAML, got a syntax error: while parsing a flow sequence, expected .* "
        r"\(line 2, column 5\)$",
    ):
        ov.Job.from_yaml(path)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("filter", "fn"),
        ("map", "fn"),
        ("tokenize", "tokenizer"),
        ("tokens", "column"),
        ("meta", "name"),
    ],
)
def test_a_transform_without_the_name_of_its_field_is_shown_how_it_is_written(
    kind: str, field: str, tmp_path: Path
) -> None:
    path = job_file(tmp_path, {"web": {"uri": "x.jsonl", "transforms": [{kind: "mine"}]}})
    with pytest.raises(JobError) as caught:
        ov.Job.from_yaml(path)
    assert (
        f"sources.web.transforms[0].{kind}: expected its fields, as in {{{field}: ...}}, got 'mine'"
        in caught.value.problems
    )


def test_a_job_of_one_source_that_never_ends_is_told_in_good_grammar(tmp_path: Path) -> None:
    source = {"uri": "x.jsonl"}
    assert (
        "because web repeats forever;"
        in overlord("run", job_file(tmp_path, {"web": source})).stderr
    )
    many = {f"s{k}": source for k in range(9)}
    assert (
        "because s0, s1, s2, s3, s4 and others repeat forever;"
        in overlord("run", job_file(tmp_path, many)).stderr
    )


def test_a_plan_of_many_sources_names_the_largest_and_counts_the_others(tmp_path: Path) -> None:
    sources = {
        f"s{k:02d}": {
            "uri": write_rows(tmp_path / f"{k}", "jsonl", [{"tokens": [1, 2]}] * 40, files=1),
            "weight": 3 if k >= 16 else 1,
        }
        for k in range(40)
    }
    shown = overlord(
        "plan", job_file(tmp_path, sources, batch={"samples": 88, "context": 64}), "--step", "0"
    ).stdout
    mix = shown[shown.index("mix") : shown.index("digest")]
    assert " ".join(mix.split()).endswith("s38 3, s39 3, and 16 others 16")
    assert "s00" not in mix


def test_what_the_demonstration_says_to_type_next_can_be_typed() -> None:
    done = subprocess.run(
        [*shlex.split(program()), "--version"], capture_output=True, text=True, env=ENV
    )
    assert done.stdout.startswith("overlord, version")


def test_a_terminal_that_knows_no_bars_still_gets_its_table(tmp_path: Path) -> None:
    source = {"uri": write_rows(tmp_path / "web", "jsonl", [{"tokens": [1, 2]}] * 40, files=1)}
    command = [
        sys.executable,
        "-m",
        "overlord.cli.main",
        "plan",
        str(job_file(tmp_path, {"web": source})),
        "--step",
        "0",
    ]
    done = subprocess.run(command, env={**ENV, "PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"1.000  ????????" in done.stdout


def test_a_transform_process_of_a_program_without_a_guard_gets_its_function_by_value(
    tokenizer: str, tmp_path: Path
) -> None:
    path = write_rows(tmp_path / "web", "jsonl", TEXTS, files=1)
    (tmp_path / "train.py").write_text(
        "import overlord as ov\n"
        "def same(columns):\n    return columns\n"
        f"transforms = [ov.Map(same, holds_lock=True), ov.Tokenize({tokenizer!r})]\n"
        f"job = ov.Job(name='x', sources=[ov.Source('web', {path!r}, "
        "transforms=transforms)], batch=ov.Batch(samples=8, context=64))\n"
        "with ov.launch(job) as session:\n"
        "    next(session.client(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=ENV, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_numbers_over_bars_are_drawn_over_the_line_of_the_bound() -> None:
    panel = Panel(label="a", note="b", color="red", stacks=np.array([[0.5, 0.5], [1.0, 0.2]]))
    drawn = bars(
        [panel], about="x", bar_name="rank", y_label="y", mean=1.0, bound=1.0, bound_label="bound"
    )
    assert drawn.index('class="bound"') < drawn.index('class="value"')
    assert drawn.count('class="value"') == 2
    assert drawn.count(">1.20<") == 1


@pytest.mark.parametrize(
    ("make", "given", "meant"),
    [
        (ov.Job, "source", "sources"),
        (ov.Source, "weigth", "weight"),
        (ov.Batch, "sample", "samples"),
        (ov.Mesh, "first_rnk", "first_rank"),
        (ov.Tokenize, "eoss", "eos"),
        (ov.Chat, "message", "messages"),
        (ov.Tokens, "colum", "column"),
        (ov.Map, "row", "rows"),
    ],
)
def test_a_misspelled_argument_is_told_the_name_that_was_meant(
    make: Any, given: str, meant: str
) -> None:
    wrong = f"{make.__name__}: unexpected argument {given!r}; did you mean {meant!r}"
    with pytest.raises(TypeError, match=re.escape(wrong)):
        make(**{given: 1})
    assert meant in inspect.signature(make).parameters


@pytest.mark.parametrize("given", [lambda: iter([]), iter([])])
def test_rows_of_a_function_or_an_iterator_are_told_the_way_to_give_them(given: Any) -> None:
    with pytest.raises(JobError, match=r"use Source\.from_factory with a function"):
        ov.Source("rows", given)


def test_a_function_among_the_transforms_is_told_of_map() -> None:
    with pytest.raises(
        JobError, match=r"expected a transform, got .*; use ov.Map\(fn, rows=True\)"
    ):
        ov.Source("web", "web.jsonl", transforms=[len])


@pytest.mark.parametrize(
    ("rows", "transform", "remedy"),
    [
        ([{"Body Text": "a b"}], "Tokenize", "did you mean 'Body Text'"),
        ([{"prose": "a b"}], "Tokenize", "if 'prose' holds the text: text='prose' in ov.Tokenize"),
        ([{"Doc IDs": [1, 2]}], "Tokens", "did you mean 'Doc IDs'"),
        (
            [{"talk": [{"role": "user", "content": "a"}]}],
            "Chat",
            "if 'talk' holds conversations: messages='talk' in ov.Chat",
        ),
        ([{"n": 1}], "Tokenize", "name a column that every file has"),
    ],
)
def test_a_column_that_a_transform_lacks_is_told_by_name_or_content(
    rows: list[dict[str, Any]], transform: str, remedy: str, tokenizer: str, tmp_path: Path
) -> None:
    made = {
        "Tokenize": ov.Tokenize(tokenizer),
        "Tokens": ov.Tokens("doc_ids"),
        "Chat": ov.Chat(tokenizer, template="{% for m in messages %}{{ m.content }}{% endfor %}"),
    }
    glob = write_rows(tmp_path / "web", "parquet", rows)
    source = ov.Source("web", glob, transforms=[made[transform]])
    with pytest.raises(SourceError) as error:
        ov.launch(
            ov.Job(name="x", sources=[source], batch=ov.Batch(samples=1, context=64), until=1)
        )
    assert remedy in str(error.value)


def test_a_folder_or_a_missing_path_in_place_of_a_job_is_told_what_to_give(tmp_path: Path) -> None:
    for command in (["run"], ["preview"], ["plan", "--step", "0"]):
        result = overlord(*command, str(tmp_path))
        assert result.exit_code == 2
        assert "writes a job" in " ".join(result.stderr.split())
        assert f"overlord init {tmp_path}" in " ".join(result.stderr.split())
    missing = overlord("inspect", str(tmp_path / "nothing"))
    assert missing.exit_code == 2
    assert "nothing: no such file or directory; give a job file, or the path" in missing.stderr


def test_a_sample_after_the_end_of_the_job_is_not_searched_for_further(tmp_path: Path) -> None:
    glob = write_rows(tmp_path / "web", "parquet", [{"tokens": [k]} for k in range(40)], files=1)
    path = job_file(tmp_path, {"web": {"uri": glob, "shuffle": False}}, until=2)
    late = overlord("explain", str(path), "--sample", "web/e0/f0/r39")
    assert late.exit_code == 1
    assert "the sample is not in the 2 steps of the job" in late.stderr
    more = overlord("explain", str(path), "--sample", "web/e0/f0/r39", "--within", "1")
    assert "not in the first 1 steps; --within N searches more" in more.stderr


def test_a_resumed_run_counts_its_own_bad_rows(tmp_path: Path) -> None:
    rows = [{"tokens": [] if k < 3 else [k]} for k in range(40)]
    glob = write_rows(tmp_path / "web", "parquet", rows, files=1)
    path = job_file(tmp_path, {"web": {"uri": glob, "shuffle": False, "epochs": 1}})
    state, found = str(tmp_path / "state.json"), []
    for more in (["--save", state], ["--resume", state]):
        lines = overlord("run", str(path), "--steps", "2", "--json", *more).stdout.splitlines()
        found.append(json.loads(lines[-1])["sources"][0]["quarantined"])
    assert found == [3, 0]
