"""Run one cell of benchmarks/cluster.py in fresh processes.

It runs at full speed, idle, and at the pace of a trainer.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from peers.ledger import HOSTS, LAUNCHER, RANKS, Ledger, bury, end_all, living
from peers.line import PACE, REST, RUN, WARM_SHARE
from peers.measure import busy_seconds
from peers.work import Work

HERE = Path(__file__).resolve().parents[1]
EMBEDDED = ("bare", "overlord")
RAY_DATA = ("ray-data", "ray-data-list")
LOOK_S, MEMORY_S = (
    0.4,
    2.0,
)  # between two looks at CPU and memory: looking takes CPU too, and that of a cell waits for it
SETTLE_S, SETTLED = (
    8.0,
    0.25,
)  # at most so long until read-ahead is filled and less than so many cores work
CLOSE_S, KILL_S = 15.0, 10.0
PACED_STEPS = 8


class CellFailed(RuntimeError):
    """A cell ended early or did not end; the message has the end of its stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The time limits of a cell, in seconds."""

    start_s: float = 120.0
    run_s: float = 12.0  # from the first step of all ranks on; who is slower delivers fewer tokens
    idle_s: float = 3.0
    every_s: float = 0.5  # a step, at a trainer's pace


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements of one run of one cell."""

    peer: str
    job: str
    n_sources: int
    ranks: int
    processes: int
    tokens: int
    steady_tokens: int
    steady_s: float
    steady_cpu: dict[str, float]  # seconds, by part
    whole_cpu_s: float
    start_cpu_s: float
    cluster_s: float  # of the first step: a cluster to be there
    first_s: float  # from launch to the first step of the last rank
    pss_mb: dict[str, float]  # highest seen, by part and in all
    idle_cores: float
    idle_parts: dict[str, float]
    settled: bool  # at rest; else that is read-ahead
    waits: list[float]  # of all ranks, step by step, at a trainer's pace
    late: bool  # it could not keep that pace
    ahead: int | None  # least steps that were planned and not yet taken, at that pace
    left: int  # processes that were there after it was closed
    others_cores: float

    @property
    def cpu(self) -> float:
        """CPU seconds per million tokens in the steady part."""
        return sum(self.steady_cpu.values()) / self.steady_tokens * 1e6

    @property
    def whole(self) -> float:
        return self.whole_cpu_s / self.tokens * 1e6

    def share(self, part: str) -> float:
        return self.steady_cpu[part] / max(1e-9, sum(self.steady_cpu.values()))

    @property
    def speed(self) -> float:
        return self.steady_tokens / self.steady_s / 1e6

    @property
    def wait_ms(self) -> tuple[float, float] | None:
        return (statistics.median(self.waits) * 1e3, max(self.waits) * 1e3) if self.waits else None


@dataclass(slots=True)
class Said:
    """The messages of one process so far."""

    name: str = ""
    pid: int = 0
    rest: bytes = b""
    facts: dict[str, Any] = field(default_factory=dict)
    first_at: float = 0.0
    waits: list[float] = field(default_factory=list)

    @property
    def is_rank(self) -> bool:
        return self.name.startswith("rank/") or self.name == "all"


@dataclass(frozen=True, slots=True)
class Moment:
    at: float
    tokens: int
    cpu: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.cpu.values())


def run_cell(work: Work, limits: Limits) -> Outcome:
    with (
        tempfile.TemporaryDirectory(prefix="cell-") as folder,
        open(Path(folder) / "errors", "w+") as errors,
    ):
        cell = _Cell(work, limits, Path(folder), errors)
        try:
            return cell.measured()
        finally:
            cell.listener.close()
            end_all(KILL_S)


class _Cell:
    """The processes of a running cell."""

    def __init__(self, work: Work, limits: Limits, folder: Path, errors: Any):
        self.limits, self.folder, self.errors = limits, folder, errors
        self.embedded = work.peer in EMBEDDED
        self.work = replace(work, processes=1 if self.embedded else work.ranks)
        self.ledger = Ledger(workers=work.peer in RAY_DATA)
        self.listener = socket.socket(socket.AF_UNIX)
        self.path = str(folder / "line")
        self.listener.bind(self.path)
        self.listener.listen(64)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ, None)
        self.said: dict[socket.socket, Said] = {}
        self.children: list[subprocess.Popen[bytes]] = []
        self.memory_at = self.look_at = 0.0  # when to look next

    # the run

    def measured(self) -> Outcome:
        self._start()
        self._until(
            lambda: len(self._heard("ready")) == len(self.children),
            self.limits.start_s,
            "to import",
        )
        self.ledger.peak = dict.fromkeys(self.ledger.peak, 0.0)  # imports count for nobody
        go, busy, spent = self._moment(), busy_seconds(), time.process_time()
        server = self._server()
        self._tell(server, "go")
        cluster_at = self._connect(server) if not self.embedded else go.at
        self._until(lambda: self._all_have("steps"), self.limits.start_s, "the first step")
        first = self._moment()
        deadline = first.at + self.limits.run_s
        warm = self._reach(WARM_SHARE, first.at + WARM_SHARE * self.limits.run_s)
        end = self._reach(1.0, deadline)
        if end.tokens == warm.tokens:
            self._fail(f"no step in {end.at - warm.at:.0f} s")
        self.ledger.look_at_memory()
        processes, busy = len(living()), busy_seconds() - busy - (time.process_time() - spent)
        idle, settled = (
            self._idle() if self.work.peer != "bare" else (dict.fromkeys(end.cpu, 0.0), True)
        )
        waits, late, ahead = self._paced(server) if self.work.peer != "bare" else ([], False, None)
        return Outcome(
            peer=self.work.peer,
            job=self.work.job,
            n_sources=self.work.n_sources,
            ranks=self.work.ranks,
            processes=processes,
            tokens=end.tokens,
            steady_tokens=end.tokens - warm.tokens,
            steady_s=end.at - warm.at,
            steady_cpu={part: end.cpu[part] - warm.cpu[part] for part in end.cpu},
            whole_cpu_s=end.total - go.total,
            start_cpu_s=first.total - go.total,
            cluster_s=cluster_at - go.at,
            first_s=max(s.first_at for s in self._ranks()) - go.at,
            pss_mb=dict(self.ledger.peak),
            idle_cores=sum(idle.values()),
            idle_parts=idle,
            settled=settled,
            waits=waits,
            late=late,
            ahead=ahead,
            left=self._close(server),
            others_cores=max(0.0, busy - (end.total - go.total)) / (end.at - go.at),
        )

    def _start(self) -> None:
        if self.embedded:
            return self._run("peers.cluster_sides", "all", self.path, self._work())
        if self.work.peer in RAY_DATA:
            return self._run("peers.ray_data", self.path, self._work(), str(self.folder))
        self._run("peers.cluster_sides", "server", self.path, self._work())
        for rank in range(self.work.ranks):
            self._run("peers.cluster_sides", "rank", self.path, self._work(rank))

    def _run(self, module: str, *arguments: str) -> None:
        # One thread each in libraries that would otherwise start one per core; an empty cache,
        # where Overlord keeps its index of files.
        single = {
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        paths = os.pathsep.join([str(HERE), str(HERE.parent / "src")])
        environment = {
            **os.environ,
            **single,
            "PYTHONPATH": paths,
            "OVERLORD_CACHE": str(self.folder / "cache"),
        }
        command = [sys.executable, "-m", module, *arguments]
        self.children.append(
            subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                env=environment,
                cwd=HERE,
            )
        )

    def _work(self, rank: int = 0) -> str:
        return json.dumps(asdict(replace(self.work, rank=rank)))

    def _connect(self, server: socket.socket) -> float:
        """Wait until trainers can request steps; return when the cluster was ready."""
        self._until(lambda: "serving" in self.said[server].facts, self.limits.start_s, "the launch")
        facts = self.said[server].facts
        self.ledger.named |= dict.fromkeys(facts["hosts"], HOSTS)
        if self.work.peer not in RAY_DATA:
            for line in self._rank_lines():
                self._tell(line, facts["serving"])
        self._until(lambda: len(self._ranks()) == self.work.ranks, self.limits.start_s, "all ranks")
        return float(facts["cluster"])

    def _reach(self, share: float, deadline: float) -> Moment:
        while self._tokens() < share * self.work.tokens and time.monotonic() < deadline:
            self._listen(min(LOOK_S, max(0.0, deadline - time.monotonic())))
        return self._moment()

    def _idle(self) -> tuple[dict[str, float], bool]:
        """Return the busy CPU cores by part while no step is requested.

        Also return whether read-ahead is done.
        """
        self._tell_ranks([REST, 0.0])
        before, until = self._moment(), time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            self._wait(1.0)
            now = self._moment()
            if (now.total - before.total) / (now.at - before.at) < SETTLED:
                break
            before = now
        start = self._moment()
        self._wait(self.limits.idle_s)
        end = self._moment()
        cores = {part: (end.cpu[part] - start.cpu[part]) / (end.at - start.at) for part in end.cpu}
        return cores, sum(cores.values()) < SETTLED

    def _paced(self, server: socket.socket) -> tuple[list[float], bool, int | None]:
        """Return the waits of trainers that request steps at an interval, without the first."""
        for said in self._ranks():
            said.waits.clear()
        self._tell_ranks([PACE, self.limits.every_s])
        until, ahead = time.monotonic() + self.limits.every_s * PACED_STEPS * 1.5, []
        while time.monotonic() < until and any(len(s.waits) <= PACED_STEPS for s in self._ranks()):
            self._wait(self.limits.every_s)
            if not self.embedded and (found := self._asked(server)) is not None:
                ahead.append(found)
        self._tell_ranks([REST, 0.0])
        late = any(len(s.waits) <= PACED_STEPS for s in self._ranks())
        return (
            [wait for s in self._ranks() for wait in s.waits[1 : 1 + PACED_STEPS]],
            late,
            min(ahead, default=None),
        )

    def _asked(self, server: socket.socket) -> int | None:
        self.said[server].facts.pop("ahead", None)
        self._tell(server, "look")
        self._until(lambda: "ahead" in self.said[server].facts, self.limits.start_s, "figures")
        found: int | None = self.said[server].facts["ahead"]
        return found

    def _close(self, server: socket.socket) -> int:
        """Close trainers, then the launching process; return the remaining processes."""
        if self.embedded:
            return 0
        for child in self.children[1:]:
            child.kill()
            child.wait()
        self._tell(server, "end")
        try:
            self.children[0].wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            return len(living())
        time.sleep(0.5)
        bury()
        return len(living())

    # who speaks

    def _server(self) -> socket.socket:
        return next(line for line, said in self.said.items() if said.name in ("server", "all"))

    def _ranks(self) -> list[Said]:
        return [said for said in self.said.values() if said.is_rank]

    def _rank_lines(self) -> list[socket.socket]:
        return [line for line, said in self.said.items() if said.is_rank]

    def _heard(self, fact: str) -> list[Said]:
        return [said for said in self.said.values() if fact in said.facts]

    def _all_have(self, fact: str) -> bool:
        return all(fact in said.facts for said in self._ranks())

    def _tokens(self) -> int:
        return sum(said.facts.get("tokens", 0) for said in self._ranks())

    def _tell(self, line: socket.socket, what: Any) -> None:
        line.sendall(json.dumps(what).encode() + b"\n")

    def _tell_ranks(self, what: Any) -> None:
        for line in self._rank_lines():
            self._tell(line, what)

    def _moment(self) -> Moment:
        self.ledger.look()
        return Moment(time.monotonic(), self._tokens(), dict(self.ledger.by_part()))

    # listening

    def _until(self, done: Callable[[], bool], limit_s: float, what: str) -> None:
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                self._fail(f"{what}: not within {limit_s:.0f} s")
            self._listen(LOOK_S)

    def _wait(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._listen(min(left, LOOK_S))

    def _listen(self, within_s: float) -> None:
        """Receive messages, and record CPU and memory: processes that end are not visible later."""
        now = time.monotonic()
        if now >= self.memory_at:
            self.ledger.look_at_memory()
            self.memory_at, self.look_at = time.monotonic() + MEMORY_S, time.monotonic() + LOOK_S
        elif now >= self.look_at:
            self.ledger.look()
            self.look_at = time.monotonic() + LOOK_S
        for key, _ in self.selector.select(within_s):
            if key.fileobj is self.listener:
                line = self.listener.accept()[0]
                self.said[line] = Said()
                self.selector.register(line, selectors.EVENT_READ, None)
            else:
                self._read(key.fileobj)
        if any(child.poll() is not None for child in self.children):
            self._fail("a process ended early")

    def _read(self, line: Any) -> None:
        said = self.said[line]
        if not (data := line.recv(65536)):
            self._fail(f"{said.name} hung up")
        *whole, said.rest = (said.rest + data).split(b"\n")
        for fields in map(json.loads, whole):
            said.name, said.pid = fields.get("hello", said.name), fields.get("pid", said.pid)
            said.facts |= fields
            self.ledger.named[said.pid] = RANKS if said.is_rank else LAUNCHER
            if "failed" in fields or "ended" in fields:
                self._fail(f"{said.name}: {fields.get('failed', 'ran out of data')}")
            if fields.get("steps") == 1:
                said.first_at = time.monotonic()
            if fields.get("doing") == PACE:
                said.waits.append(fields["waited"])

    def _fail(self, what: str) -> None:
        self.errors.flush()
        self.errors.seek(0)
        w = self.work
        raise CellFailed(
            f"{w.peer}, {w.job}, {w.n_sources} sources, {w.ranks} ranks: "
            f"{what}\n{self.errors.read()[-3000:]}"
        )


__all__ = ["EMBEDDED", "RAY_DATA", "RUN", "CellFailed", "Limits", "Outcome", "run_cell"]
