"""Run the suite without torch with other versions of Python, and write the table of docs/versions.md.

    python -m tests.python_versions [--envs FOLDER] PYTHON ...

``PYTHON`` is an interpreter, such as ``python3.12``. Each has a virtual environment of its own,
which is kept. Tests that need torch are left out: the CPU build of torch that the suite pins is for one
version of Python.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from tests.ray_versions import requirements, told

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
ENVS = ROOT / "build" / "python-versions"
FOLDERS = ("tests/unit", "tests/properties")
# Kills, journals and resumes on the runtimes of one machine: the rest needs torch or Ray, or hours.
SCENARIOS = ("test_runtime", "test_process", "test_failover", "test_journal_resume")
# Tests of pages and of the distribution, and all that need torch or transformers.
PAGES = ("test_docs", "test_docs_site", "test_docs_language", "test_package")
NEEDS = re.compile(r"\b(torch|transformers|tokenizers_made import OBJECTS)\b")
RAY = "2.60.0"
LIMIT_S = 7200.0
BEGIN, END = "<!-- Python: written by make python-versions -->", "<!-- end of Python -->"
HEAD = "| Python | tested on | unit tests, properties and scenarios |\n|---|---|---|"
ROW = re.compile(r"^\| (\d+\.\d+\.\d+) \|.*\|$", re.MULTILINE)


def version_of(python: str) -> str:
    """Return the version of an interpreter; exit if it does not run."""
    code = "import platform; print(platform.python_version())"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True)
        problem = found.stderr.strip() if found.returncode else ""
    except OSError as fault:
        problem = str(fault)
    if problem:
        sys.exit(
            f"PYTHONS: expected interpreters, got {python!r}: {problem.splitlines()[0]}; give their "
            "paths: make python-versions PYTHONS='/opt/python3.12/bin/python'"
        )
    return found.stdout.strip()


def environment(envs: Path, python: str) -> tuple[Path, str]:
    """Build the environment of an interpreter; return its Python and its version."""
    version = version_of(python)
    folder, wanted = envs / version, "\n".join(requirements(RAY))
    own, mark = folder / "bin" / "python", folder / ".requirements"
    if not mark.exists() or mark.read_text() != wanted:
        if not own.exists():
            subprocess.run([python, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(own), "-m", "pip", "install", "-q", *wanted.split("\n")], check=True)
        mark.write_text(wanted)
    return own, version


def test_files() -> list[str]:
    """Return the files of tests that run."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).glob("test_*.py"))]
    scenarios = [f"tests/scenarios/{name}.py" for name in SCENARIOS]
    return scenarios + [
        str(path.relative_to(ROOT))
        for path in paths
        if path.stem not in PAGES and not NEEDS.search(path.read_text(encoding="utf-8"))
    ]


def tested(envs: Path, python: str) -> tuple[str, str]:
    """Test one interpreter; return its version and its row."""
    own, version = environment(envs, python)
    settings = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "OVERLORD_CACHE": str(ROOT / "build" / "cache"),
    }
    command = [str(own), "-m", "pytest", "-q", "-n", "2", *test_files()]
    done = subprocess.run(
        command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=LIMIT_S
    )
    (envs / f"{version}.log").write_text(done.stdout + done.stderr)
    last = [line for line in done.stdout.splitlines() if line.strip()][-1]
    row = f"| {version} | {date.today().isoformat()} | {told(done.returncode, last)} |"
    return version, row


def known(page: str) -> dict[str, str]:
    """Return the rows of a page by version."""
    block = page[page.index(BEGIN) : page.index(END)]
    return {found[1]: found[0] for found in ROW.finditer(block)}


def written(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with this table."""
    ordered = sorted(rows, key=lambda version: [int(part) for part in version.split(".")])
    table = "\n".join([BEGIN, HEAD, *(rows[version] for version in ordered), END])
    return page[: page.index(BEGIN)] + table + page[page.index(END) + len(END) :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+")
    parser.add_argument("--envs", type=Path, default=ENVS)
    args, failed = parser.parse_args(), False
    args.envs.mkdir(parents=True, exist_ok=True)
    for python in args.pythons:
        version, row = tested(args.envs, python)
        print(row, flush=True)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, {**known(page), version: row}), encoding="utf-8")
        failed = failed or "failed" in row or "error" in row or "exit code" in row
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
