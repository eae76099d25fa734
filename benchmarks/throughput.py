"""One job through Overlord, a bare loop and other loaders, on the same data.

    python benchmarks/throughput.py                                 # everything: many hours
    python benchmarks/throughput.py --sources 5 --pairs 1 --quick   # about twenty minutes
    python benchmarks/throughput.py --sources 100 --peers bare,overlord,grain,torch --workers 2
    python benchmarks/throughput.py --sources 100 --jobs tokenized --peers overlord-process \\
        --arenas 2,5,16,64      # malloc arenas

All peers do the job for the same number of ranks, by default 8, with the same tokens per rank and
step. The bare loop packs for no particular rank, so its cost per token is that of the job for any
number of ranks. Its first step is that of 8. A sweep finds the smallest number of workers with
which a peer keeps pace with Overlord. A peer that cannot be installed or cannot do
a job is listed with the reason. benchmarks/README.md explains the method and the columns.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console
from rich.table import Table

from corpus import Corpus, default_folder
from page import Numbers, markdown_table, progress, save, shown_table, wide_console
from peers import environments
from peers.data import corpora
from peers.measure import wait_for_idle
from peers.runner import SERVED, CellFailed, Figures, conversion, run_cell
from peers.standing import ahead, described, ordered
from peers.sweep import Sweep, sweep
from peers.table import LABELS, OVERLORD, PEERS, SHUFFLED, peer_of, reason_against
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
WORKERS = (0, 1, 2, 4, 8)
SWEEP_SHARE = 4  # a run of a sweep delivers one n-th of the tokens
LEAST_STEPS = 2  # of all ranks, in every run: the steady part begins after the first step
PACE = "overlord"  # the loader whose speed is the pace
BEHIND = ", behind"  # with a number of workers: no number kept pace
UNSTEADY_NOTE = (
    "* not steady: this part of the run lived on what was read ahead before it; use the "
    "whole run, or more tokens"
)
HEADINGS = (
    "job",
    "sources",
    "loader",
    "workers",
    "CPU s/Mtok",
    "x bare",
    "above bare, us/tok",
    "whole x bare",
    "start-up CPU s",
    "first step s",
    "Mtok/s",
    "whole Mtok/s",
    "MB over imports",
    "with imports MB (clients)",
    "processes",
    "Mtok a run",
    "others, cores",
    "ahead of Overlord in",
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
    sweeps: dict[str, Sweep] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # why a loader is not in the table

    def workers(self, peer: str) -> str:
        """Return the number of workers of a loader, as the table says it."""
        found = self.sweeps.get(peer)
        if found is None or not found.speeds:
            return str(self.of(peer)[0].workers) if is_swept(peer) else ""
        return f"{found.chosen}{'' if found.keeps_pace(found.chosen) else BEHIND}"

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
    """Return the name of a label, and its malloc arenas; 0: the default."""
    name, _, arenas = label.partition("@")
    return name, int(arenas or 0)


def is_swept(label: str) -> bool:
    return PEERS[peer_of(parts_of(label)[0])[0]].swept


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of the program."""

    labels: list[str]
    jobs: list[str]
    amount: Amount
    pairs: int
    ranks: int
    workers: tuple[int, ...]
    seed: int
    limit_s: float
    idle_s: float
    envs: Path
    pace: float | None  # Mtok/s; None: that of Overlord

    def work(
        self, label: str, job: str, corpus: Corpus, workers: int = 1, *, short: bool = False
    ) -> Work:
        name, arenas = parts_of(label)
        peer, shuffled = peer_of(name)
        n, share = len(corpus.sources), SWEEP_SHARE if short else 1
        work = Work(
            peer,
            job,
            str(corpus.folder),
            n,
            self.amount.tokens(job, n, peer) // share,
            ranks=self.ranks,
            seed=self.seed,
            arenas=arenas,
            workers=workers,
            shuffle=shuffled and peer not in OVERLORD,
        )
        least = LEAST_STEPS * work.ranks * work.microbatches * work.context
        return replace(work, tokens=max(work.tokens, least))

    def counts(self, label: str) -> list[int]:
        """Return the numbers of workers that a loader may have."""
        least = PEERS[peer_of(parts_of(label)[0])[0]].least_workers
        return sorted({max(n, least) for n in self.workers})


class Measurement:
    """Runs all cells of a plan, one at a time: two at once would disturb each other."""

    def __init__(self, plan: Plan, found: dict[int, Corpus], console: Console):
        self.plan, self.found, self.console = plan, found, console
        self.pythons: dict[str, str] = {}  # by loader
        self.missing: dict[str, str] = {}  # by loader: why it could not be installed

    def install(self) -> None:
        """Find or build the interpreter of every loader that can do one of the jobs."""
        names = [parts_of(label)[0] for label in self.plan.labels]
        able = [
            name
            for name in names
            if any(reason_against(name, job) is None for job in self.plan.jobs)
        ]
        for peer in dict.fromkeys(peer_of(name)[0] for name in able):
            try:
                self.pythons[peer] = environments.interpreter_of(PEERS[peer], self.plan.envs)
            except (environments.NotInstallable, subprocess.TimeoutExpired) as failure:
                self.missing[peer] = f"not installed: {failure}"
                self.console.print(f"{peer}: {failure}", markup=False, highlight=False)

    def settings(self) -> list[Setting]:
        self.install()
        made = []
        for job in self.plan.jobs:
            for corpus in self.found.values():
                made.append(Setting(job, len(corpus.sources), []))
                self.run(made[-1], corpus)
                self.console.print(_table(made[-1]))
        return made

    def run(self, setting: Setting, corpus: Corpus) -> None:
        able = [label for label in self.plan.labels if self.is_able(setting, corpus, label)]
        cells = order_of_cells(able, self.plan.pairs)
        with progress(self.console) as shown:
            title = f"{setting.job}, {setting.n_sources} sources"
            bar = shown.add_task(title, total=len(able) + len(cells))
            for label in able:
                shown.update(bar, description=f"{title}: workers of {label}")
                self.choose(setting, corpus, label)
                shown.advance(bar)
            for label in cells:
                shown.update(bar, description=f"{title}: {label}")
                self.cell(setting, corpus, label)
                shown.advance(bar)

    def is_able(self, setting: Setting, corpus: Corpus, label: str) -> bool:
        """Return whether a loader can do a job, after its data is there; note why not."""
        name, _ = parts_of(label)
        peer, _ = peer_of(name)
        reason = self.missing.get(peer) or reason_against(name, setting.job)
        if reason is None:
            try:
                conversion(self.given(label, setting.job, corpus), self.plan.limit_s)
            except CellFailed as failure:
                reason = str(failure)
        if reason is not None:
            setting.failed[label] = reason
        return reason is None

    def given(
        self, label: str, job: str, corpus: Corpus, workers: int = 1, *, short: bool = False
    ) -> Work:
        work = self.plan.work(label, job, corpus, workers, short=short)
        return replace(work, python=self.pythons[work.peer])

    def choose(self, setting: Setting, corpus: Corpus, label: str) -> None:
        """Find the number of workers of a loader, unless only one number is allowed."""
        counts = self.plan.counts(label)
        if not is_swept(label) or len(counts) == 1:
            return

        failures = []

        def speed(workers: int) -> float:
            try:
                return self.short(label, setting, corpus, workers)
            except CellFailed as failure:
                failures.append(failure)
                return 0.0

        found = sweep(self.pace(setting, corpus, shuffled=label.endswith(SHUFFLED)), counts, speed)
        if any(found.speeds.values()):
            setting.sweeps[label] = found
        else:
            self.failed(setting, label, failures[0])

    def short(self, label: str, setting: Setting, corpus: Corpus, workers: int = 1) -> float:
        """Return the speed of a short run, in million tokens per second."""
        work = self.given(label, setting.job, corpus, workers, short=True)
        wait_for_idle(self.plan.idle_s)
        return run_cell(work, self.plan.limit_s).speed

    def pace(self, setting: Setting, corpus: Corpus, *, shuffled: bool) -> float:
        """Return the speed of Overlord in the same order; it is measured once for a setting."""
        if self.plan.pace is not None:
            return self.plan.pace
        known = [
            found.pace
            for label, found in setting.sweeps.items()
            if label.endswith(SHUFFLED) == shuffled
        ]
        if known:
            return known[0]
        self.pythons.setdefault(PACE + SHUFFLED * shuffled, sys.executable)
        return self.short(PACE + SHUFFLED * shuffled, setting, corpus)

    def cell(self, setting: Setting, corpus: Corpus, label: str) -> None:
        if label in setting.failed:
            return
        chosen = setting.sweeps.get(label)
        workers = chosen.chosen if chosen else self.plan.counts(label)[-1] if is_swept(label) else 1
        wait_for_idle(self.plan.idle_s)
        try:
            work = self.given(label, setting.job, corpus, workers)
            setting.runs.append(run_cell(work, self.plan.limit_s))
        except CellFailed as failure:
            if label == "bare":
                raise
            self.failed(setting, label, failure)

    def failed(self, setting: Setting, label: str, failure: CellFailed) -> None:
        self.console.print(str(failure), markup=False, highlight=False)
        setting.failed[label] = str(failure).strip().splitlines()[-1]


def rows_of(setting: Setting) -> list[list[str]]:
    """Return the lines of one setting: medians, and for ratios also the spread.

    Peers that are ahead of Overlord come first.
    """
    by_label: dict[str, list[Figures]] = {}
    for run in setting.runs:
        by_label.setdefault(run.peer, []).append(run)
    rows = []
    for peer in ordered(by_label):
        runs, paired = setting.of(peer), setting.paired(peer) if peer != "bare" else []
        row = [setting.job, str(setting.n_sources), peer, setting.workers(peer)]
        row += [_median(runs, "steady_cpu", ".4f")]
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
            _median(runs, "whole_speed", ".2f"),
            _median(runs, "over_idle_mb", ".0f"),
            _median(runs, "pss_mb", ".0f") + of_it,
        ]
        row += [
            str(runs[0].processes),
            _median(runs, "millions", ".0f"),
            _median(runs, "others_cores", ".2f"),
            described(ahead(by_label, peer)),
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


def _table(setting: Setting) -> Table:
    table = Table(
        *HEADINGS[2:-1],
        header_style="bold",
        title=f"{setting.job}, {setting.n_sources} sources",
        title_justify="left",
    )
    if any("*" in cell for row in rows_of(setting) for cell in row):
        table.caption = UNSTEADY_NOTE
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows_of(setting):
        table.add_row(*row[2:-1])
    return table


def markdown(settings: Sequence[Setting], pairs: int, today: str, versions: Versions) -> str:
    """Return the dated page for benchmarks/results."""
    rows = [row for setting in settings for row in rows_of(setting)]
    lines = [
        f"# Throughput, {today}",
        "",
        machine(),
        "",
        f"{settings[0].runs[0].ranks} ranks. {pairs} run(s) of each peer, each between "
        "two bare runs.",
        "Medians; in brackets lowest and highest. How to read it: `benchmarks/README.md`.",
        "Peers that are ahead of Overlord in any measure come first.",
        "",
        markdown_table(HEADINGS, rows),
    ]
    if any("*" in cell for row in rows for cell in row):
        lines += ["", UNSTEADY_NOTE.replace("*", "\\*")]
    for title, head, more in (
        ("Workers", SWEEP_HEAD, sweep_rows(settings)),
        ("Not in the table", MISSING_HEAD, missing_rows(settings)),
        ("Versions", VERSION_HEAD, versions),
    ):
        if more:
            lines += ["", f"## {title}", "", markdown_table(head, more)]
    return "\n".join(lines) + "\n"


Versions = list[list[str]]
SWEEP_HEAD = ("job", "sources", "loader", "pace, Mtok/s", "Mtok/s by workers of a rank", "chosen")
MISSING_HEAD = ("loader", "where", "reason")
VERSION_HEAD = ("loader", "versions", "differs from the job in")


def sweep_rows(settings: Sequence[Setting]) -> list[list[str]]:
    return [
        [
            setting.job,
            str(setting.n_sources),
            label,
            f"{found.pace:.2f}",
            ", ".join(f"{n}: {speed:.2f}" for n, speed in found.speeds.items()),
            setting.workers(label),
        ]
        for setting in settings
        for label, found in setting.sweeps.items()
    ]


def missing_rows(settings: Sequence[Setting]) -> list[list[str]]:
    """Return each loader and reason, with the settings that it holds for."""
    where: dict[tuple[str, str], list[str]] = {}
    for setting in settings:
        for label, reason in setting.failed.items():
            place = f"{setting.job} {setting.n_sources}"
            where.setdefault((label, reason.replace("|", "/")), []).append(place)
    return [
        [label, "everywhere" if len(places) == len(settings) else ", ".join(places), reason]
        for (label, reason), places in where.items()
    ]


def version_rows(peers: Sequence[str], pythons: dict[str, str]) -> Versions:
    """Return the versions of the loaders that ran: those that their interpreters have."""
    rows = []
    for name in dict.fromkeys(peer_of(parts_of(label)[0])[0] for label in peers):
        peer = PEERS[name]
        if name not in pythons or not (peer.pins or peer.note):
            continue
        found = [pin.partition("==")[0] for pin in peer.pins]
        shown = ", ".join(f"{d} {environments.version_in(pythons[name], d)}" for d in found)
        rows.append([name, shown, peer.note])
    return rows


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
    type=_words(LABELS),
    default=",".join(label for label in LABELS if not label.startswith("torch-numpy")),
    help="Of the loaders, those that run.  [default: all but torch-numpy]",
)
@click.option(
    "--workers",
    type=Numbers(),
    default=",".join(map(str, WORKERS)),
    show_default=True,
    help="Workers of a rank that a peer may have; the smallest number that keeps pace is taken.",
)
@click.option(
    "--pace",
    type=float,
    help="Million tokens a second with which a peer keeps pace.  [default: those of Overlord]",
)
@click.option(
    "--envs",
    type=click.Path(path_type=Path, file_okay=False),
    default=environments.default_folder,
    help="Environments of the peers that the running interpreter does not have.",
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
    workers: list[int],
    pace: float | None,
    envs: Path,
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
    plan = Plan(
        labels=peers,
        jobs=jobs,
        amount=amount,
        pairs=pairs,
        ranks=ranks,
        workers=tuple(workers),
        seed=seed,
        limit_s=limit_s,
        idle_s=idle_s,
        envs=envs,
        pace=pace,
    )
    measurement = Measurement(plan, corpora(console, data, sources, seed), console)
    try:
        settings = measurement.settings()
    except CellFailed as failure:
        raise click.ClickException(str(failure)) from failure
    versions = version_rows(peers, measurement.pythons)
    today = datetime.date.today().isoformat()
    for title, head, rows in (
        ("workers", SWEEP_HEAD, sweep_rows(settings)),
        ("not in the table", MISSING_HEAD, missing_rows(settings)),
        ("versions", VERSION_HEAD, versions),
    ):
        console.print(shown_table(title, head, rows))
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
        console.print(f"saved {save(name, markdown(settings, pairs, today, versions), {})}")


if __name__ == "__main__":
    main()
