"""Stories of a job's parts that die, hang and come back: what happens, and what is done about
it.
"""

from __future__ import annotations

from typing import Any

from overlord.cluster.supervisor import (
    Closing,
    GiveUp,
    Heartbeat,
    KillWorker,
    Loss,
    Needed,
    StandbyReady,
    StartRollback,
    StartWorker,
    Supervisor,
    Tick,
    Unreachable,
    WorkerDied,
    WorkerReady,
)
from overlord.errors import ActorLost

C, L, M = "constructor-worker/0", "loader-worker/0", "loader-worker/1"
NINE = "killed by signal 9"


def there(*names: str, max_restarts: int = 3) -> Supervisor:
    made = Supervisor(lost_after_s=8.0, max_restarts=max_restarts)
    for name in names or (C, L, M):
        assert made.handle(WorkerReady(name), 0.0) == []
    return made


def told(supervisor: Supervisor, *events: tuple[float, Any]) -> list[Any]:
    return [command for now, event in events for command in supervisor.handle(event, now)]


def test_a_worker_that_dies_is_started_again_and_planning_rolls_back() -> None:
    made = there()
    assert told(made, (1.0, WorkerDied(L, 0, NINE))) == [StartWorker(L, 1)]
    assert made.lost() == {L: NINE}
    assert told(made, (1.5, WorkerReady(L, 1))) == [StartRollback(f"{L}: {NINE}")]
    assert made.lost() == {}
    assert made.take_recovered() == [Loss(worker=L, reason=NINE, since=1.0)]
    assert made.take_recovered() == []


def test_several_that_die_at_once_lead_to_one_way_back_when_the_last_is_there() -> None:
    made = there()
    assert told(made, (1.0, WorkerDied(L, 0, NINE)), (1.0, WorkerDied(M, 0, "exit code 3"))) == [
        StartWorker(L, 1),
        StartWorker(M, 1),
    ]
    assert told(made, (1.2, WorkerReady(M, 1))) == []
    assert told(made, (1.4, WorkerReady(L, 1))) == [StartRollback(f"{M}: exit code 3; {L}: {NINE}")]


def test_a_death_while_another_is_being_started_is_waited_for_as_well() -> None:
    made = there()
    story = [(1.0, WorkerDied(L, 0, NINE)), (1.1, WorkerDied(M, 0, NINE)), (1.2, WorkerReady(L, 1))]
    assert told(made, *story) == [StartWorker(L, 1), StartWorker(M, 1)]
    assert told(made, (1.3, WorkerDied(L, 1, NINE))) == [StartWorker(L, 2)], (
        "one that was there again already"
    )
    assert told(made, (1.4, WorkerReady(M, 1)), (1.5, WorkerReady(L, 2))) == [
        StartRollback(f"{L}: {NINE}; {M}: {NINE}")
    ]
    assert [(loss.worker, loss.since) for loss in made.take_recovered()] == [(L, 1.0), (M, 1.1)], (
        "missed since it was first"
    )


def test_loader_workers_are_started_when_those_are_there_that_they_connect_to() -> None:
    made = there()
    assert told(
        made,
        (1.0, WorkerDied(L, 0, NINE)),
        (1.1, WorkerDied(C, 0, NINE)),
        (1.2, WorkerDied(M, 0, NINE)),
    ) == [StartWorker(L, 1), StartWorker(C, 1)]
    assert told(made, (1.3, WorkerReady(C, 1))) == [StartWorker(M, 1)]
    assert told(made, (1.4, WorkerReady(M, 1)), (1.5, WorkerReady(L, 1)))[-1:] == [
        StartRollback(f"{C}: {NINE}; {M}: {NINE}; {L}: {NINE}")
    ]


def test_a_worker_that_dies_while_it_is_being_started_is_started_once_more() -> None:
    made = there()
    assert told(made, (1.0, WorkerDied(L, 0, NINE)), (1.1, WorkerDied(L, 1, "no such file"))) == [
        StartWorker(L, 1),
        StartWorker(L, 2),
    ]
    assert told(made, (1.2, WorkerDied(L, 1, "no such file"))) == [], (
        "its death is told twice: by its control plane, and by who waited for it"
    )
    assert told(made, (1.3, WorkerReady(L, 2))) == [StartRollback(f"{L}: no such file")]


def test_what_could_not_be_started_because_of_another_has_no_fault_of_its_own() -> None:
    made = there(max_restarts=1)
    assert told(
        made,
        (1.0, WorkerDied(L, 0, NINE)),
        (1.1, WorkerDied(C, 0, NINE)),
        (1.2, WorkerDied(L, 1, "no answer")),
    ) == [StartWorker(L, 1), StartWorker(C, 1)]
    assert told(made, (1.3, WorkerReady(C, 1))) == [StartWorker(L, 2)]
    assert told(made, (1.4, WorkerDied(L, 2, "no answer"))) == [GiveUp(made.given_up)]  # type: ignore[arg-type]


def test_a_worker_that_dies_again_and_again_ends_the_job_with_what_it_died_of() -> None:
    made = there(max_restarts=2)
    for k in range(2):
        assert told(made, (1.0 + k, WorkerDied(L, k, "exit code 3"))) == [StartWorker(L, k + 1)]
        assert told(made, (1.5 + k, WorkerReady(L, k + 1))) == [StartRollback(f"{L}: exit code 3")]
        made.take_recovered()
    [given_up] = told(made, (4.0, WorkerDied(L, 2, "exit code 3")))
    assert isinstance(given_up, GiveUp)
    assert (given_up.error.name, given_up.error.reason) == (L, "exit code 3")
    assert isinstance(made.given_up, ActorLost)
    assert told(made, (5.0, WorkerDied(M, 0, NINE)), (6.0, Tick())) == [], (
        "nothing is done any more"
    )


def test_a_step_that_all_have_taken_meanwhile_begins_the_count_anew() -> None:
    made = there(max_restarts=1)
    for k in range(5):
        died = WorkerDied(L, k, NINE, acked=k)
        assert told(made, (1.0 + k, died), (1.1 + k, WorkerReady(L, k + 1)))[0] == StartWorker(
            L, k + 1
        )
        made.take_recovered()
    assert isinstance(told(made, (9.0, WorkerDied(L, 5, NINE, acked=4)))[0], GiveUp), (
        "a step that was told before is no progress"
    )


def test_without_restarts_the_first_death_ends_the_job() -> None:
    assert isinstance(told(there(max_restarts=0), (1.0, WorkerDied(L, 0, NINE)))[0], GiveUp)


def test_a_worker_that_answers_nothing_is_killed_and_then_started() -> None:
    made = there()
    for k in range(4):
        assert (
            told(
                made,
                (2.0 * k, Tick()),
                (2.0 * k, Heartbeat(C)),
                (2.0 * k, Heartbeat(L)),
                (2.0 * k, Heartbeat(M)),
            )
            == []
        )
    quiet = [
        (2.0 * k, event) for k in range(4, 8) for event in (Heartbeat(C), Heartbeat(M), Tick())
    ]
    assert told(made, *quiet) == []
    assert told(made, (16.0, Heartbeat(C)), (16.0, Heartbeat(M)), (16.0, Tick())) == [
        KillWorker(L, 0, "it answered nothing for 10.0 s")
    ]
    assert told(made, (16.0, Tick()), (18.0, Tick())) == [], "once"
    assert told(made, (18.1, WorkerDied(L, 0, NINE))) == [StartWorker(L, 1)]
    assert told(made, (18.5, WorkerReady(L, 1))) == [
        StartRollback(f"{L}: it answered nothing for 10.0 s")
    ]
    assert made.take_recovered() == [
        Loss(worker=L, reason="it answered nothing for 10.0 s", since=6.0)
    ], "missed since it was last heard"


def test_whoever_watches_may_have_slept_itself() -> None:
    """A machine that was suspended: much time and one tick have passed, and answers wait to be
    read.
    """
    made = there()
    assert told(made, (0.0, Tick()), (3600.0, Tick()), (3600.1, Tick())) == []
    assert (
        told(
            made,
            (3600.2, Heartbeat(C)),
            (3600.2, Heartbeat(L)),
            (3600.2, Heartbeat(M)),
            (3602.0, Tick()),
            (3604.0, Tick()),
        )
        == []
    )


def test_a_worker_that_comes_back_from_the_dead_is_killed() -> None:
    made = there()
    told(made, (1.0, WorkerDied(L, 0, NINE)))
    assert told(made, (1.1, Heartbeat(L, 0))) == [
        KillWorker(L, 0, "it was given up, and another process replaces it")
    ]
    assert told(made, (1.2, WorkerReady(L, 1)))[0] == StartRollback(f"{L}: {NINE}")
    assert told(made, (1.3, Heartbeat(L, 0))) == [
        KillWorker(L, 0, "it was given up, and another process replaces it")
    ]
    assert told(made, (1.4, WorkerReady(L, 0))) == [
        KillWorker(L, 0, "another process has replaced it")
    ]
    assert told(made, (1.5, WorkerDied(L, 0, NINE))) == [], "that is not the one that is there now"
    assert made.lost() == {}


def test_a_worker_that_others_cannot_reach_is_of_no_use_though_it_lives() -> None:
    made = there()
    assert told(made, (1.0, Unreachable(C, "no way"))) == [KillWorker(C, 0, "no way")]
    assert told(made, (1.1, Unreachable(C, "no way"))) == [], "it is on its way"
    assert told(made, (1.2, WorkerDied(C, 0, NINE))) == [StartWorker(C, 1)]
    assert told(made, (1.3, Unreachable(C, "no way"))) == [], "of one that is gone"
    assert told(made, (1.4, WorkerReady(C, 1))) == [StartRollback(f"{C}: no way")]


def test_a_job_that_ends_misses_nobody() -> None:
    made = there()
    told(made, (1.0, WorkerDied(M, 0, NINE)))
    assert (
        told(
            made,
            (1.1, Closing()),
            (1.2, WorkerDied(L, 0, NINE)),
            (1.3, WorkerReady(M, 1)),
            (99.0, Tick()),
        )
        == []
    )


def test_a_worker_that_joins_later_is_missed_like_any_other() -> None:
    made = there(C)
    assert told(
        made, (1.0, WorkerReady("loader-worker/7")), (2.0, WorkerDied("loader-worker/7", 0, NINE))
    ) == [StartWorker("loader-worker/7", 1)]
    assert told(made, (3.0, WorkerDied("loader-worker/9", 0, NINE))) == [], "nobody knows it"


def test_a_worker_whose_standbys_live_is_not_waited_for() -> None:
    made = there()
    assert told(made, (1.0, WorkerDied(L, 0, NINE, spare=True))) == [
        StartWorker(L, 1),
        StartRollback(f"{L}: {NINE}"),
    ]
    assert made.take_recovered() == [Loss(worker=L, reason=NINE, since=1.0, spare=True)]
    assert told(made, (1.5, WorkerReady(L, 1))) == [StandbyReady(L)], (
        "nothing is planned again for it"
    )
    assert told(made, (2.0, WorkerDied(L, 1, NINE))) == [StartWorker(L, 2)], (
        "then it is like any other"
    )
    assert told(made, (2.5, WorkerReady(L, 2))) == [StartRollback(f"{L}: {NINE}")]


def test_it_is_waited_for_when_those_who_had_what_it_had_are_gone_too() -> None:
    made = there()
    assert told(made, (1.0, WorkerDied(C, 0, NINE)), (1.1, WorkerDied(L, 0, NINE, spare=True))) == [
        StartWorker(C, 1)
    ]
    assert told(made, (1.2, Needed(L)), (1.3, WorkerDied(M, 0, NINE, spare=True))) == []
    assert told(made, (1.4, WorkerReady(C, 1))) == [StartWorker(L, 1), StartWorker(M, 1)]
    assert told(made, (1.5, WorkerReady(M, 1))) == [StandbyReady(M)]
    assert told(made, (1.6, WorkerReady(L, 1)))[-1:] == [
        StartRollback(f"{L}: {NINE}; {M}: {NINE}; {C}: {NINE}")
    ]
