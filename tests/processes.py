"""Helpers for tests of the process runtime: recorded runs, child programs, and checks for leftover
processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import overlord as ov
from overlord.dryrun.virtual_run import Add
from overlord.errors import DataStall
from overlord.messages.control import SetMixture, Skip

ROOT = Path(__file__).resolve().parent.parent
# The runtime of workers in tests that do not choose one: `make ray` runs them on Ray.
WORKER_RUNTIME = os.environ.get("OVERLORD_TEST_RUNTIME", "process")
# The reported reason of workers that os.kill hit: Ray does not distinguish a signal from a crash.
KILLED = (
    "killed by signal 9"
    if WORKER_RUNTIME == "process"
    else "its process died silently: it was killed, crashed or ran out of memory"
)
EXITED = "exit code 3" if WORKER_RUNTIME == "process" else KILLED
ASKED = (
    "killed by signal 9" if WORKER_RUNTIME == "process" else "killed"
)  # the reason after session.kill
RUNTIMES = ["local", WORKER_RUNTIME]
# The limit of every wait; a test that passes never waits so long. A heavily loaded machine may need
# more for starts of Ray.
WAIT_S = float(os.environ.get("OVERLORD_TEST_WAIT_S", "30"))


def written(step: ov.Step) -> tuple[Any, ...]:
    """Return everything that a trainer can see of a step."""
    both = (step, step.encoder)
    arrays, encoder = (
        [[(k, str(mb[k].dtype), mb[k].shape, mb[k].tobytes()) for k in sorted(mb)] for mb in part]
        for part in both
    )
    return (
        step.step,
        step.plan_digest,
        step.global_valid_tokens,
        arrays,
        [[(*p, k) for p, k in zip(mb.samples, mb.begins.tolist(), strict=True)] for mb in step],
        encoder,
    )


def plain(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state without reports: those of the last steps may or may not have arrived."""
    return {key: value for key, value in json.loads(json.dumps(state)).items() if key != "reports"}


@dataclass
class Played:
    """The steps of every rank, the states after them, and the error at the end."""

    steps: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    states: list[dict[str, Any]] = field(default_factory=list)
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    @property
    def numbers(self) -> list[list[int]]:
        return [[step[0] for step in steps] for steps in self.steps.values()]

    def behind(self, step: int) -> dict[int, list[tuple[Any, ...]]]:
        return {rank: [s for s in steps if s[0] > step] for rank, steps in self.steps.items()}


def play(
    session: ov.Session,
    *,
    ranks: list[int] | None = None,
    steps: int | None = None,
    report: Callable[[int, int], Any] | None = None,
    act: Mapping[int, Callable[[ov.Session], None]] | None = None,
) -> Played:
    """Train on all ranks in turn. ``act[k]`` is called after k steps."""
    wanted = list(range(session.job.place.world_size)) if ranks is None else ranks
    clients = {rank: session.client(rank) for rank in wanted}
    done = Played(steps={rank: [] for rank in wanted})
    todo = dict(act or {})
    try:
        while steps is None or len(done.steps[wanted[0]]) < steps:
            if (now := todo.pop(len(done.steps[wanted[0]]), None)) is not None:
                now(session)
            for rank, client in clients.items():
                step = next(client)
                done.steps[rank].append(written(step))
                if report is not None and (said := report(rank, step.step)):
                    client.report(step.step, said)
            done.states.append(plain(clients[wanted[0]].state_dict()))
    except StopIteration:
        pass
    except Exception as error:
        done.error = repr(error)
    assert not todo, f"the run ended before steps {list(todo)}: {done.error}"
    done.quarantine = session.quarantine()
    return done


def run(
    job: ov.Job, runtime: str, *, said: list[Any] | None = None, resume: Any = None, **settings: Any
) -> Played:
    """Launch a job, apply the events ``said``, and train to the end."""
    ways = {
        key: settings.pop(key) for key in ("ranks", "steps", "report", "act") if key in settings
    }
    with launch(job, runtime, resume=resume, **settings) as session:
        for event in said or ():
            if isinstance(event, SetMixture):
                session.set_mixture(event.weights, at=event.at)
            elif isinstance(event, Skip):
                session.skip(event.steps)
            else:
                assert isinstance(event, Add)
                session.add_source(event.source, at=event.at, loaders=event.loaders)
        return play(session, **ways)


def launch(job: ov.Job, runtime: str = WORKER_RUNTIME, **options: Any) -> ov.Session:
    only = ("hosts", "constructor_hosts", "sources_per_host")
    if runtime not in ("process", "ray"):
        options = {key: value for key, value in options.items() if key not in only}
    return ov.launch(job, runtime=runtime, **{"check": True, "stall_limit_s": WAIT_S, **options})


# processes


def runs(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    return state_of(Path(f"/proc/{pid}/stat")) not in "ZX"


def state_of(stat: Path) -> str:
    """Return the state of a process or thread; X if it has exited, even while the file is read."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def command_of(pid: int | str) -> str:
    """Return the command line of a process; empty if it has exited."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def halt(pid: int, seconds: float = WAIT_S) -> None:
    """Stop a process and return when all its threads have stopped: ``os.kill`` returns before
    that.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + seconds
    while any(state_of(stat) not in "TtZX" for stat in Path(f"/proc/{pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline, f"process {pid} goes on"
        time.sleep(0.002)


def left_after(pids: list[int], seconds: float) -> list[int]:
    """Return the processes that still run after that time, or as soon as none does."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def workers_left(pids: list[int], seconds: float) -> list[int]:
    """Return the workers of a closed session that still run.

    On a shared cluster idle worker processes may wait for a worker of their name, so none are
    returned.
    """
    return left_after(pids, seconds) if WORKER_RUNTIME == "process" else []


def workers_of(session: ov.Session) -> dict[str, int]:
    """Return the worker processes of a session by name."""
    return {a["name"]: a["pid"] for a in session.metrics()["actors"] if a["role"] == "host"}


def heard(session: ov.Session, *, lost: Collection[str] = ()) -> dict[str, Any]:
    """Return metrics that contain all workers except lost ones.

    Metrics lack a worker that is blocked for longer than the poll waits.
    """

    def all_of(found: dict[str, Any]) -> bool:
        return all(
            a["state"] == "running"
            for a in found["actors"]
            if a["role"] == "host" and a["name"] not in lost
        )

    found: dict[str, Any] = until(lambda: m if all_of(m := session.metrics()) else None)
    return found


def but_for_late(err: str) -> str:
    """Return stderr of a program without messages about processes that were killed at its end.
    Processes have half a second to exit.
    """
    return "".join(line for line in err.splitlines(keepends=True) if "did not exit in" not in line)


def in_shared_memory() -> set[str]:
    """Return files in shared memory, except locks of Python, tensors of torch and the object store
    of Ray.
    """
    return {
        name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "torch_", "plasma"))
    }


def workers_lost(recoveries: list[dict[str, Any]], hit: set[str]) -> set[str]:
    """Return the recovered workers, except those that were not killed and were silent for too long:
    a busy machine may block one.
    """
    silent = ("it answered nothing for ", "its event loop was blocked for ")
    return {
        row["part"]
        for row in recoveries
        if row["part"] in hit or not row["reason"].startswith(silent)
    }


def until(what: Callable[[], Any], seconds: float = WAIT_S) -> Any:
    """Return the first true result; fail after that time."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)
    return found


def stalls_for(client: ov.Client, words: str, seconds: float = WAIT_S) -> None:
    """Check that the client gets no step and that its error contains ``words``.

    The words may come late: workers that the client polls, and does not wait for long, may be
    blocked for a moment.
    """
    deadline, said = time.monotonic() + seconds, ""
    while words not in said:
        assert time.monotonic() < deadline, f"expected {words!r}, got {said!r}"
        try:
            step = next(client)
        except DataStall as stall:
            said = str(stall)
        else:
            raise AssertionError(f"step {step.step} came")


class Program:
    """A Python program in a process group of its own, which communicates by lines."""

    def __init__(
        self, directory: Path, body: str, *, guarded: bool = True, name: str = "program.py"
    ):
        path = directory / name
        body = textwrap.dedent(body)
        main = (
            'if __name__ == "__main__":\n' + textwrap.indent("main()\n", "    ")
            if guarded
            else "main()\n"
        )
        path.write_text(body + "\n" + main)
        environ = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}",
            "OVERLORD_CACHE": str(directory / "cache"),
        }
        self.process = subprocess.Popen(
            [sys.executable, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ,
            start_new_session=True,
            cwd=directory,
        )
        self.pid = self.process.pid

    def line(self) -> str:
        """Return the next line of the program; fail with all its output if there is none."""
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        assert found, f"it ended: {self.end()}"
        return found.strip()

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def end(self, seconds: float = WAIT_S) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@contextmanager
def program(directory: Path, body: str, **settings: Any) -> Iterator[Program]:
    made = Program(directory, body, **settings)
    try:
        yield made
    finally:
        made.stop()
