"""The command line on small real files: what it prints, how it fails, and that it stops when told
to.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

import overlord as ov
from overlord.cli.main import cli
from overlord.cli.run_job import never_ends, step_digest
from overlord.cli.status import without_cores
from overlord.observe.progress import Taken
from tests import rays
from tests.corpus import write_rows

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src"


def rows(n: int, base: int) -> list[dict[str, Any]]:
    return [{"tokens": [base + k] * (1 + (7 * k) % 23)} for k in range(n)]


def job_file(folder: Path, epochs: int | None = 1, **changes: Any) -> Path:
    sources = {
        "web": {
            "uri": write_rows(folder / "web", "parquet", rows(60, 100), row_group_size=16),
            "weight": 2,
            "epochs": epochs,
        },
        "code": {"uri": write_rows(folder / "code", "jsonl", rows(60, 300)), "epochs": epochs},
    }
    for source in sources.values():
        source["transforms"] = [{"tokens": {"column": "tokens"}}]
    job = {
        "name": "small",
        "sources": sources,
        "batch": {"samples": 12, "context": 64, "microbatches": 2},
        "place": {"dp": 2},
        "seed": 3,
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump({**job, **changes}))
    return path


def overlord(*args: str | Path) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(cli, [str(a) for a in args])


def step_lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if line.startswith("step ")]


def test_a_run_ends_with_the_mix_wanted_and_realised(tmp_path: Path) -> None:
    result = overlord("run", job_file(tmp_path), "--steps", "4")
    assert result.exit_code == 0, result.output
    table = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    assert table["web"][:3] == ["66.67%", "66.67%", "32"]
    assert table["code"][:3] == ["33.33%", "33.33%", "16"]
    assert table["steps"][0] == "4,"


def test_an_evaluation_runs_to_its_end_and_is_planned_by_its_model(tmp_path: Path) -> None:
    model = {"hidden": 64, "layers": 2, "heads": 2, "name": "tiny"}
    path = job_file(tmp_path, epochs=None, evaluation=True, model=model)
    run, planned = overlord("run", path), overlord("plan", path, "--step", "9")
    assert run.exit_code == planned.exit_code == 0, run.output + planned.output
    table = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines() if line}
    assert [table["web"][2], table["code"][2], table["steps"][0]] == ["60", "60", "10,"]
    assert "tiny (hidden 64, 2 layers)" in planned.stdout
    assumed = overlord("plan", job_file(tmp_path / "assumed"), "--step", "0")
    assert "a 12B Llama is assumed" in " ".join(assumed.stdout.split())


@pytest.mark.parametrize(
    ("on_long", "column"), [("truncate", "cut tokens"), ("drop", "dropped tokens"), ("split", "")]
)
def test_a_run_shows_the_tokens_that_each_source_lost(
    on_long: str, column: str, tmp_path: Path
) -> None:
    rows = [{"n": k, "tokens": [1] * (80 if k % 10 == 0 else 4)} for k in range(60)]
    source = {
        "uri": write_rows(tmp_path / "long", "parquet", rows),
        "transforms": ["tokens"],
        "epochs": 1,
    }
    result = overlord("run", job_file(tmp_path, sources={"long": source}, on_long=on_long))
    assert result.exit_code == 0, result.output
    head, row = (
        next(line for line in result.stdout.splitlines() if line.startswith(word))
        for word in ("source", "long")
    )
    assert head.rstrip().endswith(column or "dropped")
    lost = {"truncate": "96 (13.8%)", "drop": "480 (69.0%)", "split": ""}[on_long]
    assert row.rstrip().endswith(lost)


def test_without_steps_a_run_goes_to_the_end_of_the_data(tmp_path: Path) -> None:
    result = overlord("run", job_file(tmp_path))
    table = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    assert (table["web"][2], table["code"][2], table["steps"][0]) == ("60", "60", "10,")


def test_options_of_launch_may_be_named_and_change_nothing_of_the_stream(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    plain = step_lines(overlord("run", path, "--digest"))
    assert (
        step_lines(
            overlord("run", path, "--digest", "-o", "prefetch=2", "--option", "loaders={web: 2}")
        )
        == plain
    )


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("prefech=2", "unknown option 'prefech'; did you mean 'prefetch'"),
        ("prefetch=many", "prefetch: expected a whole number of at least 1, got 'many'"),
        ("prefetch", "--option: expected NAME=VALUE, as in prefetch=8, got 'prefetch'"),
        ("loaders={web: 2", "--option: loaders: expected YAML, got '{web: 2'"),
        ("address=head:6379", "--option: address: expected as --address HOST:PORT, got --option"),
        ("on_stall=print", "on_stall: expected in a program, since it is a function, got --option"),
    ],
)
@pytest.mark.parametrize("command", ["run", "serve"])
def test_an_option_that_is_none_is_reported(
    tmp_path: Path, command: str, word: str, said: str
) -> None:
    result = overlord(command, job_file(tmp_path), "-o", word)
    assert result.exit_code == 2, result.output
    assert said in " ".join(result.stderr.split())


@pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")
@pytest.mark.parametrize("command", ["run", "serve"])
def test_whoever_launches_on_a_cluster_names_it(tmp_path: Path, command: str) -> None:
    result = overlord(command, job_file(tmp_path), "--runtime", "ray", "--address", "127.0.0.1:9")
    assert result.exit_code == 2, result.output
    assert "address: '127.0.0.1:9' could not be reached as a Ray cluster" in " ".join(
        result.stderr.split()
    )


@pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")
@pytest.mark.parametrize("address", ["auto", "127.0.0.1"])
def test_an_address_that_is_none_is_reported(address: str) -> None:
    for command in (["status"], ["status", "--token", "small"], ["stop", "small"]):
        result = overlord(*command, "--address", address)
        assert result.exit_code == 2, result.output
        said = (
            f"{command[0]}: address: expected host:port of a Ray cluster's head, as in "
            f"'10.0.0.1:6379', got '{address}'"
        )
        assert said in " ".join(result.stderr.split())


def test_workers_without_cores_are_told_of_what_may_have_kept_them() -> None:
    said = (
        "no node had a spare core that they may use (on nodes with ranks, sidecar= sets how "
        "many): loader-worker/1"
    )
    assert without_cores(["loader-worker/1"]).endswith(said)


def test_of_many_names_some_are_told_and_how_many_more(tmp_path: Path) -> None:
    result = overlord("run", job_file(tmp_path), "-o", "zzz=1")
    assert re.search(
        r"unknown option 'zzz'; known: (\w+, ){19}\w+ and \d+ more", " ".join(result.stderr.split())
    )


def test_the_name_of_a_cluster_is_nothing_to_who_launches_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLORD_CLUSTER", "127.0.0.1:9")
    assert overlord("run", job_file(tmp_path), "--steps", "1").exit_code == 0


def test_a_drill_whose_faults_hit_less_than_they_should_does_not_pass(tmp_path: Path) -> None:
    faults = "kill:loader-worker/9@1,kill:constructor-worker*3@2,kill:planner@11"
    result = overlord(
        "drill", job_file(tmp_path), "--steps", "12", "--step-s", "0", "--faults", faults
    )
    assert result.exit_code == 1, result.output
    said = " ".join(result.stdout.split())
    assert (
        "kill:loader-worker/9@1 hit nothing: expected a running worker of that name or role, got "
        "constructor-worker/0, loader-worker/0" in said
    )
    assert "kill:constructor-worker*3@2 hit 1 instead of 3: no more of them ran" in said
    assert "kill:planner@11 never struck: the data ended after 10 steps" in said
    assert "1 kill, 0 samples lost, 0 repeated, digest equal to the undisturbed run" in said


def test_a_job_that_never_ends_asks_for_steps(tmp_path: Path) -> None:
    result = overlord("run", job_file(tmp_path, epochs=None))
    assert result.exit_code == 2
    assert "never ends" in result.stderr
    assert "--steps" in result.stderr


@pytest.mark.parametrize(
    ("until", "epochs", "endless"),
    [
        ("all", (None, 1), True),
        ("all", (2, 1), False),
        ("first", (None, 1), False),
        ("first", (None, None), True),
        (5, (None, None), False),
    ],
)
def test_a_job_never_ends_by_its_sources_and_until(
    until: str | int, epochs: tuple[int | None, ...], endless: bool
) -> None:
    sources = [ov.Source(f"s{i}", "x.parquet", epochs=n) for i, n in enumerate(epochs)]
    spare = ov.Source(
        "spare", "x.parquet", epochs=None, weight=0
    )  # never drawn, so that it cannot keep a job going
    job = ov.Job(
        name="j", sources=[*sources, spare], batch=ov.Batch(samples=1, context=8), until=until
    )
    assert never_ends(job) is endless


def test_a_job_that_repeats_but_has_an_end_needs_no_steps(tmp_path: Path) -> None:
    assert (
        len(step_lines(overlord("run", job_file(tmp_path, epochs=None, until=3), "--digest"))) == 3
    )


def test_a_run_in_processes_has_the_digests_of_one_in_this_process(tmp_path: Path) -> None:
    args = [
        sys.executable,
        "-m",
        "overlord",
        "run",
        str(job_file(tmp_path)),
        "--steps",
        "3",
        "--digest",
        "--runtime",
    ]
    ran = [
        subprocess.run([*args, name], env=_env(), capture_output=True, text=True, timeout=60)
        for name in ("local", "process")
    ]
    assert [r.returncode for r in ran] == [0, 0], [r.stderr for r in ran]
    local, process = (
        [line for line in r.stdout.splitlines() if line.startswith(("step ", "digest"))]
        for r in ran
    )
    assert local == process
    assert len(local) == 4


def test_two_runs_have_equal_digests_and_another_seed_has_others(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    first, second = (step_lines(overlord("run", job, "--steps", "3", "--digest")) for _ in range(2))
    other = step_lines(overlord("run", job_file(tmp_path, seed=4), "--steps", "3", "--digest"))
    assert first == second
    assert not set(first) & set(other)


def test_a_saved_state_goes_on_where_it_was_left(tmp_path: Path) -> None:
    job, state = job_file(tmp_path), tmp_path / "state.json"
    whole = step_lines(overlord("run", job, "--steps", "6", "--digest"))
    front = step_lines(overlord("run", job, "--steps", "2", "--digest", "--save", state))
    assert json.loads(state.read_text())["step"] == 2
    assert (
        front + step_lines(overlord("run", job, "--steps", "4", "--digest", "--resume", state))
        == whole
    )


def test_one_rank_alone_gets_what_it_gets_beside_the_others(tmp_path: Path) -> None:
    job = job_file(tmp_path)
    with ov.launch(ov.Job.from_yaml(job)) as session:
        clients = [session.client(r) for r in range(2)]
        steps = [next(client) for client in clients]
        wanted = [step_digest(Taken(session.plan(0), (step,), 0.0)) for step in steps]
    found = [
        step_lines(overlord("run", job, "--steps", "1", "--rank", str(r), "--digest"))
        for r in range(2)
    ]
    assert found == [[f"step 0 {w}"] for w in wanted]
    assert wanted[0] != wanted[1]


def test_a_state_of_another_job_is_refused_by_name_unless_allowed(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    overlord("run", job_file(tmp_path), "--steps", "1", "--save", state)
    changed = job_file(tmp_path, seed=4)
    refused = overlord("run", changed, "--steps", "1", "--resume", state)
    assert refused.exit_code == 2
    assert "seed: saved 3, got 4" in refused.stderr
    assert (
        overlord("run", changed, "--steps", "1", "--resume", state, "--allow", "seed").exit_code
        == 0
    )


def test_a_state_that_cannot_be_written_is_told_before_the_run(tmp_path: Path) -> None:
    result = overlord(
        "run", job_file(tmp_path), "--digest", "--save", tmp_path / "nowhere" / "state.json"
    )
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert "step 0" not in result.stdout


def test_a_bad_job_file_shows_all_its_problems_and_no_traceback(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(
        "name: x\nsources:\n  web: {uri: 3, wieght: 1}\nbatch: {samples: 0, context: "
        "8}\nstrategie: x\n"
    )
    result = overlord("run", path)
    assert result.exit_code == 2
    for problem in (
        "strategie: expected a known field",
        "batch.samples",
        "sources.web.uri",
        "did you mean 'weight'?",
    ):
        assert problem in result.stderr
    assert "Traceback" not in result.output
    assert "Traceback" in overlord("run", path, "--debug").stderr


def test_functions_of_a_job_file_come_from_an_imported_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_functions_of_cli_test.py").write_text(
        "import overlord as ov\n\ndef short(row):\n    return len(row['tokens']) < "
        "9\n\nov.register_function('cli_test_short', short)\n"
    )
    path = job_file(tmp_path)
    job = yaml.safe_load(path.read_text())
    job["sources"]["web"]["transforms"].insert(
        0, {"filter": {"fn": "cli_test_short", "rows": True}}
    )
    path.write_text(yaml.safe_dump(job))
    monkeypatch.chdir(tmp_path)
    assert "cli_test_short" in overlord("inspect", path).stderr
    result = overlord("inspect", path, "--import", "my_functions_of_cli_test")
    assert result.exit_code == 0, result.output
    assert "dropped by a filter" in result.stdout
    assert overlord("inspect", path, "--import", "no_such_module_anywhere").exit_code == 2


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "--step", "1"),
        ("preview", "--step", "1"),
        ("explain", "--step", "1"),
        ("run", "--steps", "2"),
        ("run", "--steps", "2", "--runtime", "process"),
    ],
    ids=" ".join,
)
def test_the_strategy_of_the_how_to_page_is_used_from_a_job_file(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "howto" / "own-strategy.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    register = next(block for block in blocks if "register_function" in block)
    (tmp_path / "my_strategies.py").write_text(blocks[0] + register)
    path = job_file(tmp_path)
    job = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump({**job, "strategy": "by_memory"}))
    words = [sys.executable, "-m", "overlord", command[0], str(path), *command[1:]]
    done = subprocess.run(
        [*words, "--import", "my_strategies"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    if command[0] == "plan":
        assert "placed by by_memory" in done.stdout
    refused = overlord(*words[3:])
    assert refused.exit_code == 2
    assert "strategy: expected a known strategy, got 'by_memory'" in refused.stderr


def test_inspect_counts_what_is_there(tmp_path: Path) -> None:
    result = overlord("inspect", job_file(tmp_path))
    assert result.exit_code == 0, result.output
    web = next(
        line for line in result.stdout.splitlines() if line.startswith("web") and "parquet" in line
    )
    code = next(
        line for line in result.stdout.splitlines() if line.startswith("code") and "jsonl" in line
    )
    assert web.split()[1:5] == ["parquet", "2", "4", "60"]  # format, files, chunks, rows
    assert "tokens 1 / 12 / 23" in result.stdout
    assert "unknown until read" in code
    assert "tokens: list" in result.stdout


def test_inspect_goes_on_over_broken_sources_and_lists_them_all(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    job = yaml.safe_load(path.read_text())
    parquet = (
        Path(write_rows(tmp_path / "cut", "parquet", rows(60, 1))).parent / "part-00001.parquet"
    )
    parquet.write_bytes(parquet.read_bytes()[:-100])
    packed = (
        Path(write_rows(tmp_path / "flipped", "jsonl.gz", rows(60, 1))).parent
        / "part-00000.jsonl.gz"
    )
    packed.write_bytes(b"no gzip at all" * 20)
    lines = (
        Path(write_rows(tmp_path / "oneline", "jsonl", rows(20, 1), files=1)).parent
        / "part-00000.jsonl"
    )
    lines.write_text("this is no JSON\n" + lines.read_text())
    for name in ("cut", "flipped", "oneline", "missing"):
        job["sources"][name] = {
            "uri": str(tmp_path / name / "*"),
            "epochs": 1,
            "transforms": [{"tokens": {}}],
        }
    path.write_text(yaml.safe_dump(job))
    result = overlord("inspect", path)
    assert result.exit_code == 1
    assert "3 of 6 sources" in result.stderr
    for words in ("part-00001.parquet", "part-00000.jsonl.gz", "missing"):
        assert words in result.stderr
    assert "oneline" not in result.stderr  # one bad line is quarantined by a run; it stops nothing
    assert "1 of 21" in next(
        line for line in result.stdout.splitlines() if line.startswith("oneline")
    )
    assert "60" in next(line for line in result.stdout.splitlines() if line.startswith("web"))
    assert "Traceback" not in result.output


def test_a_full_inspection_reads_every_row(tmp_path: Path) -> None:
    path = job_file(tmp_path, slice_rows=4)
    assert "sampled 8 rows" in overlord("inspect", path).stdout
    assert "sampled 60 rows" in overlord("inspect", path, "--full").stdout


def test_the_plan_is_the_one_that_a_run_makes(tmp_path: Path) -> None:
    path = job_file(tmp_path)
    with ov.launch(ov.Job.from_yaml(path)) as session:
        steps = [step for _, step in zip(range(4), session.client(0), strict=False)]
    result = overlord("plan", path, "--step", "3")
    assert result.exit_code == 0, result.output
    assert steps[3].plan_digest in result.stdout
    assert "no placement can go below" in result.stdout


def test_a_plan_can_be_asked_for_another_place_and_strategy(tmp_path: Path) -> None:
    result = overlord(
        "plan", job_file(tmp_path), "--step", "0", "--place", "dp=4", "--strategy", "vanilla"
    )
    assert "placed by vanilla" in result.stdout
    buckets = [line.split() for line in result.stdout.splitlines() if line[:1].isdigit()]
    assert [b[0] for b in buckets] == ["0", "1", "2", "3"]
    assert {b[4] for b in buckets} == {"3"}  # 12 samples, dealt out evenly


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--step", "10"), "expected a step below 10, where the job ends, got 10"),
        (("--step", "1", "--place", "dq=4"), "'dq=4'"),
        (("--step", "1", "--place", "dp=0"), "place.dp"),
        (("--step", "1", "--strategy", "lmm_balance"), "did you mean 'llm_balance'?"),
    ],
)
def test_a_plan_that_cannot_be_says_why(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    result = overlord("plan", job_file(tmp_path), *args)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.output


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom overlord.cli.main import cli\ntry:\n    "
        "cli(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'numpy', 'pyarrow', 'rich', 'yaml', 'tokenizers', 'torch'} & "
        "set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=_env(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "inspect" in done.stdout


def test_ctrl_c_stops_a_run_saves_its_state_and_leaves_nothing(tmp_path: Path) -> None:
    state = tmp_path / "state.json"
    args = [
        "run",
        str(job_file(tmp_path, epochs=None)),
        "--steps",
        "1000000",
        "--digest",
        "--save",
        str(state),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "overlord.cli.main", *args],
        env=_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 0 ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "stopped" in err
    taken = [line for line in out.splitlines() if line.startswith("step ")]
    assert json.loads(state.read_text())["step"] >= len(taken)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # no process of its group is left


def test_a_reader_that_goes_away_is_no_traceback(tmp_path: Path) -> None:
    args = ["run", str(job_file(tmp_path, epochs=None)), "--steps", "100000", "--digest"]
    process = subprocess.Popen(
        [sys.executable, "-m", "overlord.cli.main", *args],
        env=_env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    with process.stderr:
        assert "Traceback" not in process.stderr.read()
    assert process.wait(30) == 1


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SRC), "PYTHONUNBUFFERED": "1"}
