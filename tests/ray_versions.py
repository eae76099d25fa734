"""Run the scenarios on Ray, and the demo, with every version of Ray that is supported, and write
the table of docs/ray.md.

    python -m tests.ray_versions [--envs FOLDER] [VERSION ...]

Each version has a virtual environment of its own, which is kept. Versions are tested one after
another; rows of others stay.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path

from overlord.ray.versions import TESTED, minor

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ray.md"
ENVS = ROOT / "build" / "ray-versions"
SCENARIOS = ("tests/scenarios/test_ray.py", "tests/scenarios/test_ray_private.py")
# Parts of the test extra that these scenarios do not need. Some of them would install torch.
LEFT_OUT = (
    "ray",
    "transformers",
    "torchdata",
    "accelerate",
    "lightning",
    "build",
    "hatchling",
    "ruff",
    "mypy",
    "types-PyYAML",
)
LIMIT_S = 3600.0
BEGIN, END = "<!-- ray versions: written by make ray-versions -->", "<!-- end of ray versions -->"
HEAD = (
    "| Ray | tested on | Python | scenarios | `overlord demo --runtime ray` "
    "|\n|---|---|---|---|---|"
)
ROW = re.compile(r"^\| (\d+\.\d+\.\d+) \|.*\|$", re.MULTILINE)


def requirements(version: str) -> list[str]:
    """Return what an environment holds: the pins of the test extra, with this version of Ray."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    kept = [pin for pin in extras["test"] if re.split(r"[=<>\[]", pin)[0] not in LEFT_OUT]
    return [f"ray=={version}", *kept]


def environment(envs: Path, version: str) -> Path:
    """Build the environment of a version, unless it is there; return its Python."""
    folder, wanted = envs / f"ray-{version}", "\n".join(requirements(version))
    python, mark = folder / "bin" / "python", folder / ".requirements"
    if not mark.exists() or mark.read_text() != wanted:
        if not python.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *wanted.split("\n")], check=True)
        mark.write_text(wanted)
    return python


def run(command: Sequence[str], log: Path) -> tuple[int, str]:
    """Run a command of an environment in the repository; return its exit code and last line."""
    settings = {
        "OVERLORD_TEST_WAIT_S": "150",
        "OVERLORD_CACHE": str(ROOT / "build" / "cache"),
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
    }
    with log.open("w") as out:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                env=settings,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=LIMIT_S,
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return code, lines[-1] if lines else ""


def told(code: int, last: str) -> str:
    """Return the result of a pytest run in a few words."""
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)
    return ", ".join(f"{n} {what}" for n, what in counts) or (
        f"exit code {code}" if code else "passed"
    )


def tested(envs: Path, version: str) -> str:
    """Test one version; return its row."""
    python, logs = environment(envs, version), ROOT / "build" / "ray-versions-logs"
    logs.mkdir(parents=True, exist_ok=True)
    number = subprocess.run(
        [str(python), "-c", "import platform; print(platform.python_version())"],
        capture_output=True,
        text=True,
        check=True,
    )
    scenarios = told(*run([str(python), "-m", "pytest", *SCENARIOS], logs / f"{version}.log"))
    out = ROOT / "build" / "ray-versions-demo" / version
    code, _ = run(
        [str(python), "-m", "overlord.cli.main", "demo", "--runtime", "ray", "--out", str(out)],
        logs / f"{version}-demo.log",
    )
    demo = "passed" if code == 0 else f"exit code {code}"
    return (
        f"| {version} | {date.today().isoformat()} | {number.stdout.strip()} | {scenarios} | "
        f"{demo} |"
    )


def table(rows: Mapping[str, str]) -> str:
    """Return the table, newest version first."""
    ordered = sorted(rows, key=lambda version: (minor(version), version), reverse=True)
    return "\n".join([BEGIN, HEAD, *(rows[version] for version in ordered), END])


def known(page: str) -> dict[str, str]:
    """Return the rows of a page by version."""
    block = page[page.index(BEGIN) : page.index(END)]
    return {found[1]: found[0] for found in ROW.finditer(block)}


def written(page: str, rows: Mapping[str, str]) -> str:
    """Return the page with this table."""
    return page[: page.index(BEGIN)] + table(rows) + page[page.index(END) + len(END) :]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("versions", nargs="*", default=TESTED)
    parser.add_argument("--envs", type=Path, default=ENVS)
    args, failed = parser.parse_args(), False
    for version in args.versions:
        row = tested(args.envs, version)
        print(row, flush=True)
        page = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(written(page, {**known(page), version: row}), encoding="utf-8")
        failed = failed or "failed" in row or "error" in row or "exit code" in row
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
