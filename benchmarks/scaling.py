"""Tokens per second by the number of loader workers, and of torch's DataLoader with as many.

    python benchmarks/scaling.py                     # 1 to 16 workers, up to all cores: minutes
    python benchmarks/scaling.py --hosts 1,2 --quick            # a quick look

Efficiency is the speed at n over n times the speed at 1. benchmarks/README.md explains the method.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from corpus import Corpus, default_folder
from overlord.setup.options import n_cores
from page import (
    Numbers,
    command_line,
    machine,
    markdown_table,
    progress,
    save,
    shown_table,
    wide_console,
)
from peers.data import corpora
from peers.measure import wait_for_idle
from peers.runner import CellFailed, Figures, run_cell
from peers.work import Work

JOB = "tokenized"
OURS, THEIRS = "overlord-process", "torch"
HOSTS = (1, 2, 4, 8, 16)
# Tokens per worker: about 12 s of its work, so that all points take equally long.
HOST_TOKENS = 6_000_000
# A point delivers at least the tokens of two workers: the read-ahead is the same for all points.
LEAST_HOSTS = 2
QUICK = 10
# Per rank and step: steps are small, so that the read-ahead is small compared with the delivery.
MICROBATCHES = 4
HEAD = (
    "loader",
    "hosts or workers",
    "ranks",
    "processes",
    "Mtok/s",
    "speed-up",
    "efficiency",
    "CPU s/Mtok",
    "whole CPU s/Mtok",
    "cores used",
    "others, cores",
    "first step s",
)


@dataclass(frozen=True, slots=True)
class Point:
    """One loader with one number of workers, and its runs."""

    peer: str
    n: int
    runs: list[Figures]

    def median(self, name: str) -> float:
        return statistics.median(getattr(run, name) for run in self.runs)

    @property
    def cores(self) -> float:
        """The number of cores that it kept busy."""
        return statistics.median(run.steady_cpu_s / run.steady_wall_s for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of the benchmark."""

    hosts: tuple[int, ...]
    ranks: int
    runs: int = 1
    host_tokens: int = HOST_TOKENS
    peers: tuple[str, ...] = (OURS, THEIRS)
    idle_s: float = 0.0
    limit_s: float = 900.0

    def work(self, peer: str, n: int, corpus: Corpus) -> Work:
        """Return the work of one point.

        All sources have the same weight, so that workers have equal work and the assignment of
        sources does not matter. A DataLoader has at least one worker per rank: with fewer workers
        there are fewer ranks, which costs it nothing.
        """
        ranks = (
            self.ranks
            if peer == OURS
            else next(r for r in range(min(n, self.ranks), 0, -1) if n % r == 0)
        )
        share = {"hosts": n} if peer == OURS else {"workers": n // ranks}
        tokens = max(n, LEAST_HOSTS) * self.host_tokens
        folder, sources = str(corpus.folder), len(corpus.sources)
        return Work(
            peer,
            JOB,
            folder,
            sources,
            tokens,
            ranks=ranks,
            microbatches=MICROBATCHES,
            equal=True,
            **share,
        )


def measure(plan: Plan, corpus: Corpus, console: Console) -> list[Point]:
    """Run round by round over all points, so that a slower machine affects all of them."""
    points = [Point(peer, n, []) for peer in plan.peers for n in plan.hosts]
    with progress(console) as shown:
        bar = shown.add_task("", total=len(points) * plan.runs)
        for _ in range(plan.runs):
            for point in points:
                shown.update(bar, description=f"{point.peer}, {point.n}")
                wait_for_idle(plan.idle_s)
                point.runs.append(run_cell(plan.work(point.peer, point.n, corpus), plan.limit_s))
                shown.advance(bar)
    return points


def rows_of(points: Sequence[Point]) -> list[list[str]]:
    """Return speed-up and efficiency relative to the loader's point with the fewest workers."""
    rows = []
    for point in points:
        first = min((p for p in points if p.peer == point.peer), key=lambda p: p.n)
        faster = point.median("speed") / first.median("speed")
        rows.append(
            [
                point.peer,
                str(point.n),
                str(point.runs[0].ranks),
                str(point.runs[0].processes),
                f"{point.median('speed'):.2f}",
                f"{faster:.2f}",
                f"{faster / (point.n / first.n):.0%}",
                f"{point.median('steady_cpu'):.2f}",
                f"{point.median('whole_cpu'):.2f}",
                f"{point.cores:.1f}",
                f"{point.median('others_cores'):.2f}",
                f"{point.median('first_step_s'):.2f}",
            ]
        )
    return rows


def page(points: Sequence[Point], today: str, command: str) -> str:
    table = markdown_table(HEAD, rows_of(points))
    words = f"Medians of {len(points[0].runs)} run(s). How to read it: `benchmarks/README.md`."
    return f"# Scaling, {today}\n\n{machine()}\n\n    {command}\n\n{words}\n\n{table}\n"


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--hosts",
    type=Numbers(),
    help="Loader hosts, and workers of the DataLoader.  [default: 1,2,4,8,16, up to the cores]",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Clients; the DataLoader has as many where it can.",
)
@click.option(
    "--sources",
    type=click.IntRange(1),
    default=32,
    show_default=True,
    help="A multiple of the hosts shares out evenly.",
)
@click.option(
    "--tokens",
    type=float,
    default=HOST_TOKENS / 1e6,
    show_default=True,
    help="Millions, for every host or worker.",
)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True)
@click.option("--peers", default=f"{OURS},{THEIRS}", show_default=True, help="Also torch-numpy.")
@click.option(
    "--quick", is_flag=True, help=f"{QUICK} times fewer tokens, one run: a look, not a measurement."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_folder,
    help="Where the data is made and kept.",
)
@click.option(
    "--limit",
    "limit_s",
    type=float,
    default=900.0,
    show_default=True,
    help="Seconds after which a cell is given up.",
)
@click.option(
    "--wait-idle",
    "idle_s",
    type=float,
    default=0.0,
    show_default=True,
    help="Seconds a cell waits for an idle machine.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every run's figures there.",
)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(
    hosts: list[int] | None,
    ranks: int,
    sources: int,
    tokens: float,
    runs: int,
    peers: str,
    quick: bool,
    data: Path,
    limit_s: float,
    idle_s: float,
    json_path: Path | None,
    saving: bool,
) -> None:
    console, today, cores = wide_console(), datetime.date.today().isoformat(), n_cores()
    wanted = tuple(hosts or (n for n in HOSTS if n <= cores))
    if max(wanted) > cores:
        console.print(
            f"[yellow]{max(wanted)} hosts on {cores} cores: they will wait for each other[/yellow]"
        )
    if max(wanted) > sources:
        raise click.BadParameter(
            f"{max(wanted)} hosts for {sources} sources: some would have nothing to do",
            param_hint="--hosts",
        )
    plan = Plan(
        hosts=wanted,
        ranks=ranks,
        runs=1 if quick else runs,
        host_tokens=int(tokens * 1e6) // (QUICK if quick else 1),
        peers=tuple(peers.split(",")),
        idle_s=idle_s,
        limit_s=limit_s,
    )
    try:
        points = measure(plan, corpora(console, data, [sources], 1)[sources], console)
    except CellFailed as failure:
        raise click.ClickException(str(failure)) from failure
    console.print(shown_table(f"{JOB}, {sources} sources", HEAD, rows_of(points)))
    console.print(machine())
    if json_path:
        found = [asdict(run) | {"hosts": point.n} for point in points for run in point.runs]
        json_path.write_text(
            json.dumps({"date": today, "machine": machine(), "runs": found}, indent=1)
        )
    if saving:
        text = page(points, today, command_line("benchmarks/scaling.py"))
        console.print(f"saved {save(f'{today}-scaling', text, {})}")


if __name__ == "__main__":
    main()
