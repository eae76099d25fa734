"""Code of a notebook, lambdas and closures in the processes of a job, and what cannot be sent there.

`OVERLORD_TEST_RUNTIME=ray` runs all of it on Ray.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import ActorLost, JobError
from overlord.planning.strategies import resolve
from tests.internals import BALANCE_NAMES, COST_NAMES, SCHEDULE_NAMES
from tests.processes import ROOT, WAIT_S, WORKER_RUNTIME, launch, left_after, play, program, run
from tests.scenarios.test_process import job, rows

STEPS = 6


@pytest.fixture
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget afterwards what a test registers."""
    for names in (COST_NAMES, BALANCE_NAMES, SCHEDULE_NAMES):
        names.replace(monkeypatch, dict(names.real))


def same(made: ov.Job) -> None:
    """Check that the job gives the same bytes in one process and in several."""
    assert run(made, WORKER_RUNTIME) == run(made, "local")


def test_a_lambda_is_a_strategy() -> None:
    same(job(strategy=lambda buffer, place: resolve("vanilla")(buffer, place), until=STEPS))


def test_a_closure_over_local_data_is_strategy_mixture_transform_and_hook() -> None:
    weights = {"a": 0.25, "b": 0.75}
    turn, added = np.array([1, 0]), 3

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        plan = resolve("vanilla")(buffer, place)
        main = replace(plan.main, bucket=turn[plan.main.bucket].astype(np.int32))
        return replace(plan, modules={"backbone": main})

    def shifted(row: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": [token + added for token in row["tokens"]]}

    sources = [
        ov.Source(
            name,
            rows(n, first),
            transforms=[ov.Map(shifted, rows=True), ov.Tokens("tokens")],
            epochs=None,
        )
        for name, n, first in (("a", 60, 0), ("b", 90, 1000))
    ]
    same(
        job(
            sources=sources,
            strategy=strategy,
            mixture=lambda step, feedback: weights,
            hooks=(ov.constructor_do_plan(lambda assembly: assembly.build() if added else None),),
            until=STEPS,
        )
    )


def test_registered_entries_of_the_launching_process_are_known_to_the_planner(
    unregistered: None,
) -> None:
    factor = 2.0
    ov.register_cost("local_cost", lambda columns: columns["tokens"] * factor)

    def by_turns(costs: np.ndarray, n_bins: int) -> np.ndarray:
        return (np.arange(len(costs))[::-1] % n_bins).astype(np.int32)

    ov.register_balance("local_turns", by_turns, capacity_aware=False)
    mixture = ov.register_schedule(
        "local_mix", lambda share: lambda step, feedback: {"a": share, "b": 1 - share}
    )

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        graph = ov.DGraph.from_buffer(buffer).distribute("DP")
        return graph.cost("local_cost").balance("local_turns").plan()

    sources = [ov.Source(name, rows(60, k), epochs=None) for k, name in enumerate("ab")]
    same(job(sources=sources, strategy=strategy, mixture=mixture(share=0.25), until=STEPS))


NOTEBOOK = """
    import overlord as ov
    from overlord.planning.strategies import resolve
    from tests.processes import run
    from tests.scenarios.test_process import job

    class Mine:
        def __init__(self, name):
            self.name = name

        def __call__(self, buffer, place):
            return resolve(self.name)(buffer, place)

    def cost(columns):
        return columns["tokens"]

    ov.register_cost("of_the_notebook", cost)
    made = job(strategy=Mine("vanilla"), until=4)
    print(run(made, {runtime!r}) == run(made, "local"))
"""


def test_a_class_of_a_notebook_is_a_strategy_and_no_file_is_imported() -> None:
    """``python -c`` has no file, as a notebook."""
    text = textwrap.dedent(NOTEBOOK.format(runtime=WORKER_RUNTIME))
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
    said = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=4 * WAIT_S, env=env
    )
    assert said.stdout.splitlines()[-1:] == ["True"], said.stderr


class Locked:
    """A strategy that cannot be copied."""

    def __init__(self) -> None:
        self.guards = {"plans": threading.Lock()}

    def __call__(self, buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        with self.guards["plans"]:
            return resolve("vanilla")(buffer, place)


@pytest.mark.parametrize("journal", [False, True], ids=["without a journal", "with a journal"])
def test_an_object_that_cannot_be_sent_is_refused_with_its_name_place_and_remedy(
    tmp_path: Path, journal: bool, unregistered: None
) -> None:
    where, lock = str(tmp_path / "journal") if journal else None, threading.Lock()
    threads = threading.active_count()
    lock_words = "an object of _thread.lock cannot be sent to another process: .*_thread.lock"
    remedy = "create it in the function that uses it, or as a variable of a module"
    for fields, path in (
        ({"strategy": Locked()}, r"strategy: guards\['plans'\]"),
        (
            {"mixture": lambda step, feedback: {"a": 1.0} if lock else {}},
            "mixture: .*variable 'lock'",
        ),
        ({"hooks": (ov.constructor_do_plan(lambda given: lock),)}, "hooks: .*variable 'lock'"),
    ):
        with pytest.raises(JobError, match=f"{path}: {lock_words}.*{remedy}"):
            launch(job(**fields, journal=where))
    ov.register_cost("locked", lambda columns: columns["tokens"] if lock else None)
    with pytest.raises(
        JobError, match=r"register_cost: \['locked'\] variable 'lock': " + lock_words
    ):
        launch(job(journal=where))
    assert threading.active_count() <= threads + 1


def test_a_copy_is_sent_so_a_strategy_does_not_change_what_the_program_has() -> None:
    seen: list[int] = []

    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        seen.append(buffer.step)
        return resolve("vanilla")(buffer, place)

    run(job(strategy=strategy, until=STEPS), WORKER_RUNTIME)
    assert seen == []


# the coordinator without a journal


def test_without_a_journal_a_lost_coordinator_ends_the_job_with_cause_and_remedy() -> None:
    with launch(job(until=200)) as session:
        pids = [a["pid"] for a in session.metrics()["actors"] if a["role"] in ("host", "planner")]
        done = play(session, act={2: lambda session: session.kill("planner")})
        assert "ActorLost('planner'" in done.error
        assert "the job has no journal to restart it from: set Job.journal" in done.error
        assert "resume=state" in done.error
        with pytest.raises(ActorLost, match="has no journal"):
            session.set_mixture({"a": 1.0, "b": 1.0, "c": 1.0})
        state = session.state_dict()
    assert len(pids) >= 3
    assert not left_after(pids, WAIT_S)
    taken = len(done.steps[0])
    with launch(job(until=taken + 3), resume=state, allow=("until",)) as session:
        again = play(session)
    wanted = run(job(until=taken + 3), "local")
    assert {r: done.steps[r][:taken] + again.steps[r] for r in range(2)} == wanted.steps


def test_a_slow_strategy_is_no_lost_coordinator_where_nothing_could_restart_it() -> None:
    def slow(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        if buffer.step == 2:
            time.sleep(2.5)
        return resolve("vanilla")(buffer, place)

    with launch(job(strategy=slow, until=STEPS), lost_after_s=0.5) as session:
        assert len(play(session).steps[0]) == STEPS


TRAINS = """
    import sys
    import overlord as ov
    from tests.scenarios.test_process import job
    from tests.processes import WORKER_RUNTIME

    def main():
        session = ov.launch(job(until=10**6), runtime=WORKER_RUNTIME)
        next(session.client(0))
        found = [a["pid"] for a in session.metrics()["actors"] if a["role"] in ("host", "planner")]
        print(*found, flush=True)
        sys.stdin.readline()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=str)
def test_the_coordinator_ends_with_the_program_that_launched_it(
    tmp_path: Path, how: signal.Signals
) -> None:
    with program(tmp_path, TRAINS) as trainer:
        pids = list(map(int, trainer.line().split()))
        assert len(pids) >= 3, "the coordinator, a loader worker and a constructor worker"
        os.kill(trainer.process.pid, how)
        assert not left_after(pids, WAIT_S)
        trainer.end()
