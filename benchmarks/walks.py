"""Count the files that five walks through the package cross, with a tracer, on any checkout.

    python benchmarks/walks.py                          # this checkout
    python benchmarks/walks.py --against OLD --save     # and another one, as a table in results

A walk is what happens between two points of a program: a step on the local runtime, a step on the
process runtime, the next plan, the replacement of a killed loader worker, and ``add_source``. The
tracer records every call from a file of the package to another one, in all processes of the job. A
call through the standard library (a queue, a thread pool) counts from the last file of the package.
``(thread)`` is the caller of a function that a thread starts with.

*Files* are those entered during a walk. *Calls between files* are distinct pairs of caller and
callee. Both are medians of ``--times`` runs: timing decides which branch runs.
"""

from __future__ import annotations

import datetime
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WALKS = ("sample-local", "sample-process", "plan", "kill", "add-source")
LIMIT_S = 120.0
HEAD = ("walk", "checkout", "files", "calls between files")

PROGRAM = """
import os, sys, time
import pyarrow as pa, pyarrow.parquet as pq
import overlord as ov

walk, folder = sys.argv[1:]


def rows(name, n):
    path = os.path.join(folder, name + ".parquet")
    table = pa.table({"tokens": pa.array([[i % 50 + 1] * (i % 40 + 5) for i in range(n)])})
    pq.write_table(table, path)
    return ov.Source(name, path, transforms=[ov.Tokens("tokens")])


def window(number):
    with open(os.path.join(os.environ["OVERLORD_WALK"], "window"), "r+b") as file:
        file.write(bytes([number]))


def main():
    apart = walk not in ("sample-local",)
    job = ov.Job(
        name="walk", sources=[rows("a", 400), rows("b", 400)], seed=1, until=400,
        batch=ov.Batch(samples=8, microbatches=2, context=512),
        journal=os.path.join(folder, "journal") if apart else None,
    )
    options = {"hosts": 2} if apart else {}
    with ov.launch(job, runtime="process" if apart else "local", **options) as session:
        client = session.client(rank=0)
        if walk.startswith("sample"):
            window(1)
            step = next(client)
            for microbatch in step:
                microbatch["tokens"]
            next(client)
            window(0)
            return
        for _ in range(6):
            next(client)
        if walk == "plan":
            time.sleep(1.0)  # the prefetch window is full
            window(1)
            next(client)
            next(client)
            time.sleep(1.0)
            window(0)
        elif walk == "kill":
            actors = session.metrics()["actors"]
            name = next(a["name"] for a in actors if a["name"].startswith("loader-"))
            window(1)
            session.kill(name)
            for _ in range(12):
                next(client)
                time.sleep(0.3)
            window(0)
        else:
            source = rows("c", 400)
            time.sleep(1.0)  # the prefetch window is full: no step is planned meanwhile
            window(1)
            session.add_source(source)
            window(0)


if __name__ == "__main__":
    main()
"""


def traced(checkout: Path, walk: str) -> tuple[set[str], set[tuple[str, str]]]:
    """Run one walk; return the files and the pairs of files that it crossed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "window").write_bytes(b"\0")
        (folder / "walk.py").write_text(PROGRAM)
        source = str(checkout / "src")
        env = {
            **os.environ,
            "PYTHONPATH": f"{HERE / 'tracing'}{os.pathsep}{source}",
            "OVERLORD_WALK": name,
            "OVERLORD_WALK_SRC": source,
            "OVERLORD_CACHE": str(folder / "cache"),
        }
        command = [sys.executable, str(folder / "walk.py"), walk, name]
        subprocess.run(command, env=env, check=True, timeout=LIMIT_S, capture_output=True)
        edges: set[tuple[str, str]] = set()
        for path in folder.glob("edges-*"):
            if walk == "plan" and not _plans(path):
                continue
            for line in path.read_text().splitlines():
                _, caller, callee = line.split()
                edges.add((caller, callee))
    return {callee for _, callee in edges}, edges


def _plans(path: Path) -> bool:
    """Return whether a process ran the planner, in which the walk of a plan is counted."""
    return any(line.endswith("/planner.py") for line in path.read_text().splitlines())


def counted(checkout: Path, walk: str, times: int) -> tuple[float, float]:
    found = [traced(checkout, walk) for _ in range(times)]
    return (
        statistics.median(len(files) for files, _ in found),
        statistics.median(len(edges) for _, edges in found),
    )


def table(rows: list[tuple[str, str, float, float]]) -> str:
    lines = [f"| {' | '.join(HEAD)} |", "|---|---|---|---|"]
    lines += [f"| {walk} | {name} | {files:g} | {edges:g} |" for walk, name, files, edges in rows]
    return "\n".join(lines)


def commit_of(checkout: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() or checkout.name


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--against", type=click.Path(path_type=Path, exists=True), help="Another checkout.")
@click.option("--times", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--walks", default=",".join(WALKS), show_default=True)
@click.option("--list", "listed", is_flag=True, help="Also list the files of each walk.")
@click.option("--save", is_flag=True, help="Write the dated page to benchmarks/results.")
def main(against: Path | None, times: int, walks: str, listed: bool, save: bool) -> None:
    rows = []
    checkouts = [c.resolve() for c in (against, ROOT) if c is not None]
    for walk in walks.split(","):
        for checkout in checkouts:
            files, edges = counted(checkout, walk, times)
            rows.append((walk, commit_of(checkout), files, edges))
            click.echo(f"{walk} {commit_of(checkout)}: {files:g} files, {edges:g} calls")
            if listed:
                click.echo("  " + "\n  ".join(sorted(traced(checkout, walk)[0])))
    click.echo(table(rows))
    if save:
        sys.path.insert(0, str(HERE))
        from page import command_line
        from page import save as save_page

        date = datetime.date.today().isoformat()
        body = f"# Walks, {date}\n\n    {command_line('benchmarks/walks.py')}\n\n{table(rows)}\n"
        click.echo(f"saved: {save_page(f'{date}-walks', body, {})}")


if __name__ == "__main__":
    main()
