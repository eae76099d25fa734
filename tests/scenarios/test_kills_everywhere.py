"""One job and one script of losses on every runtime: a loader worker, a constructor worker and the
planner are lost one after another, then all at once, and each rank is handed, to the byte, what it
is handed where nothing is lost.

The job and its script are a scenario of the simulator, which carries it out on its virtual clock;
elsewhere the same is done by ``kill -9``, the last time by ``session.kill``. In one process there
is nobody to lose: that is said, and the stream is that of the others.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import overlord as ov
from overlord.drill.run import worker_pids
from tests.processes import launch
from tests.simulation.world.faults import Fault
from tests.simulation.world.history import Seen
from tests.simulation.world.scenario import STEPS, Scenario, draw
from tests.simulation.world.seed_run import run_scenario, undisturbed

pytestmark = pytest.mark.timeout(200)

PARTS_OF = {
    "loader": "loader-worker/1",
    "constructor": "constructor-worker/0",
    "planner": "planner",
}
LOSSES = {
    5: ["loader"],
    11: ["constructor"],
    17: ["planner"],
    23: ["loader", "constructor", "planner"],
}
DIED = {
    "process": "killed by signal 9",
    "ray": "its process died silently: it was killed, crashed or ran out of memory",
}
Steps = dict[tuple[int, int], Seen]  # (rank, step) -> what that rank was handed


def scenario() -> Scenario:
    """Two loader workers, one constructor worker, a mesh with dp=2 and tp=2, and a journal: else a
    planner that is lost ends the job.
    """
    plain = draw(5)
    apart = {
        "loaders": dict.fromkeys(plain.names, 1),
        "hosts": 2,
        "sources_per_host": 2,
        "constructor_hosts": 1,
        "shadows": "none",
    }
    faults = [
        Fault(
            "kill",
            role,
            step,
            after_s=0.0,
            patience_s=60.0,
            seconds=0.0,
            which=int(role == "loader"),
            factor=1.0,
        )
        for step, roles in LOSSES.items()
        for role in roles
    ]
    return replace(
        plain,
        mesh=(2, 1, 2, 1),
        faults=tuple(faults),
        learns=False,
        changes=True,
        journal=True,
        look_ahead=1,
        overflow="grow",
        samples=8,
        strategy="llm_balance",
        outlives=False,
        options={**plain.options, **apart, "prefetch": 3},
    )


def handed(session: ov.Session, act: dict[int, Callable[[], None]]) -> Steps:
    """Every rank trains, in turn; ``act[k]`` is done when k steps were taken."""
    clients, found = [session.client(rank) for rank in range(session.job.place.world_size)], Steps()
    for taken in range(STEPS):
        act.get(taken, lambda: None)()
        found |= {(client.rank, taken): Seen.of(next(client)) for client in clients}
    assert all(next(client, None) is None for client in clients), "all end at the same step"
    return found


def lost_in_simulation(made: Scenario) -> Steps:
    verdict = run_scenario(made)
    assert verdict.violations == []
    assert verdict.fired == Counter(("kill", role) for roles in LOSSES.values() for role in roles)
    seen = [event.seen for event in verdict.history.events if event.seen is not None]
    return {(found.rank, found.step): found for found in seen}


def lose(runtime: str, session: ov.Session, roles: list[str]) -> None:
    names, pids = [PARTS_OF[role] for role in roles], worker_pids(session)
    assert bool(pids) == (runtime != "local")
    for name in names:
        if runtime == "local":
            with pytest.raises(ov.JobError, match=f"'{name}': all components run in this process"):
                session.kill(name)
        elif len(names) == 1:
            os.kill(pids[name], signal.SIGKILL)
        else:
            session.kill(name)


def lost_in(runtime: str, made: Scenario, journal: Path) -> Steps:
    with launch(
        replace(made.job(), journal=str(journal)), runtime, **{**made.options, "lost_after_s": 20.0}
    ) as session:
        found = handed(
            session,
            {
                step: lambda roles=roles: lose(runtime, session, roles)
                for step, roles in LOSSES.items()
            },
        )
        back = [(row["part"], row["reason"]) for row in session.metrics()["recoveries"]]
    if runtime != "local":
        assert {part for part, _ in back} == set(PARTS_OF.values())
        assert back[0] == (PARTS_OF["loader"], DIED[runtime])
    return found


@pytest.mark.parametrize("runtime", ["local", "process", "simulated", "ray"])
def test_whoever_is_lost_each_rank_gets_the_stream_of_a_run_where_nobody_is(
    runtime: str, tmp_path: Path
) -> None:
    made = scenario()
    calm = undisturbed(made)
    assert {rank for rank, _ in calm} == set(range(4))
    assert len(calm) == 4 * STEPS
    found = (
        lost_in_simulation(made)
        if runtime == "simulated"
        else lost_in(runtime, made, tmp_path / "journal")
    )
    assert found == calm
