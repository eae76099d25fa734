"""How a broadcast ends, fails, is moved and is asked: on all ranks alike, and nobody waits in a
collective for one who is gone.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

import overlord as ov
import overlord.torch as ot
from overlord.errors import DataStall, OverlordError, PlanError, StateMismatch
from overlord.mesh import ClientPlaceTree
from tests.internals import (
    broadcast_closed,
    broadcast_limit,
    broadcast_of,
    departed_ranks,
    frames_under_way,
    on_departure,
)
from tests.processes import plain, written
from tests.torch.ranks.jobs import broadcasting, job

PLACE = ClientPlaceTree(pp=2, dp=2)
SERVED = broadcasting("PP")


def joined(strategy: Any = SERVED, place: ClientPlaceTree = PLACE, **changes: Any) -> Any:
    options = {
        name: changes.pop(name) for name in ("prefetch", "runtime", "hosts") if name in changes
    }
    return ot.join(job(place, strategy, **changes), stall_limit_s=30.0, wait_s=30.0, **options)


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def failing_at(step: int, error: Exception) -> Any:
    def strategy(buffer: ov.Buffer, place: ClientPlaceTree) -> ov.LoadingPlan:
        if buffer.step == step:
            raise error
        return SERVED(buffer, place)

    return strategy


def all_ranks_end_with_the_stream(out: Path) -> None:
    with joined(until=3) as client:
        assert [step.step for step in client] == [0, 1, 2]
        assert next(client, None) is None, "an end is an end"
        states = everyone(plain(client.state_dict()))
        assert all(state == states[0] for state in states)
        assert states[0]["step"] == 3


def an_error_of_the_job_is_raised_on_all_ranks(out: Path) -> None:
    with joined(failing_at(2, ValueError("not this one"))) as client:
        assert [next(client).step, next(client).step] == [0, 1]
        said = [raised(client) for _ in range(2)]
        assert said[0] == said[1]
        assert "not this one" in said[0]
        assert len(set(everyone(said[0]))) == 1


def raised(client: Any) -> str:
    try:
        next(client)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it gave a step")


def an_error_in_the_first_plan_is_raised_on_all_ranks(out: Path) -> None:
    with joined(failing_at(0, ValueError("nor this"))) as client:
        assert "nor this" in raised(client)


def a_plan_that_broadcasts_otherwise_is_refused_on_all_ranks(out: Path) -> None:
    def changing(buffer: ov.Buffer, place: ClientPlaceTree) -> ov.LoadingPlan:
        return broadcasting("PP" if buffer.step < 2 else "DP")(buffer, place)

    with joined(changing) as client:
        next(client), next(client)
        said = raised(client)
        assert said.startswith(PlanError.__name__)
        assert "broadcast=False" in said


def a_session_that_is_closed_ends_all_ranks(out: Path) -> None:
    client = joined()
    next(client)
    dist.barrier()
    if dist.get_rank() == 0:
        client.session.close()
    said = ""
    for _ in range(10):  # steps that were prefetched may still come
        try:
            next(client)
        except OverlordError as error:
            said = str(error)
            break
    assert said
    client.close()


def a_fetcher_need_not_wait_for_those_it_serves(out: Path) -> None:
    """As in a pipeline: the first stage takes its step and sends activations before the next one
    asks for its own.
    """
    with joined() as client:
        word, peer = torch.zeros(1), (dist.get_rank() + 2) % 4
        if client.service.fetches:
            first, second = next(client), next(client)
            dist.send(word, peer)
        else:
            dist.recv(word, peer)
            first, second = next(client), next(client)
        assert (first.step, second.step) == (0, 1)
        dist.barrier()


def a_loaded_state_moves_all_ranks(out: Path) -> None:
    with joined() as client:
        took = [written(next(client)) for _ in range(2)]
        state = client.state_dict()
        took += [written(next(client)) for _ in range(2)]
        dist.barrier()
        for _ in range(2):
            client.load_state_dict(state)
            assert plain(client.state_dict()) == plain(state)
            assert [written(next(client)) for _ in range(2)] == took[2:]
            dist.barrier()


def a_loaded_state_goes_on_behind_an_end(out: Path) -> None:
    with joined(until=3) as client:
        next(client)
        state = client.state_dict()
        assert [s.step for s in client] == [1, 2]
        dist.barrier()  # as ever: whoever moves the session moves it for all
        client.load_state_dict(state)
        assert [s.step for s in client] == [1, 2]


def a_state_that_does_not_fit_is_refused_on_all_ranks(out: Path) -> None:
    with joined() as client:
        next(client)
        state = client.state_dict()
        dist.barrier()
        for wrong in ({**state, "version": 99}, {}):
            try:
                client.load_state_dict(wrong)
            except StateMismatch:
                pass
            else:
                raise AssertionError("it was loaded")
        assert next(client).step == 1, "the stream goes on as before"
        dist.barrier()


def ranks_that_do_different_things_are_told(out: Path) -> None:
    client = joined()
    next(client)
    state = client.state_dict()
    dist.barrier()
    if client.service.fetches:
        client.load_state_dict(state)
    else:
        assert "load_state_dict" in raised(client)
    dist.barrier()
    client.close()


def a_fetcher_that_is_ahead_when_the_session_moves_is_followed(out: Path) -> None:
    """One group loads. The fetcher of the other is at the next step, and says so; who is served by
    it loads before it has heard that.
    """
    with joined() as client:
        next(client)
        state = client.state_dict()
        dist.barrier()
        if client.service.fetcher == 0:
            client.load_state_dict(state)
        dist.barrier()
        if client.service.fetcher != 0:
            if client.service.fetches:
                while "another rank rewound the session" not in (said := _next_or_error(client)):
                    assert not said, said
            else:
                time.sleep(1.0)
            client.load_state_dict(state)
        assert next(client).step == 1
        dist.barrier()


def _next_or_error(client: Any) -> str:
    try:
        next(client)
    except Exception as error:
        return str(error)
    return ""


def a_prefetching_thread_takes_steps_ahead_and_may_leave_early(out: Path) -> None:
    client = joined()
    with ot.DevicePrefetcher(client, "cpu", depth=3) as steps:
        took = [next(steps).step for _ in range(3)]
        state = steps.state_dict()
        took += [next(steps).step for _ in range(3)]
        assert took == list(range(6))
        assert len({json.dumps(plain(s), sort_keys=True) for s in everyone(state)}) == 1
        for _ in range(2):  # threads of the group are at different steps when they are stopped
            steps.load_state_dict(state)
            assert [next(steps).step for _ in range(2)] == [3, 4]
            dist.barrier()


def a_refused_state_costs_no_step_that_was_taken_ahead(out: Path) -> None:
    with ot.DevicePrefetcher(
        joined(until=9, prefetch=4), "cpu", depth=4 if dist.get_rank() < 2 else 1
    ) as steps:
        took = [next(steps).step]
        while (
            frames_under_way(steps.client) < 2 and steps.client.service.fetches
        ):  # it is ahead of those it serves
            time.sleep(0.01)
        dist.barrier()
        try:
            steps.load_state_dict({"version": 99})
        except StateMismatch:
            took += [step.step for step in steps]
        assert took == list(range(9))
        dist.barrier()


def a_fetcher_may_close_while_the_end_is_not_yet_heard_by_all(out: Path) -> None:
    """Its thread waits for them, and so does whoever closes it."""
    client = joined(until=3, prefetch=4)
    steps = ot.DevicePrefetcher(client, "cpu", depth=4 if client.service.fetches else 1)
    assert next(steps).step == 0
    if client.service.fetches:
        assert [next(steps).step, next(steps).step] == [1, 2]
        while broadcast_of(client).frames < 4 or not frames_under_way(client):
            time.sleep(0.01)
        dist.barrier()
        steps.close()
        assert broadcast_closed(client)
    else:
        dist.barrier()
        time.sleep(0.3)  # they are waited for; nothing depends on how long
        assert [step.step for step in steps] == [1, 2]
        steps.close()
    dist.barrier()


def who_closes_twice_leaves_once(out: Path) -> None:
    """As with the ``with`` of a client around that of its prefetcher: others that are served still
    need the session.
    """
    with joined(until=2) as client:
        for _ in client:
            pass
        dist.barrier()
        if dist.get_rank() == 2:
            client.close()
            client.close()
        dist.barrier()
        assert departed_ranks(client) == 1
        dist.barrier()


def a_served_rank_has_its_state_behind_an_error_after_it_loaded_one(out: Path) -> None:
    """For a checkpoint before the job is ended."""
    with joined(failing_at(4, ValueError("no more"))) as client:
        next(client)
        state = client.state_dict()
        dist.barrier()
        client.load_state_dict(state)
        assert [next(client).step for _ in range(3)] == [1, 2, 3]
        assert "no more" in raised(client)
        assert client.state_dict()["step"] == 4
        dist.barrier()


def one_who_stops_in_the_middle_of_a_frame_is_told_so(out: Path) -> None:
    """What comes then is the rest of that frame, and no beginning."""
    client = joined()
    next(client)
    dist.barrier()
    if not client.service.fetches:
        # between two waits of torch's, where Ctrl-C is heard
        on_departure(client, lambda frame: signal.raise_signal(signal.SIGINT))
        try:
            next(client)
        except KeyboardInterrupt:
            assert "join again" in raised(client)
        else:
            raise AssertionError("it gave a step")
    dist.barrier()
    client.mark_failed()
    client.close()


class Losses:
    """Weights by the losses that were reported; what it hears is kept for the check to read."""

    heard: ClassVar[list[dict[str, float]]] = []
    takes_feedback = True

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        self.heard.append(dict(feedback))
        return {"web": 1.0 + feedback.get("loss/web", 0.0), "code": 1.0}

    def __repr__(self) -> str:
        return "Losses"


def reports_of_served_ranks_arrive(out: Path) -> None:
    """The last stage knows the loss, and another one fetches for it."""
    with joined(mixture=Losses(), prefetch=2, feedback_lag=4) as client:
        for _ in range(8):
            step = next(client)
            if not client.service.fetches:
                client.report(step.step, {"loss/web": 2.0 + client.rank, "loss/code": 1.0})
            dist.barrier()  # so that what was said is heard before the next step is asked for
        if dist.get_rank() == 0:
            feedback = client.session.metrics()["feedback"]
            assert feedback["received"] == 16, feedback
            assert {"loss/web": 4.5, "loss/code": 1.0} in Losses.heard, "ranks 2 and 3 said 4 and 5"
        dist.barrier()


def a_rank_that_does_not_come_is_named(out: Path) -> None:
    client = joined()
    next(client)
    dist.barrier()
    if not client.service.fetches:
        # from here on: the first step may take its time
        assert broadcast_limit(client, 1.0) == 30.0, "the limit of the launch"
        said = raised(client)
        assert said.startswith(DataStall.__name__)
        assert f"rank {client.service.fetcher}" in said
    dist.barrier()
    client.mark_failed()
    client.close()


def every_runtime_serves_a_broadcast(out: Path) -> None:
    """Steps of constructor processes and of a single process are the same."""
    found = []
    for options in ({}, {"runtime": "process", "hosts": 1}):
        with joined(**options) as client:
            found.append([written(next(client)) for _ in range(2)])
            dist.barrier()
    assert found[0] == found[1]


CHECKS: dict[str, Callable[[Path], None]] = {
    check.__name__: check
    for check in (
        all_ranks_end_with_the_stream,
        an_error_of_the_job_is_raised_on_all_ranks,
        an_error_in_the_first_plan_is_raised_on_all_ranks,
        a_plan_that_broadcasts_otherwise_is_refused_on_all_ranks,
        a_session_that_is_closed_ends_all_ranks,
        a_fetcher_need_not_wait_for_those_it_serves,
        a_loaded_state_moves_all_ranks,
        a_loaded_state_goes_on_behind_an_end,
        a_state_that_does_not_fit_is_refused_on_all_ranks,
        a_fetcher_that_is_ahead_when_the_session_moves_is_followed,
        a_prefetching_thread_takes_steps_ahead_and_may_leave_early,
        ranks_that_do_different_things_are_told,
        reports_of_served_ranks_arrive,
        a_refused_state_costs_no_step_that_was_taken_ahead,
        a_fetcher_may_close_while_the_end_is_not_yet_heard_by_all,
        who_closes_twice_leaves_once,
        a_served_rank_has_its_state_behind_an_error_after_it_loaded_one,
        every_runtime_serves_a_broadcast,
        a_rank_that_does_not_come_is_named,
        one_who_stops_in_the_middle_of_a_frame_is_told_so,
    )
}
