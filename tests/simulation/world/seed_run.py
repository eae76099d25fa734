"""One seed from end to end: its cluster with faults, the same job undisturbed, and the checker's
verdict.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from overlord.dryrun.virtual_run import VirtualRun
from overlord.setup.options import Options
from tests.simulation.world.checker import Checker, Facts
from tests.simulation.world.cluster import Cluster
from tests.simulation.world.history import History, Seen
from tests.simulation.world.memoization import Memory, prepared
from tests.simulation.world.scenario import (
    LONGEST,
    MESHES,
    STEPS,
    Mesh,
    Scenario,
    content,
    draw,
    shown,
    tree_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What became of a seed."""

    scenario: Scenario
    violations: list[str]
    history: History
    seconds: float  # of virtual time

    @property
    def fired(self) -> Counter[tuple[str, str]]:
        return self.history.fired

    def __str__(self) -> str:
        said = [str(self.scenario)]
        said += [
            f"  {e.t:9.3f} s: {e.what} {e.words}" + (f" to step {e.step}" if e.step >= 0 else "")
            for e in self.history.events
            if e.what in TOLD
        ]
        said += [f"  VIOLATION: {words}" for words in self.violations[:20]]
        n, faults = len(self.violations) or "no", self.fired.total()
        said.append(
            f"  {n} violations, {faults} faults, {self.seconds:.1f} s, history "
            f"{self.history.digest()}"
        )
        return "\n".join(said)


TOLD = (
    "fault",
    "calm",
    "rewind",
    "restart",
    "error",
    "launch",
    "reshard",
    "said",
    "refused",
    "twice",
)


def undisturbed(
    scenario: Scenario, mesh: Mesh | None = None, memory: Memory | None = None
) -> dict[tuple[int, int], Seen]:
    """The same job in one process where nothing happens, under one mesh from its first step to its
    last.
    """
    report = scenario.report if scenario.learns else None
    options = Options.of({"prefetch": scenario.options["prefetch"]})
    job = prepared(scenario.job(mesh), options, memory)
    with closing(VirtualRun(job, seed=1, report=report)) as run:
        for saying in scenario.sayings:
            run.apply(saying.event)
        run.run()
    made = run.outcome().steps
    return {(rank, step.step): Seen.of(step) for rank, steps in made.items() for step in steps}


def facts_of(scenario: Scenario) -> Facts:
    return Facts(
        rows=scenario.rows,
        content=content,
        weights=scenario.weights,
        mesh=shown(scenario.mesh),
        places={shown(mesh): _coords(mesh) for mesh in (scenario.mesh, *MESHES)},
        steps=STEPS,
        samples=scenario.samples,
        steady=scenario.steady,
        longest=LONGEST,
        prefixes=scenario.look_ahead == 1 and scenario.overflow == "grow",
        skipped=scenario.skipped,
    )


def _coords(mesh: Mesh) -> dict[int, dict[str, int]]:
    place = tree_of(mesh)
    return {rank: dict(place.coords(rank)) for rank in range(place.world_size)}


def references(
    scenario: Scenario, history: History, memory: Memory | None = None
) -> dict[str, dict[tuple[int, int], Seen]]:
    """An undisturbed run for every mesh that the history has."""
    named = {shown(mesh): mesh for mesh in MESHES}
    later = {e.words: named[e.words] for e in history.events if e.what == "reshard"}
    return {
        name: undisturbed(scenario, mesh, memory)
        for name, mesh in {shown(scenario.mesh): scenario.mesh, **later}.items()
    }


@contextmanager
def _without_dateutil() -> Iterator[None]:
    """pyarrow looks for it with every column of Python values; where there is none, looking would
    be a sixth of the time. Where there is one it stays: pandas, which pyarrow looks for too, cannot
    be imported without it.
    """
    missing = "dateutil" not in sys.modules and find_spec("dateutil") is None
    if missing:
        sys.modules["dateutil"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if missing:
            del sys.modules["dateutil"]


@contextmanager
def _without_collections() -> Iterator[None]:
    """What a run leaves behind is small, and is collected after it: not again and again in the
    middle of it.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def run_scenario(scenario: Scenario) -> Verdict:
    history, seconds, undisturbed = played(scenario)
    found = Checker(facts_of(scenario), undisturbed).check(history)
    return Verdict(scenario, found, history, seconds)


def played(scenario: Scenario) -> tuple[History, float, dict[str, dict[tuple[int, int], Seen]]]:
    """The history of a scenario, its virtual seconds, and the undisturbed runs for its meshes."""
    memory = Memory()
    with _without_dateutil(), _without_collections():
        cluster = Cluster(scenario, memory=memory)
        history = cluster.run()
        return history, cluster.world.now, references(scenario, history, memory)


def run_seed(seed: int) -> Verdict:
    return run_scenario(draw(seed))
