"""Compare two checkouts on one machine: throughput, memory, faults, journal, channel and planning.

    python benchmarks/regression.py --against OLD --rounds 3 --save

Every program runs in both checkouts, alternately; the order changes from round to round. A value
is the median over all rounds. Throughput and channel are ratios to a bare loop and to a bare
``memcpy`` of the same run, so that the state of the machine cancels out.

Each checkout runs its own programs with its own sources. The pages that they write go to a copy of
the checkout's ``benchmarks/results`` and are removed again.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LIMIT_S = 1_800.0
LARGE = 0.05  # a change that the page marks
HEAD = ("measure", "unit", "old", "new", "new / old", "spread")

Values = dict[str, float]  # name and unit, separated by a tab -> value


@dataclass(frozen=True)
class Program:
    """A benchmark program, its arguments, and the values in its output."""

    name: str
    arguments: tuple[str, ...]
    read: Callable[[Path, str], Values]  # from its JSON file or its page, and its output
    page: bool = False  # it writes a page instead of a JSON file


def throughput(path: Path, _: str) -> Values:
    runs = json.loads(path.read_text())["runs"]
    cost: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for run in runs:
        key = run["job"], run["n_sources"], run["peer"]
        cost[key].append(run["steady_cpu_s"] / run["steady_tokens"])
    return {
        f"{job}, {n} sources, {peer}: CPU per token\tx bare loop": statistics.mean(costs)
        / statistics.mean(cost[job, n, "bare"])
        for (job, n, peer), costs in cost.items()
        if peer != "bare"
    }


def memory(path: Path, _: str) -> Values:
    return {
        f"{cell['case']['kind']}, {cell['case']['n_sources']} sources, "
        f"{cell['case']['ranks']} ranks: memory over imports\tMB": cell["over_mb"]
        for cell in json.loads(path.read_text())["cells"]
    }


def channel(path: Path, _: str) -> Values:
    cost: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for block in json.loads(path.read_text()):
        key = block["way"], block["mode"], block["nbytes"]
        cost[key].append(block["cpu_s"] / block["messages"])
    bare = {size: statistics.median(c) for (way, _, size), c in cost.items() if way == BARE}
    return {
        f"{way}, {mode}, {size >> 20} MiB: CPU\tx memcpy": statistics.median(costs) / bare[size]
        for (way, mode, size), costs in cost.items()
        if not way.startswith(BARE)
    }


BARE = "bare memcpy"


def planning(_: Path, output: str) -> Values:
    return {
        f"{row['samples']:,} samples on {row['ranks']:,} ranks\tCPU ms": row["cpu_ms_median"]
        for row in json.loads(output[output.index("[") :])
    }


def journal(path: Path, _: str) -> Values:
    found: Values = {}
    for row in tables(path.read_text()):
        if row.get("way", "").startswith("journal, bytes"):
            found[f"append of {row['bytes']}: CPU\tus"] = float(row["CPU us"])
        elif "CPU us a plan" in row:
            name = f"{row['job']} job, {row['sources']} sources: CPU per plan"
            found[f"{name}\tus"] = float(row["CPU us a plan"])
    return found


def faults(path: Path, _: str) -> Values:
    found: Values = {}
    for row in tables(path.read_text()):
        if "fetch ms: median" not in row:
            continue
        if row["bytes"] != "equal":
            raise click.ClickException(f"{path.name}: {row['run']}: the bytes differ")
        name = f"{row['run']}, prefetch {row['prefetch']}"
        found[f"{name}: median fetch\tms"] = float(row["fetch ms: median"])
        if recovered := re.match(r"[\d.]+", next(v for k, v in row.items() if "after s" in k)):
            found[f"{name}: recovered after\ts"] = float(recovered[0])
    return found


def tables(text: str) -> Iterator[dict[str, str]]:
    """Yield the rows of all Markdown tables of a page, as column -> cell."""
    head: list[str] = []
    for line in text.splitlines():
        if not line.startswith("|"):
            head = []
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not head:
            head = cells
        elif set(line) - set("|-: "):
            yield dict(zip(head, cells, strict=True))


PROGRAMS = (
    Program("planning", ("--seeds", "2", "--repeat", "5", "--json"), planning),
    Program("channel", ("--ways", "ring,tcp,pair", "--sizes", "1,16", "--rounds", "5"), channel),
    Program("journal", ("--appends", "300", "--seconds", "4", "--save"), journal, page=True),
    Program(
        "throughput",
        (
            *("--sources", "5,100", "--jobs", "null,tokenized", "--pairs", "1"),
            *("--peers", "bare,overlord,overlord-process"),
        ),
        throughput,
    ),
    Program(
        "memory",
        (
            *("--sources", "300", "--ranks", "8", "--workers", "1", "--shuffle", "on"),
            *("--kinds", "local,process", "--no-extras"),
        ),
        memory,
    ),
    Program(
        "faults",
        ("--loaders", "12", "--killed", "4", "--steps", "45", "--step-s", "0.2", "--save"),
        faults,
        page=True,
    ),
)


def run(program: Program, checkout: Path) -> Values:
    """Run a program in a checkout and return its values."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        arguments = list(program.arguments)
        if not program.page and "--json" not in arguments:
            arguments += ["--json", str(found)]
        results = checkout / "benchmarks" / "results"
        before = {p: p.read_bytes() for p in results.rglob("*") if p.is_file()}
        done = subprocess.run(
            [sys.executable, str(checkout / "benchmarks" / f"{program.name}.py"), *arguments],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout / "src")},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if done.returncode:
            raise click.ClickException(f"{program.name} in {checkout}: {done.stderr[-2_000:]}")
        if not program.page:
            return program.read(found, done.stdout)
        made = [p for p in results.rglob("*") if p.is_file() and before.get(p) != p.read_bytes()]
        try:
            return program.read(next(p for p in made if p.suffix == ".md"), done.stdout)
        finally:
            for path in made:
                path.write_bytes(before[path]) if path in before else path.unlink()


def rows_of(
    program: Program, old: list[Values], new: list[Values]
) -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield the rows of a program: medians, their ratio, and the spread of the old rounds."""
    for key in old[0]:
        name, unit = key.split("\t")
        before = [values[key] for values in old if key in values]
        after = [values[key] for values in new if key in values]
        if not after:
            continue
        a, b = statistics.median(before), statistics.median(after)
        ratio = b / a if a else 1.0
        marked = f"**{ratio:.2f}**" if ratio > 1 + LARGE else f"{ratio:.2f}"
        spread = (max(before) - min(before)) / a if a else 0.0
        yield f"{program.name}: {name}", unit, f"{a:.4g}", f"{b:.4g}", marked, f"{spread:.0%}"


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option(
    "--against",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    required=True,
    help="The old checkout.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--only", default=",".join(p.name for p in PROGRAMS), show_default=True)
@click.option("--save", is_flag=True, help="Write the dated page to benchmarks/results.")
def main(against: Path, rounds: int, only: str, save: bool) -> None:
    sys.path.insert(0, str(HERE))
    from page import command_line, machine, markdown_table
    from page import save as save_page

    old, new, found = against.resolve(), ROOT, list[tuple[str, str, str, str, str, str]]()
    for program in (p for p in PROGRAMS if p.name in only.split(",")):
        values: dict[Path, list[Values]] = {old: [], new: []}
        for number in range(rounds):
            for checkout in (old, new) if number % 2 == 0 else (new, old):
                start = time.monotonic()
                values[checkout].append(run(program, checkout))
                side = "old" if checkout == old else "new"
                took = time.monotonic() - start
                click.echo(f"{program.name}, round {number + 1}, {side}: {took:.0f} s", err=True)
        found += list(rows_of(program, values[old], values[new]))
        click.echo(markdown_table(HEAD, found))
    if save:
        date = datetime.date.today().isoformat()
        note = (
            f"Medians of {rounds} alternating rounds. *Spread*: largest less smallest value of the "
            f"old checkout, as a part of its median. Bold: more than {LARGE:.0%} above the old value."
        )
        body = (
            f"# Old and new commit, {date}\n\n    {command_line('benchmarks/regression.py')}\n\n"
            f"{note}\n\n{markdown_table(HEAD, found)}\n\n{machine()}\n"
        )
        click.echo(f"saved: {save_page(f'{date}-regression', body, {})}")


if __name__ == "__main__":
    main()
