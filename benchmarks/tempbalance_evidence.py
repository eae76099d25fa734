"""Does TempBalance help, and more with less data? A Llama on text and an FNO on Burgers' equation.

    python benchmarks/tempbalance_evidence.py run --budget 540            # a round on an H200; call it again
    python benchmarks/tempbalance_evidence.py table --save                # table and plot of all rounds
    python benchmarks/tempbalance_evidence.py run --device cpu --tiny     # shows that it runs, and proves nothing

Every run is a process of at most 90 s; several run at once. Results are appended to one file of JSON lines,
and runs that are in it are not repeated. The arms are TempBalance and five controls; the rate of every arm
is tuned on validation data on the same grid, and test values are compared by seed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # its own modules

from page import command_line, plot_file
from temperature.arms import MEAN
from temperature.records import (
    LEAST_SEEDS,
    TASKS,
    Records,
    cells,
    key,
    mean_multiplier,
    plot,
    rows,
    table,
)

LIMIT_S = 90.0  # of one run
HERE = Path(__file__).resolve()


@dataclass(slots=True)
class Running:
    """One run in a process of its own."""

    cell: dict[str, Any]
    process: subprocess.Popen[str]
    began: float = field(default_factory=time.monotonic)


def start(cell: dict[str, Any], given: argparse.Namespace) -> Running:
    command = [sys.executable, str(HERE), "cell", json.dumps(cell), "--device", given.device]
    command += ["--data", str(given.data)] + (["--text", str(given.text)] if given.text else [])
    environ = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )
    return Running(cell, process)


def finished(run: Running) -> dict[str, Any] | None:
    """The record of a run that ended or took too long; None while it runs."""
    took = time.monotonic() - run.began
    if run.process.poll() is None:
        if took < LIMIT_S:
            return None
        run.process.kill()
    out, err = run.process.communicate()
    if run.process.returncode == 0:
        return run.cell | json.loads(out.splitlines()[-1]) | {"seconds": round(took, 1)}
    reason = f"longer than {LIMIT_S:g} s" if took >= LIMIT_S else err.strip()[-300:]
    return run.cell | {"failed": reason}


def waiting(given: argparse.Namespace, records: Records) -> Iterator[dict[str, Any]]:
    """Runs that are not in the file. The arm at the mean rate follows its balanced twin."""
    done = records.done()
    for name in given.tasks.split(","):
        for cell in cells(TASKS[name], given.tiny):
            if key(cell) in done:
                continue
            if cell["arm"] != MEAN:
                yield cell
            elif (found := mean_multiplier(cell, done)) is not None:
                yield cell | {"mean": found}


def run_round(given: argparse.Namespace) -> None:
    records, end = Records(given.results), time.monotonic() + given.budget
    if "burgers" in given.tasks:
        from temperature.burgers import dataset

        dataset(given.data, given.tiny)  # once, before the runs ask for it
    running: list[Running] = []
    finished_runs, failed = 0, set[tuple[Any, ...]]()
    while True:
        taken = failed | {key(run.cell) for run in running}
        # a run that could end after the budget is left for the next round
        room = time.monotonic() + (0 if given.tiny else LIMIT_S) < end
        if room and len(running) < given.at_once:
            cell = next((c for c in waiting(given, records) if key(c) not in taken), None)
            if cell is not None:
                running.append(start(cell, given))
                continue
        if not running:
            break
        running, ended = _settle(running, records, failed)
        finished_runs += ended
    done = records.done()
    wanted = [key(c) for name in given.tasks.split(",") for c in cells(TASKS[name], given.tiny)]
    left = sum(k not in done for k in wanted)
    print(f"{finished_runs} runs finished, {len(failed)} failed, {left} of {len(wanted)} are left")


def _settle(
    running: list[Running], records: Records, failed: set[tuple[Any, ...]]
) -> tuple[list[Running], int]:
    time.sleep(0.02)
    still, ended = [], 0
    for run in running:
        record = finished(run)
        if record is None:
            still.append(run)
            continue
        records.append(record)
        if "failed" in record:
            failed.add(key(record))
            print(f"failed: {record}", file=sys.stderr, flush=True)
        else:
            ended += 1
    return still, ended


def run_cell(given: argparse.Namespace) -> None:
    """One run, in this process; its result is the last line of the output."""
    import torch

    from temperature import burgers, llama

    cell, device = json.loads(given.cell), torch.device(given.device)
    torch.set_float32_matmul_precision("high")
    if cell["task"] == "llama":
        found = llama.train(cell, device, cell["tiny"], given.text)
    else:
        found = burgers.train(cell, device, cell["tiny"], given.data)
    card = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(json.dumps(found | {"device": card, "torch": torch.__version__}))


def show(given: argparse.Namespace) -> None:
    records = Records(given.results).read()
    parts = [
        "# TempBalance and its controls\n",
        "Gains are over the uniform rate, by seed: positive is better. ± is the standard error over "
        "seeds. The rate of every arm was chosen on validation data.\n",
    ]
    plots: dict[str, str] = {}
    for name, task in TASKS.items():
        made = rows(records, name, given.tiny)
        if not made:
            continue
        fewest = min(len(row.seeds) for row in made)
        notes = [] if fewest >= LEAST_SEEDS else [f"Only {fewest} seeds: no result yet.\n"]
        texts = {r["data"] for r in records if r["task"] == name and "data" in r}
        notes += [f"{len(texts)} different texts: runs are not comparable.\n"] * (len(texts) > 1)
        parts += [f"## {name}: {task.metric}\n", *notes, table(made), ""]
        if svg := plot(made, f"Gains of the arms by the amount of data, {name}"):
            plots[name] = plot_file(svg)
    failed = sum("failed" in r for r in records)
    devices = sorted({r["device"] for r in records if "device" in r})
    parts.append(
        f"{len(records)} runs in the file, {failed} failed; {', '.join(devices) or 'no device'}. "
        f"Run: `{command_line('tempbalance_evidence.py')}`\n"
    )
    folder = Path(os.environ.get("OUT") or HERE.parent / "results")
    stem = f"{date.today().isoformat()}-tempbalance"
    if given.save and not given.tiny:
        (folder / "img").mkdir(parents=True, exist_ok=True)
        for name, svg in plots.items():
            (folder / "img" / f"{stem}-{name}.svg").write_text(svg, encoding="utf-8")
            parts.append(f"![{name}](img/{stem}-{name}.svg)\n")
        (folder / f"{stem}.md").write_text("\n".join(parts), encoding="utf-8")
        print(f"wrote {folder / stem}.md")
    print("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=("run", "table", "cell"))
    parser.add_argument("cell", nargs="?", help="of the action cell: a run as JSON")
    parser.add_argument("--tasks", default="burgers,llama")
    parser.add_argument("--results", type=Path, default=Path("build/tempbalance/results.jsonl"))
    parser.add_argument("--data", type=Path, default=Path("build/tempbalance"))
    parser.add_argument("--text", type=Path, help="a folder of text; by default installed packages")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--at-once", type=int, default=6)
    parser.add_argument("--budget", type=float, default=540.0, help="seconds of a round")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--save", action="store_true")
    given = parser.parse_args()
    {"run": run_round, "table": show, "cell": run_cell}[given.action](given)


if __name__ == "__main__":
    main()
