"""What there is to use: cores and memory of this machine, or what is left of them by the group that
this process runs in.

A container sees the whole machine in ``/proc``; what it may use stands in the files of its control
group (cgroup), of version 1 or 2. Whoever goes by the machine there is throttled, or killed.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")  # of the system's files; tests have their own


def cores(root: Path | None = None) -> int:
    """Cores that this process may keep busy; a part of one counts as one."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([here, *(math.ceil(quota) for quota in _quotas(root or ROOT))]))


def memory_bytes(root: Path | None = None) -> int:
    """Bytes that this process and those beside it in its group may hold."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    said = [
        _read(f / name)
        for f in _folders(root or ROOT, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
    ]
    return min(
        [
            machine,
            *(
                int(words[0])
                for words in said
                if words and words[0].isdecimal() and int(words[0]) > 0
            ),
        ]
    )


def _quotas(root: Path) -> Iterator[float]:
    """Cores by each group that has a bound: microseconds of work over those of a period."""
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max") or _read(folder / "cpu.cfs_quota_us") + _read(
            folder / "cpu.cfs_period_us"
        )
        if (
            len(words) == 2
            and all(word.isdecimal() for word in words)
            and int(words[0])
            and int(words[1])
        ):
            yield int(words[0]) / int(words[1])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Those of this process's group and of all above it, whose bounds count too. Where a container
    was given a view of its own group alone, the path that the system names is not there, and the
    top is its group.
    """
    mounts = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        named, _, path = rest.partition(":")
        if named and controller not in named.split(","):
            continue
        for top in (mounts / controller, mounts / named) if named else (mounts, mounts / "unified"):
            group = Path(path.strip("/"))
            yield from (top / part for part in (group, *group.parents))


def _read(path: Path) -> list[str]:
    """The words of the first line."""
    return next((line.split() for line in _lines(path)), [])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except (OSError, ValueError):  # another version, another system, or not for us to see
        return []
