"""Predict the training throughput of the paper's model pairs (its Figure 13).

Plans of the package are fed to a model of step time.

    python benchmarks/endtoend_model.py --quick      # two assumption sets, one seed
    python benchmarks/endtoend_model.py --save       # all sets: minutes; writes benchmarks/results

benchmarks/README.md explains the assumptions and their limits.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

# Modules of this folder, also when the program is started from another one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

import click
from rich.console import Console

from endtoend.plans import Prediction, predict
from endtoend.setups import MAIN, MEASURED_KAPPA, SWEEP, Setup, pairs
from endtoend.tables import PAPER, findings, plot, speed_table, sweep_table
from page import (
    Numbers,
    command_line,
    context_name,
    machine,
    markdown_table,
    progress,
    save,
    shown_table,
)
from profiles import PROFILES


def run(
    setups: Sequence[Setup], contexts: Sequence[int], seeds: int, console: Console
) -> list[Prediction]:
    """Run all sets, profiles and contexts; every kappa uses the same steps."""
    jobs = [
        (setup, profile, context)
        for setup in setups
        for profile in PROFILES
        for context in contexts
    ]
    models = [pair for kappa in (1.0, 0.0, MEASURED_KAPPA) for pair in pairs(kappa)]
    found: list[Prediction] = []
    with progress(console) as bars, ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        bar = bars.add_task("assumption sets x profiles x contexts", total=len(jobs))
        for part in [pool.submit(predict, *job, models, range(seeds)) for job in jobs]:
            found += part.result()
            bars.advance(bar)
    return found


def sections(found: Sequence[Prediction]) -> list[tuple[str, str, list[str], list[list[str]]]]:
    contexts = " / ".join(context_name(c) for c in sorted({p.context for p in found}))
    main = [p for p in found if p.setup in MAIN]
    sweep = (
        "Every assumption set",
        f"Means over the six model pairs at contexts {contexts}; `best pair`: ours over `vanilla`.",
        *sweep_table(found),
    )
    if not main:
        return [sweep]
    shows = (
        "Tokens per second and card. `of ideal`: no card ever waits and no pipeline has a bubble."
    )
    return [sweep, ("Model pairs", shows, *speed_table(main))]


def page(
    found: Sequence[Prediction], today: str, command: str, seeds: int, pictures: Sequence[str]
) -> str:
    wanted = ", ".join(f"{gain} at {context_name(c)}" for c, gain in PAPER.items())
    out = [f"# End-to-end model, {today}", "", f"`{command}`, {seeds} seed(s). {machine()}", ""]
    out += [
        "A model, no measurement: FLOPs at a fixed share of the peak, nothing for "
        "communication. What is assumed: `benchmarks/README.md`.",
        f"The paper reports for hybrid over vanilla {wanted}, at most 4.54, 1.77 on "
        "average; it does not print its set-up.",
        "",
        "## What it says",
        "",
        *findings(found),
        "",
    ]
    for title, shows, head, rows in sections(found):
        out += [f"## {title}", "", shows, "", markdown_table(head, rows), ""]
        if title == "Every assumption set":
            out += [f"![{name}](img/{name}.svg)\n" for name in pictures]
    return "\n".join(out).rstrip() + "\n"


@click.command(help=__doc__.split("\n")[0] if __doc__ else None)
@click.option("--contexts", type=Numbers(), default="4096,8192,16384", show_default=True)
@click.option(
    "--seeds",
    type=click.IntRange(1),
    default=3,
    show_default=True,
    help="Different steps, averaged.",
)
@click.option("--quick", is_flag=True, help="Two assumption sets, one seed: a look.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Writes every prediction there.",
)
@click.option(
    "--save",
    "saves",
    is_flag=True,
    help="Writes the page, dated, and its plots to benchmarks/results.",
)
def main(contexts: list[int], seeds: int, quick: bool, json_path: Path | None, saves: bool) -> None:
    console = Console()
    setups, seeds = ((SWEEP[0], MAIN[0]), 1) if quick else (SWEEP, seeds)
    found = run(setups, contexts, seeds, console)
    for title, _, head, rows in sections(found):
        console.print(shown_table(title, head, rows))
    console.print("\n".join(findings(found)), markup=False)
    today = datetime.date.today().isoformat()
    if json_path:
        json_path.write_text(
            json.dumps({"date": today, "predictions": [asdict(p) for p in found]}, indent=1)
        )
    if saves:
        pictures = {f"endtoend-{profile}": plot(found, profile) for profile in PROFILES}
        command = command_line("benchmarks/endtoend_model.py")
        text = page(found, today, command, seeds, list(pictures))
        console.print(f"saved {save(f'{today}-endtoend-model', text, pictures)}")


if __name__ == "__main__":
    main()
