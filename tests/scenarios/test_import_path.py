"""Files beside a job are data: no command and no process that it starts imports a module from the
working directory unasked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from overlord.import_path import module_started
from tests import rays
from tests.corpus import write_rows

SRC = Path(__file__).parents[2] / "src"
HOSTILE = (
    "zstandard",
    "json",
    "numpy",
    "pyarrow",
    "msgspec",
    "yaml",
    "click",
    "rich",
    "signal",
    "socket",
    "selectors",
    "shlex",
    "struct",
    "tempfile",
    "multiprocessing",
    "logging",
    "queue",
    "sitecustomize_of_job",
    "tokenizers",
)


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with a job whose files take zstandard and JSON to read, and modules of these names
    next to it.
    """
    pytest.importorskip("zstandard")
    desk = tmp_path / "desk"
    desk.mkdir()
    told = str(tmp_path / "executed")
    for name in HOSTILE:
        (desk / f"{name}.py").write_text(
            f"open({told!r}, 'a').write('{name} ')\nraise ImportError({name!r})\n"
        )
    rows = [{"tokens": [k] * (1 + k % 9)} for k in range(40)]
    source = {
        "uri": write_rows(tmp_path / "web", "jsonl.zst", rows),
        "transforms": [{"tokens": {}}],
        "workers": "processes",
        "epochs": 1,
    }
    plain = {
        "uri": write_rows(tmp_path / "code", "jsonl.zst", rows),
        "transforms": [{"tokens": {}}],
        "epochs": 1,
    }
    job = {
        "name": "beside",
        "sources": {"web": source, "code": plain},
        "batch": {"samples": 8, "context": 16},
    }
    (desk / "job.yaml").write_text(yaml.safe_dump(job))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "overlord").write_text(
        "import sys\nfrom overlord.cli.main import main\nsys.exit(main())\n"
    )
    return desk


def ran(desk: Path, how: str, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """The command line as the installed script starts it, or as ``python -m`` does."""
    start = [str(desk.parent / "bin" / "overlord")] if how == "script" else ["-m", how]
    env = {
        **os.environ,
        "PYTHONPATH": str(SRC),
        "OVERLORD_CACHE": str(desk.parent / "cache"),
        **settings,
    }
    env.pop("PYTHONSAFEPATH", None)
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=desk,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def executed(desk: Path) -> list[str]:
    path = desk.parent / "executed"
    return path.read_text().split() if path.exists() else []


PROCESSES = ("run", "job.yaml", "--steps", "2", "--runtime", "process")


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("script", PROCESSES),
        ("overlord", PROCESSES),
        ("overlord.cli.main", ("inspect", "job.yaml")),
    ],
    ids=["script", "package", "module"],
)
def test_modules_next_to_a_job_file_are_not_imported(
    desk: Path, how: str, words: tuple[str, ...]
) -> None:
    done = ran(desk, how, *words)
    assert done.returncode == 0, done.stderr
    assert executed(desk) == []


@pytest.mark.skipif(bool(rays.missing()), reason=rays.missing() or "it is there")
def test_workers_of_ray_import_nothing_from_the_working_directory(desk: Path) -> None:
    done = ran(desk, "script", "run", "job.yaml", "--steps", "1", "--runtime", "ray")
    assert done.returncode == 0, done.stderr
    assert executed(desk) == []


FUNCTIONS = (
    "import overlord as ov\nimport helper_of_the_job\nov.register_function('beside_short', "
    "helper_of_the_job.short)\n"
)
HELPER = """import os

def short(row):
    with open(os.environ["SEEN"], "a") as seen:
        seen.write(f"{os.environ.get('PYTHONSAFEPATH')} {os.environ['PYTHONPATH']}\\n")
    return len(row["tokens"]) < 5
"""


def test_an_import_that_is_asked_for_adds_the_working_directory_after_all_others(
    desk: Path,
) -> None:
    """Worker processes find the module, too, and have the environment of the program."""
    job: dict[str, Any] = yaml.safe_load((desk / "job.yaml").read_text())
    for source in job["sources"].values():
        source["transforms"].insert(0, {"filter": {"fn": "beside_short", "rows": True}})
    (desk / "job.yaml").write_text(yaml.safe_dump(job))
    (desk / "functions_of_the_job.py").write_text(FUNCTIONS)
    (desk / "helper_of_the_job.py").write_text(HELPER)
    refused = ran(desk, "script", "inspect", "job.yaml")
    assert refused.returncode == 2
    assert "beside_short" in refused.stderr
    seen = desk.parent / "seen"
    done = ran(desk, "script", *PROCESSES, "--import", "functions_of_the_job", SEEN=str(seen))
    assert done.returncode == 0, done.stderr
    assert executed(desk) == []
    assert set(seen.read_text().splitlines()) == {f"None {SRC}"}


@pytest.mark.parametrize("options", [[], ["-X", "dev", "-W", "ignore"], ["-Bu"]], ids=" ".join)
def test_a_package_that_imports_overlord_as_python_starts_it_keeps_the_working_directory(
    tmp_path: Path, options: list[str]
) -> None:
    """While Python imports the package of ``-m mypkg.train``, its ``sys.argv`` is that of ``-m
    overlord``.
    """
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg" / "__init__.py").write_text("import overlord\n")
    (tmp_path / "mypkg" / "train.py").write_text("import mymodel\nprint(mymodel.NAME)\n")
    (tmp_path / "mymodel.py").write_text("NAME = 'found'\n")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"} | {
        "PYTHONPATH": str(SRC)
    }
    command = [sys.executable, *options, "-m", "mypkg.train", "-m", "overlord"]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "module"),
    [
        ("-m overlord run job.yaml", "overlord"),
        ("-moverlord.cli.main", "overlord.cli.main"),
        ("-P -X dev -W ignore -m overlord", "overlord"),
        ("-Xdev -Wignore -Bum overlord", "overlord"),
        ("-BX dev -sm overlord", "overlord"),
        ("-OOmoverlord", "overlord"),
        ("--check-hash-based-pycs never -m overlord", "overlord"),
        ("-X -m -m train", "train"),
        ("-W m -mtrain -m overlord", "train"),
        ("train.py -m overlord", ""),
        ("-c pass -m overlord", ""),
        ("-Bcpass -m overlord", ""),
        ("-- train.py -m overlord", ""),
        ("- -m overlord", ""),
        ("-m", ""),
        ("", ""),
    ],
)
def test_the_module_that_python_was_told_to_start_is_read_as_python_reads_it(
    given: str, module: str
) -> None:
    assert module_started(["python", *given.split()]) == module
    assert module_started([]) == ""
