"""CPU and memory of a process and its descendants, from /proc."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """Return user and system time of a process, its descendants, and its reaped children."""
    return sum(_own_cpu(p) for p in descendants(pid))


def pss_bytes(pids: Iterable[int]) -> int:
    """Return the PSS over processes and their descendants: shared pages count once in the sum."""
    return sum(pss_of(p) for pid in pids for p in descendants(pid))


def read_bytes(pid: int, *, below: bool = False) -> int:
    """Return the bytes that a process and its descendants have read from files and pipes.

    ``below``: only those of the descendants.
    """
    return sum(_own_read(p) for p in descendants(pid)[below:])


def descendants(pid: int) -> list[int]:
    """Return a process and all its living descendants."""
    found, todo = [], [pid]
    while todo:
        found.append(todo.pop())
        for task in _tasks(found[-1]):
            with contextlib.suppress(
                FileNotFoundError, ProcessLookupError
            ):  # a thread that ended meanwhile: others may have children
                todo += [int(child) for child in (task / "children").read_text().split()]
    return found


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except (FileNotFoundError, ProcessLookupError):
        return []


def _own_cpu(pid: int) -> float:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    fields = text[text.rindex(")") + 2 :].split()  # the command's name may hold spaces
    return (
        sum(int(fields[i]) for i in (11, 12, 13, 14)) / TICKS
    )  # utime, stime, and both of children waited for


def pss_of(pid: int) -> int:
    """Return the PSS of one process alone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


def _own_read(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/io").read_text().split("rchar: ")[1].split()[0])
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0


def busy_seconds() -> float:
    """Return the CPU seconds of the whole machine since its start."""
    user, nice, system, _idle, _iowait, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / TICKS


def wait_for_idle(limit_s: float, below: float = 0.15, window_s: float = 1.0) -> None:
    """Wait until the machine uses less than ``below`` CPU cores, at most until the limit."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        start, busy = time.monotonic(), busy_seconds()
        time.sleep(window_s)
        if (busy_seconds() - busy) / (time.monotonic() - start) < below:
            return
