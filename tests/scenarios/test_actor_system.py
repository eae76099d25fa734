"""The contract of actor systems: every backend passes one suite."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from overlord.errors import ActorLost, DataStall, FrameError, JobError, OverlordError, SourceError
from overlord.messages.control import Consumed
from overlord.rpc import peers, process_launcher
from overlord.rpc.actors import ActorHandle, ActorSystem
from overlord.rpc.peers import RpcServer, fault_of
from overlord.rpc.process_launcher import process_actors
from overlord.rpc.timeouts import TIMEOUTS
from tests import rays
from tests.actors import Sent, Worker, broken, when_allowed
from tests.processes import left_after

SOON_S = 20.0  # a generous deadline: nothing here takes a tenth of it
SHORT_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The name of a backend, its factory, and the reason of death that it reports."""

    name: str
    make: Callable[[], Any]
    killed: str
    cluster: bool = False  # whether it uses the cluster that all tests of this file share


class Siblings(RpcServer):
    """Actors that another actor system started and directed here, as for a coordinator in its own
    process.
    """

    def __init__(self) -> None:
        self.elsewhere = process_actors()
        super().__init__(
            end=lambda name, lease_id, why: self.elsewhere.kill(self._started[lease_id]),
            cut=lambda name, lease_id, why: None,  # its launcher reports the death
        )
        self._started: dict[int, ActorHandle] = {}

    def spawn(
        self, factory: Callable[..., Any], *args: Any, name: str, **where: Any
    ) -> ActorHandle:  # type: ignore[override]
        there = self.elsewhere.spawn(Sent, name, factory, args, name=name, **where)
        handle, lease_id = self.expect(name)
        self._started[lease_id] = there
        self.elsewhere.on_death(
            there,
            lambda there, reason: self.died(lease_id, reason, fault_of(self.elsewhere, there)),
        )
        self.elsewhere.tell(there, "meet", self.address, self.token, lease_id)
        return handle

    def shutdown(self, timeout_s: float = 5.0) -> None:
        super().shutdown(timeout_s)
        self.elsewhere.shutdown(timeout_s)


BACKENDS = [
    Backend(name="process", make=process_actors, killed="killed by signal 9"),
    Backend(name="siblings", make=Siblings, killed="killed by signal 9"),
    Backend(name="ray", make=rays.control, killed="killed", cluster=True),
]
STARTERS = [b for b in BACKENDS if b.name != "siblings"]  # backends that own their actors


@pytest.fixture(params=BACKENDS, ids=[b.name for b in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    if found.cluster:
        request.getfixturevalue("ray_cluster")
    return found


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process exits at once; how soon that is detected depends on the load."""
    patient = replace(TIMEOUTS, killed_s=SOON_S, killed_elsewhere_s=SOON_S)
    for module in (process_launcher, peers):
        monkeypatch.setattr(module, "TIMEOUTS", patient)


@pytest.fixture
def control(backend: Backend) -> Iterator[Any]:
    with backend.make() as made:
        yield made


@pytest.fixture
def actor(control: ActorSystem) -> ActorHandle:
    return control.spawn(Worker, name="worker")


def ask(control: ActorSystem, handle: ActorHandle, method: str, *args: Any) -> Any:
    return control.get(control.call(handle, method, *args), SOON_S)


class Deaths:
    """Collects the calls of ``on_death``."""

    def __init__(self) -> None:
        self.told: list[tuple[ActorHandle, str]] = []
        self._came = threading.Semaphore(0)

    def __call__(self, handle: ActorHandle, reason: str) -> None:
        self.told.append((handle, reason))
        self._came.release()

    def wait(self) -> None:
        assert self._came.acquire(timeout=SOON_S), "nobody was told of the death"


# calls


def test_the_calls_of_a_caller_arrive_in_their_order(
    control: ActorSystem, actor: ActorHandle
) -> None:
    for i in range(300):
        control.call(actor, "note", i)
    assert ask(control, actor, "notes") == list(range(300))


def test_what_is_told_arrives_in_its_order_among_the_calls_and_a_fault_hurts_nobody(
    control: ActorSystem, actor: ActorHandle
) -> None:
    for i in range(100):
        (control.tell if i % 3 else control.call)(actor, "note", i)
    control.tell(actor, "fail", "ours")
    control.tell(actor, "nonsense")
    assert ask(control, actor, "notes") == list(range(100))


def test_who_is_gone_is_told_nothing(control: ActorSystem, actor: ActorHandle) -> None:
    control.kill(actor)
    control.tell(actor, "note", 1)
    with pytest.raises(FrameError, match="argument 1"):
        control.tell(actor, "note", object())


def test_callers_in_several_threads_each_keep_their_order(
    control: ActorSystem, actor: ActorHandle
) -> None:
    def caller(number: int) -> None:
        for i in range(50):
            answers.append((control.call(actor, "echo", [number, i]), [number, i]))
            control.call(actor, "note", [number, i])

    answers: list[tuple[Future[Any], list[int]]] = []
    threads = [threading.Thread(target=caller, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [control.get(future, SOON_S) for future, _ in answers] == [
        wanted for _, wanted in answers
    ]
    notes = ask(control, actor, "notes")
    assert [[n for n in notes if n[0] == number] for number in range(6)] == [
        [[number, i] for i in range(50)] for number in range(6)
    ]


def test_values_arrive_as_they_were(control: ActorSystem, actor: ActorHandle) -> None:
    sent = (None, True, -1, 2.5, "text", b"bytes", [1, [2]], {"a": (1,), 3: None}, Consumed(3, 41))
    assert ask(control, actor, "echo", sent) == sent


def test_records_with_arrays_arrive_with_their_arrays(
    control: ActorSystem, actor: ActorHandle
) -> None:
    array = np.arange(6, dtype=np.uint16).reshape(2, 3)
    found = ask(control, actor, "echo", {"a": array})["a"]
    assert found.dtype == array.dtype
    assert found.tolist() == array.tolist()


def test_arrays_cannot_be_written_by_who_gets_them(
    control: ActorSystem, actor: ActorHandle
) -> None:
    with pytest.raises(ValueError, match="read-only"):
        ask(control, actor, "write_into", np.zeros(3))
    assert ask(control, actor, "flags", {"arrays": [np.zeros(3), np.zeros((2, 50_000))]}) == [
        False,
        False,
    ]
    assert not ask(control, actor, "zeros", 10).flags.writeable


def test_an_array_stays_writable_for_its_owner(control: ActorSystem, actor: ActorHandle) -> None:
    mine = np.zeros(3)
    ask(control, actor, "echo", mine)
    mine[0] = 1


def test_large_arguments_and_results_arrive_whole(control: ActorSystem, actor: ActorHandle) -> None:
    arrays = [np.full(2**20, i, np.int64) for i in range(8)]  # 64 MiB
    futures = [
        control.call(actor, "total", arrays),
        control.call(actor, "echo", arrays),
        control.call(actor, "zeros", 2**26),
    ]
    total, back, zeros = (control.get(f, 2 * SOON_S) for f in futures)
    assert total == sum(range(8)) * 2**20
    assert all(np.array_equal(a, b) for a, b in zip(arrays, back, strict=True))
    assert len(zeros) == 2**26
    assert not zeros.any()


def test_what_cannot_travel_is_named_by_its_argument_and_hurts_nobody(
    control: ActorSystem, actor: ActorHandle
) -> None:
    with pytest.raises(
        FrameError, match=r"'echo' of actor 'worker', argument 1\['deep'\]\[1\].*object"
    ):
        control.call(actor, "echo", {"deep": [1, object()]})
    assert ask(control, actor, "echo", "still there") == "still there"


def test_a_result_that_cannot_travel_is_an_error_of_its_call_alone(
    control: ActorSystem, actor: ActorHandle
) -> None:
    with pytest.raises(
        FrameError, match=r"result of 'unsendable' of actor 'worker'\['a'\]\[0\].*object"
    ):
        ask(control, actor, "unsendable")
    assert ask(control, actor, "echo", "still there") == "still there"


def test_an_unknown_method_says_which_there_are(control: ActorSystem, actor: ActorHandle) -> None:
    with pytest.raises(
        AttributeError,
        match=r"'worker': expected one of its public methods .*break_promise, .*echo.*write_into.*, got 'ehco'",
    ):
        ask(control, actor, "ehco", 1)


@pytest.mark.parametrize("method", ["__init__", "_closed", "log"])
def test_what_is_private_or_no_method_cannot_be_called(
    control: ActorSystem, actor: ActorHandle, method: str
) -> None:
    with pytest.raises(AttributeError, match="expected one of its public methods"):
        ask(control, actor, method)


# errors


def test_our_errors_keep_their_fields(control: ActorSystem, actor: ActorHandle) -> None:
    with pytest.raises(SourceError) as caught:
        ask(control, actor, "fail", "ours")
    error = caught.value
    assert (error.source, error.problem, error.path, error.remedy) == (
        "web",
        "a problem",
        "a.parquet",
        "do this",
    )
    assert error.__notes__ == ["in actor 'worker', fail"]


def test_errors_of_python_keep_type_and_arguments(control: ActorSystem, actor: ActorHandle) -> None:
    with pytest.raises(KeyError) as key:
        ask(control, actor, "fail", "key")
    assert key.value.args == ("a", 3)
    with pytest.raises(FileNotFoundError) as file:
        ask(control, actor, "fail", "file")
    assert file.value.filename == "/no/such/file"


def test_notes_stay_and_the_place_is_added(control: ActorSystem, actor: ActorHandle) -> None:
    with pytest.raises(ValueError, match="with notes") as caught:
        ask(control, actor, "fail", "noted")
    first, place = caught.value.__notes__
    assert first == "first"
    assert place.startswith("in actor 'worker', fail:\n")
    assert "raise error" in place, "an error that nobody foresaw brings the lines that led to it"


def test_other_errors_become_words(control: ActorSystem, actor: ActorHandle) -> None:
    with pytest.raises(OverlordError, match="Strange: seen nowhere else"):
        ask(control, actor, "fail", "strange")


def test_an_error_does_not_end_the_actor(control: ActorSystem, actor: ActorHandle) -> None:
    futures = [control.call(actor, "fail", "key"), control.call(actor, "echo", 1)]
    assert control.get(futures[1], SOON_S) == 1
    assert isinstance(futures[0].exception(), KeyError)


# deadlines


def test_a_deadline_names_actor_and_method_and_the_call_goes_on(
    control: ActorSystem, actor: ActorHandle
) -> None:
    ask(control, actor, "echo", "started")  # before, Ray's stall names the start
    promise = control.call(actor, "promise")
    with pytest.raises(
        DataStall, match=r"waited 0\.1 s for actor 'worker' to answer 'promise'"
    ) as caught:
        control.get(promise, SHORT_S)
    assert caught.value.seconds == SHORT_S
    assert ask(control, actor, "echo", "other") == "other"
    control.call(actor, "keep", "late")
    assert control.get(promise, SOON_S) == "late", "who asks again gets the late answer"


def test_a_late_answer_that_nobody_waits_for_does_not_confuse_the_next(
    control: ActorSystem, actor: ActorHandle, tmp_path: Path
) -> None:
    with pytest.raises(DataStall):
        control.get(control.call(actor, "wait_for", str(tmp_path / "go")), SHORT_S)
    (tmp_path / "go").touch()
    assert [ask(control, actor, "echo", i) for i in range(5)] == list(range(5))


def test_a_time_out_that_the_method_raises_is_its_own(
    control: ActorSystem, actor: ActorHandle
) -> None:
    with pytest.raises(TimeoutError, match="my own"):
        ask(control, actor, "fail", "time")


def test_wait_returns_with_the_first_answer(control: ActorSystem, actor: ActorHandle) -> None:
    futures = [control.call(actor, "promise"), control.call(actor, "fail", "key")]
    assert control.wait(futures, SOON_S) == ([futures[1]], [futures[0]])
    assert control.wait(futures[:1], SHORT_S) == ([], futures[:1]), (
        "at the deadline, with what there is"
    )
    assert control.wait([], SHORT_S) == ([], [])


def test_a_call_cannot_be_taken_back(control: ActorSystem, actor: ActorHandle) -> None:
    future = control.call(actor, "sleep", 0.1)
    assert not future.cancel()
    assert control.get(future, SOON_S) == "slept"


def test_a_method_may_answer_later_while_others_run(
    control: ActorSystem, actor: ActorHandle
) -> None:
    promise, later = control.call(actor, "promise"), control.call(actor, "later", 7)
    assert ask(control, actor, "echo", 1) == 1
    assert not promise.done()
    assert control.get(later, SOON_S) == 7
    control.call(actor, "break_promise")
    with pytest.raises(SourceError, match="no more") as caught:
        control.get(promise, SOON_S)
    assert caught.value.source == "web"


# names and starts


def test_a_name_is_taken_while_its_actor_lives(control: ActorSystem, actor: ActorHandle) -> None:
    assert control.lookup("worker") is actor
    with pytest.raises(JobError, match="actor 'worker': expected a free name"):
        control.spawn(Worker, name="worker")
    control.kill(actor)
    with pytest.raises(ActorLost, match="no actor of this name"):
        control.lookup("worker")
    other = control.spawn(Worker, name="worker")
    assert control.lookup("worker") is other
    assert ask(control, other, "echo", 1) == 1
    with pytest.raises(ActorLost):
        ask(control, actor, "echo", 1)


def test_an_unknown_name_is_told_with_those_there_are(
    control: ActorSystem, actor: ActorHandle
) -> None:
    with pytest.raises(ActorLost, match="no actor of this name; did you mean 'worker'"):
        control.lookup("workr")


def test_spawn_does_not_wait_for_the_factory(control: ActorSystem, tmp_path: Path) -> None:
    handles = [control.spawn(when_allowed, str(tmp_path / "go"), name=f"{i}") for i in range(2)]
    answers = [control.call(handle, "echo", i) for i, handle in enumerate(handles)]
    assert control.wait(answers, SHORT_S) == ([], answers)
    (tmp_path / "go").touch()
    assert [control.get(answer, SOON_S) for answer in answers] == [0, 1]


def test_a_fault_of_the_factory_is_the_answer_to_every_call(control: ActorSystem) -> None:
    deaths = Deaths()
    handle = control.spawn(broken, "no such thing", name="broken")
    control.on_death(handle, deaths)
    with pytest.raises(SourceError, match="no such thing") as early:
        ask(control, handle, "echo", 1)
    assert early.value.source == "web"
    deaths.wait()
    assert deaths.told == [(handle, "its factory failed: SourceError: source 'web': no such thing")]
    with pytest.raises(SourceError, match="no such thing"):
        ask(control, handle, "echo", 1)
    assert ask(control, control.spawn(Worker, name="broken"), "echo", 1) == 1


def test_another_machine_cannot_be_asked_for(control: ActorSystem) -> None:
    with pytest.raises(JobError, match=r"node: expected None.*one machine, got 'far'"):
        control.spawn(Worker, name="worker", node="far")
    assert ask(control, control.spawn(Worker, name="worker", resources={"cpus": 2}), "echo", 1) == 1


# deaths


def test_a_killed_actor_answers_nothing_more(
    backend: Backend, control: ActorSystem, actor: ActorHandle
) -> None:
    pending = [
        control.call(actor, "promise"),
        control.call(actor, "sleep", 2 * SOON_S),
        control.call(actor, "echo", 1),
    ]
    control.kill(actor)
    for future in [*pending, control.call(actor, "echo", 2)]:
        with pytest.raises(ActorLost) as caught:
            control.get(future, SOON_S)
        assert (caught.value.name, caught.value.reason) == ("worker", backend.killed)
    assert not actor.alive
    control.kill(actor)  # killing twice is allowed


def test_a_death_is_told_once_to_everyone_who_asked_before_or_after(
    backend: Backend, control: ActorSystem, actor: ActorHandle
) -> None:
    before, also, after = Deaths(), Deaths(), Deaths()
    control.on_death(actor, before)
    control.on_death(actor, also)
    control.kill(actor)
    before.wait()
    also.wait()
    control.on_death(actor, after)
    control.kill(actor)
    for deaths in (before, also, after):
        assert deaths.told == [(actor, backend.killed)]


def test_a_callback_that_fails_hurts_no_other(control: ActorSystem, actor: ActorHandle) -> None:
    def fails(handle: ActorHandle, reason: str) -> None:
        raise RuntimeError("a bad callback")

    deaths = Deaths()
    control.on_death(actor, fails)
    control.on_death(actor, deaths)
    control.kill(actor)
    deaths.wait()
    assert ask(control, control.spawn(Worker, name="other"), "echo", 1) == 1


def test_whoever_is_told_of_a_death_can_put_another_in_its_place(
    control: ActorSystem, actor: ActorHandle
) -> None:
    answers: list[Future[Any]] = []
    replaced = threading.Event()

    def replace(handle: ActorHandle, reason: str) -> None:
        answers.append(control.call(control.spawn(Worker, name=handle.name), "echo", reason))
        replaced.set()

    control.on_death(actor, replace)
    control.kill(actor)
    assert replaced.wait(SOON_S)
    assert control.get(answers[0], SOON_S).startswith("killed")


def test_an_actor_that_leaves_by_itself_is_lost_with_its_exit_code(
    control: ActorSystem, actor: ActorHandle
) -> None:
    deaths = Deaths()
    control.on_death(actor, deaths)
    early, last = control.call(actor, "echo", "said before"), control.call(actor, "leave", 3)
    with pytest.raises(ActorLost, match="worker is lost: exit code 3"):
        control.get(last, SOON_S)
    assert control.get(early, SOON_S) == "said before"
    deaths.wait()
    assert deaths.told == [(actor, "exit code 3")]


def test_the_others_live_on(control: ActorSystem, actor: ActorHandle) -> None:
    other = control.spawn(Worker, name="other")
    control.kill(actor)
    assert ask(control, other, "echo", 1) == 1


# shutdown


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_shutdown_lets_actors_finish_and_closes_them(backend: Backend, tmp_path: Path) -> None:
    control = backend.make()
    paths = [tmp_path / f"{i}" for i in range(3)]
    handles = [control.spawn(Worker, str(path), name=f"{i}") for i, path in enumerate(paths)]
    last = [control.call(h, "sleep", 0.1) for h in handles]
    deaths = Deaths()
    control.on_death(handles[0], deaths)
    control.shutdown(SOON_S)
    assert [p.read_text() for p in paths] == ["closed"] * 3
    assert [f.result(0) for f in last] == ["slept"] * 3
    assert deaths.told == [], "who leaves when asked has not died"


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_one_actor_is_stopped_and_the_others_run_on(backend: Backend, tmp_path: Path) -> None:
    with backend.make() as control:
        one = control.spawn(Worker, str(tmp_path / "closed"), name="one")
        other, deaths = control.spawn(Worker, name="other"), Deaths()
        control.on_death(one, deaths)
        last = control.call(one, "sleep", 0.1)
        control.stop(one, SOON_S)
        assert (last.result(0), (tmp_path / "closed").read_text()) == ("slept", "closed")
        with pytest.raises(ActorLost, match="was shut down"):
            ask(control, one, "echo", 1)
        assert (ask(control, other, "echo", 1), deaths.told) == (1, [])


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_a_promise_not_kept_at_shutdown_is_an_error(backend: Backend) -> None:
    control = backend.make()
    promise = control.call(control.spawn(Worker, name="worker"), "promise")
    control.shutdown(SOON_S)
    with pytest.raises(ActorLost, match="worker is lost: it was shut down"):
        promise.result(0)


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_after_shutdown_everything_says_so(backend: Backend) -> None:
    control = backend.make()
    actor = control.spawn(Worker, name="worker")
    control.shutdown(SOON_S)
    control.shutdown(SOON_S)
    with pytest.raises(OverlordError, match="was shut down"):
        control.spawn(Worker, name="another")
    with pytest.raises(ActorLost, match="was shut down"):
        control.call(actor, "echo", 1).result(0)
    with pytest.raises(ActorLost, match="no actor of this name"):
        control.lookup("worker")
    control.kill(actor)


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_an_actor_that_does_not_leave_is_not_waited_for(
    backend: Backend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = backend.make()
    busy, other = control.spawn(Worker, name="busy"), control.spawn(Worker, name="other")
    ask(control, busy, "echo", 1)
    stuck = control.call(busy, "sleep", 2 * SOON_S)
    ask(control, other, "echo", 1)
    gone: Any = other.record.exited
    wait = gone.wait
    # The actor exits when it is asked to, and may block for a moment before.
    monkeypatch.setattr(gone, "wait", lambda seconds: wait(SOON_S))
    before = time.monotonic()
    control.shutdown(0.2)
    assert time.monotonic() - before < SOON_S
    with pytest.raises(ActorLost, match="was shut down"):
        stuck.result(0)
    assert "actor busy did not exit in 0.2 s" in caplog.text
    assert "other" not in caplog.text


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_a_shutdown_that_is_interrupted_is_brought_to_its_end_by_the_next_one(
    backend: Backend,
) -> None:
    control = backend.make()
    here, stays = control.spawn(Worker, name="goes"), control.spawn(Worker, "never", name="stays")
    pids = [ask(control, handle, "pid") for handle in (here, stays)]

    def interrupted() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        control.shutdown(2 * SOON_S)

    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    start = time.monotonic()
    control.shutdown(SHORT_S)
    assert time.monotonic() - start < SOON_S, "it does not wait once more for who did not leave"
    assert left_after(pids[1:], SOON_S) == []
    with pytest.raises(OverlordError, match="was shut down"):
        control.spawn(Worker, name="late")


@pytest.mark.parametrize("backend", STARTERS, ids=lambda b: b.name, indirect=True)
def test_a_close_that_fails_is_told_in_the_log(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    control = backend.make()
    control.spawn(Worker, "fail", name="worker")
    control.shutdown(SOON_S)
    assert "actor worker failed to close: cannot close" in caplog.text


def test_two_control_planes_do_not_mix(
    backend: Backend, control: ActorSystem, actor: ActorHandle
) -> None:
    with backend.make() as second:
        same_name = second.spawn(Worker, name="worker")
        assert ask(second, same_name, "echo", 2) == 2
        second.kill(same_name)
        with pytest.raises(ActorLost):
            second.lookup("worker")
    assert ask(control, control.lookup("worker"), "echo", 1) == 1


def test_a_handle_of_another_kind_of_control_plane_is_refused(
    backend: Backend, control: ActorSystem, actor: ActorHandle
) -> None:
    other = next(b for b in BACKENDS if b is not backend)
    with (
        other.make() as second,
        pytest.raises(
            OverlordError, match="expected an actor of this actor system, got one of another"
        ),
    ):
        second.call(actor, "echo", 1)


def test_an_actor_has_a_process_of_its_own(control: ActorSystem, actor: ActorHandle) -> None:
    pid = ask(control, actor, "pid")
    assert actor.pid == pid
    assert pid != os.getpid()
