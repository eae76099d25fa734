"""Run one cell in fresh processes and compute its measurements from their marks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from peers import table
from peers.measure import busy_seconds, descendants, pss_bytes
from peers.table import DRIVER, PEERS, RANK
from peers.work import Work

HERE = Path(__file__).resolve().parents[1]
PROCESS_PER_RANK = tuple(name for name, peer in PEERS.items() if peer.processes == RANK)
# a process per rank too, that only receives; another one serves them
SERVED = tuple(name for name, peer in PEERS.items() if peer.processes == table.SERVED)
SAMPLE_S = (
    0.25  # between two looks at memory; each look costs the cell a short lock on its address space
)
TRACKER_S = 5.0  # in which a tracker of shared memory has removed what a killed cell left
LAST = "end"


class CellFailed(RuntimeError):
    """A cell ended early or did not end; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The cost of one run of one cell, over all its processes."""

    peer: str
    job: str
    n_sources: int
    ranks: int
    workers: int  # of a rank
    processes: int  # that lived at the end, all counted
    tokens: int  # delivered in all
    steady_tokens: int  # of these, in the steady part
    steady_cpu_s: float
    steady_wall_s: float
    startup_cpu_s: float  # until every rank has its first step; imports left out
    first_step_s: float
    cpu_s: float  # of everything: start-up, warming up and the steady part
    wall_s: float
    pss_mb: float  # highest seen
    idle_pss_mb: (
        float  # of the ranks after imports, before anything was opened; other processes count whole
    )
    clients_pss_mb: float  # highest seen over the ranks alone, where they only receive
    clients_idle_mb: float
    bytes_per_token: float
    tokens_per_microbatch: float
    others_cores: float  # what everyone else on the machine used meanwhile, this program among them

    @property
    def steady_cpu(self) -> float:
        """CPU seconds per million tokens in the steady part, from which ratios are computed."""
        return self.steady_cpu_s / self.steady_tokens * 1e6

    @property
    def whole_cpu(self) -> float:
        return self.cpu_s / self.tokens * 1e6

    @property
    def whole_speed(self) -> float:
        """Million tokens per second of wall time over the whole run, start-up included."""
        return self.tokens / self.wall_s / 1e6

    @property
    def millions(self) -> float:
        return self.tokens / 1e6

    @property
    def speed(self) -> float:
        """Million tokens per second of wall time in the steady part."""
        return self.steady_tokens / self.steady_wall_s / 1e6

    @property
    def over_idle_mb(self) -> float:
        return self.pss_mb - self.idle_pss_mb


def run_cell(work: Work, timeout_s: float) -> Figures:
    """Run the processes of a cell concurrently, sample their memory, and kill them at the end."""
    processes = work.ranks if work.peer in (*PROCESS_PER_RANK, *SERVED) else 1
    works = [replace(work, rank=rank, processes=processes) for rank in range(processes)]
    # An empty cache each time: Overlord keeps its index of the files there, and no peer has one to
    # start from.
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryDirectory() as cache:
        children: list[subprocess.Popen] = []
        try:
            if work.peer in SERVED:
                children.append(_start("peers.server", work, errors, cache))
                works = [replace(w, server=children[0].pid) for w in works]
            module = module_of(work)
            for w in works:
                children.append(_start(module, w, errors, cache))
            return _Cell(work, children, errors, time.monotonic() + timeout_s).observe()
        finally:
            for child in children:
                _kill_group(child)


def module_of(work: Work) -> str:
    """Return the program of the processes that consume."""
    own = PEERS[work.peer].processes in (DRIVER, table.SERVED)
    return PEERS[work.peer].module if own else "peers.cell"


def conversion(work: Work, timeout_s: float) -> None:
    """Write the corpus in the format of a loader, unless it is there."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "PYTHONWARNINGS": "ignore"}
    command = [work.python or sys.executable, "-m", "peers.conversion", json.dumps(asdict(work))]
    done = subprocess.run(
        command,
        env=environment,
        cwd=HERE,
        timeout=timeout_s,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise CellFailed(f"{work.peer}: its data could not be made: {lines[-1]}")


def _start(module: str, work: Work, errors: Any, cache: str) -> subprocess.Popen:
    # One thread each in libraries that would otherwise start one per core: what is counted is work,
    # not idle spinning.
    single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
    folders = {"PYTHONPATH": paths, "OVERLORD_CACHE": cache, "CELL_FOLDER": cache}
    environment = {**os.environ, **single, **folders}
    if (
        work.arenas and module != "peers.connected"
    ):  # trainers that only receive are not part of the question
        environment["MALLOC_ARENA_MAX"] = str(work.arenas)
    command = [work.python or sys.executable, "-m", module, json.dumps(asdict(work))]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environment,
        cwd=HERE,
        start_new_session=True,
    )


class _Cell:
    """The processes of a running cell; a server is the first of them."""

    def __init__(self, work: Work, children: list[subprocess.Popen], errors: Any, deadline: float):
        self.work, self.served = work, work.peer in SERVED
        self.children, self.ranks = children, children[self.served :]
        self.lines = _Lines(work, children, errors, deadline)
        self.peak = self.clients_peak = 0

    def observe(self) -> Figures:
        self.lines.wait_for(lambda said: all(any("ready" in line for line in s) for s in said))
        self.look()
        clients_idle = self.clients_peak
        idle = clients_idle if self.served else self.idle()
        if (
            self.served
        ):  # their clock starts first, so that they have seen what the server used before its own
            self.tell(self.ranks, "go")
            self.wait_for_marks("start")
        go, busy = time.monotonic(), busy_seconds()
        self.tell(self.children[:1] if self.served else self.ranks, "go")
        if self.served:
            self.lines.wait_for(lambda said: any("serving" in line for line in said[0]), self.look)
            self.tell(
                self.ranks,
                json.dumps(
                    next(line["serving"] for line in self.lines.said[0] if "serving" in line)
                ),
            )
        self.wait_for_marks(LAST)
        busy = busy_seconds() - busy
        n = sum(len(descendants(child.pid)) for child in self.children)
        memory = {
            "pss": self.peak,
            "idle_pss": idle,
            "clients_pss": self.clients_peak,
            "clients_idle": clients_idle,
        }
        return _figures(
            self.work,
            self.marks(),
            go,
            n,
            busy,
            {f"{name}_mb": nbytes / 2**20 for name, nbytes in memory.items()},
        )

    def idle(self) -> int:
        """Return the memory of the ranks after their imports; a driver says which they are."""
        said = [line["ranks"] for lines in self.lines.said for line in lines if "ranks" in line]
        return pss_bytes(said[0]) if said else self.peak

    def marks(self) -> list[dict[str, Any]]:
        return [
            {line["at"]: line for line in said if "at" in line}
            for said in self.lines.said[self.served :]
        ]

    def wait_for_marks(self, name: str) -> None:
        self.lines.wait_for(lambda _: all(name in marks for marks in self.marks()), self.look)

    def look(self) -> None:
        """Sample the memory."""
        clients = pss_bytes(child.pid for child in self.ranks)
        self.peak = max(
            self.peak, clients + (pss_bytes([self.children[0].pid]) if self.served else 0)
        )
        self.clients_peak = max(self.clients_peak, clients if self.served else 0)

    def tell(self, children: list[subprocess.Popen], line: str) -> None:
        for child in children:
            child.stdin.write(line.encode() + b"\n")
            child.stdin.flush()


class _Lines:
    """Reads the lines of JSON of all processes of a cell."""

    def __init__(self, work: Work, children: list[subprocess.Popen], errors: Any, deadline: float):
        self.work, self.children, self.errors, self.deadline = work, children, errors, deadline
        self.said: list[list[dict]] = [[] for _ in children]
        self.rest = [b"" for _ in children]
        self.selector = selectors.DefaultSelector()
        for i, child in enumerate(children):
            self.selector.register(child.stdout, selectors.EVENT_READ, i)

    def wait_for(
        self, done: Callable[[list[list[dict]]], bool], look: Callable[[], None] = lambda: None
    ) -> None:
        """Read until ``done(said)``; call ``look()`` every SAMPLE_S, and at the end."""
        next_look = 0.0
        while not done(self.said):
            now = time.monotonic()
            if now >= next_look:
                look()
                next_look = time.monotonic() + SAMPLE_S
            if now > self.deadline:
                self.fail("ran past its time limit")
            for key, _ in self.selector.select(timeout=max(0.0, next_look - now)):
                self.read(key.data, key.fileobj)
        look()

    def read(self, i: int, stream: Any) -> None:
        data = os.read(stream.fileno(), 65536)
        if not data:
            self.fail(f"process {i} ended early")
        *whole, self.rest[i] = (self.rest[i] + data).split(b"\n")
        self.said[i] += [json.loads(line) for line in whole if line.startswith(b"{")]

    def fail(self, what: str) -> None:
        self.errors.seek(0)
        w = self.work
        raise CellFailed(
            f"{w.peer}, {w.job}, {w.n_sources} sources: {what}\n{self.errors.read()[-3000:]}"
        )


def _figures(
    work: Work,
    marks: list[dict[str, Any]],
    go: float,
    processes: int,
    busy: float,
    memory: Mapping[str, float],
) -> Figures:
    def total(key: str, since: str, until: str) -> float:
        return sum(m[until][key] - m[since][key] for m in marks)

    tokens, cpu = total("tokens", "start", LAST), total("cpu", "start", LAST)
    wall = max(m[LAST]["wall"] for m in marks) - go
    return Figures(
        peer=work.label,
        job=work.job,
        n_sources=work.n_sources,
        ranks=work.ranks,
        workers=work.workers,
        processes=processes,
        tokens=int(tokens),
        steady_tokens=int(total("tokens", "warm", LAST)),
        steady_cpu_s=total("cpu", "warm", LAST),
        steady_wall_s=max(m[LAST]["wall"] for m in marks) - min(m["warm"]["wall"] for m in marks),
        startup_cpu_s=total("cpu", "start", "first"),
        first_step_s=max(m["first"]["wall"] for m in marks) - go,
        cpu_s=cpu,
        wall_s=wall,
        **memory,
        bytes_per_token=total("nbytes", "start", LAST) / tokens,
        tokens_per_microbatch=tokens / total("microbatches", "start", LAST),
        others_cores=max(0.0, busy - cpu) / wall,
    )


def _kill_group(child: subprocess.Popen) -> None:
    """Kill a cell and its workers: the cell leads a process session of its own.

    Workers of a driver may have sessions of their own; they are among its descendants. Python's
    trackers of shared memory end by themselves, after they have removed what killed processes left.
    """
    below = descendants(child.pid)
    trackers = [pid for pid in below if _is_tracker(pid)]
    for pid in set(below) - set(trackers):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + TRACKER_S
    while any(map(_is_tracker, trackers)) and time.monotonic() < deadline:
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for stream in (child.stdin, child.stdout):
        if stream:
            stream.close()


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False
