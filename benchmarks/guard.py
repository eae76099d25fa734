"""Count instructions and cache misses of a small null job; fail if either grew by more than 5 %.

    python benchmarks/guard.py                 # compares this checkout with guard.json
    python benchmarks/guard.py --against OLD   # compares it with another checkout, in any versions
    python benchmarks/guard.py --update        # stores the figures of this checkout in guard.json

Valgrind counts, so the load of the machine does not matter. Each figure is the difference of two
runs of different lengths: the start-up cancels out. Instructions grow with Python calls; misses of
the data cache, which is simulated, grow with copies. benchmarks/README.md has the method.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
STORED = HERE / "guard.json"
JOB = HERE / "guarding" / "null_job.py"
STEPS = (10, 210)  # of the two runs
LIMIT = 0.05  # growth that fails
LIMIT_S = 1_800.0  # of one run
KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH")  # all other variables could change the count
# Caches to simulate: bytes, ways, bytes of a line. They are fixed, or they would be the machine's.
CACHES = ("--I1=32768,8,64", "--D1=32768,8,64", "--LL=33554432,16,64")
# name -> the line of valgrind with its count
COUNTED = {"instructions": r"I\s+refs", "misses": r"D1\s+misses"}
FIXED = {
    "PYTHONHASHSEED": "0",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "LC_ALL": "C.UTF-8",
}


@dataclass(frozen=True, slots=True)
class Figures:
    """The counts of the steps between the two runs, and the conditions under which they hold."""

    counts: Mapping[str, int]  # by the names of ``COUNTED``
    tokens: int
    conditions: Mapping[str, str]

    def per_token(self, name: str) -> str:
        return f"{self.counts[name] / self.tokens:.3f}"

    @property
    def text(self) -> str:
        return ", ".join(f"{self.per_token(name)} {name} a token" for name in self.counts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison as text; ``failed`` if a count grew too much."""

    text: str
    failed: bool = False


def counts_in(output: str) -> dict[str, int]:
    """Return the counts that valgrind reports; raise ``ValueError`` if one is missing."""
    counts = {}
    for name, line in COUNTED.items():
        found = re.search(rf"^==\d+== {line}:\s+([\d,]+)(?: |$)", output, re.MULTILINE)
        if found is None:
            last = output.strip().splitlines()[-1:] or ["nothing"]
            raise ValueError(f"valgrind: expected a line with {name}, got {last[0]!r} at the end")
        counts[name] = int(found[1].replace(",", ""))
    return counts


def differences(stored: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the conditions that differ, as texts."""
    names = dict.fromkeys((*stored, *here))
    pairs = ((name, stored.get(name, "none"), here.get(name, "none")) for name in names)
    return [f"{name}: {old}, here {new}" for name, old, new in pairs if old != new]


def not_compared(stored: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return why stored figures say nothing about counts made here; None if they do."""
    if not (found := differences(stored, here)):
        return None
    return (
        f"not compared: the stored figures were counted under other conditions ({'; '.join(found)}). "
        "Compare two checkouts here with --against OLD, or store the figures anew with --update"
    )


def compare(old: Figures, new: Figures, limit: float = LIMIT) -> Verdict:
    """Return whether a new count exceeds the old one by more than ``limit``."""
    if old.tokens != new.tokens:
        raise ValueError(f"tokens of the job: expected {old.tokens}, got {new.tokens}")
    texts, failed, better = list[str](), False, False
    for name, before in old.counts.items():
        growth, most = new.counts[name] - before, limit * before
        texts.append(
            f"{new.per_token(name)} {name} a token, {growth / before:+.2%} from "
            f"{old.per_token(name)}"
        )
        failed, better = failed or growth > most, better or growth < -most
    text = "; ".join(texts)
    if failed:
        remedy = "find the cause with benchmarks/profile_hot_path.py, or accept it with --update"
        return Verdict(
            f"null job: expected growth of at most {limit:.0%}, got {text}; {remedy}", True
        )
    if better:
        text += "; store the better figures with --update, or growth from them goes unnoticed"
    return Verdict(text)


def read_figures(text: str) -> Figures:
    return Figures(**json.loads(text))


def written(figures: Figures) -> str:
    return json.dumps(asdict(figures), indent=2) + "\n"


# ----------------------------------------------------------------------------
# Count.


def valgrind() -> str:
    """Return the path of valgrind; raise with the remedy if there is none."""
    if (path := shutil.which("valgrind")) is None:
        raise click.ClickException(
            "valgrind: expected it on the PATH, got none; install it, on Debian and Ubuntu with "
            "`apt install valgrind`"
        )
    return path


def conditions_here() -> dict[str, str]:
    """Return everything but the package that the count depends on."""
    version = subprocess.run(
        [valgrind(), "--version"], capture_output=True, text=True, check=True, timeout=60
    )
    cpuinfo = Path("/proc/cpuinfo")
    wide = cpuinfo.exists() and " avx2 " in cpuinfo.read_text()
    return {
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "pyarrow": metadata.version("pyarrow"),
        "valgrind": version.stdout.strip().removeprefix("valgrind-"),
        "libc": " ".join(platform.libc_ver()),
        "cpu": platform.machine() + (" avx2" if wide else ""),
        "steps": f"{STEPS[0]} and {STEPS[1]}",
        "caches": " ".join(CACHES),
        "job": hashlib.sha256(JOB.read_bytes()).hexdigest()[:12],
    }


def run_job(command: list[str], steps: int, source: Path, folder: Path) -> tuple[int, str]:
    """Run the job with the package of ``source``; return its tokens and its error output."""
    environment = {name: os.environ[name] for name in KEPT if name in os.environ} | FIXED
    environment |= {"PYTHONPATH": str(source), "OVERLORD_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [*command, sys.executable, str(JOB), str(folder / "data"), str(steps)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    taken, _, tokens = done.stdout.partition(" ")
    if done.returncode or taken != str(steps):
        raise click.ClickException(
            f"null job: expected {steps} steps, got exit code {done.returncode} and "
            f"{done.stdout.strip()!r}\n{done.stderr[-2000:]}"
        )
    return int(tokens), done.stderr


def count(root: Path, conditions: Mapping[str, str]) -> Figures:
    """Count the job with the package of a checkout."""
    source = root / "src"
    if not (source / "overlord").is_dir():
        raise click.ClickException(f"{root}: expected a checkout with src/overlord, got none")
    # threads take turns in a fixed order
    counter = [valgrind(), "--tool=cachegrind", "--cache-sim=yes", *CACHES, "--fair-sched=yes"]
    counter.append("--cachegrind-out-file=/dev/null")
    with tempfile.TemporaryDirectory(prefix="overlord-guard-") as folder:
        # makes the data, and compiles modules that the first count would compile otherwise
        run_job([], STEPS[0], source, Path(folder))
        runs = [run_job(counter, steps, source, Path(folder)) for steps in STEPS]
    try:
        short, long = (counts_in(output) for _, output in runs)
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    return Figures(
        counts={name: long[name] - short[name] for name in COUNTED},
        tokens=runs[1][0] - runs[0][0],
        conditions=dict(conditions),
    )


@click.command(help=(__doc__ or "").split("\n")[0])
@click.option("--update", is_flag=True, help="Store the figures of this checkout.")
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Count this checkout too, and compare with it.",
)
def main(update: bool, against: Path | None) -> None:
    conditions = conditions_here()
    if update:
        figures = count(HERE.parent, conditions)
        STORED.write_text(written(figures), encoding="utf-8")
        click.echo(f"stored {figures.text} in {STORED.name}")
        return
    if against is not None:
        old = count(against.resolve(), conditions)
    else:
        old = read_figures(STORED.read_text(encoding="utf-8"))
        if (reason := not_compared(old.conditions, conditions)) is not None:
            click.echo(reason, err=True)
            return
    verdict = compare(old, count(HERE.parent, conditions))
    if verdict.failed:
        raise click.ClickException(verdict.text)
    click.echo(verdict.text)


if __name__ == "__main__":
    main()
