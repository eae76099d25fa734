"""Memory of one more rank: clients of the process runtime, and a DataLoader in every rank.

    python benchmarks/rank_memory.py       # 2 and 8 ranks at 5, 100 and 300 sources: minutes
    python benchmarks/rank_memory.py --sources 5 --jobs null --quick    # a quick look
    python benchmarks/rank_memory.py --sources 5,100 --rounds 3         # medians of three rounds

The peak of a loader worker varies by tens of MB, so medians are better. Memory is the PSS over all
processes, minus that after their imports. The slope between the smallest and the largest number of
ranks is the price of a rank: its client, and the memory of workers for larger steps.
benchmarks/README.md explains the method.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from corpus import Corpus, default_folder
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
from peers.runner import CellFailed, Figures, run_cell
from peers.work import Work

OURS, THEIRS = (
    ("overlord-process", "overlord-process-shuffled"),
    "torch",
)  # shuffling is the default; torch reads in order
RANK_TOKENS = {"null": 6_000_000, "tokenized": 500_000}  # of every rank
RANK_TOKENS_PER_SOURCE = {
    "null": 60_000,
    "tokenized": 10_000,
}  # at least: the rarest source is opened too, and memory has come to rest
QUICK = 10
TARGET = 0.1  # of what a colocated DataLoader takes
HEAD = (
    "job",
    "sources",
    "loader",
    "ranks",
    "processes",
    "MB over imports",
    "with imports MB",
    "clients MB",
    "clients over imports MB",
)
SLOPES = (
    "job",
    "sources",
    "loader",
    "MB over imports a rank",
    "with imports MB a rank",
    "clients over imports MB a rank",
    f"x {THEIRS}",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The memory of one more rank, in MB."""

    job: str
    n_sources: int
    peer: str
    pss: float
    over_idle: float
    clients: float

    @staticmethod
    def of(runs: Sequence[Figures]) -> Slope:
        """Compute the slope from the medians of the runs with the fewest and the most ranks."""
        least, most = min(run.ranks for run in runs), max(run.ranks for run in runs)

        def slope(what: Callable[[Figures], float]) -> float:
            few, many = (
                statistics.median(what(run) for run in runs if run.ranks == ranks)
                for ranks in (least, most)
            )
            return (many - few) / max(1, most - least)

        return Slope(
            job=runs[0].job,
            n_sources=runs[0].n_sources,
            peer=runs[0].peer,
            pss=slope(lambda run: run.pss_mb),
            over_idle=slope(lambda run: run.over_idle_mb),
            clients=slope(clients_over_idle),
        )


def clients_over_idle(run: Figures) -> float:
    return run.clients_pss_mb - run.clients_idle_mb


def tokens(job: str, n_sources: int, ranks: int, share: int) -> int:
    return ranks * max(RANK_TOKENS[job], RANK_TOKENS_PER_SOURCE[job] * n_sources) // share


def measure(
    data: dict[int, Corpus],
    jobs: Sequence[str],
    ranks: Sequence[int],
    peers: Sequence[str],
    share: int,
    limit_s: float,
    console: Console,
    rounds: int = 1,
) -> list[Figures]:
    runs, cells = (
        [],
        [
            (job, n, peer, r)
            for job in jobs
            for n in data
            for peer in peers
            for r in ranks
            for _ in range(rounds)
        ],
    )
    with progress(console) as shown:
        bar = shown.add_task("", total=len(cells))
        for job, n, peer, r in cells:
            shown.update(bar, description=f"{job}, {n} sources: {peer}, {r} ranks")
            runs.append(
                run_cell(
                    Work(peer, job, str(data[n].folder), n, tokens(job, n, r, share), ranks=r),
                    limit_s,
                )
            )
            shown.advance(bar)
    return runs


def row_of(run: Figures) -> list[str]:
    served = run.clients_pss_mb > 0
    clients = [f"{run.clients_pss_mb:.0f}", f"{clients_over_idle(run):.0f}"] if served else ["", ""]
    memory = [f"{run.over_idle_mb:.0f}", f"{run.pss_mb:.0f}"]
    return [
        run.job,
        str(run.n_sources),
        run.peer,
        str(run.ranks),
        str(run.processes),
        *memory,
        *clients,
    ]


def slope_rows(runs: Sequence[Figures]) -> list[list[str]]:
    """Return a line per loader; its last cell is the price of a rank over that of a DataLoader."""
    keys = dict.fromkeys((run.job, run.n_sources, run.peer) for run in runs)
    slopes = {
        key: Slope.of([run for run in runs if (run.job, run.n_sources, run.peer) == key])
        for key in keys
    }
    rows = []
    for (job, n, peer), slope in slopes.items():
        theirs = slopes.get((job, n, THEIRS))
        ratio = (
            f"{slope.over_idle / theirs.over_idle:.2f}"
            if theirs is not None and theirs.over_idle > 0
            else ""
        )
        clients = f"{slope.clients:.1f}" if peer in OURS else ""
        rows.append(
            [job, str(n), peer, f"{slope.over_idle:.1f}", f"{slope.pss:.1f}", clients, ratio]
        )
    return rows


def page(runs: Sequence[Figures], today: str, command: str) -> str:
    found = markdown_table(HEAD, [row_of(run) for run in runs])
    slopes = markdown_table(SLOPES, slope_rows(runs))
    target = f"Target: at most {TARGET:g} of a colocated DataLoader's."
    return (
        f"# Memory of a rank, {today}\n\n{machine()}\n\n    {command}\n\n## One more "
        f"rank\n\n{slopes}\n\n{target}\n\n## Runs\n\n{found}\n"
    )


@click.command(help=__doc__.split("\n")[0])
@click.option("--sources", type=Numbers(), default="5,100,300", show_default=True)
@click.option("--jobs", default="null,tokenized", show_default=True)
@click.option("--ranks", type=Numbers(), default="2,8", show_default=True)
@click.option("--peers", default=",".join((*OURS, THEIRS)), show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Runs of each cell; slopes are of their medians.",
)
@click.option(
    "--quick", is_flag=True, help=f"{QUICK} times fewer tokens: a look, not a measurement."
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
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every run's figures there.",
)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(
    sources: list[int],
    jobs: str,
    ranks: list[int],
    peers: str,
    rounds: int,
    quick: bool,
    data: Path,
    limit_s: float,
    json_path: Path | None,
    saving: bool,
) -> None:
    console, today = wide_console(), datetime.date.today().isoformat()
    try:
        found = corpora(console, data, sources, 1)
        runs = measure(
            found,
            jobs.split(","),
            ranks,
            peers.split(","),
            QUICK if quick else 1,
            limit_s,
            console,
            rounds,
        )
    except CellFailed as failure:
        raise click.ClickException(str(failure)) from failure
    console.print(shown_table("runs", HEAD, [row_of(run) for run in runs]))
    console.print(shown_table("one more rank", SLOPES, slope_rows(runs)))
    if json_path:
        json_path.write_text(
            json.dumps(
                {"date": today, "machine": machine(), "runs": [asdict(run) for run in runs]},
                indent=1,
            )
        )
    if saving:
        text = page(runs, today, command_line("benchmarks/rank_memory.py"))
        console.print(f"saved {save(f'{today}-rank-memory', text, {})}")


if __name__ == "__main__":
    main()
