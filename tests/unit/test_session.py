"""Stories of a session and its clients: who holds up whom, what a state holds, how a job ends, and
what never hangs.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import overlord as ov
from overlord.errors import (
    ActorLost,
    DataStall,
    FrameError,
    JobError,
    JournalError,
    JournalTaken,
    LinkRefused,
    OverlordError,
    PlanError,
    SourceError,
    StateMismatch,
    StorageError,
    TransformError,
)
from overlord.planning.strategies import llm_balance
from overlord.ray.private_folder import NotPrivate
from overlord.transport.address import TryLater
from tests.internals import generation_of, loop_of, runtime_of, stall_limit, user_events_of
from tests.processes import WAIT_S, until
from tests.worlds import Rows

pytestmark = pytest.mark.timeout(200)


def rows(n: int, first: int = 0) -> Rows:
    return Rows([{"n": first + k, "tokens": [first + k] * (1 + k % 5)} for k in range(n)])


def job(n: int = 400, dp: int = 2, samples: int = 8, **changes: Any) -> ov.Job:
    sources = [
        ov.Source(name, rows(n, first), transforms=[ov.Tokens("tokens")], epochs=1)
        for name, first in (("a", 0), ("b", 1000))
    ]
    settings = {
        "name": "story",
        "sources": sources,
        "batch": ov.Batch(samples=samples, context=64),
        "place": ov.ClientPlaceTree(dp=dp),
        "seed": 3,
        "slice_rows": 16,
    }
    return ov.Job(**{**settings, **changes})


def launch(made: ov.Job, **options: Any) -> ov.Session:
    return ov.launch(made, **{"check": True, "stall_limit_s": WAIT_S, "prefetch": 3, **options})


def content(step: ov.Step) -> tuple[int, list[list[int]]]:
    return step.step, [mb["tokens"].tolist() for mb in step]


def take(client: ov.Client, n: int) -> list[Any]:
    return [content(next(client)) for _ in range(n)]


def next_when(asked: threading.Event, client: ov.Client) -> ov.Step:
    """Says that it is asked for."""
    asked.set()
    return next(client)


def rest(client: ov.Client) -> list[Any]:
    return [content(step) for step in client]


@contextmanager
def impatient(client: ov.Client, seconds: float = 0.3) -> Iterator[None]:
    """Where no step can come. Those before and after it may take as long as they do, and so may
    whoever is asked why none comes.
    """
    with pytest.MonkeyPatch.context() as patch, stall_limit(client, seconds):
        for asked in (
            "client.connect.REASON_S",
            "session.running_job.WAITING_FOR_S",
            "cluster.status.ASK_S",
        ):
            patch.setattr(f"overlord.{asked}", WAIT_S)
        yield


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Runs a call in a thread; its result, or what it raised, lands in the list."""
    out: list[Any] = []

    def body() -> None:
        try:
            out.append(call())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, out


def whole_run(made: ov.Job, rank: int = 0) -> list[Any]:
    with launch(made) as session:
        clients = [session.client(r) for r in range(made.place.world_size)]
        out = []
        for step in clients[rank]:
            out.append(content(step))
            for other in clients:
                if other is not clients[rank]:
                    next(other)
        return out


# Who holds up whom


def test_when_the_slowest_rank_leaves_the_others_go_on() -> None:
    with launch(job()) as session:
        fast, slow = session.client(0), session.client(1)
        take(fast, 3)  # the whole prefetch window; the slow rank took nothing
        slow.close()
        assert [step for step, _ in take(fast, 5)] == [3, 4, 5, 6, 7]


def test_a_rank_that_waits_goes_on_when_the_slow_one_leaves() -> None:
    with launch(job()) as session:
        fast, slow = session.client(0), session.client(1)
        take(fast, 3)
        thread, got = in_thread(lambda: next(fast).step)
        slow.close()
        thread.join(20)
        assert got == [3]


def test_a_closed_client_gives_no_more_steps_and_holds_nobody_up() -> None:
    with launch(job()) as session:
        stays, leaves = session.client(0), session.client(1)
        take(leaves, 1)
        leaves.close()
        with pytest.raises(OverlordError, match="rank 1 is closed"):
            next(leaves)
        with pytest.raises(OverlordError, match="rank 1 is closed"):
            next(leaves)
        assert len(take(stays, 8)) == 8
        leaves.close()  # twice is fine


def test_the_last_client_leaves_and_the_session_still_closes() -> None:
    with launch(job()) as session:
        client = session.client(0)
        take(client, 1)
        client.close()
    with pytest.raises(OverlordError, match="closed"):
        session.client(0)


def test_a_client_that_comes_after_the_first_step_is_refused() -> None:
    with launch(job()) as session:
        take(session.client(0), 1)
        with pytest.raises(OverlordError, match="open the clients of all ranks"):
            session.client(1)
        assert session.client(0) is session.client(0)


def test_a_rank_alone_is_served_at_its_own_pace() -> None:
    with launch(job(n=40)) as session:
        assert len(rest(session.client(1))) == 10


# The end


def test_the_end_stays_the_end_and_iterating_again_gives_nothing() -> None:
    with launch(job(n=40)) as session:
        client = session.client(0)
        assert len(rest(client)) == 10
        assert rest(client) == []
        with pytest.raises(StopIteration):
            next(client)


def test_an_error_stays_the_error() -> None:
    def broken(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        raise ZeroDivisionError("mine")

    with launch(job(strategy=broken)) as session:
        client = session.client(0)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="mine"):
                next(client)


def test_closing_a_session_wakes_who_waits_in_it() -> None:
    hold, entered = threading.Event(), threading.Event()

    def stuck(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        entered.set()
        hold.wait(20)
        return llm_balance(buffer, place)

    session = launch(job(strategy=stuck))
    thread, got = in_thread(lambda: next(session.client(0)))
    assert entered.wait(20)
    session.close()
    thread.join(20)
    hold.set()
    assert isinstance(got[0], OverlordError)
    assert "closed" in str(got[0])
    session.close()


def test_ctrl_c_inside_next_loses_no_step() -> None:
    asked, hold, trainer = threading.Event(), threading.Event(), threading.get_ident()

    def patient(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        if not hold.is_set():
            assert asked.wait(20)
            time.sleep(0.1)  # it waits by now; if it does not, it is about to
            signal.pthread_kill(trainer, signal.SIGUSR1)
        assert hold.wait(20)
        return llm_balance(buffer, place)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with launch(job(strategy=patient, dp=1)) as session:
            client = session.client(0)
            with pytest.raises(KeyboardInterrupt):
                next_when(asked, client)
            hold.set()
            assert [step for step, _ in take(client, 3)] == [0, 1, 2]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_two_sessions_of_one_process_do_not_mind_each_other() -> None:
    alone = whole_run(job(n=40, dp=1))
    with launch(job(n=40, dp=1)) as one, launch(job(n=40, dp=1)) as two:
        a, b = one.client(0), two.client(0)
        got = [(content(x), content(y)) for x, y in zip(a, b, strict=True)]
    assert [x for x, _ in got] == alone
    assert [y for _, y in got] == alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_client_in_a_forked_process_says_so_at_once() -> None:
    with launch(job(dp=1)) as session:
        client = session.client(0)
        take(client, 1)
        child = os.fork()
        if child == 0:
            try:
                for _ in range(5):
                    next(client)
                os._exit(1)
            except OverlordError as error:
                os._exit(0 if "process" in str(error) else 2)
            except BaseException:
                os._exit(3)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert take(client, 1)[0][0] == 1


# Waiting


def test_a_slow_strategy_is_named_in_the_warning_and_ends_nothing() -> None:
    """The event loop is busy when it is asked why nothing comes; that must not end a job whose
    deadline is far away.
    """
    hold = threading.Event()

    def slow(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        assert hold.wait(30)
        return llm_balance(buffer, place)

    class Release(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            hold.set()

    seen: list[str] = []
    handler = Release()
    logging.getLogger("overlord").addHandler(handler)
    try:
        with launch(job(strategy=slow, dp=1), stall_warn_s=0.1, stall_limit_s=60) as session:
            assert take(session.client(0), 1)[0][0] == 0
    finally:
        logging.getLogger("overlord").removeHandler(handler)
    assert "step 0" in seen[0]


def test_a_stall_names_the_rank_and_step_though_the_event_loop_cannot_answer() -> None:
    hold = threading.Event()

    def stuck(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        hold.wait(30)
        return llm_balance(buffer, place)

    with launch(job(strategy=stuck, dp=1), stall_warn_s=0.05, stall_limit_s=0.1) as session:
        with pytest.raises(DataStall) as caught:
            next(session.client(0))
        hold.set()
    assert (caught.value.step, caught.value.rank) == (0, 0)


def test_a_stall_says_which_rank_holds_the_steps() -> None:
    with launch(job()) as session:
        fast, _ = session.client(0), session.client(1)
        take(fast, 3)
        until(
            lambda: generation_of(session).acked.get(0, -1) >= 0
        )  # of one that is connected it is heard a moment later
        with impatient(fast), pytest.raises(DataStall, match="rank 1"):
            next(fast)


@pytest.mark.parametrize("option", ["stall_warn_s", "stall_limit_s"])
@pytest.mark.parametrize("value", [-1, float("nan"), "soon", None])
def test_a_deadline_that_is_no_time_is_refused(option: str, value: Any) -> None:
    with pytest.raises(JobError, match=option):
        ov.launch(job(), **{option: value})


# States


def test_a_session_moved_to_a_state_can_be_moved_there_again_by_a_client() -> None:
    with launch(job(dp=1)) as session:
        client = session.client(0)
        take(client, 2)
        state = client.state_dict()
        after = take(client, 4)
        session.load_state_dict(state)
        assert take(client, 3) == after[:3]
        client.load_state_dict(state)
        assert take(client, 4) == after
        assert client.state_dict()["step"] == 6


def test_a_session_moved_to_a_state_can_be_moved_to_another_by_a_client() -> None:
    with launch(job(dp=1)) as session:
        client = session.client(0)
        start = client.state_dict()
        first = take(client, 2)
        session.load_state_dict(client.state_dict())
        take(client, 1)
        client.load_state_dict(start)
        assert take(client, 2) == first


def test_rank_after_rank_loads_a_state_and_all_go_on_from_it() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 2)
        state = json.loads(json.dumps(clients[0].state_dict()))
        wanted = [take(client, 3) for client in clients]
        for _ in range(2):  # a second time is a second rewind, not a rank that comes late
            for client in clients:
                client.load_state_dict(state)
            assert [take(client, 3) for client in clients] == wanted


def test_a_state_loaded_before_the_first_step_counts_for_all_ranks() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 2)
        state = clients[0].state_dict()
        wanted = [take(client, 2) for client in clients]
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            client.load_state_dict(state)
        assert [take(client, 2) for client in clients] == wanted


def test_each_rank_may_be_opened_and_loaded_in_turn() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 2)
        state = clients[0].state_dict()
        wanted = [take(client, 2) for client in clients]
    with launch(job()) as session:
        clients = []
        for rank in range(2):
            clients.append(session.client(rank))
            clients[rank].load_state_dict(state)
        assert [take(client, 2) for client in clients] == wanted


def test_threads_that_load_the_same_state_at_the_same_time_all_go_on() -> None:
    with launch(job(dp=4)) as session:
        clients = [session.client(r) for r in range(4)]
        for client in clients:
            take(client, 2)
        state = clients[0].state_dict()
        wanted = [take(client, 3) for client in clients]
        for _ in range(5):
            together = threading.Barrier(4)

            def load(client: ov.Client, together: threading.Barrier = together) -> None:
                together.wait(20)
                client.load_state_dict(state)

            threads = [in_thread(lambda c=c: load(c)) for c in clients]
            for thread, _ in threads:
                thread.join(20)
            assert [got for _, got in threads] == [[None]] * 4
            assert [take(client, 3) for client in clients] == wanted


def test_the_same_state_with_its_keys_in_another_order_is_the_same_state() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 1)
        state = clients[0].state_dict()
        wanted = [take(client, 2) for client in clients]
        clients[0].load_state_dict(state)
        clients[1].load_state_dict(json.loads(json.dumps(state, sort_keys=True)))
        assert [take(client, 2) for client in clients] == wanted


def test_a_rank_that_loads_another_state_is_refused() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        early = clients[0].state_dict()
        for client in clients:
            take(client, 1)
        late = clients[0].state_dict()
        clients[0].load_state_dict(early)
        with pytest.raises(StateMismatch, match="load the same state on every rank") as refused:
            clients[1].load_state_dict(late)
        assert "rank 1: expected the state to which another rank has rewound the session" in str(
            refused.value
        )
        assert "another job" not in str(refused.value)


def test_steps_that_a_rank_still_takes_of_the_old_generation_do_not_count_in_the_new() -> None:
    with launch(job(), prefetch=2) as session:
        clients = [session.client(0), session.client(1)]
        state = clients[0].state_dict()
        take(clients[0], 2)
        clients[0].load_state_dict(state)
        take(clients[0], 1)
        old = next(clients[1])  # prefetched before the rewind
        assert old.step == 0
        take(clients[0], 1)
        assert session.metrics()["planned_steps"] == 2, (
            "rank 1 took nothing of the new generation: the window has not moved"
        )


def test_a_state_is_not_loaded_into_a_closed_session() -> None:
    session = launch(job(dp=1))
    client = session.client(0)
    state = client.state_dict()
    session.close()
    before = set(threading.enumerate())  # some of them are about to end
    for load in (client.load_state_dict, session.load_state_dict):
        with pytest.raises(OverlordError, match="closed"):
            load(state)
    assert not set(threading.enumerate()) - before


def test_a_state_from_the_end_of_the_data_gives_the_end() -> None:
    with launch(job(n=40, dp=1)) as session:
        client = session.client(0)
        rest(client)
        state = json.loads(json.dumps(client.state_dict()))
    with ov.launch(job(n=40, dp=1), resume=state) as session:
        assert rest(session.client(0)) == []
        assert session.client(0).state_dict() == state


@pytest.mark.parametrize(
    "damage",
    [
        {"fingerprint": None},
        {"step": "x"},
        {"cursors": 5},
        {"cursors": {"a": [1, 2]}},
        {"owed": {"a": None}},
        {"events": [{}]},
        {"events": [{"event": "set_mixture", "at": 1}]},
        {"events": [{"event": "party"}]},
        {"mix": []},
        {"counts": {"samples": 3}},
    ],
)
def test_a_damaged_state_is_refused_by_name(damage: dict[str, Any]) -> None:
    with launch(job(dp=1)) as session:
        state = session.client(0).state_dict()
        with pytest.raises(StateMismatch):
            session.load_state_dict({**state, **damage})
        for key in damage:
            with pytest.raises(StateMismatch):
                session.load_state_dict({k: v for k, v in state.items() if k != key})
        assert take(session.client(0), 1)[0][0] == 0, "a refused state changes nothing"


def test_a_source_more_or_less_is_refused_and_can_be_allowed() -> None:
    made = job(n=40, dp=1)
    with launch(made) as session:
        client = session.client(0)
        take(client, 2)
        state = client.state_dict()
    more = replace(
        made,
        sources=(
            *made.sources,
            ov.Source("c", rows(40, 5000), transforms=[ov.Tokens("tokens")], epochs=1),
        ),
    )
    less = replace(made, sources=made.sources[:1])
    for other in (more, less):
        with pytest.raises(StateMismatch) as caught:
            ov.launch(other, resume=state)
        with launch(other, resume=state, allow=tuple(caught.value.differences)) as session:
            got = rest(session.client(0))
            assert got[0][0] == 2
            seen = [t for _, mbs in got for mb in mbs for t in mb]
            assert all((t >= 5000) <= (other is more) for t in seen)
            assert all((1000 <= t < 5000) <= (other is more) for t in seen)


def test_a_state_that_points_behind_the_files_left_goes_on_with_the_next_epoch(
    tmp_path: Path,
) -> None:
    def with_files(n: int) -> ov.Job:
        for k in range(n):
            (tmp_path / f"{k}.jsonl").write_text(
                "".join(json.dumps({"tokens": [k, i]}) + "\n" for i in range(4))
            )
        for path in list(tmp_path.iterdir()):
            if int(path.stem) >= n:
                path.unlink()
        source = ov.Source(
            "a", str(tmp_path / "*.jsonl"), transforms=[ov.Tokens("tokens")], epochs=2
        )
        return ov.Job(
            name="shrink", sources=[source], batch=ov.Batch(samples=4, context=16), shuffle_chunks=1
        )

    with launch(with_files(6)) as session:
        client = session.client(0)
        take(client, 6)
        state = client.state_dict()
    allow = ("source a: files",)
    with launch(with_files(2), resume=state, allow=allow) as session:
        assert [step for step, _ in rest(session.client(0))] == [6, 7]


class Curriculum:
    """A schedule that is an object, without a repr of its own."""

    def __init__(self, turn: int = 4):
        self.turn = turn

    def __call__(self, step: int, feedback: Any) -> dict[str, float]:
        return {"a": 1.0, "b": 0.0 if step < self.turn else 1.0}


class Placing:
    def __call__(self, buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
        return llm_balance(buffer, place)


def test_a_schedule_or_strategy_that_is_an_object_has_the_same_fingerprint_in_every_process() -> (
    None
):
    keep = Curriculum(), Placing()  # alive, so that the second ones have other addresses
    with launch(job(dp=1, mixture=keep[0], strategy=keep[1])) as session:
        client = session.client(0)
        take(client, 3)
        state = client.state_dict()
        wanted = take(client, 3)
    with launch(job(dp=1, mixture=Curriculum(), strategy=Placing()), resume=state) as session:
        assert take(session.client(0), 3) == wanted


def test_a_schedule_with_a_fingerprint_is_known_by_it() -> None:
    class Named(Curriculum):
        @property
        def fingerprint(self) -> str:
            return f"turn at {self.turn}"

    with launch(job(dp=1, mixture=Named(4))) as session:
        state = session.client(0).state_dict()
    with pytest.raises(StateMismatch, match="mixture"):
        ov.launch(job(dp=1, mixture=Named(5)), resume=state)


# Events


def test_a_state_holds_events_that_came_after_its_step_was_planned() -> None:
    """Prefetch runs ahead: the step a trainer saves behind was planned before the trainer said what
    comes later.
    """
    with launch(job(dp=1)) as session:
        client = session.client(0)
        take(client, 2)
        session.set_mixture({"a": 1.0}, at=8)
        session.skip([9, 11])
        state = json.loads(json.dumps(client.state_dict()))
        whole = json.loads(json.dumps(session.state_dict()))
        wanted = take(client, 12)
    assert [step for step, _ in wanted] == [2, 3, 4, 5, 6, 7, 8, 10, 12, 13, 14, 15]
    assert all(t < 1000 for step, mbs in wanted for mb in mbs for t in mb if step >= 8)
    for saved in (state, whole):
        with launch(job(dp=1), resume=saved) as session:
            assert take(session.client(0), 12) == wanted


def test_an_event_before_the_first_step_is_in_the_state_too() -> None:
    with launch(job(dp=1)) as session:
        client = session.client(0)
        assert session.set_mixture({"b": 2.0}) == 0
        state = client.state_dict()
        assert state["events"] == [
            {"event": "set_mixture", "at": 0, "weights": {"a": 0.0, "b": 2.0}}
        ]
        wanted = take(client, 3)
        client.load_state_dict(state)
        assert take(client, 3) == wanted


def test_events_do_not_pile_up() -> None:
    with launch(job(dp=1, n=2000)) as session:
        client = session.client(0)
        for k in range(50):
            session.set_mixture({"a": 1.0, "b": 1.0 + k})
            take(client, 1)
            assert len(client.state_dict()["events"]) <= 6
        assert len(user_events_of(session)) <= 8


def test_events_may_be_given_in_numpy_numbers_and_the_state_stays_json() -> None:
    with launch(job(dp=1)) as session:
        client = session.client(0)
        session.skip(np.arange(5, 7))
        session.set_mixture({"a": np.float32(0.5), "b": np.int64(1)}, at=np.int64(6))
        json.dumps(client.state_dict())
        assert [step for step, _ in take(client, 6)] == [0, 1, 2, 3, 4, 7]


def test_an_event_that_cannot_be_is_refused_and_changes_nothing() -> None:
    with launch(job(dp=1)) as session:
        client = session.client(0)
        take(client, 1)
        with pytest.raises(PlanError, match="expected a source of the job, got 'c'"):
            session.set_mixture({"c": 1.0})
        with pytest.raises(PlanError, match="mapping"):
            session.set_mixture([1.0, 2.0])  # type: ignore[arg-type]
        with pytest.raises(PlanError, match="finite"):
            session.set_mixture({"a": float("nan")})
        with pytest.raises(PlanError, match="finite"):
            session.set_mixture({"a": "much"})  # type: ignore[dict-item]
        with pytest.raises(PlanError, match="planned already"):
            session.set_mixture({"a": 1.0}, at=0)
        with pytest.raises(PlanError, match="planned already"):
            session.skip([0])
        with pytest.raises(PlanError, match="whole numbers"):
            session.skip(["soon"])  # type: ignore[list-item]
        with pytest.raises(PlanError, match="whole number"):
            session.set_mixture({"a": 1.0}, at=1.5)  # type: ignore[arg-type]
        session.skip([])
        assert client.state_dict()["events"] == []
        assert len(take(client, 3)) == 3


def test_steps_may_be_skipped_to_the_end_and_past_it() -> None:
    with launch(job(dp=2, until=10)) as session:
        clients = [session.client(0), session.client(1)]
        session.skip(range(3, 100))
        for step in range(3):
            assert [next(client).step for client in clients] == [step, step]
        assert [rest(client) for client in clients] == [[], []]
        assert session.metrics()["planned_steps"] == 10


def test_every_step_may_be_skipped() -> None:
    with launch(job(n=40, dp=1)) as session:
        client = session.client(0)
        session.skip(range(100))
        assert rest(client) == []


def test_a_mixture_of_exhausted_sources_alone_is_the_end() -> None:
    made = replace(
        job(dp=1),
        sources=(
            ov.Source("a", rows(8), transforms=[ov.Tokens("tokens")], epochs=1),
            job().sources[1],
        ),
    )
    with launch(made) as session:
        client = session.client(0)
        take(client, 4)  # 8 samples of a are gone
        at = session.set_mixture({"a": 1.0})
        assert [step for step, _ in rest(client)] == list(range(4, at))


# Users' code


def at_step(k: int, do: Callable[[ov.Buffer, ov.ClientPlaceTree], Any]) -> Callable[..., Any]:
    def strategy(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> Any:
        return do(buffer, place) if buffer.step == k else llm_balance(buffer, place)

    return strategy


def ends(made: ov.Job, **options: Any) -> list[tuple[list[int], Any]]:
    """What every rank gets: the steps, and what ended them."""
    out: list[tuple[list[int], Any]] = [([], None) for _ in range(made.place.world_size)]
    with launch(made, **options) as session:
        clients = [session.client(r) for r in range(made.place.world_size)]
        live = set(range(made.place.world_size))
        while live:
            for r in sorted(live):
                try:
                    out[r][0].append(next(clients[r]).step)
                except StopIteration:
                    live.discard(r)
                except Exception as error:
                    out[r] = (out[r][0], error)
                    live.discard(r)
    return out


SCHEDULES: dict[str, tuple[Any, str]] = {
    "nan": ({"a": float("nan")}, "finite"),
    "infinite": ({"a": float("inf")}, "finite"),
    "negative": ({"a": -1.0, "b": 2.0}, "finite number of at least 0"),
    "too few": ([1.0], "expected 2 weights"),
    "too many": ([1.0, 1.0, 1.0], "expected 2 weights"),
    "unknown": ({"a": 1.0, "c": 1.0}, "expected a source of the job, got 'c'"),
    "all zero": ({"a": 0.0, "b": 0.0}, "expected a weight above 0, got only zeros"),
    "empty": ({}, "expected a weight above 0, got only zeros"),
    "nothing": (None, "expected weights"),
    "words": ({"a": "much"}, "finite number"),
    "text": ("ab", "expected weights"),
}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_that_makes_no_sense_ends_the_job_at_its_step_on_every_rank(kind: str) -> None:
    said, words = SCHEDULES[kind]
    for steps, error in ends(job(mixture=lambda step, feedback: said if step == 4 else [1.0, 1.0])):
        assert steps == [0, 1, 2, 3]
        assert isinstance(error, PlanError)
        assert error.step == 4
        assert words in str(error)


def test_a_schedule_may_speak_numpy() -> None:
    def schedule(step: int, feedback: Any) -> Any:
        return np.array([1, 3], np.float32) if step % 2 else {"a": np.int32(1), "b": np.float64(3)}

    made = job(dp=1, n=100, mixture=schedule)
    assert whole_run(made) == whole_run(replace(made, mixture=lambda step, feedback: [1.0, 3.0]))


def test_what_a_schedule_raises_arrives_as_it_is() -> None:
    def schedule(step: int, feedback: Any) -> Any:
        if step == 3:
            raise KeyError("phase three")
        return [1.0, 1.0]

    for steps, error in ends(job(mixture=schedule)):
        assert steps == [0, 1, 2]
        assert isinstance(error, KeyError)
        assert error.args == ("phase three",)
        [note] = error.__notes__
        assert note.startswith(
            f"raised by the strategy or the schedule while step 3 was planned (at {__file__}:"
        )


def other_place(buffer: ov.Buffer, dp: int) -> ov.LoadingPlan:
    return llm_balance(buffer, ov.ClientPlaceTree(dp=dp))


def spoiled(buffer: ov.Buffer, place: ov.ClientPlaceTree) -> ov.LoadingPlan:
    buffer.row[0] = 12345
    return llm_balance(buffer, place)


STRATEGIES: dict[str, Callable[[ov.Buffer, ov.ClientPlaceTree], Any]] = {
    "too few buckets": lambda b, p: other_place(b, 1),
    "too many buckets": lambda b, p: other_place(b, 5),
    "another step": lambda b, p: replace(llm_balance(b, p), step=b.step + 1),
    "other tokens": lambda b, p: replace(
        llm_balance(b, p), tokens=np.asarray(b.meta["tokens"]) + 1
    ),
    "another epoch": lambda b, p: replace(llm_balance(b, p), epoch=b.epoch + 1),
    "another file": lambda b, p: replace(llm_balance(b, p), file=b.file + 1),
    "another part": lambda b, p: replace(llm_balance(b, p), part=b.part + 1),
    "other names": lambda b, p: replace(llm_balance(b, p), names=("x", "y")),
    "half of it": lambda b, p: llm_balance(b.take(np.arange(len(b) // 2)), p),
    "no plan": lambda b, p: None,
}


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_that_breaks_a_rule_ends_the_job_at_its_step_on_every_rank(kind: str) -> None:
    for steps, error in ends(job(strategy=at_step(3, STRATEGIES[kind]))):
        assert isinstance(error, PlanError), error
        assert error.step == 3
        assert steps == [0, 1, 2]


def test_a_strategy_cannot_change_the_samples_it_was_shown() -> None:
    for steps, error in ends(job(strategy=at_step(3, spoiled))):
        assert isinstance(error, ValueError)
        assert "read-only" in str(error)
        assert steps == [0, 1, 2]


def test_a_step_that_cannot_be_built_ends_the_job_on_every_rank() -> None:
    """No machine has the memory for one row of this context, and only building finds out."""
    made = job(batch=ov.Batch(samples=8, context=2**57, layout="padded"))
    for steps, error in ends(made):
        assert steps == []
        assert isinstance(error, (MemoryError, ValueError)), error


@pytest.mark.parametrize("exception", [SystemExit, KeyboardInterrupt, GeneratorExit])
@pytest.mark.parametrize("where", ["strategy", "schedule", "rows"])
def test_exceptions_that_end_programs_end_the_job_and_hang_nobody(
    exception: type[BaseException], where: str
) -> None:
    def bad(*_: Any) -> Any:
        raise exception("enough")

    made = job(dp=1)
    if where == "strategy":
        made = replace(made, strategy=bad)
    elif where == "schedule":
        made = replace(made, mixture=bad)
    else:
        made = replace(
            made,
            sources=[
                ov.Source("a", rows(8), transforms=[ov.Map(bad), ov.Tokens("tokens")], epochs=1)
            ],
        )
    with launch(made) as session, pytest.raises(OverlordError, match=exception.__name__):
        next(session.client(0))


# Memory


def test_a_closed_session_holds_no_payload() -> None:
    session = launch(job(dp=1))
    take(session.client(0), 2)
    session.close()
    assert runtime_of(session).slabs.nbytes == 0


def test_plans_kept_for_people_are_bounded_by_their_samples_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("overlord.planning.spec.KEPT_SAMPLES", 40)
    with launch(job(dp=1)) as session:
        take(session.client(0), 12)
        assert len(session.plan(11)) == 8
        with pytest.raises(PlanError, match="expected a kept step"):
            session.plan(5)
        assert (
            loop_of(session).call(
                lambda: sum(len(s.plan) for s in runtime_of(session).plans), "the event loop"
            )
            <= 40
        )


# Errors

ERRORS: list[OverlordError] = [
    OverlordError("a text"),
    JobError(["a", "b"], "job 'x'"),
    SourceError("web", "gone", "a.parquet", "mend it"),
    StorageError("a", "b"),
    TransformError("web", "Map", "no", "mend it"),
    PlanError("bad", 3, "mend it"),
    StateMismatch({"seed": ("1", "2")}, "mend it"),
    DataStall("rain", 3.5, 7, 2),
    ActorLost("the event loop", "it was stopped"),
    JournalError("a/b", "torn", "mend it"),
    JournalTaken("a/b", "taken", "stop"),
    NotPrivate("a/b is open to others"),
    FrameError("cut off", "value[3]", "mend it"),
    LinkRefused("overlord://a:1/b", "wrong token"),
    TryLater("overlord://a:1/b", "too many"),
]


def every_error(cls: type[OverlordError] = OverlordError) -> Iterator[type[OverlordError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__.startswith("overlord"):
            yield from every_error(child)


def test_every_error_survives_pickling_with_its_facts() -> None:
    assert {type(e) for e in ERRORS} == set(every_error())
    for error in ERRORS:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (again.args, vars(again), str(again)) == (error.args, vars(error), str(error))


def test_what_was_found_can_be_asked_for_after_the_session_has_ended(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{bad\n" * 20 + '{"tokens": [1, 2]}\n' * 5)
    source = ov.Source(
        "s",
        str(tmp_path / "*.jsonl"),
        transforms=[ov.Tokens("tokens")],
        max_bad=10,
        shuffle=False,
        epochs=1,
    )
    job = ov.Job(name="t", sources=[source], batch=ov.Batch(samples=2, context=8))
    with (
        pytest.raises(ov.SourceError, match=r"a\.jsonl: 10 consecutive rows could not be used"),
        ov.launch(job) as session,
    ):
        next(session.client(0))
    assert len(session.quarantine()) == 10
    assert session.metrics()["sources"]["s"]["quarantined"] == 10
    with pytest.raises(ov.OverlordError, match="the session is closed"):
        session.set_mixture({"s": 1.0})
    with pytest.raises(ov.OverlordError, match="the session is closed"):
        session.skip([3])


# What happens at the same time


def test_a_client_that_closes_while_the_first_step_is_asked_for_holds_nobody_up() -> None:
    with launch(job()) as session:
        stays, leaves, ask = session.client(0), session.client(1), loop_of(session).call

        def close_first(*given: Any) -> Any:
            loop_of(session).call = ask  # type: ignore[method-assign]
            leaves.close()
            return ask(*given)

        loop_of(session).call = close_first  # type: ignore[method-assign, assignment]
        assert [step for step, _ in take(stays, 8)] == list(range(8))


def test_the_state_of_a_session_stays_where_its_last_client_left_it() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 3)
        take(clients[0], 1)
        before = session.state_dict()
        clients[0].close()
        clients[1].close()
        assert before["step"] == 3
        assert session.state_dict() == before


def test_the_state_of_a_session_that_one_rank_has_moved_is_the_one_it_was_moved_to() -> None:
    with launch(job()) as session:
        ahead, behind = session.client(0), session.client(1)
        take(ahead, 3)
        take(behind, 1)
        state = ahead.state_dict()
        ahead.load_state_dict(state)
        assert session.state_dict() == state
        behind.load_state_dict(state)
        assert session.state_dict() == state


def test_a_rank_left_behind_saves_no_state_until_it_has_loaded_the_one_of_the_others() -> None:
    """Its stream is over: a state of it would be written with the events of another."""
    made = job()
    with launch(made) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 1)
        early = clients[0].state_dict()
        session.add_source(replace(made.sources[0], name="c"))
        for client in clients:
            take(client, 3)
        take(clients[0], 1)
        clients[0].load_state_dict(early)
        with pytest.raises(OverlordError, match="rank 1: another rank rewound the session"):
            clients[1].state_dict()
        clients[1].load_state_dict(early)
        assert clients[1].state_dict() == early


def test_states_of_one_step_with_an_event_between_them_are_told_apart_by_it() -> None:
    with launch(job()) as session:
        clients = [session.client(0), session.client(1)]
        for client in clients:
            take(client, 2)
        before = clients[0].state_dict()
        session.skip([9])
        after = clients[1].state_dict()
        clients[0].load_state_dict(before)
        with pytest.raises(StateMismatch, match="load the same state") as refused:
            clients[1].load_state_dict(after)
        assert refused.value.differences == {"events": ("[{'event': 'skip', 'steps': [9]}]", "[]")}


def test_a_session_closed_while_it_is_moved_to_a_state_leaves_nobody_waiting() -> None:
    session = launch(job(dp=1))
    client = session.client(0)
    take(client, 2)
    state, ask = client.state_dict(), loop_of(session).call

    def close_first(*given: Any) -> Any:
        loop_of(session).call = ask  # type: ignore[method-assign]
        session.close()
        return ask(*given)

    loop_of(session).call = close_first  # type: ignore[method-assign, assignment]
    with pytest.raises(OverlordError, match="the session is closed"):
        client.load_state_dict(state)
    for inbox in generation_of(session).queues.values():
        with pytest.raises(OverlordError, match="the session is closed"):
            inbox.get(0.0)
    assert generation_of(session).prepared.workers == 0


@pytest.mark.parametrize("where", ["strategy", "schedule"])
def test_a_strategy_that_runs_out_of_something_is_not_the_end_of_the_data(where: str) -> None:
    def bad(*given: Any) -> Any:
        return next(iter(()))

    made = job(dp=1, **({"strategy": bad} if where == "strategy" else {"mixture": bad}))
    with (
        launch(made) as session,
        pytest.raises(PlanError, match="step 0: the strategy or the schedule raised StopIteration"),
    ):
        next(session.client(0))


def test_a_close_that_is_interrupted_does_the_rest_and_the_next_one_what_it_could_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = launch(job())
    next(session.client(0))
    stop, close, closed, interrupts = (
        loop_of(session).stop,
        runtime_of(session).close,
        list[str](),
        [KeyboardInterrupt()],
    )

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        stop()

    monkeypatch.setattr(loop_of(session), "stop", interrupted)
    monkeypatch.setattr(runtime_of(session), "close", lambda: (closed.append("host"), close()))
    with pytest.raises(KeyboardInterrupt):
        session.close()
    assert closed == ["host"]
    assert not loop_of(session).stopped
    with pytest.raises(OverlordError, match="the session is closed"):
        session.client(1)
    session.close()
    session.close()
    assert loop_of(session).stopped
    assert closed == ["host"], "once"


@pytest.mark.parametrize(
    ("runtime", "end"), [("local", 5), ("local", 10), ("local", 11), ("process", 5)]
)
def test_a_state_at_or_past_the_end_of_a_shortened_job_has_no_further_step(
    runtime: str, end: int
) -> None:
    made = job(dp=1)
    with launch(made) as session:
        client = session.client(0)
        take(client, 10)
        state = client.state_dict()
    with launch(
        replace(made, until=end), runtime=runtime, resume=state, allow=("until",)
    ) as session:
        client = session.client(0)
        assert [step.step for step, _ in zip(client, range(5), strict=False)] == list(
            range(10, end)
        )
        assert client.state_dict()["step"] == max(10, end)
        assert next(client, None) is None, "it stays over"
