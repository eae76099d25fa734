"""``overlord demo``: a corpus, a job over it, and what planning does to it, in well under a
minute.
"""

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
from overlord.demo.corpus import Say, Shape, cannot_write, later_mixture, make_corpus, make_job
from overlord.demo.figures import Figures, compare, lengths_by_source, mixes
from overlord.demo.pages import report
from overlord.demo.show import live_view, progress_line, side_by_side, summary
from overlord.demo.storage import Storing
from overlord.drill.faults import parse_faults
from overlord.drill.run import Drill, rehearse
from overlord.drill.show import drill_view
from overlord.jobfile.yaml_file import write_job
from overlord.observe.progress import Meter, Taken, interruptible, watch
from overlord.observe.tables import waiting
from overlord.process.memory import pss_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.drill.run import Report
    from overlord.job.job import Job
    from overlord.plan.plan import LoadingPlan

ShowStep = Callable[[Taken, Meter], None]
COMPUTE_S = 0.12  # what the stand-in for a trainer takes for a first step whose ranks are equal
FAULTS = "kill:loader-host@6,kill:planner@12,kill:constructor-host@18"
DRILL_STEPS = 24
PLAIN_LINES = 8  # progress lines where there is no terminal


def run_demo(
    out: Path,
    shape: Shape,
    steps: int,
    console: Console,
    command: str,
    compute_s: float = COMPUTE_S,
    faults: str = FAULTS,
    runtime: str = "local",
) -> Figures:
    """The whole demonstration; returns what it measured. ``faults``: of the rehearsal behind it;
    empty: there is none.
    """
    _make_folder(out)
    storing = Storing.installed()
    if storing.note:
        console.print(storing.note, markup=False)
    with _saying(console) as say:
        made = interruptible(lambda: make_corpus(out, shape, say, storing))
    job = make_job(out, shape, storing)
    yaml = write_job(job)
    _write(out / "job.yaml", yaml)
    console.print(
        f"{len(job.sources)} sources {'made' if made else 'found'} in {out / 'corpus'}; "
        f"{shape.ranks} ranks; job: {out / 'job.yaml'}"
    )
    figures = _measure(job, steps, console, command, compute_s, runtime)
    if faults:
        figures = replace(
            figures, drill=_rehearse(job, faults, console, "ray" if runtime == "ray" else "process")
        )
    _write(out / "report.html", report(figures, yaml).to_html())
    width = min(console.width, 120)
    for part in (side_by_side(figures, width), summary(figures, width)):
        console.print()
        console.print(part, soft_wrap=False)
    if figures.drill is not None:
        console.print(
            f"\nthe same job {'on Ray' if runtime == 'ray' else 'in processes'}, some of "
            "them killed:"
        )
        console.print(drill_view(figures.drill))
    console.print(f"\nreport with plots: {out / 'report.html'}")
    console.print("next:")
    for words in ("inspect {}", "plan {} --step 3 --strategy vanilla", "run {} --steps 20"):
        console.print(
            f"  {program()} {words.format(shlex.quote(str(out / 'job.yaml')))}", soft_wrap=True
        )
    return figures


def _rehearse(job: Job, faults: str, console: Console, runtime: str) -> Report:
    """The job again, in processes, with some of them killed."""
    options = {"runtime": runtime, "sources_per_host": 2, "hosts": 3}
    drill = Drill(
        job=job, faults=parse_faults(faults), steps=DRILL_STEPS, step_s=0.1, options=options
    )
    with waiting(console, "steps with faults and without", 2 * DRILL_STEPS) as advance:
        return rehearse(
            drill,
            lambda what, taken: advance(taken + (DRILL_STEPS if what != "undisturbed" else 0)),
        )


def program() -> str:
    """How this program is called from the working directory: a fresh environment is rarely on the
    PATH.
    """
    beside = os.path.join(os.path.dirname(os.path.abspath(sys.executable)), "overlord")
    found = shutil.which("overlord")
    if found and os.path.abspath(found) == beside:
        return "overlord"
    if not os.access(beside, os.X_OK):
        return f"{shlex.quote(sys.executable)} -m overlord.cli.main"
    near = os.path.relpath(beside)
    return shlex.quote(beside if near.startswith("..") else near)


def _measure(
    job: Job, steps: int, console: Console, command: str, compute_s: float, runtime: str
) -> Figures:
    before = pss_bytes()
    trainer, meter = StandIn(compute_s), Meter()
    plans: list[LoadingPlan] = []
    with ov.launch(job, runtime=runtime) as session:
        changed_at = session.set_mixture(later_mixture(), at=steps // 2) if steps >= 4 else None
        with _showing(console, steps) as show:
            for taken in watch(session, range(job.place.world_size), steps):
                meter.add(taken)
                plans.append(taken.plan)
                show(taken, meter)
                trainer.compute(taken)
        meter.stop()
        seen, counts = (
            session.metrics()["sources"],
            session.state_dict()["counts"],
        )  # the latter of the steps taken, none ahead of them
    wanted, realised = mixes(plans)
    return Figures(
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
        quarantined={name: int(seen[name]["quarantined"]) for name in job.names},
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


class StandIn:
    """Sleeps as long as the slowest rank would compute, so that waiting for data means
    something.
    """

    def __init__(self, first_s: float):
        self._first_s, self._per_cost, self._slept_s, self._steps = first_s, 0.0, 0.0, 0

    def compute(self, taken: Taken) -> None:
        loads = taken.plan.loads().sum(axis=1)
        if not self._per_cost:
            self._per_cost = self._first_s / (float(loads.mean()) or 1.0)
        start = time.perf_counter()
        time.sleep(self._per_cost * float(loads.max()))
        self._slept_s += time.perf_counter() - start
        self._steps += 1

    @property
    def mean_ms(self) -> float:
        return 1e3 * self._slept_s / max(1, self._steps)


@contextmanager
def _saying(console: Console) -> Iterator[Say]:
    """Words while the corpus is made: in place on a terminal, line by line elsewhere."""
    if console.is_terminal:
        with console.status("looking for a corpus") as status:
            yield status.update
    else:
        yield lambda words: console.print(words)


@contextmanager
def _showing(console: Console, steps: int) -> Iterator[ShowStep]:
    if not console.is_terminal:
        every = max(1, steps // PLAIN_LINES)

        def tell(taken: Taken, meter: Meter) -> None:
            if meter.steps % every == 0 or meter.steps == steps:
                console.print(progress_line(meter, steps, taken.plan.imbalance()["bucket"]))

        yield tell
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
