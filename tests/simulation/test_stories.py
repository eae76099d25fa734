"""Faults told one by one, where a seed would have to be lucky to draw them: what each is to show stands in the name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from overlord.simulation import striking
from overlord.simulation.checker import Checker
from overlord.simulation.cluster import Cluster
from overlord.simulation.faults import LEAST, Fault
from overlord.simulation.history import History
from overlord.simulation.running import facts_of, references
from overlord.simulation.scenario import STEPS, Scenario, draw
from overlord.simulation.world import Process


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def scenario(*faults: Fault) -> Scenario:
    """One loader host and one constructor host, and no fault but these."""
    plain = draw(5)
    one = {"loaders": dict.fromkeys(plain.names, 1), "hosts": 1, "sources_per_host": 5, "constructor_hosts": 1}
    options = {**plain.options, **one, "prefetch": 6, "shadows": "none", "lost_after_s": 3.0}
    return replace(
        plain, mesh=(2, 1, 1, 1), faults=faults, learns=False, changes=False, journal=True, look_ahead=1, overflow="grow", samples=8,
        strategy="vanilla", outlives=False, options=options,
    )  # fmt: skip


def fault(kind: str, role: str, step: int, *, after_s: float = 0.0, seconds: float = 0.0) -> Fault:
    return Fault(kind, role, step, after_s=after_s, patience_s=60.0, seconds=seconds, which=0, factor=5.0)


def violations(of: Scenario, history: History) -> list[str]:
    return Checker(facts_of(of), references(of, history)).check(history)


def test_a_loader_host_that_cannot_reach_a_constructor_host_before_all_are_back_is_linked_in_the_end() -> None:
    """Both are lost; the constructor host is there again, and waits; the loader host is started, and cannot reach it for a second."""
    made = scenario()
    cluster = Cluster(made)
    world, net = cluster.world, cluster.net
    told: list[str] = []

    def lose_constructor() -> None:
        if cluster.slowest < 5:
            world.at(0.001, lose_constructor, None)
            return
        hosts = cluster.launched.control.processes()
        hosts["constructor-host/0"].kill()
        lose_loader(hosts["loader-host/0"])

    def lose_loader(old: Process) -> None:
        """While the other is being started; then it is the next that is."""
        hosts = cluster.launched.control.processes()
        if "constructor-host/0" in hosts and old.alive:
            old.kill()
            told.append("both are lost")
        if (new := hosts.get("loader-host/0", old)) is old:
            world.at(0.001, lambda: lose_loader(old), None)
            return
        net.part(new)
        world.at(1.0, lambda: net.mend(new), None)
        told.append("cut off")

    world.at(0.0, lose_constructor, None)
    history = cluster.run()
    assert told == ["both are lost", "cut off"]
    assert violations(made, history) == []


def test_the_last_step_waits_for_faults_that_come_late() -> None:
    late = [fault("slow link", "loader", STEPS - 2, after_s=1.0, seconds=0.05) for _ in range(LEAST + 1)]
    made = scenario(*late)
    history = Cluster(made).run()
    assert history.fired.total() == LEAST, "nor does it wait for more"
    assert violations(made, history) == []


def test_a_fault_that_finds_nobody_strikes_when_there_is_somebody() -> None:
    """The planner is stopped, and all that is left was planned: whoever is to stop it once more waits until it is awake."""
    made = scenario(*(fault("stop", "planner", STEPS - 3, seconds=2.0) for _ in range(LEAST)))
    history = Cluster(made).run()
    assert history.fired["stop", "planner"] == LEAST
    assert violations(made, history) == []


def test_a_fault_without_patience_strikes_too_where_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    """No loader host is there when links of one are to be slow, and nothing else could strike instead."""
    monkeypatch.setattr(striking, "TRIES", 0)
    made = scenario(fault("kill", "loader", 5), *(fault("slow link", "loader", 5, seconds=0.05) for _ in range(LEAST - 1)))
    history = Cluster(made).run()
    assert history.fired.total() == LEAST
    assert violations(made, history) == []


NAMES = {"loader": "loader-host/0", "constructor": "constructor-host/0", "planner": "planner"}


@pytest.mark.parametrize("role", NAMES)
def test_a_part_whose_successors_die_while_they_start_is_there_in_the_end(role: str) -> None:
    made = scenario(replace(fault("bad start", role, 5), which=2))
    cluster = Cluster(made)
    history = cluster.run()
    assert [process.name for process in cluster.world.processes].count(NAMES[role]) == 1 + 3 + 1
    assert violations(made, history) == []


@pytest.mark.parametrize("role", NAMES)
def test_a_part_that_starts_slowly_is_waited_for_and_not_taken_for_dead(role: str) -> None:
    made = scenario(fault("slow start", role, 5, seconds=10.0))
    cluster = Cluster(made)
    history = cluster.run()
    assert [process.name for process in cluster.world.processes].count(NAMES[role]) == 2
    assert cluster.world.now > 10.0
    assert violations(made, history) == []


def test_a_session_that_is_moved_while_its_parts_die_in_starting_is_moved() -> None:
    """What is killed is not missed any more when all are started for the state that was loaded; of those the first two die."""
    bad = [replace(fault("bad start", role, 5), which=0, patience_s=0.0) for role in ("loader", "constructor", "planner")]
    made = scenario(*bad, fault("rewind", "job", 5))
    cluster = Cluster(made)
    history = cluster.run()
    assert history.fired["rewind", "job"] == 1
    assert violations(made, history) == []
