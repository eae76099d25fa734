"""Behaviour of process actors only: real kills, an end with their parent, and nothing
left behind.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from overlord.errors import ActorLost, DataStall, FrameError, JobError, OverlordError
from overlord.process import forkserver
from overlord.process.forkserver import PRELOAD
from overlord.rpc import launched_actors, process_launcher
from overlord.rpc.launched_actors import LaunchedActorSystem
from overlord.rpc.process_launcher import process_actors
from overlord.rpc.timeouts import TIMEOUTS
from overlord.transport.codec import register
from tests.actors import Worker, name_when_allowed
from tests.internals import send_raw, socket_to_actor
from tests.processes import WAIT_S, halt, left_after, runs

ROOT = Path(__file__).resolve().parents[2]
SOON_S = 20.0
TOLD_S = 0.5  # ten times the promised delay of a death notice
GONE_S = 20.0  # for processes to end with their parent: half a second on an idle machine

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes by /proc")


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed process exits at once; how soon that is detected depends on the load."""
    monkeypatch.setattr(process_launcher, "TIMEOUTS", replace(TIMEOUTS, killed_s=SOON_S))


@pytest.fixture
def control() -> Iterator[LaunchedActorSystem]:
    with process_actors() as made:
        yield made


def ask(control: LaunchedActorSystem, handle: Any, method: str, *args: Any) -> Any:
    return control.get(control.call(handle, method, *args), SOON_S)


def descendants(pid: int) -> list[int]:
    """Return all processes below one."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found: list[int] = []
    below = [pid]
    while below:
        below = [child for child, parent in parents.items() if parent in below]
        found += below
    return found


HEAD = """
import os, sys, time
from overlord.rpc.process_launcher import process_actors
from tests.actors import Worker
"""


class Program:
    """A separate program that launches actors, prints a line when it is ready, and is
    then ended.
    """

    def __init__(self, path: Path, body: str, *, guarded: bool = True):
        body = textwrap.dedent(body)
        text = HEAD + (
            "if __name__ == '__main__':\n" + textwrap.indent(body, "    ") if guarded else body
        )
        path.write_text(text)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}"}
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        self.pids: list[int] = []

    def ready(self) -> list[int]:
        """Return the pids that it printed; all its processes are remembered."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        self.pids = sorted({*descendants(self.process.pid), *map(int, line.split())})
        return [int(word) for word in line.split()]

    def end(self) -> tuple[str, str]:
        out, err = self.process.communicate(timeout=SOON_S)
        return out, err

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for pid in self.pids:
            if runs(pid):  # also after a failed test no process may remain
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


# kills


def test_a_killed_process_is_gone_when_kill_returns(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    control.call(actor, "hold_the_lock")
    assert runs(actor.pid)
    control.kill(actor)
    assert not Path(f"/proc/{actor.pid}").exists()


def test_a_kill_from_outside_is_told_at_once(control: LaunchedActorSystem) -> None:
    """Every process involved may be suspended for longer than that, but not five times in a row."""

    def took() -> float:
        actor = control.spawn(Worker, name="worker")
        ask(control, actor, "echo", 1)
        pending, told, reasons = control.call(actor, "promise"), threading.Event(), []
        control.on_death(
            actor, lambda handle, reason: (reasons.append((handle, reason)), told.set())
        )
        before = time.monotonic()
        os.kill(actor.pid, signal.SIGKILL)
        assert told.wait(SOON_S), "the death was not told"
        after = time.monotonic()
        assert reasons == [(actor, "killed by signal 9")]
        with pytest.raises(ActorLost, match="worker is lost: killed by signal 9"):
            pending.result(0)
        return after - before

    assert any(took() < TOLD_S for _ in range(5)), "no death was told within ten times its bound"


def test_answers_given_before_the_death_still_count(control: LaunchedActorSystem) -> None:
    actor, gone = control.spawn(Worker, name="worker"), threading.Event()
    exited = os.pidfd_open(actor.pid or 0)
    control.call(actor, "echo", 1).add_done_callback(
        lambda _: gone.wait(SOON_S)
    )  # the reading thread is late
    futures = [control.call(actor, "zeros", 40_000) for _ in range(3)]
    last = control.call(actor, "leave", 0)
    assert select.select([exited], [], [], SOON_S)[0], "it has not left"
    os.close(exited)
    gone.set()
    with pytest.raises(ActorLost, match="exit code 0"):
        control.get(last, SOON_S)
    assert [len(f.result(0)) for f in futures] == [40_000] * 3


def test_a_kill_before_the_start_is_just_that(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    os.kill(actor.pid, signal.SIGKILL)
    with pytest.raises(ActorLost) as caught:
        ask(control, actor, "echo", 1)
    assert caught.value.reason == "killed by signal 9"


def test_a_stopped_actor_blocks_no_caller_and_can_be_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launched_actors, "MAX_WAITING_BYTES", 2**25)
    monkeypatch.setattr(launched_actors, "SHARED_BYTES", 2**20)
    with process_actors() as control:
        stop_one_and_kill_it(control)


def stop_one_and_kill_it(control: LaunchedActorSystem) -> None:
    actor, other = control.spawn(Worker, name="stopped"), control.spawn(Worker, name="other")
    ask(control, actor, "echo", 1)
    halt(actor.pid)
    large = np.zeros(2**22, np.uint8)
    futures = [control.call(actor, "echo", large) for _ in range(7)]
    with pytest.raises(DataStall, match="actor 'stopped' to accept its calls"):
        control.call(actor, "echo", np.zeros(2**24, np.uint8))
    with pytest.raises(DataStall, match="actor 'stopped' to answer 'echo'"):
        control.get(futures[0], 0.05)
    assert ask(control, other, "echo", 1) == 1
    control.kill(actor)
    assert all(isinstance(f.exception(0), ActorLost) for f in futures)


def test_a_slow_actor_gets_everything_in_the_end(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    ask(control, actor, "echo", 1)
    halt(actor.pid)
    futures = [control.call(actor, "total", [np.full(2**20, i, np.uint8)]) for i in range(10)]
    os.kill(actor.pid, signal.SIGCONT)
    assert [control.get(f, SOON_S) for f in futures] == [i * 2**20 for i in range(10)]


def test_an_actor_that_sends_no_frames_is_ended(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Babbler, name="babbler")
    with pytest.raises(ActorLost, match="it sent invalid data and was killed: "):
        ask(control, actor, "babble")
    assert left_after([actor.pid], SOON_S) == []


def test_an_actor_that_sends_no_frames_from_the_start_is_ended(
    control: LaunchedActorSystem,
) -> None:
    """Its first data arrives in one read with the notice that it has started."""
    actors = [control.spawn(EarlyBabbler, name=f"early/{i}") for i in range(4)]
    for actor in actors:
        with pytest.raises(ActorLost, match="it sent invalid data and was killed: "):
            ask(control, actor, "babble")
    assert left_after([actor.pid for actor in actors], SOON_S) == []


class EarlyBabbler:
    def __init__(self) -> None:
        babble()


def babble() -> None:
    send_raw(b"not a frame" * 10)
    time.sleep(SOON_S)


class Babbler:
    """Writes into the socket of its calls."""

    def babble(self) -> None:
        babble()


def test_an_actor_that_does_not_leave_is_killed(control: LaunchedActorSystem) -> None:
    actors = [
        control.spawn(Worker, name="busy"),
        control.spawn(Worker, "never", name="never closed"),
    ]
    for actor in actors:
        ask(control, actor, "echo", 1)
    control.call(actors[0], "hold_the_lock")
    control.shutdown(0.2)
    assert not any(Path(f"/proc/{actor.pid}").exists() for actor in actors)


# messages that only one side accepts


def test_a_header_too_large_for_a_frame_is_an_error_of_its_call_alone(
    control: LaunchedActorSystem,
) -> None:
    actor = control.spawn(Worker, name="worker")
    with pytest.raises(FrameError, match="bytes of header"):
        control.call(actor, "echo", ["a" * 1000] * 20_000)
    with pytest.raises(FrameError, match="bytes of header"):
        ask(control, actor, "words", 20_000)
    assert ask(control, actor, "echo", "still there") == "still there"


class OnlyHere(NamedTuple):
    number: int


def test_a_record_that_one_side_does_not_know_is_an_error_of_its_call_alone(
    control: LaunchedActorSystem,
) -> None:
    register(OnlyHere)
    actor = control.spawn(Worker, name="worker")
    with pytest.raises(FrameError, match="OnlyHere"):
        ask(control, actor, "echo", OnlyHere(1))
    with pytest.raises(FrameError, match=r"reply of actor 'worker'.*OnlyThere"):
        ask(control, actor, "only_there")
    assert ask(control, actor, "echo", "still there") == "still there"


# leftovers


def test_a_hundred_actors_leave_no_open_file_and_no_thread(control: LaunchedActorSystem) -> None:
    def one(i: int) -> None:
        actor = control.spawn(Worker, name=f"{i}")
        if i % 2:
            ask(control, actor, "echo", 1)
        control.kill(actor)

    one(0)  # the fork server has its own files
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for i in range(100):
        one(i)
    assert (
        len(os.listdir("/proc/self/fd")) <= before
    )  # files of another test may have been closed meanwhile
    assert threading.active_count() <= threads  # a thread of another test may have ended meanwhile


def test_a_control_plane_leaves_no_open_file() -> None:
    def one() -> None:
        with process_actors() as control:
            control.spawn(Worker, name="worker")
            with pytest.raises(JobError):
                control.spawn(Worker, threading.Lock(), name="cannot be sent")

    def open_files() -> int:
        gc.collect()  # the notifier of a memory pool is closed with the last reference to the pool
        return len(os.listdir("/proc/self/fd"))

    one()  # the fork server has its own files
    before = open_files()
    for _ in range(3):
        one()
    assert open_files() <= before


FAMILY = """
    control = process_actors()
    names = ("idle", "busy", "locked", "starting", "parent", "busy parent")
    family = [control.spawn(Worker, name=n) for n in names]
    for actor in family[:3]:
        control.call(actor, "echo", 1).result(20)
    children = [control.call(actor, "transforms").result(20)[0] for actor in family[4:]]
    control.call(family[1], "busy")
    control.call(family[2], "hold_the_lock")
    control.call(family[5], "transform_for_ever").result(20)
    control.call(family[5], "busy")
    print(*[h.pid for h in family], *children, flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_is_killed(
    tmp_path: Path, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tempfile.TemporaryDirectory(prefix="ov")  # names of sockets must be short
    monkeypatch.setenv("TMPDIR", files.name)
    with files, Program(tmp_path / "program.py", FAMILY + "    time.sleep(100)") as program:
        assert len(program.ready()) == 8
        assert len(program.pids) >= 10, (
            "six actors, two workers, the fork server and Python's resource tracker"
        )
        assert [p for p in Path(files.name).rglob("*") if p.is_socket()], (
            "the fork server listens at a file"
        )
        os.kill(program.process.pid, how)
        assert left_after([program.process.pid, *program.pids], GONE_S) == []
        assert list(Path(files.name).rglob("*")) == []


def test_nothing_outlives_a_program_that_ends_without_shutdown(tmp_path: Path) -> None:
    with Program(tmp_path / "program.py", FAMILY) as program:
        program.ready()
        out, err = program.end()
        assert (program.process.returncode, out, err.count("Traceback")) == (0, "", 0), err
        assert left_after(program.pids, GONE_S) == []


@pytest.mark.parametrize("scoped", [True, False])
def test_ctrl_c_ends_everything_within_a_second(tmp_path: Path, scoped: bool) -> None:
    body = FAMILY + "    time.sleep(100)"
    if scoped:
        body = body.replace(
            "control = process_actors()", "with process_actors() as control:"
        ).replace("\n    ", "\n        ")
        body = body.replace("\n        with", "\n    with")
    with Program(tmp_path / "program.py", body) as program:
        program.ready()
        before = time.monotonic()
        os.killpg(program.process.pid, signal.SIGINT)
        _, err = program.end()
        took = time.monotonic() - before
        assert program.process.returncode == -signal.SIGINT
        assert err.count("Traceback") == 1, err
        assert took < SOON_S, f"a second where nothing else runs; took {took:.2f} s"
        assert left_after(program.pids, GONE_S) == []


def test_a_grandchild_ends_with_an_actor_that_is_killed(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    child, _ = ask(control, actor, "transforms")
    ask(control, actor, "transform_for_ever")
    control.kill(actor)
    assert left_after([child], GONE_S) == []


def test_processes_of_an_actor_come_from_the_one_fork_server(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    _, server = ask(control, actor, "transforms")
    assert server == int(Path(f"/proc/{actor.pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def test_a_forked_copy_of_the_program_neither_calls_nor_kills_nor_keeps_actors(
    tmp_path: Path,
) -> None:
    body = """
    control = process_actors()
    actor = control.spawn(Worker, name="worker")
    control.call(actor, "echo", 1).result(20)
    copy = os.fork()
    if copy == 0:
        try:
            control.call(actor, "echo", 1)
        except Exception as e:
            print(e, file=sys.stderr, flush=True)
        if os.fork() == 0:
            sys.exit()  # a copy that ends well, with all that Python does at the end of a program
        os.wait()
        time.sleep(100)
    while "forked" not in open("said").read():
        time.sleep(0.01)
    os.kill(copy, 0)
    time.sleep(0.1)
    print(actor.pid, control.call(actor, "pid").result(20), copy, flush=True)
    time.sleep(100)
    """
    body = body.replace(
        "print(e, file=sys.stderr, flush=True)", "open('said', 'w').write(str(e))"
    ).replace(
        "control = ", f"os.chdir({str(tmp_path)!r}); open('said', 'w').close()\n    control = "
    )
    with Program(tmp_path / "program.py", body) as program:
        pid, again, copy = program.ready()
        assert pid == again
        assert "call actors in the original process" in (tmp_path / "said").read_text()
        os.kill(program.process.pid, signal.SIGKILL)
        assert left_after([pid], GONE_S) == [], "the copy holds the socket open"
        assert runs(copy)


# starts


def test_a_factory_that_cannot_be_sent_says_what_to_do(control: LaunchedActorSystem) -> None:
    lock = threading.Lock()
    with pytest.raises(
        JobError, match=r"actor 'worker': \[0\] variable 'lock': an object of _thread.lock cannot"
    ):
        control.spawn(lambda: Worker(lock), name="worker")
    with pytest.raises(JobError, match=r"actor 'worker': \[1\]\[1\]: an object of _thread.lock"):
        control.spawn(Worker, "", lock, name="worker")
    assert ask(control, control.spawn(Worker, name="worker"), "echo", 1) == 1


def test_a_factory_that_the_process_cannot_find_is_reported(
    control: LaunchedActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = type(sys)("only_here")
    exec("class Lost:\n    pass", module.__dict__)
    module.Lost.__module__ = "only_here"
    monkeypatch.setitem(sys.modules, "only_here", module)
    with pytest.raises(ModuleNotFoundError, match="only_here"):
        ask(control, control.spawn(module.Lost, name="lost"), "echo", 1)


def test_a_process_that_cannot_connect_is_reported_with_its_error_output(
    control: LaunchedActorSystem, caplog: pytest.LogCaptureFixture
) -> None:
    control.address = "overlord://127.0.0.1:1/nowhere"
    with pytest.raises(
        ActorLost,
        match=r"ended before it could start \(exit code 1\); its last error output: "
        r"overlord.errors.ActorLost: overlord://127.0.0.1:1/nowhere is lost",
    ):
        ask(control, control.spawn(Worker, name="lost"), "echo", 1)
    assert "error output of lost before it could start:\n  " in caplog.text
    assert "Traceback" in caplog.text


class LastWord(str):
    """A name that ends the process in which it is unpickled, after a word to the error output."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"echo a last word >&2; kill -9 {'$PPID'}",)


def test_a_crash_before_the_start_is_reported_with_the_error_output(
    control: LaunchedActorSystem,
) -> None:
    with pytest.raises(ActorLost) as caught:
        ask(control, control.spawn(Worker, name=LastWord("worker")), "echo", 1)
    assert caught.value.reason == (
        "killed by signal 9 before it could start; its last error output: a last word"
    )


def test_error_output_goes_where_it_went_once_an_actor_has_started(tmp_path: Path) -> None:
    body = """
        control = process_actors()
        actor = control.spawn(Worker, name="worker")
        control.call(actor, "complain", "a word").result(20)
        print("done", flush=True)
    """
    with Program(tmp_path / "program.py", body) as program:
        assert program.end() == ("done\n", "a word\n")


class Late(str):
    """A name that can be unpickled once a file exists."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return name_when_allowed, (str(self), str(self.path))


def test_a_wait_for_an_actor_that_has_not_started_says_so(
    control: LaunchedActorSystem, tmp_path: Path
) -> None:
    name = Late("worker")
    name.path = tmp_path / "go"
    actor = control.spawn(Worker, name=name)
    answer = control.call(actor, "echo", 1)
    with pytest.raises(
        DataStall,
        match=rf"worker to be started, whose process {actor.pid} has not connected yet, "
        "and to answer 'echo'",
    ):
        control.get(answer, 0.05)
    (tmp_path / "go").touch()
    assert control.get(answer, SOON_S) == 1


def test_actors_do_not_import_the_main_file_of_a_program_that_sends_nothing_of_it(
    tmp_path: Path,
) -> None:
    """It may have no guard, and it may import torch."""
    body = """
        import colorsys
        control = process_actors()
        actor = control.spawn(Worker, name="worker")
        echo, has = control.call(actor, "echo", 1), control.call(actor, "has", "colorsys")
        print(echo.result(20), has.result(20), flush=True)
    """
    with Program(tmp_path / "program.py", body, guarded=False) as program:
        out, err = program.end()
    assert (out, err) == ("1 False\n", "")


def test_a_class_of_a_program_without_a_guard_crosses_by_value(tmp_path: Path) -> None:
    """No process imports the file again, which would launch once more."""
    body = """
        print("run", flush=True)
        class Mine(Worker):
            def echo(self, value):
                return super().echo(value) + 1
        control = process_actors()
        actor = control.spawn(Mine, name="worker")
        print(control.call(actor, "echo", 1).result(20), flush=True)
    """
    with Program(tmp_path / "program.py", body, guarded=False) as program:
        out, err = program.end()
    assert (out, err) == ("run\n2\n", "")


def test_an_actor_has_the_environment_of_now(
    control: LaunchedActorSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OVERLORD_TEST_OF_CONTROL", "first")
    first = control.spawn(Worker, name="first")
    monkeypatch.delenv("OVERLORD_TEST_OF_CONTROL")
    second = control.spawn(Worker, name="second")
    assert [ask(control, a, "environ", "OVERLORD_TEST_OF_CONTROL") for a in (first, second)] == [
        "first",
        None,
    ]


def test_what_the_fork_server_loads_starts_no_thread() -> None:
    code = (
        f"import threading\nfor name in {PRELOAD!r}:\n    __import__(name)\nassert "
        "threading.active_count() == 1, threading.enumerate()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.returncode == 0, done.stderr


def test_an_actor_of_another_system_of_processes_is_neither_called_nor_killed(
    control: LaunchedActorSystem,
) -> None:
    actor = control.spawn(Worker, name="worker")
    with process_actors() as other:
        for use in (lambda: other.call(actor, "echo", 1), lambda: other.kill(actor)):
            with pytest.raises(OverlordError, match="got one of another"):
                use()
        assert other.pid_here(actor) == 0
    assert (ask(control, actor, "echo", 1), control.pid_here(actor)) == (1, actor.pid)


def test_shutdown_from_a_callback_is_refused(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    faults: list[BaseException] = []
    done = threading.Event()

    def stop(*_: object) -> None:
        try:
            control.shutdown(1.0)
        except OverlordError as e:
            faults.append(e)
        done.set()

    control.on_death(actor, stop)
    control.kill(actor)
    assert done.wait(SOON_S)
    assert "call it from another thread" in str(faults[0])


def test_the_socket_is_not_passed_on_to_other_processes(control: LaunchedActorSystem) -> None:
    actor = control.spawn(Worker, name="worker")
    ask(control, actor, "echo", 1)
    assert not socket_to_actor(actor).get_inheritable()


def test_a_process_that_another_thread_has_closed_is_over_for_who_joins_it() -> None:
    """Python joins all children at the end of a program. After a second Ctrl-C it does so while the
    actor system closes them.
    """
    child = forkserver.process(target=os.getpid)
    child.start()
    child.join(WAIT_S)
    child.close()
    child.join()
    living = forkserver.process(target=time.sleep, args=(WAIT_S,))
    with pytest.raises(AssertionError, match="can only join a started process"):
        living.join()
    living.start()
    with pytest.raises(ValueError, match="Cannot close a process while it is still running"):
        living.close()
    living.kill()
    living.join(WAIT_S)
    assert living.exitcode == -signal.SIGKILL
