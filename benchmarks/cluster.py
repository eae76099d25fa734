"""The same job with and without Ray, and with Ray Data, in one run on the same data.

It measures CPU, memory, idle cost, first step, and the waits of trainers.

    python benchmarks/cluster.py --save       # about 40 minutes on two idle cores
    python benchmarks/cluster.py --sources 5 --jobs null --quick      # two minutes
    python benchmarks/cluster.py --sources 300 --ranks 8 --peers bare,overlord-ray,ray-data

It needs Linux and Ray Data (``pip install "ray[data]==2.60.0" aiohttp``). benchmarks/README.md
explains the method and the columns.
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
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
from peers.cluster_cell import CellFailed, Limits, Outcome, run_cell
from peers.data import corpora
from peers.ledger import HOSTS, RANKS, SERVICES, adopt_orphans
from peers.measure import wait_for_idle
from peers.work import Work

PEERS = {
    "bare": "one loop in one process, all ranks",
    "overlord": "runtime='local'",
    "overlord-process": "runtime='process'",
    "overlord-ray": "runtime='ray', sources_per_host=25",
    "overlord-ray-one": "runtime='ray', sources_per_host=1: the paper's layout",
    "overlord-ray-auto": "runtime='ray', as it chooses: no more hosts than cores",
    "ray-data": "read_parquet for each source, Dataset.mix, map_batches, streaming_split",
    "ray-data-list": "one read_parquet of files drawn by weight, map_batches, streaming_split",
}
BARE, ON_RAY, ONE, AUTO, MIXED = (
    "bare",
    "overlord-ray",
    "overlord-ray-one",
    "overlord-ray-auto",
    "ray-data",
)
THEIRS = (MIXED, "ray-data-list")
TOKENS = {"null": 45_000_000, "tokenized": 20_000_000}
# Per rank and step: the tokens that are read ahead must be few compared with the delivered ones.
MICROBATCHES = {"null": 16, "tokenized": 4}
# Only that many of the largest numbers of ranks are run: the result hardly depends on them.
RANKS_OF = {"tokenized": 1}
# One process per source: always up to the first number of sources, and with the most ranks once up
# to the second.
FEW_ONE, MOST_ONE = 25, 100
ONE_REASON = (
    "One source a host above {most} sources is left out: this machine has {gb:.0f} GB and "
    "{cores} cores."
)
ONE_COST = (
    "One such host more took {mb:.0f} MB, {idle:.2%} of a core at rest and {first:.2f} s to "
    "the first step: the rows at {n} sources."
)
CLOSE = 0.15  # relative difference of CPU that single runs may have
EARLY = 0.9  # times the bare loop: less means that work was done before the measured part
TARGETS = {"x": 3.0, "hosts_mb": 2e9 / 2**20, "first_s": 20.0}
HEAD = (
    "job",
    "sources",
    "ranks",
    "loader",
    "CPU s/Mtok",
    "x bare",
    "services",
    "whole run",
    "Mtok/s",
    "PSS MB",
    "hosts MB",
    "services MB",
    "ranks MB",
    "idle cores",
    "first step s",
    "without cluster s",
    "wait ms",
    "longest",
    "ahead",
    "processes",
    "left",
    "Mtok",
    "others",
)


@dataclass(slots=True)
class Setting:
    """A job at a number of sources and ranks, with its runs.

    Runs are rounds of all loaders, with the bare loop before, between and after them.
    """

    job: str
    n_sources: int
    ranks: int
    peers: list[str]
    runs: list[Outcome] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    repeats: int = 1

    def cells(self) -> list[str]:
        return self.peers * self.repeats + (
            [BARE] if BARE in self.peers and len(self.peers) > 1 else []
        )

    def of(self, peer: str) -> Outcome | None:
        """Return the run with the median CPU per token; of an even number the more expensive."""
        found = sorted((run for run in self.runs if run.peer == peer), key=lambda run: run.cpu)
        return found[len(found) // 2] if found else None

    def spread(self, peer: str) -> str:
        """Return the least and the most CPU per token of several runs."""
        found = [run.cpu for run in self.runs if run.peer == peer]
        return (
            f" ({min(found):.4f} to {max(found):.4f})"
            if self.repeats > 1 and len(found) > 1
            else ""
        )

    def apart(self, one: str, other: str) -> bool:
        """Return whether all runs of a loader took less CPU than all runs of another loader.

        It must hold in the steady part and over the whole run.
        """
        mine, theirs = ([run for run in self.runs if run.peer == peer] for peer in (one, other))
        if self.repeats == 1 or not mine or not theirs:
            return False
        return all(
            max(cost(run) for run in mine) < min(cost(run) for run in theirs)
            for cost in (lambda r: r.cpu, lambda r: r.whole)
        )

    @property
    def bare_cpu(self) -> float | None:
        found = [run.cpu for run in self.runs if run.peer == BARE]
        return statistics.median(found) if found else None

    def ratio(self, run: Outcome) -> float | None:
        return run.cpu / self.bare_cpu if self.bare_cpu else None


def settings_of(
    jobs: Sequence[str],
    sources: Sequence[int],
    ranks: Sequence[int],
    peers: Sequence[str],
    repeats: int = 1,
) -> list[Setting]:
    """Return every combination of jobs, sources and ranks.

    One source per worker is run only with few sources, and once with as many as fit into memory.
    """
    made = []
    for job in jobs:
        for n in sources:
            for r in ranks[-RANKS_OF.get(job, len(ranks)) :]:
                once = n <= MOST_ONE and (job, r) == (jobs[0], ranks[-1])
                left_out = set() if n <= FEW_ONE or once else {ONE}
                left_out |= (
                    set(THEIRS) if r != ranks[-1] else set()
                )  # they take long, whatever the ranks
                left_out |= {AUTO} if n <= FEW_ONE else set()  # with few sources it is the same
                made.append(
                    Setting(job, n, r, [p for p in peers if p not in left_out], repeats=repeats)
                )
    return made


def measure(
    found: dict[int, Corpus],
    settings: Sequence[Setting],
    share: int,
    limits: Limits,
    seed: int,
    idle_s: float,
    console: Console,
) -> None:
    """Run all cells, one at a time; a failed cell is listed on the page."""
    given_up: dict[str, int] = {}  # by loader, with how many sources
    with progress(console) as shown:
        bar = shown.add_task("", total=sum(len(setting.cells()) for setting in settings))
        for setting in settings:
            for peer in setting.cells():
                shown.update(
                    bar,
                    description=f"{setting.job}, {setting.n_sources} sources, "
                    f"{setting.ranks} ranks: {peer}",
                )
                work = Work(
                    peer,
                    setting.job,
                    str(found[setting.n_sources].folder),
                    setting.n_sources,
                    TOKENS[setting.job] // share,
                    ranks=setting.ranks,
                    microbatches=MICROBATCHES[setting.job],
                    seed=seed,
                )
                wait_for_idle(idle_s)
                shown.advance(bar)
                if (n := given_up.get(peer)) is not None and setting.n_sources >= n:
                    setting.failed[peer] = f"not tried again: it failed with {n} sources"
                    continue
                try:
                    setting.runs.append(run_cell(work, limits))
                except CellFailed as failure:
                    setting.failed[peer], given_up[peer] = str(failure), setting.n_sources
                    shown.console.print(str(failure), markup=False, highlight=False)
            shown.console.print(shown_table("", HEAD, rows_of(setting)))


def rows_of(setting: Setting) -> list[list[str]]:
    rows = []
    for peer in setting.peers:
        start = [setting.job, str(setting.n_sources), str(setting.ranks), peer]
        run = setting.of(peer)
        rows.append(
            start + (_row(setting, run) if run is not None else ["failed"] + [""] * (len(HEAD) - 5))
        )
    return rows


def _row(setting: Setting, run: Outcome) -> list[str]:
    apart, ratio, wait = run.pss_mb[HOSTS] > 0, setting.ratio(run), run.wait_ms
    on_ray, cpu = (
        run.pss_mb[SERVICES] > 0,
        setting.bare_cpu if run.peer == BARE and setting.bare_cpu else run.cpu,
    )
    return [
        f"{cpu:.4f}" + setting.spread(run.peer),
        ""
        if ratio is None
        else "1"
        if run.peer == BARE
        else f"{ratio:.2f}" + ("*" if ratio < EARLY else ""),
        f"{run.share(SERVICES):.0%}" if on_ray else "",
        f"{run.whole:.3f}",
        f"{run.speed:.2f}",
        f"{run.pss_mb['all']:.0f}",
        f"{run.pss_mb[HOSTS]:.0f}" if apart else "",
        f"{run.pss_mb[SERVICES]:.0f}" if on_ray else "",
        f"{run.pss_mb[RANKS]:.0f}" if apart else "",
        f"{run.idle_cores:.3f}" + ("" if run.settled else " busy"),
        f"{run.first_s:.2f}",
        f"{run.first_s - run.cluster_s:.2f}" if on_ray else "",
        "" if wait is None else f"{wait[0]:.1f}" + (" late" if run.late else ""),
        "" if wait is None else f"{wait[1]:.0f}",
        "" if run.ahead is None else str(run.ahead),
        str(run.processes),
        str(run.left) if apart else "",
        f"{run.tokens / 1e6:.1f}",
        f"{run.others_cores:.2f}",
    ]


# ---- the page


def verdicts(settings: Sequence[Setting]) -> list[list[str]]:
    """Return a line per target: the goal, the cell and the result.

    A failed cell has no numbers and is not judged.
    """
    return [
        row
        for setting in settings
        for peer in (ON_RAY, AUTO, ONE)
        for row in _verdicts(setting, peer)
    ]


def _verdicts(setting: Setting, peer: str) -> list[list[str]]:
    rows, where = (
        [],
        f"{setting.job}, {setting.n_sources} sources, {setting.ranks} ranks"
        + {AUTO: ", `auto`", ONE: ", one a host"}.get(peer, ""),
    )
    if (run := setting.of(peer)) is None:
        rows += (
            [_verdict("to run at all", where, setting.failed[peer].splitlines()[0], False)]
            if peer in setting.failed
            else []
        )
    else:
        if setting.job == "null" and (ratio := setting.ratio(run)) is not None:
            rows.append(
                _verdict(
                    f"at most {TARGETS['x']:g} x bare", where, f"{ratio:.2f}", ratio <= TARGETS["x"]
                )
            )
        if setting.n_sources >= 300:
            hosts = run.pss_mb[HOSTS]
            rows.append(
                _verdict(
                    "hosts under 2 GB PSS", where, f"{hosts:.0f} MB", hosts < TARGETS["hosts_mb"]
                )
            )
            rows.append(
                _verdict(
                    "first step within 20 s of launch",
                    where,
                    f"{run.first_s:.1f} s",
                    run.first_s <= TARGETS["first_s"],
                )
            )
        rows += [row for peer in THEIRS for row in _beside(setting, run, peer, where)]
    return rows


def _beside(setting: Setting, run: Outcome, peer: str, where: str) -> list[list[str]]:
    if (other := setting.of(peer)) is None:
        return (
            [[f"below {peer}", where, setting.failed[peer].splitlines()[0], "not judged"]]
            if peer in setting.failed
            else []
        )
    found = {"CPU a token": run.cpu / other.cpu, "CPU a token, whole run": run.whole / other.whole}
    found |= {"memory": run.pss_mb["all"] / other.pss_mb["all"]}
    rows = [
        _verdict(f"below {peer}, {what}", where, f"{part:.2f} of it", part < 1)
        for what, part in found.items()
    ]
    for row, (what, part) in zip(rows, found.items(), strict=True):
        if what != "memory" and abs(part - 1) < CLOSE and not setting.apart(run.peer, peer):
            row[-1] = "too close to tell"
    return rows


def _verdict(wanted: str, where: str, found: str, met: bool) -> list[str]:
    return [wanted, where, found, "met" if met else "**missed**"]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def one_note(settings: Sequence[Setting]) -> str:
    """Explain why few rows have one source per worker, and the cost of such a worker."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    said = ONE_REASON.format(most=MOST_ONE, gb=memory, cores=len(os.sched_getaffinity(0)))
    both = [
        (s, few, many)
        for s in settings
        if (few := s.of(ON_RAY)) and (many := s.of(ONE)) and many.processes > few.processes
    ]
    if not both:
        return said
    setting, few, many = max(both, key=lambda found: found[2].processes)
    more = many.processes - few.processes
    each = {
        "mb": many.pss_mb[HOSTS] - few.pss_mb[HOSTS],
        "idle": many.idle_cores - few.idle_cores,
        "first": many.first_s - few.first_s,
    }
    per_worker = {key: value / more for key, value in each.items()}
    return f"{said} {ONE_COST.format(n=setting.n_sources, **per_worker)}"


def page(settings: Sequence[Setting], today: str, command: str) -> str:
    versions = ", ".join(
        f"{name} {version}"
        for name in ("ray", "pyarrow", "tokenizers")
        if (version := _version(name))
    )
    failed = [
        f"- {peer}: {words.splitlines()[0]}"
        for setting in settings
        for peer, words in setting.failed.items()
    ]
    parts = [
        f"# On a cluster, {today}",
        machine() + f" {versions}.",
        f"    {command}",
        "How it is measured: `benchmarks/README.md`.",
        "## Targets",
        "Of `overlord-ray` (25 sources a host); `auto`: of `overlord-ray-auto`, the "
        "default, which divides by itself; "
        "one a host: of `overlord-ray-one`, the paper's layout.",
        markdown_table(("wanted", "where", "found", ""), verdicts(settings)),
        "## Runs",
        markdown_table(HEAD, [row for setting in settings for row in rows_of(setting)]),
        "## Notes",
        "\n".join(notes(settings) + failed),
    ]
    return "\n\n".join(parts) + "\n"


def notes(settings: Sequence[Setting]) -> list[str]:
    least = min((run.tokens for setting in settings for run in setting.runs), default=0)
    idle = [
        run.idle_parts[SERVICES]
        for setting in settings
        for run in setting.runs
        if run.peer == ON_RAY
    ]
    found = [
        f"- {one_note(settings)}",
        "- Single runs; the bare loop's figure is the mean of a run before and one after "
        "the others of its setting."
        if settings[0].repeats == 1
        else f"- {settings[0].repeats} rounds of every loader, with the bare loop before, "
        "between and after them: a row is the run whose "
        "CPU a token is in the middle, with the least and the most of all; the bare "
        "loop's is the median.",
        f"- The fewest tokens that a cell delivered: {least / 1e6:.1f} million. One that "
        "was stopped by time delivered "
        "fewer than were wanted, and its start weighs more.",
        "- \\*: less than the bare loop, so this part of the run lived on what was read "
        "ahead before it; use the whole run. "
        "*busy*: reading ahead went on for more than 8 s while nobody asked for steps, "
        "so this is no idle cost.",
        "- *Failed*: no step within the limits that this program sets (`--start-s`, and "
        "an object store of 512 MB for Ray Data). That says "
        "nothing of what it would cost with more time, memory or cores, so nothing is "
        "judged beside it.",
        "- Ray Data mixes whole files, all others rows; its ranks do not wait for each "
        "other, all others' do.",
    ]
    if idle:
        found.append(
            f"- Of `overlord-ray` at rest, Ray's own processes take {min(idle):.3f} to "
            f"{max(idle):.3f} cores."
        )
    return found


def _words(known: Sequence[str], given: str) -> list[str]:
    words = given.split(",")
    if unknown := [word for word in words if word not in known]:
        raise click.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}")
    return words


@click.command(help=__doc__.split("\n")[0])
@click.option("--sources", type=Numbers(), default="5,100,300", show_default=True)
@click.option("--jobs", default="null,tokenized", show_default=True)
@click.option(
    "--ranks",
    type=Numbers(),
    default="2,8",
    show_default=True,
    help="The tokenized job is done with the last of them only.",
)
@click.option(
    "--peers",
    default=",".join(PEERS),
    show_default=True,
    help="Not all of them with all sources and ranks.",
)
@click.option(
    "--run-s",
    type=float,
    default=30.0,
    show_default=True,
    help="A cell delivers for so long at most.",
)
@click.option(
    "--repeats",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Rounds of every setting; the middle run is shown.",
)
@click.option(
    "--start-s",
    type=float,
    default=90.0,
    show_default=True,
    help="Until its first step; one that needs longer has failed.",
)
@click.option(
    "--quick",
    is_flag=True,
    help="Six times fewer tokens and 5 s at most: a look, not a measurement.",
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    default=default_folder,
    help="Where the data is made and kept.",
)
@click.option("--seed", type=int, default=1, show_default=True)
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
    "--save", "saving", is_flag=True, help="Writes the page, dated, to benchmarks/results."
)
def main(
    sources: list[int],
    jobs: str,
    ranks: list[int],
    peers: str,
    run_s: float,
    repeats: int,
    start_s: float,
    quick: bool,
    data: Path,
    seed: int,
    idle_s: float,
    json_path: Path | None,
    saving: bool,
) -> None:
    console, today = wide_console(), datetime.date.today().isoformat()
    settings = settings_of(
        _words(tuple(TOKENS), jobs), sources, ranks, _words(tuple(PEERS), peers), repeats
    )
    adopt_orphans()
    limits = (
        Limits(run_s=5.0, idle_s=1.5, start_s=start_s)
        if quick
        else Limits(run_s=run_s, start_s=start_s)
    )
    found = corpora(console, data, dict.fromkeys(setting.n_sources for setting in settings), seed)
    measure(found, settings, 6 if quick else 1, limits, seed, idle_s, console)
    console.print(shown_table("targets", ("wanted", "where", "found", ""), verdicts(settings)))
    if json_path:
        runs = [asdict(run) for setting in settings for run in setting.runs]
        json_path.write_text(
            json.dumps({"date": today, "machine": machine(), "runs": runs}, indent=1)
        )
    if saving:
        text = page(settings, today, command_line("benchmarks/cluster.py"))
        console.print(f"saved {save(f'{today}-cluster', text, {})}")


if __name__ == "__main__":
    main()
