"""What the command line says to people who give it the wrong file, the wrong state or the wrong
column.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import overlord as ov
from overlord.cli.inspect_data import is_data
from overlord.errors import StateMismatch
from tests.corpus import write_rows
from tests.unit.test_cli import job_file, overlord, rows


def said(*args: str | Path) -> str:
    """What a command that refuses says."""
    result = overlord(*args)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("sources", ["{}", "[]", ""])
@pytest.mark.parametrize(
    "command", [("inspect",), ("run",), ("plan", "--step", "0")], ids=lambda command: command[0]
)
def test_a_job_without_sources_is_refused_by_that_name(
    tmp_path: Path, sources: str, command: tuple[str, ...]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        f"name: x\nsources: {sources}\nmixture: {{web: 1}}\nbatch: {{samples: 4, context: 8}}\n"
    )
    words = said(command[0], path, *command[1:])
    assert "sources: expected a list or a mapping with at least one source, got" in words
    assert "?" not in words


def many(folder: Path, n: int, first: int = 0) -> Path:
    job = yaml.safe_load(job_file(folder).read_text())
    web = job["sources"]["web"]
    path = folder / f"job-{n}-{first}.yaml"
    path.write_text(
        yaml.safe_dump(
            {**job, "name": f"job {first}", "sources": {f"s{first + i}": web for i in range(n)}}
        )
    )
    return path


def test_a_state_of_another_job_names_both_jobs_and_sums_up_their_sources(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    overlord("run", many(tmp_path, 8), "--steps", "1", "--save", state)
    result = overlord("run", many(tmp_path, 9, first=3), "--steps", "1", "--resume", state)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert (
        lines[0]
        == "error: the state belongs to another job, 'job 0'; this is 'job 3'; 23 part(s) differ"
    )
    assert "  - sources of the state that the job lacks: s0, s1, s2" in lines
    assert "  - sources of the job that the state lacks: s10, s11, s8, s9" in lines
    assert len(lines) < 8
    assert "pass allow=tuple(error.differences)" in lines[-1]


def test_of_many_differences_a_mismatch_keeps_all_and_shows_some() -> None:
    differences = {
        f"source s{i}: {part}": ("a", "b") for i in range(20) for part in ("files", "transforms")
    }
    error = StateMismatch(
        {**differences, "seed": ("1", "2"), "source x: 1: files": ("a", "nothing")}, "mend it"
    )
    assert len(error.differences) == 42
    assert str(error).splitlines() == [
        "the state belongs to another job; 42 part(s) differ",
        "  - sources of the state that the job lacks: x: 1",
        "  - sources that changed: s0 (files, transforms), s10 (files, transforms), s11 "
        "(files, transforms), s12 (files, transforms), "
        "s13 (files, transforms) and 15 more",
        "  - seed: saved 1, got 2",
        "mend it",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"a": 1}', "got 'a'; it lacks version, job, fingerprint, step, cursors"),
        ("{}", "got no key; it lacks version"),
        ("[1]", "got list"),
        ('{"version": 1, "job": "x", "step": 3, "cursors": {}}', "it lacks fingerprint"),
    ],
)
def test_what_is_no_state_is_called_that_and_what_one_is_is_said(
    tmp_path: Path, text: str, found: str
) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    words = said("run", job_file(tmp_path), "--steps", "1", "--resume", path)
    wanted = (
        "not an Overlord state: expected a mapping with version, job, fingerprint, step, "
        "cursors and more, as state_dict() gives it, "
    )
    assert f"{path}: {wanted}" in words
    assert found in words
    assert "another job" not in words
    given, job = json.loads(text), ov.Job.from_yaml(job_file(tmp_path))
    with pytest.raises(StateMismatch, match="not an Overlord state: expected a mapping"):
        ov.launch(job, resume=given if isinstance(given, dict) else {"list": given})


def test_a_state_of_another_version_and_a_damaged_one_are_not_called_another_jobs(
    tmp_path: Path,
) -> None:
    job, path = job_file(tmp_path), tmp_path / "state.json"
    overlord("run", job, "--steps", "1", "--save", path)
    state = json.loads(path.read_text())
    for change, word in (
        ({"version": 99}, "the state has another version"),
        (
            {"cursors": {"web": [1], "code": [1]}},
            "the state is damaged: ValueError: cursors: expected six numbers for each source, got "
            "another number; save and load the result of state_dict() unchanged",
        ),
    ):
        path.write_text(json.dumps({**state, **change}))
        words = said("run", job, "--steps", "1", "--resume", path)
        assert word in words
        assert "another job" not in words
        assert "saved damaged" not in words, "the error of a damaged state is not what the job has"


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "jsonl.gz", "arrow"])
def test_data_can_be_inspected_without_a_job_and_the_suggested_job_runs(
    tmp_path: Path, kind: str
) -> None:
    folder = Path(write_rows(tmp_path / "web", kind, rows(60, 1))).parent
    one = min(folder.iterdir())
    for what in (one, folder, folder / "*"):
        result = overlord("inspect", what)
        assert result.exit_code == 0, result.output
        assert kind.split(".")[0] in result.stdout
        assert "tokens" in result.stdout
    job = tmp_path / "job.yaml"
    job.write_text("name: " + overlord("inspect", folder).stdout.split("\nname: ")[1])
    assert overlord("run", job, "--steps", "1").exit_code == 0


def test_text_that_is_inspected_is_to_be_tokenized_and_images_are_named(tmp_path: Path) -> None:
    path = tmp_path / "my web.parquet"
    pq.write_table(pa.table({"url": ["u"], "content": ["a text"], "image": [b"\x89PNG"]}), path)
    result = overlord("inspect", path)
    assert result.exit_code == 0, result.output
    (tmp_path / "job.yaml").write_text("name: " + result.stdout.split("\nname: ")[1])
    (tmp_path / "tokenizer.json").write_text("{}")
    [source] = ov.Job.from_yaml(tmp_path / "job.yaml").sources
    assert source.name == "my-web"
    assert source.transforms == (ov.Tokenize(str(tmp_path / "tokenizer.json"), text="content"),)
    assert "image: bytes; Images reads images" in result.stdout
    assert "4 bytes" in result.stdout


def test_token_ids_beside_other_values_are_shown_as_mixed_and_the_suggested_job_runs(
    tmp_path: Path,
) -> None:
    lines = [json.dumps({"ids": [1, 2.5] if k == 3 else [k, k + 1, k + 2]}) for k in range(40)]
    (tmp_path / "m.jsonl").write_text("\n".join(lines))
    result = overlord("inspect", tmp_path / "m.jsonl")
    assert result.exit_code == 0, result.output
    assert ["ids", "mixed"] in [line.split()[:2] for line in result.stdout.splitlines()]
    assert "extension" not in result.stdout
    (tmp_path / "job.yaml").write_text("name: " + result.stdout.split("\nname: ")[1])
    [source] = ov.Job.from_yaml(tmp_path / "job.yaml").sources
    assert source.transforms == (ov.Tokens("ids"),)
    assert overlord("run", tmp_path / "job.yaml", "--steps", "1").exit_code == 0


@pytest.mark.parametrize("name", ["job[1].yaml", "job*.yml", "what?.json"])
def test_a_job_file_may_have_signs_of_a_pattern_in_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(yaml.safe_load(job_file(tmp_path).read_text())))
    result = overlord("inspect", path)
    assert result.exit_code == 0, result.output
    assert "a job file for it" not in result.stdout
    assert is_data(str(tmp_path / "absent[1].yaml")), "a pattern that no file has for its name"


@pytest.mark.parametrize(
    "command", [("run",), ("plan", "--step", "0"), ("profile",)], ids=lambda command: command[0]
)
def test_data_in_the_place_of_a_job_file_is_said_to_be_data(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    path = min(Path(write_rows(tmp_path / "web", "parquet", rows(9, 1))).parent.iterdir())
    assert (
        f"{path}: expected a job file (YAML), got data; `overlord inspect {path}` shows it"
        in said(command[0], path, *command[1:])
    )


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "arrow"])
@pytest.mark.parametrize("command", ["inspect", "run"])
def test_token_ids_that_are_missing_where_there_is_text_suggest_tokenize(
    tmp_path: Path, kind: str, command: str
) -> None:
    uri = write_rows(tmp_path / "web", kind, [{"text": f"some words {k}"} for k in range(20)])
    job = {
        "name": "x",
        "sources": {"web": {"uri": uri, "epochs": 1}},
        "batch": {"samples": 4, "context": 8},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    words = said(command, tmp_path / "job.yaml")
    assert "Tokenize" in words
    if (kind, command) != ("jsonl", "run"):  # of lines, only the named columns are read
        assert (
            "if 'text' holds text, tokenize it: ov.Tokenize('tokenizer.json', text='text')" in words
        )


def test_a_module_that_raises_when_it_is_imported_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raises_at_import_of_test.py").write_text("import os\n\n\nunknown_name\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = said("inspect", job_file(tmp_path), "--import", "raises_at_import_of_test")
    assert f"{tmp_path}/raises_at_import_of_test.py:4" in words
