"""Two runs of one job, the second with faults: ``overlord drill``, the demonstration and the
benchmark of faults.
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
from overlord.drill.delivered import Delivered, Difference, compare
from overlord.drill.faults import KILL, Fault
from overlord.errors import JobError

if TYPE_CHECKING:
    from overlord.job.job import Job
    from overlord.session.session import Session

SETTLE_S = 30.0  # for parts that were hit last to be replaced, before what became of them is told
LOST_AFTER_S = 2.0  # a drill is not to wait long for a part that stands still
LOOK_S = 0.05
Show = Callable[[str, int], None]  # (what is done, steps taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """What was asked for."""

    job: Job
    faults: Sequence[Fault]
    steps: int
    step_s: float = 0.0  # what a trainer takes for a step
    options: Mapping[str, Any] = field(default_factory=dict)  # of launch


@dataclass(frozen=True, slots=True)
class Strike:
    """One part that was hit."""

    fault: Fault
    name: str
    pid: int
    taken: int  # steps that were taken then
    recovered: int = 0  # how often the part had been lost and was back by then


@dataclass(slots=True)
class Outcome:
    """What a run gave and cost."""

    delivered: Delivered = field(default_factory=Delivered)
    waits_s: list[float] = field(default_factory=list)  # of each step, until the last rank had it
    steps_s: list[float] = field(default_factory=list)  # the same, until it was trained
    strikes: list[Strike] = field(default_factory=list)
    missed: list[tuple[Fault, str]] = field(
        default_factory=list
    )  # those that hit less than they were to, and why
    unmended: list[str] = field(
        default_factory=list
    )  # parts that were hit and did not come back, in words
    recoveries: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """Both runs side by side."""

    drill: Drill
    alone: Outcome
    hit: Outcome

    @property
    def difference(self) -> Difference:
        return compare(self.alone.delivered, self.hit.delivered)

    def sentence(self) -> str:
        """The line a drill ends with."""
        kills = sum(s.fault.how == KILL for s in self.hit.strikes)
        stops, d = len(self.hit.strikes) - kills, self.difference
        hits = f"{kills} kill{'s' * (kills != 1)}" + (f", {stops} stopped" if stops else "")
        equal = (
            "digest equal to the undisturbed run"
            if not d
            else f"{len(d.changed)} steps of ranks differ from the undisturbed run"
        )
        return f"{hits}, {d.lost} samples lost, {d.repeated} repeated, {equal}"


def rehearse(drill: Drill, show: Show = lambda what, taken: None) -> Report:
    """The job undisturbed, in one process and without a journal; then in processes, with its
    faults.
    """
    alone = undisturbed(drill, show)
    with TemporaryDirectory(prefix="overlord-drill-") as scratch:
        return Report(drill, alone, disturbed(drill, Path(scratch), show))


def undisturbed(drill: Drill, show: Show = lambda what, taken: None) -> Outcome:
    outcome = Outcome()
    with ov.launch(replace(drill.job, journal=None), runtime="local") as session:
        _train(
            session,
            replace(drill, faults=(), step_s=0.0),
            outcome,
            lambda taken: show("undisturbed", taken),
        )
    return outcome


def disturbed(drill: Drill, scratch: Path, show: Show = lambda what, taken: None) -> Outcome:
    """A journal is made where the job has none: without one a planner cannot come again. One of the
    job's own is left alone.
    """
    outcome = Outcome()
    job = replace(drill.job, journal=str(scratch / "journal"))
    options = {"runtime": "process", "lost_after_s": LOST_AFTER_S, **drill.options}
    with ov.launch(job, **options) as session:
        try:
            _train(session, drill, outcome, lambda taken: show("with faults", taken))
            late = (fault for fault in drill.faults if fault.step > len(outcome.waits_s))
            outcome.missed += [
                (fault, f"never struck: the data ended after {len(outcome.waits_s)} steps")
                for fault in late
            ]
            _settle(session, outcome)
        finally:
            _wake(outcome.strikes)
        outcome.recoveries = list(session.metrics().get("recoveries", []))
    return outcome


def _train(session: Session, drill: Drill, outcome: Outcome, show: Callable[[int], None]) -> None:
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
        show(taken + 1)
        if drill.step_s:
            time.sleep(drill.step_s)
        outcome.steps_s.append(time.perf_counter() - start)


def parts(session: Session) -> dict[str, int]:
    """Processes of a session that can be hit, by name."""
    return _processes(session.metrics())


def _processes(metrics: Mapping[str, Any]) -> dict[str, int]:
    return {
        a["name"]: a["pid"]
        for a in metrics["actors"]
        if a["role"] in ("host", "planner") and a["pid"] != os.getpid()
    }


def _recovered(metrics: Mapping[str, Any]) -> Counter[str]:
    return Counter(row["part"] for row in metrics.get("recoveries", []))


def _strike(session: Session, faults: Sequence[Fault], taken: int, outcome: Outcome) -> None:
    """All faults of a moment at once: none may be over when the next one strikes."""
    metrics = session.metrics()
    there, recovered = _processes(metrics), _recovered(metrics)
    for fault in faults:
        names = fault.choose(list(there))
        if not names:
            outcome.missed.append(
                (fault, f"hit nothing: no such part ran (there were {', '.join(sorted(there))})")
            )
        elif len(names) < fault.many:
            outcome.missed.append(
                (fault, f"hit {len(names)} and not {fault.many}: no more of them ran")
            )
        for name in names:
            with contextlib.suppress(ProcessLookupError):
                os.kill(there[name], signal.SIGKILL if fault.how == KILL else signal.SIGSTOP)
            outcome.strikes.append(Strike(fault, name, there[name], taken, recovered[name]))


def _settle(session: Session, outcome: Outcome) -> None:
    """Until every part that was hit is replaced and its recovery told, which is a while after its
    process is there. Of one that is not, it is said: a drill whose last fault was never mended must
    not pass.
    """
    last = {s.name: s for s in outcome.strikes}
    deadline = time.monotonic() + SETTLE_S
    while left := unmended(session.metrics(), last):
        if time.monotonic() >= deadline:
            outcome.unmended = [
                f"{name}, hit after {last[name].taken} steps, {why} within {SETTLE_S:g} s"
                for name, why in left.items()
            ]
            return
        time.sleep(LOOK_S)


def unmended(metrics: Mapping[str, Any], last: Mapping[str, Strike]) -> dict[str, str]:
    """Parts that were hit and are not back, and what is missing of it."""
    there, told = _processes(metrics), _recovered(metrics)
    found = {
        name: "has no row among the recoveries"
        for name, strike in last.items()
        if told[name] <= strike.recovered
    }
    return found | {
        name: "was not replaced"
        for name, strike in last.items()
        if there.get(name, strike.pid) == strike.pid
    }


def _wake(strikes: Sequence[Strike]) -> None:
    """A part that was stopped and never taken for dead must be able to end."""
    for strike in strikes:
        if strike.fault.how != KILL:
            with contextlib.suppress(ProcessLookupError):
                os.kill(strike.pid, signal.SIGCONT)


def refuse_too_late(faults: Sequence[Fault], steps: int) -> None:
    if late := [fault for fault in faults if fault.step >= steps]:
        raise JobError([f"{fault}: the drill ends after {steps} steps" for fault in late], "faults")
