"""Does TempBalance help, and more with less data? A Llama on text and an FNO on Burgers' equation.

    python benchmarks/tempbalance_evidence.py prepare                     # data files, needs no GPU
    python benchmarks/tempbalance_evidence.py probe                       # on an H200: seconds per step
    python benchmarks/tempbalance_evidence.py plan                        # runs that are left, and their seconds
    python benchmarks/tempbalance_evidence.py run --budget 540            # a round; call it again
    python benchmarks/tempbalance_evidence.py table --save                # table and plot of all rounds
    python benchmarks/tempbalance_evidence.py run --device cpu --tiny     # shows that it runs, and proves nothing

Every run takes at most 90 s; several run at once, in workers that take one after another. Results are
appended to one file of JSON lines, and runs that are in it are not repeated. The arms are TempBalance and
five controls. The rate of every arm is chosen on the validation value of seed 0, on the same grid. The
other seeds run at that rate only, and test values are compared by seed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # its own modules

from measured.pages import RESULTS, tagged, this_machine
from page import command_line, plot_file
from temperature.pool import Pool, serve
from temperature.records import (
    LEAST_SEEDS,
    TASKS,
    Records,
    Task,
    beyond_chance,
    by_seed,
    cells,
    described,
    first_seed,
    key,
    left,
    missing,
    other_choices,
    plot,
    rows,
    score,
    table,
    trend,
)

if TYPE_CHECKING:
    from temperature.training import Place, Training

LIMIT_S = 90.0  # of one run
MARGIN = 1.2  # of the expected time of a run
FAILED_IN_A_ROW = 8  # then a round ends
HERE = Path(__file__).resolve()


def tasks_of(given: argparse.Namespace) -> list[Task]:
    """Return the chosen tasks, with the chosen number of steps."""
    steps = dict(part.split("=") for part in given.steps.split(",") if part)
    chosen = [TASKS[name] for name in given.tasks.split(",")]
    return [replace(t, steps=int(steps[t.name])) if t.name in steps else t for t in chosen]


def prepare(given: argparse.Namespace) -> None:
    """Make the files of data, once."""
    from temperature import burgers, llama

    began = time.monotonic()
    if "burgers" in given.tasks:
        burgers.dataset(given.data, given.tiny)
    if "llama" in given.tasks:
        _, digest = llama.text(given.data, given.text, given.tiny)
        refuse_another_text(digest, given)
    print(f"data is there after {time.monotonic() - began:.1f} s", flush=True)


def refuse_another_text(digest: str, given: argparse.Namespace) -> None:
    """End the program if runs in the file had another text: theirs and new ones do not compare."""
    before = {
        r["data"] for r in Records(given.results).read() if "data" in r and r["tiny"] == given.tiny
    }
    if before - {digest}:
        raise SystemExit(
            f"{given.results}: expected runs on the text {digest}, got {', '.join(sorted(before))}; "
            "give the same --text and packages, or another --results"
        )


def seconds(task: Task, records: Iterable[dict[str, Any]]) -> float:
    """Return the mean time of a run of this task by those that finished; zero if none has."""
    took = [
        r["seconds"]
        for r in records
        if r["task"] == task.name and r["steps"] == task.steps and "seconds" in r
    ]
    return sum(took) / len(took) if took else 0.0


def counted(fewest: int, most: int) -> str:
    return f"{fewest}" if fewest == most else f"{fewest} to {most}"


def plan(given: argparse.Namespace) -> None:
    """Print how many runs are left, and their seconds by those in the file; run nothing."""
    done, low, high = Records(given.results).done(), 0.0, 0.0
    for task in tasks_of(given):
        each = seconds(task, done.values())
        fewest, most = left(task, given.tiny, done, given.seeds)
        low, high = low + fewest * each, high + most * each
        print(
            f"{task.name}, {task.steps} steps: {counted(fewest, most)} runs of {each:.1f} s are left"
        )
    low, high = low / given.at_once, high / given.at_once
    print(f"about {low:.0f} to {high:.0f} s with {given.at_once} workers, and their start")


class Round:
    """Runs that are not in the file, until the budget is spent."""

    def __init__(self, given: argparse.Namespace, end: float):
        self.given, self._end, self.tasks = given, end, tasks_of(given)
        self._records, self._failed, self._in_a_row = Records(given.results), set[Any](), 0
        self._done = self._records.done()
        self.finished = 0

    def execute(self, pool: Pool) -> None:
        while time.monotonic() < self._end and self._in_a_row < FAILED_IN_A_ROW:
            more = True
            while pool.idle and more:
                cell = self._next(pool)
                more = cell is not None
                if cell is not None:
                    pool.idle[0].give(cell)
            # idle workers without a run: only running ones can make another run possible
            if not pool.busy and not more:
                return
            record = pool.answer(min(0.5, max(0.0, self._end - time.monotonic())))
            if record is not None:
                self._keep(record)
        print(f"{len(pool.busy)} runs were stopped", flush=True)

    def _next(self, pool: Pool) -> dict[str, Any] | None:
        taken = self._failed | set(self._done) | {key(w.cell) for w in pool.busy if w.cell}
        fits = self._fitting()
        for cell in by_seed(fits, self.given.tiny, self._done, self.given.seeds):
            if key(cell) not in taken:
                return cell
        return None

    def _fitting(self) -> list[Task]:
        """Tasks of which a run is expected to end before the round does."""
        if self.given.tiny:
            return self.tasks
        time_left = self._end - time.monotonic()
        return [t for t in self.tasks if time_left >= MARGIN * seconds(t, self._done.values())]

    def _keep(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        name = f"{record['task']} {record['fraction']:g} {record['arm']}, seed {record['seed']}"
        if "failed" in record:
            self._failed.add(key(record))
            self._in_a_row += 1
            print(f"failed: {name}: {record['failed']}", file=sys.stderr, flush=True)
            return
        self._done[key(record)] = record
        self.finished, self._in_a_row = self.finished + 1, 0
        took = f"{record['seconds']:.1f} s" + ("" if record["graph"] else ", eager")
        print(f"{name}, {record['lr']:g}: {record['test']:.4f} ({took})", flush=True)

    def summary(self) -> str:
        found = [left(t, self.given.tiny, self._done, self.given.seeds) for t in self.tasks]
        fewest, most = (sum(counts) for counts in zip(*found, strict=True))
        words = (
            f"{self.finished} runs finished, {len(self._failed)} failed, {counted(fewest, most)}"
        )
        return f"{words} are left"


def worker_command(given: argparse.Namespace) -> list[str]:
    command = [sys.executable, str(HERE), "worker", "--device", given.device]
    command += ["--data", str(given.data), "--spectra", given.spectra]
    command += ["--text", str(given.text)] if given.text else []
    return command + (["--eager"] if given.eager else [])


def run_round(given: argparse.Namespace) -> None:
    mine = Round(given, time.monotonic() + given.budget)
    pool = Pool(worker_command(given), given.data / "logs", given.at_once, LIMIT_S)
    try:
        prepare(given)  # while the workers load their libraries
        mine.execute(pool)
    finally:
        pool.close()
    print(mine.summary(), flush=True)


def place_of(given: argparse.Namespace) -> Place:
    import torch

    from temperature.training import Place

    torch.set_float32_matmul_precision("high")
    return Place(
        device=torch.device(given.device),
        data=given.data,
        text=given.text,
        graph=not given.eager,
        spectra=given.spectra,
    )


def run_cell(cell: dict[str, Any], place: Place) -> dict[str, Any]:
    """Execute one run in this process, and free what it took."""
    import torch

    from temperature.training import freed, trained

    training, rates, errors = _prepared(cell, place)
    try:
        found = trained(training, place) | errors()
        found |= {"mean_multiplier": rates.mean, "alphas": rates.alphas, "spectra": place.spectra}
    finally:
        training.close()
        del training, rates, errors
        freed(place.device)
    card = torch.cuda.get_device_name() if place.device.type == "cuda" else "cpu"
    return found | {"device": card, "torch": torch.__version__}


def work(given: argparse.Namespace) -> None:
    import torch

    place = place_of(given)
    torch.zeros(1, device=place.device)  # opens the GPU
    serve(partial(run_cell, place=place))


def probe(given: argparse.Namespace) -> None:
    """Print seconds per step of each task, as a graph and eager, and of one measurement."""
    given.tasks = "burgers,llama"
    prepare(given)
    place = place_of(given)
    for task in tasks_of(given):
        cell = next(cells(task, given.tiny, {}, 1))
        cell |= {"steps": given.probe_steps, "arm": "balanced", "every": given.probe_steps}
        try:
            _probe_task(cell, task, left(task, given.tiny, {})[1], place)
        except Exception as error:  # any: the other task is probed too
            print(f"{task.name}: {type(error).__name__}: {error}", flush=True)


def _probe_task(cell: dict[str, Any], task: Task, runs: int, place: Place) -> None:
    _probed(cell | {"steps": 3}, replace(place, graph=False))  # libraries load
    losses = {}
    for graph in (False, True):
        took, words, losses[graph] = _probed(cell, replace(place, graph=graph))
        print(f"{task.name}, {'graph' if graph else 'eager'}: {words}", flush=True)
        print(
            f"  steps of {runs} runs of {task.steps}: {took * runs * task.steps:.0f} s", flush=True
        )
    apart = (losses[True] - losses[False]).abs().max()
    print(f"{task.name}: largest difference of a loss {apart:.3g}", flush=True)
    for spectra in ("device", "cpu"):
        words = _measured(cell, place, spectra)
        print(f"{task.name}, spectra on {spectra}: {words}", flush=True)


def _prepared(cell: dict[str, Any], place: Place) -> tuple[Training, Any, Any]:
    from temperature import burgers, llama

    made: tuple[Training, Any, Any]
    made = (llama if cell["task"] == "llama" else burgers).prepared(cell, place)
    return made


def _probed(cell: dict[str, Any], place: Place) -> tuple[float, str, Any]:
    """Execute a run without measurements; return seconds per step, all times in words, and losses."""
    import torch

    from temperature.training import freed

    times = [time.monotonic()]

    def lap() -> None:
        if place.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.monotonic())

    training, _, errors = _prepared(cell | {"arm": "uniform"}, place)
    lap()
    if place.graph:
        training.capture()
    lap()
    training.run()
    lap()
    found, losses = errors(), training.losses.cpu()
    lap()
    made, captured, ran, evaluated = (b - a for a, b in pairwise(times))
    words = (
        f"{1e3 * ran / cell['steps']:.2f} ms a step; setup {made:.2f} s, capture {captured:.2f} s, "
        f"evaluation {evaluated:.2f} s; losses {losses[0]:.4f} to {losses[-1]:.4f}, test "
        f"{found['test']:.4f}"
    )
    if place.graph and not training.graph:
        words += f"; NO GRAPH: {training.reason}"
    if place.device.type == "cuda":
        words += f"; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    training.close()
    del training, errors
    freed(place.device)
    return ran / cell["steps"], words, losses


def _measured(cell: dict[str, Any], place: Place, spectra: str) -> str:
    """Return the seconds of two measurements in words; the first one loads libraries."""
    training, rates, _ = _prepared(cell, replace(place, spectra=spectra))
    took = []
    for _ in range(2):
        began = time.monotonic()
        found = rates.measure()
        took.append(time.monotonic() - began)
    training.close()
    mean = sum(found.values()) / len(found)
    return f"{took[0]:.2f} s, then {took[1]:.2f} s; mean exponent {mean:.6f}"


def show(given: argparse.Namespace) -> None:
    records = [r for r in Records(given.results).read() if r["tiny"] == given.tiny]
    parts = [
        "# TempBalance and its controls\n",
        "Arms: TempBalance (balanced: by block, exponents by `farms`, `linear` from 0.5 to 1.5) and "
        "five controls. Gain: 1 - test / test of the uniform arm with the same seed, in percent: "
        "positive is better. ± is the standard error over seeds. The rate of every arm was chosen on "
        "the validation value of seed 0, from the same grid; other seeds ran at that rate, and at the "
        "uniform arm's. Test values chose nothing. All values are those after the last step.\n",
    ]
    plots: dict[str, str] = {}
    for task in tasks_of(given):
        parts += _section(task, records, given, plots)
    failed = sum("failed" in r for r in records)
    devices = sorted({r["device"] for r in records if "device" in r})
    eager = sum(not r["graph"] for r in records if "graph" in r)
    diverged = sum("test" in r and not math.isfinite(score(r)) for r in records)
    versions = sorted({f"torch {r['torch']}" for r in records if "torch" in r})
    parts.append(
        f"{len(records)} runs in the file, {failed} failed, {diverged} diverged, {eager} without a CUDA "
        f"graph; {', '.join([*devices, *versions]) or 'no device'}. Rounds: `python "
        f"tempbalance_evidence.py run`. This page: `{command_line('tempbalance_evidence.py')}`\n"
    )
    if given.save and not given.tiny:
        machine = "H200" if any("H200" in d for d in devices) else this_machine()
        print(f"wrote {_saved(parts, plots, machine)}")
    print("\n".join(parts))


def _saved(parts: list[str], plots: dict[str, str], machine: str) -> Path:
    """Write the dated page and its plots, without overwriting a page."""
    folder = Path(os.environ.get("OUT") or RESULTS)
    (folder / "img").mkdir(parents=True, exist_ok=True)
    stem = f"{date.today().isoformat()}-tempbalance-evidence"
    name, _ = tagged(stem, "\n".join(parts), machine, folder)
    for task, svg in plots.items():
        (folder / "img" / f"{name}-{task}.svg").write_text(svg, encoding="utf-8")
        parts.append(f"![{task}](img/{name}-{task}.svg)\n")
    name, text = tagged(stem, "\n".join(parts), machine, folder)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return folder / f"{name}.md"


def _section(
    task: Task, records: list[dict[str, Any]], given: argparse.Namespace, plots: dict[str, str]
) -> list[str]:
    """Return the text of one task, and add its plot."""
    steps = task.steps if not given.tiny else None
    mine = [r for r in records if r["task"] == task.name and steps in (None, r["steps"])]
    made = rows(mine, task.name, given.tiny)
    lacking = missing(mine, task, given.tiny, given.seeds)
    parts = [f"## {task.name}: {task.metric}\n"]
    parts += [described(task)] * (not given.tiny)
    if made:
        fewest = min(len(row.seeds) for row in made)
        few = f"Some arms have fewer than {LEAST_SEEDS} seeds: no result yet.\n"
        parts += [few] * (fewest < LEAST_SEEDS)
        texts = {r["data"] for r in mine if "data" in r}
        parts += [f"{len(texts)} different texts: runs are not comparable.\n"] * (len(texts) > 1)
        parts += [table(made, task, given.tiny), "", beyond_chance(made), trend(made)]
        parts += [
            other_choices(made),
            "Test values of seed 0 at all rates:\n",
            first_seed(made),
            "",
        ]
        about = f"Gains of the arms by the amount of data, {task.name}"
        if svg := plot(made, about):
            plots[task.name] = plot_file(svg)
        if svg := plot(made, f"{about}, at equal rates", same=True):
            plots[f"{task.name}-equal-rates"] = plot_file(svg)
    if lacking:
        parts += ["Missing:\n", *(f"- {line}" for line in lacking), ""]
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("prepare", "probe", "plan", "run", "table", "worker"))
    parser.add_argument("--tasks", default="burgers,llama", help="in the order of their runs")
    parser.add_argument("--steps", default="", help="other numbers of steps, as llama=300")
    parser.add_argument("--seeds", type=int, default=LEAST_SEEDS)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--spectra", choices=("device", "cpu"), default="cpu")
    parser.add_argument("--probe-steps", type=int, default=60)
    parser.add_argument("--results", type=Path, default=Path("build/tempbalance/results.jsonl"))
    parser.add_argument("--data", type=Path, default=Path("build/tempbalance"))
    parser.add_argument("--text", type=Path, help="a folder of text; by default installed packages")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=4, help="workers")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of a round")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    actions = {"prepare": prepare, "probe": probe, "plan": plan, "run": run_round}
    actions |= {"table": show, "worker": work}
    actions[given.action](given)


if __name__ == "__main__":
    main()
