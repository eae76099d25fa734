"""Every command prints JSON that its section of docs/cli.md describes by an example."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from overlord.cli import detached_jobs
from overlord.cli.detached_jobs import Status
from overlord.cli.main import cli
from overlord.dryrun.constants import Measured, probe_sources
from overlord.serving.session_server import ServedAddress
from overlord.setup.prepared_job import PreparedJob
from tests import rays
from tests.corpus import write_rows
from tests.properties.test_fleet import LIKELY
from tests.unit.test_cli import job_file, overlord, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "cli.md"
# Command -> arguments; JOB, JOURNAL, DATA, CHECKPOINT and OUT are files of the test.
RUNS: dict[str, tuple[str, ...]] = {
    "init": ("DATA", "--out", "OUT/new.yaml"),
    "preview": ("JOB", "--step", "1", "--samples", "1"),
    "inspect": ("JOB",),
    "run": ("JOB", "--steps", "2", "--digest"),
    "plan": ("JOB", "--step", "1"),
    "explain": ("JOB", "--step", "1"),
    "profile": ("JOB", "--rows", "8", "--seconds", "0.05"),
    "partition": ("JOB", "--cpus", "4", "--demand", "10"),
    "simulate": ("JOB", "--gpus", "8"),
    "drill": ("JOB", "--steps", "6", "--step-s", "0", "--faults", "kill:loader-worker@2"),
    "journal show": ("JOURNAL", "--last", "1"),
    "journal verify": ("JOURNAL",),
    "spectra": ("CHECKPOINT", "--min-eigs", "20"),
    "demo": ("--out", "OUT/demo", "--steps", "3", "--ranks", "2", "--rows", "40"),
}
# A cluster of Ray, or trainers, are needed; tests/scenarios/test_cli_json.py runs them for real.
ELSEWHERE = ("serve", "status", "stop")
MORE = {
    "inspect DATA": ("inspect", "DATA"),
    "explain SAMPLE": ("explain", "JOB", "--sample", "ID"),
    "plan END": ("plan", "JOB", "--until-end"),
}


def commands(group: click.Group = cli, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    def constants(prepared: PreparedJob, path: Path, *, again: bool, progress: object) -> Measured:
        probes = probe_sources(prepared, lambda what, done, of: None)
        return Measured(constants=LIKELY, probes=probes)

    # Stand-in jobs have a test of their own.
    monkeypatch.setattr("overlord.dryrun.estimate.load_or_measure", constants)
    monkeypatch.setenv("OVERLORD_CACHE", str(tmp_path / "cache"))
    job = job_file(tmp_path, journal=str(tmp_path / "journal"))
    assert overlord("run", job, "--steps", "1").exit_code == 0
    write_rows(tmp_path / "fresh", "parquet", rows(40, 5))
    return {
        "JOB": str(job),
        "JOURNAL": str(tmp_path / "journal"),
        "DATA": str(tmp_path / "fresh"),
        "OUT": str(tmp_path),
        "CHECKPOINT": str(tmp_path / "model.safetensors"),
        "ID": "web/e0/f0/r3",
    }


def printed(name: str, args: tuple[str, ...], files: dict[str, str]) -> list[dict[str, Any]]:
    """Run a command with --json; return the documents on stdout: one, or one per line."""
    if name == "spectra":
        torch = pytest.importorskip("torch")
        save = pytest.importorskip("safetensors.torch").save_file
        weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
        save({"model.layers.0.mlp.up_proj.weight": weight}, files["CHECKPOINT"])
    words = [files.get(word, word.replace("OUT/", files["OUT"] + "/")) for word in args]
    if name == "run":  # the fixture has written the journal
        words += ["--resume", "auto"]
    result = overlord(*name.split(), *words, "--json")
    assert result.exit_code == 0, result.output
    if name == "run":
        return [json.loads(line) for line in result.stdout.splitlines()]
    return [json.loads(result.stdout)]


def test_every_command_has_json_with_one_meaning() -> None:
    found = {name: {p.name: p for p in command.params} for name, command in commands()}
    assert [name for name, params in found.items() if "as_json" not in params] == []
    for params in found.values():
        assert params["as_json"].opts == ["--json"]
        assert params["as_json"].is_flag  # type: ignore[union-attr]


def test_every_command_is_run_here_or_named() -> None:
    assert {name for name, _ in commands()} == {*RUNS, *ELSEWHERE}


def sections() -> dict[str, list[Any]]:
    """Return the JSON examples of the page by the heading of their section."""
    found: dict[str, list[Any]] = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        blocks = re.findall(r"^```json\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
        lines = re.findall(r"^```jsonl\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
        found[heading.strip("` ")] = [json.loads(block) for block in blocks] + [
            json.loads(line) for block in lines for line in block.splitlines()
        ]
    return found


def shape(value: Any) -> Any:
    """Return the keys of a document, of the mappings in it, and of the first items of its lists.

    Mappings whose keys are data (names of sources, columns, reasons) have no fixed keys.
    """
    if isinstance(value, dict):
        return {key: shape(item) for key, item in sorted(value.items()) if key not in DATA_KEYS}
    if isinstance(value, list):
        return [shape(value[0])] if value and isinstance(value[0], (dict, list)) else []
    return None


DATA_KEYS = {"columns", "bad", "first", "mix", "quarantined", "lost_tokens", "blocks", "ignored"}
DATA_KEYS |= {"body", "transforms", "asked"}


def unequal(documented: Any, actual: Any, at: str = "") -> list[str]:
    """Return the keys in which an example and the output differ; empty lists match any list."""
    if isinstance(documented, dict) and isinstance(actual, dict):
        found = [f"{at}{key}: only in the page" for key in documented.keys() - actual.keys()]
        found += [f"{at}{key}: only in the output" for key in actual.keys() - documented.keys()]
        for key in documented.keys() & actual.keys():
            found += unequal(documented[key], actual[key], f"{at}{key}.")
        return found
    if isinstance(documented, list) and isinstance(actual, list) and documented and actual:
        return unequal(documented[0], actual[0], f"{at}0.")
    return []


@pytest.mark.parametrize("name", [*RUNS, *MORE])
def test_a_command_prints_json_of_the_documented_form(name: str, files: dict[str, str]) -> None:
    command, args = (name, RUNS[name]) if name in RUNS else (MORE[name][0], MORE[name][1:])
    found = printed(command, args, files)
    documented = sections()[f"overlord {command}"]
    if command == "run":
        forms = {example["event"]: example for example in documented}
        assert [document["event"] for document in found] == ["step", "step", "end"]
        pairs = [(forms[document["event"]], document) for document in found]
    else:
        # A command with two forms has an example of each.
        form = 1 if name in MORE else 0
        pairs = [(documented[form], found[0])]
    for example, document in pairs:
        assert unequal(shape(example), shape(document)) == []


def test_the_page_has_a_section_for_every_command_and_no_other() -> None:
    listed = {heading for heading in sections() if heading.startswith("overlord ")}
    assert listed == {f"overlord {name}" for name, _ in commands()}


def test_a_key_that_is_missing_or_new_is_found() -> None:
    documented, actual = {"a": [{"b": 1}], "c": 2}, {"a": [{"b": 1, "d": 2}]}
    assert unequal(shape(documented), shape(actual)) == [
        "c: only in the page",
        "a.0.d: only in the output",
    ]


@pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")
def test_an_error_leaves_stdout_empty(tmp_path: Path) -> None:
    for args in (
        ("run", tmp_path / "none.yaml"),
        ("status", "--address", "nowhere"),
        ("stop", "small", "--address", "nowhere"),
        ("journal", "verify", tmp_path / "none"),
    ):
        result = overlord(*args, "--json")
        assert result.exit_code == 2, result.output
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")


def test_commands_on_a_cluster_print_the_documented_form(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = {"name": "planner", "node": "n", "pid": 7, "state": "running", "asked": {"cores": 1.0}}
    job = Status(
        name="demo",
        state="running",
        address="overlord://h:1/k",
        steps=9,
        taken=8,
        clients=2,
        workers=(worker,),
    )
    monkeypatch.setattr(detached_jobs, "jobs", lambda address: [job])
    monkeypatch.setattr(
        detached_jobs, "served", lambda name, at: ServedAddress("overlord://a", "t")
    )
    monkeypatch.setattr(detached_jobs, "stop", lambda name, address: "")
    listed, token = sections()["overlord status"]
    [stopped] = sections()["overlord stop"]
    for args, example in (
        (("status",), listed),
        (("status", "--token", "demo"), token),
        (("stop", "demo"), stopped),
    ):
        document = json.loads(overlord(*args, "--json").stdout)
        assert unequal(shape(example), shape(document)) == []


# Warnings.


def test_strict_fails_on_warnings_alone(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    assert overlord("inspect", path, "--strict").exit_code == 0
    some = write_rows(tmp_path / "some", "jsonl", [*rows(9, 1), {"tokens": "none"}])
    source = {"uri": some, "transforms": ["tokens"], "epochs": 1}
    path = job_file(tmp_path, sources={"some": source})
    assert overlord("inspect", path).exit_code == 0
    strict = overlord("inspect", path, "--strict", "--json")
    assert strict.exit_code == 1
    assert "error: 1 warning\n  - source 'some': 1 row:" in strict.stderr
    [report] = json.loads(strict.stdout)["sources"]
    assert len(report["warnings"]) == 1
    long = {
        **source,
        "uri": write_rows(tmp_path / "l", "jsonl", [{"tokens": [1] * 90}, *rows(4, 1)]),
    }
    path = job_file(tmp_path, sources={"long": long}, on_long="truncate")
    result = overlord("inspect", path, "--strict")
    assert result.exit_code == 1
    assert "1 documents are longer than max_document; 26 of" in result.stderr


def test_strict_fails_on_data_that_no_job_can_use(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good", "jsonl", rows(4, 1))
    useless = write_rows(tmp_path / "useless", "jsonl", [{"n": 1}])
    assert overlord("inspect", good, "--strict").exit_code == 0
    assert overlord("inspect", useless).exit_code == 0
    failed = overlord("inspect", useless, "--strict")
    assert failed.exit_code == 1
    assert "no column of text, messages or token ids was recognised" in failed.stderr
