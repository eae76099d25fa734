"""CPU and memory of all descendants of this process.

Processes of Ray leave their parents. This program becomes the parent of orphans, so that it finds
all processes of a cell as long as it lives. For processes that ended, the CPU time of the last poll
counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from peers.measure import TICKS, pss_of

SUBREAPER = 36  # prctl: children of those that end come here
RANKS, HOSTS, LAUNCHER, SERVICES = "ranks", "hosts", "launcher", "services"
PARTS = (RANKS, HOSTS, LAUNCHER, SERVICES)
OF_RAY = (
    "gcs_server",
    "raylet/raylet",
    "dashboard",
    "monitor.py",
    "runtime_env/agent",
    "log_monitor",
    "ray/_private",
)
Key = tuple[int, int]  # pid, and when it started: numbers are used again


def adopt_orphans() -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(
            ctypes.get_errno(),
            "prctl(PR_SET_CHILD_SUBREAPER): processes of Ray could not be told from "
            "those of others",
        )


@dataclass(frozen=True, slots=True)
class Seen:
    """A process at one moment."""

    pid: int
    parent: int
    started: int
    cpu: float
    dead: bool  # ended, and nobody has asked for its exit code


def below_me() -> list[Seen]:
    """Return all descendants of this process, without itself."""
    children: dict[int, list[Seen]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (seen := _seen(int(entry))) is not None:
            children.setdefault(seen.parent, []).append(seen)
    found, todo = [], list(children.get(os.getpid(), ()))
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1].pid, ())
    return found


def _seen(pid: int) -> Seen | None:
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(4096)
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split(None, 21)  # the command's name may hold spaces
    return Seen(
        pid,
        int(fields[1]),
        int(fields[19]),
        (int(fields[11]) + int(fields[12])) / TICKS,
        fields[0] in b"ZX",
    )


@dataclass(slots=True)
class Ledger:
    """The resources that a cell has used.

    ``named``: processes whose part is known; the others are recognised by their command lines.
    """

    workers: bool = False  # whether Ray's idle workers do the job, between two tasks
    named: dict[int, str] = field(default_factory=dict)
    cpu: dict[Key, float] = field(default_factory=dict)
    part: dict[Key, str] = field(default_factory=dict)
    peak: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys((*PARTS, "all"), 0.0)
    )  # MB

    def look(self) -> list[Seen]:
        found = below_me()
        for seen in found:
            key = (seen.pid, seen.started)
            self.cpu[key] = seen.cpu
            if not seen.dead and (self.part.get(key) in (None, SERVICES) or seen.pid in self.named):
                self.part[key] = self._part(seen.pid)
        return found

    def _part(self, pid: int) -> str:
        if pid in self.named:
            return self.named[pid]
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            return LAUNCHER
        if command.startswith("ray::IDLE") or "default_worker.py" in command:
            return HOSTS if self.workers else SERVICES
        if command.startswith("ray::"):
            return HOSTS
        return SERVICES if any(word in command for word in OF_RAY) else LAUNCHER

    def total(self, part: str | None = None) -> float:
        """Return the CPU seconds until the last poll."""
        return sum(
            cpu
            for key, cpu in self.cpu.items()
            if part is None or self.part.get(key, LAUNCHER) == part
        )

    def look_at_memory(self) -> None:
        now = dict.fromkeys((*PARTS, "all"), 0.0)
        for seen in self.look():
            mb = pss_of(seen.pid) / 2**20
            now[self.part.get((seen.pid, seen.started), LAUNCHER)] += mb
            now["all"] += mb
        self.peak = {part: max(mb, now[part]) for part, mb in self.peak.items()}

    def by_part(self) -> Mapping[str, float]:
        return {part: self.total(part) for part in PARTS}


def living() -> list[Seen]:
    return [seen for seen in below_me() if not seen.dead]


def bury() -> None:
    """Reap all children of this process that ended, orphans included."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_all(limit_s: float) -> None:
    """Kill each process by its id, until none is left."""
    deadline = time.monotonic() + limit_s
    while (left := living()) and time.monotonic() < deadline:
        for seen in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(seen.pid, signal.SIGKILL)
        time.sleep(0.05)
        bury()
    bury()
