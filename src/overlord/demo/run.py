"""Run the demo: write a corpus, run a job on it, kill workers, write a report."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import overlord as ov
from overlord.demo.corpus import Shape, Show, cannot_write, later_mixture, make_corpus, make_job
from overlord.demo.formats import DemoFormats
from overlord.demo.report import report
from overlord.demo.result import DemoResult, compare, lengths_by_source, mixes
from overlord.demo.terminal import live_view, progress_line, side_by_side, summary
from overlord.drill.faults import parse_faults
from overlord.drill.run import Drill, run_drill
from overlord.drill.tables import drill_view
from overlord.jobfile.yaml_file import write_job
from overlord.observe.progress import Meter, Taken, interruptible, watch
from overlord.observe.progress_bars import progress_bar
from overlord.process.resources import pss_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.drill.run import DrillReport
    from overlord.job.job import Job
    from overlord.plan.plan import LoadingPlan

ShowStep = Callable[[Taken, Meter], None]
COMPUTE_S = 0.12  # compute time of the stand-in trainer for a perfectly balanced first step
FAULTS = "kill:loader-worker@6,kill:planner@12,kill:constructor-worker@18"
DRILL_STEPS = 24
PLAIN_LINES = 8  # about this many progress lines if stdout is not a terminal


def run_demo(
    out: Path,
    shape: Shape,
    steps: int,
    console: Console,
    command: str,
    compute_s: float = COMPUTE_S,
    faults: str = FAULTS,
    runtime: str = "local",
) -> DemoResult:
    """Run the whole demo in the folder ``out``, and return its measurements.

    ``command``: the command line for the report. ``compute_s``: seconds that the stand-in trainer
    computes in a balanced first step. ``faults``: the faults of the drill that follows the run;
    empty: no drill.
    """
    _make_folder(out)
    formats = DemoFormats.installed()
    if formats.note:
        console.print(formats.note, markup=False)
    with _status_lines(console) as show:
        made = interruptible(lambda: make_corpus(out, shape, show, formats))
    job = make_job(out, shape, formats)
    yaml = write_job(job)
    _write(out / "job.yaml", yaml)
    console.print(
        f"{len(job.sources)} sources {'written to' if made else 'found in'} {out / 'corpus'}; "
        f"{shape.ranks} ranks; job file: {out / 'job.yaml'}"
    )
    result = _measure(job, steps, console, command, compute_s, runtime)
    if faults:
        drilled = _run_drill(job, faults, console, "ray" if runtime == "ray" else "process")
        result = replace(result, drill=drilled)
    _write(out / "report.html", report(result, yaml).to_html())
    width = min(console.width, 120)
    for view in (side_by_side(result, width), summary(result, width)):
        console.print()
        console.print(view, soft_wrap=False)
    if result.drill is not None:
        console.print(
            f"\nThe same job {'on Ray' if runtime == 'ray' else 'in several processes'}, while "
            "some of them are killed:"
        )
        console.print(drill_view(result.drill))
    console.print(f"\nReport with plots: {out / 'report.html'}")
    console.print("Next:")
    for command_line in ("inspect {}", "plan {} --step 3 --strategy vanilla", "run {} --steps 20"):
        console.print(
            f"  {program()} {command_line.format(shlex.quote(str(out / 'job.yaml')))}",
            soft_wrap=True,
        )
    return result


def _run_drill(job: Job, faults: str, console: Console, runtime: str) -> DrillReport:
    """Run the job undisturbed, and again in several processes with faults; compare the bytes."""
    options = {"runtime": runtime, "sources_per_host": 2, "hosts": 3}
    drill = Drill(
        job=job, faults=parse_faults(faults), steps=DRILL_STEPS, step_s=0.1, options=options
    )
    with progress_bar(console, "steps with faults and without", 2 * DRILL_STEPS) as advance:
        return run_drill(
            drill,
            lambda run, taken: advance(taken + (DRILL_STEPS if run != "undisturbed" else 0), None),
        )


def program() -> str:
    """Return the shell command that starts this program.

    The command has a path unless ``overlord`` of this environment is the first on the PATH.
    """
    script = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "overlord")
    found = shutil.which("overlord")
    if found and os.path.abspath(found) == script:
        return "overlord"
    if not os.access(script, os.X_OK):
        return f"{shlex.quote(sys.executable)} -m overlord"
    relative = os.path.relpath(script)
    return shlex.quote(script if relative.startswith("..") else relative)


def _measure(
    job: Job, steps: int, console: Console, command: str, compute_s: float, runtime: str
) -> DemoResult:
    """Run the job for ``steps`` steps with a stand-in trainer, and return the measurements."""
    before = pss_bytes()
    trainer, meter = StandInTrainer(compute_s), Meter()
    plans: list[LoadingPlan] = []
    with ov.launch(job, runtime=runtime) as session:
        changed_at = session.set_mixture(later_mixture(), at=steps // 2) if steps >= 4 else None
        with _progress(console, steps) as show:
            for taken in watch(session, range(job.place.world_size), steps):
                meter.add(taken)
                plans.append(taken.plan)
                show(taken, meter)
                trainer.compute(taken)
        meter.stop()
        metrics = session.metrics()["sources"]
        counts = session.state_dict()["counts"]  # of taken steps only, without prefetched ones
    wanted, realised = mixes(plans)
    return DemoResult(
        command=command,
        names=job.names,
        ranks=job.place.world_size,
        samples=int(job.batch.samples or 0),
        context=job.batch.context,
        changed_at=changed_at,
        lengths=lengths_by_source(plans),
        wanted=wanted,
        realised=realised,
        bound=np.array([plan.imbalance()["bound"] for plan in plans]),
        compared=compare(plans, job),
        quarantined={name: int(metrics[name]["quarantined"]) for name in job.names},
        on_long=job.on_long,
        lost={name: int(counts["lost_tokens"].get(name, 0)) for name in job.names},
        tokens=meter.tokens,
        tokens_per_s=meter.tokens_per_s,
        wait_ms=meter.wait_ms,
        first_wait_ms=meter.first_wait_s * 1e3,
        compute_ms=trainer.mean_ms,
        peak_bytes=meter.peak_pss,
        before_bytes=before,
    )


class StandInTrainer:
    """A stand-in for a trainer, which sleeps for the compute time of the slowest rank.

    ``first_s``: seconds for the mean cost of a rank in the first step; they set the scale.
    """

    def __init__(self, first_s: float):
        self._first_s, self._per_cost, self._slept_s, self._steps = first_s, 0.0, 0.0, 0

    def compute(self, taken: Taken) -> None:
        """Sleep for the compute time of one step."""
        loads = taken.plan.loads().sum(axis=1)
        if not self._per_cost:
            self._per_cost = self._first_s / (float(loads.mean()) or 1.0)
        start = time.perf_counter()
        time.sleep(self._per_cost * float(loads.max()))
        self._slept_s += time.perf_counter() - start
        self._steps += 1

    @property
    def mean_ms(self) -> float:
        """The mean compute time per step in milliseconds."""
        return 1e3 * self._slept_s / max(1, self._steps)


@contextmanager
def _status_lines(console: Console) -> Iterator[Show]:
    """Yield a function that shows the current activity, in place on a terminal, else by line."""
    if console.is_terminal:
        with console.status("checking the corpus") as status:
            yield status.update
    else:
        yield lambda text: console.print(text)


@contextmanager
def _progress(console: Console, steps: int) -> Iterator[ShowStep]:
    """Yield a function that shows progress: a live view on a terminal, else about eight lines."""
    if not console.is_terminal:
        every = max(1, steps // PLAIN_LINES)

        def show(taken: Taken, meter: Meter) -> None:
            if meter.steps % every == 0 or meter.steps == steps:
                console.print(progress_line(meter, steps, taken.plan.imbalance()["bucket"]))

        yield show
        return
    from rich.live import Live

    with Live(console=console, refresh_per_second=12) as live:
        yield lambda taken, meter: live.update(live_view(taken.plan, meter, steps, console.width))


def _make_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise cannot_write(out, fault) from fault


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as fault:
        raise cannot_write(path.parent, fault) from fault
