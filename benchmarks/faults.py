"""Fetch and training time of every step while workers are killed.

It reproduces figure 16 of the Overlord paper (arXiv 2504.09844).

    python benchmarks/faults.py [--loaders 64] [--steps 60] [--step-s 0.3] [--quick] [--save]

Each loader is a process of its own. A trainer of two ranks takes a step, which costs it
``--step-s``, and requests the next; its wait is the fetch time. The planner is killed every 15
steps at prefetch 2 and 4. Eight loaders are killed together at step 35, once without and once with
standbys. Every run must deliver the same bytes as an undisturbed run in one process.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import numpy as np

import overlord as ov
from corpus import default_folder, make_corpus
from overlord.drill.delivery import compare
from overlord.drill.faults import parse_faults
from overlord.drill.run import Drill, Outcome, run_disturbed, run_undisturbed
from overlord.observe.svg import Axes, PlotLine, lines, series_color
from page import command_line, machine, markdown_table, progress, save, shown_table, wide_console

WARM_UP = 5  # steps
# Steps after a kill that it can delay: prefetched steps last for four, recovery takes no longer.
BEHIND = 6
PLOTS = {
    "planner": "fetch time, planner killed",
    "planner-steps": "training steps, planner killed",
    "loaders": "fetch time, loaders killed",
    "loaders-steps": "training steps, loaders killed",
}
HEAD = [
    "run",
    "prefetch",
    "kills",
    "fetch ms: median",
    "p99",
    "longest",
    "longest behind a kill",
    "steps over calm p99",
    "training step ms: median",
    "longest step",
    "back after s (mean, longest)",
    "bytes",
]


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the job: its settings, waits and faults."""

    name: str
    prefetch: int
    faults: str = ""
    shadows: str = "none"


def cells(killed: int, every: int, at: int) -> list[Cell]:
    planner, loaders = f"kill:planner@{every}%{every}", f"kill:loader-worker*{killed}@{at}"
    return [
        Cell("undisturbed", 2),
        Cell("planner killed", 2, planner),
        Cell("undisturbed", 4),
        Cell("undisturbed, once more", 4),
        Cell("planner killed", 4, planner),
        Cell(f"{killed} loaders killed, read again", 4, loaders),
        Cell("undisturbed, shadows", 4, shadows="all"),
        Cell(f"{killed} loaders killed, shadows", 4, loaders, shadows="all"),
    ]


def make_job(loaders: int, root: Path, samples: int) -> ov.Job:
    corpus = make_corpus(root, loaders, seed=0, on_progress=lambda what, done, total: None)
    tokenize = ov.Tokenize(str(corpus.tokenizer), text="text")
    sources = [
        ov.Source(s.name, s.glob, transforms=[tokenize], weight=s.weight) for s in corpus.sources
    ]
    batch = ov.Batch(samples=samples, microbatches=2, context=8192)
    return ov.Job(
        name="faults",
        sources=sources,
        place=ov.ClientPlaceTree(dp=2),
        batch=batch,
        seed=3,
        on_long="truncate",
    )


def run_cell(cell: Cell, job: ov.Job, steps: int, step_s: float) -> Outcome:
    options: dict[str, Any] = {
        "prefetch": cell.prefetch,
        "shadows": cell.shadows,
        "sources_per_host": 1,
        "hosts": len(job.sources),
    }
    drill = Drill(
        job=job,
        faults=parse_faults(cell.faults) if cell.faults else [],
        steps=steps,
        step_s=step_s,
        options=options,
    )
    with tempfile.TemporaryDirectory(prefix="overlord-faults-") as scratch:
        return run_disturbed(drill, Path(scratch))


def waits_ms(outcome: Outcome) -> np.ndarray:
    return 1e3 * np.array(outcome.waits_s[WARM_UP:])


def steps_ms(outcome: Outcome) -> np.ndarray:
    return 1e3 * np.array(outcome.steps_s[WARM_UP:])


def behind_kills_ms(outcome: Outcome) -> float:
    """Return the longest wait of the steps that a kill can delay."""
    return 1e3 * max(max(outcome.waits_s[s.taken : s.taken + BEHIND]) for s in outcome.strikes)


def row(cell: Cell, outcome: Outcome, calm: Outcome, alone: Outcome) -> list[str]:
    waits, steps = waits_ms(outcome), steps_ms(outcome)
    seconds = [r["seconds"] for r in outcome.recoveries]
    back = f"{np.mean(seconds):.2f}, {max(seconds):.2f}" if seconds else "-"
    if cell.shadows != "none" and seconds:
        back += (
            f"; {sum(r['stand_bys'] for r in outcome.recoveries)} of {len(seconds)} by stand-bys"
        )
    over = "-" if outcome is calm else str(int((waits > np.percentile(waits_ms(calm), 99)).sum()))
    equal = "equal" if not compare(alone.delivered, outcome.delivered) else "**differ**"
    p50, p99 = np.percentile(waits, [50, 99])
    behind = f"{behind_kills_ms(outcome):.1f}" if outcome.strikes else "-"
    figures = [
        f"{p50:.1f}",
        f"{p99:.1f}",
        f"{waits.max():.1f}",
        behind,
        over,
        f"{np.median(steps):.1f}",
        f"{steps.max():.1f}",
    ]
    return [cell.name, str(cell.prefetch), str(len(outcome.strikes)), *figures, back, equal]


def targets(done: list[tuple[Cell, Outcome]], calm: dict[tuple[int, str], Outcome]) -> list[str]:
    """Return the targets with prefetch 4, and the results.

    One step in a hundred of any run exceeds a p99. So the waits of the steps after kills are listed
    too, and another undisturbed run under the same limit.
    """
    said = []
    for cell, outcome in done:
        first = calm[cell.prefetch, cell.shadows]
        if cell.prefetch == 4 and outcome is not first:
            waits, limit = waits_ms(outcome), float(np.percentile(waits_ms(first), 99))
            over = waits[waits > limit]
            verdict = (
                "met"
                if not len(over)
                else f"{len(over)} of {len(waits)} steps over it, by {over.max() - limit:.1f} "
                "ms at most"
            )
            behind = (
                f"; behind kills at most {behind_kills_ms(outcome):.1f} ms"
                if outcome.strikes
                else ""
            )
            said.append(
                f"- {cell.name}: no step waits longer than the undisturbed run's p99, "
                f"{limit:.1f} ms: {verdict}{behind}."
            )
    return said


def short(cell: Cell) -> str:
    """Return the label at the end of a line in a plot."""
    return (
        re.sub(
            r"\d+ loaders killed, |undisturbed",
            lambda m: "calm" if m[0] == "undisturbed" else "",
            cell.name,
        )
        + f", {cell.prefetch}"
    )


def plot(
    done: list[tuple[Cell, Outcome]],
    title: str,
    marks: list[tuple[float, str]],
    figures: Callable[[Outcome], np.ndarray],
    label: str,
) -> str:
    steps = min(len(o.waits_s) for _, o in done)
    top = max(10.0, 1.1 * max(float(figures(o).max()) for _, o in done))
    series = [
        PlotLine(label=short(c), color=series_color(k), y=figures(o)[: steps - WARM_UP])
        for k, (c, o) in enumerate(done)
    ]
    return lines(
        np.arange(WARM_UP, steps),
        series,
        Axes(x_label="step", y_label=label, y_from=0.0, y_to=top, show=lambda y: f"{y:.0f}"),
        about=title,
        marks=marks,
    )


@click.command(help=__doc__)
@click.option("--loaders", default=64, show_default=True)
@click.option("--killed", default=8, show_default=True, help="Loaders that are killed together.")
@click.option("--steps", default=60, show_default=True)
@click.option("--step-s", default=0.3, show_default=True, help="What a step costs the trainer.")
@click.option("--samples", default=256, show_default=True, help="Of a step.")
@click.option("--quick", is_flag=True, help="8 loaders, 24 steps: to see that it works.")
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
    loaders: int,
    killed: int,
    steps: int,
    step_s: float,
    samples: int,
    quick: bool,
    saving: bool,
    corpus: Path | None,
) -> None:
    if quick:
        loaders, killed, steps, step_s = 8, 3, 24, 0.1
    every, at = (15, 35) if steps >= 45 else (8, 14)
    if steps < at + BEHIND:
        too_few = (
            f"{steps} are too few: loaders are killed at step {at}, and missed for {BEHIND} "
            "steps at most"
        )
        raise click.BadParameter(too_few, param_hint="--steps")
    console, job = wide_console(), make_job(loaders, corpus or default_folder(), samples)
    alone = run_undisturbed(Drill(job=job, faults=(), steps=steps))
    done: list[tuple[Cell, Outcome]] = []
    every_cell = cells(killed, every, at)
    with progress(console) as bar:
        task = bar.add_task("runs", total=len(every_cell))
        for cell in every_cell:
            bar.update(task, description=f"{cell.name}, prefetch {cell.prefetch}")
            done.append((cell, run_cell(cell, job, steps, step_s)))
            bar.advance(task)
    calm: dict[tuple[int, str], Outcome] = {}
    for cell, outcome in done:
        calm.setdefault((cell.prefetch, cell.shadows), outcome)
    rows = [row(c, o, calm[c.prefetch, c.shadows], alone) for c, o in done]
    console.print(shown_table(f"{loaders} loaders, trainer step {step_s} s", HEAD, rows))
    found = targets(done, calm)
    console.print("\n".join(found))
    if saving:
        name = f"{date.today()}-faults"
        planner = [
            (c, o)
            for c, o in done
            if c.shadows == "none" and "loaders" not in c.name and "once more" not in c.name
        ]
        lost = [
            (c, o)
            for c, o in done
            if c.prefetch == 4 and "planner" not in c.name and "once more" not in c.name
        ]
        kills = [(float(k), "kill") for k in range(every, steps, every)]
        plots = {}
        for which, some, marks in (
            ("planner", planner, kills),
            ("loaders", lost, [(float(at), f"{killed} kills")]),
        ):
            plots[f"{name}-{which}"] = plot(
                some, f"fetch time with {which} killed", marks, waits_ms, "fetch time, ms"
            )
            plots[f"{name}-{which}-steps"] = plot(
                some,
                f"training steps with {which} killed",
                marks,
                steps_ms,
                "fetch and training, ms",
            )
        console.print(
            "saved: "
            f"{save(name, page_text(rows, found, loaders, steps, step_s, name, at, every), plots)}"
        )


def page_text(
    rows: list[list[str]],
    found: list[str],
    loaders: int,
    steps: int,
    step_s: float,
    name: str,
    at: int,
    every: int,
) -> str:
    images = [f"![{title}](img/{name}-{which}.svg)" for which, title in PLOTS.items()]
    return "\n".join(
        [
            "# Fetch and training time while parts are killed",
            "",
            f"`{command_line('benchmarks/faults.py')}`",
            "",
            f"{loaders} loaders, each a process of its own; {steps} steps, the first "
            f"{WARM_UP} left out; a trainer step of {step_s} s; "
            f"the planner is killed every {every} steps, loaders at step {at}. *calm*: "
            "the first undisturbed run of that prefetch and shadows. "
            f"*behind a kill*: in the {BEHIND} steps that follow one. *training step*: "
            "what a rank waits, and what it computes. "
            "*bytes*: whether every rank got, to the byte, what an undisturbed run in "
            "one process gives. "
            "*back after*: from the fault until planning went on; a loader whose "
            "stand-by was in a process killed with it is read again.",
            "",
            markdown_table(HEAD, rows),
            "",
            "## Targets",
            "",
            *found,
            "",
            "\n\n".join(images),
            "",
            machine(),
            "",
        ]
    )


if __name__ == "__main__":
    main()
