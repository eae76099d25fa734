"""Run a job twice, the second time with faults, and compare what was delivered.

``overlord drill``, the demo and the benchmark of faults use this module.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import overlord as ov
from overlord.drill.delivery import Delivered, Difference, compare
from overlord.drill.faults import KILL, DrillFault
from overlord.errors import JobError

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.session.session import Session

SETTLE_S = 30.0  # longest wait in seconds, after the last step, for hit workers to be replaced
LOST_AFTER_S = 2.0  # seconds until a stopped worker counts as lost; short, to keep drills short
POLL_S = 0.05  # seconds between two checks for recovered workers
OnProgress = Callable[[str, int], None]  # (name of the run, steps taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """The configuration of a drill."""

    job: Job
    faults: Sequence[DrillFault]
    steps: int
    step_s: float = 0.0  # seconds that a trainer computes per step
    options: Mapping[str, Any] = field(default_factory=dict)  # options of ``launch``


@dataclass(frozen=True, slots=True)
class Strike:
    """The hit of one worker by a fault."""

    fault: DrillFault
    name: str  # name of the worker
    pid: int  # process of the worker before the strike
    taken: int  # number of steps taken before the strike
    recovered: int = 0  # number of recoveries of the worker before the strike


@dataclass(slots=True)
class Outcome:
    """The deliveries, waits and faults of one run."""

    delivered: Delivered = field(default_factory=Delivered)
    waits_s: list[float] = field(default_factory=list)  # per step: until the last rank received it
    steps_s: list[float] = field(default_factory=list)  # per step: wait and training
    strikes: list[Strike] = field(default_factory=list)
    # Faults that hit no worker or fewer than ``count``, each with the reason.
    missed: list[tuple[DrillFault, str]] = field(default_factory=list)
    # A sentence for each worker that was hit and did not recover.
    unrecovered: list[str] = field(default_factory=list)
    recoveries: list[dict[str, Any]] = field(default_factory=list)  # as in ``session.metrics()``


@dataclass(frozen=True, slots=True)
class DrillReport:
    """A drill, and the outcomes of its undisturbed and its disturbed run."""

    drill: Drill
    undisturbed: Outcome
    disturbed: Outcome

    @property
    def difference(self) -> Difference:
        """The differences between the deliveries of both runs, computed on each access."""
        return compare(self.undisturbed.delivered, self.disturbed.delivered)

    def sentence(self) -> str:
        """Return the result of the drill as one line of text."""
        strikes = self.disturbed.strikes
        kills = sum(s.fault.action == KILL for s in strikes)
        stops, d = len(strikes) - kills, self.difference
        hits = f"{kills} kill{'s' * (kills != 1)}" + (f", {stops} stopped" if stops else "")
        equal = (
            "digest equal to the undisturbed run"
            if not d
            else f"{len(d.changed)} (rank, step) pairs differ from the undisturbed run"
        )
        return f"{hits}, {d.lost} samples lost, {d.repeated} repeated, {equal}"


def run_drill(drill: Drill, on_progress: OnProgress = lambda run, taken: None) -> DrillReport:
    """Run the job undisturbed in one process, then in several processes with the faults.

    ``on_progress`` receives the name of the run and the number of taken steps.
    """
    calm = run_undisturbed(drill, on_progress)
    with TemporaryDirectory(prefix="overlord-drill-") as scratch:
        return DrillReport(drill, calm, run_disturbed(drill, Path(scratch), on_progress))


def run_undisturbed(drill: Drill, on_progress: OnProgress = lambda run, taken: None) -> Outcome:
    """Run the job in this process, without journal, faults and compute time of the trainer."""
    outcome = Outcome()
    with ov.launch(replace(drill.job, journal=None), runtime="local") as session:
        _train(
            session,
            replace(drill, faults=(), step_s=0.0),
            outcome,
            lambda taken: on_progress("undisturbed", taken),
        )
    return outcome


def run_disturbed(
    drill: Drill, scratch: Path, on_progress: OnProgress = lambda run, taken: None
) -> Outcome:
    """Run the job in several processes with the faults of the drill.

    The journal is in ``scratch``, because the planner cannot be restarted without a journal. A
    journal of the job itself is not used.
    """
    outcome = Outcome()
    job = replace(drill.job, journal=str(scratch / "journal"))
    options = {"runtime": "process", "lost_after_s": LOST_AFTER_S, **drill.options}
    with ov.launch(job, **options) as session:
        try:
            _train(session, drill, outcome, lambda taken: on_progress("with faults", taken))
            late = (fault for fault in drill.faults if fault.step > len(outcome.waits_s))
            outcome.missed += [
                (fault, f"never struck: the data ended after {len(outcome.waits_s)} steps")
                for fault in late
            ]
            _settle(session, outcome)
        finally:
            _continue_stopped(outcome.strikes)
        outcome.recoveries = list(session.metrics().get("recoveries", []))
    return outcome


def _train(
    session: Session, drill: Drill, outcome: Outcome, on_step: Callable[[int], None]
) -> None:
    """Take the steps of all ranks and apply the faults; record both in ``outcome``.

    Return early if the data ends.
    """
    clients = {rank: session.client(rank) for rank in range(session.job.place.world_size)}
    for taken in range(drill.steps):
        if due := [fault for fault in drill.faults if fault.strikes_at(taken)]:
            _strike(session, due, taken, outcome)
        start = time.perf_counter()
        try:
            steps = {rank: next(client) for rank, client in clients.items()}
        except StopIteration:
            return
        outcome.waits_s.append(time.perf_counter() - start)
        for rank, step in steps.items():
            outcome.delivered.add(rank, step)
        on_step(taken + 1)
        if drill.step_s:
            time.sleep(drill.step_s)
        outcome.steps_s.append(time.perf_counter() - start)


def worker_pids(session: Session) -> dict[str, int]:
    """Return the pid of each worker of a session that a fault can hit, by name."""
    return _processes(session.metrics())


def _processes(metrics: Mapping[str, Any]) -> dict[str, int]:
    return {
        a["name"]: a["pid"]
        for a in metrics["actors"]
        if a["role"] in ("host", "planner") and a["pid"] != os.getpid()
    }


def _recovered(metrics: Mapping[str, Any]) -> Counter[str]:
    return Counter(row["part"] for row in metrics.get("recoveries", []))


def _strike(session: Session, faults: Sequence[DrillFault], taken: int, outcome: Outcome) -> None:
    """Apply all due faults at once, so that no worker recovers before the next fault."""
    metrics = session.metrics()
    running, recovered = _processes(metrics), _recovered(metrics)
    for fault in faults:
        names = fault.choose(list(running))
        if not names:
            outcome.missed.append(
                (
                    fault,
                    "hit nothing: expected a running worker of that name or role, got "
                    f"{', '.join(sorted(running))}",
                )
            )
        elif len(names) < fault.count:
            outcome.missed.append(
                (fault, f"hit {len(names)} instead of {fault.count}: no more of them ran")
            )
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[name], signal.SIGKILL if fault.action == KILL else signal.SIGSTOP)
            outcome.strikes.append(Strike(fault, name, running[name], taken, recovered[name]))


def _settle(session: Session, outcome: Outcome) -> None:
    """Wait until every worker that was hit is replaced and its recovery is in the metrics.

    The recovery appears some time after the new process. Workers that do not recover within
    ``SETTLE_S`` are recorded as ``unrecovered``, so that the drill fails.
    """
    last = {s.name: s for s in outcome.strikes}
    deadline = time.monotonic() + SETTLE_S
    while left := unrecovered(session.metrics(), last):
        if time.monotonic() >= deadline:
            outcome.unrecovered = [
                f"{name}, hit after {last[name].taken} steps, {why} within {SETTLE_S:g} s"
                for name, why in left.items()
            ]
            return
        time.sleep(POLL_S)


def unrecovered(metrics: Mapping[str, Any], last: Mapping[str, Strike]) -> dict[str, str]:
    """Return the workers that were hit and have not recovered, each with the reason as text.

    ``last``: the last strike of each worker.
    """
    running, recovered = _processes(metrics), _recovered(metrics)
    found = {
        name: "is not among the recoveries of the metrics"
        for name, strike in last.items()
        if recovered[name] <= strike.recovered
    }
    return found | {
        name: "was not replaced"
        for name, strike in last.items()
        if running.get(name, strike.pid) == strike.pid
    }


def _continue_stopped(strikes: Sequence[Strike]) -> None:
    """Send SIGCONT to stopped workers, so that a worker that was not replaced can exit."""
    for strike in strikes:
        if strike.fault.action != KILL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(strike.pid, signal.SIGCONT)


def refuse_too_late(faults: Sequence[DrillFault], steps: int) -> None:
    """Raise ``JobError`` if a fault would not strike before the last of ``steps`` steps."""
    if late := [fault for fault in faults if fault.step >= steps]:
        raise JobError(
            [
                f"{fault}: expected a step below {steps}, where the drill ends, got {fault.step}; "
                "let it strike earlier, or run more steps"
                for fault in late
            ],
            "faults",
        )
