"""One job through Overlord, a bare loop, torchdata.nodes and torch's DataLoader, on the same data.

    python benchmarks/throughput.py                                 # everything, about an hour
    python benchmarks/throughput.py --sources 5 --pairs 1 --quick   # about two minutes
    python benchmarks/throughput.py --sources 100 --jobs tokenized --peers overlord-process \\
        --arenas 2,5,16,64      # malloc arenas

All peers do the job for the same number of ranks, by default 8, with the same tokens per rank and
step. The bare loop packs for no particular rank, so its cost per token is that of the job for any
number of ranks; its first step is that of 8. benchmarks/README.md explains the method and the
columns.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console
from rich.table import Table

from corpus import Corpus, default_folder
from page import Numbers, progress, save, wide_console
from peers.cell import MODULES
from peers.data import corpora
from peers.measure import wait_for_idle
from peers.runner import SERVED, CellFailed, Figures, run_cell
from peers.work import Work

TOKENS = {"null": 200_000_000, "tokenized": 8_000_000}  # 5 to 20 seconds per cell on two cores
TOKENS_PER_SOURCE = {
    "null": 700_000,
    "tokenized": 80_000,
}  # at least, so that most sources are read on and not just opened
# Times the CPU of the bare loop: with less than this, and more over the whole run, the work was
# done before the measured part.
UNSTEADY = 0.9
QUICK = 10  # times fewer tokens
RANKS = 8
UNSTEADY_NOTE = (
    "* not steady: this part of the run lived on what was read ahead before it; use the "
    "whole run, or more tokens"
)
HEADINGS = (
    "job",
    "sources",
    "loader",
    "CPU s/Mtok",
    "x bare",
    "above bare, us/tok",
    "whole x bare",
    "start-up CPU s",
    "first step s",
    "Mtok/s",
    "MB over imports",
    "with imports MB (clients)",
    "processes",
    "Mtok a run",
    "others, cores",
)


@dataclass(frozen=True, slots=True)
class Amount:
    """The number of tokens that a cell delivers."""

    given: dict[str, int]  # by job; the rest follows the number of sources
    share: int = 1  # one n-th of it
    overlord_times: int = 1

    def tokens(self, job: str, n_sources: int, peer: str) -> int:
        wanted = self.given.get(job) or max(TOKENS[job], TOKENS_PER_SOURCE[job] * n_sources)
        return wanted // self.share * (self.overlord_times if peer.startswith("overlord") else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Paired:
    """One run of a peer, and the bare runs directly before and after it."""

    run: Figures
    before: Figures
    after: Figures

    @property
    def bare_cpu(self) -> float:
        """The mean CPU of the bare runs before and after: a slower machine affects both."""
        return (self.before.steady_cpu + self.after.steady_cpu) / 2

    @property
    def ratio(self) -> float:
        return self.run.steady_cpu / self.bare_cpu

    @property
    def whole_ratio(self) -> float:
        """The ratio of the total CPU, with start-up and tokens that were read but not delivered."""
        return self.run.whole_cpu / ((self.before.whole_cpu + self.after.whole_cpu) / 2)

    @property
    def above_us(self) -> float:
        return (
            self.run.steady_cpu - self.bare_cpu
        )  # seconds per million tokens are microseconds per token


@dataclass(frozen=True, slots=True)
class Setting:
    """A job at a number of sources, with its runs in order: bare, peer, bare, peer, ..., bare."""

    job: str
    n_sources: int
    runs: list[Figures]

    def of(self, peer: str) -> list[Figures]:
        return [run for run in self.runs if run.peer == peer]

    def paired(self, peer: str) -> list[Paired]:
        return [
            Paired(run=run, before=self.runs[i - 1], after=self.runs[i + 1])
            for i, run in enumerate(self.runs)
            if run.peer == peer and 0 < i < len(self.runs) - 1
        ]


def order_of_cells(peers: Sequence[str], pairs: int) -> list[str]:
    """Run every peer between two bare runs; the order of peers changes from round to round."""
    others = [peer for peer in peers if peer != "bare"]
    rounds = (
        [others[r % len(others) :] + others[: r % len(others)] for r in range(pairs)]
        if others
        else [["bare"]] * (pairs - 1)
    )
    cells = ["bare"]
    for peer in (peer for one in rounds for peer in one):
        cells += [peer, "bare"] if peer != "bare" else ["bare"]
    return cells


def with_arenas(peers: Sequence[str], arenas: Sequence[int]) -> list[str]:
    """Return the peers; those of Overlord also with every given number of malloc arenas.

    Such a label is ``overlord-process@64``.
    """
    return [
        name
        for peer in peers
        for name in (peer, *(f"{peer}@{n}" for n in arenas if peer.startswith("overlord")))
    ]


def parts_of(label: str) -> tuple[str, int]:
    """Return the peer of a label, and its malloc arenas; 0: the default."""
    peer, _, arenas = label.partition("@")
    return peer, int(arenas or 0)


def measure(
    found: dict[int, Corpus],
    jobs: Sequence[str],
    cells: Sequence[str],
    amount: Amount,
    ranks: int,
    seed: int,
    limit_s: float,
    idle_s: float,
    console: Console,
) -> list[Setting]:
    """Run all cells, one at a time: two at once would disturb each other."""
    settings = [Setting(job, n, []) for job in jobs for n in found]
    with progress(console) as shown:
        bar = shown.add_task("", total=len(settings) * len(cells))
        for setting in settings:
            for peer in cells:
                shown.update(bar, description=f"{setting.job}, {setting.n_sources} sources: {peer}")
                tokens = amount.tokens(setting.job, setting.n_sources, peer)
                folder, (name, arenas) = str(found[setting.n_sources].folder), parts_of(peer)
                work = Work(
                    name,
                    setting.job,
                    folder,
                    setting.n_sources,
                    tokens,
                    ranks=ranks,
                    seed=seed,
                    arenas=arenas,
                )
                wait_for_idle(idle_s)
                setting.runs.append(run_cell(work, limit_s))
                shown.advance(bar)
            shown.console.print(_table(setting, list(dict.fromkeys(cells))))
    return settings


def rows_of(setting: Setting, peers: Sequence[str]) -> list[list[str]]:
    """Return the lines of one setting: medians, and for ratios also the spread."""
    rows = []
    for peer in peers:
        runs, paired = setting.of(peer), setting.paired(peer) if peer != "bare" else []
        row = [setting.job, str(setting.n_sources), peer, _median(runs, "steady_cpu", ".4f")]
        if paired:
            early = (
                statistics.median(p.ratio for p in paired) < UNSTEADY
                and statistics.median(p.whole_ratio for p in paired) > 1
            )
            star = "* " if early else ""
            row += [
                star + _spread([p.ratio for p in paired], ".2f"),
                star + _spread([p.above_us for p in paired], "+.3f"),
            ]
        else:
            row += ["1", "0"]
        row += [_spread([p.whole_ratio for p in paired], ".2f") if paired else "1"]
        row += [_median(runs, "startup_cpu_s", ".2f"), _median(runs, "first_step_s", ".2f")]
        of_it = (
            f" ({_median(runs, 'clients_pss_mb', '.0f')})" if parts_of(peer)[0] in SERVED else ""
        )
        row += [
            _median(runs, "speed", ".2f"),
            _median(runs, "over_idle_mb", ".0f"),
            _median(runs, "pss_mb", ".0f") + of_it,
        ]
        row += [
            str(runs[0].processes),
            _median(runs, "millions", ".0f"),
            _median(runs, "others_cores", ".2f"),
        ]
        rows.append(row)
    return rows


def _median(runs: Sequence[Figures], name: str, form: str) -> str:
    return format(statistics.median(getattr(run, name) for run in runs), form)


def _spread(values: Sequence[float], form: str) -> str:
    """Return the median, the lowest and the highest value."""
    middle = format(statistics.median(values), form)
    return (
        middle
        if len(values) == 1
        else f"{middle} ({format(min(values), form)} to {format(max(values), form)})"
    )


def _table(setting: Setting, peers: Sequence[str]) -> Table:
    table = Table(
        *HEADINGS[2:],
        header_style="bold",
        title=f"{setting.job}, {setting.n_sources} sources",
        title_justify="left",
    )
    if any("*" in cell for row in rows_of(setting, peers) for cell in row):
        table.caption = UNSTEADY_NOTE
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows_of(setting, peers):
        table.add_row(*row[2:])
    return table


def markdown(settings: Sequence[Setting], peers: Sequence[str], pairs: int, today: str) -> str:
    """Return the dated table for benchmarks/results."""
    lines = [f"# Throughput, {today}", "", machine(), ""]
    lines += [
        f"{settings[0].runs[0].ranks} ranks. {pairs} run(s) of each peer, each between "
        "two bare runs."
    ]
    lines += [
        "Medians; in brackets lowest and highest. How to read it: `benchmarks/README.md`.",
        "",
    ]
    lines += ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    lines += [
        "| " + " | ".join(row) + " |" for setting in settings for row in rows_of(setting, peers)
    ]
    if any("*" in line for line in lines[-len(settings) * len(peers) :]):
        lines += ["", UNSTEADY_NOTE.replace("*", "\\*")]
    return "\n".join(lines) + "\n"


def machine() -> str:
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "",
    )
    versions = ", ".join(
        f"{name} {metadata.version(name)}"
        for name in ("numpy", "pyarrow", "tokenizers", "torch", "torchdata")
        if _installed(name)
    )
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    return (
        f"{len(os.sched_getaffinity(0))} CPUs ({model}), Python {platform.python_version()}, "
        f"{versions}; load average at the end {load}."
    )


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def _words(known: Sequence[str]) -> click.ParamType:
    class Words(click.ParamType):
        name = ",".join(known)

        def convert(
            self, value: str | list[str], param: click.Parameter | None, ctx: click.Context | None
        ) -> list[str]:
            words = value.split(",") if isinstance(value, str) else value
            for word in words:
                if word not in known:
                    self.fail(f"{word!r} is none of {', '.join(known)}", param, ctx)
            return words

    return Words()


class TokenCounts(click.ParamType):
    name = "null=200M,tokenized=8M"

    def convert(
        self, value: str | dict[str, int], param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, int]:
        if isinstance(value, dict):
            return value
        try:
            pairs = dict(part.split("=") for part in value.split(","))
            counts = {
                job: int(
                    float(n.upper().removesuffix("M")) * (1e6 if n.upper().endswith("M") else 1)
                )
                for job, n in pairs.items()
            }
        except ValueError:
            self.fail(f"expected something like {self.name}, got {value!r}", param, ctx)
        if unknown := sorted(set(counts) - set(TOKENS)):
            self.fail(f"unknown job {unknown[0]!r}; known: {', '.join(TOKENS)}", param, ctx)
        return counts


@click.command(help=__doc__.split("\n")[0])
@click.option(
    "--sources",
    type=Numbers(),
    default="5,100,300",
    show_default=True,
    help="How many sources; one setting each.",
)
@click.option("--jobs", type=_words(tuple(TOKENS)), default="null,tokenized", show_default=True)
@click.option(
    "--peers",
    type=_words((*MODULES, *SERVED)),
    default="bare,overlord,overlord-one,overlord-shuffled,overlord-process,overlord-process-shuffled,nodes,torch",
    show_default=True,
    help="Also torch-numpy.",
)
@click.option(
    "--ranks",
    type=click.IntRange(1),
    default=RANKS,
    show_default=True,
    help="Data-parallel ranks of the job, for every peer.",
)
@click.option(
    "--pairs",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Runs of each peer, each between two bare runs.",
)
@click.option(
    "--tokens",
    type=TokenCounts(),
    default=dict,
    help="Tokens a cell delivers, by job.  [default: by the number of sources]",
)
@click.option(
    "--overlord-times",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Overlord's cells deliver so many times more: "
    "it reads ahead by slices of every source, which a short run over many sources does "
    "not use up.",
)
@click.option(
    "--arenas",
    type=Numbers(),
    default=list,
    help="Malloc arenas: Overlord's cells run with the limit it chooses, and with each of "
    "these (MALLOC_ARENA_MAX).",
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
@click.option("--seed", type=int, default=1, show_default=True)
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
    help="Seconds a cell waits, at most, for an idle machine.",
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every run's figures there.",
)
@click.option(
    "--save", "saving", is_flag=True, help="Writes the table, dated, to benchmarks/results."
)
def main(
    sources: list[int],
    jobs: list[str],
    peers: list[str],
    ranks: int,
    pairs: int,
    tokens: dict[str, int],
    overlord_times: int,
    arenas: list[int],
    quick: bool,
    data: Path,
    seed: int,
    limit_s: float,
    idle_s: float,
    json_path: Path | None,
    saving: bool,
) -> None:
    console = wide_console()
    amount = Amount(tokens, QUICK if quick else 1, overlord_times)
    peers = [
        "bare",
        *with_arenas([peer for peer in dict.fromkeys(peers) if peer != "bare"], arenas),
    ]
    try:
        settings = measure(
            corpora(console, data, sources, seed),
            jobs,
            order_of_cells(peers, pairs),
            amount,
            ranks,
            seed,
            limit_s,
            idle_s,
            console,
        )
    except CellFailed as failure:
        raise click.ClickException(str(failure)) from failure
    today = datetime.date.today().isoformat()
    console.print(machine())
    if json_path:
        runs = [asdict(run) for setting in settings for run in setting.runs]
        json_path.write_text(
            json.dumps(
                {"date": today, "machine": machine(), "pairs": pairs, "runs": runs}, indent=1
            )
        )
    if saving:
        name = f"{today}-throughput{'-arenas' * bool(arenas)}"
        console.print(f"saved {save(name, markdown(settings, peers, pairs, today), {})}")


if __name__ == "__main__":
    main()
