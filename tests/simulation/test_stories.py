"""Faults told one by one, where a seed would have to be lucky to draw them: what each is to show
stands in the name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from overlord.journal.job_journal import JobJournal
from overlord.messages.control import SetMixture, Skip
from tests.simulation.world import striking
from tests.simulation.world.checker import Checker
from tests.simulation.world.cluster import Cluster
from tests.simulation.world.faults import LEAST, Fault
from tests.simulation.world.history import History
from tests.simulation.world.scenario import STEPS, Saying, Scenario, draw
from tests.simulation.world.seed_run import facts_of, references
from tests.simulation.world.world import Killed, Process


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def scenario(*faults: Fault) -> Scenario:
    """One loader worker and one constructor worker, and no fault but these."""
    plain = draw(5)
    one = {
        "loaders": dict.fromkeys(plain.names, 1),
        "hosts": 1,
        "sources_per_host": 5,
        "constructor_hosts": 1,
    }
    options = {**plain.options, **one, "prefetch": 6, "shadows": "none", "lost_after_s": 3.0}
    return replace(
        plain,
        mesh=(2, 1, 1, 1),
        faults=faults,
        learns=False,
        changes=False,
        journal=True,
        look_ahead=1,
        overflow="grow",
        samples=8,
        strategy="vanilla",
        outlives=False,
        options=options,
    )


def fault(kind: str, role: str, step: int, *, after_s: float = 0.0, seconds: float = 0.0) -> Fault:
    return Fault(
        kind, role, step, after_s=after_s, patience_s=60.0, seconds=seconds, which=0, factor=5.0
    )


def violations(of: Scenario, history: History) -> list[str]:
    return Checker(facts_of(of), references(of, history)).check(history)


def test_a_loader_worker_that_cannot_reach_a_constructor_worker_before_all_are_back_is_linked_in_the_end() -> (
    None
):
    """Both are lost; the constructor worker is there again, and waits; the loader worker is
    started, and cannot reach it for a second.
    """
    made = scenario()
    cluster = Cluster(made)
    world, net = cluster.world, cluster.net
    told: list[str] = []

    def lose_constructor() -> None:
        if cluster.slowest < 5:
            world.at(0.001, lose_constructor, None)
            return
        hosts = cluster.launched.control.processes()
        hosts["constructor-worker/0"].kill()
        lose_loader(hosts["loader-worker/0"])

    def lose_loader(old: Process) -> None:
        """While the other is being started; then it is the next that is."""
        hosts = cluster.launched.control.processes()
        if "constructor-worker/0" in hosts and old.alive:
            old.kill()
            told.append("both are lost")
        if (new := hosts.get("loader-worker/0", old)) is old:
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
    late = [
        fault("slow link", "loader", STEPS - 2, after_s=1.0, seconds=0.05) for _ in range(LEAST + 1)
    ]
    made = scenario(*late)
    history = Cluster(made).run()
    assert history.fired.total() == LEAST, "nor does it wait for more"
    assert violations(made, history) == []


def test_a_fault_that_finds_nobody_strikes_when_there_is_somebody() -> None:
    """The planner is stopped, and all that is left was planned: whoever is to stop it once more
    waits until it is awake.
    """
    made = scenario(*(fault("stop", "planner", STEPS - 3, seconds=2.0) for _ in range(LEAST)))
    history = Cluster(made).run()
    assert history.fired["stop", "planner"] == LEAST
    assert violations(made, history) == []


def test_a_fault_without_patience_strikes_too_where_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No loader worker is there when links of one are to be slow, and nothing else could strike
    instead.
    """
    monkeypatch.setattr(striking, "TRIES", 0)
    made = scenario(
        fault("kill", "loader", 5),
        *(fault("slow link", "loader", 5, seconds=0.05) for _ in range(LEAST - 1)),
    )
    history = Cluster(made).run()
    assert history.fired.total() == LEAST
    assert violations(made, history) == []


NAMES = {"loader": "loader-worker/0", "constructor": "constructor-worker/0", "planner": "planner"}


@pytest.mark.parametrize("role", NAMES)
def test_a_worker_whose_successors_die_while_they_start_is_there_in_the_end(role: str) -> None:
    made = scenario(replace(fault("bad start", role, 5), which=2))
    cluster = Cluster(made)
    history = cluster.run()
    assert [process.name for process in cluster.world.processes].count(NAMES[role]) == 1 + 3 + 1
    assert violations(made, history) == []


@pytest.mark.parametrize("role", NAMES)
def test_a_worker_that_starts_slowly_is_waited_for_and_not_taken_for_dead(role: str) -> None:
    made = scenario(fault("slow start", role, 5, seconds=10.0))
    cluster = Cluster(made)
    history = cluster.run()
    assert [process.name for process in cluster.world.processes].count(NAMES[role]) == 2
    assert cluster.world.now > 10.0
    assert violations(made, history) == []


def test_a_session_that_is_moved_while_its_workers_die_in_starting_is_moved() -> None:
    """What is killed is not missed any more when all are started for the state that was loaded; of
    those the first two die.
    """
    bad = [
        replace(fault("bad start", role, 5), which=0, patience_s=0.0)
        for role in ("loader", "constructor", "planner")
    ]
    made = scenario(*bad, fault("rewind", "job", 5))
    cluster = Cluster(made)
    history = cluster.run()
    assert history.fired["rewind", "job"] == 1
    assert violations(made, history) == []


# what people say in mid-run

SAID = 3  # the step behind which they do


def mixture(made: Scenario) -> SetMixture:
    return SetMixture(
        SAID + made.room + 2, {name: float(1 + 3 * i) for i, name in enumerate(made.names)}
    )


def told(made: Scenario, event: SetMixture | Skip) -> Scenario:
    return replace(made, sayings=(Saying(SAID, event),))


def events_of(cluster: Cluster) -> Sequence[Any]:
    """As the last planner has them."""
    assert cluster.launched.host is not None
    return cluster.launched.host.planner.state().events


def while_it_is_written(
    monkeypatch: pytest.MonkeyPatch, what: Callable[[JobJournal, Callable[[], None]], None]
) -> list[Any]:
    """``what`` happens when the first event is to be written, and may write it; all that are
    written, the first included.
    """
    real, written = JobJournal.write_event, list[Any]()

    def said(self: JobJournal, event: Any, event_id: Any) -> None:
        if not isinstance(event, SetMixture):
            return real(self, event, event_id)
        written.append(event)
        if len(written) == 1:
            return what(self, lambda: real(self, event, event_id))
        return real(self, event, event_id)

    monkeypatch.setattr(JobJournal, "write_event", said)
    return written


class Chosen:
    """How much of a write that is torn is there: all of it, or nothing."""

    def __init__(self, whole: bool):
        self._whole = whole

    def choice(self, sizes: Sequence[int]) -> int:
        return sizes[-1] if self._whole else sizes[0]

    def randrange(self, n: int) -> int:
        return 0


@pytest.mark.parametrize("whole", [True, False])
def test_a_coordinator_that_dies_while_it_is_told_is_followed_by_one_that_knows_it_once(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written or not, whoever says it was not answered: the next coordinator is asked first whether
    it has it.
    """
    made = told(scenario(), event := mixture(scenario()))
    cluster = Cluster(made)
    assert cluster.disk is not None
    cluster.disk.chance = Chosen(whole)  # type: ignore[assignment]

    def tears(journal: JobJournal, write: Callable[[], None]) -> None:
        cluster.disk.tears = True  # type: ignore[union-attr]
        write()

    written = while_it_is_written(monkeypatch, tears)
    history = cluster.run()
    assert cluster.launched.incarnation == 1
    assert written == [event] * (1 if whole else 2)
    assert list(events_of(cluster)) == [event]
    assert violations(made, history) == []


@pytest.mark.parametrize("whole", [True, False])
def test_what_was_said_when_all_was_killed_is_said_again_if_the_journal_has_it_not(
    whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = told(scenario(), event := mixture(scenario()))
    cluster = Cluster(made)

    def ends(journal: JobJournal, write: Callable[[], None]) -> None:
        if whole:
            write()
        cluster.world.at(0.0, cluster.restart, None)  # type: ignore[arg-type]
        raise Killed

    written = while_it_is_written(monkeypatch, ends)
    history = cluster.run()
    assert [e.what for e in history.events if e.what in ("restart", "said")] == (
        ["said", "restart"] if whole else ["restart", "said"]
    )
    assert written == [event] * (1 if whole else 2)
    assert list(events_of(cluster)) == [event]
    assert violations(made, history) == []


def test_what_was_said_when_the_disk_was_full_happens_when_there_is_room() -> None:
    made = told(scenario(fault("disk full", "planner", SAID, seconds=1.0)), mixture(scenario()))
    cluster = Cluster(made)
    history = cluster.run()
    assert "JournalError" in next(e.words for e in history.events if e.what == "stopped")
    assert [e.what for e in history.events if e.what == "said"] == ["said"]
    assert violations(made, history) == []


def test_what_a_coordinator_took_when_nobody_waited_for_it_any_more_has_happened() -> None:
    """It stands still for longer than who says it waits; that is told by itself, and noted."""
    patient = scenario(fault("stop", "planner", SAID, seconds=2.0))
    made = told(replace(patient, seed=6), mixture(patient))
    cluster = Cluster(made)
    history = cluster.run()
    assert cluster.launched.incarnation == 0
    assert [e.what for e in history.events if e.what == "said"] == ["said"]
    assert violations(made, history) == []


@pytest.mark.parametrize("kind", ["rewind", "reshard"])
@pytest.mark.parametrize("journal", [True, False])
def test_a_state_of_a_step_that_was_planned_before_holds_what_was_said(
    kind: str, journal: bool
) -> None:
    """Trainers stand behind a step, it is said, and they go on from there as others."""
    plain = replace(scenario(replace(fault(kind, "job", SAID), after_s=0.02)), journal=journal)
    made = told(plain, Skip((SAID + plain.room + 3, SAID + plain.room + 5)))
    cluster = Cluster(made)
    history = cluster.run()
    assert [e.what for e in history.events if e.what in ("said", kind)] == ["said", kind]
    assert made.skipped.isdisjoint(e.step for e in history.events if e.what == "deliver")
    assert violations(made, history) == []
