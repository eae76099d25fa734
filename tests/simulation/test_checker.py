"""The checker: it knows sources and mesh, reads what trainers saw, and says in a sentence what is
wrong.
"""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest

from tests.simulation.world.checker import Checker, References
from tests.simulation.world.cluster import Cluster
from tests.simulation.world.faults import Fault
from tests.simulation.world.history import Event, History, Seen
from tests.simulation.world.scenario import Scenario, draw
from tests.simulation.world.seed_run import facts_of, references, undisturbed

SEED = 5


def scenario() -> Scenario:
    plain = draw(SEED)
    plain = replace(
        plain,
        mesh=(2, 2, 1, 1),
        faults=(),
        learns=False,
        changes=False,
        journal=False,
        look_ahead=1,
        overflow="grow",
    )
    return replace(
        plain, samples=8, strategy="vanilla", options={**plain.options, "constructor_hosts": 1}
    )


@lru_cache(maxsize=1)
def recorded() -> tuple[tuple[Event, ...], dict[tuple[int, int], Seen]]:
    logging.disable(logging.CRITICAL)
    try:
        return tuple(Cluster(scenario()).run().events), undisturbed(scenario())
    finally:
        logging.disable(logging.NOTSET)


def verdict(change: Callable[[list[Event]], list[Event]], *, reference: bool = True) -> list[str]:
    events, ours = recorded()
    found = change(list(events))
    if not reference:  # what the checker finds without anything to compare with
        ours = {(e.rank, e.step): e.seen for e in found if e.seen is not None}
    facts = facts_of(scenario())
    return Checker(facts, {facts.mesh: ours}).check(History(found))


def at(events: list[Event], rank: int, step: int, what: str = "deliver") -> int:
    return next(
        i for i, e in enumerate(events) if e.what == what and e.rank == rank and e.step == step
    )


def with_seen(
    step: int, change: Callable[[Seen], Seen], ranks: tuple[int, ...] = (0, 1, 2, 3)
) -> Callable[[list[Event]], list[Event]]:
    def changed(events: list[Event]) -> list[Event]:
        return [
            replace(e, seen=change(e.seen))
            if e.seen is not None and e.step == step and e.rank in ranks
            else e
            for e in events
        ]

    return changed


def test_a_clean_run_is_clean() -> None:
    assert verdict(lambda events: events) == []


def test_other_bytes_are_told_with_step_and_rank() -> None:
    found = verdict(with_seen(9, lambda s: replace(s, digest="other"), (2,)))
    assert any("step 9, rank 2" in words and "other bytes" in words for words in found)


def test_a_lost_sample_is_found_without_anything_to_compare_with() -> None:
    found = verdict(
        with_seen(4, lambda s: replace(s, samples=(s.samples[0][1:], *s.samples[1:]))),
        reference=False,
    )
    assert any("lost" in words for words in found)
    assert any("times too often" in words for words in found)


def test_a_repeated_sample_is_found_without_anything_to_compare_with() -> None:
    events, _ = recorded()
    first = next(e.seen for e in events if e.seen is not None and e.step == 3 and e.rank == 0)
    found = verdict(
        with_seen(7, lambda s: replace(s, samples=(first.samples[0], *s.samples[1:])), (0, 1)),
        reference=False,
    )
    assert any("again, after step 3" in words for words in found)


def test_a_slice_that_is_missing_is_found() -> None:
    found = verdict(
        with_seen(6, lambda s: replace(s, tokens=tuple(t and t[1:] for t in s.tokens)), (0,)),
        reference=False,
    )
    assert any("step 6" in words and "token" in words for words in found)


def test_peers_that_differ_are_found() -> None:
    events, _ = recorded()
    other = next(e.seen for e in events if e.seen is not None and e.step == 8 and e.rank == 2)
    found = verdict(with_seen(8, lambda s: replace(other, rank=s.rank), (1,)), reference=False)
    assert any("step 8" in words and "replica" in words for words in found)


def test_a_step_that_comes_twice_is_found() -> None:
    def twice(events: list[Event]) -> list[Event]:
        i, j = at(events, 1, 5), at(events, 1, 6)
        return [*events[:j], events[i], *events[j:]]

    assert any("step 5, rank 1" in words for words in verdict(twice))


def test_a_step_that_is_left_out_is_found() -> None:
    found = verdict(lambda events: [e for e in events if not (e.rank == 3 and e.step == 12)])
    assert any("step 13, rank 3: step 12 was expected next" in words for words in found)


def test_a_step_of_a_session_that_was_over_is_found() -> None:
    found = verdict(
        lambda events: [
            replace(e, session=1) if e.what == "deliver" and e.step == 20 else e for e in events
        ]
    )
    assert any("step 20" in words and "session" in words for words in found)


def test_a_restart_too_far_on_is_found() -> None:
    def restarted(events: list[Event]) -> list[Event]:
        i = max(at(events, rank, 10, "took") for rank in range(4)) + 1
        return [*events[:i], Event(events[i].t, "restart", step=14, session=1)]

    assert any("steps are lost" in words for words in verdict(restarted))


def test_what_people_said_in_time_must_not_be_refused() -> None:
    found = verdict(
        lambda events: [
            *events,
            Event(events[-1].t, "refused", step=12, words="PlanError: step 12 is planned already"),
        ]
    )
    assert found == [
        "step 12: what people said of it in time was refused: PlanError: step 12 is planned already"
    ]


def test_a_step_that_is_skipped_is_not_missed_and_one_that_is_delivered_all_the_same_is_found() -> (
    None
):
    events, ours = recorded()
    facts = replace(facts_of(scenario()), skipped={12})
    ours = {(rank, step): seen for (rank, step), seen in ours.items() if step != 12}
    assert (
        Checker(facts, {facts.mesh: ours}).check(History([e for e in events if e.step != 12])) == []
    )
    found = Checker(facts, {facts.mesh: ours}).check(History(list(events)))
    assert "step 12, rank 0: step 13 was expected next" in found
    assert "step 12, rank 0: the undisturbed run has no such step" in found


def test_a_rank_that_ends_early_or_with_an_error_is_found() -> None:
    found = verdict(lambda events: [e for e in events if e.what != "end" or e.rank != 2])
    assert any("rank 2" in words and "never came" in words for words in found)
    found = verdict(
        lambda events: [
            replace(e, what="error", words="Boom") if e.what == "end" and e.rank == 1 else e
            for e in events
        ]
    )
    assert any("rank 1: ended with an error: Boom" in words for words in found)


def test_a_step_that_comes_too_late_is_found() -> None:
    def slow(events: list[Event]) -> list[Event]:
        calm = Event(events[at(events, 0, 15)].t, "calm")
        late = [replace(e, t=e.t + 500.0) if e.step > 18 or e.what == "end" else e for e in events]
        return [*late[:5], calm, *late[5:]]

    assert any("after faults had stopped" in words for words in verdict(slow))


def test_a_mixture_that_drifts_is_found() -> None:
    def drifts(seen: Seen) -> Seen:
        return replace(
            seen, samples=tuple(tuple(s._replace(source=0) for s in mb) for mb in seen.samples)
        )

    found = verdict(with_seen(2, drifts), reference=False)
    assert any("against its weight" in words for words in found)


@lru_cache(maxsize=1)
def resharded() -> tuple[tuple[Event, ...], References]:
    """Behind some step the mesh of 2 x 2 ranks becomes one of 3."""
    fault = Fault("reshard", "job", 8, after_s=0.0, patience_s=1.0, seconds=0.0, which=2)
    logging.disable(logging.CRITICAL)
    try:
        history = Cluster(replace(scenario(), faults=(fault,))).run()
        return tuple(history.events), references(scenario(), history)
    finally:
        logging.disable(logging.NOTSET)


def of_resharded(
    change: Callable[[Event], Event], reference: Callable[[References], References] = lambda r: r
) -> list[str]:
    events, ours = resharded()
    return Checker(facts_of(scenario()), reference(ours)).check(
        History([change(e) for e in events])
    )


def test_a_change_of_the_mesh_is_clean_and_both_meshes_were_seen() -> None:
    events, _ = resharded()
    [change] = [e for e in events if e.what == "reshard"]
    assert change.words == "dp=3 cp=1 tp=1 pp=1"
    assert {e.rank for e in events if e.what == "deliver" and e.step < change.step} == {0, 1, 2, 3}
    assert {e.rank for e in events if e.what == "deliver" and e.step >= change.step} == {0, 1, 2}
    assert of_resharded(lambda e: e) == []


@pytest.mark.parametrize(("late", "words"), [(1, "steps are lost"), (-1, "steps come again")])
def test_a_mesh_that_changes_at_another_step_than_ranks_stand_at_is_found(
    late: int, words: str
) -> None:
    found = of_resharded(lambda e: replace(e, step=e.step + late) if e.what == "reshard" else e)
    assert any(words in said for said in found)


def test_samples_that_are_others_under_the_new_mesh_are_found_though_its_own_run_has_them_too() -> (
    None
):
    def other(seen: Seen) -> Seen:
        return replace(
            seen,
            samples=tuple(tuple(s._replace(epoch=s.epoch + 1) for s in mb) for mb in seen.samples),
        )

    def redrawn(references: References) -> References:
        new = "dp=3 cp=1 tp=1 pp=1"
        return {
            **references,
            new: {at: other(seen) if at[1] == 20 else seen for at, seen in references[new].items()},
        }

    found = of_resharded(
        lambda e: replace(e, seen=other(e.seen)) if e.seen is not None and e.step == 20 else e,
        redrawn,
    )
    assert any("step 20, under dp=3" in said and "is missing" in said for said in found)


@pytest.mark.parametrize(
    "module", ["tests.simulation.world.checker", "tests.simulation.world.history"]
)
def test_the_checker_imports_nothing_of_what_it_checks(module: str) -> None:
    code = f"import sys, {module}; print(*(m for m in sys.modules if m.startswith('overlord.')))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    package = {
        "tests.simulation.world",
        "overlord.import_path",
    }  # the package and what its import brings
    assert set(done.stdout.split()) <= package | {
        "tests.simulation.world.checker",
        "tests.simulation.world.history",
    }
