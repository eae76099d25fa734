"""Take the steps of a job, and print progress and a summary, for ``overlord run``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import overlord as ov
from overlord.cli.common import check_writable, print_json_line, refuse_uri
from overlord.errors import JobError, StateMismatch
from overlord.hashing import digest
from overlord.job.budgets import is_endless
from overlord.observe.documents import run_document, step_document
from overlord.observe.explain_text import time_over_mean
from overlord.observe.progress import Meter, Taken, watch
from overlord.observe.progress_bars import progress_bar
from overlord.observe.stage_text import stage_name
from overlord.observe.tables import run_view
from overlord.planning.state_json import state_problem

if TYPE_CHECKING:
    from rich.console import Console

    from overlord.job.job import Job
    from overlord.session.session import Session

PLAIN_EVERY_S = 2.0  # seconds between two progress lines if stderr is not a terminal

Show = Callable[[Taken, Meter], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of ``overlord run``."""

    job: Job
    steps: int | None = None
    rank: int | None = None
    resume: dict[str, Any] | str | None = None
    save: Path | None = None
    allow: tuple[str, ...] = ()
    digest: bool = False
    runtime: str = "local"
    as_json: bool = False  # print JSON lines instead of text
    options: Mapping[str, Any] = field(default_factory=dict)  # further options of ``launch``


def never_ends(job: Job) -> bool:
    """Return whether a job never ends: sources repeat forever, and no number of steps stops it."""
    if job.end_step is not None:
        return False
    last = job.stages[-1].mixture if job.stages else None
    mixture = job.mixture if last is None else last
    weights = mixture if isinstance(mixture, dict) else {s.name: s.weight for s in job.sources}
    drawn = [is_endless(s) for s in job.sources if weights.get(s.name, 0) > 0]
    return (job.until == "all" and any(drawn)) or (job.until == "first" and all(drawn))


def run_job(run: RunRequest, console: Console, err: Console) -> Meter:
    """Run a job; print progress to ``err`` and results to ``console``.

    Raise ``JobError`` for a job that never ends, if no number of steps is given.
    """
    if run.steps is None and never_ends(run.job):
        endless = [s.name for s in run.job.sources if is_endless(s)]
        who = (
            f"{endless[0]} repeats"
            if len(endless) == 1
            else f"{', '.join(endless[:5])}{' and others' * (len(endless) > 5)} repeat"
        )
        raise JobError(
            [
                f"the job never ends, because {who} forever; give --steps N, set epochs or "
                "max_tokens, or set until"
            ],
            "run",
        )
    if run.save is not None:
        check_writable(run.save)
    meter, chain = Meter(), ""
    # Autoscaling is off: no trainer computes here, so every source would look too slow.
    options = {"watch_s": 0.0, **run.options}
    with progress_bar(err, "indexed files") as indexed:
        launched = ov.launch(
            run.job,
            runtime=run.runtime,
            resume=run.resume,
            allow=run.allow,
            progress=indexed,
            **options,
        )
    with launched as session:
        print_resumed(session, err)
        before = session.state_dict()["counts"]
        ranks = range(run.job.place.world_size) if run.rank is None else [run.rank]
        try:
            with _progress(err, run.steps, run.job.sync) as show:
                for taken in watch(session, ranks, run.steps):
                    meter.add(taken)
                    show(taken, meter)
                    mark = step_digest(taken) if run.digest else ""
                    chain = digest(chain, mark) if run.digest else ""
                    if run.as_json:
                        print_json_line(step_document(taken, meter, run.job.sync, mark))
                    elif run.digest:
                        console.print(f"step {taken.plan.step} {mark}", soft_wrap=True)
        finally:
            if run.save is not None:
                save_state(run.save, session)
                err.print(f"state saved: {run.save}", soft_wrap=True)
        meter.stop()
        metrics, quarantine = since(session.metrics(), before), session.quarantine()
        if run.as_json:
            print_json_line(run_document(meter, metrics, quarantine, chain))
        else:
            console.print(run_view(run.job, meter, metrics, quarantine))
    if run.digest and not run.as_json:
        console.print(f"digest of all steps {chain}")
    return meter


def since(metrics: Mapping[str, Any], before: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
    """Return metrics with the bad and dropped rows of this run alone.

    ``before``: the counts of the state from which the run was resumed.
    """
    sources = {
        name: {
            **s,
            **{k: s[k] - before.get(k, {}).get(name, 0) for k in ("quarantined", "dropped")},
        }
        for name, s in metrics["sources"].items()
    }
    return {**metrics, "sources": sources}


def step_digest(taken: Taken) -> str:
    """Return a digest of all arrays that the watched ranks received in this step, by name."""
    parts: list[Any] = []
    for step in taken.steps:
        parts += [f"{step.step}/{step.rank}"]
        for microbatch in step:
            parts += [item for name in sorted(microbatch) for item in (name, microbatch[name])]
    return digest(*parts)


def resume_from(given: Path) -> dict[str, Any] | str:
    """Return the state in a file, or ``"auto"`` for the word auto; ./auto names a file."""
    return "auto" if str(given) == "auto" else read_state(given)


def print_resumed(session: Session, err: Console) -> None:
    """Print the step from which a session was resumed, if it was."""
    if session.resumed is not None:
        err.print(str(session.resumed), soft_wrap=True, markup=False)


def read_state(path: Path) -> dict[str, Any]:
    """Read a state that ``overlord run --save`` wrote.

    Raise ``JobError`` or ``StateMismatch`` for a URI, an unreadable file or other content.
    """
    refuse_uri(path)
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise JobError(
            [f"expected a readable file, got: {fault.strerror or fault}"], str(path)
        ) from fault
    except ValueError as fault:
        raise JobError(
            [f"expected a state as JSON, got a file that is not JSON: {fault}"], str(path)
        ) from fault
    # A state of a trainer holds "stream"; `launch` raises the error for it.
    of_trainer = isinstance(state, dict) and "stream" in state
    if (problem := state_problem(state)) and not of_trainer:
        raise StateMismatch(
            {},
            "give a file that `overlord run --save` wrote, or --resume auto",
            f"{path}: {problem}",
        )
    found: dict[str, Any] = state
    return found


def save_state(path: Path, session: Session) -> None:
    """Write the session's state as JSON, atomically: to a new file that is then renamed."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_text(json.dumps(session.state_dict()), encoding="utf-8")
        os.replace(new, path)
    except OSError as fault:
        raise JobError(
            [f"expected a writable file, got: {fault.strerror or fault}"], str(path)
        ) from fault


@contextmanager
def _progress(err: Console, steps: int | None, sync: str) -> Iterator[Show]:
    """Yield a function that shows the progress of a taken step.

    On a terminal the line is live; elsewhere a line is printed every ``PLAIN_EVERY_S`` seconds.
    Rates are those of the last seconds.
    """

    def text(taken: Taken, meter: Meter) -> str:
        of = f"/{steps}" if steps else ""
        found = taken.steps[0].stage if taken.steps else None
        stage = "" if found is None else f"  stage {stage_name(found)}"
        left = meter.seconds_left(steps) if steps else None
        return (
            f"step {taken.plan.step} ({meter.steps}{of}){stage}  "
            f"{meter.recent_tokens_per_s / 1e3:,.0f}k tokens/s  "
            f"{'' if left is None else f'{timedelta(seconds=round(left))} left  '}"
            f"imbalance {time_over_mean(sync, taken.plan.imbalance()):.3f}  wait "
            f"{meter.last_wait_s * 1e3:.1f} ms"
        )

    if not err.is_terminal:
        last = [time.monotonic()]

        def show(taken: Taken, meter: Meter) -> None:
            if time.monotonic() - last[0] >= PLAIN_EVERY_S:
                last[0] = time.monotonic()
                err.print(text(taken, meter))

        yield show
        return
    with err.status("opening sources") as status:
        yield lambda taken, meter: status.update(text(taken, meter))
