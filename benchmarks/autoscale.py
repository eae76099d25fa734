"""Loader processes over time while the mixture shifts to heavy sources and back.

Four runs: provisioned for the worst case, provisioned for the average, launched without scaling,
and autoscaled (the Overlord paper, arXiv 2504.09844, section 5.2).

    python benchmarks/autoscale.py [--hosts N] [--seconds 60] [--step-s 0.25] [--quick] [--save]

Five sources whose transforms cost about 1x (tokenize), 4x (decode a JPEG), 75x and 300x (decode and
augment), and 150x in plain Python, which holds the interpreter lock. Their costs on this machine
are measured first, in CPU time and concurrently. The batch is chosen so that the heavy stage keeps
60 % of ``--hosts`` cores busy (default: all cores). *Off* and *autoscale* are launched with
``hosts=`` and otherwise defaults; the two that are provisioned by hand have processes of one
thread. The trainer takes a fixed time for a step. Its wait is the time from the call of ``launch``
to the first step, and from each request to the next step. Every run must deliver the same plans,
and starts without a profile. Loader-seconds are the sum of the lifetimes of loader processes.
"""

from __future__ import annotations

import math
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow.parquet as pq
from tokenizers import Tokenizer

import overlord as ov
from augment import augmented, decoded, hashed, write_jpegs, write_texts
from overlord.hashing import digest
from overlord.observe.svg import Axes, PlotLine, lines, series_color
from overlord.process.resources import cores
from page import command_line, machine, markdown_table, progress, save, shown_table, wide_console

# The cost of a source that is never drawn cannot be predicted.
LIGHT = {"text": 0.928, "thumbs": 0.05, "photos": 0.018, "scenes": 0.002, "records": 0.002}
HEAVY = {"text": 0.55, "thumbs": 0.20, "photos": 0.15, "scenes": 0.05, "records": 0.05}
CODE = {"thumbs": decoded, "photos": augmented, "scenes": augmented, "records": hashed}
ALONE = ("photos", "scenes", "records")  # sources that are provisioned by hand
STAGES = (0.45, 0.65)  # shares of the run between which the heavy stage is
BUSY, TARGET = (
    0.6,
    0.7,
)  # utilisation of all workers in the heavy stage; of a worker provisioned by hand
SIDES = {"thumbs": 290, "photos": 330, "scenes": 660, "records": 290}  # pixels
CHUNKS = 16  # read at a time: the largest number of loaders of a source
OFF, SCALED = DEFAULTS = ("off", "autoscale")  # runs that are launched with defaults
HEAD = [
    "run",
    "loader processes",
    "loader-seconds",
    "of worst case",
    "start s",
    "trainer waited s",
    "share of the heavy stage",
    "longest wait after start s",
    "plans",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that all runs share."""

    folder: Path
    hosts: int
    steps: int
    step_s: float
    costs: Mapping[str, float]  # seconds per sample
    samples: int

    @property
    def stages(self) -> tuple[int, int]:
        first, second = (int(self.steps * s) for s in STAGES)
        return first, second

    def lanes(self, mixture: Mapping[str, float]) -> dict[str, float]:
        """Return the busy processes that each source needs at full speed."""
        return {
            name: self.samples * share * self.costs[name] / self.step_s
            for name, share in mixture.items()
        }

    def job(self) -> ov.Job:
        first, second = self.stages
        return make_job(
            self.folder, self.samples, ov.schedule.staged({0: LIGHT, first: HEAVY, second: LIGHT})
        )


@dataclass(slots=True)
class Outcome:
    name: str
    # Per step; for the first one from the call of ``launch`` on.
    waits: list[float] = field(default_factory=list)
    # When each step was received, in seconds since that call.
    at: list[float] = field(default_factory=list)
    seen: list[tuple[float, int]] = field(default_factory=list)  # (time, loader processes)
    plans: str = ""
    decisions: list[str] = field(default_factory=list)

    @property
    def loader_seconds(self) -> float:
        return math.fsum(
            n * (b - a) for (a, n), (b, _) in zip(self.seen, self.seen[1:], strict=False)
        )

    @property
    def start_s(self) -> float:
        """The wait for the first step: workers, files, buffers and provisioning by hand."""
        return self.waits[0]

    def waited(self, first: int = 0, stop: int | None = None) -> float:
        return math.fsum(self.waits[first:stop])


def make_data(folder: Path) -> None:
    if (folder / "done").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_texts(
        str(folder / "text.parquet"), str(folder / "tokenizer.json"), rows=4096, words=150, seed=1
    )
    for k, (name, side) in enumerate(SIDES.items()):
        write_jpegs(str(folder / f"{name}.parquet"), rows=2 * CHUNKS * 4, side=side, seed=2 + k)
    (folder / "done").touch()


def make_job(folder: Path, samples: int, mixture: Any) -> ov.Job:
    tokenize = ov.Tokenize(str(folder / "tokenizer.json"), text="text")
    sources = [ov.Source("text", str(folder / "text.parquet"), transforms=[tokenize])]
    sources += [
        ov.Source(
            name,
            str(folder / f"{name}.parquet"),
            transforms=[ov.Map(fn, rows=True), ov.Tokens("tokens")],
        )
        for name, fn in CODE.items()
    ]
    return ov.Job(
        name="autoscale",
        sources=sources,
        mixture=mixture,
        place=ov.ClientPlaceTree(),
        seed=3,
        slice_rows=2,
        shuffle_chunks=CHUNKS,
        batch=ov.Batch(samples=samples, context=2048),
        on_long="truncate",
    )


def measured_costs(folder: Path) -> dict[str, float]:
    """Measure the CPU seconds per sample of the transforms of each source."""
    encode = Tokenizer.from_file(str(folder / "tokenizer.json")).encode
    work: dict[str, Any] = {"text": lambda row: encode(row["text"]), **CODE}
    found = {}
    for name, fn in work.items():
        rows = pq.ParquetFile(folder / f"{name}.parquet").read_row_groups(range(3)).to_pylist()
        fn(rows[0])
        start = time.thread_time()
        for row in rows:
            fn(row)
        found[name] = (time.thread_time() - start) / len(rows)
    return found


def costs_side_by_side(folder: Path, hosts: int) -> dict[str, float]:
    """Measure with as many processes as there may be loaders.

    Cores that share hardware are slower together than one alone.
    """
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(hosts), context.SimpleQueue()
    processes = [
        context.Process(target=_measure, args=(folder, together, answers)) for _ in range(hosts)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found: list[dict[str, float]] = [answers.get() for _ in processes]
    return {name: statistics.median(costs[name] for costs in found) for name in found[0]}


def _measure(folder: Path, together: Any, answers: Any) -> None:
    together.wait(60.0)
    answers.put(measured_costs(folder))


def loader_processes(session: ov.Session) -> int:
    return sum(a["name"].startswith("loader-worker/") for a in session.metrics()["actors"])


def provision(session: ov.Session, wanted: Mapping[str, int]) -> None:
    """Provision processes for each source by hand, before the first step."""
    for source, n in wanted.items():
        until, done = time.monotonic() + 60, n <= 1
        while not done and time.monotonic() < until:
            done = session.scale(source, n)
            time.sleep(0.05)
        have = {
            a["pid"]
            for a in session.metrics()["actors"]
            if a["name"].startswith(f"loader/{source}/")
        }
        while len(have) < n and time.monotonic() < until:
            time.sleep(0.05)
            have = {
                a["pid"]
                for a in session.metrics()["actors"]
                if a["name"].startswith(f"loader/{source}/")
            }


def options_of(name: str, setting: Setting) -> dict[str, Any]:
    """Return the launch options of a run: defaults, or those for provisioning by hand."""
    if name in DEFAULTS:
        return {"hosts": setting.hosts, "autoscale": name == SCALED}
    return {"hosts": 1, "workers": 1, "loaders": dict.fromkeys(LIGHT, CHUNKS), "read_ahead": 8}


def run(name: str, setting: Setting, wanted: Mapping[str, int]) -> Outcome:
    """Run all steps once, without the profile of an earlier run."""
    with tempfile.TemporaryDirectory() as cache:
        return _run(name, setting, wanted, cache)


def _run(name: str, setting: Setting, wanted: Mapping[str, int], cache: str) -> Outcome:
    outcome, stop = Outcome(name), threading.Event()
    start = asked = time.perf_counter()
    with ov.launch(
        setting.job(), runtime="process", cache_dir=cache, **options_of(name, setting)
    ) as session:
        provision(session, wanted)
        client, plans = session.client(0), ""

        def look() -> None:
            while not stop.wait(0.5):
                outcome.seen.append((time.perf_counter() - start, loader_processes(session)))

        outcome.seen.append((time.perf_counter() - start, loader_processes(session)))
        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        for _ in range(setting.steps):
            step = next(client)
            outcome.waits.append(time.perf_counter() - asked)
            outcome.at.append(time.perf_counter() - start)
            plans = digest(plans, step.plan_digest)
            time.sleep(setting.step_s)
            asked = time.perf_counter()
        stop.set()
        watcher.join()
        outcome.seen.append((time.perf_counter() - start, outcome.seen[-1][1]))
        outcome.decisions = [
            f"step {d['step']}: {d['words']}"
            for d in session.metrics()["scaling"].get("decisions", ())
        ]
        outcome.plans = plans
    return outcome


def provisions(setting: Setting) -> dict[str, dict[str, int]]:
    """Return processes per source: for the heaviest stage, and for the average over the run."""
    heavy, light = setting.lanes(HEAVY), setting.lanes(LIGHT)
    part = STAGES[1] - STAGES[0]
    mean = {name: part * heavy[name] + (1 - part) * light[name] for name in heavy}

    def hosts(lanes: Mapping[str, float]) -> dict[str, int]:
        # All sources share one process; a source that needs less than a quarter of one stays there.
        return {
            name: 1 + math.ceil(n / TARGET) if n > 0.25 else 1
            for name, n in lanes.items()
            if name in ALONE
        }

    def fitting(wanted: dict[str, int]) -> dict[str, int]:
        while sum(n - 1 for n in wanted.values()) + 1 > setting.hosts:
            largest = max(wanted, key=lambda name: wanted[name])
            wanted[largest] -= 1
        return wanted

    return {
        "worst case": fitting(hosts(heavy)),
        "average": fitting(hosts(mean)),
        **{name: {} for name in DEFAULTS},
    }


def row(outcome: Outcome, worst: Outcome, setting: Setting) -> list[str]:
    first, second = setting.stages
    counts = [n for _, n in outcome.seen]
    heavy = outcome.waited(first, second) / ((second - first) * setting.step_s)
    less, equal = worst.loader_seconds / outcome.loader_seconds, outcome.plans == worst.plans
    return [
        outcome.name,
        f"{min(counts)} to {max(counts)}",
        f"{outcome.loader_seconds:.0f}",
        f"{less:.2f}x less",
        f"{outcome.start_s:.2f}",
        f"{outcome.waited():.2f}",
        f"{heavy:.1%}",
        f"{max(outcome.waits[1:]):.2f}",
        "equal" if equal else "**differ**",
    ]


def plots(done: list[Outcome], setting: Setting, name: str) -> dict[str, str]:
    end = max(o.seen[-1][0] for o in done)
    x = np.linspace(0.0, end, 240)
    first, second = (
        next((o.at[s] for o in done[:1] if s < len(o.at)), 0.0) for s in setting.stages
    )
    marks = [(first, "heavy"), (second, "light")]
    counts, waits = [], []
    for k, o in enumerate(done):
        times, n = np.array([t for t, _ in o.seen]), np.array([c for _, c in o.seen], float)
        counts.append(
            PlotLine(
                label=o.name,
                color=series_color(k),
                y=n[np.clip(np.searchsorted(times, x, side="right") - 1, 0, None)],
            )
        )
        waits.append(
            PlotLine(label=o.name, color=series_color(k), y=np.interp(x, o.at, np.cumsum(o.waits)))
        )
    top = 1.1 * max(float(line.y.max()) for line in counts)
    most = max(0.5, 1.1 * max(float(line.y.max()) for line in waits))
    loaders = Axes(
        x_label="seconds",
        y_label="loader processes",
        y_from=0.0,
        y_to=top,
        show=lambda y: f"{y:.0f}",
    )
    waited = Axes(
        x_label="seconds",
        y_label="waited so far, s",
        y_from=0.0,
        y_to=most,
        show=lambda y: f"{y:.1f}",
    )
    return {
        f"{name}-loaders": lines(x, counts, loaders, about="loader processes", marks=marks),
        f"{name}-waits": lines(x, waits, waited, about="what the trainer has waited", marks=marks),
    }


@click.command(help=__doc__)
@click.option("--hosts", default=0, help="Loader processes at most; 0: as many as there are cores.")
@click.option(
    "--seconds",
    default=60.0,
    show_default=True,
    help="Of each of the four runs, if the trainer never waits.",
)
@click.option("--step-s", default=0.25, show_default=True, help="What a step costs the trainer.")
@click.option("--quick", is_flag=True, help="12 seconds each: to see that it works.")
@click.option(
    "--save", "saving", is_flag=True, help="Write the dated page under benchmarks/results."
)
@click.option(
    "--corpus",
    type=click.Path(path_type=Path),
    default=None,
    help="Where the data is made and kept.",
)
def main(
    hosts: int, seconds: float, step_s: float, quick: bool, saving: bool, corpus: Path | None
) -> None:
    hosts = hosts or cores()
    if quick:
        seconds, step_s = 12.0, 0.1
    folder, console = (
        (corpus or Path(tempfile.gettempdir()) / "overlord-benchmark") / "autoscale-v4",
        wide_console(),
    )
    make_data(folder)
    costs = costs_side_by_side(folder, hosts)
    mean = math.fsum(HEAVY[name] * cost for name, cost in costs.items())
    samples = max(8, round(BUSY * hosts * step_s / mean))
    setting = Setting(
        folder=folder,
        hosts=hosts,
        steps=round(seconds / step_s),
        step_s=step_s,
        costs=costs,
        samples=samples,
    )
    console.print(
        "seconds a sample: "
        + ", ".join(f"{n} {c * 1e3:.2f} ms ({c / costs['text']:.0f}x)" for n, c in costs.items())
    )
    console.print(
        f"{samples} samples a step; busy processes: light {_total(setting, LIGHT):.2f}, "
        f"heavy {_total(setting, HEAVY):.2f} of {hosts}"
    )
    done: list[Outcome] = []
    with progress(console) as bar:
        task = bar.add_task("runs", total=4)
        for name, wanted in provisions(setting).items():
            bar.update(task, description=name)
            done.append(run(name, setting, wanted))
            bar.advance(task)
    rows = [row(o, done[0], setting) for o in done]
    console.print(
        shown_table(
            f"{hosts} loader processes at most, {setting.steps} steps of {step_s} s", HEAD, rows
        )
    )
    console.print("\n".join(done[-1].decisions))
    if saving:
        name = f"{date.today()}-autoscale-{hosts}"
        console.print(
            "saved: "
            f"{save(name, page_text(rows, setting, done[-1], name), plots(done, setting, name))}"
        )


def _total(setting: Setting, mixture: Mapping[str, float]) -> float:
    return math.fsum(setting.lanes(mixture).values())


def page_text(rows: list[list[str]], setting: Setting, scaled: Outcome, name: str) -> str:
    costs = ", ".join(
        f"{n} {c * 1e3:.2f} ms ({c / setting.costs['text']:.0f}x)" for n, c in setting.costs.items()
    )
    return "\n".join(
        [
            "# Loader processes by need",
            "",
            f"`{command_line('benchmarks/autoscale.py')}`",
            "",
            f"A sample costs: {costs}. {setting.samples} samples a step, {setting.steps} "
            f"steps of {setting.step_s} s each; steps "
            f"{setting.stages[0]} to {setting.stages[1]} are the heavy stage, which keeps "
            f"{_total(setting, HEAVY):.2f} processes busy; the "
            f"others {_total(setting, LIGHT):.2f}. Records are hashed in plain Python, "
            "which holds the interpreter lock. *Worst case* and "
            "*average* are provisioned before the first step and stay, in processes of "
            "one thread; *off* and *autoscale* have "
            f"`hosts={setting.hosts}` and otherwise defaults. *Start*: from the call of "
            "`launch` to the first step; it is part of what the "
            "trainer waited, in table and plot. *Share of the heavy stage*: what the "
            "trainer waited there, against the time its steps take. "
            "*plans*: whether every step's plan is that of the first run.",
            "",
            markdown_table(HEAD, rows),
            "",
            f"![loader processes](img/{name}-loaders.svg)",
            "",
            f"![waits](img/{name}-waits.svg)",
            "",
            "What was decided:",
            "",
            *(f"- {words}" for words in scaled.decisions),
            "",
            machine(),
            "",
        ]
    )


if __name__ == "__main__":
    main()
